//! Lifecycle hooks of a container: exec, HTTP GET, sleep.

use std::time::Duration;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Container, LifecycleHandler};

use super::probe::http;
use crate::runtime::Runtime;

/// Timeout of the CRI call for a hook without a limit, in seconds. 0 means no timeout.
const NO_LIMIT: i64 = 0;

/// The container whose hook runs.
pub(crate) struct Target<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) runtime: &'a dyn Runtime,
    pub(crate) container: &'a Container,
    pub(crate) id: &'a str,
    /// The pod's address, for handlers without a host.
    pub(crate) ip: Option<&'a String>,
}

/// The reason why a hook failed. The text does not contain the output of the command or server. The text appears in
/// events and statuses, and the output may contain secrets.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error("exec failed: {0}")]
    Exec(&'static str),
    #[error("command exited with {0}")]
    Exited(i32),
    #[error(transparent)]
    Http(#[from] http::HttpError),
    #[error("it did not end within {0:?}")]
    TimedOut(Duration),
    #[error("the handler has no action")]
    Empty,
}

/// Runs a hook to its end or its limit.
pub(crate) async fn run(
    target: &Target<'_>,
    handler: &LifecycleHandler,
    limit: Option<Duration>,
) -> Result<(), HookError> {
    let running = once(target, handler);
    match limit {
        None => running.await,
        Some(limit) => match tokio::time::timeout(limit, running).await {
            Ok(result) => result,
            Err(_elapsed) => Err(HookError::TimedOut(limit)),
        },
    }
}

async fn once(target: &Target<'_>, handler: &LifecycleHandler) -> Result<(), HookError> {
    if let Some(exec) = &handler.exec {
        return run_exec(target, exec.command.clone().unwrap_or_default()).await;
    }
    if let Some(get) = &handler.http_get {
        let ip = target.ip.map_or("127.0.0.1", String::as_str);
        let answer = http::get(http::Request::new(get, target.container, ip)?, target.namespace).await?;
        return answer.success().map_err(HookError::from);
    }
    if let Some(sleep) = &handler.sleep {
        let seconds = u64::try_from(sleep.seconds).unwrap_or_default();
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        return Ok(());
    }
    Err(HookError::Empty)
}

async fn run_exec(target: &Target<'_>, command: Vec<String>) -> Result<(), HookError> {
    let request =
        cri::ExecSyncRequest { container_id: target.id.to_owned(), cmd: command, timeout: NO_LIMIT };
    let answer = target.runtime.exec_sync(request).await.map_err(|error| HookError::Exec(error.kind()))?;
    match answer.exit_code {
        0 => Ok(()),
        code => Err(HookError::Exited(code)),
    }
}

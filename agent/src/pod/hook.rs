//! Lifecycle hooks of a container: exec, HTTP GET, sleep.

use std::time::Duration;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Container, LifecycleHandler};

use super::probe::http;
use crate::runtime::Runtime;

/// The longest that a hook without a limit of its own may take in the runtime: none.
const NO_LIMIT: i64 = 0;

/// Whose hook runs.
pub(crate) struct Target<'a> {
    pub(crate) runtime: &'a dyn Runtime,
    pub(crate) container: &'a Container,
    pub(crate) id: &'a str,
    /// The pod's address, for handlers that name no host.
    pub(crate) ip: Option<&'a String>,
}

/// Why a hook failed. Without the text of the command or server: it would be in events and statuses, and may hold
/// secrets.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error("exec failed: {0:?}")]
    Exec(tonic::Code),
    #[error("command exited with {0}")]
    Exited(i32),
    #[error(transparent)]
    Http(#[from] http::HttpError),
    #[error("it did not end within {0:?}")]
    TimedOut(Duration),
    #[error("the handler names nothing to do")]
    Empty,
}

/// Runs a hook to its end, or to the limit.
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
        let answer = http::get(http::Request::new(get, target.container, ip)?).await?;
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
    let answer = target.runtime.exec_sync(request).await.map_err(|status| HookError::Exec(status.code()))?;
    match answer.exit_code {
        0 => Ok(()),
        code => Err(HookError::Exited(code)),
    }
}

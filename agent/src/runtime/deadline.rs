//! Timeouts of calls to another runtime, and directories of logs that must exist before a call.

use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_proto::cri;
use tonic::{Response as Answer, Status};

use super::{RuntimeError, answer};

/// Timeout of a call without a timeout of its own: the kubelet's `runtimeRequestTimeout`.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// A request to another runtime.
pub(super) trait RemoteCall {
    /// Timeout of the call. None means no timeout.
    fn limit(&self) -> Option<Duration> {
        Some(CALL_TIMEOUT)
    }

    /// The directory of logs that must exist before the call.
    fn log_directory(&self) -> Option<PathBuf> {
        None
    }
}

/// The limit of a call in which the runtime itself may wait for `seconds`.
fn with_wait(seconds: i64) -> Option<Duration> {
    Some(CALL_TIMEOUT.saturating_add(Duration::from_secs(u64::try_from(seconds).unwrap_or_default())))
}

macro_rules! remote_calls {
    ($($request:ident),* $(,)?) => { $(impl RemoteCall for cri::$request {})* };
}

remote_calls!(
    StopPodSandboxRequest,
    RemovePodSandboxRequest,
    PodSandboxStatusRequest,
    ListPodSandboxRequest,
    ListPodSandboxStatsRequest,
    StartContainerRequest,
    RemoveContainerRequest,
    ContainerStatusRequest,
    ListContainersRequest,
    UpdateContainerResourcesRequest,
    ReopenContainerLogRequest,
    ContainerStatsRequest,
    ListContainerStatsRequest,
    ListMetricDescriptorsRequest,
    ListPodSandboxMetricsRequest,
    ExecRequest,
    AttachRequest,
    PortForwardRequest,
    ImageStatusRequest,
    ListImagesRequest,
    RemoveImageRequest,
    ImageFsInfoRequest,
);

impl RemoteCall for cri::RunPodSandboxRequest {
    /// Twice the limit, as in the kubelet: the runtime may pull the pause image first.
    fn limit(&self) -> Option<Duration> {
        Some(2 * CALL_TIMEOUT)
    }

    fn log_directory(&self) -> Option<PathBuf> {
        let directory = &self.config.as_ref()?.log_directory;
        (!directory.is_empty()).then(|| directory.into())
    }
}

impl RemoteCall for cri::CreateContainerRequest {
    /// The directory of the container's log files. The kubelet makes it, and CRI-O does not.
    fn log_directory(&self) -> Option<PathBuf> {
        let directory = Path::new(&self.sandbox_config.as_ref()?.log_directory);
        let log = directory.join(&self.config.as_ref()?.log_path);
        log.parent().filter(|parent| parent.is_absolute()).map(Path::to_owned)
    }
}

impl RemoteCall for cri::StopContainerRequest {
    fn limit(&self) -> Option<Duration> {
        with_wait(self.timeout)
    }
}

impl RemoteCall for cri::CheckpointContainerRequest {
    fn limit(&self) -> Option<Duration> {
        with_wait(self.timeout)
    }
}

impl RemoteCall for cri::ExecSyncRequest {
    /// A command without a timeout may run forever.
    fn limit(&self) -> Option<Duration> {
        if self.timeout > 0 { with_wait(self.timeout) } else { None }
    }
}

impl RemoteCall for cri::PullImageRequest {
    /// The runtime ends a pull without progress.
    fn limit(&self) -> Option<Duration> {
        None
    }
}

/// Makes the directory of logs that a request names.
pub(super) async fn make_log_directory(request: &impl RemoteCall) -> Result<(), RuntimeError> {
    let Some(directory) = request.log_directory() else { return Ok(()) };
    let failed = |error: std::io::Error| {
        Status::internal(format!("cannot create the log directory {}: {error}", directory.display()))
    };
    Ok(tokio::fs::create_dir_all(&directory).await.map_err(failed)?)
}

/// Ends a call with [`RuntimeError::DeadlineExceeded`] at its limit.
pub(super) async fn within<T>(
    limit: Option<Duration>,
    call: &str,
    running: impl Future<Output = Result<Answer<T>, Status>>,
) -> Result<T, RuntimeError> {
    let Some(limit) = limit else { return answer(running.await) };
    match tokio::time::timeout(limit, running).await {
        Ok(result) => answer(result),
        Err(_elapsed) => Err(RuntimeError::DeadlineExceeded(format!(
            "the runtime did not answer {call} within {} s",
            limit.as_secs()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_directory_of_a_containers_logs_exists_before_its_creation() {
        let directory = tempfile::tempdir().unwrap();
        let pod = directory.path().join("default_web_uid");
        let sandbox =
            cri::PodSandboxConfig { log_directory: pod.to_str().unwrap().to_owned(), ..Default::default() };
        let container = cri::ContainerConfig { log_path: "nginx/0.log".to_owned(), ..Default::default() };
        let request = cri::CreateContainerRequest {
            config: Some(container),
            sandbox_config: Some(sandbox),
            ..Default::default()
        };
        make_log_directory(&request).await.unwrap();
        assert!(pod.join("nginx").is_dir());
        make_log_directory(&cri::CreateContainerRequest::default()).await.unwrap();
    }

    #[tokio::test]
    async fn a_call_ends_at_its_limit() {
        let never = std::future::pending::<Result<Answer<()>, Status>>();
        let ended = within(Some(Duration::from_millis(1)), "status", never).await;
        assert!(matches!(ended, Err(RuntimeError::DeadlineExceeded(text)) if text.contains("status")));
        let exec = |timeout| cri::ExecSyncRequest { timeout, ..Default::default() }.limit();
        assert_eq!([exec(0), exec(5)], [None, Some(Duration::from_secs(125))]);
    }
}

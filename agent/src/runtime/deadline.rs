//! Timeouts of calls of a runtime.

use std::time::Duration;

use coracle_proto::cri;
use tonic::{Response as Answer, Status};

use super::{RuntimeError, answer};

/// Timeout of a call without a timeout of its own: the kubelet's `runtimeRequestTimeout`.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// Requests with a timeout. None: no timeout.
pub(super) trait Limited {
    fn limit(&self) -> Option<Duration> {
        Some(CALL_TIMEOUT)
    }
}

/// The limit of a call that waits `seconds` by itself.
fn with_wait(seconds: i64) -> Option<Duration> {
    Some(CALL_TIMEOUT.saturating_add(Duration::from_secs(u64::try_from(seconds).unwrap_or_default())))
}

macro_rules! limited {
    ($($request:ident),* $(,)?) => { $(impl Limited for cri::$request {})* };
}

limited!(
    StopPodSandboxRequest,
    RemovePodSandboxRequest,
    PodSandboxStatusRequest,
    ListPodSandboxRequest,
    ListPodSandboxStatsRequest,
    CreateContainerRequest,
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

impl Limited for cri::RunPodSandboxRequest {
    /// Twice the limit, as in the kubelet: the runtime may pull the pause image first.
    fn limit(&self) -> Option<Duration> {
        Some(2 * CALL_TIMEOUT)
    }
}

impl Limited for cri::StopContainerRequest {
    fn limit(&self) -> Option<Duration> {
        with_wait(self.timeout)
    }
}

impl Limited for cri::CheckpointContainerRequest {
    fn limit(&self) -> Option<Duration> {
        with_wait(self.timeout)
    }
}

impl Limited for cri::ExecSyncRequest {
    /// A command without a timeout may run forever.
    fn limit(&self) -> Option<Duration> {
        if self.timeout > 0 { with_wait(self.timeout) } else { None }
    }
}

impl Limited for cri::PullImageRequest {
    /// The runtime ends a pull without progress.
    fn limit(&self) -> Option<Duration> {
        None
    }
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
    async fn a_call_ends_at_its_limit() {
        let never = std::future::pending::<Result<Answer<()>, Status>>();
        let ended = within(Some(Duration::from_millis(1)), "status", never).await;
        assert!(matches!(ended, Err(RuntimeError::DeadlineExceeded(text)) if text.contains("status")));
        let exec = |timeout| cri::ExecSyncRequest { timeout, ..Default::default() }.limit();
        assert_eq!([exec(0), exec(5)], [None, Some(Duration::from_secs(125))]);
    }
}

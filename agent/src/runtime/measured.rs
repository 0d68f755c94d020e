//! A runtime whose calls are counted and timed.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use coracle_proto::cri;

use super::{Events, Host, Runtime, RuntimeError};
use crate::kubelet_metrics::KubeletMetrics;

/// Counts the calls of a runtime. A call that its caller drops is not counted.
pub(crate) struct Measured {
    pub(super) inner: Arc<dyn Runtime>,
    metrics: Arc<KubeletMetrics>,
}

// === impl Measured ===

impl Measured {
    pub(crate) fn new(inner: Arc<dyn Runtime>, metrics: Arc<KubeletMetrics>) -> Self {
        Self { inner, metrics }
    }

    pub(super) async fn measure<T>(
        &self,
        call: &'static str,
        running: impl Future<Output = Result<T, RuntimeError>>,
    ) -> Result<T, RuntimeError> {
        let begun = Instant::now();
        let result = running.await;
        self.metrics.operation(operation(call), begun.elapsed(), result.is_ok());
        result
    }
}

/// The kubelet's name of a call.
fn operation(call: &'static str) -> &'static str {
    match call {
        "run_pod_sandbox" => "run_podsandbox",
        "stop_pod_sandbox" => "stop_podsandbox",
        "remove_pod_sandbox" => "remove_podsandbox",
        "pod_sandbox_status" => "podsandbox_status",
        "list_pod_sandbox" => "list_podsandbox",
        "list_pod_sandbox_stats" => "list_podsandbox_stats",
        "list_pod_sandbox_metrics" => "list_podsandbox_metrics",
        "update_container_resources" => "update_container",
        other => other,
    }
}

#[tonic::async_trait]
impl Host for Measured {
    async fn version(&self, request: cri::VersionRequest) -> Result<cri::VersionResponse, RuntimeError> {
        self.measure("version", self.inner.version(request)).await
    }

    async fn runtime_config(
        &self,
        request: cri::RuntimeConfigRequest,
    ) -> Result<cri::RuntimeConfigResponse, RuntimeError> {
        self.measure("runtime_config", self.inner.runtime_config(request)).await
    }

    async fn update_runtime_config(
        &self,
        request: cri::UpdateRuntimeConfigRequest,
    ) -> Result<cri::UpdateRuntimeConfigResponse, RuntimeError> {
        self.measure("update_runtime_config", self.inner.update_runtime_config(request)).await
    }

    async fn status(&self, request: cri::StatusRequest) -> Result<cri::StatusResponse, RuntimeError> {
        self.measure("status", self.inner.status(request)).await
    }

    async fn events(&self) -> Result<Events, RuntimeError> {
        self.inner.events().await
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Remote, Sandboxes};
    use super::*;
    use crate::kubelet_metrics::Current;

    #[tokio::test]
    async fn a_failed_call_is_counted_by_the_kubelets_name() {
        // Nothing listens on this port.
        let nowhere = tonic::transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        let metrics = Arc::new(KubeletMetrics::default());
        let runtime = Measured::new(Arc::new(Remote::new(nowhere)), Arc::clone(&metrics));
        let listed = runtime.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await;
        assert!(listed.is_err());
        let text = metrics.text(&Current::default());
        for suffix in ["total", "errors_total", "duration_seconds_count"] {
            let line = format!("kubelet_runtime_operations_{suffix}{{operation_type=\"list_podsandbox\"}} 1");
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }
}

//! RuntimeService of CRI v1 over [`Runtime`]: one line a call; each call has a file of its own.

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use tonic::Request;

use super::later::later;
use super::status::{Answer, Streamed, answer};
use crate::runtime::Runtime;

#[tonic::async_trait]
impl RuntimeService for Runtime {
    async fn version(&self, _request: Request<cri::VersionRequest>) -> Answer<cri::VersionResponse> {
        answer(Err(later("Version")))
    }

    async fn run_pod_sandbox(
        &self,
        _request: Request<cri::RunPodSandboxRequest>,
    ) -> Answer<cri::RunPodSandboxResponse> {
        answer(Err(later("RunPodSandbox")))
    }

    async fn stop_pod_sandbox(
        &self,
        _request: Request<cri::StopPodSandboxRequest>,
    ) -> Answer<cri::StopPodSandboxResponse> {
        answer(Err(later("StopPodSandbox")))
    }

    async fn remove_pod_sandbox(
        &self,
        _request: Request<cri::RemovePodSandboxRequest>,
    ) -> Answer<cri::RemovePodSandboxResponse> {
        answer(Err(later("RemovePodSandbox")))
    }

    async fn pod_sandbox_status(
        &self,
        _request: Request<cri::PodSandboxStatusRequest>,
    ) -> Answer<cri::PodSandboxStatusResponse> {
        answer(Err(later("PodSandboxStatus")))
    }

    async fn list_pod_sandbox(
        &self,
        _request: Request<cri::ListPodSandboxRequest>,
    ) -> Answer<cri::ListPodSandboxResponse> {
        answer(Err(later("ListPodSandbox")))
    }

    type StreamPodSandboxesStream = Streamed<cri::StreamPodSandboxesResponse>;
    async fn stream_pod_sandboxes(
        &self,
        _request: Request<cri::StreamPodSandboxesRequest>,
    ) -> Answer<Self::StreamPodSandboxesStream> {
        answer(Err(later("StreamPodSandboxes")))
    }

    async fn create_container(
        &self,
        _request: Request<cri::CreateContainerRequest>,
    ) -> Answer<cri::CreateContainerResponse> {
        answer(Err(later("CreateContainer")))
    }

    async fn start_container(
        &self,
        _request: Request<cri::StartContainerRequest>,
    ) -> Answer<cri::StartContainerResponse> {
        answer(Err(later("StartContainer")))
    }

    async fn stop_container(
        &self,
        _request: Request<cri::StopContainerRequest>,
    ) -> Answer<cri::StopContainerResponse> {
        answer(Err(later("StopContainer")))
    }

    async fn remove_container(
        &self,
        _request: Request<cri::RemoveContainerRequest>,
    ) -> Answer<cri::RemoveContainerResponse> {
        answer(Err(later("RemoveContainer")))
    }

    async fn list_containers(
        &self,
        _request: Request<cri::ListContainersRequest>,
    ) -> Answer<cri::ListContainersResponse> {
        answer(Err(later("ListContainers")))
    }

    type StreamContainersStream = Streamed<cri::StreamContainersResponse>;
    async fn stream_containers(
        &self,
        _request: Request<cri::StreamContainersRequest>,
    ) -> Answer<Self::StreamContainersStream> {
        answer(Err(later("StreamContainers")))
    }

    async fn container_status(
        &self,
        _request: Request<cri::ContainerStatusRequest>,
    ) -> Answer<cri::ContainerStatusResponse> {
        answer(Err(later("ContainerStatus")))
    }

    async fn update_container_resources(
        &self,
        _request: Request<cri::UpdateContainerResourcesRequest>,
    ) -> Answer<cri::UpdateContainerResourcesResponse> {
        answer(Err(later("UpdateContainerResources")))
    }

    async fn reopen_container_log(
        &self,
        _request: Request<cri::ReopenContainerLogRequest>,
    ) -> Answer<cri::ReopenContainerLogResponse> {
        answer(Err(later("ReopenContainerLog")))
    }

    async fn exec_sync(&self, _request: Request<cri::ExecSyncRequest>) -> Answer<cri::ExecSyncResponse> {
        answer(Err(later("ExecSync")))
    }

    async fn exec(&self, _request: Request<cri::ExecRequest>) -> Answer<cri::ExecResponse> {
        answer(Err(later("Exec")))
    }

    async fn attach(&self, _request: Request<cri::AttachRequest>) -> Answer<cri::AttachResponse> {
        answer(Err(later("Attach")))
    }

    async fn port_forward(
        &self,
        _request: Request<cri::PortForwardRequest>,
    ) -> Answer<cri::PortForwardResponse> {
        answer(Err(later("PortForward")))
    }

    async fn container_stats(
        &self,
        _request: Request<cri::ContainerStatsRequest>,
    ) -> Answer<cri::ContainerStatsResponse> {
        answer(Err(later("ContainerStats")))
    }

    async fn list_container_stats(
        &self,
        _request: Request<cri::ListContainerStatsRequest>,
    ) -> Answer<cri::ListContainerStatsResponse> {
        answer(Err(later("ListContainerStats")))
    }

    type StreamContainerStatsStream = Streamed<cri::StreamContainerStatsResponse>;
    async fn stream_container_stats(
        &self,
        _request: Request<cri::StreamContainerStatsRequest>,
    ) -> Answer<Self::StreamContainerStatsStream> {
        answer(Err(later("StreamContainerStats")))
    }

    async fn pod_sandbox_stats(
        &self,
        _request: Request<cri::PodSandboxStatsRequest>,
    ) -> Answer<cri::PodSandboxStatsResponse> {
        answer(Err(later("PodSandboxStats")))
    }

    async fn list_pod_sandbox_stats(
        &self,
        _request: Request<cri::ListPodSandboxStatsRequest>,
    ) -> Answer<cri::ListPodSandboxStatsResponse> {
        answer(Err(later("ListPodSandboxStats")))
    }

    type StreamPodSandboxStatsStream = Streamed<cri::StreamPodSandboxStatsResponse>;
    async fn stream_pod_sandbox_stats(
        &self,
        _request: Request<cri::StreamPodSandboxStatsRequest>,
    ) -> Answer<Self::StreamPodSandboxStatsStream> {
        answer(Err(later("StreamPodSandboxStats")))
    }

    async fn update_runtime_config(
        &self,
        _request: Request<cri::UpdateRuntimeConfigRequest>,
    ) -> Answer<cri::UpdateRuntimeConfigResponse> {
        answer(Err(later("UpdateRuntimeConfig")))
    }

    async fn status(&self, _request: Request<cri::StatusRequest>) -> Answer<cri::StatusResponse> {
        answer(Err(later("Status")))
    }

    async fn checkpoint_container(
        &self,
        _request: Request<cri::CheckpointContainerRequest>,
    ) -> Answer<cri::CheckpointContainerResponse> {
        answer(Err(later("CheckpointContainer")))
    }

    async fn checkpoint_pod(
        &self,
        _request: Request<cri::CheckpointPodRequest>,
    ) -> Answer<cri::CheckpointPodResponse> {
        answer(Err(later("CheckpointPod")))
    }

    async fn restore_pod(
        &self,
        _request: Request<cri::RestorePodRequest>,
    ) -> Answer<cri::RestorePodResponse> {
        answer(Err(later("RestorePod")))
    }

    type GetContainerEventsStream = Streamed<cri::ContainerEventResponse>;
    async fn get_container_events(
        &self,
        _request: Request<cri::GetEventsRequest>,
    ) -> Answer<Self::GetContainerEventsStream> {
        answer(Err(later("GetContainerEvents")))
    }

    async fn list_metric_descriptors(
        &self,
        _request: Request<cri::ListMetricDescriptorsRequest>,
    ) -> Answer<cri::ListMetricDescriptorsResponse> {
        answer(Err(later("ListMetricDescriptors")))
    }

    async fn list_pod_sandbox_metrics(
        &self,
        _request: Request<cri::ListPodSandboxMetricsRequest>,
    ) -> Answer<cri::ListPodSandboxMetricsResponse> {
        answer(Err(later("ListPodSandboxMetrics")))
    }

    type StreamPodSandboxMetricsStream = Streamed<cri::StreamPodSandboxMetricsResponse>;
    async fn stream_pod_sandbox_metrics(
        &self,
        _request: Request<cri::StreamPodSandboxMetricsRequest>,
    ) -> Answer<Self::StreamPodSandboxMetricsStream> {
        answer(Err(later("StreamPodSandboxMetrics")))
    }

    async fn runtime_config(
        &self,
        _request: Request<cri::RuntimeConfigRequest>,
    ) -> Answer<cri::RuntimeConfigResponse> {
        answer(Err(later("RuntimeConfig")))
    }

    async fn update_pod_sandbox_resources(
        &self,
        _request: Request<cri::UpdatePodSandboxResourcesRequest>,
    ) -> Answer<cri::UpdatePodSandboxResourcesResponse> {
        answer(Err(later("UpdatePodSandboxResources")))
    }
}

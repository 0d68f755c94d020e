//! RuntimeService of CRI v1 over [`Runtime`]: one line a call; each call has a file of its own.

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use tonic::{Request, Status};

use super::checkpoint::take_back;
use super::pod_checkpoint;
use super::status::{Answer, Streamed, answer, attended, blocking, create, create_named, finish, within};
use crate::metrics;
use crate::runtime::Runtime;

#[tonic::async_trait]
impl RuntimeService for Runtime {
    async fn version(&self, request: Request<cri::VersionRequest>) -> Answer<cri::VersionResponse> {
        answer(self.version(request.into_inner()))
    }

    async fn run_pod_sandbox(
        &self,
        request: Request<cri::RunPodSandboxRequest>,
    ) -> Answer<cri::RunPodSandboxResponse> {
        let request = request.into_inner();
        create_named(
            (self.clone(), self.sandbox_claim(&request).await),
            |runtime, id| async move { runtime.sandbox_run(request, id).await },
            |runtime, made| async move { runtime.sandbox_unmake(made.pod_sandbox_id).await },
        )
        .await
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<cri::StopPodSandboxRequest>,
    ) -> Answer<cri::StopPodSandboxResponse> {
        finish(self.clone(), |runtime| async move { runtime.sandbox_stop(request.into_inner()).await }).await
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<cri::RemovePodSandboxRequest>,
    ) -> Answer<cri::RemovePodSandboxResponse> {
        finish(self.clone(), |runtime| async move { runtime.sandbox_remove(request.into_inner()).await })
            .await
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<cri::PodSandboxStatusRequest>,
    ) -> Answer<cri::PodSandboxStatusResponse> {
        answer(self.sandbox_status(request.into_inner()))
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<cri::ListPodSandboxRequest>,
    ) -> Answer<cri::ListPodSandboxResponse> {
        answer(Ok(self.sandbox_list(request.into_inner())))
    }

    type StreamPodSandboxesStream = Streamed<cri::StreamPodSandboxesResponse>;
    async fn stream_pod_sandboxes(
        &self,
        request: Request<cri::StreamPodSandboxesRequest>,
    ) -> Answer<Self::StreamPodSandboxesStream> {
        answer(Ok(self.sandbox_stream(request.into_inner())))
    }

    async fn create_container(
        &self,
        request: Request<cri::CreateContainerRequest>,
    ) -> Answer<cri::CreateContainerResponse> {
        let request = request.into_inner();
        create_named(
            (self.clone(), self.container_claim(&request).await),
            |runtime, id| async move { runtime.container_create(request, id).await },
            |runtime, made| async move { runtime.container_unmake(made.container_id).await },
        )
        .await
    }

    async fn start_container(
        &self,
        request: Request<cri::StartContainerRequest>,
    ) -> Answer<cri::StartContainerResponse> {
        finish(self.clone(), |runtime| async move { runtime.container_start(request.into_inner()).await })
            .await
    }

    async fn stop_container(
        &self,
        request: Request<cri::StopContainerRequest>,
    ) -> Answer<cri::StopContainerResponse> {
        answer(self.container_stop(request.into_inner()).await)
    }

    async fn remove_container(
        &self,
        request: Request<cri::RemoveContainerRequest>,
    ) -> Answer<cri::RemoveContainerResponse> {
        finish(self.clone(), |runtime| async move { runtime.container_remove(request.into_inner()).await })
            .await
    }

    async fn list_containers(
        &self,
        request: Request<cri::ListContainersRequest>,
    ) -> Answer<cri::ListContainersResponse> {
        answer(Ok(self.container_list(request.into_inner())))
    }

    type StreamContainersStream = Streamed<cri::StreamContainersResponse>;
    async fn stream_containers(
        &self,
        request: Request<cri::StreamContainersRequest>,
    ) -> Answer<Self::StreamContainersStream> {
        answer(Ok(self.container_stream(request.into_inner())))
    }

    async fn container_status(
        &self,
        request: Request<cri::ContainerStatusRequest>,
    ) -> Answer<cri::ContainerStatusResponse> {
        answer(self.container_status(request.into_inner()))
    }

    async fn update_container_resources(
        &self,
        request: Request<cri::UpdateContainerResourcesRequest>,
    ) -> Answer<cri::UpdateContainerResourcesResponse> {
        finish(self.clone(), |runtime| async move { runtime.container_update(request.into_inner()).await })
            .await
    }

    async fn reopen_container_log(
        &self,
        request: Request<cri::ReopenContainerLogRequest>,
    ) -> Answer<cri::ReopenContainerLogResponse> {
        answer(self.log_reopen(request.into_inner()).await)
    }

    async fn exec_sync(&self, request: Request<cri::ExecSyncRequest>) -> Answer<cri::ExecSyncResponse> {
        let runtime = self.clone();
        attended(|gone| async move { runtime.exec_sync(request.into_inner(), gone).await }).await
    }

    async fn exec(&self, request: Request<cri::ExecRequest>) -> Answer<cri::ExecResponse> {
        answer(self.exec_open(request.into_inner()))
    }

    async fn attach(&self, request: Request<cri::AttachRequest>) -> Answer<cri::AttachResponse> {
        answer(self.attach_open(request.into_inner()))
    }

    async fn port_forward(
        &self,
        request: Request<cri::PortForwardRequest>,
    ) -> Answer<cri::PortForwardResponse> {
        answer(self.port_forward_open(request.into_inner()))
    }

    async fn container_stats(
        &self,
        request: Request<cri::ContainerStatsRequest>,
    ) -> Answer<cri::ContainerStatsResponse> {
        blocking(self, move |runtime| runtime.container_stats(request.get_ref())).await
    }

    async fn list_container_stats(
        &self,
        request: Request<cri::ListContainerStatsRequest>,
    ) -> Answer<cri::ListContainerStatsResponse> {
        blocking(self, move |runtime| Ok(runtime.container_stats_list(request.into_inner()))).await
    }

    type StreamContainerStatsStream = Streamed<cri::StreamContainerStatsResponse>;
    async fn stream_container_stats(
        &self,
        request: Request<cri::StreamContainerStatsRequest>,
    ) -> Answer<Self::StreamContainerStatsStream> {
        answer(Ok(self.container_stats_stream(request.into_inner())))
    }

    async fn pod_sandbox_stats(
        &self,
        request: Request<cri::PodSandboxStatsRequest>,
    ) -> Answer<cri::PodSandboxStatsResponse> {
        blocking(self, move |runtime| runtime.sandbox_stats(request.get_ref())).await
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: Request<cri::ListPodSandboxStatsRequest>,
    ) -> Answer<cri::ListPodSandboxStatsResponse> {
        blocking(self, move |runtime| Ok(runtime.sandbox_stats_list(request.into_inner()))).await
    }

    type StreamPodSandboxStatsStream = Streamed<cri::StreamPodSandboxStatsResponse>;
    async fn stream_pod_sandbox_stats(
        &self,
        request: Request<cri::StreamPodSandboxStatsRequest>,
    ) -> Answer<Self::StreamPodSandboxStatsStream> {
        answer(Ok(self.sandbox_stats_stream(request.into_inner())))
    }

    async fn update_runtime_config(
        &self,
        request: Request<cri::UpdateRuntimeConfigRequest>,
    ) -> Answer<cri::UpdateRuntimeConfigResponse> {
        answer(self.runtime_config_update(request.into_inner()).await)
    }

    async fn status(&self, request: Request<cri::StatusRequest>) -> Answer<cri::StatusResponse> {
        answer(self.runtime_status(request.into_inner()).await)
    }

    async fn checkpoint_container(
        &self,
        request: Request<cri::CheckpointContainerRequest>,
    ) -> Answer<cri::CheckpointContainerResponse> {
        let request = request.into_inner();
        let (seconds, location) = (request.timeout, request.location.clone());
        let made = create(
            self.clone(),
            |runtime| async move { runtime.checkpoint(request).await },
            |_, (_, stays)| take_back(location, stays),
        );
        within(seconds, made).await.map(|told| told.map(|(made, _stays)| made))
    }

    async fn checkpoint_pod(
        &self,
        request: Request<cri::CheckpointPodRequest>,
    ) -> Answer<cri::CheckpointPodResponse> {
        let request = request.into_inner();
        let asked = request.clone();
        create(
            self.clone(),
            |runtime| async move { runtime.pod_checkpoint(request).await },
            |_, (_, stays)| pod_checkpoint::take_back(asked, stays),
        )
        .await
        .map(|told| told.map(|(made, _stays)| made))
    }

    async fn restore_pod(&self, request: Request<cri::RestorePodRequest>) -> Answer<cri::RestorePodResponse> {
        let restoration = self.restoration(request.into_inner()).await;
        let (restoration, claim) = restoration.map_err(|error| Status::from(&error))?;
        create_named(
            (self.clone(), Ok(claim)),
            |runtime, id| async move { runtime.pod_restore(restoration, id).await },
            |runtime, made| async move { runtime.sandbox_unmake(made.pod_sandbox_id).await },
        )
        .await
    }

    type GetContainerEventsStream = Streamed<cri::ContainerEventResponse>;
    async fn get_container_events(
        &self,
        request: Request<cri::GetEventsRequest>,
    ) -> Answer<Self::GetContainerEventsStream> {
        answer(Ok(self.events_get(request.into_inner())))
    }

    async fn list_metric_descriptors(
        &self,
        _request: Request<cri::ListMetricDescriptorsRequest>,
    ) -> Answer<cri::ListMetricDescriptorsResponse> {
        answer(Ok(metrics::descriptors()))
    }

    async fn list_pod_sandbox_metrics(
        &self,
        request: Request<cri::ListPodSandboxMetricsRequest>,
    ) -> Answer<cri::ListPodSandboxMetricsResponse> {
        blocking(self, move |runtime| Ok(runtime.metrics_list(request.get_ref()))).await
    }

    type StreamPodSandboxMetricsStream = Streamed<cri::StreamPodSandboxMetricsResponse>;
    async fn stream_pod_sandbox_metrics(
        &self,
        request: Request<cri::StreamPodSandboxMetricsRequest>,
    ) -> Answer<Self::StreamPodSandboxMetricsStream> {
        answer(Ok(self.metrics_stream(request.get_ref())))
    }

    async fn runtime_config(
        &self,
        request: Request<cri::RuntimeConfigRequest>,
    ) -> Answer<cri::RuntimeConfigResponse> {
        answer(self.runtime_config(request.into_inner()))
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: Request<cri::UpdatePodSandboxResourcesRequest>,
    ) -> Answer<cri::UpdatePodSandboxResourcesResponse> {
        answer(self.sandbox_update(request.into_inner()).await)
    }
}

//! RuntimeService of CRI v1: passes each call to a service of the runtime.

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use futures::StreamExt as _;
use tonic::{Request, Status};

use super::transaction::{
    Answer, answer, create, create_named, finish, measure, measure_all, measure_list, run_cancellable, within,
};
use crate::list_stream::Streamed;
use crate::metrics;
use crate::runtime::Runtime;
use crate::services::checkpoints;

#[tonic::async_trait]
impl RuntimeService for Runtime {
    async fn version(&self, request: Request<cri::VersionRequest>) -> Answer<cri::VersionResponse> {
        answer(self.status.version(request.into_inner()))
    }

    async fn run_pod_sandbox(
        &self,
        request: Request<cri::RunPodSandboxRequest>,
    ) -> Answer<cri::RunPodSandboxResponse> {
        let request = request.into_inner();
        let (run, undo) = (self.sandboxes.clone(), self.sandboxes.clone());
        let claim = run.sandbox_claim(&request).await.map_err(|error| Status::from(&error))?;
        create_named(
            claim,
            |id| async move { run.sandbox_run(request, id).await },
            |created| async move { undo.undo_run(created.pod_sandbox_id).await },
        )
        .await
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<cri::StopPodSandboxRequest>,
    ) -> Answer<cri::StopPodSandboxResponse> {
        let service = self.sandboxes.clone();
        finish(async move { service.sandbox_stop(request.into_inner()).await }).await
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<cri::RemovePodSandboxRequest>,
    ) -> Answer<cri::RemovePodSandboxResponse> {
        let service = self.sandboxes.clone();
        finish(async move { service.sandbox_remove(request.into_inner()).await }).await
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<cri::PodSandboxStatusRequest>,
    ) -> Answer<cri::PodSandboxStatusResponse> {
        answer(self.sandboxes.sandbox_status(request.into_inner()))
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<cri::ListPodSandboxRequest>,
    ) -> Answer<cri::ListPodSandboxResponse> {
        answer(Ok(self.sandboxes.sandbox_list(request.into_inner())))
    }

    type StreamPodSandboxesStream = Streamed<cri::StreamPodSandboxesResponse>;
    async fn stream_pod_sandboxes(
        &self,
        request: Request<cri::StreamPodSandboxesRequest>,
    ) -> Answer<Self::StreamPodSandboxesStream> {
        answer(Ok(self.sandboxes.sandbox_stream(request.into_inner())))
    }

    async fn create_container(
        &self,
        request: Request<cri::CreateContainerRequest>,
    ) -> Answer<cri::CreateContainerResponse> {
        let request = request.into_inner();
        let (create, undo) = (self.containers.clone(), self.containers.clone());
        let claim = create.container_claim(&request).await.map_err(|error| Status::from(&error))?;
        create_named(
            claim,
            |id| async move { create.container_create(request, id).await },
            |created| async move { undo.undo_create(created.container_id).await },
        )
        .await
    }

    async fn start_container(
        &self,
        request: Request<cri::StartContainerRequest>,
    ) -> Answer<cri::StartContainerResponse> {
        let service = self.containers.clone();
        finish(async move { service.container_start(request.into_inner()).await }).await
    }

    async fn stop_container(
        &self,
        request: Request<cri::StopContainerRequest>,
    ) -> Answer<cri::StopContainerResponse> {
        answer(self.containers.container_stop(request.into_inner()).await)
    }

    async fn remove_container(
        &self,
        request: Request<cri::RemoveContainerRequest>,
    ) -> Answer<cri::RemoveContainerResponse> {
        let service = self.containers.clone();
        finish(async move { service.container_remove(request.into_inner()).await }).await
    }

    async fn list_containers(
        &self,
        request: Request<cri::ListContainersRequest>,
    ) -> Answer<cri::ListContainersResponse> {
        answer(Ok(self.containers.container_list(request.into_inner())))
    }

    type StreamContainersStream = Streamed<cri::StreamContainersResponse>;
    async fn stream_containers(
        &self,
        request: Request<cri::StreamContainersRequest>,
    ) -> Answer<Self::StreamContainersStream> {
        answer(Ok(self.containers.container_stream(request.into_inner())))
    }

    async fn container_status(
        &self,
        request: Request<cri::ContainerStatusRequest>,
    ) -> Answer<cri::ContainerStatusResponse> {
        answer(self.containers.container_status(request.into_inner()))
    }

    async fn update_container_resources(
        &self,
        request: Request<cri::UpdateContainerResourcesRequest>,
    ) -> Answer<cri::UpdateContainerResourcesResponse> {
        let service = self.containers.clone();
        finish(async move { service.container_update(request.into_inner()).await }).await
    }

    async fn reopen_container_log(
        &self,
        request: Request<cri::ReopenContainerLogRequest>,
    ) -> Answer<cri::ReopenContainerLogResponse> {
        answer(self.containers.log_reopen(request.into_inner()).await)
    }

    async fn exec_sync(&self, request: Request<cri::ExecSyncRequest>) -> Answer<cri::ExecSyncResponse> {
        let execs = self.execs.clone();
        run_cancellable(|gone| async move { execs.exec_sync(request.into_inner(), gone).await }).await
    }

    async fn exec(&self, request: Request<cri::ExecRequest>) -> Answer<cri::ExecResponse> {
        answer(self.streams.exec_open(request.into_inner()))
    }

    async fn attach(&self, request: Request<cri::AttachRequest>) -> Answer<cri::AttachResponse> {
        answer(self.streams.attach_open(request.into_inner()))
    }

    async fn port_forward(
        &self,
        request: Request<cri::PortForwardRequest>,
    ) -> Answer<cri::PortForwardResponse> {
        answer(self.streams.port_forward_open(request.into_inner()))
    }

    async fn container_stats(
        &self,
        request: Request<cri::ContainerStatsRequest>,
    ) -> Answer<cri::ContainerStatsResponse> {
        let stats = self.stats.clone();
        measure(move || stats.container_stats(request.get_ref())).await
    }

    async fn list_container_stats(
        &self,
        request: Request<cri::ListContainerStatsRequest>,
    ) -> Answer<cri::ListContainerStatsResponse> {
        let stats = self.stats.clone();
        let request = request.into_inner();
        let filter = request.filter.clone();
        measure_list(filter.as_ref(), move || Ok(stats.container_stats_list(request))).await
    }

    type StreamContainerStatsStream = Streamed<cri::StreamContainerStatsResponse>;
    async fn stream_container_stats(
        &self,
        request: Request<cri::StreamContainerStatsRequest>,
    ) -> Answer<Self::StreamContainerStatsStream> {
        answer(Ok(self.stats.container_stats_stream(request.into_inner())))
    }

    async fn pod_sandbox_stats(
        &self,
        request: Request<cri::PodSandboxStatsRequest>,
    ) -> Answer<cri::PodSandboxStatsResponse> {
        let stats = self.stats.clone();
        measure(move || stats.sandbox_stats(request.get_ref())).await
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: Request<cri::ListPodSandboxStatsRequest>,
    ) -> Answer<cri::ListPodSandboxStatsResponse> {
        let stats = self.stats.clone();
        let request = request.into_inner();
        let filter = request.filter.clone();
        measure_list(filter.as_ref(), move || Ok(stats.sandbox_stats_list(request))).await
    }

    type StreamPodSandboxStatsStream = Streamed<cri::StreamPodSandboxStatsResponse>;
    async fn stream_pod_sandbox_stats(
        &self,
        request: Request<cri::StreamPodSandboxStatsRequest>,
    ) -> Answer<Self::StreamPodSandboxStatsStream> {
        answer(Ok(self.stats.sandbox_stats_stream(request.into_inner())))
    }

    async fn update_runtime_config(
        &self,
        request: Request<cri::UpdateRuntimeConfigRequest>,
    ) -> Answer<cri::UpdateRuntimeConfigResponse> {
        answer(self.status.runtime_config_update(request.into_inner()).await)
    }

    async fn status(&self, request: Request<cri::StatusRequest>) -> Answer<cri::StatusResponse> {
        answer(self.status.runtime_status(request.into_inner()).await)
    }

    async fn checkpoint_container(
        &self,
        request: Request<cri::CheckpointContainerRequest>,
    ) -> Answer<cri::CheckpointContainerResponse> {
        let request = request.into_inner();
        let (seconds, location) = (request.timeout, request.location.clone());
        let checkpoint = self.checkpoints.clone().checkpoint(request);
        let created =
            create(checkpoint, |(_, locks)| checkpoints::container::undo_checkpoint(location, locks));
        within(seconds, created).await.map(|response| response.map(|(created, _locks)| created))
    }

    async fn checkpoint_pod(
        &self,
        request: Request<cri::CheckpointPodRequest>,
    ) -> Answer<cri::CheckpointPodResponse> {
        let request = request.into_inner();
        let requested = request.clone();
        let checkpoint = self.checkpoints.clone().pod_checkpoint(request);
        let created = create(checkpoint, |(_, locks)| checkpoints::pod::undo_checkpoint(requested, locks));
        created.await.map(|response| response.map(|(created, _locks)| created))
    }

    async fn restore_pod(&self, request: Request<cri::RestorePodRequest>) -> Answer<cri::RestorePodResponse> {
        let (restore, undo) = (self.checkpoints.clone(), self.sandboxes.clone());
        let restoration = restore.restoration(request.into_inner()).await;
        let (restoration, claim) = restoration.map_err(|error| Status::from(&error))?;
        create_named(
            claim,
            |id| restore.pod_restore(restoration, id),
            |created| async move { undo.undo_run(created.pod_sandbox_id).await },
        )
        .await
    }

    type GetContainerEventsStream = Streamed<cri::ContainerEventResponse>;
    async fn get_container_events(
        &self,
        _request: Request<cri::GetEventsRequest>,
    ) -> Answer<Self::GetContainerEventsStream> {
        let events = self.outbox.listen();
        answer(Ok(Box::pin(
            events.map(|event| event.map_err(|slow| Status::resource_exhausted(slow.to_string()))),
        )))
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
        let stats = self.stats.clone();
        measure_all(move || Ok(stats.metrics_list(request.get_ref()))).await
    }

    type StreamPodSandboxMetricsStream = Streamed<cri::StreamPodSandboxMetricsResponse>;
    async fn stream_pod_sandbox_metrics(
        &self,
        request: Request<cri::StreamPodSandboxMetricsRequest>,
    ) -> Answer<Self::StreamPodSandboxMetricsStream> {
        answer(Ok(self.stats.metrics_stream(request.get_ref())))
    }

    async fn runtime_config(
        &self,
        request: Request<cri::RuntimeConfigRequest>,
    ) -> Answer<cri::RuntimeConfigResponse> {
        answer(self.status.runtime_config(request.into_inner()))
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: Request<cri::UpdatePodSandboxResourcesRequest>,
    ) -> Answer<cri::UpdatePodSandboxResourcesResponse> {
        answer(self.sandboxes.sandbox_update(request.into_inner()).await)
    }
}

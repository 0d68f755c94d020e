//! ListContainerStats, ListPodSandboxStats and their streams.

use coracle_proto::cri;

use super::StatsService;
use crate::list_stream::Streamed;
use crate::list_stream::batches;

impl StatsService {
    /// Usage of the containers that match a filter.
    pub(crate) fn container_stats_list(
        &self,
        request: cri::ListContainerStatsRequest,
    ) -> cri::ListContainerStatsResponse {
        let containers = self.matching_containers(request.filter);
        cri::ListContainerStatsResponse { stats: containers.iter().map(|row| self.stats_of(row)).collect() }
    }

    /// The list as a stream of batches; each batch is read when it is sent.
    pub(crate) fn container_stats_stream(
        &self,
        request: cri::StreamContainerStatsRequest,
    ) -> Streamed<cri::StreamContainerStatsResponse> {
        let service = self.clone();
        let containers = self.matching_containers(request.filter).into_iter();
        let stats = containers.map(move |container| service.stats_of(&container));
        batches(stats, |container_stats| cri::StreamContainerStatsResponse { container_stats })
    }

    /// Usage of the pods that match a filter.
    pub(crate) fn sandbox_stats_list(
        &self,
        request: cri::ListPodSandboxStatsRequest,
    ) -> cri::ListPodSandboxStatsResponse {
        let sandboxes = self.matching_sandboxes(request.filter);
        cri::ListPodSandboxStatsResponse {
            stats: sandboxes.iter().map(|row| self.pod_stats_of(row)).collect(),
        }
    }

    /// The list as a stream of batches; each batch is read when it is sent.
    pub(crate) fn sandbox_stats_stream(
        &self,
        request: cri::StreamPodSandboxStatsRequest,
    ) -> Streamed<cri::StreamPodSandboxStatsResponse> {
        let service = self.clone();
        let sandboxes = self.matching_sandboxes(request.filter).into_iter();
        let stats = sandboxes.map(move |sandbox| service.pod_stats_of(&sandbox));
        batches(stats, |pod_sandbox_stats| cri::StreamPodSandboxStatsResponse { pod_sandbox_stats })
    }
}

//! ListContainerStats, ListPodSandboxStats and their streams.

use coracle_proto::cri;

use super::list_stream::batches;
use super::status::Streamed;
use crate::runtime::Runtime;

impl Runtime {
    /// What the containers that a filter lets through use.
    pub(super) fn container_stats_list(
        &self,
        request: cri::ListContainerStatsRequest,
    ) -> cri::ListContainerStatsResponse {
        let containers = self.containers_counted(request.filter);
        cri::ListContainerStatsResponse { stats: containers.iter().map(|row| self.stats_of(row)).collect() }
    }

    /// The same, in pieces: read as they are sent.
    pub(super) fn container_stats_stream(
        &self,
        request: cri::StreamContainerStatsRequest,
    ) -> Streamed<cri::StreamContainerStatsResponse> {
        let runtime = self.clone();
        let containers = self.containers_counted(request.filter).into_iter();
        let stats = containers.map(move |container| runtime.stats_of(&container));
        batches(stats, |container_stats| cri::StreamContainerStatsResponse { container_stats })
    }

    /// What the pods that a filter lets through use.
    pub(super) fn sandbox_stats_list(
        &self,
        request: cri::ListPodSandboxStatsRequest,
    ) -> cri::ListPodSandboxStatsResponse {
        let sandboxes = self.sandboxes_counted(request.filter);
        cri::ListPodSandboxStatsResponse {
            stats: sandboxes.iter().map(|row| self.pod_stats_of(row)).collect(),
        }
    }

    /// The same, in pieces: read as they are sent.
    pub(super) fn sandbox_stats_stream(
        &self,
        request: cri::StreamPodSandboxStatsRequest,
    ) -> Streamed<cri::StreamPodSandboxStatsResponse> {
        let runtime = self.clone();
        let sandboxes = self.sandboxes_counted(request.filter).into_iter();
        let stats = sandboxes.map(move |sandbox| runtime.pod_stats_of(&sandbox));
        batches(stats, |pod_sandbox_stats| cri::StreamPodSandboxStatsResponse { pod_sandbox_stats })
    }
}

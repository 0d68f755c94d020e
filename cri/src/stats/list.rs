//! ListContainerStats, ListPodSandboxStats and their streams.

use coracle_proto::cri;

use super::StatsService;
use crate::list_stream::Streamed;
use crate::list_stream::batches;
use crate::sandbox::filter::selects_all;
use crate::usage::meter::Recount;

impl StatsService {
    /// Usage of the containers that match a filter.
    pub(crate) fn container_stats_list(
        &self,
        request: cri::ListContainerStatsRequest,
    ) -> cri::ListContainerStatsResponse {
        let recount = recount(request.filter.as_ref(), Recount::InBackground);
        let containers = self.matching_containers(request.filter);
        cri::ListContainerStatsResponse {
            stats: containers.iter().map(|row| self.stats_of(row, recount)).collect(),
        }
    }

    /// The list as a stream of batches; each batch is read when it is sent.
    pub(crate) fn container_stats_stream(
        &self,
        request: cri::StreamContainerStatsRequest,
    ) -> Streamed<cri::StreamContainerStatsResponse> {
        let service = self.clone();
        let recount = recount(request.filter.as_ref(), Recount::InBackground);
        let containers = self.matching_containers(request.filter).into_iter();
        let stats = containers.map(move |container| service.stats_of(&container, recount));
        batches(stats, |container_stats| cri::StreamContainerStatsResponse { container_stats })
    }

    /// Usage of the pods that match a filter.
    pub(crate) fn sandbox_stats_list(
        &self,
        request: cri::ListPodSandboxStatsRequest,
    ) -> cri::ListPodSandboxStatsResponse {
        let recount = recount(request.filter.as_ref(), Recount::Never);
        let sandboxes = self.matching_sandboxes(request.filter);
        cri::ListPodSandboxStatsResponse {
            stats: sandboxes.iter().map(|row| self.pod_stats_of(row, recount)).collect(),
        }
    }

    /// The list as a stream of batches; each batch is read when it is sent.
    pub(crate) fn sandbox_stats_stream(
        &self,
        request: cri::StreamPodSandboxStatsRequest,
    ) -> Streamed<cri::StreamPodSandboxStatsResponse> {
        let service = self.clone();
        let recount = recount(request.filter.as_ref(), Recount::Never);
        let sandboxes = self.matching_sandboxes(request.filter).into_iter();
        let stats = sandboxes.map(move |sandbox| service.pod_stats_of(&sandbox, recount));
        batches(stats, |pod_sandbox_stats| cri::StreamPodSandboxStatsResponse { pod_sandbox_stats })
    }
}

/// Use of disk counts by a list: a list with a filter waits for counts; `of_all` applies to a list of all objects.
fn recount<F: Default + PartialEq>(filter: Option<&F>, of_all: Recount) -> Recount {
    if selects_all(filter) { of_all } else { Recount::Now }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lists_with_a_filter_wait_for_counts() {
        let of_one = cri::ContainerStatsFilter { id: "c".to_owned(), ..Default::default() };
        assert_eq!(recount(Some(&of_one), Recount::InBackground), Recount::Now);
        let empty = cri::ContainerStatsFilter::default();
        for filter in [None, Some(&empty)] {
            assert_eq!(recount(filter, Recount::InBackground), Recount::InBackground);
        }
        assert_eq!(recount::<cri::PodSandboxStatsFilter>(None, Recount::Never), Recount::Never);
    }
}

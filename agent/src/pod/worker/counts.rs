//! Counts the start of the pod and the ends of its containers, from the changes of its status.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;

use super::Worker;

impl Worker {
    /// Counts the start of the pod when it runs for the first time.
    pub(super) fn count_start(&mut self, pod: &Pod, status: &PodStatus) {
        if status.phase.as_deref() == Some("Running")
            && let Some(received) = self.received.take()
        {
            let metrics = &self.node.metrics;
            metrics.pod_runs(received.elapsed());
            let pulls = metrics.pull_times.take(&self.uid);
            if let Some(created) = &pod.metadata.creation_timestamp {
                let after = Duration::try_from(Timestamp::now() - created.0).unwrap_or_default();
                let excluded = (!is_stateful(pod)).then(|| pulls + init_time(status));
                metrics.created_pod_runs(after, excluded);
            }
        }
    }

    /// Counts the containers that have terminated since the previous status, as `updateStatusInternal` of
    /// pkg/kubelet/status. After a start of the agent, the previous status is the status in the API.
    pub(super) fn count_terminations(&self, api: &PodStatus, status: &PodStatus) {
        let before = self.reported.as_deref().unwrap_or(api);
        for (kind, end) in terminations(before, status) {
            let reason = end.reason.as_deref().unwrap_or_default();
            self.node.metrics.container_terminated(kind, end.exit_code, reason);
        }
    }
}

/// Whether the pod has a volume of another kind than secret, config map, downward API, emptyDir and projected. The SLI
/// of pod starts does not include such pods. Source: `isStatefulPod` of the kubelet.
fn is_stateful(pod: &Pod) -> bool {
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.any(|volume| {
        volume.secret.is_none()
            && volume.config_map.is_none()
            && volume.downward_api.is_none()
            && volume.empty_dir.is_none()
            && volume.projected.is_none()
    })
}

/// Total run time of the ended init containers. Running sidecars do not count.
fn init_time(status: &PodStatus) -> Duration {
    let ends = status.init_container_statuses.iter().flatten().filter_map(terminated);
    let times = ends.filter_map(|end| {
        let (started, finished) = (end.started_at.as_ref()?, end.finished_at.as_ref()?);
        Duration::try_from(finished.0 - started.0).ok()
    });
    times.sum()
}

/// The containers that have ended between two statuses, with their kinds.
fn terminations<'a>(
    before: &'a PodStatus,
    status: &'a PodStatus,
) -> impl Iterator<Item = (&'static str, &'a ContainerStateTerminated)> {
    let kinds = [
        ("init_container", &before.init_container_statuses, &status.init_container_statuses),
        ("container", &before.container_statuses, &status.container_statuses),
        ("ephemeral_container", &before.ephemeral_container_statuses, &status.ephemeral_container_statuses),
    ];
    kinds.into_iter().flat_map(|(kind, before, now)| {
        let is_new = move |status: &&ContainerStatus| {
            let known = before.iter().flatten().find(|known| known.name == status.name);
            known.and_then(terminated).is_none()
        };
        now.iter().flatten().filter(is_new).filter_map(move |status| Some((kind, terminated(status)?)))
    })
}

fn terminated(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    status.state.as_ref()?.terminated.as_ref()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(init: serde_json::Value, main: serde_json::Value) -> PodStatus {
        let container = |name: &str, state: serde_json::Value| json!([{"name": name, "state": state}]);
        let status = json!({
            "initContainerStatuses": container("i", init),
            "containerStatuses": container("c", main),
        });
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn the_time_of_init_containers_is_that_between_their_start_and_end() {
        let end = json!({"terminated": {"exitCode": 0, "startedAt": "2026-01-01T00:00:00Z",
            "finishedAt": "2026-01-01T00:00:03Z"}});
        assert_eq!(init_time(&status(end.clone(), end)), Duration::from_secs(3));
        assert_eq!(init_time(&status(json!({"running": {}}), json!({}))), Duration::ZERO);
    }

    #[test]
    fn pods_with_volumes_that_outlive_them_are_stateful() {
        let of = |volumes: serde_json::Value| {
            is_stateful(
                &serde_json::from_value(json!({"spec": {"containers": [], "volumes": volumes}})).unwrap(),
            )
        };
        let emptied = json!({"name": "a", "emptyDir": {}});
        assert!(!of(json!([])) && !of(json!([emptied, {"name": "b", "projected": {}}])));
        assert!(of(json!([emptied, {"name": "b", "persistentVolumeClaim": {"claimName": "c"}}])));
        assert!(of(json!([{"name": "b", "hostPath": {"path": "/a"}}])));
    }

    #[test]
    fn each_end_of_a_container_is_counted_once() {
        let end = |code: i32| json!({"terminated": {"exitCode": code, "reason": "Error"}});
        let running = status(end(0), json!({"running": {}}));
        let ended = status(end(0), end(3));
        let codes = |before: &PodStatus, status: &PodStatus| -> Vec<(&str, i32)> {
            terminations(before, status).map(|(kind, end)| (kind, end.exit_code)).collect()
        };
        let none = PodStatus::default();
        assert_eq!(codes(&none, &ended), [("init_container", 0), ("container", 3)]);
        assert_eq!(codes(&running, &ended), [("container", 3)]);
        assert!(codes(&ended, &ended).is_empty() && codes(&ended, &running).is_empty());
    }
}

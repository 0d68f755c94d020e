//! The container statuses of a pod, reduced to restarts and failures, and its sidecars.

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Deserializer};

use super::requests::Resources;
use super::{PodContainer, PodPort};

/// The restarts and failures of a pod's containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Containers {
    /// The highest restart count.
    pub(crate) restarts: i32,
    /// The sum of the restart counts.
    pub(crate) all_restarts: i32,
    /// The containers that ended with an exit code other than 0.
    pub(crate) failures: Vec<Failure>,
    /// Time at which the last container terminated.
    pub(crate) finished_at: Option<Time>,
}

/// A container that ended with an exit code other than 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) container: String,
    pub(crate) code: i32,
}

/// An init container.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct InitContainer {
    restart_policy: Option<String>,
    ports: Option<Vec<PodPort>>,
    name: Option<String>,
    resources: Option<Resources>,
}

/// Reads a list of init containers. Returns the sidecars, which have the restart policy `Always`.
pub(super) fn sidecars<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PodContainer>, D::Error> {
    let all = Option::<Vec<InitContainer>>::deserialize(deserializer)?.unwrap_or_default();
    let sidecars = all.into_iter().filter(|init| init.restart_policy.as_deref() == Some("Always"));
    let container = |InitContainer { ports, name, resources, .. }| PodContainer { ports, name, resources };
    Ok(sidecars.map(container).collect())
}

/// Reads a list of container statuses.
pub(super) fn containers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Containers, D::Error> {
    let statuses = Option::<Vec<ContainerStatus>>::deserialize(deserializer)?;
    let mut containers = Containers::default();
    for status in statuses.into_iter().flatten() {
        containers.restarts = containers.restarts.max(status.restart_count);
        containers.all_restarts = containers.all_restarts.saturating_add(status.restart_count);
        let Some(end) = status.state.and_then(|state| state.terminated) else { continue };
        if end.exit_code != 0 {
            containers.failures.push(Failure { container: status.name, code: end.exit_code });
        }
        containers.finished_at = containers.finished_at.max(end.finished_at);
    }
    Ok(containers)
}

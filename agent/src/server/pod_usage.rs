//! Usage of the running pods and their containers, from the runtime.

use std::collections::{BTreeMap, HashMap};

use coracle_proto::cri::{
    Container, ContainerState, ContainerStats, LinuxPodSandboxStats, ListContainerStatsRequest,
    ListContainersRequest, ListPodSandboxRequest, ListPodSandboxStatsRequest, PodSandbox, PodSandboxState,
    PodSandboxStats,
};

use crate::runtime::{Runtime, RuntimeError};

/// Usage of one pod.
#[derive(Debug, Default)]
pub(super) struct PodUsage {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
    /// Creation time of the sandbox, in nanoseconds since the epoch.
    pub(super) created: i64,
    /// Usage of the pod as a whole. Its containers are in `containers`.
    pub(super) stats: LinuxPodSandboxStats,
    pub(super) containers: Vec<ContainerUsage>,
}

/// Usage of one running container.
#[derive(Debug, Default)]
pub(super) struct ContainerUsage {
    pub(super) name: String,
    /// Creation time of the container, in nanoseconds since the epoch.
    pub(super) created: i64,
    pub(super) stats: ContainerStats,
}

/// The pods with a ready sandbox, and their running containers, by namespace and name.
pub(super) async fn read(runtime: &dyn Runtime) -> Result<Vec<PodUsage>, RuntimeError> {
    let sandboxes = runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await?.items;
    let mut containers = runtime.list_containers(ListContainersRequest::default()).await?.containers;
    containers.retain(|container| container.state() == ContainerState::ContainerRunning);
    let mut stats = match runtime.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default()).await {
        Ok(response) => by_sandbox(response.stats),
        Err(error) => {
            tracing::debug!(error = error.message(), "cannot read the statistics of pod sandboxes");
            HashMap::new()
        }
    };
    if !containers.is_empty() && stats.values().all(|stats| stats.containers.is_empty()) {
        let listed = runtime.list_container_stats(ListContainerStatsRequest::default()).await?.stats;
        add_containers(&mut stats, &containers, listed);
    }
    Ok(joined(sandboxes, &containers, stats))
}

fn by_sandbox(stats: Vec<PodSandboxStats>) -> HashMap<String, LinuxPodSandboxStats> {
    stats.into_iter().filter_map(|stats| Some((stats.attributes?.id, stats.linux?))).collect()
}

/// Adds the usage of containers to the sandboxes that they are in.
fn add_containers(
    stats: &mut HashMap<String, LinuxPodSandboxStats>,
    containers: &[Container],
    listed: Vec<ContainerStats>,
) {
    let sandboxes: HashMap<&str, &str> =
        containers.iter().map(|one| (one.id.as_str(), one.pod_sandbox_id.as_str())).collect();
    for one in listed {
        let id = one.attributes.as_ref().map(|attributes| attributes.id.as_str()).unwrap_or_default();
        if let Some(sandbox) = sandboxes.get(id) {
            stats.entry((*sandbox).to_owned()).or_default().containers.push(one);
        }
    }
}

fn joined(
    sandboxes: Vec<PodSandbox>,
    containers: &[Container],
    mut stats: HashMap<String, LinuxPodSandboxStats>,
) -> Vec<PodUsage> {
    let created: HashMap<&str, i64> =
        containers.iter().map(|container| (container.id.as_str(), container.created_at)).collect();
    let mut pods = BTreeMap::new();
    for sandbox in sandboxes.into_iter().filter(|one| one.state() == PodSandboxState::SandboxReady) {
        let Some(metadata) = sandbox.metadata else { continue };
        let mut stats = stats.remove(&sandbox.id).unwrap_or_default();
        let containers = std::mem::take(&mut stats.containers).into_iter().filter_map(|stats| {
            let attributes = stats.attributes.as_ref()?;
            let created = *created.get(attributes.id.as_str())?;
            let name = attributes.metadata.as_ref()?.name.clone();
            Some(ContainerUsage { name, created, stats })
        });
        let pod = PodUsage {
            containers: containers.collect(),
            namespace: metadata.namespace,
            name: metadata.name,
            uid: metadata.uid,
            created: sandbox.created_at,
            stats,
        };
        pods.insert((pod.namespace.clone(), pod.name.clone(), pod.uid.clone()), pod);
    }
    pods.into_values().collect()
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::{
        ContainerAttributes, ContainerMetadata, PodSandboxAttributes, PodSandboxMetadata,
    };

    use super::*;

    fn sandbox(name: &str, state: PodSandboxState) -> PodSandbox {
        let metadata = PodSandboxMetadata {
            name: name.to_owned(),
            namespace: "n".to_owned(),
            uid: format!("u-{name}"),
            attempt: 0,
        };
        let (metadata, state) = (Some(metadata), state.into());
        PodSandbox { id: format!("s-{name}"), metadata, state, created_at: 7, ..PodSandbox::default() }
    }

    fn running(id: &str, sandbox: &str) -> Container {
        Container {
            id: id.to_owned(),
            pod_sandbox_id: sandbox.to_owned(),
            created_at: 9,
            ..Container::default()
        }
    }

    fn stats(id: &str) -> ContainerStats {
        let attributes = ContainerAttributes {
            id: id.to_owned(),
            metadata: Some(ContainerMetadata { name: format!("name-{id}"), attempt: 0 }),
            ..ContainerAttributes::default()
        };
        ContainerStats { attributes: Some(attributes), ..ContainerStats::default() }
    }

    #[test]
    fn pods_have_their_running_containers() {
        let sandboxes = vec![
            sandbox("b", PodSandboxState::SandboxReady),
            sandbox("a", PodSandboxState::SandboxReady),
            sandbox("ended", PodSandboxState::SandboxNotready),
        ];
        let linux = LinuxPodSandboxStats {
            containers: vec![stats("c"), stats("exited")],
            ..LinuxPodSandboxStats::default()
        };
        let attributes = PodSandboxAttributes { id: "s-b".to_owned(), ..PodSandboxAttributes::default() };
        let listed = PodSandboxStats { attributes: Some(attributes), linux: Some(linux), windows: None };
        let pods = joined(sandboxes, &[running("c", "s-b")], by_sandbox(vec![listed]));
        let names: Vec<&str> = pods.iter().map(|pod| pod.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert!(pods[0].containers.is_empty() && pods[0].created == 7);
        let [container] = pods[1].containers.as_slice() else { panic!("{pods:?}") };
        assert_eq!((container.name.as_str(), container.created), ("name-c", 9));
    }

    #[test]
    fn containers_are_added_for_a_runtime_without_usage_of_pods() {
        let mut all = HashMap::new();
        add_containers(&mut all, &[running("c", "s-b")], vec![stats("c"), stats("other")]);
        let pods = joined(vec![sandbox("b", PodSandboxState::SandboxReady)], &[running("c", "s-b")], all);
        assert_eq!(pods[0].containers.len(), 1);
    }
}

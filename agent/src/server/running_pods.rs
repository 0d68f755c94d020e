//! `/runningpods/`: the pods that the runtime runs, including pods that are no longer desired.

use std::collections::BTreeMap;

use coracle_proto::cri::{
    Container, ContainerState, ListContainersRequest, ListPodSandboxRequest, PodSandbox, PodSandboxMetadata,
    PodSandboxState,
};
use http::Response;
use serde_json::{Value, json};

use super::backend::Backend;
use super::pod_list;
use super::respond::{Refused, on_blocking_thread};
use crate::runtime::{Body, Runtime, RuntimeError};

pub(super) async fn answer(backend: &Backend) -> Response<Body> {
    match listed(&*backend.runtime).await {
        Ok((sandboxes, containers)) => {
            on_blocking_thread(move || pod_list(running(sandboxes, containers).into_iter())).await
        }
        Err(error) => Refused::by_runtime(&error).answer(),
    }
}

async fn listed(runtime: &dyn Runtime) -> Result<(Vec<PodSandbox>, Vec<Container>), RuntimeError> {
    let sandboxes = runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await?.items;
    let containers = runtime.list_containers(ListContainersRequest::default()).await?.containers;
    Ok((sandboxes, containers))
}

/// Pods with a ready sandbox or a running container, with the fields that the kubelet shows of them.
fn running(sandboxes: Vec<PodSandbox>, containers: Vec<Container>) -> Vec<Value> {
    let mut pods: BTreeMap<String, (PodSandboxMetadata, Vec<Value>)> = BTreeMap::new();
    let mut of_sandbox = BTreeMap::new();
    for sandbox in sandboxes {
        let is_ready = sandbox.state() == PodSandboxState::SandboxReady;
        let Some(metadata) = sandbox.metadata else { continue };
        if is_ready {
            pods.entry(metadata.uid.clone()).or_insert_with(|| (metadata.clone(), Vec::new()));
        }
        of_sandbox.insert(sandbox.id, metadata);
    }
    for container in containers.into_iter().filter(|one| one.state() == ContainerState::ContainerRunning) {
        let Some(metadata) = of_sandbox.get(&container.pod_sandbox_id) else { continue };
        let name = container.metadata.map(|metadata| metadata.name).unwrap_or_default();
        let image = container.image.map(|image| image.image).unwrap_or_default();
        let pod = pods.entry(metadata.uid.clone()).or_insert_with(|| (metadata.clone(), Vec::new()));
        pod.1.push(json!({"name": name, "image": image, "resources": {}}));
    }
    let shown = |(metadata, containers): (PodSandboxMetadata, Vec<Value>)| {
        json!({
            "metadata": {"name": metadata.name, "namespace": metadata.namespace, "uid": metadata.uid},
            "spec": {"containers": containers},
            "status": {},
        })
    };
    pods.into_values().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::ContainerMetadata;

    use super::*;

    #[test]
    fn pods_that_run_are_listed_with_their_running_containers() {
        let sandbox = |name: &str, state: PodSandboxState| PodSandbox {
            id: format!("s-{name}"),
            metadata: Some(PodSandboxMetadata {
                name: name.to_owned(),
                namespace: "ns".to_owned(),
                uid: format!("u-{name}"),
                attempt: 0,
            }),
            state: state.into(),
            ..PodSandbox::default()
        };
        let container = |pod: &str, name: &str, state: ContainerState| Container {
            pod_sandbox_id: format!("s-{pod}"),
            metadata: Some(ContainerMetadata { name: name.to_owned(), attempt: 0 }),
            state: state.into(),
            ..Container::default()
        };
        let sandboxes = vec![
            sandbox("ended", PodSandboxState::SandboxNotready),
            sandbox("ready", PodSandboxState::SandboxReady),
        ];
        let containers = vec![
            container("ended", "a", ContainerState::ContainerExited),
            container("ready", "b", ContainerState::ContainerRunning),
            container("ready", "c", ContainerState::ContainerExited),
        ];
        let pods = running(sandboxes, containers);
        assert_eq!(pods.len(), 1, "{pods:?}");
        assert_eq!(pods[0]["metadata"], json!({"name": "ready", "namespace": "ns", "uid": "u-ready"}));
        assert_eq!(pods[0]["spec"]["containers"], json!([{"name": "b", "image": "", "resources": {}}]));
    }
}

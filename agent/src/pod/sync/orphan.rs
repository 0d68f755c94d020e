//! Pods of an earlier agent, found in the runtime, the cgroup tree, the pod directories and the records of claims and
//! devices. A desired pod with the same uid adopts such a pod. Otherwise the pod is ended like a deleted one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::pod::NodeContext;
use crate::pod::config::{GRACE, POD_UID};
use crate::pod::observe::is_mislabelled;
use crate::runtime::RuntimeError;

/// All pods that have sandboxes, cgroups, directories, claims or devices on the node, with the metadata in their
/// labels.
pub(super) async fn find(node: &NodeContext) -> HashMap<String, Arc<Pod>> {
    let mut found: HashMap<String, Arc<Pod>> = HashMap::new();
    let left = node.cgroups.pods().into_iter().chain(node.volumes.pods()).chain(node.dra.pods());
    for uid in left.chain(node.devices.pods()) {
        found.insert(uid.clone(), Arc::new(pod_without_record(&uid, None)));
    }
    let sandboxes = || node.runtime.list_pod_sandbox(cri::ListPodSandboxRequest { filter: None });
    let containers = || node.runtime.list_containers(cri::ListContainersRequest { filter: None });
    for sandbox in add_pods_of_runtime(&mut found, sandboxes, containers).await {
        remove(node, sandbox).await;
    }
    found
}

/// Stops and removes a sandbox with the label of another pod, and its containers.
async fn remove(node: &NodeContext, sandbox: String) {
    tracing::warn!(sandbox, "removing a sandbox with the label of another pod");
    let request = cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() };
    let stopped = node.runtime.stop_pod_sandbox(request).await.err();
    let request = cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.clone() };
    let removed = node.runtime.remove_pod_sandbox(request).await.err();
    for error in stopped.iter().chain(&removed) {
        // The next start of the agent tries again.
        tracing::warn!(
            sandbox,
            error = error.message(),
            "cannot remove a sandbox with the label of another pod"
        );
    }
}

/// Adds the pods of the runtime's sandboxes, with the grace periods in the annotations of their containers. Returns the
/// ids of the sandboxes with the label of another pod. Workers do not observe such sandboxes.
async fn add_pods_of_runtime<S, C>(
    found: &mut HashMap<String, Arc<Pod>>,
    sandboxes: impl FnMut() -> S,
    containers: impl FnMut() -> C,
) -> Vec<String>
where
    S: Future<Output = Result<cri::ListPodSandboxResponse, RuntimeError>>,
    C: Future<Output = Result<cri::ListContainersResponse, RuntimeError>>,
{
    let mut mislabelled = Vec::new();
    for sandbox in listed("sandboxes", sandboxes).await.items {
        // Sandboxes without the label belong to other clients of the CRI.
        let Some(uid) = sandbox.labels.get(POD_UID).cloned() else { continue };
        if is_mislabelled(&sandbox) {
            mislabelled.push(sandbox.id);
            continue;
        }
        found.insert(uid.clone(), Arc::new(pod_without_record(&uid, sandbox.metadata.as_ref())));
    }
    for container in listed("containers", containers).await.containers {
        let grace = container.annotations.get(GRACE).and_then(|g| g.parse().ok());
        let pod = container.labels.get(POD_UID).and_then(|uid| found.get_mut(uid));
        if let (Some(grace), Some(pod)) = (grace, pod) {
            let spec = Arc::make_mut(pod).spec.get_or_insert_default();
            spec.termination_grace_period_seconds = Some(grace);
        }
    }
    mislabelled
}

/// The response to a list, which is retried until it succeeds. Another runtime may not respond while it starts. Without
/// its lists, the sandboxes of deleted pods would stay until the next start of the agent. Their containers would end
/// without their grace periods.
async fn listed<T, F: Future<Output = Result<T, RuntimeError>>>(
    objects: &'static str,
    mut list: impl FnMut() -> F,
) -> T {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
    loop {
        match list().await {
            Ok(response) => return response,
            Err(error) => {
                tracing::warn!(objects, error = error.message(), "cannot list objects of the runtime");
            }
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

fn pod_without_record(uid: &str, metadata: Option<&cri::PodSandboxMetadata>) -> Pod {
    Pod {
        metadata: ObjectMeta {
            uid: Some(uid.to_owned()),
            name: metadata.map(|m| m.name.clone()),
            namespace: metadata.map(|m| m.namespace.clone()),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec::default()),
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// The responses of a runtime that starts: only the third response is a list.
    async fn third<T>(count: &AtomicUsize, response: T) -> Result<T, RuntimeError> {
        match count.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Err(RuntimeError::Unavailable("the runtime starts".to_owned())),
            _ => Ok(response),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pods_and_their_grace_periods_are_found_when_a_runtime_that_starts_responds() {
        let labels = HashMap::from([(POD_UID.to_owned(), "u".to_owned())]);
        let sandbox = cri::PodSandbox { labels: labels.clone(), ..cri::PodSandbox::default() };
        let annotations = HashMap::from([(GRACE.to_owned(), "7".to_owned())]);
        let container = cri::Container { labels, annotations, ..cri::Container::default() };
        let sandboxes = cri::ListPodSandboxResponse { items: vec![sandbox] };
        let containers = cri::ListContainersResponse { containers: vec![container] };
        let counts = [const { AtomicUsize::new(0) }; 2];
        let mut found = HashMap::new();
        let list_sandboxes = || third(&counts[0], sandboxes.clone());
        let list_containers = || third(&counts[1], containers.clone());
        add_pods_of_runtime(&mut found, list_sandboxes, list_containers).await;
        let spec = found["u"].spec.as_ref().unwrap();
        assert_eq!(spec.termination_grace_period_seconds, Some(7));
    }

    #[tokio::test]
    async fn a_sandbox_with_the_label_of_another_pod_is_removed_and_not_adopted() {
        let sandbox = |id: &str, uid: &str| cri::PodSandbox {
            id: id.to_owned(),
            metadata: Some(cri::PodSandboxMetadata { uid: uid.to_owned(), ..Default::default() }),
            labels: HashMap::from([(POD_UID.to_owned(), "victim".to_owned())]),
            ..cri::PodSandbox::default()
        };
        let items = vec![sandbox("of the thief", "thief")];
        let mut found = HashMap::new();
        let list = |items: &[cri::PodSandbox]| cri::ListPodSandboxResponse { items: items.to_vec() };
        let no_containers = || std::future::ready(Ok(cri::ListContainersResponse::default()));
        let sandboxes = || std::future::ready(Ok(list(&items)));
        let removed = add_pods_of_runtime(&mut found, sandboxes, no_containers).await;
        assert_eq!((removed, found.len()), (vec!["of the thief".to_owned()], 0));
        let items = vec![sandbox("own", "victim")];
        let sandboxes = || std::future::ready(Ok(list(&items)));
        let removed = add_pods_of_runtime(&mut found, sandboxes, no_containers).await;
        assert!(removed.is_empty() && found.contains_key("victim"));
    }
}

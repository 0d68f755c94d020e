//! Pods of an earlier agent, found in the runtime, the cgroup tree, the pod directories and the records of claims and
//! devices. A desired pod with the same uid adopts such a pod. Otherwise the pod is ended like a deleted one.

use std::collections::HashMap;
use std::sync::Arc;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::pod::NodeContext;
use crate::pod::config::{GRACE, POD_UID};

/// All pods that have sandboxes, cgroups, directories, claims or devices on the node, with the metadata in their
/// labels.
pub(super) async fn find(node: &NodeContext) -> HashMap<String, Arc<Pod>> {
    let mut found: HashMap<String, Arc<Pod>> = HashMap::new();
    let left = node.cgroups.pods().into_iter().chain(node.volumes.pods()).chain(node.dra.pods());
    for uid in left.chain(node.devices.pods()) {
        found.insert(uid.clone(), Arc::new(pod_without_record(&uid, None)));
    }
    let sandboxes = node.runtime.list_pod_sandbox(cri::ListPodSandboxRequest { filter: None }).await;
    match sandboxes {
        Ok(response) => {
            for sandbox in response.items {
                // Sandboxes without the label belong to other clients of the CRI.
                let Some(uid) = sandbox.labels.get(POD_UID).cloned() else { continue };
                found.insert(uid.clone(), Arc::new(pod_without_record(&uid, sandbox.metadata.as_ref())));
            }
        }
        Err(status) => tracing::warn!(error = status.message(), "cannot list sandboxes"),
    }
    let containers = node.runtime.list_containers(cri::ListContainersRequest { filter: None }).await;
    for container in containers.map(|r| r.containers).unwrap_or_default() {
        let grace = container.annotations.get(GRACE).and_then(|g| g.parse().ok());
        let pod = container.labels.get(POD_UID).and_then(|uid| found.get_mut(uid));
        if let (Some(grace), Some(pod)) = (grace, pod) {
            let spec = Arc::make_mut(pod).spec.get_or_insert_default();
            spec.termination_grace_period_seconds = Some(grace);
        }
    }
    found
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

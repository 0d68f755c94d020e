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
use crate::runtime::Sandboxes;

/// All pods that have sandboxes, cgroups, directories, claims or devices on the node, with the metadata in their
/// labels.
pub(super) async fn find(node: &NodeContext) -> HashMap<String, Arc<Pod>> {
    let mut found: HashMap<String, Arc<Pod>> = HashMap::new();
    let left = node.cgroups.pods().into_iter().chain(node.volumes.pods()).chain(node.dra.pods());
    for uid in left.chain(node.devices.pods()) {
        found.insert(uid.clone(), Arc::new(pod_without_record(&uid, None)));
    }
    for sandbox in sandboxes(&*node.runtime).await {
        // Sandboxes without the label belong to other clients of the CRI.
        let Some(uid) = sandbox.labels.get(POD_UID).cloned() else { continue };
        found.insert(uid.clone(), Arc::new(pod_without_record(&uid, sandbox.metadata.as_ref())));
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

/// All sandboxes of the runtime. Another runtime may not respond while it starts: without its list, the sandboxes of deleted
/// pods would stay until the next start of the agent.
async fn sandboxes<R: Sandboxes + ?Sized>(runtime: &R) -> Vec<cri::PodSandbox> {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
    loop {
        match runtime.list_pod_sandbox(cri::ListPodSandboxRequest { filter: None }).await {
            Ok(response) => return response.items,
            Err(error) => tracing::warn!(error = error.message(), "cannot list sandboxes"),
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
    use crate::runtime::RuntimeError;

    /// A runtime that responds to the third list.
    #[derive(Default)]
    struct Starting(AtomicUsize);

    fn unused<T>() -> Result<T, RuntimeError> {
        Err(RuntimeError::Unsupported("not part of the test".to_owned()))
    }

    #[tonic::async_trait]
    impl Sandboxes for Starting {
        async fn run_pod_sandbox(
            &self,
            _: cri::RunPodSandboxRequest,
        ) -> Result<cri::RunPodSandboxResponse, RuntimeError> {
            unused()
        }

        async fn stop_pod_sandbox(
            &self,
            _: cri::StopPodSandboxRequest,
        ) -> Result<cri::StopPodSandboxResponse, RuntimeError> {
            unused()
        }

        async fn remove_pod_sandbox(
            &self,
            _: cri::RemovePodSandboxRequest,
        ) -> Result<cri::RemovePodSandboxResponse, RuntimeError> {
            unused()
        }

        async fn pod_sandbox_status(
            &self,
            _: cri::PodSandboxStatusRequest,
        ) -> Result<cri::PodSandboxStatusResponse, RuntimeError> {
            unused()
        }

        async fn list_pod_sandbox(
            &self,
            _: cri::ListPodSandboxRequest,
        ) -> Result<cri::ListPodSandboxResponse, RuntimeError> {
            if self.0.fetch_add(1, Ordering::Relaxed) < 2 {
                return Err(RuntimeError::Unavailable("the runtime starts".to_owned()));
            }
            let items = vec![cri::PodSandbox { id: "s".to_owned(), ..cri::PodSandbox::default() }];
            Ok(cri::ListPodSandboxResponse { items })
        }

        async fn list_pod_sandbox_stats(
            &self,
            _: cri::ListPodSandboxStatsRequest,
        ) -> Result<cri::ListPodSandboxStatsResponse, RuntimeError> {
            unused()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn sandboxes_are_listed_when_a_runtime_that_starts_responds() {
        let found = sandboxes(&Starting::default()).await;
        assert_eq!(found.iter().map(|sandbox| sandbox.id.as_str()).collect::<Vec<_>>(), ["s"]);
    }
}

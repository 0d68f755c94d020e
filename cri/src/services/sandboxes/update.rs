//! UpdatePodSandboxResources: records the limits that the kubelet has set on the pod's cgroup.

use coracle_proto::cri;

use super::SandboxService;
use crate::error::Error;
use crate::sandbox::PodSize;

impl SandboxService {
    /// Records the limits of a pod.
    pub(crate) async fn sandbox_update(
        &self,
        request: cri::UpdatePodSandboxResourcesRequest,
    ) -> Result<cri::UpdatePodSandboxResourcesResponse, Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.objects.tables.sandbox(id)?;
        sandbox.shim()?;
        self.transitions.hooks.update_pod_sandbox(&sandbox, &request).await?;
        // A stop in progress must finish first: otherwise this record could replace the record of the stopped sandbox, or
        // remain after its removal.
        let guard = sandbox.ending.lock().await;
        sandbox.shim()?;
        let old = sandbox.size();
        let new = PodSize {
            overhead: request.overhead.map(Box::new).or_else(|| old.overhead.clone()),
            resources: request.resources.or_else(|| old.resources.clone()),
        };
        if new != old {
            sandbox.resize(new);
            self.objects.records.write_sandbox(&sandbox.record_now()).inspect_err(|_| {
                sandbox.resize(old);
            })?;
            coracle_fault::point("update-pod.recorded");
        }
        drop(guard);
        self.transitions.hooks.post_update_pod_sandbox(&sandbox).await;
        Ok(cri::UpdatePodSandboxResourcesResponse {})
    }
}

//! UpdatePodSandboxResources: the kubelet has set the pod's cgroup itself and says what it is now.

use coracle_proto::cri;

use crate::error::Error;
use crate::runtime::Runtime;
use crate::sandbox::PodSize;

impl Runtime {
    /// Notes what a pod may use.
    pub(crate) async fn sandbox_update(
        &self,
        request: cri::UpdatePodSandboxResourcesRequest,
    ) -> Result<cri::UpdatePodSandboxResourcesResponse, Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?;
        sandbox.shim()?;
        self.ask_about_pod_update(&sandbox, &request).await?;
        let old = sandbox.size();
        let new = PodSize {
            overhead: request.overhead.or_else(|| old.overhead.clone()),
            resources: request.resources.or_else(|| old.resources.clone()),
        };
        if new != old {
            sandbox.resize(new);
            self.inner.records.write_sandbox(&sandbox.record_now()).inspect_err(|_| {
                sandbox.resize(old);
            })?;
            coracle_fault::point("update-pod.recorded");
        }
        self.tell_pod_updated(&sandbox).await;
        Ok(cri::UpdatePodSandboxResourcesResponse {})
    }
}

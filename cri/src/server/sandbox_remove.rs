//! RemovePodSandbox: stop it if need be, remove its containers, forget it. Absent is a success.

use coracle_proto::cri;

use super::sandbox_stop::first;
use crate::error::Error;
use crate::runtime::Runtime;
use crate::sandbox;

impl Runtime {
    /// Removes a sandbox and all in it, by force if it runs.
    pub(crate) async fn sandbox_remove(
        &self,
        request: cri::RemovePodSandboxRequest,
    ) -> Result<cri::RemovePodSandboxResponse, Error> {
        let Some(sandbox) = self.inner.sandboxes.get(&request.pod_sandbox_id) else {
            return Ok(cri::RemovePodSandboxResponse {});
        };
        let mut errors: Vec<Error> = self.stop_sandbox(&sandbox).await.err().into_iter().collect();
        for container in self.containers_of(&sandbox.id) {
            errors.extend(self.remove_container(&container).await.err());
        }
        first(errors)?;
        coracle_fault::point("remove-pod.containers");
        let _alone = sandbox.ending.lock().await;
        if self.inner.sandboxes.get(&sandbox.id).is_none() {
            return Ok(cri::RemovePodSandboxResponse {});
        }
        self.inner.cgroups.remove(&self.inner.layout.own_pod(&sandbox.id)).await?;
        coracle_fault::point("remove-pod.cgroup");
        self.tell_pod_removed(&sandbox).await;
        let telling = self.sandbox_gone(&sandbox)?;
        coracle_fault::point("remove-pod.forgotten");
        self.inner.sandboxes.remove(&sandbox.id);
        let metadata = sandbox.config().metadata.clone().unwrap_or_default();
        self.inner.names.release(&sandbox::name(&metadata), &sandbox.id);
        self.inner.selinux.release(&sandbox.id);
        telling.tell_sandbox(&sandbox);
        Ok(cri::RemovePodSandboxResponse {})
    }

    /// Takes back a sandbox that nobody was told of.
    pub(crate) async fn sandbox_unmake(&self, pod_sandbox_id: String) -> Result<(), Error> {
        self.sandbox_remove(cri::RemovePodSandboxRequest { pod_sandbox_id }).await.map(|_removed| ())
    }
}

//! RemovePodSandbox: stops the sandbox, removes its containers, then the sandbox. An absent sandbox is not an error.

use coracle_proto::cri;

use super::SandboxService;
use super::stop::first;
use crate::error::Error;
use crate::sandbox;

impl SandboxService {
    /// Removes a sandbox and its containers. Running containers are killed.
    pub(crate) async fn sandbox_remove(
        &self,
        request: cri::RemovePodSandboxRequest,
    ) -> Result<cri::RemovePodSandboxResponse, Error> {
        let Some(sandbox) = self.objects.tables.sandboxes.get(&request.pod_sandbox_id) else {
            return Ok(cri::RemovePodSandboxResponse {});
        };
        let mut errors: Vec<Error> = self.stop_sandbox(&sandbox).await.err().into_iter().collect();
        for container in self.objects.tables.containers_of(&sandbox.id) {
            errors.extend(self.containers.remove_container(&container).await.err());
        }
        first(errors)?;
        coracle_fault::point("remove-pod.containers");
        let _guard = sandbox.ending.lock().await;
        if self.objects.tables.sandboxes.get(&sandbox.id).is_none() {
            return Ok(cri::RemovePodSandboxResponse {});
        }
        self.machine.cgroups.remove(&self.machine.layout.own_pod(&sandbox.id)).await?;
        self.machine.cgroups.remove_shim(&self.machine.layout.shim_of_pod(&sandbox.id)).await;
        coracle_fault::point("remove-pod.cgroup");
        self.transitions.hooks.remove_pod_sandbox(&sandbox).await;
        let pending = self.transitions.outbox.record_sandbox_removal(&sandbox)?;
        coracle_fault::point("remove-pod.forgotten");
        self.objects.tables.sandboxes.remove(&sandbox.id);
        let metadata = sandbox.config().metadata.clone().unwrap_or_default();
        self.objects.names.release(&sandbox::name(&metadata), &sandbox.id);
        self.machine.selinux.release(&sandbox.id);
        pending.send_for_sandbox(&sandbox);
        Ok(cri::RemovePodSandboxResponse {})
    }

    /// Undoes a creation whose caller disconnected before the response.
    pub(crate) async fn undo_run(&self, pod_sandbox_id: String) -> Result<(), Error> {
        self.sandbox_remove(cri::RemovePodSandboxRequest { pod_sandbox_id }).await.map(|_removed| ())
    }
}

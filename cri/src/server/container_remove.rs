//! RemoveContainer: end it by force if it runs, then forget it. Absent is a success.

use std::sync::Arc;

use coracle_proto::cri;
use tracing::warn;

use crate::container::{self, Container};
use crate::error::Error;
use crate::runtime::Runtime;

impl Runtime {
    /// Removes a container. Its log stays: it is the client's.
    pub(crate) async fn container_remove(
        &self,
        request: cri::RemoveContainerRequest,
    ) -> Result<cri::RemoveContainerResponse, Error> {
        if let Some(container) = self.inner.containers.get(&request.container_id) {
            self.remove_container(&container).await?;
        }
        Ok(cri::RemoveContainerResponse {})
    }

    /// Takes back a container that nobody was told of.
    pub(super) async fn container_unmake(&self, container_id: String) -> Result<(), Error> {
        self.container_remove(cri::RemoveContainerRequest { container_id }).await.map(|_removed| ())
    }

    /// Ends and forgets a container.
    pub(super) async fn remove_container(&self, container: &Container) -> Result<(), Error> {
        // A checkpoint of one that is killed ends at once, and would be waited for.
        self.kill_container(container).await?;
        let _alone = container.removing.lock().await;
        if self.inner.containers.get(&container.id).is_none() {
            return Ok(());
        }
        self.kill_container(container).await?;
        self.tell_removed(container).await;
        if let Ok(shim) = self.shim_of(container) {
            shim.delete(&container.id).await.map_err(Error::shim("delete the container"))?;
            coracle_fault::point("remove.deleted");
        }
        self.run_hooks_after_end(container).await;
        self.inner.cgroups.kill(&container.record.cgroup).await;
        self.inner.cgroups.remove(&container.record.cgroup).await?;
        coracle_fault::point("remove.cgroup");
        let telling = self.container_gone(container)?;
        self.discard_layer(&container.id);
        coracle_fault::point("remove.forgotten");
        self.inner.containers.remove(&container.id);
        self.inner.selinux.release(&container.id);
        let metadata = container.record.config.metadata.clone().unwrap_or_default();
        let name = container::name(&metadata, &container.record.sandbox_id);
        self.inner.names.release(&name, &container.id);
        telling.tell(container);
        Ok(())
    }

    /// Removes a writable layer that is nobody's any more, one at a time and beside all else: what a
    /// container wrote may be much, and nobody needs to wait for the disk.
    pub(crate) fn discard_layer(&self, id: &str) {
        let (inner, id) = (Arc::clone(&self.inner), id.to_owned());
        tokio::spawn(async move {
            let _one = inner.discarding.lock().await;
            let (records, layer) = (inner.records.clone(), id.clone());
            let removed = tokio::task::spawn_blocking(move || records.remove_layer(&layer)).await;
            // One that is cancelled by the runtime's end is what the next start is for.
            if let Ok(Err(error)) = removed {
                warn!(container = id, error = error.chain(), "a layer stays until the next start");
            }
        });
    }
}

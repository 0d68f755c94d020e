//! RemoveContainer: kills the container if it runs, then removes it. An absent container is not an error.

use std::sync::Arc;

use coracle_proto::cri;
use tracing::warn;

use super::service::ContainerService;
use crate::container::{self, Container};
use crate::error::Error;

impl ContainerService {
    /// Removes a container. Its log files stay: they belong to the client.
    pub(crate) async fn container_remove(
        &self,
        request: cri::RemoveContainerRequest,
    ) -> Result<cri::RemoveContainerResponse, Error> {
        if let Some(container) = self.objects.tables.containers.get(&request.container_id) {
            self.remove_container(&container).await?;
        }
        Ok(cri::RemoveContainerResponse {})
    }

    /// Undoes a creation whose caller disconnected before the response.
    pub(crate) async fn undo_create(&self, container_id: String) -> Result<(), Error> {
        self.container_remove(cri::RemoveContainerRequest { container_id }).await.map(|_removed| ())
    }

    /// Kills and removes a container.
    pub(crate) async fn remove_container(&self, container: &Container) -> Result<(), Error> {
        // Kill first: this ends a checkpoint in progress, which holds the lock that is taken below.
        self.kill_container(container).await?;
        let _guard = container.removing.lock().await;
        if self.objects.tables.containers.get(&container.id).is_none() {
            return Ok(());
        }
        self.kill_container(container).await?;
        self.transitions.hooks.remove_container(container).await;
        if let Ok(shim) = self.objects.tables.shim_of(container) {
            shim.delete(&container.id).await.map_err(Error::shim("delete the container"))?;
            coracle_fault::point("remove.deleted");
        }
        self.transitions.hooks.run_poststop_hooks(container).await;
        self.machine.cgroups.kill(&container.record.cgroup).await;
        self.machine.cgroups.remove(&container.record.cgroup).await?;
        coracle_fault::point("remove.cgroup");
        let pending = self.transitions.outbox.record_container_removal(container)?;
        self.remove_layer(&container.id);
        coracle_fault::point("remove.forgotten");
        self.objects.tables.containers.remove(&container.id);
        self.machine.selinux.release(&container.id);
        let metadata = container.record.config.metadata.clone().unwrap_or_default();
        let name = container::name(&metadata, &container.record.sandbox_id);
        self.objects.names.release(&name, &container.id);
        pending.send_for_container(container);
        Ok(())
    }

    /// Removes the writable layer of a removed container in a task, one layer at a time. A layer can be large, so no
    /// call waits for its removal.
    pub(crate) fn remove_layer(&self, id: &str) {
        let (removal, records, id) =
            (Arc::clone(&self.layer_removal), Arc::clone(&self.objects.records), id.to_owned());
        coracle_threads::spawn(async move {
            let _one = removal.lock().await;
            let layer = id.clone();
            let removed = coracle_threads::spawn_blocking(move || records.remove_layer(&layer)).await;
            // If the runtime ends first, its next start removes the layer.
            if let Ok(Err(error)) = removed {
                warn!(container = id, error = error.chain(), "cannot remove a layer; the next start retries");
            }
        });
    }
}

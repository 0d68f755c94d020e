//! RemoveContainer: end it by force if it runs, then forget it. Absent is a success.

use coracle_proto::cri;
use cri::ContainerEventType::ContainerDeletedEvent;

use crate::container::{self, Container};
use crate::error::Error;
use crate::lock::locked;
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

    /// Ends and forgets a container.
    pub(super) async fn remove_container(&self, container: &Container) -> Result<(), Error> {
        let _alone = container.removing.lock().await;
        if self.inner.containers.get(&container.id).is_none() {
            return Ok(());
        }
        self.kill_container(container).await?;
        if let Ok(shim) = self.shim_of(container) {
            shim.delete(&container.id).await.map_err(Error::shim("delete the container"))?;
        }
        self.inner.cgroups.kill(&container.record.cgroup).await;
        self.inner.cgroups.remove(&container.record.cgroup)?;
        self.inner.records.remove_container(&container.id)?;
        self.inner.containers.remove(&container.id);
        let metadata = container.record.config.metadata.clone().unwrap_or_default();
        locked(&self.inner.names).remove(&container::name(&metadata, &container.record.sandbox_id));
        self.event(&container.record.sandbox_id, &container.id, ContainerDeletedEvent);
        Ok(())
    }
}

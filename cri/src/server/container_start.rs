//! StartContainer.

use coracle_proto::cri;
use cri::ContainerEventType::ContainerStartedEvent;

use super::sandbox_run::now;
use crate::container::Container;
use crate::error::Error;
use crate::records::ContainerPhase;
use crate::runtime::Runtime;

impl Runtime {
    /// Starts a created container.
    pub(crate) async fn container_start(
        &self,
        request: cri::StartContainerRequest,
    ) -> Result<cri::StartContainerResponse, Error> {
        let container = self.container(&request.container_id)?;
        let _exits_wait = container.starting.lock().await;
        startable(&container)?;
        let shim = self.shim_of(&container)?;
        shim.start(&container.id).await.map_err(Error::shim("start the container"))?;
        container.started(now());
        self.inner.records.write_container(&container.record_now())?;
        self.event(&container.record.sandbox_id, &container.id, ContainerStartedEvent);
        Ok(cri::StartContainerResponse {})
    }
}

fn startable(container: &Container) -> Result<(), Error> {
    let state = match container.phase() {
        ContainerPhase::Created => return Ok(()),
        ContainerPhase::Creating => "being created",
        ContainerPhase::Running { .. } => "running",
        ContainerPhase::Exited(_) => "exited",
    };
    Err(Error::WrongState { what: "container", id: container.id.clone(), state })
}

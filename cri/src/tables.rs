//! The tables of live sandboxes and containers, shared by all services.

use std::sync::Arc;

use crate::container::Container;
use crate::error::Error;
use crate::records::ContainerPhase;
use crate::sandbox::Sandbox;
use crate::shim_client::Shim;
use crate::table::Table;

/// The tables of live sandboxes and containers.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) sandboxes: Table<Sandbox>,
    pub(crate) containers: Table<Container>,
}

// === impl Tables ===

impl Tables {
    /// The sandbox with this id or unique id prefix.
    pub(crate) fn sandbox(&self, id: &str) -> Result<Arc<Sandbox>, Error> {
        self.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))
    }

    /// A container that clients can see: its creation is complete.
    pub(crate) fn container(&self, id: &str) -> Result<Arc<Container>, Error> {
        let container = self.containers.get(id).filter(|container| container.visible());
        container.ok_or_else(|| Error::no_container(id))
    }

    /// A running container.
    pub(crate) fn running(&self, id: &str) -> Result<Arc<Container>, Error> {
        let container = self.container(id)?;
        match container.phase() {
            ContainerPhase::Running { .. } => Ok(container),
            _ => Err(Error::WrongState { what: "container", id: container.id.clone(), state: "not running" }),
        }
    }

    /// All containers of a sandbox, including containers that are being created.
    pub(crate) fn containers_of(&self, sandbox_id: &str) -> Vec<Arc<Container>> {
        self.containers.of_sandbox(sandbox_id)
    }

    /// The shim of a container's pod.
    pub(crate) fn shim_of(&self, container: &Container) -> Result<Shim, Error> {
        self.sandbox(&container.record.sandbox_id)?.shim()
    }
}

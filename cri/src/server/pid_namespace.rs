//! A container that joins the pid namespace of another process of its pod.

use std::io::ErrorKind;

use coracle_proto::{cri, shim};
use tracing::warn;

use crate::container::Container;
use crate::error::Error;
use crate::pidfd;
use crate::records::ContainerPhase;
use crate::runtime::Runtime;
use crate::sandbox::namespaces::{self, Pids};
use crate::sandbox::{Live, Sandbox, process1};

impl Runtime {
    /// Has the shim make the container, and returns the pid of its first process.
    pub(super) async fn create_in_shim(
        &self,
        sandbox: &Sandbox,
        live: &Live,
        (container, create): (&Container, shim::CreateContainer),
    ) -> Result<i32, Error> {
        let joined = self.joined_process(sandbox, live, &container.record.config)?;
        let pid = live.shim.create(create).await.map_err(Error::shim("create the container"))?;
        // A shim of an earlier version joins by the number, which was its own if the process lives now.
        if let Some((process, id)) = joined.filter(|(process, _)| !process.is_alive()) {
            warn!(container = container.id, pid = process.pid(), "the pid namespace to join has ended");
            return Err(Error::WrongState { what: "the pid namespace of", id, state: "ended" });
        }
        Ok(pid)
    }

    /// The process whose pid namespace a container joins, and the sandbox or container whose process it is.
    fn joined_process(
        &self,
        sandbox: &Sandbox,
        live: &Live,
        config: &cri::ContainerConfig,
    ) -> Result<Option<(pidfd::Process, String)>, Error> {
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let options = security.and_then(|security| security.namespace_options.as_ref());
        let (pid, id) = match namespaces::pids(&namespaces::options(sandbox.config()), options) {
            Pids::Own | Pids::Nodes => return Ok(None),
            Pids::Pods => (live.init_pid, &sandbox.id),
            Pids::Targets => {
                let id = options.map(|options| &options.target_id).unwrap_or(&sandbox.id);
                (self.target_pid(sandbox, id)?, id)
            }
        };
        let process = process1::process(pid, &live.shim).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                Error::WrongState { what: "the pid namespace of", id: id.clone(), state: "ended" }
            }
            _ => Error::Kernel { doing: "open the process whose pid namespace is joined", source: error },
        })?;
        Ok(Some((process, id.clone())))
    }

    /// The first process of a container of the same pod.
    pub(super) fn target_pid(&self, sandbox: &Sandbox, id: &str) -> Result<i32, Error> {
        let target = self.inner.containers.get(id).filter(|target| target.record.sandbox_id == sandbox.id);
        let target = target.ok_or_else(|| Error::no_container(id))?;
        match target.phase() {
            ContainerPhase::Running { .. } => Ok(target.pid()),
            _ => Err(Error::WrongState {
                what: "target container",
                id: target.id.clone(),
                state: "not running",
            }),
        }
    }
}

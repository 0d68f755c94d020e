//! Containers that join the pid namespace of another process of their pod.

use std::io::ErrorKind;

use coracle_proto::{cri, shim};
use tracing::warn;

use super::service::ContainerService;
use crate::container::Container;
use crate::error::Error;
use crate::namespaces::{self, PidNamespace};
use crate::nri::PodOf;
use crate::pidfd;
use crate::records::ContainerPhase;
use crate::sandbox::{Sandbox, process1};

/// A container that the shim is to create.
pub(super) struct ShimCreate<'a> {
    pub(super) container: &'a Container,
    pub(super) call: shim::CreateContainer,
}

impl ContainerService {
    /// Lets the shim create the container. Returns the pid of its first process.
    pub(super) async fn create_in_shim(&self, pod: PodOf<'_>, create: ShimCreate<'_>) -> Result<i32, Error> {
        let ShimCreate { container, call } = create;
        let joined = self.joined_process(pod, &container.record.config)?;
        let pid = pod.live.shim.create(call).await.map_err(Error::shim("create the container"))?;
        // A shim of an earlier version joins by pid. If the process is still alive now, the pid was not reused meanwhile.
        if let Some((process, id)) = joined.filter(|(process, _)| !process.is_alive()) {
            warn!(container = container.id, pid = process.pid(), "the pid namespace to join has ended");
            return Err(Error::WrongState { what: "the pid namespace of", id, state: "ended" });
        }
        Ok(pid)
    }

    /// The process whose pid namespace a container joins, and the id of its sandbox or container.
    fn joined_process(
        &self,
        pod: PodOf<'_>,
        config: &cri::ContainerConfig,
    ) -> Result<Option<(pidfd::Process, String)>, Error> {
        let PodOf { sandbox, live } = pod;
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let options = security.and_then(|security| security.namespace_options.as_ref());
        let (pid, id) = match namespaces::pids(&namespaces::options(sandbox.config()), options) {
            PidNamespace::Container | PidNamespace::Node => return Ok(None),
            PidNamespace::Pod => (live.init_pid, &sandbox.id),
            PidNamespace::Target => {
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
        let target =
            self.objects.tables.containers.get(id).filter(|target| target.record.sandbox_id == sandbox.id);
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

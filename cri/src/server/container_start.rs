//! StartContainer.

use coracle_proto::cri;

use super::exec_sync::exit_code;
use super::sandbox_run::now;
use crate::container::Container;
use crate::error::Error;
use crate::records::{ContainerPhase, ExitRecord};
use crate::runtime::Runtime;
use crate::shim_client::{self, Shim};
use crate::steps::Steps;

/// The exit code of a container whose processes could not be restored, as of all that could not begin.
const NOT_RESTORED: i32 = 128;

impl Runtime {
    /// Starts a created container.
    pub(crate) async fn container_start(
        &self,
        request: cri::StartContainerRequest,
    ) -> Result<cri::StartContainerResponse, Error> {
        let mut steps = Steps::begin();
        let container = self.container(&request.container_id)?;
        let _pass = self.inner.nri.pass().await;
        let _exits_wait = container.starting.lock().await;
        startable(&container)?;
        let shim = self.shim_of(&container)?;
        self.tell_starting(&container).await?;
        // Taken before, since a short command may have ended before the shim's answer is read.
        let started_at = now();
        self.begin(&container, &shim).await?;
        coracle_fault::point("start.runs");
        steps.done("the program runs");
        container.started(started_at);
        let telling = self.container_runs(&container);
        coracle_fault::point("start.recorded");
        telling.tell(&container);
        self.run_hooks_after_start(&container).await?;
        steps.done("record");
        self.tell_started(&container).await;
        steps.tell("StartContainer", &container.id);
        Ok(cri::StartContainerResponse {})
    }
}

impl Runtime {
    /// Begins its processes: from its command, or from a checkpoint.
    async fn begin(&self, container: &Container, shim: &Shim) -> Result<(), Error> {
        if let Some(restore) = &container.record.restore {
            let restored = self.restore_processes(container, shim, restore).await;
            return restored.or_else(|error| {
                self.note_start_error(container, NOT_RESTORED, error.chain())?;
                Err(error)
            });
        }
        let started = shim.start(&container.id).await;
        started.or_else(|source| {
            self.start_failed(container, &source)?;
            Err(Error::Shim { doing: "start the container", source })
        })
    }

    /// A command that cannot be run ends its container, with the reason that Kubernetes shows.
    fn start_failed(&self, container: &Container, why: &shim_client::Error) -> Result<(), Error> {
        let Some(code) = exit_code(why.kind) else { return Ok(()) };
        self.note_start_error(container, code, why.message.clone())
    }

    fn note_start_error(&self, container: &Container, code: i32, message: String) -> Result<(), Error> {
        let exit =
            ExitRecord { started_at: 0, finished_at: now(), code, reason: "StartError".to_owned(), message };
        self.note_end(container, exit)
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

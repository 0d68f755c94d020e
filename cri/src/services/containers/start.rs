//! StartContainer.

use coracle_proto::cri;

use super::service::ContainerService;
use crate::clock::now;
use crate::container::Container;
use crate::error::Error;
use crate::records::{ContainerPhase, ExitRecord};
use crate::services::execs::exit_code;
use crate::shim_client::{self, Shim};
use crate::steps::Steps;

/// Exit code of a container whose processes could not be restored: the code of a failed start.
const NOT_RESTORED: i32 = 128;

impl ContainerService {
    /// Starts a created container.
    pub(crate) async fn container_start(
        &self,
        request: cri::StartContainerRequest,
    ) -> Result<cri::StartContainerResponse, Error> {
        let mut steps = Steps::begin();
        let container = self.objects.tables.container(&request.container_id)?;
        let _guard = self.transitions.hooks.block_joins().await;
        let _exits_wait = container.starting.lock().await;
        startable(&container)?;
        // The sandbox is checked with the lock held: a stop that begins later waits for the lock, and then kills the
        // container.
        let sandbox = self.objects.tables.sandbox(&container.record.sandbox_id)?;
        let shim = sandbox.live_for_containers()?.shim;
        self.transitions.hooks.start_container(&container).await?;
        // The time is taken before the start, because a short command can end before the shim's answer is read.
        let started_at = now();
        self.start_processes(&container, &shim).await?;
        coracle_fault::point("start.runs");
        steps.done("the program runs");
        container.started(started_at);
        let pending = self.transitions.outbox.record_running(&container);
        coracle_fault::point("start.recorded");
        pending.send_for_container(&container);
        self.transitions.hooks.run_poststart_hooks(&container).await?;
        steps.done("record");
        self.transitions.hooks.post_start_container(&container).await;
        steps.finish("StartContainer", &container.id);
        Ok(cri::StartContainerResponse {})
    }

    /// Starts the container's processes: its command, or the processes of a checkpoint.
    async fn start_processes(&self, container: &Container, shim: &Shim) -> Result<(), Error> {
        if let Some(restore) = &container.record.restore {
            let restored = self.restore_processes(container, shim, restore).await;
            return restored.or_else(|error| {
                self.record_start_error(container, NOT_RESTORED, error.chain())?;
                Err(error)
            });
        }
        let started = shim.start(&container.id).await;
        started.or_else(|source| {
            self.start_failed(container, &source)?;
            Err(Error::Shim { doing: "start the container", source })
        })
    }

    /// Records a container whose command cannot be executed as exited, with the reason that Kubernetes shows.
    fn start_failed(&self, container: &Container, why: &shim_client::Error) -> Result<(), Error> {
        let Some(code) = exit_code(why.kind) else { return Ok(()) };
        self.record_start_error(container, code, why.message.clone())
    }

    fn record_start_error(&self, container: &Container, code: i32, message: String) -> Result<(), Error> {
        let exit =
            ExitRecord { started_at: 0, finished_at: now(), code, reason: "StartError".to_owned(), message };
        self.transitions.exits.record_exit(container, exit)
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

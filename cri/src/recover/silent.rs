//! Pods whose shims live and did not answer when the runtime started. Until one does, its pod is not ready, can be
//! stopped and removed, and its containers are as they are on record. What it then says is caught up with.

use std::sync::Arc;

use coracle_proto::cri::ContainerEventType::ContainerStartedEvent;
use coracle_proto::shim::{ContainerState, State};
use tracing::{info, warn};

use super::phase::phase_now;
use crate::container::Container;
use crate::error::Error;
use crate::exits::exit_record;
use crate::records::{ContainerPhase, SandboxRecord};
use crate::runtime::Runtime;
use crate::sandbox::{Sandbox, SandboxState, process1};
use crate::server::now;
use crate::shim_client::Shim;

impl Runtime {
    /// Puts a sandbox into the table whose shim is silent, and waits for its answer or its end in a task that keeps no
    /// runtime alive.
    pub(super) fn adopt_silent(&self, record: SandboxRecord, shim: Shim) {
        let sandbox = Arc::new(Sandbox::new(record, SandboxState::Silent(shim.clone())));
        self.inner.sandboxes.insert(&sandbox.id, Arc::clone(&sandbox));
        let inner = Arc::downgrade(&self.inner);
        tokio::spawn(async move {
            let answer = shim.hello().await;
            let Some(inner) = inner.upgrade() else { return };
            let runtime = Self { inner };
            match answer {
                Ok(state) => runtime.shim_woke(&sandbox, &shim, state).await,
                Err(error) => warn!(sandbox = sandbox.id, %error, "a silent shim did not answer any more"),
            }
            runtime.listen(sandbox, shim);
        });
    }

    /// Catches up with a shim to which the connection was made anew. False when its sandbox is over.
    pub(super) async fn shim_linked(&self, sandbox: &Arc<Sandbox>, shim: &Shim, state: State) -> bool {
        if sandbox.is_silent() {
            self.shim_woke(sandbox, shim, state).await;
            return !sandbox.is_over();
        }
        self.shim_answered(sandbox, shim, state).await
    }

    async fn shim_woke(&self, sandbox: &Arc<Sandbox>, shim: &Shim, state: State) {
        let _alone = sandbox.ending.lock().await;
        if !self.shim_answered(sandbox, shim, state).await {
            return;
        }
        info!(sandbox = sandbox.id, "a silent shim answers again");
        let mut telling = self.telling();
        sandbox.note(telling.next(ContainerStartedEvent, now()));
        if let Err(error) = self.inner.records.write_sandbox(&sandbox.record_now()) {
            warn!(sandbox = sandbox.id, error = error.chain(), "could not record a sandbox");
        }
        telling.tell_sandbox(sandbox);
    }

    /// Catches up with a shim that nobody heard for a while. False when its sandbox is over.
    async fn shim_answered(&self, sandbox: &Arc<Sandbox>, shim: &Shim, mut state: State) -> bool {
        // From before any can be made that the shim did not know then.
        let containers = self.containers_of(&sandbox.id);
        if matches!(sandbox.answered(shim, state.init_pid), SandboxState::NotReady) {
            return false;
        }
        if let Some(live) = sandbox.live() {
            process1::watch(sandbox, &live);
        }
        state.execs.retain(|exec| !sandbox.expects_exec(&exec.exec_id));
        self.end_execs(state.execs);
        for container in &containers {
            let seen = state.containers.iter().find(|seen| seen.container_id == container.id);
            let caught_up = match seen {
                Some(seen) => self.catch_up(container, seen).await,
                // Or one that is being undone, since the shim never heard of it.
                None if matches!(container.phase(), ContainerPhase::Exited(_)) || !container.visible() => {
                    Ok(())
                }
                None => {
                    self.container_lost(container).await;
                    Ok(())
                }
            };
            if let Err(error) = caught_up {
                warn!(container = container.id, error = error.chain(), "could not record a container");
            }
        }
        // Half-made, and undone when nobody could tell it so.
        for unknown in state.containers.iter().map(|seen| &seen.container_id) {
            if containers.iter().all(|container| container.id != *unknown)
                && let Err(error) = shim.delete(unknown).await
            {
                warn!(container = unknown, %error, "could not delete what nobody owns");
            }
        }
        true
    }

    /// Takes a container through what it went through meanwhile.
    async fn catch_up(&self, container: &Container, seen: &ContainerState) -> Result<(), Error> {
        let _alone = container.starting.lock().await;
        if seen.pid > 0 {
            container.restored(seen.pid);
        }
        let before = container.phase();
        if let (ContainerPhase::Created, ContainerPhase::Running { started_at }) =
            (&before, phase_now(&before, seen))
        {
            container.started(started_at);
            self.container_runs(container).tell(container);
        }
        match &seen.exit {
            Some(exit) => self.note_end(container, exit_record(container, exit)),
            None => Ok(()),
        }
    }
}

//! Pods with a silent shim: a shim that runs, but did not respond when the runtime started.
//!
//! Until the shim answers, its pod is not ready, can be stopped and removed, and its containers keep the recorded state.
//! When the shim answers, the runtime applies the transitions that it missed.

use std::sync::Arc;

use coracle_proto::cri::ContainerEventType::ContainerStartedEvent;
use coracle_proto::shim::{ContainerState, State};
use tracing::{info, warn};

use super::ShimMonitor;
use super::phase::current_phase;
use crate::clock::now;
use crate::container::Container;
use crate::error::Error;
use crate::exit_recorder::exit_record;
use crate::records::{ContainerPhase, SandboxRecord};
use crate::sandbox::{Sandbox, SandboxState, process1};
use crate::shim_client::Shim;

impl ShimMonitor {
    /// Adds a sandbox with a silent shim to the table. A task waits for the shim's answer or end.
    pub(crate) fn adopt_silent(&self, record: SandboxRecord, shim: Shim) {
        let sandbox = Arc::new(Sandbox::new(record, SandboxState::Silent(shim.clone())));
        self.state.tables.sandboxes.insert(&sandbox.id, Arc::clone(&sandbox));
        // A weak reference: the task does not keep the runtime alive.
        let state = Arc::downgrade(&self.state);
        coracle_threads::spawn(async move {
            let answer = shim.hello().await;
            let Some(state) = state.upgrade() else { return };
            let monitor = Self { state };
            match answer {
                Ok(state) => monitor.shim_responded(&sandbox, &shim, state).await,
                Err(error) => {
                    warn!(sandbox = sandbox.id, %error, "cannot get the state of a shim that did not respond");
                }
            }
            monitor.listen(sandbox, shim);
        });
    }

    /// Applies the state of a shim after a reconnect. Returns false if the sandbox has ended.
    pub(super) async fn shim_linked(&self, sandbox: &Arc<Sandbox>, shim: &Shim, state: State) -> bool {
        if sandbox.is_silent() {
            self.shim_responded(sandbox, shim, state).await;
            return !sandbox.is_over();
        }
        self.apply_state(sandbox, shim, state).await
    }

    async fn shim_responded(&self, sandbox: &Arc<Sandbox>, shim: &Shim, state: State) {
        let _guard = sandbox.ending.lock().await;
        if !self.apply_state(sandbox, shim, state).await {
            return;
        }
        info!(sandbox = sandbox.id, "a shim responds again");
        if sandbox.is_stopping() {
            // A stop has failed and cannot be reverted: the pod does not become ready again.
            return;
        }
        let mut pending = self.state.exits.outbox.pending();
        sandbox.note(pending.add(ContainerStartedEvent, now()));
        if let Err(error) = self.state.records.write_sandbox(&sandbox.record_now()) {
            warn!(sandbox = sandbox.id, error = error.chain(), "cannot record a sandbox");
        }
        pending.send_for_sandbox(sandbox);
    }

    /// Applies the state of a shim that was not connected for a while. Returns false if the sandbox has ended.
    async fn apply_state(&self, sandbox: &Arc<Sandbox>, shim: &Shim, mut state: State) -> bool {
        let this = &self.state;
        // Read before the sandbox is ready: a container created later is not in the shim's answer.
        let containers = this.tables.containers_of(&sandbox.id);
        if matches!(sandbox.answered(shim, state.init_pid), SandboxState::NotReady) {
            return false;
        }
        if let Some(live) = sandbox.live() {
            process1::watch(sandbox, &live);
        }
        state.execs.retain(|exec| !sandbox.expects_exec(&exec.exec_id));
        this.exec_killer.kill_orphaned(state.execs);
        for container in &containers {
            let found = state.containers.iter().find(|found| found.container_id == container.id);
            let applied = match found {
                Some(found) => self.apply_container(container, found).await,
                // Nothing to record: the container has ended, or its creation is not complete and will be undone.
                None if matches!(container.phase(), ContainerPhase::Exited(_)) || !container.visible() => {
                    Ok(())
                }
                None => {
                    this.exits.end_lost_container(container).await;
                    Ok(())
                }
            };
            if let Err(error) = applied {
                warn!(container = container.id, error = error.chain(), "cannot record a container");
            }
        }
        // Containers whose creation was undone while the shim could not be reached.
        for unknown in state.containers.iter().map(|found| &found.container_id) {
            if containers.iter().all(|container| container.id != *unknown)
                && let Err(error) = shim.delete(unknown).await
            {
                warn!(container = unknown, %error, "cannot delete a container without a record");
            }
        }
        true
    }

    /// Applies the transitions of a container that the runtime missed.
    async fn apply_container(&self, container: &Container, found: &ContainerState) -> Result<(), Error> {
        let _guard = container.starting.lock().await;
        if found.pid > 0 {
            container.restored(found.pid);
        }
        let exits = &self.state.exits;
        let before = container.phase();
        if let (ContainerPhase::Created, ContainerPhase::Running { started_at }) =
            (&before, current_phase(&before, found))
        {
            container.started(started_at);
            exits.outbox.record_running(container).send_for_container(container);
        }
        match &found.exit {
            Some(exit) => exits.record_exit(container, exit_record(container, exit)),
            None => Ok(()),
        }
    }
}

//! StopContainer: the stop signal, the grace period, then SIGKILL. A stop of an absent or exited container succeeds.

use std::sync::atomic::Ordering;
use std::time::Duration;

use coracle_proto::{cri, shim};
use nix::sys::signal::Signal;
use tokio::time::timeout;
use tracing::warn;

use super::service::ContainerService;
use crate::container::Container;
use crate::error::Error;
use crate::records::ContainerPhase;
use crate::sandbox::{LiveShim, SandboxState};
use crate::shim_client::ErrorKind;

/// Timeout for the end of killed processes.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

impl ContainerService {
    /// Stops a container. The request's `timeout` is the grace period in seconds.
    pub(crate) async fn container_stop(
        &self,
        request: cri::StopContainerRequest,
    ) -> Result<cri::StopContainerResponse, Error> {
        let Some(container) = self.objects.tables.containers.get(&request.container_id) else {
            return Ok(cri::StopContainerResponse {});
        };
        let grace = Duration::from_secs(u64::try_from(request.timeout).unwrap_or(0));
        let running = matches!(container.phase(), ContainerPhase::Running { .. });
        if running && !grace.is_zero() && self.stop_gracefully(&container, grace).await {
            self.transitions.hooks.stop_container(&container).await;
            return Ok(cri::StopContainerResponse {});
        }
        self.kill_container(&container).await?;
        self.transitions.hooks.stop_container(&container).await;
        Ok(cri::StopContainerResponse {})
    }

    /// Sends the stop signal and waits for the grace period. Returns whether the container ended.
    async fn stop_gracefully(&self, container: &Container, grace: Duration) -> bool {
        let Ok(shim) = self.objects.tables.shim_of(container) else { return false };
        // If the container has ended meanwhile, the wait returns at once. If the shim is gone, the kill that follows
        // reports it.
        let sent = shim.kill(&container.id, container.record.stop_signal).await;
        coracle_fault::point("stop.signalled");
        if sent.is_err_and(|error| error.kind == ErrorKind::Silent) {
            return false;
        }
        timeout(grace, container.wait_exited()).await.is_ok()
    }

    /// Kills a container and waits until its end is recorded.
    pub(crate) async fn kill_container(&self, container: &Container) -> Result<(), Error> {
        let in_state = |state| Error::WrongState { what: "container", id: container.id.clone(), state };
        // After this wait, a creation in progress is complete or undone, unless the shim does not answer.
        let limit = self.config.shim_timeouts.end;
        if timeout(limit, container.starting.lock()).await.is_err() {
            return Err(in_state("being created or started"));
        }
        let gone = self.objects.tables.containers.get(&container.id).is_none();
        if gone || matches!(container.phase(), ContainerPhase::Exited(_)) {
            return Ok(());
        }
        container.stopping.store(true, Ordering::SeqCst);
        // The state is read once: if the shim answered between two reads, it would neither be called nor count as
        // silent.
        let sandbox = self.objects.tables.sandboxes.get(&container.record.sandbox_id);
        let state = sandbox.map_or(SandboxState::NotReady, |sandbox| sandbox.state());
        if matches!(state, SandboxState::Silent(_)) {
            return self.kill_without_shim(container).await;
        }
        if let SandboxState::Ready(LiveShim { shim, .. }) = state {
            let kill = shim::Signal {
                container_id: container.id.clone(),
                signal: Signal::SIGKILL as i32,
                all: true,
                ..Default::default()
            };
            let killed = shim.signal(kill).await;
            coracle_fault::point("stop.killed");
            match killed {
                Ok(()) => {}
                Err(error)
                    if matches!(
                        error.kind,
                        ErrorKind::NotFound | ErrorKind::WrongState | ErrorKind::Gone
                    ) => {}
                Err(error) if error.kind == ErrorKind::Silent => {
                    return self.kill_without_shim(container).await;
                }
                Err(source) => return Err(Error::Shim { doing: "kill the container", source }),
            }
        }
        self.thaw_killed(container).await;
        if timeout(KILL_TIMEOUT, container.wait_exited()).await.is_ok() {
            return Ok(());
        }
        Err(in_state("killed but has not ended"))
    }

    /// Kills a container by its cgroup. The exit code is lost: only the shim, its parent, can read it.
    async fn kill_without_shim(&self, container: &Container) -> Result<(), Error> {
        if !self.machine.cgroups.kill(&container.record.cgroup).await {
            let id = container.id.clone();
            return Err(Error::WrongState { what: "container", id, state: "killed but has not ended" });
        }
        self.transitions.exits.end_lost_container(container).await;
        Ok(())
    }

    /// Thaws a container, and the cgroups that the container itself has frozen: on v1 killed processes do not end
    /// before they are thawed.
    async fn thaw_killed(&self, container: &Container) {
        if let Err(error) = self.machine.cgroups.thaw_killed(&container.record.cgroup).await {
            warn!(container = container.id, %error, "cannot thaw a container that was killed");
        }
    }
}

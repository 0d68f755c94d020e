//! StopContainer: its stop signal, its time, then the end by force. Absent and ended are successes.

use std::sync::atomic::Ordering;
use std::time::Duration;

use coracle_proto::{cri, shim};
use nix::sys::signal::Signal;
use tokio::time::timeout;
use tracing::warn;

use crate::cgroup::freezer::Freezer;
use crate::container::Container;
use crate::error::Error;
use crate::records::ContainerPhase;
use crate::runtime::Runtime;
use crate::shim_client::ErrorKind;

/// How long the kernel may take to end what was killed.
const KILL_TIME: Duration = Duration::from_secs(10);

impl Runtime {
    /// Stops a container within `timeout` seconds and a little.
    pub(crate) async fn container_stop(
        &self,
        request: cri::StopContainerRequest,
    ) -> Result<cri::StopContainerResponse, Error> {
        let Some(container) = self.inner.containers.get(&request.container_id) else {
            return Ok(cri::StopContainerResponse {});
        };
        let grace = Duration::from_secs(u64::try_from(request.timeout).unwrap_or(0));
        let running = matches!(container.phase(), ContainerPhase::Running { .. });
        if running && !grace.is_zero() && self.ask_to_stop(&container, grace).await {
            self.tell_stopped(&container).await;
            return Ok(cri::StopContainerResponse {});
        }
        self.kill_container(&container).await?;
        self.tell_stopped(&container).await;
        Ok(cri::StopContainerResponse {})
    }

    /// Sends the stop signal and waits. True when the container ended.
    async fn ask_to_stop(&self, container: &Container, grace: Duration) -> bool {
        let Ok(shim) = self.shim_of(container) else { return false };
        // It may have ended meanwhile: then the wait returns at once. If the shim is gone, the end by
        // force that follows says so.
        let sent = shim.kill(&container.id, container.record.stop_signal).await;
        coracle_fault::point("stop.asked");
        if sent.is_err_and(|error| error.kind == ErrorKind::Silent) {
            return false;
        }
        timeout(grace, container.wait_exited()).await.is_ok()
    }

    /// Ends a container by force, and returns when its end is on record.
    pub(crate) async fn kill_container(&self, container: &Container) -> Result<(), Error> {
        let in_state = |state| Error::WrongState { what: "container", id: container.id.clone(), state };
        // One that is being created is there or undone after this. Neither, where the shim does not answer.
        let limit = self.inner.config.shim_times.end;
        if timeout(limit, container.starting.lock()).await.is_err() {
            return Err(in_state("being created or started"));
        }
        let gone = self.inner.containers.get(&container.id).is_none();
        if gone || matches!(container.phase(), ContainerPhase::Exited(_)) {
            return Ok(());
        }
        container.doomed.store(true, Ordering::SeqCst);
        let shim = self.shim_of(container);
        if self.is_silent(container) {
            return self.kill_without_shim(container).await;
        }
        if let Ok(shim) = shim {
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
        self.let_die(container);
        if timeout(KILL_TIME, container.wait_exited()).await.is_ok() {
            return Ok(());
        }
        Err(in_state("killed but not gone"))
    }

    /// Nobody tells how it ends: the kernel keeps that for the shim.
    async fn kill_without_shim(&self, container: &Container) -> Result<(), Error> {
        self.let_die(container);
        if !self.inner.cgroups.kill(&container.record.cgroup).await {
            let id = container.id.clone();
            return Err(Error::WrongState { what: "container", id, state: "killed but not gone" });
        }
        self.container_lost(container).await;
        Ok(())
    }

    fn is_silent(&self, container: &Container) -> bool {
        self.inner.sandboxes.get(&container.record.sandbox_id).is_some_and(|sandbox| sandbox.is_silent())
    }

    /// One that is frozen for a checkpoint would wait for its end, which may take longer than any killing.
    fn let_die(&self, container: &Container) {
        let freezer = self.inner.cgroups.freezer(&container.record.cgroup);
        let Some(freezer) = freezer.filter(Freezer::holds_killed) else { return };
        if let Err(error) = freezer.thaw() {
            warn!(container = container.id, %error, "could not thaw a container that was killed");
        }
    }
}

//! StopPodSandbox: kill what runs, give the network back, end the shim. Runs to the end whatever
//! fails, and succeeds on the absent and the stopped, as the CRI's comments demand. A shim that does not answer is
//! killed, and nothing of its pod is waited for that only it could tell.

use coracle_proto::cri;
use cri::ContainerEventType::ContainerStoppedEvent;
use futures::future::join_all;
use tracing::{info, warn};

use super::sandbox_run::now;
use crate::error::Error;
use crate::records::ContainerPhase;
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;

impl Runtime {
    /// Stops a sandbox and all in it.
    pub(crate) async fn sandbox_stop(
        &self,
        request: cri::StopPodSandboxRequest,
    ) -> Result<cri::StopPodSandboxResponse, Error> {
        if let Some(sandbox) = self.inner.sandboxes.get(&request.pod_sandbox_id) {
            self.stop_sandbox(&sandbox).await?;
        }
        Ok(cri::StopPodSandboxResponse {})
    }

    /// Stops a sandbox; the first of all errors is returned, after everything was tried.
    pub(crate) async fn stop_sandbox(&self, sandbox: &Sandbox) -> Result<(), Error> {
        let _alone = sandbox.ending.lock().await;
        // First, since what is taken away below cannot be given back: a runtime that dies on the way leaves no pod that
        // is said to be ready and has lost its network. On a disk that is full it is stopped all the same.
        if sandbox.begin_stop()
            && let Err(error) = self.inner.records.write_sandbox(&sandbox.record_now())
        {
            warn!(
                sandbox = sandbox.id,
                error = error.chain(),
                "could not record that a sandbox is being stopped"
            );
        }
        coracle_fault::point("stop-pod.begun");
        let containers = self.containers_of(&sandbox.id);
        let kill = async {
            let killed = join_all(containers.iter().map(|container| self.kill_container(container))).await;
            self.tell_pod_stopped(sandbox).await;
            killed
        };
        let (killed, disconnected) = if self.inner.nri.is_active() {
            // Plugins may still need the pod's network.
            (kill.await, self.disconnect_pod(&sandbox.id).await)
        } else {
            tokio::join!(kill, self.disconnect_pod(&sandbox.id))
        };
        coracle_fault::point("stop-pod.disconnected");
        let mut errors: Vec<Error> = killed.into_iter().filter_map(Result::err).collect();
        let is_silent = sandbox.is_silent();
        if let Some(shim) = sandbox.leave() {
            if let Err(source) = if is_silent { shim.kill_itself().await } else { shim.shutdown().await } {
                sandbox.stays(shim);
                errors.push(Error::Shim { doing: "end the pod's shim", source });
                errors.extend(disconnected.err());
                return first(errors);
            }
            // Whatever could not be killed before, has ended with the shim or is lost.
            for error in errors.drain(..) {
                warn!(sandbox = sandbox.id, error = error.chain(), "the pod's shim had to be ended first");
            }
            errors.extend(self.note_stop(sandbox).await.err());
        }
        errors.extend(disconnected.err());
        first(errors)
    }

    async fn disconnect_pod(&self, id: &str) -> Result<(), Error> {
        self.inner.network.release(id).await.map_err(|source| Error::Network { id: id.to_owned(), source })
    }

    /// Records that a pod is stopped whose shim has ended, and tells everybody.
    async fn note_stop(&self, sandbox: &Sandbox) -> Result<(), Error> {
        coracle_fault::point("stop-pod.shim");
        sandbox.forget_all_execs();
        for container in self.containers_of(&sandbox.id) {
            // Those of a shim that was killed; all others have told their ends.
            if !matches!(container.phase(), ContainerPhase::Exited(_)) {
                self.container_lost(&container).await;
            }
        }
        let mut telling = self.telling();
        sandbox.note(telling.next(ContainerStoppedEvent, now()));
        let written = self.inner.records.write_sandbox(&sandbox.record_now());
        coracle_fault::point("stop-pod.recorded");
        info!(sandbox = sandbox.id, "sandbox stopped");
        // Also what could not be written, on a disk that is full: nobody would hear of it otherwise.
        telling.tell_sandbox(sandbox);
        written
    }
}

/// The first error is returned, the others are logged: nobody else would hear of them.
pub(super) fn first(errors: Vec<Error>) -> Result<(), Error> {
    let mut errors = errors.into_iter();
    let Some(first) = errors.next() else { return Ok(()) };
    for error in errors {
        warn!(error = error.chain(), "also failed");
    }
    Err(first)
}

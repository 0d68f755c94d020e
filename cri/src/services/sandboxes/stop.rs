//! StopPodSandbox: kills the containers, releases the network, ends the shim.
//!
//! A failed step does not prevent the other steps. An absent or stopped sandbox is not an error, as the CRI requires.
//! The stop kills a shim that does not answer, and does not wait for events that only this shim could report.

use coracle_proto::cri;
use cri::ContainerEventType::ContainerStoppedEvent;
use futures::future::join_all;
use tracing::{info, warn};

use super::SandboxService;
use crate::clock::now;
use crate::error::Error;
use crate::records::ContainerPhase;
use crate::sandbox::Sandbox;

impl SandboxService {
    /// Stops a sandbox and its containers.
    pub(crate) async fn sandbox_stop(
        &self,
        request: cri::StopPodSandboxRequest,
    ) -> Result<cri::StopPodSandboxResponse, Error> {
        if let Some(sandbox) = self.objects.tables.sandboxes.get(&request.pod_sandbox_id) {
            self.stop_sandbox(&sandbox).await?;
        }
        Ok(cri::StopPodSandboxResponse {})
    }

    /// Stops a sandbox. Tries all steps, and returns the first error.
    pub(crate) async fn stop_sandbox(&self, sandbox: &Sandbox) -> Result<(), Error> {
        let _guard = sandbox.ending.lock().await;
        // The stop is recorded first, because the steps below cannot be reverted: if the runtime is killed meanwhile,
        // no pod stays ready without its network. If the record cannot be written (disk full), the sandbox is still
        // stopped.
        if sandbox.begin_stop() {
            self.record_begin(sandbox);
        }
        coracle_fault::point("stop-pod.begun");
        let containers = self.objects.tables.containers_of(&sandbox.id);
        let kill = async {
            let killed =
                join_all(containers.iter().map(|container| self.containers.kill_container(container))).await;
            self.transitions.hooks.stop_pod_sandbox(sandbox).await;
            killed
        };
        let (killed, disconnected) = if self.transitions.hooks.is_active() {
            // The network is released after the hooks, because plugins can use it in their stop hooks.
            (kill.await, self.disconnect_pod(&sandbox.id).await)
        } else {
            tokio::join!(kill, self.disconnect_pod(&sandbox.id))
        };
        coracle_fault::point("stop-pod.disconnected");
        let mut errors: Vec<Error> = killed.into_iter().filter_map(Result::err).collect();
        let is_silent = sandbox.is_silent();
        if let Some(shim) = sandbox.take_shim() {
            if let Err(source) = if is_silent { shim.kill_shim().await } else { shim.shutdown().await } {
                sandbox.restore_shim(shim);
                // The stop is recorded again, because the first attempt may have failed. The next runtime must not
                // report the pod as ready.
                self.record_begin(sandbox);
                errors.push(Error::Shim { doing: "end the pod's shim", source });
                errors.extend(disconnected.err());
                return first(errors);
            }
            // The containers have ended with the shim. If it did not report an end, `record_stop` records the container as
            // lost. So these errors do not fail the stop.
            for error in errors.drain(..) {
                warn!(
                    sandbox = sandbox.id,
                    error = error.chain(),
                    "cannot kill a container before the end of its shim"
                );
            }
            errors.extend(self.record_stop(sandbox).await.err());
        }
        errors.extend(disconnected.err());
        first(errors)
    }

    /// Records that a stop of the sandbox has begun.
    fn record_begin(&self, sandbox: &Sandbox) {
        if let Err(error) = self.objects.records.write_sandbox(&sandbox.record_now()) {
            warn!(
                sandbox = sandbox.id,
                error = error.chain(),
                "cannot record that a sandbox is being stopped"
            );
        }
    }

    async fn disconnect_pod(&self, id: &str) -> Result<(), Error> {
        self.network.release(id).await.map_err(|source| Error::Network { id: id.to_owned(), source })
    }

    /// Records a sandbox without a shim as stopped and sends the event.
    async fn record_stop(&self, sandbox: &Sandbox) -> Result<(), Error> {
        coracle_fault::point("stop-pod.shim");
        sandbox.forget_all_execs();
        for container in self.objects.tables.containers_of(&sandbox.id) {
            // Such containers are left only if the shim was killed: a responsive shim has reported all exits.
            if !matches!(container.phase(), ContainerPhase::Exited(_)) {
                self.transitions.exits.end_lost_container(&container).await;
            }
        }
        let mut pending = self.transitions.outbox.pending();
        sandbox.note(pending.add(ContainerStoppedEvent, now()));
        let written = self.objects.records.write_sandbox(&sandbox.record_now());
        coracle_fault::point("stop-pod.recorded");
        info!(sandbox = sandbox.id, "sandbox stopped");
        // The event is sent even if the record cannot be written (disk full), because there is no other source of this
        // event.
        pending.send_for_sandbox(sandbox);
        written
    }
}

/// Returns the first error and logs the other errors.
pub(super) fn first(errors: Vec<Error>) -> Result<(), Error> {
    let mut errors = errors.into_iter();
    let Some(first) = errors.next() else { return Ok(()) };
    for error in errors {
        warn!(error = error.chain(), "a later step of the stop or removal failed as well");
    }
    Err(first)
}

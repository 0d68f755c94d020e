//! StopPodSandbox: kill what runs, give the network back, end the shim. Runs to the end whatever
//! fails, and succeeds on the absent and the stopped, as the CRI's comments demand.

use coracle_proto::cri;
use cri::ContainerEventType::ContainerStoppedEvent;
use futures::future::join_all;
use tracing::{info, warn};

use super::sandbox_run::now;
use crate::error::Error;
use crate::runtime::Runtime;
use crate::sandbox::{Live, Sandbox};

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
    pub(super) async fn stop_sandbox(&self, sandbox: &Sandbox) -> Result<(), Error> {
        let _alone = sandbox.ending.lock().await;
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
        errors.extend(disconnected.err());
        if let Some(live) = sandbox.leave_ready() {
            errors.extend(self.end_shim(sandbox, live).await.err());
        }
        first(errors)
    }

    async fn disconnect_pod(&self, id: &str) -> Result<(), Error> {
        self.inner.network.release(id).await.map_err(|source| Error::Network { id: id.to_owned(), source })
    }

    async fn end_shim(&self, sandbox: &Sandbox, live: Live) -> Result<(), Error> {
        live.shim.shutdown().await;
        coracle_fault::point("stop-pod.shim");
        sandbox.forget_all_execs();
        let mut telling = self.telling();
        sandbox.note(telling.next(ContainerStoppedEvent, now()));
        self.inner.records.write_sandbox(&sandbox.record_now())?;
        coracle_fault::point("stop-pod.recorded");
        info!(sandbox = sandbox.id, "sandbox stopped");
        telling.tell_sandbox(sandbox);
        Ok(())
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

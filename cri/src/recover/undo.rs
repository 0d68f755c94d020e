//! Undoes incompletely created pods and containers, and completes interrupted stops of pods.

use tokio::time::timeout;
use tracing::{info, warn};

use super::Recovery;
use super::shims::Found;
use crate::records::{ContainerRecord, SandboxPhase, SandboxRecord};
use crate::shim_client::Shim;

// === impl Recovery ===

impl Recovery {
    /// Removes a pod whose restore is incomplete. Its creation event was already sent.
    pub(super) async fn remove_incomplete_restore(&self, id: String) {
        info!(sandbox = id, "removing an incompletely restored pod");
        if let Err(error) = self.sandboxes.undo_run(id.clone()).await {
            warn!(sandbox = id, error = error.chain(), "cannot remove an incompletely restored pod");
        }
    }

    /// Completes an interrupted stop of a pod, which may already have lost its network. After the timeout of the
    /// wait, the stop continues in the background.
    pub(super) async fn complete_stop(&self, id: String) {
        info!(sandbox = id, "completing an interrupted stop of a pod");
        let Some(sandbox) = self.tables.sandboxes.get(&id) else { return };
        let sandboxes = self.sandboxes.clone();
        let stopped = coracle_threads::spawn(async move {
            if let Err(error) = sandboxes.stop_sandbox(&sandbox).await {
                warn!(sandbox = id, error = error.chain(), "cannot complete the stop of a pod");
            }
        });
        let _continues = timeout(self.config.shim_timeouts.answer, stopped).await;
        coracle_fault::point("recover.stopped");
    }

    /// Undoes an incompletely created sandbox, or a sandbox without a readable record.
    pub(super) async fn undo_sandbox(&self, id: &str, found: Found) {
        info!(sandbox = id, "undoing an incompletely created sandbox");
        let ended = match found {
            Found::Answers(shim, _) => shim.shutdown().await,
            Found::Silent(shim) => shim.kill_shim().await,
            Found::Gone => Ok(()),
        };
        if let Err(error) = ended {
            warn!(sandbox = id, %error, "cannot end the shim of an incompletely created sandbox");
        }
        coracle_fault::point("recover.sandbox-shim");
        if let Err(error) = self.network.del(id).await {
            warn!(sandbox = id, %error, "cannot remove the network of an incompletely created sandbox");
        }
        coracle_fault::point("recover.sandbox-network");
        let group = self.layout.own_pod(id);
        self.cgroups.kill(&group).await;
        let removed = self.cgroups.remove(&group).await;
        self.cgroups.remove_shim(&self.layout.shim_of_pod(id)).await;
        coracle_fault::point("recover.sandbox-cgroup");
        for result in [removed, self.records.remove_sandbox(id)] {
            if let Err(error) = result {
                warn!(sandbox = id, error = error.chain(), "cannot undo an incompletely created sandbox");
            }
        }
        coracle_fault::point("recover.sandbox-forgotten");
    }

    /// Undoes an incompletely created container, or a container of a lost pod.
    pub(super) async fn undo_container(&self, record: &ContainerRecord, shim: Option<&Shim>) {
        info!(container = record.id, "undoing an incompletely created container");
        if let Some(shim) = shim
            && let Err(error) = shim.delete(&record.id).await
        {
            warn!(container = record.id, %error, "cannot delete an incompletely created container");
        }
        coracle_fault::point("recover.container-deleted");
        self.cgroups.kill(&record.cgroup).await;
        let removed = self.cgroups.remove(&record.cgroup).await;
        coracle_fault::point("recover.container-cgroup");
        for result in [removed, self.records.remove_container(&record.id)] {
            if let Err(error) = result {
                warn!(
                    container = record.id,
                    error = error.chain(),
                    "cannot undo an incompletely created container"
                );
            }
        }
        coracle_fault::point("recover.container-forgotten");
    }
}

/// Whether a stop of the pod was interrupted.
pub(super) fn is_stop_incomplete(record: &SandboxRecord) -> bool {
    record.stopping && record.phase == SandboxPhase::Ready
}

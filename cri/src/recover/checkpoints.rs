//! Checkpoints that were in progress when the earlier runtime ended.

use std::path::Path;
use std::sync::Arc;

use tracing::{info, warn};

use super::Recovery;
use crate::cgroup::freezer::Freezer;
use crate::checkpoint;
use crate::container::Container;
use crate::error::chain;

// === impl Recovery ===

impl Recovery {
    /// Thaws a container that was frozen for a checkpoint, and removes the incomplete checkpoint. If its CRIU still runs, a
    /// task waits for the end of CRIU; until then the checkpoint counts as in progress.
    pub(super) async fn end_checkpoint(&self, container: &Arc<Container>) {
        let layer = self.records.layer_dir(&container.id);
        if !checkpoint::has_incomplete(&layer) {
            return;
        }
        let freezer = self.cgroups.freezer(&container.record.cgroup);
        let (id, looked) = (container.id.clone(), (freezer.clone(), layer.clone()));
        // Runs off the async executor, because it reads all processes and removes files.
        let work = coracle_threads::spawn_blocking(move || {
            let (freezer, layer) = looked;
            let is_at_work = checkpoint::is_criu_running(&layer);
            if !is_at_work {
                remove_checkpoint(&id, freezer.as_ref(), &layer);
            }
            is_at_work
        });
        if !work.await.unwrap_or_default() {
            return;
        }
        info!(container = container.id, "a CRIU of an earlier runtime still works on a container");
        let lock = Arc::clone(&container.removing).lock_owned().await;
        let id = container.id.clone();
        coracle_threads::spawn(async move {
            if let Err(error) = checkpoint::criu_ended(&layer).await {
                warn!(container = id, %error, "cannot wait for the end of CRIU");
            }
            let _gone =
                coracle_threads::spawn_blocking(move || remove_checkpoint(&id, freezer.as_ref(), &layer))
                    .await;
            drop(lock);
        });
    }
}

/// Thaws a container and removes its incomplete checkpoint.
fn remove_checkpoint(id: &str, freezer: Option<&Freezer>, layer: &Path) {
    if let Some(Err(error)) = freezer.map(Freezer::thaw) {
        warn!(container = id, %error, "cannot thaw a container");
    }
    if let Err(error) = checkpoint::remove_incomplete(layer) {
        let error = chain(&error);
        warn!(container = id, error, "cannot remove an incomplete checkpoint");
    }
}

//! The checkpoint service: CheckpointContainer, CheckpointPod, RestorePod.

pub(crate) mod container;
pub(crate) mod pod;
mod restore;

use std::sync::Arc;

use coracle_images::Images;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::cgroup::Cgroups;
use crate::names::Names;
use crate::records::Records;
use crate::services::containers::ContainerService;
use crate::services::sandboxes::SandboxService;
use crate::tables::Tables;

/// Maximum checkpoints that are made at the same time: each runs CRIU, and archives the memory and the changed files of its
/// containers. Further requests wait.
const MAX_CHECKPOINTS: usize = 4;
/// Permits to make a checkpoint. Static, because a process has one runtime.
static CHECKPOINTS: Semaphore = Semaphore::const_new(MAX_CHECKPOINTS);

/// A permit to make a checkpoint. It is kept until the checkpoint is complete.
async fn checkpoint_permit() -> Option<SemaphorePermit<'static>> {
    // The semaphore is never closed.
    CHECKPOINTS.acquire().await.ok()
}

/// Checkpoints containers and pods, and restores pods.
#[derive(Clone)]
pub(crate) struct CheckpointService {
    pub(crate) tables: Arc<Tables>,
    pub(crate) records: Arc<Records>,
    pub(crate) cgroups: Arc<Cgroups>,
    pub(crate) images: Images,
    pub(crate) names: Names,
    pub(crate) containers: ContainerService,
    pub(crate) sandboxes: SandboxService,
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn few_checkpoints_are_made_at_the_same_time() {
        let mut permits = Vec::new();
        for _ in 0..MAX_CHECKPOINTS {
            permits.push(checkpoint_permit().await);
        }
        assert!(checkpoint_permit().now_or_never().is_none(), "it waits");
        permits.pop();
        assert!(checkpoint_permit().await.is_some());
    }
}

//! The checkpoint service: CheckpointContainer, CheckpointPod, RestorePod.

pub(crate) mod container;
pub(crate) mod pod;
mod restore;

use std::sync::Arc;

use coracle_images::Images;

use crate::cgroup::Cgroups;
use crate::names::Names;
use crate::records::Records;
use crate::services::containers::ContainerService;
use crate::services::sandboxes::SandboxService;
use crate::tables::Tables;

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

//! The state of a pod's resizes in its worker.

use std::collections::{BTreeSet, HashMap};

use coracle_proto::cri;
use k8s_openapi::api::core::v1::ResourceRequirements;

/// The reason why a resize is not accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PendingResize {
    /// `Deferred` or `Infeasible`.
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    /// The generation of the pod that requests the resize.
    pub(crate) generation: Option<i64>,
}

/// Resizes of one pod in the state of its worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResizeState {
    pub(crate) pending: Option<PendingResize>,
    pub(crate) in_progress: Option<InProgress>,
    /// Whether the pod's cgroup may still lack the limits of an accepted resize.
    pub(crate) is_cgroup_due: bool,
    /// The resources that the pod's cgroup has while a resize is in progress. None means the allocated resources. The
    /// box saves memory, because the value is nearly always None.
    pub(crate) pod_before: Option<Box<ResourceRequirements>>,
    /// The resources that containers have now, by container id, with the limits that they inherit from the pod.
    pub(crate) actuated: HashMap<String, ResourceRequirements>,
    /// Ids of containers that were stopped to start again with other resources.
    pub(crate) restarts: BTreeSet<String>,
}

/// A resize that is not applied to all containers yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InProgress {
    pub(crate) generation: Option<i64>,
    pub(crate) error: Option<String>,
}

/// Limits of a container in the kernel that a resize can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelLimits {
    shares: i64,
    quota: i64,
    memory: i64,
}

// === impl KernelLimits ===

impl KernelLimits {
    pub(crate) fn of(resources: &cri::LinuxContainerResources) -> Self {
        Self {
            shares: resources.cpu_shares,
            quota: resources.cpu_quota,
            memory: resources.memory_limit_in_bytes,
        }
    }
}

//! Inputs of a pod's status.

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;

use crate::pod::restart::Exits;
use crate::pod::state::{ObservedPod, Shape, WorkerState};

/// Inputs of a status.
pub(crate) struct StatusInput<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) observed: &'a ObservedPod,
    pub(crate) state: &'a WorkerState,
    /// The last computed status, for the times of its conditions.
    pub(crate) last: Option<&'a PodStatus>,
    /// The node's addresses, primary first.
    pub(crate) host_ips: &'a [String],
    /// Name of the container runtime, for container ids.
    pub(crate) runtime_name: &'a str,
    pub(crate) now: Timestamp,
    /// Whether no container runs or will run, so that the final phase can be computed.
    pub(crate) finished: bool,
    /// Whether the pod has CPUs, memory of NUMA nodes, devices or claims of its own. The agent reports the pod's end
    /// only when they are free, because the control plane may give them to another pod after the report.
    pub(crate) holds_resources: bool,
}

// === impl StatusInput ===

impl<'a> StatusInput<'a> {
    /// The exits of the pod's containers.
    pub(super) fn exits(&self, shape: &Shape<'a>) -> Exits<'a> {
        Exits { spec: shape.spec, observed: self.observed, state: self.state }
    }
}

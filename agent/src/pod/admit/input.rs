//! Inputs of admission, and the form of its rejections.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::cgroup::resources::Amount;
use crate::node::Pressure;
use crate::pod::state::Verdict;
use crate::pod_policy::AllowedSysctl;

/// Inputs of admission.
pub(crate) struct AdmissionInput<'a> {
    pub(crate) pod: &'a Pod,
    /// Resources that other pods hold.
    pub(crate) used: UsedResources,
    /// Extended resources of device plugins. Their devices are allocated after the admission, and the pod is rejected
    /// if the devices do not suffice.
    pub(crate) managed: Vec<String>,
    /// The Node object, once known.
    pub(crate) node: Option<&'a Node>,
    pub(crate) max_pods: usize,
    /// CPU and memory that pods may use.
    pub(crate) allocatable: Amount,
    /// All resources of the machine that pods may use, without extended resources.
    pub(crate) of_machine: &'a BTreeMap<String, Quantity>,
    /// The node's conditions of pressure.
    pub(crate) pressure: Pressure,
    /// Whether the machine shuts down and the node ends its pods.
    pub(crate) is_shutting_down: bool,
    /// Unsafe sysctls that pods may set.
    pub(crate) allowed_sysctls: &'a [AllowedSysctl],
}

/// Resources of a node that pods hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct UsedResources {
    /// Number of the pods.
    pub(crate) pods: usize,
    pub(crate) requested: Amount,
    /// Amounts of other resources, see [`other_requests`](super::other_requests). Contains only resources that the pod
    /// to admit requests.
    pub(crate) others: BTreeMap<String, i128>,
    pub(crate) ports: Vec<HostPort>,
}

/// A host port of a pod.
#[derive(Clone, Debug)]
pub(crate) struct HostPort {
    /// Empty for all addresses.
    pub(super) ip: String,
    pub(super) port: i32,
    pub(super) protocol: String,
}

/// Prefix of rejection messages in the status of pods. Events have the message without it.
const PREFIX: &str = "Pod was rejected: ";

/// Prefix of the reason of a rejection for lack of a resource. The name of the resource follows.
const OUT_OF: &str = "OutOf";

/// Reason in events and metrics if an extended resource or huge pages do not suffice. The reason in the pod's status
/// has the name of the resource.
const OUT_OF_EXTENDED: &str = "OutOfExtendedResources";

/// The reasons of rejections.
const REASONS: [&str; 18] = [
    "Evicted",
    "NodeAffinity",
    "NodePorts",
    "NodeShutdown",
    "OutOfcpu",
    "OutOfephemeral-storage",
    "OutOfmemory",
    "OutOfpods",
    "PodOSNotSupported",
    "SMTAlignmentError",
    "SysctlForbidden",
    "TaintToleration",
    "TooManyContainers",
    "TooManySubPaths",
    "TooManyVolumes",
    "TopologyAffinityError",
    "UnexpectedAdmissionError",
    "UnsupportedField",
];

/// Reason and message of a rejection's event, as in `rejectPod` of `pkg/kubelet/kubelet.go`.
pub(crate) fn rejection_event(verdict: &Verdict) -> (&'static str, &str) {
    let other = if verdict.reason.starts_with(OUT_OF) { OUT_OF_EXTENDED } else { "FailedAdmission" };
    let reason = REASONS.into_iter().find(|reason| *reason == verdict.reason).unwrap_or(other);
    (reason, verdict.message.strip_prefix(PREFIX).unwrap_or(&verdict.message))
}

/// The rejection of a pod whose devices cannot be allocated. Reason and message are upstream's (`GetPodAdmitResult` of
/// `pkg/kubelet/cm/admission`).
pub(crate) fn devices_unavailable(reason: &str) -> Verdict {
    let message = format!("{PREFIX}Allocate failed due to {reason}, which is unexpected");
    refuse("UnexpectedAdmissionError", message)
}

/// The rejection of a critical pod for which not enough other pods can end. `missing` lists the amounts that they
/// cannot release. Reason and message are upstream's (`Admit` of `pkg/kubelet/lifecycle/predicate.go`).
pub(crate) fn preemption_failed(missing: &str) -> Verdict {
    let message = format!(
        "{PREFIX}Unexpected error while attempting to recover from admission failure: preemption: error finding a set of \
         pods to preempt: no set of running pods found to reclaim resources: [{missing}]"
    );
    refuse("UnexpectedAdmissionError", message)
}

/// A rejection with this reason and message.
pub(super) fn refuse(reason: &str, message: impl Into<String>) -> Verdict {
    Verdict { reason: reason.to_owned(), message: message.into() }
}

//! A pod on its node.

use std::sync::Arc;

use coracle_values::object::{Key, ObjectExt};
use coracle_values::pod_resources::Resources;
use k8s_openapi::api::core::v1::PodCondition;

use crate::affinity_term::{Labels, PodTerms};
use crate::object::Pod;
use crate::request::{HostPort, assumed_of_placed, host_ports, of_pod};
use crate::volumes::claims_of;

/// A pod on its node: requests, ports and the fields that filters and scores of other pods read.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) requests: Resources,
    /// The requests for scores.
    pub(crate) assumed: Resources,
    pub(crate) ports: Vec<HostPort>,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) priority: i32,
    pub(crate) labels: Labels,
    /// The time at which the node started the pod. `None` if it has not.
    pub(crate) started: Option<jiff::Timestamp>,
    /// Whether the pod is being deleted.
    pub(crate) terminating: bool,
    /// Whether it is being deleted as a victim of preemption.
    pub(crate) preempted: bool,
    /// The pod's affinity and anti-affinity to other pods. `None` if it has none.
    pub(crate) terms: Option<Arc<PodTerms>>,
    /// The claims that the pod uses.
    pub(crate) claims: Vec<Key>,
}

// === impl Placed ===

impl Placed {
    pub(crate) fn of(pod: &Pod) -> Self {
        Self {
            requests: of_pod(pod),
            assumed: assumed_of_placed(pod),
            ports: host_ports(&pod.spec),
            namespace: pod.namespace().to_owned(),
            name: pod.name().to_owned(),
            priority: pod.spec.priority.unwrap_or_default(),
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            started: pod.status.start_time.as_ref().map(|time| time.0),
            terminating: pod.is_being_deleted(),
            preempted: is_preempted(pod),
            terms: PodTerms::of(pod).map(Arc::new),
            claims: claims_of(pod).collect(),
        }
    }

    /// The pod's affinity to other pods.
    pub(crate) fn terms(&self) -> Option<&PodTerms> {
        self.terms.as_deref()
    }
}

/// Whether the pod is being deleted as a victim of preemption.
fn is_preempted(pod: &Pod) -> bool {
    let conditions = pod.status.conditions.iter().flatten();
    let target = conditions.into_iter().find(|condition| condition.type_ == "DisruptionTarget");
    let by_us = |target: &PodCondition| {
        target.status == "True" && target.reason.as_deref() == Some("PreemptionByScheduler")
    };
    pod.is_being_deleted() && target.is_some_and(by_us)
}

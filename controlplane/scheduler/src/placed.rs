//! A pod on its node.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::{Arc, Weak};

use coracle_values::object::{Key, ObjectExt};
use coracle_values::pod_resources::Resources;
use k8s_openapi::api::core::v1::PodCondition;

use crate::affinity_term::{Labels, PodTerms};
use crate::object::Pod;
use crate::request::{HostPort, host_ports, of_placed};
use crate::volumes::{Disks, claims_of, disks_of};

/// A pod on its node: requests, ports and the fields that filters and scores of other pods read. It takes about 100
/// bytes in addition to its [`Common`] fields.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Placed {
    pub(crate) common: Arc<Common>,
    pub(crate) name: String,
    /// The time at which the node started the pod. `None` if the node has not started it.
    pub(crate) started: Option<jiff::Timestamp>,
    /// Whether the pod is being deleted.
    pub(crate) terminating: bool,
    /// Whether the pod is being deleted as a victim of preemption.
    pub(crate) preempted: bool,
    /// The claims that the pod uses.
    pub(crate) claims: Vec<Key>,
    /// Disks of the pod that other pods cannot use.
    pub(crate) disks: Disks,
}

/// The fields of a placed pod that are usually equal for all pods of a workload. Equal pods share these fields: they
/// take 300 bytes, and a map of two labels takes another 770 bytes.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Common {
    pub(crate) requests: Resources,
    /// The requests that scores use, with assumed amounts for containers without requests.
    pub(crate) assumed: Resources,
    pub(crate) ports: Vec<HostPort>,
    pub(crate) namespace: String,
    pub(crate) priority: i32,
    pub(crate) labels: Labels,
    /// The pod's affinity and anti-affinity to other pods. `None` if the pod has no affinity.
    terms: Option<PodTerms>,
}

/// Cache of the newest distinct values, for values that are usually equal to an earlier value.
#[derive(Debug, Default)]
pub(crate) struct Recent<T>(VecDeque<Weak<T>>);

/// Maximum number of earlier values with which a new value is compared.
const RECENT_MAX: usize = 32;

// === impl Recent ===

impl<T: PartialEq> Recent<T> {
    /// Replaces the value by an equal earlier value, if there is one in the cache.
    pub(crate) fn share(&mut self, value: &mut Arc<T>) {
        self.0.retain(|known| known.strong_count() > 0);
        if let Some(known) = self.0.iter().filter_map(Weak::upgrade).find(|known| *known == *value) {
            *value = known;
            return;
        }
        if self.0.len() == RECENT_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Arc::downgrade(value));
    }
}

// === impl Placed ===

impl Placed {
    pub(crate) fn of(pod: &Pod) -> Self {
        let (requests, assumed) = of_placed(pod);
        let common = Common {
            requests,
            assumed,
            ports: host_ports(&pod.spec),
            namespace: pod.namespace().to_owned(),
            priority: pod.spec.priority.unwrap_or_default(),
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            terms: PodTerms::of(pod),
        };
        Self {
            common: Arc::new(common),
            name: pod.name().to_owned(),
            started: pod.status.start_time.as_ref().map(|time| time.0),
            terminating: pod.is_being_deleted(),
            preempted: is_preempted(pod),
            claims: claims_of(pod).collect(),
            disks: disks_of(pod),
        }
    }

    /// The pod's affinity to other pods.
    pub(crate) fn terms(&self) -> Option<&PodTerms> {
        self.terms.as_ref()
    }
}

impl Deref for Placed {
    type Target = Common;

    fn deref(&self) -> &Common {
        &self.common
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

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(value: &str) -> Arc<Labels> {
        Arc::new(Labels::from([("app".to_owned(), value.to_owned())]))
    }

    #[test]
    fn equal_labels_of_pods_are_kept_once() {
        let mut recent = Recent::default();
        let (mut one, mut two, mut other) = (labels("a"), labels("a"), labels("b"));
        for labels in [&mut one, &mut two, &mut other] {
            recent.share(labels);
        }
        assert!(Arc::ptr_eq(&one, &two) && *other == *labels("b"));
        drop((one, two));
        recent.share(&mut other);
        assert_eq!(recent.0.len(), 1, "labels that no pod has any more are not kept");
    }

    #[test]
    fn the_number_of_compared_labels_is_bounded() {
        let mut recent = Recent::default();
        let mut all: Vec<Arc<Labels>> =
            (0..2 * RECENT_MAX).map(|number| labels(&number.to_string())).collect();
        all.iter_mut().for_each(|labels| recent.share(labels));
        assert_eq!(recent.0.len(), RECENT_MAX);
    }
}

//! Input and output of the plan: a daemon set with its nodes and pods, and the actions.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use coracle_events::Event;
use jiff::Timestamp;

use super::fit::{Eligibility, NodeRequirements};
use crate::object::{DaemonSet, Node, ObjectExt, Pod};
use crate::revision_history::POD_REVISION;

/// The input of the plan.
pub(crate) struct Snapshot<'a> {
    pub(crate) set: &'a DaemonSet,
    /// The hash of the present template's revision.
    pub(crate) hash: &'a str,
    pub(crate) nodes: &'a [Arc<Node>],
    /// The pods that the set controls.
    pub(crate) pods: &'a [Arc<Pod>],
    /// The remaining back-off of a node after failed pods.
    pub(crate) backoff: &'a dyn Fn(&str) -> Option<Duration>,
    pub(crate) now: Timestamp,
}

/// The actions.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Nodes that get a pod.
    pub(crate) create: Vec<String>,
    pub(crate) delete: Vec<Arc<Pod>>,
    /// Nodes whose failed pod is deleted.
    pub(crate) failed: Vec<String>,
    pub(crate) events: Vec<Event>,
    /// Delay of the next reconcile if nothing changes.
    pub(crate) again: Option<Duration>,
}

/// The pods of a set by node.
pub(super) type ByNode = BTreeMap<String, Vec<Arc<Pod>>>;

/// A daemon set with its nodes and pods.
pub(super) struct ObservedDaemonSet<'a> {
    pub(super) snapshot: &'a Snapshot<'a>,
    pub(super) fits: HashMap<String, Eligibility>,
    pub(super) by_node: ByNode,
}

impl<'a> ObservedDaemonSet<'a> {
    pub(super) fn of(snapshot: &'a Snapshot<'a>) -> Self {
        let requirements = NodeRequirements::of(&snapshot.set.spec.template);
        let fits =
            snapshot.nodes.iter().map(|node| (node.name().to_owned(), requirements.fit(node))).collect();
        let mut by_node = ByNode::new();
        for pod in snapshot.pods {
            // A pod that has ended and is being deleted does not occupy its node.
            let over = pod.finished() && pod.is_being_deleted();
            if let (Some(node), false) = (target(pod), over) {
                by_node.entry(node.to_owned()).or_default().push(pod.clone());
            }
        }
        for pods in by_node.values_mut() {
            pods.sort_by_key(|pod| order(pod));
        }
        Self { snapshot, fits, by_node }
    }

    pub(super) fn is_updated(&self, pod: &Pod) -> bool {
        let label = pod.metadata.labels.as_ref().and_then(|labels| labels.get(POD_REVISION));
        label.is_some_and(|hash| hash == self.snapshot.hash)
    }

    /// The time at which a ready pod becomes available. `None` if the pod is not ready.
    pub(super) fn available_at(&self, pod: &Pod) -> Option<Timestamp> {
        let since = pod.ready_since()?;
        let seconds = self.snapshot.set.spec.min_ready_seconds.unwrap_or_default();
        if seconds == 0 {
            return Some(Timestamp::MIN);
        }
        let since = since.map_or(self.snapshot.now, |time| time.0);
        Timestamp::from_second(since.as_second().saturating_add(seconds.into())).ok()
    }

    pub(super) fn is_available(&self, pod: &Pod) -> bool {
        self.available_at(pod).is_some_and(|at| at <= self.snapshot.now)
    }

    /// Number of nodes that must run the pod.
    pub(super) fn desired(&self) -> usize {
        self.fits.values().filter(|fit| fit.runs).count()
    }
}

/// The node that a pod is on or will be bound to.
fn target(pod: &Pod) -> Option<&str> {
    pod.spec.node_name.as_deref().filter(|name| !name.is_empty()).or(pod.spec.pinned_node.as_deref())
}

/// Order of pods on a node: bound pods first, then older pods.
fn order(pod: &Pod) -> (bool, Option<k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>, String) {
    let unbound = pod.spec.node_name.as_deref().is_none_or(str::is_empty);
    (unbound, pod.metadata.creation_timestamp.clone(), pod.name().to_owned())
}

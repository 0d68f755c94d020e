//! The plan of a daemon set: pods to create and to delete, and the status.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use coracle_events::Event;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DaemonSetStatus;

use super::fit::{Fit, Shape};
use super::rolling;
use crate::object::{DaemonSet, Node, ObjectExt, Pod};
use crate::queue::until;
use crate::revision_history::POD_REVISION;

/// Maximum number of pods that one reconcile creates or deletes.
const BURST: usize = 250;

/// The input of the plan.
pub(crate) struct Snapshot<'a> {
    pub(crate) set: &'a DaemonSet,
    /// The hash of the current template's revision.
    pub(crate) hash: &'a str,
    pub(crate) nodes: &'a [Arc<Node>],
    /// The pods that the set controls.
    pub(crate) pods: &'a [Arc<Pod>],
    /// The rest of the back-off after failed pods, for a node.
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
    /// When to reconcile again even without a change.
    pub(crate) again: Option<Duration>,
}

/// The pods of a set by node.
pub(super) type ByNode = BTreeMap<String, Vec<Arc<Pod>>>;

/// A daemon set with its nodes and pods.
pub(super) struct View<'a> {
    pub(super) snapshot: &'a Snapshot<'a>,
    pub(super) fits: HashMap<String, Fit>,
    pub(super) by_node: ByNode,
}

impl<'a> View<'a> {
    fn of(snapshot: &'a Snapshot<'a>) -> Self {
        let shape = Shape::of(&snapshot.set.spec.template);
        let fits = snapshot.nodes.iter().map(|node| (node.name().to_owned(), shape.fit(node))).collect();
        let mut by_node = ByNode::new();
        for pod in snapshot.pods {
            // A pod that has ended and is being deleted does not hold its node.
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

    /// When a ready pod becomes available. None if the pod is not ready.
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

/// Order of pods on a node: bound ones first, then older ones.
fn order(pod: &Pod) -> (bool, Option<k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>, String) {
    let unbound = pod.spec.node_name.as_deref().is_none_or(str::is_empty);
    (unbound, pod.metadata.creation_timestamp.clone(), pod.name().to_owned())
}

/// Plans the actions. The rolling update begins once each node has the pods that it must have.
pub(crate) fn plan(snapshot: &Snapshot<'_>) -> Plan {
    let mut plan = Plan::default();
    if snapshot.set.is_being_deleted() {
        return plan;
    }
    let view = View::of(snapshot);
    for (node, fit) in sorted(&view.fits) {
        let pods = view.by_node.get(node).map(Vec::as_slice).unwrap_or_default();
        manage(&view, (node, fit), pods, &mut plan);
    }
    // Pods for nodes that do not exist any more would stay pending for ever.
    for (node, pods) in view.by_node.iter().filter(|(node, _)| !view.fits.contains_key(*node)) {
        let unbound = pods.iter().filter(|pod| pod.spec.node_name.as_deref() != Some(node));
        plan.delete.extend(unbound.filter(|pod| !pod.is_being_deleted()).cloned());
    }
    if plan.create.is_empty() && plan.delete.is_empty() {
        rolling::update(&view, &mut plan);
    }
    plan.create.truncate(BURST);
    plan.delete.truncate(BURST);
    plan
}

fn sorted(fits: &HashMap<String, Fit>) -> Vec<(&String, Fit)> {
    let mut sorted: Vec<_> = fits.iter().map(|(name, fit)| (name, *fit)).collect();
    sorted.sort_by_key(|(name, _)| *name);
    sorted
}

fn manage(view: &View<'_>, (node, fit): (&String, Fit), pods: &[Arc<Pod>], plan: &mut Plan) {
    if !fit.keeps {
        plan.delete.extend(pods.iter().filter(|pod| !pod.is_being_deleted()).cloned());
        return;
    }
    if pods.is_empty() {
        if fit.runs {
            plan.create.push(node.clone());
        }
        return;
    }
    let mut running = Vec::new();
    for pod in pods.iter().filter(|pod| !pod.is_being_deleted()) {
        let name = format!("{}/{}", pod.namespace(), pod.name());
        match pod.status.phase.as_deref() {
            Some("Failed") => match (view.snapshot.backoff)(node) {
                Some(wait) => plan.again = Some(plan.again.map_or(wait, |again| again.min(wait))),
                None => {
                    let message =
                        format!("Found failed daemon pod {name} on node {node}, will try to kill it");
                    plan.events.push(Event::warning("FailedDaemonPod", message));
                    plan.failed.push(node.clone());
                    plan.delete.push(pod.clone());
                }
            },
            Some("Succeeded") => {
                let message =
                    format!("Found succeeded daemon pod {name} on node {node}, will try to delete it");
                plan.events.push(Event::normal("SucceededDaemonPod", message));
                plan.delete.push(pod.clone());
            }
            Some(_) | None => running.push(pod.clone()),
        }
    }
    if !rolling::surges(view.snapshot.set) {
        plan.delete.extend(running.into_iter().skip(1));
    } else if running.is_empty() && fit.runs {
        plan.create.push(node.clone());
    } else {
        rolling::prune(view, &running, plan);
    }
}

/// The desired status, and when it may change without an event.
pub(crate) fn status(snapshot: &Snapshot<'_>, collisions: i32) -> (DaemonSetStatus, Option<Duration>) {
    let (set, view) = (snapshot.set, View::of(snapshot));
    let mut status = DaemonSetStatus {
        collision_count: set.status.collision_count.or((collisions > 0).then_some(collisions)),
        conditions: set.status.conditions.clone(),
        observed_generation: set.metadata.generation,
        ..DaemonSetStatus::default()
    };
    let (mut updated, mut available) = (0, 0);
    let mut again: Option<Duration> = None;
    for (node, fit) in &view.fits {
        let first = view.by_node.get(node).and_then(|pods| pods.first());
        if !fit.runs {
            status.number_misscheduled += i32::from(first.is_some());
            continue;
        }
        status.desired_number_scheduled += 1;
        let Some(pod) = first else { continue };
        status.current_number_scheduled += 1;
        updated += i32::from(view.is_updated(pod));
        if let Some(at) = view.available_at(pod) {
            status.number_ready += 1;
            available += i32::from(at <= snapshot.now);
            again = again.into_iter().chain(until(at, snapshot.now)).min();
        }
    }
    let positive = |count: i32| (count > 0).then_some(count);
    status.updated_number_scheduled = positive(updated);
    status.number_available = positive(available);
    status.number_unavailable = positive(status.desired_number_scheduled - available);
    (status, again)
}

#[cfg(test)]
mod tests;

//! The plan of a daemon set: pods to create and to delete, and the status.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_events::Event;
use k8s_openapi::api::apps::v1::DaemonSetStatus;

use super::fit::Eligibility;
use super::observed::{ObservedDaemonSet, Plan, Snapshot};
use super::rolling;
use crate::object::{ObjectExt, Pod};
use crate::queue::until;

/// Maximum number of pods that one reconcile creates or deletes.
const BURST: usize = 250;

/// Plans the actions. The rolling update begins once each node has the pods that it must have.
pub(crate) fn plan(snapshot: &Snapshot<'_>) -> Plan {
    let mut plan = Plan::default();
    if snapshot.set.is_being_deleted() {
        return plan;
    }
    let observed = ObservedDaemonSet::of(snapshot);
    for (node, fit) in sorted(&observed.fits) {
        let pods = observed.by_node.get(node).map(Vec::as_slice).unwrap_or_default();
        manage(&observed, node, fit, pods, &mut plan);
    }
    // Pods for nodes that no longer exist would stay pending forever.
    for (node, pods) in observed.by_node.iter().filter(|(node, _)| !observed.fits.contains_key(*node)) {
        let unbound = pods.iter().filter(|pod| pod.spec.node_name.as_deref() != Some(node));
        plan.delete.extend(unbound.filter(|pod| !pod.is_being_deleted()).cloned());
    }
    if plan.create.is_empty() && plan.delete.is_empty() {
        rolling::update(&observed, &mut plan);
    }
    plan.create.truncate(BURST);
    plan.delete.truncate(BURST);
    plan
}

fn sorted(fits: &HashMap<String, Eligibility>) -> Vec<(&String, Eligibility)> {
    let mut sorted: Vec<_> = fits.iter().map(|(name, fit)| (name, *fit)).collect();
    sorted.sort_by_key(|(name, _)| *name);
    sorted
}

fn manage(
    observed: &ObservedDaemonSet<'_>,
    node: &str,
    fit: Eligibility,
    pods: &[Arc<Pod>],
    plan: &mut Plan,
) {
    if !fit.keeps {
        plan.delete.extend(pods.iter().filter(|pod| !pod.is_being_deleted()).cloned());
        return;
    }
    if pods.is_empty() {
        if fit.runs {
            plan.create.push(node.to_owned());
        }
        return;
    }
    let mut running = Vec::new();
    for pod in pods.iter().filter(|pod| !pod.is_being_deleted()) {
        let name = format!("{}/{}", pod.namespace(), pod.name());
        match pod.status.phase.as_deref() {
            Some("Failed") => match (observed.snapshot.backoff)(node) {
                Some(wait) => plan.again = Some(plan.again.map_or(wait, |again| again.min(wait))),
                None => {
                    let message =
                        format!("Found failed daemon pod {name} on node {node}, will try to kill it");
                    plan.events.push(Event::warning("FailedDaemonPod", message));
                    plan.failed.push(node.to_owned());
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
    if !rolling::surges(observed.snapshot.set) {
        plan.delete.extend(running.into_iter().skip(1));
    } else if running.is_empty() && fit.runs {
        plan.create.push(node.to_owned());
    } else {
        rolling::prune(observed, &running, plan);
    }
}

/// The desired status, and the time at which it may change without an event.
pub(crate) fn status(snapshot: &Snapshot<'_>, collisions: i32) -> (DaemonSetStatus, Option<Duration>) {
    let (set, observed) = (snapshot.set, ObservedDaemonSet::of(snapshot));
    let mut status = DaemonSetStatus {
        collision_count: set.status.collision_count.or((collisions > 0).then_some(collisions)),
        conditions: set.status.conditions.clone(),
        observed_generation: set.metadata.generation,
        ..DaemonSetStatus::default()
    };
    let (mut updated, mut available) = (0, 0);
    let mut again: Option<Duration> = None;
    for (node, fit) in &observed.fits {
        let first = observed.by_node.get(node).and_then(|pods| pods.first());
        if !fit.runs {
            status.number_misscheduled += i32::from(first.is_some());
            continue;
        }
        status.desired_number_scheduled += 1;
        let Some(pod) = first else { continue };
        status.current_number_scheduled += 1;
        updated += i32::from(observed.is_updated(pod));
        if let Some(at) = observed.available_at(pod) {
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

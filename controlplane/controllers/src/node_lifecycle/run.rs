//! Receives heartbeats, and writes conditions and taints when heartbeats stop and when they return.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use tokio::time::Instant;

use super::state::Lifecycle;
use super::{plan, zone};
use crate::cache::Change;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, Node, ObjectExt, Pod};
use crate::queue::Next;
use crate::write::Part;
use crate::zone_metrics::ZoneNodes;
use coracle_events::{Event, Recorder};

const COMPONENT: &str = "node-controller";

/// The current time in whole seconds, as in conditions and taints.
fn now() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

/// Queues changed nodes, and lost nodes with a new heartbeat.
pub(crate) fn listen(context: &Context, lifecycle: &Arc<Lifecycle>) {
    let (own, recorder) = (lifecycle.clone(), context.recorder.clone());
    context.caches.nodes.on_change(move |change| {
        record_membership(&recorder, change);
        match change.new {
            Some(node) => own.record_status(node),
            None => drop(change.old.map(|node| own.remove(node.name()))),
        }
        if let Some(node) = change.latest() {
            own.queue.add(node.key());
        }
    });
    let (own, nodes) = (lifecycle.clone(), context.caches.nodes.clone());
    context.caches.leases.on_change(move |change| {
        let Some(lease) = change.new else { return };
        let key = Key::new("", lease.name());
        let renewed = lease.spec.renew_time.as_ref().map(|time| time.0);
        // The heartbeat of a healthy node is only recorded: the reconcile at the end of the node's timer reads it.
        if own.record_lease(&key.name, renewed) && nodes.get(&key).is_some_and(|node| node.is_lost()) {
            own.queue.add(key);
        }
    });
}

/// Records an event for a created or deleted node.
fn record_membership(recorder: &Recorder, change: &Change<'_, Node>) {
    let (node, reason, what) = match (change.old, change.new) {
        (None, Some(node)) => (node, "RegisteredNode", ["Registered", "in"]),
        (Some(node), None) => (node, "RemovingNode", ["Removing", "from"]),
        _ => return,
    };
    let (name, [verb, place]) = (node.name(), what);
    let message = format!("Node {name} event: {verb} Node {name} {place} Controller");
    recorder.record(node.object_reference(), COMPONENT, Event::normal(reason, message));
}

/// Reconciles one node. There is only one worker, so zones do not change meanwhile.
pub(crate) async fn reconcile(context: &Context, lifecycle: &Lifecycle, key: Key) -> Result<Next, Error> {
    update_zones(context, lifecycle);
    let Some(node) = context.caches.nodes.get(&key) else { return Ok(Next::Wait) };
    let silent = lifecycle.since_heartbeat(&node);
    let posted = node.condition("Ready").is_some();
    let grace = if posted { context.config.node_monitor_grace } else { context.config.node_startup_grace };
    let left = grace.checked_sub(silent).filter(|left| !left.is_zero());
    let mut node = node;
    if left.is_none()
        && let Some(conditions) = plan::lost_conditions(&node, now())
    {
        node = mark_lost(context, &node, conditions).await?;
        update_zones(context, lifecycle);
    }
    // Every reconcile of a lost node marks its pods, so that a failed or interrupted write is repeated.
    let unready = if left.is_none() { mark_pods_not_ready(context, &node).await } else { Ok(()) };
    let until_eviction = taint(context, lifecycle, &node).await?;
    unready?;
    // A lost node has no timer: a heartbeat or a change queues it.
    let until_lost = left.map(|left| left + Duration::from_millis(1));
    let wait = [until_lost, until_eviction].into_iter().flatten().min();
    Ok(wait.map_or(Next::Wait, Next::After))
}

/// Updates the health of the zones. Queues all nodes if the rate of NoExecute taints changed.
fn update_zones(context: &Context, lifecycle: &Lifecycle) {
    let nodes = context.caches.nodes.all();
    let zones = zone::all(nodes.iter().map(|node| &**node), &context.config);
    let counts = zones
        .iter()
        .map(|(name, zone)| (name.as_str(), ZoneNodes { nodes: zone.nodes, unready: zone.unready }));
    context.config.zone_metrics.set(counts);
    if lifecycle.update_zones(zones, &context.config, Instant::now()) {
        tracing::debug!("the rate of node evictions changed");
        nodes.iter().for_each(|node| lifecycle.queue.add(node.key()));
    }
}

/// Writes the conditions of a node without heartbeat.
async fn mark_lost(
    context: &Context,
    node: &Node,
    conditions: Vec<k8s_openapi::api::core::v1::NodeCondition>,
) -> Result<Arc<Node>, Error> {
    let was_ready = node.condition("Ready").is_some_and(|ready| ready.status == "True");
    tracing::info!(node = node.name(), "no heartbeat from a node: its conditions become Unknown");
    let patch = json!({
        "metadata": {"uid": node.uid(), "resourceVersion": node.metadata.resource_version},
        "status": {"conditions": conditions},
    });
    let written = context.writer(&context.caches.nodes).merge(&node.key(), Part::Status, patch).await?;
    if was_ready {
        let message = format!("Node {} status is now: NodeNotReady", node.name());
        context.record(node, COMPONENT, Event::normal("NodeNotReady", message));
    }
    Ok(written)
}

/// Marks the pods of a lost node as not ready, so that services do not use them. Returns the first error after all pods
/// were tried.
async fn mark_pods_not_ready(context: &Context, node: &Node) -> Result<(), Error> {
    let mut result = Ok(());
    for pod in context.caches.pods.all() {
        if pod.spec.node_name.as_deref() == Some(node.name()) {
            result = result.and(mark_not_ready(context, &pod).await);
        }
    }
    result
}

async fn mark_not_ready(context: &Context, pod: &Pod) -> Result<(), Error> {
    if pod.condition("Ready").is_none_or(|ready| ready.status != "True") {
        return Ok(());
    }
    let mut conditions = pod.status.conditions.clone().unwrap_or_default();
    for condition in conditions.iter_mut().filter(|condition| condition.type_ == "Ready") {
        condition.status = "False".to_owned();
        condition.last_transition_time = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    }
    let patch = json!({
        "metadata": {"uid": pod.uid(), "resourceVersion": pod.metadata.resource_version},
        "status": {"conditions": conditions},
    });
    match context.pods().merge(&pod.key(), Part::Status, patch).await {
        Err(Error::Request { source, .. }) if crate::error::is_not_found(&source) => Ok(()),
        Err(error) => Err(error),
        Ok(_) => {
            context.record(pod, COMPONENT, Event::warning("NodeNotReady", "Node is not ready"));
            Ok(())
        }
    }
}

/// Writes the taints. Returns the time until the node may get its NoExecute taint, if it must wait.
async fn taint(context: &Context, lifecycle: &Lifecycle, node: &Node) -> Result<Option<Duration>, Error> {
    let eviction = lifecycle.may_evict(node);
    if let Some(taints) = plan::taints(node, eviction.allowed, now()) {
        let patch = json!({
            "metadata": {"uid": node.uid(), "resourceVersion": node.metadata.resource_version},
            "spec": {"taints": taints},
        });
        let written = context.writer(&context.caches.nodes).merge(&node.key(), Part::Main, patch).await?;
        if plan::is_evicting(&written) && !plan::is_evicting(node) {
            lifecycle.record_eviction(node);
            context.config.zone_metrics.evicted(&zone::name(node));
        }
    }
    Ok(eviction.wait)
}

#[cfg(test)]
mod tests;

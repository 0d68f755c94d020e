//! Listens for heartbeats, and writes what follows when they stop and when they come back.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use tokio::time::Instant;

use super::plan;
use super::turns::Turns;
use super::zone::{self, Zone};
use crate::cache::Change;
use crate::config::ControllersConfig;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, Node, ObjectExt, Pod};
use crate::queue::{Next, Queue};
use crate::write::Part;
use coracle_events::{Kind, Note, Recorder};

const COMPONENT: &str = "node-controller";
/// A node that says that it is not ready may mean the moment in which it gets its network: it is not given up before.
const SETTLED: Duration = Duration::from_secs(5);

/// What is remembered of all nodes.
pub(crate) struct Lifecycle {
    /// The nodes that wait for a look.
    pub(crate) queue: Arc<Queue<Key>>,
    beats: Mutex<HashMap<String, Beat>>,
    zones: Mutex<Zones>,
}

/// The last sign of life of one node.
struct Beat {
    at: Instant,
    /// The lease's renewal and the status' heartbeat by which it was seen: as told, for their clock is not ours.
    lease: Option<Timestamp>,
    status: Option<Timestamp>,
    /// Since when it says that it is not ready.
    unready: Option<Instant>,
}

#[derive(Default)]
struct Zones {
    known: BTreeMap<String, Zone>,
    turns: BTreeMap<String, Turns>,
}

/// Conditions and taints tell times in whole seconds.
fn now() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Queues changed nodes, and lost nodes with a new heartbeat.
pub(crate) fn listen(context: &Context) {
    let (lifecycle, recorder) = (context.lifecycle.clone(), context.recorder.clone());
    context.caches.nodes.on_change(move |change| {
        note_membership(&recorder, change);
        match change.new {
            Some(node) => lifecycle.heard_status(node),
            None => drop(change.old.map(|node| lock(&lifecycle.beats).remove(node.name()))),
        }
        if let Some(node) = change.latest() {
            lifecycle.queue.add(node.key());
        }
    });
    let (lifecycle, nodes) = (context.lifecycle.clone(), context.caches.nodes.clone());
    context.caches.leases.on_change(move |change| {
        let Some(lease) = change.new else { return };
        let key = Key::new("", lease.name());
        let renewed = lease.spec.renew_time.as_ref().map(|time| time.0);
        // A heartbeat of a node that lives is only noted: its timer finds it.
        if lifecycle.heard_lease(&key.name, renewed) && nodes.get(&key).is_some_and(|node| node.is_lost()) {
            lifecycle.queue.add(key);
        }
    });
}

/// Records that a node came or went.
fn note_membership(recorder: &Recorder, change: &Change<'_, Node>) {
    let (node, reason, what) = match (change.old, change.new) {
        (None, Some(node)) => (node, "RegisteredNode", ["Registered", "in"]),
        (Some(node), None) => (node, "RemovingNode", ["Removing", "from"]),
        _ => return,
    };
    let (name, [verb, place]) = (node.name(), what);
    recorder.record(Note {
        about: node.object_reference(),
        component: COMPONENT.into(),
        kind: Kind::Normal,
        reason,
        message: format!("Node {name} event: {verb} Node {name} {place} Controller"),
    });
}

/// Reconciles one node. There is only one worker, so zones do not change meanwhile.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    rezone(context);
    let Some(node) = context.caches.nodes.get(&key) else { return Ok(Next::Wait) };
    let silent = context.lifecycle.silence(&node);
    let posted = node.condition("Ready").is_some();
    let grace = if posted { context.config.node_monitor_grace } else { context.config.node_startup_grace };
    let left = grace.checked_sub(silent).filter(|left| !left.is_zero());
    let mut node = node;
    if left.is_none()
        && let Some(conditions) = plan::lost(&node, now())
    {
        node = say_lost(context, &node, conditions).await?;
        rezone(context);
    }
    // Not only when it is said to be lost: what fails then, or is cut short, is done when it is looked at again.
    let unready = if left.is_none() { say_pods_not_ready(context, &node).await } else { Ok(()) };
    let evicts = taint(context, &node).await?;
    unready?;
    // Once lost there is no timer: a heartbeat or a change wakes us.
    let wait = [left.map(|left| left + Duration::from_millis(1)), evicts].into_iter().flatten().min();
    Ok(wait.map_or(Next::Wait, Next::After))
}

/// Looks at all nodes anew when the pace has changed at which those of a zone may be given up.
fn rezone(context: &Context) {
    let nodes = context.caches.nodes.all();
    let zones = zone::all(nodes.iter().map(|node| &**node), &context.config);
    let mut known = lock(&context.lifecycle.zones);
    if known.known == zones {
        return;
    }
    let (was_full, is_full) = (zone::is_full_disruption(&known.known), zone::is_full_disruption(&zones));
    let changed = known.fare(zones, &context.config, Instant::now()) || was_full != is_full;
    drop(known);
    if was_full && !is_full {
        // Nobody could be heard, so everybody gets a whole grace period from now.
        lock(&context.lifecycle.beats).values_mut().for_each(|beat| beat.at = Instant::now());
    }
    if changed {
        tracing::debug!(full = is_full, "nodes may be given up at another pace");
        nodes.iter().for_each(|node| context.lifecycle.queue.add(node.key()));
    }
}

async fn say_lost(
    context: &Context,
    node: &Node,
    conditions: Vec<k8s_openapi::api::core::v1::NodeCondition>,
) -> Result<Arc<Node>, Error> {
    let was_ready = node.condition("Ready").is_some_and(|ready| ready.status == "True");
    tracing::info!(node = node.name(), "the node is not heard of any more");
    let patch = json!({
        "metadata": {"uid": node.uid(), "resourceVersion": node.metadata.resource_version},
        "status": {"conditions": conditions},
    });
    let written = context.writer(&context.caches.nodes).merge(&node.key(), Part::Status, patch).await?;
    if was_ready {
        let message = format!("Node {} status is now: NodeNotReady", node.name());
        context.record(node, COMPONENT, (Kind::Normal, "NodeNotReady"), message);
    }
    Ok(written)
}

/// Services must not send anybody to pods that may be gone. The first failure, after all were tried.
async fn say_pods_not_ready(context: &Context, node: &Node) -> Result<(), Error> {
    let mut result = Ok(());
    for pod in context.caches.pods.all() {
        if pod.spec.node_name.as_deref() == Some(node.name()) {
            result = result.and(say_not_ready(context, &pod).await);
        }
    }
    result
}

async fn say_not_ready(context: &Context, pod: &Pod) -> Result<(), Error> {
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
        other => other.map(drop),
    }
}

/// Writes the taints. The time until the node may be given up, if it has to wait for its turn.
async fn taint(context: &Context, node: &Node) -> Result<Option<Duration>, Error> {
    let (evict, wait) = context.lifecycle.may_evict(node);
    if let Some(taints) = plan::taints(node, evict, now()) {
        let patch = json!({
            "metadata": {"uid": node.uid(), "resourceVersion": node.metadata.resource_version},
            "spec": {"taints": taints},
        });
        let written = context.writer(&context.caches.nodes).merge(&node.key(), Part::Main, patch).await?;
        if plan::is_evicting(&written) && !plan::is_evicting(node) {
            context.lifecycle.gave_up(node);
        }
    }
    Ok(wait)
}

// === impl Lifecycle ===

impl Lifecycle {
    /// Nothing has been heard yet.
    pub(crate) fn new() -> Self {
        Self { queue: Arc::new(Queue::new()), beats: Mutex::default(), zones: Mutex::default() }
    }

    fn heard_lease(&self, name: &str, renewed: Option<Timestamp>) -> bool {
        let mut beats = lock(&self.beats);
        let beat = beats.entry(name.to_owned()).or_insert_with(Beat::now);
        let news = beat.lease != renewed;
        if news {
            (beat.at, beat.lease) = (Instant::now(), renewed);
        }
        news
    }

    fn heard_status(&self, node: &Node) {
        let heartbeat =
            node.condition("Ready").and_then(|ready| ready.last_heartbeat_time.as_ref()).map(|time| time.0);
        let mut beats = lock(&self.beats);
        let beat = beats.entry(node.name().to_owned()).or_insert_with(Beat::now);
        if beat.status != heartbeat {
            (beat.at, beat.status) = (Instant::now(), heartbeat);
        }
        let is_unready = node.condition("Ready").is_some_and(|ready| ready.status == "False");
        beat.unready = is_unready.then(|| beat.unready.unwrap_or_else(Instant::now));
    }

    /// How long the node has not been heard of.
    fn silence(&self, node: &Node) -> Duration {
        lock(&self.beats).entry(node.name().to_owned()).or_insert_with(Beat::now).at.elapsed()
    }

    /// Whether the node may be given up now, else the time until its turn.
    fn may_evict(&self, node: &Node) -> (bool, Option<Duration>) {
        if plan::evicting(node).is_none() {
            return (false, None);
        }
        if zone::is_full_disruption(&lock(&self.zones).known) {
            return (false, None);
        }
        if plan::is_evicting(node) {
            return (true, None);
        }
        let unready = lock(&self.beats).get(node.name()).and_then(|beat| beat.unready);
        let unsettled = unready.and_then(|since| SETTLED.checked_sub(since.elapsed()));
        if let Some(left) = unsettled {
            return (false, Some(left + Duration::from_millis(1)));
        }
        let left =
            lock(&self.zones).turns.get(&zone::name(node)).and_then(|turns| turns.left(Instant::now()));
        match left {
            Some(Duration::ZERO) => (true, None),
            left => (false, left.map(|left| left + Duration::from_millis(1))),
        }
    }

    /// The next node of the zone has to wait.
    fn gave_up(&self, node: &Node) {
        if let Some(turns) = lock(&self.zones).turns.get_mut(&zone::name(node)) {
            turns.taken(Instant::now());
        }
    }
}

impl Zones {
    /// Takes in how the zones fare now; whether any is to be given up at another pace.
    fn fare(&mut self, zones: BTreeMap<String, Zone>, config: &ControllersConfig, now: Instant) -> bool {
        let is_full = zone::is_full_disruption(&zones);
        let mut changed = false;
        self.turns.retain(|name, _| zones.contains_key(name));
        for (name, zone) in &zones {
            let pace = zone::interval(*zone, config).filter(|_| !is_full);
            match self.turns.get_mut(name) {
                Some(turns) => changed |= turns.pace(pace, now),
                None => {
                    changed = true;
                    self.turns.insert(name.clone(), Turns::new(pace, now));
                }
            }
        }
        self.known = zones;
        changed
    }
}

impl Beat {
    /// Heard of for the first time: a whole grace period from now.
    fn now() -> Self {
        Self { at: Instant::now(), lease: None, status: None, unready: None }
    }
}

#[cfg(test)]
mod tests;

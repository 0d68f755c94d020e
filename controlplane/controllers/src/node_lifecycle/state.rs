//! The state of the node lifecycle controller: heartbeats of the nodes, health and rate limits of the zones.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use super::plan;
use super::rate_limits::ZoneRateLimit;
use super::zone::{self, Zone};
use crate::config::ControllersConfig;
use crate::object::{Key, Node, ObjectExt};
use crate::queue::{Queue, QueueMeter};

/// Minimum time between a node's report that it is not ready and its NoExecute taint. A starting node is not ready for
/// a moment while it sets up its network.
const MIN_NOT_READY: Duration = Duration::from_secs(5);
/// Additional time of a timer, so that it does not fire before the awaited time has passed.
const TIMER_MARGIN: Duration = Duration::from_millis(1);

/// The state of all nodes.
pub(crate) struct Lifecycle {
    /// The nodes to reconcile.
    pub(crate) queue: Arc<Queue<Key>>,
    heartbeats: Mutex<HashMap<String, Heartbeat>>,
    zones: Mutex<Zones>,
}

/// The last heartbeat of one node.
struct Heartbeat {
    at: Instant,
    /// The renew time of the lease, and the heartbeat time in the status. Both times are only compared for changes,
    /// because the node's clock may differ.
    lease: Option<Timestamp>,
    status: Option<Timestamp>,
    /// Time at which the node began to report that it is not ready.
    unready: Option<Instant>,
}

/// Whether a node may get a NoExecute taint.
#[derive(Clone, Copy)]
pub(super) struct Eviction {
    /// Whether the taint is allowed now.
    pub(super) allowed: bool,
    /// The time until the next check. `None` if the node is checked again after a change.
    pub(super) wait: Option<Duration>,
}

#[derive(Default)]
struct Zones {
    known: BTreeMap<String, Zone>,
    rate_limits: BTreeMap<String, ZoneRateLimit>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Lifecycle ===

impl Lifecycle {
    /// The state before the first heartbeat.
    pub(crate) fn new(meter: Arc<QueueMeter>) -> Self {
        Self {
            queue: Arc::new(Queue::measured(meter)),
            heartbeats: Mutex::default(),
            zones: Mutex::default(),
        }
    }

    /// Records the renew time of a node's lease. Returns whether it changed.
    pub(super) fn record_lease(&self, name: &str, renewed: Option<Timestamp>) -> bool {
        let mut heartbeats = lock(&self.heartbeats);
        let heartbeat = heartbeats.entry(name.to_owned()).or_insert_with(Heartbeat::now);
        let changed = heartbeat.lease != renewed;
        if changed {
            (heartbeat.at, heartbeat.lease) = (Instant::now(), renewed);
        }
        changed
    }

    /// Records the heartbeat time in a node's status.
    pub(super) fn record_status(&self, node: &Node) {
        let ready = node.condition("Ready");
        let time = ready.and_then(|ready| ready.last_heartbeat_time.as_ref()).map(|time| time.0);
        let mut heartbeats = lock(&self.heartbeats);
        let heartbeat = heartbeats.entry(node.name().to_owned()).or_insert_with(Heartbeat::now);
        if heartbeat.status != time {
            (heartbeat.at, heartbeat.status) = (Instant::now(), time);
        }
        let is_unready = ready.is_some_and(|ready| ready.status == "False");
        heartbeat.unready = is_unready.then(|| heartbeat.unready.unwrap_or_else(Instant::now));
    }

    /// Removes a deleted node.
    pub(super) fn remove(&self, name: &str) {
        lock(&self.heartbeats).remove(name);
    }

    /// The time since the last heartbeat of a node.
    pub(super) fn since_heartbeat(&self, node: &Node) -> Duration {
        lock(&self.heartbeats).entry(node.name().to_owned()).or_insert_with(Heartbeat::now).at.elapsed()
    }

    /// Whether a node may get its NoExecute taint now.
    pub(super) fn may_evict(&self, node: &Node) -> Eviction {
        let denied = Eviction { allowed: false, wait: None };
        if plan::evicting(node).is_none() || zone::is_full_disruption(&lock(&self.zones).known) {
            return denied;
        }
        let allowed = Eviction { allowed: true, wait: None };
        if plan::is_evicting(node) {
            return allowed;
        }
        let unready = lock(&self.heartbeats).get(node.name()).and_then(|heartbeat| heartbeat.unready);
        let unsettled = unready.and_then(|since| MIN_NOT_READY.checked_sub(since.elapsed()));
        if let Some(left) = unsettled {
            return Eviction { wait: Some(left + TIMER_MARGIN), ..denied };
        }
        let zones = lock(&self.zones);
        match zones
            .rate_limits
            .get(&zone::name(node))
            .and_then(|rate_limits| rate_limits.remaining(Instant::now()))
        {
            Some(Duration::ZERO) => allowed,
            left => Eviction { wait: left.map(|left| left + TIMER_MARGIN), ..denied },
        }
    }

    /// Records that a node got its NoExecute taint. The next node of the zone must wait.
    pub(super) fn record_eviction(&self, node: &Node) {
        if let Some(rate_limits) = lock(&self.zones).rate_limits.get_mut(&zone::name(node)) {
            rate_limits.record_taint(Instant::now());
        }
    }

    /// Updates the health of the zones. Returns whether the rate of NoExecute taints changed in any zone.
    pub(super) fn update_zones(
        &self,
        zones: BTreeMap<String, Zone>,
        config: &ControllersConfig,
        now: Instant,
    ) -> bool {
        let mut known = lock(&self.zones);
        if known.known == zones {
            return false;
        }
        let (was_full, is_full) = (zone::is_full_disruption(&known.known), zone::is_full_disruption(&zones));
        let changed = known.update(zones, config, now) || was_full != is_full;
        drop(known);
        if was_full && !is_full {
            // While the cluster was in full disruption, heartbeats could not arrive. So every node gets a full grace
            // period from now.
            lock(&self.heartbeats).values_mut().for_each(|heartbeat| heartbeat.at = now);
        }
        changed
    }
}

// === impl Zones ===

impl Zones {
    fn update(&mut self, zones: BTreeMap<String, Zone>, config: &ControllersConfig, now: Instant) -> bool {
        let is_full = zone::is_full_disruption(&zones);
        let mut changed = false;
        self.rate_limits.retain(|name, _| zones.contains_key(name));
        for (name, zone) in &zones {
            let interval = zone::interval(*zone, config).filter(|_| !is_full);
            match self.rate_limits.get_mut(name) {
                Some(rate_limits) => changed |= rate_limits.set_interval(interval, now),
                None => {
                    changed = true;
                    self.rate_limits.insert(name.clone(), ZoneRateLimit::new(interval, now));
                }
            }
        }
        self.known = zones;
        changed
    }
}

// === impl Heartbeat ===

impl Heartbeat {
    /// A new node gets a full grace period from now.
    fn now() -> Self {
        Self { at: Instant::now(), lease: None, status: None, unready: None }
    }
}

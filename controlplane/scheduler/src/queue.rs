//! The scheduling queue. Pods are ready (by priority, turn and age), in back-off, or unschedulable until a change.
//!
//! ```text
//!            add                    pop
//!   ──────────────► ready ─────────────────► (in flight)
//!                     ▲  ▲                      │ refused
//!       back-off ends │  └──── change ─────┐    ▼
//!                   back-off ◄── change ── unschedulable
//! ```
//! A popped pod is gated if its group is not complete, or if its device claims do not exist yet. A gated pod becomes
//! ready when its group is complete ([`Queue::wake`]), or after a change of a claim ([`Queue::devices_changed`]) or of
//! the pod ([`Queue::add`]). A change that may help an unschedulable pod makes it ready if its back-off is over.
//! Otherwise the pod moves to the back-off. While no pod is ready, pods in back-off are tried early, except after
//! errors, and except pods that need extenders. Source: `SchedulerPopFromBackoffQ` of upstream.

mod entry;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::entry::{Entry, QueueState, backoff};
use crate::config::QueueSort;
use crate::devices::{DeviceChanges, may_use_devices, uses_any};
use crate::hint::Changes;
use crate::metrics::{Attempt, QueueLengths, QueueName, SchedulerMetrics};
use crate::object::Pod;
use crate::turn_queue::TurnQueue;
use crate::volumes::{self, VolumeChanges};
use coracle_values::object::ObjectExt;

/// Time after which a refused pod is retried even without a change that may help it, as upstream.
const MAX_UNSCHEDULABLE: Duration = Duration::from_secs(300);

/// After an attempt for a pod in back-off, the next such attempt waits for the duration of the attempt times this
/// factor. So these attempts take at most a tenth of the scheduler's time, however many changes may help refused pods.
const EARLY_DELAY_FACTOR: u32 = 9;

/// Names of events in metrics, as upstream. [`Changes::event`] has the names for changes.
const ADDED: &str = "UnschedulablePodAdd";
const UPDATED: &str = "UnschedulablePodUpdate";
const FAILED: &str = "ScheduleAttemptFailure";
const BACKOFF_ENDED: &str = "BackoffComplete";
const TRIED_EARLY: &str = "PopFromBackoffQ";
const TIMEOUT: &str = "UnschedulableTimeout";
const ACTIVATED: &str = "ForceActivate";
const CLAIM_CHANGED: &str = "resource.k8s.io/ResourceClaimUpdate";
const VOLUME_CHANGED: &str = "PersistentVolumeClaimUpdate";

/// The queue.
pub(crate) struct Queue {
    /// Back-off after the first refusal of a pod. It doubles with each further refusal.
    first_backoff: Duration,
    longest_backoff: Duration,
    entries: HashMap<String, Entry>,
    /// All ready pods. The pods of one namespace have upstream's order: higher priority first, then the pod that was
    /// added or refused earlier. A refused pod goes behind the waiting pods. Otherwise a few refused pods could be
    /// tried again and again before younger pods.
    ready: TurnQueue,
    held_back: BTreeMap<(Instant, u64), String>,
    /// The held back pods that are tried early while no pod is ready, in the order of ready pods.
    early: TurnQueue,
    /// The time from which a pod may be tried early. `None` before the first early attempt.
    early_from: Option<Instant>,
    /// Start of the early attempt in progress.
    early_started: Option<Instant>,
    /// Unschedulable pods by the changes that may help them.
    unschedulable: HashMap<Changes, HashSet<String>>,
    /// Unschedulable pods by the time at which they are tried again without a change.
    retries: BTreeMap<(Instant, u64), String>,
    /// Number of changes so far.
    changes: u64,
    /// The number of the last change of each type.
    last_change: [u64; Changes::TYPES.len()],
    /// Pods that use ResourceClaims or extended resources.
    with_devices: HashSet<String>,
    /// Pods that use PersistentVolumeClaims.
    with_claims: HashSet<String>,
    /// Number of gated pods.
    gated: usize,
    serial: u64,
    metrics: SchedulerMetrics,
}

impl Queue {
    /// An empty queue with the shortest and the longest back-off of refused pods.
    pub(crate) fn new(
        first_backoff: Duration,
        longest_backoff: Duration,
        sort: QueueSort,
        metrics: SchedulerMetrics,
    ) -> Self {
        Self {
            first_backoff,
            longest_backoff,
            entries: HashMap::new(),
            ready: TurnQueue::new(sort),
            held_back: BTreeMap::new(),
            early: TurnQueue::new(sort),
            early_from: None,
            early_started: None,
            unschedulable: HashMap::new(),
            retries: BTreeMap::new(),
            changes: 0,
            last_change: [0; Changes::TYPES.len()],
            with_devices: HashSet::new(),
            with_claims: HashSet::new(),
            gated: 0,
            serial: 0,
            metrics,
        }
    }

    /// Adds a pod or its newer version. If its requirements changed, the pod is ready immediately.
    pub(crate) fn add(&mut self, pod: impl Into<Arc<Pod>>) {
        let pod: Arc<Pod> = pod.into();
        let uid = pod.uid().to_owned();
        // The claims of a pod and its extended resources never change.
        if may_use_devices(&pod) {
            self.with_devices.insert(uid.clone());
        }
        if volumes::claims_of(&pod).next().is_some() {
            self.with_claims.insert(uid.clone());
        }
        let Some(entry) = self.entries.get_mut(&uid) else {
            self.serial += 1;
            let entry = Entry::new(pod, self.serial);
            self.entries.insert(uid.clone(), entry);
            return self.put_ready(&uid, ADDED);
        };
        let same = entry.pod.has_same_requirements(&pod);
        entry.pod = pod;
        if !same && entry.state != QueueState::InFlight {
            self.put_ready(&uid, UPDATED);
        } else if !same {
            entry.changes_in_flight = Changes::ALL;
        }
    }

    /// Removes a pod. Returns whether it was in the queue.
    pub(crate) fn remove(&mut self, uid: &str) -> bool {
        self.remove_from_order(uid);
        self.with_devices.remove(uid);
        self.with_claims.remove(uid);
        self.entries.remove(uid).is_some()
    }

    /// The next ready pod.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<Arc<Pod>> {
        while let Some(due) = self.held_back.first_entry().filter(|due| due.key().0 <= now) {
            let uid = due.get().clone();
            self.put_ready(&uid, BACKOFF_ENDED);
        }
        while let Some(due) = self.retries.first_entry().filter(|due| due.key().0 <= now) {
            let uid = due.remove();
            // An eviction request that is still in flight after [`MAX_UNSCHEDULABLE`] no longer delays the pod.
            if let Some(entry) = self.entries.get_mut(&uid) {
                entry.evictions = 0;
            }
            self.help(&uid, Changes::ALL, TIMEOUT, now);
        }
        let uid = self.ready.pop_first().or_else(|| self.pop_early(now))?;
        self.start(&uid)
    }

    /// The first pod in back-off that can be tried early.
    fn pop_early(&mut self, now: Instant) -> Option<String> {
        if self.early_from.is_some_and(|from| from > now) {
            return None;
        }
        let uid = self.early.pop_first()?;
        self.early_started = Some(now);
        self.remove_from_order(&uid);
        self.metrics.pod_queued(QueueName::Active, TRIED_EARLY);
        Some(uid)
    }

    /// Ends the attempt for the popped pod. If the pod was popped early, this delays the next early attempt.
    pub(crate) fn attempt_ended(&mut self, now: Instant) {
        if let Some(start) = self.early_started.take() {
            self.early_from = Some(now + (now - start) * EARLY_DELAY_FACTOR);
        }
    }

    /// Pops this pod, even before the end of its back-off. `None` if the pod is in flight, gated, or not in the queue.
    pub(crate) fn take(&mut self, uid: &str) -> Option<Arc<Pod>> {
        if matches!(self.entries.get(uid)?.state, QueueState::InFlight | QueueState::Gated) {
            return None;
        }
        self.remove_from_order(uid);
        self.start(uid)
    }

    fn start(&mut self, uid: &str) -> Option<Arc<Pod>> {
        let entry = self.entries.get_mut(uid)?;
        entry.state = QueueState::InFlight;
        entry.refused_by = None;
        let now = Instant::now();
        entry.started = Some(now);
        entry.first_started.get_or_insert(now);
        entry.attempts = entry.attempts.saturating_add(1);
        entry.popped_at = self.changes;
        entry.changes_in_flight = Changes::default();
        Some(entry.pod.clone())
    }

    /// Marks a popped pod that waits for its group, or for its claims of devices to exist. No other change helps it.
    pub(crate) fn gate(&mut self, uid: &str) {
        if let Some(entry) = self.entries.get_mut(uid).filter(|entry| entry.state == QueueState::InFlight) {
            entry.state = QueueState::Gated;
            entry.cancel_attempt();
            self.gated += 1;
            self.metrics.pod_queued(QueueName::Unschedulable, ADDED);
        }
    }

    /// Ends the attempt for a popped pod. `None` if the attempt was ended before, or if the pod was not tried.
    pub(crate) fn finish_attempt(&mut self, uid: &str) -> Option<Attempt> {
        let entry = self.entries.get_mut(uid)?;
        let (started, first_started) = (entry.started.take()?, entry.first_started?);
        Some(Attempt { started, first_started, number: entry.attempts })
    }

    /// The numbers of pods by their state.
    pub(crate) fn lengths(&self) -> QueueLengths {
        QueueLengths {
            active: self.ready.len(),
            backoff: self.held_back.len(),
            unschedulable: self.unschedulable.values().map(HashSet::len).sum(),
            gated: self.gated,
        }
    }

    /// Makes a gated pod ready. Retries a refused pod as soon as its back-off allows it.
    pub(crate) fn wake(&mut self, uid: &str, now: Instant) {
        self.wake_by(uid, ACTIVATED, now);
    }

    fn wake_by(&mut self, uid: &str, event: &'static str, now: Instant) {
        if self.entries.get(uid).is_some_and(|entry| entry.state == QueueState::Gated) {
            self.put_ready(uid, event);
        } else {
            self.help(uid, Changes::ALL, event, now);
        }
    }

    /// Makes a popped pod ready at this time.
    pub(crate) fn hold_back(&mut self, uid: &str, until: Instant) {
        if let Some(entry) = self.entries.get_mut(uid).filter(|entry| entry.state == QueueState::InFlight) {
            entry.state = QueueState::HeldBack(until, None);
            entry.cancel_attempt();
            self.held_back.insert((until, entry.serial_number), uid.to_owned());
            self.metrics.pod_queued(QueueName::Backoff, FAILED);
        }
    }

    /// End of the back-off of a refused pod.
    pub(crate) fn backoff_until(&self, uid: &str) -> Option<Instant> {
        self.entries.get(uid)?.backoff_until
    }

    /// Sorts pods of the queue: higher priority first, then the older pod.
    pub(crate) fn sort(&self, pods: &mut [Arc<Pod>]) {
        pods.sort_by_key(|pod| self.entries.get(pod.uid()).map(Entry::order));
    }

    /// The time at which the next pod can be tried: now, the end of the first back-off, or the time of the next early
    /// attempt. `None` if no pod is ready or in back-off.
    pub(crate) fn due(&self) -> Option<Instant> {
        if !self.ready.is_empty() {
            return Some(Instant::now());
        }
        let early = (!self.early.is_empty()).then(|| self.early_from.unwrap_or_else(Instant::now));
        self.held_back.keys().next().map(|(due, _)| *due).into_iter().chain(early).min()
    }

    /// The time at which a pod is ready, or at which a refused pod is tried again without a change.
    pub(crate) fn next_attempt(&self) -> Option<Instant> {
        let retry = self.retries.keys().next().map(|(at, _)| *at);
        self.due().into_iter().chain(retry).min()
    }

    /// Marks a pod that no node can run: it waits for one of these changes.
    pub(crate) fn refused(&mut self, uid: &str, helped_by: Changes, now: Instant) {
        self.set_waits_for_backoff(uid, false);
        self.refuse(uid, helped_by, Changes::default(), now);
    }

    /// Like [`Self::refused`], but the pod is never tried before the end of its back-off.
    pub(crate) fn refused_late(&mut self, uid: &str, helped_by: Changes, now: Instant) {
        self.set_waits_for_backoff(uid, true);
        self.refuse(uid, helped_by, Changes::default(), now);
    }

    fn set_waits_for_backoff(&mut self, uid: &str, waits_for_backoff: bool) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.waits_for_backoff = waits_for_backoff;
        }
    }

    /// Sets the plugins that refused a pod, until its next attempt.
    pub(crate) fn set_refused_by(&mut self, uid: &str, plugins: &BTreeSet<&'static str>) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.refused_by = Some(self.metrics.refused(plugins, entry.pod.scheduler()));
        }
    }

    /// Like [`Self::refused`], with the changes that happened after the pod was tried.
    fn refuse(&mut self, uid: &str, helped_by: Changes, changes: Changes, now: Instant) {
        self.remove_from_order(uid);
        let Some(entry) = self.entries.get_mut(uid) else { return };
        self.serial += 1;
        entry.position = self.serial;
        entry.refusals += 1;
        let backoff = backoff(self.first_backoff, self.longest_backoff, entry.refusals);
        entry.backoff_until = Some(now + backoff);
        entry.state = QueueState::Unschedulable;
        entry.helped_by = helped_by;
        let retry_at = now + MAX_UNSCHEDULABLE;
        entry.retry_at = Some(retry_at);
        self.retries.insert((retry_at, entry.serial_number), uid.to_owned());
        let changes = entry.changes_since_pop(&self.last_change) | changes;
        entry.changes_in_flight = changes;
        self.unschedulable.entry(helped_by).or_default().insert(uid.to_owned());
        if entry.evictions == 0 && helped_by.overlaps(changes) {
            self.help(uid, changes, FAILED, now);
        } else {
            self.metrics.pod_queued(QueueName::Unschedulable, FAILED);
        }
    }

    /// Marks a pod whose binding failed: it is retried after its back-off.
    pub(crate) fn failed(&mut self, uid: &str, now: Instant) {
        self.set_waits_for_backoff(uid, true);
        self.refuse(uid, Changes::ALL, Changes::ALL, now);
    }

    /// Records the start of a request that evicts a pod for this pod. The pod is not tried again until
    /// [`Self::eviction_ended`], because the next attempt would evict the same pods again.
    pub(crate) fn eviction_started(&mut self, uid: &str) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.evictions += 1;
        }
    }

    /// Records the end of a request that evicts a pod for this pod. After the last request, the changes during the
    /// requests may help the pod.
    pub(crate) fn eviction_ended(&mut self, uid: &str, now: Instant) {
        let Some(entry) = self.entries.get_mut(uid) else { return };
        entry.evictions = entry.evictions.saturating_sub(1);
        if entry.evictions == 0 && entry.state == QueueState::Unschedulable {
            let changes = std::mem::take(&mut entry.changes_in_flight);
            self.help(uid, changes, ACTIVATED, now);
        }
    }

    /// Records changes that may make refused pods schedulable. Only the pods that the changes may help are read.
    pub(crate) fn change(&mut self, changes: Changes, now: Instant) {
        self.change_by("", changes, now);
    }

    /// Like [`Self::change`], for changes that a pod of the queue causes. They help other pods only.
    pub(crate) fn change_by(&mut self, cause: &str, changes: Changes, now: Instant) {
        self.changes += 1;
        if let Some(entry) = self.entries.get_mut(cause) {
            entry.ignore_change(self.changes, &self.last_change);
        }
        for (one, last) in Changes::TYPES.into_iter().zip(&mut self.last_change) {
            if changes.overlaps(one) {
                *last = self.changes;
            }
        }
        let helped = self.unschedulable.iter().filter(|(helped_by, _)| helped_by.overlaps(changes));
        let others = helped.flat_map(|(_, uids)| uids).filter(|uid| *uid != cause);
        for uid in others.cloned().collect::<Vec<_>>() {
            self.help(&uid, changes, changes.event(), now);
        }
    }

    /// Records changes of devices, which help only pods that use devices. A change of the supply may help the pods that
    /// were refused for devices. A changed claim helps the pods that use the claim, also gated pods.
    pub(crate) fn devices_changed(&mut self, changes: &DeviceChanges, now: Instant) {
        let helped = self.with_devices.iter().filter_map(|uid| {
            let uses = uses_any(&self.entries.get(uid)?.pod, &changes.claims);
            (uses || changes.supply).then(|| (uid.clone(), uses))
        });
        for (uid, uses) in helped.collect::<Vec<_>>() {
            if uses {
                self.wake_by(&uid, CLAIM_CHANGED, now);
            } else {
                self.help(&uid, Changes::DEVICES, Changes::DEVICES.event(), now);
            }
        }
    }

    /// Records changes of claims and volumes, which help only pods with claims. A changed claim helps the pods that use
    /// the claim. A changed volume or class may help all pods with claims.
    pub(crate) fn volumes_changed(&mut self, changes: &VolumeChanges, now: Instant) {
        let helped = self.with_claims.iter().filter(|uid| {
            let uses = |entry: &Entry| volumes::uses_any(&entry.pod, &changes.claims);
            changes.supply || self.entries.get(*uid).is_some_and(uses)
        });
        for uid in helped.cloned().collect::<Vec<_>>() {
            self.help(&uid, Changes::ALL, VOLUME_CHANGED, now);
        }
    }

    /// A pod that was popped and is neither refused nor removed yet.
    pub(crate) fn in_flight(&self, uid: &str) -> Option<&Arc<Pod>> {
        self.entries.get(uid).filter(|entry| entry.state == QueueState::InFlight).map(|entry| &entry.pod)
    }

    /// A pod of the queue.
    pub(crate) fn pod(&self, uid: &str) -> Option<&Arc<Pod>> {
        self.entries.get(uid).map(|entry| &entry.pod)
    }

    /// Retries a pod after a failed request about it. The pod waits for the end of its back-off.
    pub(crate) fn retry(&mut self, uid: &str, now: Instant) {
        self.set_waits_for_backoff(uid, true);
        self.help(uid, Changes::ALL, ACTIVATED, now);
    }

    /// The uids of all pods in the queue.
    pub(crate) fn uids(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    fn help(&mut self, uid: &str, changes: Changes, event: &'static str, now: Instant) {
        let Some(entry) = self.entries.get_mut(uid) else { return };
        match (entry.state, entry.backoff_until) {
            (QueueState::Unschedulable, _) if !entry.helped_by.overlaps(changes) => {}
            (QueueState::Unschedulable, _) if entry.evictions > 0 => {
                entry.changes_in_flight = entry.changes_in_flight | changes;
            }
            (QueueState::Unschedulable, Some(until)) if until > now => {
                let helped_by = entry.helped_by;
                let early = entry.early_order();
                entry.state = QueueState::HeldBack(until, early);
                self.held_back.insert((until, entry.serial_number), uid.to_owned());
                if let Some(order) = early {
                    self.early.insert(entry.pod.namespace(), order, uid.to_owned());
                }
                self.remove_unschedulable(uid, helped_by);
                self.metrics.pod_queued(QueueName::Backoff, event);
            }
            (QueueState::Unschedulable, _) => self.put_ready(uid, event),
            (QueueState::InFlight, _) => entry.changes_in_flight = entry.changes_in_flight | changes,
            (QueueState::Ready(_) | QueueState::HeldBack(..) | QueueState::Gated, _) => {}
        }
    }

    fn put_ready(&mut self, uid: &str, event: &'static str) {
        self.remove_from_order(uid);
        let Some(entry) = self.entries.get_mut(uid) else { return };
        let order = entry.ready_order();
        entry.state = QueueState::Ready(order);
        self.ready.insert(entry.pod.namespace(), order, uid.to_owned());
        self.metrics.pod_queued(QueueName::Active, event);
    }

    fn remove_from_order(&mut self, uid: &str) {
        let Some(entry) = self.entries.get(uid) else { return };
        match (entry.state, entry.helped_by) {
            (QueueState::Ready(order), _) => self.ready.remove(entry.pod.namespace(), order),
            (QueueState::HeldBack(due, early), _) => {
                self.held_back.remove(&(due, entry.serial_number));
                if let Some(order) = early {
                    self.early.remove(entry.pod.namespace(), order);
                }
            }
            (QueueState::Unschedulable, helped_by) => self.remove_unschedulable(uid, helped_by),
            (QueueState::Gated, _) => self.gated = self.gated.saturating_sub(1),
            (QueueState::InFlight, _) => {}
        }
    }

    fn remove_unschedulable(&mut self, uid: &str, helped_by: Changes) {
        if let Some(entry) = self.entries.get_mut(uid)
            && let Some(retry_at) = entry.retry_at.take()
        {
            self.retries.remove(&(retry_at, entry.serial_number));
        }
        if let Some(uids) = self.unschedulable.get_mut(&helped_by) {
            uids.remove(uid);
            if uids.is_empty() {
                self.unschedulable.remove(&helped_by);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::pod;
    use serde_json::json;

    fn empty() -> Queue {
        let (first, longest) = (Duration::from_secs(1), Duration::from_secs(10));
        Queue::new(first, longest, QueueSort::Turns, SchedulerMetrics::default())
    }

    fn pop(queue: &mut Queue, now: Instant) -> String {
        queue.pop(now).map(|pod| pod.name().to_owned()).unwrap_or_default()
    }

    #[tokio::test]
    async fn the_pod_with_higher_priority_comes_first_then_the_older_one() {
        let (mut queue, now) = (empty(), Instant::now());
        queue.add(pod("old", json!({})));
        queue.add(pod("young", json!({})));
        queue.add(pod("important", json!({"priority": 10})));
        let order = [pop(&mut queue, now), pop(&mut queue, now), pop(&mut queue, now), pop(&mut queue, now)];
        assert_eq!(order, ["important", "old", "young", ""]);
    }

    #[tokio::test]
    async fn an_attempt_shares_the_pod_with_the_queue() {
        let mut queue = empty();
        queue.add(pod("p", json!({})));
        let popped = queue.pop(Instant::now()).unwrap();
        assert!(queue.in_flight("p").is_some_and(|kept| Arc::ptr_eq(kept, &popped)));
    }

    #[tokio::test]
    async fn a_pod_of_another_namespace_does_not_wait_for_all_older_pods() {
        let (mut queue, now) = (empty(), Instant::now());
        for number in 0..100 {
            queue.add(pod(&format!("p{number:02}"), json!({})));
        }
        let mut other = pod("other", json!({}));
        other.metadata.namespace = Some("e".to_owned());
        queue.add(other);
        queue.remove("p00");
        let order: Vec<String> = (0..100).map(|_| pop(&mut queue, now)).collect();
        assert_eq!(order.iter().position(|name| name == "other"), Some(8), "after one turn of eight pods");
        let others = order.iter().filter(|name| *name != "other");
        assert!(others.is_sorted(), "the pods of a namespace keep their order");
    }

    #[tokio::test]
    async fn a_refused_pod_comes_after_the_pods_that_were_not_tried_yet() {
        let (mut queue, now) = (empty(), Instant::now());
        queue.add(pod("old", json!({})));
        queue.add(pod("young", json!({})));
        assert_eq!(pop(&mut queue, now), "old");
        queue.failed("old", now);
        let later = now + Duration::from_secs(5);
        assert_eq!([pop(&mut queue, later), pop(&mut queue, later)], ["young", "old"]);
    }

    #[tokio::test]
    async fn a_refused_pod_is_tried_again_without_a_change_after_five_minutes() {
        let (mut queue, now) = (empty(), Instant::now());
        queue.add(pod("p", json!({})));
        for start in [now, now + MAX_UNSCHEDULABLE] {
            assert_eq!(pop(&mut queue, start), "p");
            queue.refused("p", Changes::NODE, start);
            assert_eq!(queue.due(), None);
            assert_eq!(queue.next_attempt(), Some(start + MAX_UNSCHEDULABLE));
            assert_eq!(pop(&mut queue, start + Duration::from_secs(299)), "");
        }
        queue.change(Changes::NODE, now + 2 * MAX_UNSCHEDULABLE);
        assert!(queue.retries.is_empty() && queue.due().is_some(), "a change helped the pod");
        assert_eq!(pop(&mut queue, now + 2 * MAX_UNSCHEDULABLE), "p");
        queue.refused("p", Changes::NODE, now);
        queue.remove("p");
        assert_eq!(queue.next_attempt(), None);
    }

    #[tokio::test]
    async fn changed_devices_help_only_pods_with_claims() {
        let (mut queue, now) = (empty(), Instant::now());
        let claim = |name: &str| json!({"resourceClaims": [{"name": "c", "resourceClaimName": name}]});
        for pod in [pod("plain", json!({})), pod("one", claim("one")), pod("two", claim("two"))] {
            queue.add(pod);
            let pod = queue.pop(now).unwrap();
            queue.refused(pod.uid(), Changes::NODE | Changes::DEVICES, now);
        }
        let later = now + Duration::from_secs(5);
        let claims = [coracle_values::object::Key::new("d", "two")].into();
        queue.devices_changed(&DeviceChanges { supply: false, claims }, later);
        assert_eq!([pop(&mut queue, later), pop(&mut queue, later)], ["two", ""]);
        queue.refused("two", Changes::NODE, later);
        queue.devices_changed(&DeviceChanges { supply: true, ..DeviceChanges::default() }, later);
        assert_eq!([pop(&mut queue, later), pop(&mut queue, later)], ["one", ""]);
        queue.remove("one");
        queue.remove("two");
        assert!(queue.with_devices.is_empty());
    }

    #[tokio::test]
    async fn changed_claims_and_volumes_help_only_pods_that_can_use_them() {
        let (mut queue, now) = (empty(), Instant::now());
        let claim =
            |name: &str| json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": name}}]});
        for pod in [pod("plain", json!({})), pod("one", claim("one")), pod("two", claim("two"))] {
            queue.add(pod);
            let pod = queue.pop(now).unwrap();
            queue.refused(pod.uid(), Changes::ALL, now);
        }
        let later = now + Duration::from_secs(5);
        let claims = [coracle_values::object::Key::new("d", "two")].into();
        queue.volumes_changed(&VolumeChanges { supply: false, claims }, later);
        assert_eq!([pop(&mut queue, later), pop(&mut queue, later)], ["two", ""]);
        queue.volumes_changed(&VolumeChanges { supply: true, ..VolumeChanges::default() }, later);
        assert_eq!([pop(&mut queue, later), pop(&mut queue, later)], ["one", ""]);
        queue.remove("one");
        queue.remove("two");
        assert!(queue.with_claims.is_empty());
    }

    #[tokio::test]
    async fn a_refused_pod_waits_for_a_change_and_for_its_back_off() {
        let (mut queue, now) = (empty(), Instant::now());
        queue.add(pod("p", json!({})));
        assert_eq!(pop(&mut queue, now), "p");
        queue.refused("p", Changes::NODE, now);
        assert_eq!(queue.due(), None);
        queue.add(pod("p", json!({})));
        assert_eq!(queue.due(), None, "our own status write is not a change");
        queue.change(Changes::POD_GONE, now);
        assert_eq!(queue.due(), None, "the pod was refused for properties of nodes");
        queue.change(Changes::NODE, now);
        assert_eq!(queue.lengths(), QueueLengths { backoff: 1, ..QueueLengths::default() });
        queue.add(pod("ready", json!({})));
        assert_eq!(pop(&mut queue, now), "ready", "a pod in back-off comes after the ready pods");
        assert!(queue.due().is_some_and(|due| due <= Instant::now()));
        assert_eq!([pop(&mut queue, now), pop(&mut queue, now)], ["p", ""]);
        queue.refused("p", Changes::NODE, now);
        queue.change(Changes::NODE, now + Duration::from_secs(3));
        assert_eq!(queue.lengths(), QueueLengths { active: 1, ..QueueLengths::default() });
        assert_eq!(pop(&mut queue, now), "p");
    }

    #[tokio::test]
    async fn pods_in_back_off_are_tried_early_by_priority_but_not_after_an_error() {
        let (mut queue, now) = (empty(), Instant::now());
        for (name, priority) in [("failed", 9), ("low", 0), ("high", 5), ("removed", 7)] {
            queue.add(pod(name, json!({"priority": priority})));
        }
        while queue.pop(now).is_some() {}
        queue.failed("failed", now);
        for name in ["low", "high", "removed"] {
            queue.refused(name, Changes::NODE, now);
        }
        queue.change(Changes::NODE, now);
        queue.remove("removed");
        assert_eq!([pop(&mut queue, now), pop(&mut queue, now), pop(&mut queue, now)], ["high", "low", ""]);
        let end = now + Duration::from_secs(1);
        assert_eq!(queue.due(), Some(end));
        assert_eq!(pop(&mut queue, end), "failed");
        queue.refused("failed", Changes::NODE, now);
        queue.change(Changes::NODE, now);
        assert_eq!(pop(&mut queue, now), "failed", "the last attempt has no error");
        assert!(queue.early.is_empty() && queue.held_back.is_empty());
    }

    #[tokio::test]
    async fn a_pod_that_is_refused_late_waits_for_the_end_of_its_back_off() {
        let (mut queue, now) = (empty(), Instant::now());
        queue.add(pod("p", json!({})));
        assert_eq!(pop(&mut queue, now), "p");
        queue.refused_late("p", Changes::NODE, now);
        queue.change(Changes::NODE, now);
        let end = now + Duration::from_secs(1);
        assert_eq!((queue.due(), pop(&mut queue, now).as_str()), (Some(end), ""));
        assert_eq!(pop(&mut queue, end), "p");
        queue.refused("p", Changes::NODE, end);
        queue.change(Changes::NODE, end);
        assert_eq!(pop(&mut queue, end), "p", "the pod is late until its next refusal");
    }

    #[tokio::test]
    async fn early_attempts_take_at_most_a_tenth_of_the_time() {
        let (mut queue, now) = (empty(), Instant::now());
        for name in ["p", "q"] {
            queue.add(pod(name, json!({})));
            assert_eq!(pop(&mut queue, now), name);
            queue.attempt_ended(now + Duration::from_millis(300));
            queue.refused(name, Changes::NODE, now);
        }
        queue.change(Changes::NODE, now);
        assert_eq!(pop(&mut queue, now), "p");
        let end = now + Duration::from_millis(2);
        queue.attempt_ended(end);
        assert_eq!(pop(&mut queue, end), "");
        queue.add(pod("ready", json!({})));
        assert_eq!(pop(&mut queue, end), "ready", "ready pods do not wait");
        queue.attempt_ended(end);
        let next = now + Duration::from_millis(20);
        assert_eq!(queue.due(), Some(next));
        assert_eq!(pop(&mut queue, next), "q");
    }

    #[tokio::test]
    async fn a_pod_is_not_tried_again_before_its_evictions_end() {
        let (mut queue, now) = (empty(), Instant::now());
        queue.add(pod("p", json!({})));
        assert_eq!(pop(&mut queue, now), "p");
        queue.change(Changes::POD_GONE, now);
        for _ in 0..2 {
            queue.eviction_started("p");
        }
        queue.refused("p", Changes::POD_GONE, now);
        assert_eq!(queue.due(), None);
        queue.eviction_ended("p", now);
        queue.change(Changes::POD_GONE, now);
        assert_eq!(queue.due(), None, "one request is in flight");
        queue.eviction_ended("p", now);
        assert_eq!(pop(&mut queue, now), "p");
        queue.eviction_started("p");
        queue.refused("p", Changes::POD_GONE, now);
        queue.eviction_ended("p", now);
        assert_eq!(queue.due(), None, "no change may help the pod");
        assert_eq!(pop(&mut queue, now + MAX_UNSCHEDULABLE), "p");
        queue.eviction_started("p");
        queue.refused("p", Changes::POD_GONE, now);
        assert_eq!(pop(&mut queue, now + MAX_UNSCHEDULABLE), "p", "a request without an end");
    }

    #[tokio::test]
    async fn a_change_while_the_pod_is_in_flight_is_not_lost() {
        let (mut queue, now) = (empty(), Instant::now());
        queue.add(pod("p", json!({})));
        assert_eq!(pop(&mut queue, now), "p");
        queue.change(Changes::NODE, now);
        queue.refused("p", Changes::NODE, now);
        assert_eq!(pop(&mut queue, now + Duration::from_secs(1)), "p");
    }

    #[tokio::test]
    async fn a_change_does_not_help_the_pod_that_causes_it() {
        let (mut queue, now) = (empty(), Instant::now());
        for name in ["cause", "other"] {
            queue.add(pod(name, json!({})));
            assert_eq!(pop(&mut queue, now), name);
        }
        queue.change_by("cause", Changes::POD_GONE, now);
        for name in ["cause", "other"] {
            queue.refused(name, Changes::POD_GONE, now);
        }
        assert_eq!([pop(&mut queue, now), pop(&mut queue, now)], ["other", ""], "in flight");
        queue.refused("other", Changes::POD_GONE, now);
        queue.change_by("cause", Changes::POD_GONE, now);
        assert_eq!([pop(&mut queue, now), pop(&mut queue, now)], ["other", ""], "refused");
        queue.change(Changes::POD_GONE, now);
        assert_eq!(pop(&mut queue, now), "cause");
    }

    #[tokio::test]
    async fn other_changes_still_help_the_pod_that_causes_one() {
        for is_before in [false, true] {
            let (mut queue, now) = (empty(), Instant::now());
            queue.add(pod("cause", json!({})));
            assert_eq!(pop(&mut queue, now), "cause");
            if is_before {
                queue.change(Changes::NODE, now);
            }
            queue.change_by("cause", Changes::POD_GONE, now);
            if !is_before {
                queue.change(Changes::NODE, now);
            }
            queue.refused("cause", Changes::NODE, now);
            assert_eq!(pop(&mut queue, now), "cause", "{is_before}");
        }
    }

    #[tokio::test]
    async fn a_change_is_compared_with_the_pods_that_it_may_help() {
        let (mut queue, now) = (empty(), Instant::now());
        for (name, helped_by) in [("node", Changes::NODE), ("gone", Changes::POD_GONE)] {
            queue.add(pod(name, json!({})));
            assert_eq!(pop(&mut queue, now), name);
            queue.refused(name, helped_by, now);
        }
        queue.add(pod("later", json!({})));
        queue.change(Changes::POD_GONE, now);
        assert_eq!(pop(&mut queue, now), "later");
        queue.refused("later", Changes::POD_GONE, now);
        let end = now + Duration::from_secs(1);
        assert_eq!(
            [pop(&mut queue, end), pop(&mut queue, end)],
            ["gone", ""],
            "the change came before the pop"
        );
        queue.remove("node");
        queue.remove("later");
        assert!(queue.unschedulable.is_empty());
    }

    #[tokio::test]
    async fn the_lengths_count_each_waiting_pod_once() {
        let (mut queue, now) = (empty(), Instant::now());
        for name in ["refused", "retried", "gated", "ready"] {
            queue.add(pod(name, json!({})));
        }
        for name in ["refused", "retried", "gated"] {
            assert_eq!(pop(&mut queue, now), name);
        }
        queue.refused("refused", Changes::NODE, now);
        queue.failed("retried", now);
        queue.gate("gated");
        let all = QueueLengths { active: 1, backoff: 1, unschedulable: 1, gated: 1 };
        assert_eq!(queue.lengths(), all);
        queue.wake("gated", now);
        assert_eq!(queue.lengths(), QueueLengths { active: 2, gated: 0, ..all });
        assert_eq!([pop(&mut queue, now), pop(&mut queue, now)], ["gated", "ready"]);
        for name in ["refused", "retried", "gated"] {
            queue.gate(name);
            queue.remove(name);
        }
        assert_eq!(queue.lengths(), QueueLengths::default(), "a pod in flight waits for nothing");
    }

    #[tokio::test]
    async fn pods_are_counted_by_the_queue_that_they_enter_and_the_event() {
        let (mut queue, now) = (empty(), Instant::now());
        for name in ["refused", "retried", "gated"] {
            queue.add(pod(name, json!({})));
            assert_eq!(pop(&mut queue, now), name);
        }
        queue.refused("refused", Changes::NODE, now);
        queue.failed("retried", now);
        queue.gate("gated");
        queue.change(Changes::NODE, now);
        queue.wake("gated", now);
        let later = now + Duration::from_secs(1);
        let order = [pop(&mut queue, later), pop(&mut queue, later), pop(&mut queue, later)];
        assert_eq!(order, ["gated", "refused", "retried"]);
        queue.refused("refused", Changes::NODE, later);
        queue.change(Changes::NODE_GONE, later);
        queue.add(pod("refused", json!({"nodeSelector": {"a": "b"}})));
        let text = queue.metrics.text();
        let counts = text.lines().filter_map(|line| {
            let labels = line.strip_prefix("scheduler_queue_incoming_pods_total{")?;
            Some(labels.replace(['"', '}'], "").replace("event=", "").replace(",queue=", " "))
        });
        let mut counts: Vec<String> = counts.collect();
        counts.sort();
        assert_eq!(
            counts,
            [
                "BackoffComplete active 2",
                "ForceActivate active 1",
                "NodeUpdate backoff 1",
                "ScheduleAttemptFailure backoff 1",
                "ScheduleAttemptFailure unschedulable 2",
                "UnschedulablePodAdd active 3",
                "UnschedulablePodAdd unschedulable 1",
                "UnschedulablePodUpdate active 1",
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_counts_unless_the_pod_is_gated_or_held_back() {
        let (mut queue, start) = (empty(), Instant::now());
        let seconds = |seconds| start + Duration::from_secs(seconds);
        queue.add(pod("p", json!({})));
        pop(&mut queue, start);
        queue.gate("p");
        assert_eq!(queue.finish_attempt("p"), None);
        tokio::time::advance(Duration::from_secs(5)).await;
        queue.wake("p", seconds(5));
        pop(&mut queue, seconds(5));
        queue.hold_back("p", seconds(6));
        tokio::time::advance(Duration::from_secs(1)).await;
        pop(&mut queue, seconds(6));
        let first = Attempt { started: seconds(6), first_started: seconds(6), number: 1 };
        assert_eq!(queue.finish_attempt("p"), Some(first));
        assert_eq!(queue.finish_attempt("p"), None, "an attempt ends once");
        queue.failed("p", seconds(6));
        tokio::time::advance(Duration::from_secs(2)).await;
        pop(&mut queue, seconds(8));
        let second = Attempt { started: seconds(8), number: 2, ..first };
        assert_eq!(queue.finish_attempt("p"), Some(second));
    }

    #[tokio::test]
    async fn a_gated_pod_waits_until_it_is_woken() {
        let (mut queue, now) = (empty(), Instant::now());
        queue.add(pod("p", json!({})));
        assert_eq!(pop(&mut queue, now), "p");
        queue.gate("p");
        queue.change(Changes::ALL, now);
        queue.retry("p", now);
        assert_eq!((queue.due(), queue.take("p").is_some()), (None, false));
        queue.wake("p", now);
        assert_eq!(pop(&mut queue, now), "p");
    }

    #[tokio::test]
    async fn a_pod_that_is_gated_for_its_claim_waits_for_that_claim() {
        let (mut queue, now) = (empty(), Instant::now());
        queue.add(pod("p", json!({"resourceClaims": [{"name": "c", "resourceClaimName": "one"}]})));
        assert_eq!(pop(&mut queue, now), "p");
        queue.gate("p");
        let claims = |name: &str| [coracle_values::object::Key::new("d", name)].into();
        queue.devices_changed(&DeviceChanges { supply: true, claims: claims("two") }, now);
        assert_eq!(queue.due(), None);
        queue.devices_changed(&DeviceChanges { supply: false, claims: claims("one") }, now);
        assert_eq!(pop(&mut queue, now), "p");
    }

    #[tokio::test]
    async fn pods_are_taken_from_each_state_and_sorted() {
        let (mut queue, now) = (empty(), Instant::now());
        for (name, priority) in [("refused", 0), ("retried", 0), ("urgent", 5), ("ready", 0)] {
            queue.add(pod(name, json!({"priority": priority})));
        }
        assert!(queue.take("refused").is_some() && queue.take("retried").is_some());
        queue.refused("refused", Changes::NODE, now);
        queue.failed("retried", now);
        let all = ["ready", "refused", "retried", "urgent"];
        let in_backoff = all.map(|uid| queue.backoff_until(uid).is_some());
        assert_eq!(in_backoff, [false, true, true, false]);
        let mut order: Vec<Arc<Pod>> = all.iter().filter_map(|uid| queue.take(uid)).collect();
        queue.sort(&mut order);
        let names: Vec<&str> = order.iter().map(|pod| pod.name()).collect();
        assert_eq!(names, ["urgent", "refused", "retried", "ready"]);
        assert_eq!(queue.due(), None);
        assert!(queue.unschedulable.is_empty() && queue.take("ready").is_none());
        queue.hold_back("ready", now + Duration::from_secs(3));
        assert_eq!(queue.due(), Some(now + Duration::from_secs(3)));
    }

    #[tokio::test]
    async fn a_pod_with_changed_requirements_is_ready_at_once() {
        let (mut queue, now) = (empty(), Instant::now());
        queue.add(pod("p", json!({"nodeSelector": {"a": "b"}})));
        pop(&mut queue, now);
        queue.refused("p", Changes::NODE, now);
        queue.add(pod("p", json!({})));
        assert_eq!(pop(&mut queue, now), "p");
        assert!(queue.remove("p"));
        assert!(!queue.remove("p"));
    }
}

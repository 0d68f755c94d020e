//! Eviction of pods: pods that exceed limits on their disk usage ([`limits`]), and pods of a node that is short of disk
//! space, memory or process IDs.
//!
//! A round checks the node's resources. A round starts with each renewal interval of the lease. If the interval is
//! late, for example because the API server does not answer, a timer of [`LATE_HEARTBEAT_INTERVAL`] starts the round.
//! Rounds are more frequent while available memory, process IDs or disk space fall towards their thresholds. A round
//! also starts when tasks wait for memory.
//!
//! Under disk pressure unused images are removed first. The disk is read again before an eviction. One pod is evicted
//! at a time; the next one follows when the cgroup of the first is gone. The pod's worker gets the eviction and stops
//! the pod.

mod disk;
mod due_times;
mod limits;
mod machine;
mod measured;
mod measurement;
mod plan;
mod preempted;
mod request;
mod soft;
mod stalls;
mod trend;
mod usage;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;

use super::NodeContext;
use super::state::has_ended;
use crate::event_recorder::Level;
use crate::node::{DiskLevels, DiskShortage, MachineLevels, MachineResource, MachineShortage, Resource};
use disk::{DiskShortages, Found, Pace};
pub(crate) use limits::LimitEviction;
use machine::Urgency;
pub use measured::DiskUsages;
use measurement::{MeasuredPods, Measurement, measure};
use plan::MeasuredPod;
pub(crate) use plan::{grace, is_critical, is_limited, priority};
pub(crate) use request::{Evicted, EvictionCause, Evictions};
use soft::{Crossed, Due};
use stalls::MemoryStalls;
use trend::DiskTrend;

/// Interval of the measurements, as the kubelet's.
const INTERVAL: Duration = Duration::from_secs(10);
/// Interval of the rounds while the renewal of the lease is late. It is longer than the default renewal interval.
const LATE_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum time for which an eviction for a lack of disk space waits for the removal of unused images.
const COLLECTION_LIMIT: Duration = Duration::from_secs(2);
/// Maximum time to wait for the end of an evicted pod after its grace period. After this time the next pod may be
/// evicted. The value is the kubelet's.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Grace period of an evicted pod in seconds, unless a soft threshold gives the pod a longer period. The value is the
/// kubelet's.
const MIN_GRACE: u32 = 1;

/// The task that checks the resources of the node, and evicts pods if a resource is short.
pub(crate) struct Eviction {
    node: Arc<NodeContext>,
    /// Changes once in each renewal interval of the lease.
    heartbeats: watch::Receiver<()>,
    /// Whether the node was low on disk space in the previous round.
    was_short: bool,
    /// Time of the next round for a lack of disk space.
    disk_due: Instant,
    /// Time of the next round for a disk that fills up quickly.
    early_due: Instant,
    /// Time from which an ordinary eviction for the current shortage of the disk is permitted, see [`Pace::Ordinary`].
    ordinary_due: Instant,
    /// The resource of the machine that was short in the previous round.
    machine_short: Option<MachineResource>,
    /// Thresholds of memory and process IDs.
    machine: Crossed<MachineResource>,
    /// Thresholds of the disk.
    disk: Crossed<Resource>,
    /// The measurement of the pods' disks.
    measurement: Measurement<MeasuredPods>,
    /// The trend of the disk's free space.
    trend: DiskTrend,
    /// The amounts of the previous round.
    levels: MachineLevels,
    /// Whether available memory or process IDs were only slightly above a threshold in the previous round, and were
    /// falling.
    is_near: bool,
    /// The uids of pods that were evicted because the node was short of a resource.
    evicted: HashSet<String>,
    /// The pod that was evicted last, and the latest end of the wait for it. None after its cgroup is gone.
    ending: Option<(String, Instant)>,
    /// The shortage of memory or process IDs that evictions could not end.
    unrelieved_machine: UnrelievedPressure,
    /// The shortage of the disk that evictions could not end.
    unrelieved_disk: UnrelievedPressure,
}

/// The resource that evictions could not free in the last round. The resource is stored so that it is logged only once.
#[derive(Debug, Default)]
struct UnrelievedPressure(Option<&'static str>);

// === impl Eviction ===

impl Eviction {
    pub(crate) fn new(node: Arc<NodeContext>, heartbeats: watch::Receiver<()>) -> Self {
        Self {
            node,
            heartbeats,
            was_short: false,
            disk_due: Instant::now(),
            early_due: Instant::now(),
            ordinary_due: Instant::now(),
            machine_short: None,
            machine: Crossed::none(),
            disk: Crossed::none(),
            measurement: Measurement::none(),
            trend: DiskTrend::default(),
            levels: MachineLevels::default(),
            is_near: false,
            evicted: HashSet::new(),
            ending: None,
            unrelieved_machine: UnrelievedPressure::default(),
            unrelieved_disk: UnrelievedPressure::default(),
        }
    }

    /// Measures and evicts until it is dropped.
    pub(crate) async fn run(mut self) {
        let thresholds = self.node.config.eviction;
        let memory = [thresholds.memory_available, thresholds.soft.memory_available.threshold];
        let is_watched = memory.into_iter().any(|threshold| !threshold.is_zero());
        let mut stalls = if is_watched { MemoryStalls::open() } else { MemoryStalls::none() };
        loop {
            let urgency = self.urgency();
            let interval = urgency.interval(self.disk_interval());
            tokio::select! {
                // All arms only wait, so dropping them loses nothing.
                () = tokio::time::sleep(interval.unwrap_or(LATE_HEARTBEAT_INTERVAL)) => {}
                () = stalls.next(), if urgency.follows_stalls() => {}
                changed = self.heartbeats.changed(), if interval.is_none() => if changed.is_err() { return },
                measured = self.measurement.result() => {
                    self.relieve_disk(measured);
                    continue;
                }
            }
            self.round().await;
        }
    }

    /// Measures the resources of the node, and evicts a pod if a resource is short.
    async fn round(&mut self) {
        let now = Instant::now();
        let (machine, disk) = self.find_shortages(now);
        self.node.volumes.limit_empty_dirs();
        if self.trend.interval(&self.node.config.eviction).is_some() {
            // The image collector has its own threshold. Above it, unused images are removed before the disk is short.
            self.node.image_gc.check_disk();
        }
        self.forget_ended(now);
        let is_short = machine.is_some() || disk.is_some();
        let has_evictions = !self.evicted.is_empty() || !self.node.evictions.is_empty();
        // The pods are listed only when needed, so a round on an idle node does not take longer with more pods.
        let pods = if is_short || has_evictions { self.pods() } else { Vec::new() };
        match machine {
            Some(due) => self.relieve_machine(&pods, due, now).await,
            None => {
                self.machine_short = None;
                self.unrelieved_machine = UnrelievedPressure::default();
            }
        }
        match disk {
            Some(due) => self.relieve(&pods, due, now),
            None => {
                self.was_short = false;
                self.unrelieved_disk = UnrelievedPressure::default();
            }
        }
    }

    /// The pods that may use resources, including pods that end within a long grace period. Removes the evictions of
    /// all other pods.
    fn pods(&mut self) -> Vec<Arc<Pod>> {
        let pods: Vec<Arc<Pod>> = self.node.pods.all().into_iter().filter(|pod| !has_ended(pod)).collect();
        let uids: HashSet<&str> = pods.iter().filter_map(|pod| pod.metadata.uid.as_deref()).collect();
        self.node.evictions.retain(|uid| uids.contains(uid));
        self.evicted.retain(|uid| uids.contains(uid.as_str()));
        pods
    }

    /// Measures the resources of the node, and updates the conditions. Returns the shortages of the machine and of its
    /// disk.
    fn find_shortages(&mut self, now: Instant) -> (Option<Due<MachineShortage>>, Option<Due<DiskShortage>>) {
        let config = &self.node.config;
        let (hard, soft) = (config.eviction, config.eviction.as_soft());
        let of_pods = self.node.cgroups.memory_left(self.node.machine.memory);
        let levels = MachineLevels::read().with_pods(of_pods);
        let on_machine = levels.shortage(&hard, self.machine.hard());
        let soft_on_machine = levels.shortages(&soft, |resource| self.machine.is_lasting(resource));
        let disk_levels = DiskLevels::read(&config.state_dir, &hard);
        let on_disk = DiskShortages::find(&disk_levels, &hard, &self.disk);
        let mut pressure =
            levels.pressure(&hard, on_disk.is_hard()).or(levels.pressure(&soft, on_disk.is_soft()));
        for shortage in on_machine.iter().chain(soft_on_machine.iter().flatten()) {
            pressure.add(shortage.resource);
        }
        self.node.pressure.observe(pressure, now);
        self.is_near = levels.is_near(&self.levels, &hard);
        self.levels = levels;
        self.trend.add(disk_levels, now);
        let short = soft_on_machine.iter().flatten().map(|shortage| shortage.resource);
        let short = short.map(|resource| (resource, machine::grace_period(&hard.soft, resource)));
        let kind = self.machine.update(on_machine.map(|shortage| shortage.resource), short, now);
        let mut lasting = soft_on_machine.into_iter().flatten();
        let lasting = lasting.find(|shortage| self.machine.is_lasting(shortage.resource));
        let of_machine = Due::of(kind, on_machine, lasting, hard.soft.max_pod_grace);
        (of_machine, on_disk.store(&mut self.disk, &hard, now))
    }

    /// The interval of the rounds for the disk. None if the next renewal interval starts the next round.
    fn disk_interval(&self) -> Option<Duration> {
        let sooner = self.trend.interval(&self.node.config.eviction);
        if !self.was_short {
            return sooner;
        }
        let now = Instant::now();
        // More frequent rounds are useless if no pod can be evicted, or while no pod may be evicted early.
        let is_useful = self.unrelieved_disk.0.is_none() && now >= self.early_due;
        let until_due = self.disk_due.saturating_duration_since(now);
        Some(disk::interval(until_due, sooner.filter(|_| is_useful)))
    }

    fn urgency(&self) -> Urgency {
        Urgency {
            is_short: self.machine_short.is_some() || self.ending.is_some(),
            is_near: self.is_near,
            is_unrelieved: self.unrelieved_machine.0.is_some(),
        }
    }

    /// Ends the wait for the evicted pod, if its cgroup is gone or the maximum time is over.
    fn forget_ended(&mut self, now: Instant) {
        let Some((uid, limit)) = &self.ending else { return };
        if now >= *limit || !self.node.cgroups.pods().contains(uid) {
            self.ending = None;
        }
    }

    /// Frees space on the node's disk. Each round requests the removal of unused images. From the second round on, it
    /// also begins to measure the pods; the first round does so if the disk would be full before the second round.
    /// After the measurement one pod is evicted.
    fn relieve(&mut self, pods: &[Arc<Pod>], due: Due<DiskShortage>, now: Instant) {
        let Some(pace) = self.pace(due.shortage.resource, now) else { return };
        self.disk_due = pace.next_due(self.was_short, self.disk_due, now);
        let collection = self.node.image_gc.no_room();
        let is_first = !std::mem::replace(&mut self.was_short, true);
        if is_first {
            self.ordinary_due = now + INTERVAL;
            let message = format!("Attempting to reclaim {}", plan::name_of(due.shortage.resource));
            self.node.recorder.node(Level::Warning, "EvictionThresholdMet", message);
        }
        if is_first && pace == Pace::Ordinary {
            return;
        }
        self.early_due = now + INTERVAL;
        if self.ending.is_some() {
            return;
        }
        let (node, candidates) = (Arc::clone(&self.node), self.candidates(pods));
        self.measurement.begin(async move {
            let collected = collection.wait(COLLECTION_LIMIT);
            let (measured, ()) = tokio::join!(measure(node, candidates, pace), collected);
            measured
        });
    }

    /// The pace of a round that finds this resource of the disk short. None if the round comes too early for the disk:
    /// rounds for memory, process IDs or a disk that fills up may be more frequent.
    fn pace(&self, resource: Resource, now: Instant) -> Option<Pace> {
        let falls_since = self.trend.used_up_soon(resource, &self.node.config.eviction);
        let found = Found {
            now,
            was_short: self.was_short,
            due: self.disk_due,
            early_due: self.early_due,
            falls_since: falls_since.filter(|_| self.disk.hard() == Some(resource)),
        };
        Pace::of(found, |since| self.node.pulls.was_active_since(since))
    }

    /// Reads the disk again before an eviction, because images may have been removed since the round.
    fn confirm(&mut self, now: Instant) -> Option<Due<DiskShortage>> {
        let config = &self.node.config;
        let levels = DiskLevels::read(&config.state_dir, &config.eviction);
        disk::confirmed(&levels, &config.eviction, &mut self.disk, now)
    }

    /// Evicts the first of the measured pods, unless the shortage is over, or another pod is still ending.
    fn relieve_disk(&mut self, measured: MeasuredPods) {
        let now = Instant::now();
        let MeasuredPods { pace, pods } = measured;
        let has_pulled = |since| self.node.pulls.was_active_since(since);
        if !pace.permits_at(now, self.ordinary_due, has_pulled) {
            // An early measurement without an eviction must not delay the ordinary measurement.
            self.disk_due = self.ordinary_due;
            return;
        }
        // A measurement that takes longer than the interval must not be followed by the next one at once.
        self.disk_due = now + INTERVAL;
        self.early_due = self.disk_due;
        if !self.was_short || self.ending.is_some() {
            return;
        }
        let Some(due) = self.confirm(now) else {
            // A later shortage is a new shortage: unused images are removed first.
            self.was_short = false;
            self.disk_due = now;
            return;
        };
        let current = self.pods();
        let pods = measurement::still_candidates(pods, &self.candidates(&current));
        let shortage = due.shortage;
        let Some(MeasuredPod { pod, usage }) = plan::first(&pods, shortage.resource) else {
            let resource = plan::name_of(shortage.resource);
            if self.unrelieved_disk.is_new(resource) {
                tracing::warn!(resource, "the node is low on disk space, and no pod can be evicted");
            }
            return;
        };
        let message = plan::message(pod, usage, shortage);
        let grace = plan::grace(pod, due.max_grace);
        let cause = EvictionCause::Pressure(plan::signal_of(shortage.resource));
        self.evict(pod, Evicted { message, cause, grace }, now);
    }

    /// Evicts the first pod for a lack of memory or process IDs, unless another pod is still ending. The shortage was
    /// measured at the time `at`.
    async fn relieve_machine(&mut self, pods: &[Arc<Pod>], due: Due<MachineShortage>, at: Instant) {
        let shortage = due.shortage;
        let resource = machine::name_of(shortage.resource);
        if self.machine_short.replace(shortage.resource) != Some(shortage.resource) {
            let message = format!("Attempting to reclaim {resource}");
            self.node.recorder.node(Level::Warning, "EvictionThresholdMet", message);
        }
        if self.ending.is_some() {
            return;
        }
        let candidates = self.candidates(pods);
        let measured = usage::of_machine(&self.node, &candidates).await;
        let Some(MeasuredPod { pod, .. }) = machine::first(&measured, shortage.resource) else {
            if self.unrelieved_machine.is_new(resource) {
                tracing::warn!(resource, "the node is low on a resource, and no pod can be evicted");
            }
            return;
        };
        let containers = match (shortage.resource, pod.metadata.uid.as_deref()) {
            (MachineResource::Memory, Some(uid)) => usage::memory_of_containers(&self.node, uid).await,
            _ => Vec::new(),
        };
        let message = machine::message(pod, &containers, shortage);
        let grace = plan::grace(pod, due.max_grace);
        let cause = EvictionCause::Pressure(machine::signal_of(shortage.resource));
        self.evict(pod, Evicted { message, cause, grace }, at);
    }

    /// Pods that may be evicted because the node is short of a resource.
    fn candidates(&self, pods: &[Arc<Pod>]) -> Vec<Arc<Pod>> {
        pods.iter().filter(|pod| !is_critical(pod) && !self.was_evicted(pod)).cloned().collect()
    }

    /// Whether the pod was evicted, or has no uid.
    fn was_evicted(&self, pod: &Pod) -> bool {
        pod.metadata.uid.as_deref().is_none_or(|uid| self.evicted.contains(uid))
    }

    /// Requests the eviction of a pod because the node is short of a resource. `at` is the time of the measurement.
    fn evict(&mut self, pod: &Pod, evicted: Evicted, at: Instant) {
        self.unrelieved_machine = UnrelievedPressure::default();
        self.unrelieved_disk = UnrelievedPressure::default();
        let Some(uid) = pod.metadata.uid.as_deref() else { return };
        let (signal, message) = (evicted.cause.signal(), &evicted.message);
        tracing::info!(uid, message, signal, "evicting a pod because the node is low on a resource");
        self.node.metrics.endings.evicting(signal.unwrap_or_default(), at.elapsed());
        self.evicted.insert(uid.to_owned());
        let grace = Duration::from_secs(evicted.grace.into());
        self.ending = Some((uid.to_owned(), Instant::now() + grace + END_LIMIT));
        self.node.evictions.request(uid, evicted);
    }
}

// === impl UnrelievedPressure ===

impl UnrelievedPressure {
    /// Stores the resource. Returns whether the last round had another resource, or none.
    fn is_new(&mut self, resource: &'static str) -> bool {
        self.0.replace(resource) != Some(resource)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_that_lasts_is_new_once() {
        let mut unrelieved = UnrelievedPressure::default();
        let rounds = ["inodes", "inodes", "ephemeral-storage"].map(|resource| unrelieved.is_new(resource));
        assert_eq!(rounds, [true, false, true]);
    }
}

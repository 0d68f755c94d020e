//! Free memory and process IDs of the machine, and the node's conditions of pressure.

use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::eviction::{Required, Shortage};
use super::{EvictionThresholds, Threshold, properties};

/// An amount counts as falling if it has decreased by more than the threshold divided by this number.
const MIN_FALL: u64 = 50;

/// The conditions of pressure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pressure {
    pub(crate) memory: bool,
    pub(crate) disk: bool,
    pub(crate) pids: bool,
}

/// A resource of the machine, other than its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MachineResource {
    Memory,
    Pids,
}

/// A shortage of a resource of the machine, in bytes or process IDs.
pub(crate) type MachineShortage = Shortage<MachineResource>;

/// Available amounts of the machine's resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MachineLevels {
    memory: Level,
    /// Memory that all pods together can take, if it is less than the memory of the machine.
    memory_of_pods: Level,
    pids: Level,
}

/// An available amount and its maximum. A capacity of 0 means unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) available: u64,
    pub(crate) capacity: u64,
}

/// The node's conditions of pressure over time. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct PressureConditions {
    last: Arc<Mutex<LastShort>>,
    /// Time for which a condition stays after its resource was last short.
    transition: Duration,
    current: watch::Sender<Pressure>,
}

/// Last time of a shortage of each resource.
#[derive(Clone, Copy, Debug, Default)]
struct LastShort {
    memory: Option<Instant>,
    disk: Option<Instant>,
    pids: Option<Instant>,
}

// === impl Pressure ===

impl Pressure {
    /// Adds the condition of a resource whose minimum is not reclaimed yet.
    pub(crate) fn add(&mut self, resource: MachineResource) {
        match resource {
            MachineResource::Memory => self.memory = true,
            MachineResource::Pids => self.pids = true,
        }
    }

    /// The conditions that at least one of the two has.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            memory: self.memory || other.memory,
            disk: self.disk || other.disk,
            pids: self.pids || other.pids,
        }
    }
}

// === impl MachineLevels ===

impl MachineLevels {
    /// Reads the amounts from the kernel. An amount that cannot be read never causes a shortage.
    pub(crate) fn read() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let most = ["pid_max", "threads-max"].map(|name| read(&format!("/proc/sys/kernel/{name}")));
        Self::parse(&read("/proc/meminfo"), &read("/proc/loadavg"), &most)
    }

    /// `most` has the kernel's limits of process IDs and of threads. As upstream, the smaller limit counts.
    fn parse(meminfo: &str, loadavg: &str, most: &[String]) -> Self {
        let bytes = |name: &str| properties::kib(meminfo, name).saturating_mul(1024);
        // The kernel also reports 0 bytes. Only a missing line is an unknown amount.
        let is_known = meminfo.lines().any(|line| line.starts_with("MemAvailable:"));
        let capacity = if is_known { bytes("MemTotal") } else { 0 };
        let memory = Level { available: bytes("MemAvailable"), capacity };
        // The field has the numbers of runnable and existing threads, as in `1/234`.
        let threads =
            loadavg.split(' ').nth(3).and_then(|field| field.split_once('/')?.1.parse::<u64>().ok());
        let pids = threads.zip(most.iter().filter_map(|text| text.trim().parse::<u64>().ok()).min());
        let pids =
            pids.map(|(threads, most)| Level { available: most.saturating_sub(threads), capacity: most });
        Self { memory, memory_of_pods: Level::default(), pids: pids.unwrap_or_default() }
    }

    /// Adds the memory that all pods together can still take, and their limit, in bytes.
    pub(crate) fn with_pods(self, memory: Option<[u64; 2]>) -> Self {
        let level = memory.map(|[available, capacity]| Level { available, capacity });
        Self { memory_of_pods: level.unwrap_or_default(), ..self }
    }

    /// The resource that is short. Memory is first, as upstream. None if nothing is short. `last` is the resource that
    /// was short before. Its shortage ends only when the minimum is reclaimed.
    pub(crate) fn shortage(
        &self,
        thresholds: &EvictionThresholds,
        last: Option<MachineResource>,
    ) -> Option<MachineShortage> {
        self.shortages(thresholds, |resource| last == Some(resource)).into_iter().flatten().next()
    }

    /// The resources that are short, memory first. `lasts` is true for a resource that was short before.
    pub(crate) fn shortages(
        &self,
        thresholds: &EvictionThresholds,
        lasts: impl Fn(MachineResource) -> bool,
    ) -> [Option<MachineShortage>; 2] {
        let reclaim = |resource, minimum| if lasts(resource) { minimum } else { Threshold::Amount(0) };
        let minimum = &thresholds.minimum_reclaim;
        let memory = reclaim(MachineResource::Memory, minimum.memory_available);
        let memory = Required { threshold: thresholds.memory_available, reclaim: memory };
        let pids = reclaim(MachineResource::Pids, minimum.pid_available);
        let pids = Required { threshold: thresholds.pid_available, reclaim: pids };
        let levels = [self.memory, self.memory_of_pods];
        [
            levels.into_iter().find_map(|level| level.shortage(MachineResource::Memory, memory)),
            self.pids.shortage(MachineResource::Pids, pids),
        ]
    }

    /// Whether less than one and a half times a threshold is available, and the amount is falling. `before` has the
    /// amounts of the last measurement. A low but constant amount does not count, because it is normal on a small
    /// machine.
    pub(crate) fn is_near(&self, before: &Self, thresholds: &EvictionThresholds) -> bool {
        let memory = thresholds.memory_available;
        self.memory.is_near(before.memory, memory)
            || self.memory_of_pods.is_near(before.memory_of_pods, memory)
            || self.pids.is_near(before.pids, thresholds.pid_available)
    }

    /// The conditions with these amounts. `disk` is true if the disk is short.
    pub(crate) fn pressure(&self, thresholds: &EvictionThresholds, disk: bool) -> Pressure {
        Pressure {
            memory: self.memory.is_short(thresholds.memory_available)
                || self.memory_of_pods.is_short(thresholds.memory_available),
            disk,
            pids: self.pids.is_short(thresholds.pid_available),
        }
    }
}

// === impl Level ===

impl Level {
    fn is_short(self, threshold: Threshold) -> bool {
        threshold.exceeds(self.available, self.capacity)
    }

    fn is_near(self, before: Self, threshold: Threshold) -> bool {
        let threshold = threshold.of(self.capacity);
        // Smaller changes are normal on an idle machine.
        let is_falling = self.available.saturating_add(threshold / MIN_FALL) < before.available;
        self.capacity > 0 && is_falling && self.available < threshold.saturating_add(threshold / 2)
    }

    pub(super) fn shortage<R>(self, resource: R, required: Required) -> Option<Shortage<R>> {
        Shortage::find(resource, required, self.available, self.capacity)
    }
}

// === impl PressureConditions ===

impl PressureConditions {
    /// Creates the state without a condition. `transition` is the time for which a condition stays after its resource
    /// was last short.
    pub(crate) fn new(transition: Duration) -> Self {
        Self { last: Arc::default(), transition, current: watch::channel(Pressure::default()).0 }
    }

    /// Records which resources are short now, and returns the conditions. A condition begins as soon as its resource is
    /// short, and ends some time after the resource was last short.
    pub(crate) fn observe(&self, short: Pressure, now: Instant) -> Pressure {
        let conditions = {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            last.observe(short, now);
            last.conditions(now, self.transition)
        };
        self.current.send_if_modified(|current| std::mem::replace(current, conditions) != conditions);
        conditions
    }

    /// The conditions after the last observation.
    pub(crate) fn current(&self) -> Pressure {
        *self.current.borrow()
    }

    /// The conditions, as they change.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Pressure> {
        self.current.subscribe()
    }
}

// === impl LastShort ===

impl LastShort {
    fn observe(&mut self, short: Pressure, now: Instant) {
        let Self { memory, disk, pids } = self;
        for (is_short, last) in [(short.memory, memory), (short.disk, disk), (short.pids, pids)] {
            if is_short {
                *last = Some(now);
            }
        }
    }

    fn conditions(&self, now: Instant, transition: Duration) -> Pressure {
        // Without a transition period, a resource that is short now counts.
        let is_recent = |last: Instant| last == now || now.saturating_duration_since(last) < transition;
        let recently = |last: Option<Instant>| last.is_some_and(is_recent);
        Pressure { memory: recently(self.memory), disk: recently(self.disk), pids: recently(self.pids) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 90 kB\n";
    const LOADAVG: &str = "0.00 0.01 0.05 2/960 4321\n";

    fn most() -> [String; 2] {
        ["4194304\n", "1000\n"].map(str::to_owned)
    }

    fn thresholds(memory: u64, pids: u64) -> EvictionThresholds {
        EvictionThresholds {
            memory_available: Threshold::Amount(memory),
            pid_available: Threshold::Amount(pids),
            ..EvictionThresholds::NONE
        }
    }

    #[test]
    fn memory_is_short_before_process_ids() {
        let levels = MachineLevels::parse(MEMINFO, LOADAVG, &most());
        let shortage =
            |resource, threshold, available| Some(MachineShortage { resource, threshold, available });
        let memory = shortage(MachineResource::Memory, 100 << 10, 90 << 10);
        assert_eq!(levels.shortage(&thresholds(100 << 10, 41), None), memory);
        let both = levels.shortages(&thresholds(100 << 10, 41), |_| false);
        assert_eq!(both.map(|short| short.map(|short| short.available)), [Some(90 << 10), Some(40)]);
        let pids = shortage(MachineResource::Pids, 41, 40);
        assert_eq!(levels.shortage(&thresholds(90 << 10, 41), None), pids);
        assert_eq!(levels.shortage(&thresholds(90 << 10, 40), None), None);
        let pressure = levels.pressure(&thresholds(100 << 10, 40), false);
        assert_eq!(pressure, Pressure { memory: true, ..Pressure::default() });
    }

    #[test]
    fn a_machine_without_any_available_memory_is_short() {
        let exhausted = MEMINFO.replace("MemAvailable: 90", "MemAvailable: 0");
        let levels = MachineLevels::parse(&exhausted, LOADAVG, &most());
        let (resource, threshold) = (MachineResource::Memory, 100 << 10);
        let expected = MachineShortage { resource, threshold, available: 0 };
        assert_eq!(levels.shortage(&thresholds(threshold, 0), None), Some(expected));
        assert!(levels.pressure(&thresholds(threshold, 0), false).memory);
        let unknown = MEMINFO.replace("MemAvailable: 90 kB\n", "");
        let levels = MachineLevels::parse(&unknown, LOADAVG, &most());
        assert_eq!(levels.shortage(&thresholds(threshold, 0), None), None);
    }

    #[test]
    fn the_limit_of_all_pods_counts_like_the_memory_of_the_machine() {
        let levels = MachineLevels::parse(MEMINFO, LOADAVG, &most());
        let thresholds = thresholds(50 << 10, 0);
        assert_eq!(levels.with_pods(None).shortage(&thresholds, None), None);
        assert_eq!(levels.with_pods(Some([50 << 10, 800 << 10])).shortage(&thresholds, None), None);
        let levels = levels.with_pods(Some([49 << 10, 800 << 10]));
        let (resource, threshold, available) = (MachineResource::Memory, 50 << 10, 49 << 10);
        let expected = MachineShortage { resource, threshold, available };
        assert_eq!(levels.shortage(&thresholds, None), Some(expected));
        assert!(levels.pressure(&thresholds, false).memory);
        let before = levels.with_pods(Some([800 << 10, 800 << 10]));
        assert!(levels.is_near(&before, &thresholds) && !levels.is_near(&levels, &thresholds));
    }

    #[test]
    fn amounts_that_cannot_be_read_are_not_short() {
        let unknown = MachineLevels::parse("", "", &[]);
        let all = thresholds(u64::MAX, u64::MAX);
        let before = MachineLevels::parse(MEMINFO, LOADAVG, &most());
        assert_eq!((unknown.shortage(&all, None), unknown.is_near(&before, &all)), (None, false));
    }

    #[test]
    fn a_node_is_near_a_threshold_below_one_and_a_half_times_its_amount_while_the_amount_falls() {
        let levels = MachineLevels::parse(MEMINFO, LOADAVG, &most());
        let before = |kib: u64, threads: u64| {
            let meminfo = MEMINFO.replace("MemAvailable: 90", &format!("MemAvailable: {kib}"));
            MachineLevels::parse(&meminfo, &LOADAVG.replace("960", &threads.to_string()), &most())
        };
        let is_near = |before: MachineLevels, memory: u64, pids: u64| {
            levels.is_near(&before, &thresholds(memory << 10, pids))
        };
        assert!(is_near(before(900, 960), 61, 0) && !is_near(before(900, 960), 60, 0));
        assert!(is_near(before(90, 900), 0, 28) && !is_near(before(90, 900), 0, 0));
        assert!(!is_near(before(91, 960), 61, 28), "a change of an idle machine");
        assert!(!is_near(before(10, 999), 61, 28), "an amount that rises");
        assert!(!is_near(MachineLevels::default(), 61, 28), "the first measurement");
    }

    #[test]
    fn a_shortage_ends_when_the_minimum_is_reclaimed() {
        let levels = MachineLevels::parse(MEMINFO, LOADAVG, &most());
        let mut thresholds = thresholds(80 << 10, 40);
        thresholds.minimum_reclaim.memory_available = Threshold::Amount(20 << 10);
        let last = |resource| levels.shortage(&thresholds, resource).map(|shortage| shortage.resource);
        assert_eq!(last(None), None);
        assert_eq!(last(Some(MachineResource::Memory)), Some(MachineResource::Memory));
        assert_eq!(last(Some(MachineResource::Pids)), None);
    }

    #[test]
    fn without_a_transition_period_a_condition_ends_with_the_shortage() {
        let (conditions, begin) = (PressureConditions::new(Duration::ZERO), Instant::now());
        let pids = Pressure { pids: true, ..Pressure::default() };
        assert_eq!(conditions.observe(pids, begin), pids);
        let later = begin + Duration::from_millis(1);
        assert_eq!(conditions.observe(Pressure::default(), later), Pressure::default());
    }

    #[test]
    fn a_condition_stays_for_the_transition_period() {
        const TRANSITION: Duration = Duration::from_secs(300);
        let (conditions, begin) = (PressureConditions::new(TRANSITION), Instant::now());
        let mut changes = conditions.subscribe();
        let memory = Pressure { memory: true, ..Pressure::default() };
        assert_eq!(conditions.observe(Pressure::default(), begin), Pressure::default());
        assert!(!changes.has_changed().unwrap(), "no condition has changed");
        assert_eq!(conditions.observe(memory, begin), memory);
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        assert_eq!(conditions.observe(Pressure::default(), begin + TRANSITION / 2), memory);
        assert!(!changes.has_changed().unwrap());
        assert_eq!(conditions.observe(Pressure::default(), begin + TRANSITION), Pressure::default());
        assert!(changes.has_changed().unwrap() && conditions.current() == Pressure::default());
    }
}

//! Shortages of the node's disk, and when a pod is evicted because of a shortage. Pure.
//!
//! A large image pull also takes disk space. So a pod is evicted only if the disk is still short after unused images
//! were removed. While images are pulled, no pod is evicted early.

use std::time::{Duration, Instant};

use super::INTERVAL;
use super::plan;
use super::soft::{Crossed, Due};
use crate::node::{DiskLevels, DiskShortage, EvictionThresholds, Resource};

/// The shortages in one measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskShortages {
    pub(super) hard: [Option<DiskShortage>; 2],
    pub(super) soft: [Option<DiskShortage>; 2],
}

/// The time between a shortage and the eviction of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// In a later round, an interval or more after the shortage was found.
    Ordinary,
    /// As soon as unused images are removed, because the disk would be full before a later round. The value is the time
    /// since which the free space falls.
    Early(Instant),
}

/// The facts of a round that finds a shortage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) now: Instant,
    /// Whether an earlier round has found the shortage.
    pub(super) was_short: bool,
    /// When the next ordinary round is due.
    pub(super) due: Instant,
    /// Earliest time of an early round after the last eviction or measurement.
    pub(super) early_due: Instant,
    /// The time since which the free space falls, if it is below a hard threshold and would soon be used up.
    pub(super) falls_since: Option<Instant>,
}

// === impl DiskShortages ===

impl DiskShortages {
    /// The shortages with these amounts. `crossed` has the shortages of the last measurement.
    pub(super) fn find(
        levels: &DiskLevels,
        thresholds: &EvictionThresholds,
        crossed: &Crossed<Resource>,
    ) -> Self {
        Self {
            hard: levels.shortages(thresholds, |resource| crossed.is_hard(resource)),
            soft: levels.shortages(&thresholds.as_soft(), |resource| crossed.is_lasting(resource)),
        }
    }

    /// Whether a hard threshold is crossed.
    pub(super) fn is_hard(&self) -> bool {
        self.hard.iter().any(Option::is_some)
    }

    /// Whether a soft threshold is crossed.
    pub(super) fn is_soft(&self) -> bool {
        self.soft.iter().any(Option::is_some)
    }

    /// Stores the shortages. Returns the shortage for which a pod must be evicted, if any.
    pub(super) fn store(
        self,
        crossed: &mut Crossed<Resource>,
        thresholds: &EvictionThresholds,
        now: Instant,
    ) -> Option<Due<DiskShortage>> {
        let soft = &thresholds.soft;
        let short = self.soft.iter().flatten().map(|shortage| shortage.resource);
        let short = short.map(|resource| (resource, plan::grace_period(soft, resource)));
        let hard = self.hard.iter().flatten().map(|shortage| shortage.resource);
        let kind = crossed.update(hard, short, now);
        let mut lasting = self.soft.into_iter().flatten();
        let lasting = lasting.find(|shortage| crossed.is_lasting(shortage.resource));
        Due::of(kind, self.hard.into_iter().flatten().next(), lasting, soft.max_pod_grace)
    }
}

// === impl Pace ===

impl Pace {
    /// The pace of this round. `None` if the round does nothing about the shortage. `has_pulled` returns whether an
    /// image was pulled at any time since the given time.
    pub(super) fn of(found: Found, has_pulled: impl Fn(Instant) -> bool) -> Option<Self> {
        let is_due = found.now >= found.due;
        if is_due && found.was_short {
            return Some(Self::Ordinary);
        }
        let early = found.falls_since.map(Self::Early);
        let early = early.filter(|pace| found.now >= found.early_due && pace.permits(has_pulled));
        early.or(is_due.then_some(Self::Ordinary))
    }

    /// Time of the next ordinary round after a round with this pace. `due` was the time before the round. An early
    /// round about a known shortage does not delay the next ordinary round.
    pub(super) fn next_due(self, was_short: bool, due: Instant, now: Instant) -> Instant {
        match self {
            Self::Early(_) if was_short => due,
            Self::Early(_) | Self::Ordinary => now + INTERVAL,
        }
    }

    /// Whether a pod may be evicted at this pace. If a pull ran while the free space fell, the pull may be the cause. A
    /// pull frees a part of the space at its end.
    pub(super) fn permits(self, has_pulled: impl Fn(Instant) -> bool) -> bool {
        match self {
            Self::Ordinary => true,
            Self::Early(since) => !has_pulled(since),
        }
    }

    /// Whether a pod may be evicted at the end of its measurement. From `ordinary_due` on, an early eviction counts as
    /// an ordinary eviction.
    pub(super) fn permits_at(
        self,
        now: Instant,
        ordinary_due: Instant,
        has_pulled: impl Fn(Instant) -> bool,
    ) -> bool {
        now >= ordinary_due || self.permits(has_pulled)
    }
}

/// The time until the next round while the disk is short. `until_due` is the time until the ordinary round. `sooner` is
/// the interval for a disk that fills up. This interval does not delay the ordinary round.
pub(super) fn interval(until_due: Duration, sooner: Option<Duration>) -> Duration {
    sooner.map_or(until_due, |sooner| sooner.min(until_due))
}

/// The shortage for which a measured pod is evicted. `levels` were read just before the call, after images were removed
/// and pods were measured. None if enough is available now.
pub(super) fn confirmed(
    levels: &DiskLevels,
    thresholds: &EvictionThresholds,
    crossed: &mut Crossed<Resource>,
    now: Instant,
) -> Option<Due<DiskShortage>> {
    DiskShortages::find(levels, thresholds, crossed).store(crossed, thresholds, now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Level, Threshold};

    /// Amounts of a disk of 1,000 bytes.
    fn levels(bytes: u64) -> DiskLevels {
        DiskLevels { bytes: Level { available: bytes, capacity: 1000 }, ..DiskLevels::default() }
    }

    fn thresholds() -> EvictionThresholds {
        EvictionThresholds { nodefs_available: Threshold::percent(10), ..EvictionThresholds::NONE }
    }

    /// The first round that finds a shortage, on a disk that fills up quickly.
    fn first(now: Instant) -> Found {
        Found { now, was_short: false, due: now, early_due: now, falls_since: Some(now - INTERVAL) }
    }

    #[test]
    fn no_pod_is_evicted_if_the_collected_images_were_enough() {
        let (mut crossed, now) = (Crossed::none(), Instant::now());
        let found = DiskShortages::find(&levels(90), &thresholds(), &crossed);
        assert!(found.store(&mut crossed, &thresholds(), now).is_some(), "the round");
        let later = now + Duration::from_secs(2);
        assert_eq!(confirmed(&levels(100), &thresholds(), &mut crossed, later), None);
        assert_eq!(crossed.hard(), None, "the shortage is over");
        let due = confirmed(&levels(80), &thresholds(), &mut crossed, later).unwrap();
        assert_eq!((due.shortage.available, due.max_grace), (80, 0), "the message has the newest amount");
    }

    #[test]
    fn the_collected_images_have_to_free_the_minimum() {
        let mut thresholds = thresholds();
        thresholds.minimum_reclaim.nodefs_available = Threshold::percent(5);
        let (mut crossed, now) = (Crossed::none(), Instant::now());
        DiskShortages::find(&levels(90), &thresholds, &crossed).store(&mut crossed, &thresholds, now);
        assert!(confirmed(&levels(149), &thresholds, &mut crossed, now).is_some());
        assert!(confirmed(&levels(150), &thresholds, &mut crossed, now).is_none());
    }

    #[test]
    fn a_resource_above_its_threshold_is_not_short_because_another_is() {
        let mut thresholds = thresholds();
        thresholds.nodefs_inodes_free = Threshold::percent(5);
        thresholds.minimum_reclaim.nodefs_inodes_free = Threshold::percent(5);
        let with = |bytes, inodes| DiskLevels {
            inodes: Level { available: inodes, capacity: 1000 },
            ..levels(bytes)
        };
        let now = Instant::now();
        let mut crossed = Crossed::none();
        DiskShortages::find(&with(90, 70), &thresholds, &crossed).store(&mut crossed, &thresholds, now);
        assert_eq!(confirmed(&with(100, 70), &thresholds, &mut crossed, now), None);
        // Both resources are short, and the minimum of inodes has to be reclaimed.
        DiskShortages::find(&with(90, 40), &thresholds, &crossed).store(&mut crossed, &thresholds, now);
        let due = confirmed(&with(100, 70), &thresholds, &mut crossed, now).unwrap();
        assert_eq!(due.shortage.resource, Resource::Inodes);
        assert_eq!(confirmed(&with(100, 100), &thresholds, &mut crossed, now), None);
    }

    #[test]
    fn a_soft_shortage_is_confirmed_by_its_own_threshold() {
        let mut thresholds = EvictionThresholds::NONE;
        thresholds.soft.nodefs_available.threshold = Threshold::percent(20);
        thresholds.soft.max_pod_grace = 30;
        let (mut crossed, now) = (Crossed::none(), Instant::now());
        let found = DiskShortages::find(&levels(150), &thresholds, &crossed);
        assert!(found.is_soft() && found.store(&mut crossed, &thresholds, now).is_some());
        let due = confirmed(&levels(150), &thresholds, &mut crossed, now).unwrap();
        assert_eq!(due.max_grace, 30);
        assert_eq!(confirmed(&levels(200), &thresholds, &mut crossed, now), None);
    }

    #[test]
    fn the_first_round_evicts_only_if_the_disk_would_be_used_up_before_the_next_one() {
        let now = Instant::now();
        let round = first(now);
        let pace = |found| Pace::of(found, |_| false);
        assert_eq!(pace(round), Some(Pace::Early(now - INTERVAL)));
        let slow = Found { falls_since: None, ..round };
        assert_eq!(pace(slow), Some(Pace::Ordinary));
        // The free space begins to fall after the first round.
        let later = Found { was_short: true, due: now + INTERVAL, ..round };
        assert_eq!(pace(later), Some(Pace::Early(now - INTERVAL)));
        assert_eq!(pace(Found { early_due: now + INTERVAL, ..later }), None, "a pod was evicted");
        assert_eq!(pace(Found { falls_since: None, ..later }), None);
        assert_eq!(pace(Found { was_short: true, ..round }), Some(Pace::Ordinary), "a later round");
    }

    #[test]
    fn no_pod_is_evicted_early_because_of_a_pull() {
        let now = Instant::now();
        let round = first(now);
        let during = |_| true;
        assert_eq!(Pace::of(round, during), Some(Pace::Ordinary), "images are collected first");
        assert_eq!(Pace::of(Found { was_short: true, due: now + INTERVAL, ..round }, during), None);
        // The pull ended after the first of the two measurements.
        let ended = now - INTERVAL / 2;
        assert_eq!(Pace::of(round, |since| ended >= since), Some(Pace::Ordinary));
        let ended = now - INTERVAL * 2;
        let early = Pace::of(round, |since| ended >= since).unwrap();
        assert_eq!(early, Pace::Early(now - INTERVAL));
        assert!(!early.permits(during), "a pull began during the measurement of the pods");
        assert!(early.permits(|_| false) && Pace::Ordinary.permits(during));
    }

    #[test]
    fn an_early_measurement_that_takes_long_leads_to_an_ordinary_eviction() {
        let now = Instant::now();
        let (early, due) = (Pace::Early(now), now + INTERVAL);
        let at = |time, has_pulled: bool| early.permits_at(time, due, |_| has_pulled);
        assert!(!at(now, true), "an image is pulled");
        assert!(at(now, false));
        assert!(at(due, true), "the time of the ordinary eviction has come");
    }

    #[test]
    fn an_early_round_does_not_delay_the_ordinary_one() {
        let (now, due) = (Instant::now(), Instant::now() + INTERVAL / 2);
        assert_eq!(Pace::Early(now).next_due(true, due, now), due);
        assert_eq!(Pace::Early(now).next_due(false, due, now), now + INTERVAL);
        assert_eq!(Pace::Ordinary.next_due(true, now, now), now + INTERVAL);
    }

    #[test]
    fn faster_rounds_do_not_delay_the_ordinary_round() {
        let seconds = Duration::from_secs;
        assert_eq!(interval(seconds(10), None), seconds(10));
        assert_eq!(interval(seconds(10), Some(seconds(9))), seconds(9));
        assert_eq!(interval(seconds(1), Some(seconds(9))), seconds(1));
        assert_eq!(interval(Duration::ZERO, None), Duration::ZERO);
    }
}

//! The trend of the disk's free space. The trend determines the time until the next round, and whether an eviction can
//! wait. Pure.

use std::time::{Duration, Instant};

use super::INTERVAL;
use crate::node::{DiskLevels, EvictionThresholds, Level, Resource};

/// Minimum time until the next round.
const MIN_INTERVAL: Duration = Duration::from_millis(900);
/// Minimum time between two measurements that are compared. Rounds for other resources may have nearly no pause between
/// them.
const MIN_WINDOW: Duration = Duration::from_millis(500);
/// An amount falls noticeably if the loss in one [`INTERVAL`] exceeds the threshold divided by this number. Smaller
/// changes are normal on an idle node.
const MIN_FALL: u128 = 50;
/// Maximum time of an ordinary eviction: the wait for the next round, the measurement of the pods, and the end of the
/// evicted pod. If the resource would be used up within this time, the eviction cannot wait.
const EVICTION_TIME: Duration = Duration::from_secs(20);

/// The changes of the disk's resources between the last two measurements.
#[derive(Debug, Default)]
pub(super) struct DiskTrend {
    last: Option<(DiskLevels, Instant)>,
    bytes: Option<Fall>,
    inodes: Option<Fall>,
}

/// The decrease of a resource between two measurements.
#[derive(Clone, Copy, Debug)]
struct Fall {
    lost: u64,
    level: Level,
    /// Time of the first of the two measurements.
    since: Instant,
    /// Time between the two measurements.
    elapsed: Duration,
}

// === impl DiskTrend ===

impl DiskTrend {
    /// Adds a measurement. The first measurement gives no trend. A measurement directly after another measurement is
    /// ignored.
    pub(super) fn add(&mut self, levels: DiskLevels, now: Instant) {
        let Some((before, since)) = self.last else {
            self.last = Some((levels, now));
            return;
        };
        let elapsed = now.saturating_duration_since(since);
        if elapsed < MIN_WINDOW {
            return;
        }
        let fall = |before: Level, level: Level| {
            let lost = before.available.checked_sub(level.available)?;
            // The capacity 0 means that the amount is unknown.
            let is_known = before.capacity > 0 && level.capacity > 0;
            (is_known && lost > 0).then_some(Fall { lost, level, since, elapsed })
        };
        self.bytes = fall(before.bytes, levels.bytes);
        self.inodes = fall(before.inodes, levels.inodes);
        self.last = Some((levels, now));
    }

    /// The time until the next round, if a resource falls noticeably. The interval is half of the time in which the
    /// resource reaches its threshold. None if the ordinary round is sooner.
    pub(super) fn interval(&self, thresholds: &EvictionThresholds) -> Option<Duration> {
        let half = |resource: Resource| {
            let fall = self.noticeable(resource, thresholds)?;
            let threshold = resource.threshold(thresholds).of(fall.level.capacity);
            Some(fall.time_to_fall_by(fall.level.available.saturating_sub(threshold)) / 2)
        };
        let next = [Resource::Bytes, Resource::Inodes].into_iter().filter_map(half).min()?;
        Some(next.max(MIN_INTERVAL)).filter(|next| *next < INTERVAL)
    }

    /// The time since which the resource falls, if it would be used up within [`EVICTION_TIME`].
    pub(super) fn used_up_soon(
        &self,
        resource: Resource,
        thresholds: &EvictionThresholds,
    ) -> Option<Instant> {
        let fall = self.noticeable(resource, thresholds)?;
        (fall.time_to_fall_by(fall.level.available) < EVICTION_TIME).then_some(fall.since)
    }

    fn noticeable(&self, resource: Resource, thresholds: &EvictionThresholds) -> Option<Fall> {
        let fall = match resource {
            Resource::Bytes => self.bytes,
            Resource::Inodes => self.inodes,
        };
        let threshold = resource.threshold(thresholds);
        fall.filter(|fall| !threshold.is_zero() && fall.is_noticeable(threshold.of(fall.level.capacity)))
    }
}

// === impl Fall ===

impl Fall {
    fn is_noticeable(self, threshold: u64) -> bool {
        let in_an_interval = u128::from(self.lost) * INTERVAL.as_millis() / self.elapsed.as_millis().max(1);
        in_an_interval * MIN_FALL > u128::from(threshold)
    }

    /// The time in which the resource falls by this amount.
    fn time_to_fall_by(self, amount: u64) -> Duration {
        let millis = u128::from(amount) * self.elapsed.as_millis() / u128::from(self.lost.max(1));
        Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::Threshold;

    /// 10 % of the bytes and 5 % of the inodes.
    fn thresholds() -> EvictionThresholds {
        EvictionThresholds {
            nodefs_available: Threshold::percent(10),
            nodefs_inodes_free: Threshold::percent(5),
            ..EvictionThresholds::NONE
        }
    }

    /// Amounts of a disk of 1,000 bytes and 1,000 inodes.
    fn levels(bytes: u64, inodes: u64) -> DiskLevels {
        let level = |available| Level { available, capacity: 1000 };
        DiskLevels { bytes: level(bytes), inodes: level(inodes) }
    }

    /// The trend of two measurements that are ten seconds apart.
    fn trend(bytes: [u64; 2], inodes: [u64; 2]) -> DiskTrend {
        let (mut trend, begin) = (DiskTrend::default(), Instant::now());
        trend.add(levels(bytes[0], inodes[0]), begin);
        trend.add(levels(bytes[1], inodes[1]), begin + INTERVAL);
        trend
    }

    fn millis(millis: u64) -> Option<Duration> {
        Some(Duration::from_millis(millis))
    }

    #[test]
    fn the_next_round_comes_after_half_of_the_time_until_the_threshold() {
        let interval = |bytes, inodes| trend(bytes, inodes).interval(&thresholds());
        // The disk loses 200 bytes in ten seconds.
        assert_eq!(interval([500, 300], [900, 900]), millis(5000));
        assert_eq!(interval([320, 120], [900, 900]), millis(900), "not more often");
        assert_eq!(interval([250, 50], [900, 900]), millis(900), "below the threshold");
        assert_eq!(interval([900, 700], [900, 900]), None, "the ordinary round comes sooner");
        // Each resource has its own trend, and the more urgent one counts.
        assert_eq!(interval([900, 900], [290, 170]), millis(5000));
        assert_eq!(interval([500, 300], [270, 110]), millis(1875));
        assert_eq!(interval([500, 300], [110, 270]), millis(5000), "the inodes rise");
    }

    #[test]
    fn a_disk_that_does_not_fall_has_the_ordinary_rounds() {
        let interval = |bytes| trend(bytes, [900, 900]).interval(&thresholds());
        assert_eq!(interval([101, 101]), None, "an idle disk near its threshold");
        assert_eq!(interval([50, 50]), None, "an idle disk below its threshold");
        assert_eq!(interval([102, 100]), None, "a small change of an idle node");
        assert_eq!(interval([103, 100]), millis(900));
        assert_eq!(interval([50, 400]), None, "files were removed");
        assert_eq!(DiskTrend::default().interval(&thresholds()), None);
        let mut trend = trend([500, 300], [900, 900]);
        assert_eq!(trend.interval(&EvictionThresholds::NONE), None, "no threshold");
        let (_, last) = trend.last.unwrap();
        trend.add(levels(300, 900), last + INTERVAL);
        assert_eq!(trend.interval(&thresholds()), None, "the fall has ended");
        trend.add(DiskLevels::default(), last + INTERVAL * 2);
        assert_eq!(trend.interval(&thresholds()), None, "a disk that cannot be read");
    }

    #[test]
    fn a_round_directly_after_another_does_not_change_the_trend() {
        let mut trend = trend([500, 300], [900, 900]);
        let (_, last) = trend.last.unwrap();
        trend.add(levels(299, 900), last + MIN_WINDOW / 2);
        assert_eq!(trend.interval(&thresholds()), millis(5000));
        trend.add(levels(250, 900), last + Duration::from_secs(1));
        assert_eq!(trend.interval(&thresholds()), millis(1500), "50 bytes in one second");
    }

    #[test]
    fn an_eviction_cannot_wait_if_the_disk_is_used_up_soon() {
        let soon = |bytes, inodes, resource| trend(bytes, inodes).used_up_soon(resource, &thresholds());
        // The disk loses 60 bytes in ten seconds.
        assert!(soon([150, 90], [900, 900], Resource::Bytes).is_some());
        assert!(soon([180, 120], [900, 900], Resource::Bytes).is_none(), "20 seconds are left");
        assert!(soon([150, 90], [900, 900], Resource::Inodes).is_none(), "the other resource");
        assert!(soon([900, 900], [90, 40], Resource::Inodes).is_some());
        assert!(soon([1, 1], [900, 900], Resource::Bytes).is_none(), "it loses nothing");
        assert!(soon([300, 0], [900, 900], Resource::Bytes).is_some(), "it is full");
        let trend = trend([150, 90], [900, 900]);
        let (_, last) = trend.last.unwrap();
        assert_eq!(trend.used_up_soon(Resource::Bytes, &thresholds()), Some(last - INTERVAL));
    }
}

//! Free bytes and inodes of the node's disk.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::statvfs;

use super::eviction::Shortage;
use super::pressure::Level;
use super::{EvictionThresholds, MinimumReclaim};

/// A shortage of a resource of the disk, in bytes or inodes.
pub(crate) type DiskShortage = Shortage<Resource>;

/// A resource of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    Bytes,
    Inodes,
}

/// The amounts that were available on the disk in the last two measurements.
#[derive(Debug)]
pub(crate) struct DiskTrend {
    before: DiskLevels,
    last: DiskLevels,
    /// Time between the two measurements.
    elapsed: Duration,
    /// When the last measurement was.
    measured: Instant,
}

/// Available amounts of the disk's resources. The default has unknown amounts.
#[derive(Clone, Copy, Debug, Default)]
struct DiskLevels {
    bytes: Level,
    inodes: Level,
}

/// The resource that is short on the file system of the state directory. None if both suffice or cannot be determined.
/// `lasts` says whether a shortage was found before. Such a shortage ends only when the minimum is reclaimed.
pub(crate) fn disk_shortage(
    state_dir: &Path,
    thresholds: &EvictionThresholds,
    lasts: bool,
) -> Option<DiskShortage> {
    disk_shortages(state_dir, thresholds, |_| lasts).into_iter().flatten().next()
}

/// The resources that are short on the file system of the state directory, bytes first. `lasts` says whether a resource
/// was short before. Such a shortage ends only when the minimum is reclaimed.
pub(crate) fn disk_shortages(
    state_dir: &Path,
    thresholds: &EvictionThresholds,
    lasts: impl Fn(Resource) -> bool,
) -> [Option<DiskShortage>; 2] {
    // Most nodes have no soft thresholds.
    if thresholds.nodefs_available.is_zero() && thresholds.nodefs_inodes_free.is_zero() {
        return [None, None];
    }
    let Ok(found) = statvfs(state_dir) else { return [None, None] };
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    let reclaim = |resource| if lasts(resource) { thresholds.minimum_reclaim } else { MinimumReclaim::NONE };
    let of_bytes = [thresholds.nodefs_available, reclaim(Resource::Bytes).nodefs_available];
    let of_inodes = [thresholds.nodefs_inodes_free, reclaim(Resource::Inodes).nodefs_inodes_free];
    [
        Shortage::find(Resource::Bytes, of_bytes, bytes(found.f_bavail), bytes(found.f_blocks)),
        Shortage::find(Resource::Inodes, of_inodes, found.f_favail, found.f_files),
    ]
}

// === impl DiskTrend ===

impl DiskTrend {
    /// No measurement yet.
    pub(crate) fn none(now: Instant) -> Self {
        let unknown = DiskLevels::default();
        Self { before: unknown, last: unknown, elapsed: Duration::ZERO, measured: now }
    }

    /// Measures the file system of the state directory.
    pub(crate) fn measure(&mut self, state_dir: &Path, now: Instant) {
        self.add(DiskLevels::read(state_dir), now);
    }

    fn add(&mut self, levels: DiskLevels, now: Instant) {
        self.before = std::mem::replace(&mut self.last, levels);
        self.elapsed = now.saturating_duration_since(self.measured);
        self.measured = now;
    }

    /// Whether less than one and a half times a threshold is available, and the amount is falling.
    pub(crate) fn is_near(&self, thresholds: &EvictionThresholds) -> bool {
        let [before, last] = [self.before, self.last];
        last.bytes.is_near(before.bytes, thresholds.nodefs_available)
            || last.inodes.is_near(before.inodes, thresholds.nodefs_inodes_free)
    }

    /// Whether nothing is available after this time, if an amount falls as fast as between the two measurements.
    pub(crate) fn is_used_up_within(&self, limit: Duration) -> bool {
        let is_used_up = |before: Level, last: Level| {
            let fallen = u128::from(before.available.saturating_sub(last.available));
            last.capacity > 0
                && fallen * limit.as_millis() > u128::from(last.available) * self.elapsed.as_millis()
        };
        is_used_up(self.before.bytes, self.last.bytes) || is_used_up(self.before.inodes, self.last.inodes)
    }
}

// === impl DiskLevels ===

impl DiskLevels {
    fn read(state_dir: &Path) -> Self {
        let Ok(found) = statvfs(state_dir) else { return Self::default() };
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Self {
            bytes: Level { available: bytes(found.f_bavail), capacity: bytes(found.f_blocks) },
            inodes: Level { available: found.f_favail, capacity: found.f_files },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::Threshold;

    /// A disk of 1,000 bytes and 1,000 inodes that was measured twice, ten seconds apart.
    fn trend(bytes: [u64; 2], inodes: [u64; 2]) -> DiskTrend {
        let began = Instant::now();
        let level = |available| Level { available, capacity: 1000 };
        let mut trend = DiskTrend::none(began);
        for (number, (bytes, inodes)) in (0_u32..).zip(bytes.into_iter().zip(inodes)) {
            let levels = DiskLevels { bytes: level(bytes), inodes: level(inodes) };
            trend.add(levels, began + number * Duration::from_secs(10));
        }
        trend
    }

    #[test]
    fn a_disk_that_fills_up_near_its_threshold_is_measured_more_often() {
        let thresholds = EvictionThresholds {
            nodefs_available: Threshold::percent(10),
            nodefs_inodes_free: Threshold::percent(5),
            ..EvictionThresholds::NONE
        };
        let is_near = |bytes, inodes| trend(bytes, inodes).is_near(&thresholds);
        assert!(is_near([200, 149], [900, 900]) && !is_near([200, 150], [900, 900]));
        assert!(is_near([900, 900], [200, 74]) && !is_near([900, 900], [200, 75]));
        assert!(!is_near([140, 140], [60, 60]), "an idle disk with little space");
        assert!(!is_near([100, 140], [50, 60]), "files were removed");
        assert!(!DiskTrend::none(Instant::now()).is_near(&thresholds), "no measurement yet");
    }

    #[test]
    fn a_disk_is_used_up_in_the_time_that_its_loss_of_space_predicts() {
        let is_used_up = |bytes, inodes| trend(bytes, inodes).is_used_up_within(Duration::from_secs(10));
        // It loses 50 bytes in ten seconds.
        assert!(is_used_up([99, 49], [900, 900]) && !is_used_up([100, 50], [900, 900]));
        assert!(is_used_up([900, 900], [99, 49]), "inodes");
        assert!(is_used_up([300, 0], [900, 900]), "it became full between the measurements");
        assert!(!is_used_up([1, 1], [900, 900]) && !is_used_up([1, 49], [900, 900]), "it loses nothing");
        let mut unreadable = trend([900, 900], [900, 900]);
        unreadable.measure(Path::new("/no/such/directory"), Instant::now());
        assert!(!unreadable.is_used_up_within(Duration::from_secs(10)), "a disk that cannot be read");
    }
}

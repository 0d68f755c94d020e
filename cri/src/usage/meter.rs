//! State for the usage of an object: previous CPU times for rates, and the last disk usage, because counting takes
//! long. Only requests cause updates of this state.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use coracle_tree::Usage;

use super::disk;
use crate::background_walks::{self, TimeLimit};
use crate::clock::now;
use crate::lock::locked;

/// Minimum time between two readings of a rate, in nanoseconds: `crictl stats` reads twice, a second apart.
const MIN_INTERVAL: i64 = 500_000_000;
/// Requests that wait for counts reuse a disk count for this many times its own duration. So their counts take at most
/// 2% of a CPU for each container, with any number of requests.
const REUSE_FACTOR: u32 = 50;
/// Minimum age of a disk count before it is repeated in the background. containerd measures its snapshots at this
/// interval.
const REFRESH_INTERVAL: Duration = Duration::from_secs(10);

/// State of one container or sandbox.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    rate: Mutex<Rate>,
    /// On the heap, because the files of most objects are never counted.
    disk: OnceLock<Arc<DiskMeter>>,
}

/// Use of the last disk count by a request, if this count is too old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recount {
    /// The request waits for another count.
    Now,
    /// The request begins another count in the background, and gets the last one.
    InBackground,
    /// The request gets the last count and begins none.
    Never,
}

/// State of the disk usage of one object.
#[derive(Debug, Default)]
struct DiskMeter {
    counted: Mutex<Option<Counted>>,
    /// Held during a count for which a request waits.
    counting: Mutex<()>,
    /// Whether a count waits or runs in the background.
    in_background: AtomicBool,
}

/// The last two readings of a counter.
#[derive(Debug, Default)]
struct Rate {
    older: Option<Reading>,
    newer: Option<Reading>,
}

#[derive(Clone, Copy, Debug)]
struct Reading {
    at: i64,
    used: u64,
}

/// The disk usage of a directory at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Disk {
    /// Unix nanoseconds.
    pub(crate) at: i64,
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Counted {
    disk: Disk,
    since: Instant,
    took: Duration,
    last: bool,
}

// === impl Meter ===

impl Meter {
    /// CPU nanoseconds per second since the previous reading, which is at least half a second old. The first reading uses
    /// `began`. `None` if the time is 0.
    pub(crate) fn nano_cores(&self, at: i64, used: u64, began: i64) -> Option<u64> {
        locked(&self.rate).note(Reading { at, used }, began)
    }

    /// The disk usage of a directory. `ended` means that the directory no longer changes: then one count is enough.
    /// `None` if there is no count yet, and the request does not wait for one.
    pub(crate) fn disk(&self, dir: &Path, ended: bool, recount: Recount) -> Option<Disk> {
        let meter = || self.disk.get_or_init(Arc::default);
        match recount {
            Recount::Now => Some(meter().disk(dir, ended)),
            Recount::InBackground => meter().refreshed(dir, ended),
            Recount::Never => self.disk.get()?.last_count(|_any| true),
        }
    }
}

// === impl DiskMeter ===

impl DiskMeter {
    /// The last count. If it is too old, another one begins in the background.
    fn refreshed(self: &Arc<Self>, dir: &Path, ended: bool) -> Option<Disk> {
        let counted = *locked(&self.counted);
        let is_due = counted.is_none_or(|known| known.is_due(ended));
        if is_due && !self.in_background.swap(true, Ordering::AcqRel) {
            let (meter, dir) = (Arc::downgrade(self), dir.to_owned());
            let took = counted.map(|known| known.took);
            background_walks::begin(took, move |limit| {
                // The container may be removed meanwhile.
                meter.upgrade().is_none_or(|meter| meter.count_within(&dir, ended, limit))
            });
        }
        counted.map(|known| known.disk)
    }

    /// Counts in the background. Returns false if the time limit ended the count.
    fn count_within(&self, dir: &Path, ended: bool, limit: TimeLimit) -> bool {
        let since = Instant::now();
        let Some(usage) = disk(dir, || !limit.is_over()) else { return false };
        self.store(usage, since, ended);
        self.in_background.store(false, Ordering::Release);
        true
    }

    /// The last count if it is recent enough, otherwise another one. During a count, other callers get the last result.
    /// Without a last result, they wait.
    fn disk(&self, dir: &Path, ended: bool) -> Disk {
        if let Some(known) = self.last_count(|known| known.serves(ended)) {
            return known;
        }
        let _counting = match self.counting.try_lock() {
            Ok(first) => first,
            Err(TryLockError::Poisoned(panicked)) => panicked.into_inner(),
            Err(TryLockError::WouldBlock) => match self.last_count(|_any| true) {
                Some(known) => return known,
                None => locked(&self.counting),
            },
        };
        // Another caller may have ended its count meanwhile.
        if let Some(known) = self.last_count(|known| known.serves(ended)) {
            return known;
        }
        let since = Instant::now();
        self.store(disk(dir, || true).unwrap_or_default(), since, ended)
    }

    /// Stores a result, unless another count began later and ended earlier.
    fn store(&self, Usage { bytes, inodes }: Usage, since: Instant, last: bool) -> Disk {
        let disk = Disk { at: now(), bytes, inodes };
        let mut counted = locked(&self.counted);
        if counted.is_none_or(|known| known.since <= since) {
            *counted = Some(Counted { disk, since, took: since.elapsed(), last });
        }
        disk
    }

    /// The last result, if `is_fit` accepts it.
    fn last_count(&self, is_fit: impl FnOnce(&Counted) -> bool) -> Option<Disk> {
        locked(&self.counted).as_ref().filter(|&known| is_fit(known)).map(|known| known.disk)
    }
}

// === impl Rate ===

impl Rate {
    fn note(&mut self, now: Reading, began: i64) -> Option<u64> {
        let base = match self.newer.filter(|newer| newer.used <= now.used) {
            Some(newer) if now.at - newer.at < MIN_INTERVAL => self.older?,
            newer => {
                let base = newer.unwrap_or(Reading { at: began, used: 0 });
                (self.older, self.newer) = (Some(base), Some(now));
                base
            }
        };
        rate(base, now)
    }
}

fn rate(from: Reading, to: Reading) -> Option<u64> {
    let time = u128::try_from(to.at - from.at).ok().filter(|time| *time > 0)?;
    let used = u128::from(to.used.saturating_sub(from.used));
    u64::try_from(used * 1_000_000_000 / time).ok()
}

// === impl Counted ===

impl Counted {
    /// Whether the files must be counted again in the background.
    fn is_due(&self, ended: bool) -> bool {
        !self.last && (ended || self.since.elapsed() >= REFRESH_INTERVAL)
    }

    /// Whether the result is recent enough for a request that waits for counts.
    fn serves(&self, ended: bool) -> bool {
        self.last || !ended && self.since.elapsed() < self.took.saturating_mul(REUSE_FACTOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn a_rate_is_taken_over_half_a_second_or_more() {
        let meter = Meter::default();
        // 2 s of CPU time in 4 s since the start.
        assert_eq!(meter.nano_cores(14 * SECOND, 2_000_000_000, 10 * SECOND), Some(500_000_000));
        // Too soon after the last reading: the rate is still measured from the start.
        let near = meter.nano_cores(14 * SECOND + 1000, 2_000_000_000, 10 * SECOND).expect("a rate");
        assert!((499_000_000..=500_000_000).contains(&near), "{near}");
        // One full core for a second.
        assert_eq!(meter.nano_cores(15 * SECOND, 3_000_000_000, 10 * SECOND), Some(1_000_000_000));
        // Immediately after the last reading: the rate is measured over the same second.
        assert_eq!(meter.nano_cores(15 * SECOND + 1, 3_000_000_000, 10 * SECOND), Some(999_999_999));
        assert_eq!(meter.nano_cores(17 * SECOND, 3_000_000_000, 10 * SECOND), Some(0));
        // A counter that decreased was reset.
        assert_eq!(meter.nano_cores(18 * SECOND, 1_000_000_000, 17 * SECOND), Some(1_000_000_000));
    }

    /// A count that began this many seconds ago and took three seconds.
    fn counted(ago: u64) -> Counted {
        let since = Instant::now().checked_sub(Duration::from_secs(ago)).expect("a clock that runs for long");
        let disk = Disk { at: 0, bytes: 0, inodes: 7 };
        Counted { disk, since, took: Duration::from_secs(3), last: false }
    }

    #[test]
    fn counts_in_the_background_are_for_later_requests() {
        let dir = tempfile::tempdir().expect("directory");
        std::fs::write(dir.path().join("a"), "a").expect("write");
        let meter = Meter::default();
        let found = |recount| meter.disk(dir.path(), false, recount).map(|disk| disk.inodes);
        assert_eq!(found(Recount::Never), None);
        assert_eq!(found(Recount::InBackground), None, "the request does not wait");
        coracle_testing::eventually("the count", 60, || found(Recount::Never).is_some());
        std::fs::write(dir.path().join("b"), "b").expect("write");
        assert_eq!(found(Recount::Never), Some(1));
        *locked(&meter.disk.get().expect("counted").counted) = Some(counted(100));
        assert_eq!(found(Recount::InBackground), Some(7), "the last count");
        coracle_testing::eventually("another count", 60, || found(Recount::InBackground) == Some(2));
    }

    #[test]
    fn counts_in_the_background_are_repeated_after_an_interval_and_once_after_the_end() {
        assert!(!Counted { since: Instant::now() + REFRESH_INTERVAL, ..counted(0) }.is_due(false));
        assert!(counted(11).is_due(false) && counted(0).is_due(true));
        let last = Counted { last: true, ..counted(100) };
        assert!(!last.is_due(true) && !last.is_due(false));
    }

    #[test]
    fn a_count_without_time_is_not_stored() {
        let dir = tempfile::tempdir().expect("directory");
        std::fs::write(dir.path().join("a"), "a").expect("write");
        let meter = DiskMeter::default();
        assert!(!meter.count_within(dir.path(), false, TimeLimit::of(Duration::ZERO)));
        assert_eq!(meter.last_count(|_any| true), None);
        assert!(meter.count_within(dir.path(), false, TimeLimit::NONE));
        assert_eq!(meter.last_count(|_any| true).map(|disk| disk.inodes), Some(1));
    }

    #[test]
    fn a_count_that_began_earlier_replaces_no_later_one() {
        let meter = DiskMeter::default();
        let usage = |inodes| Usage { bytes: 0, inodes };
        meter.store(usage(2), counted(10).since, true);
        meter.store(usage(1), counted(20).since, false);
        assert_eq!(meter.last_count(|known| known.last).map(|disk| disk.inodes), Some(2));
    }

    #[test]
    fn a_slow_count_is_reused_for_fifty_times_its_duration() {
        assert!(counted(100).serves(false));
        assert!(!counted(151).serves(false));
        assert!(!counted(1).serves(true));
    }

    #[test]
    fn a_count_in_progress_delays_no_caller_if_there_is_a_result() {
        let dir = tempfile::tempdir().expect("directory");
        std::fs::write(dir.path().join("a"), "a").expect("write");
        let meter = DiskMeter::default();
        let disk = Disk { at: 0, bytes: 0, inodes: 7 };
        let since = Instant::now().checked_sub(Duration::from_secs(1)).expect("a clock that runs for long");
        let old = Counted { disk, since, took: Duration::ZERO, last: false };
        *locked(&meter.counted) = Some(old);
        let counting = locked(&meter.counting);
        assert_eq!(meter.disk(dir.path(), false), disk);
        drop(counting);
        assert_eq!(meter.disk(dir.path(), false).inodes, 1);
        // Without a last result, a caller waits for the count.
        let meter = DiskMeter::default();
        std::thread::scope(|scope| {
            let counting = locked(&meter.counting);
            let waiting = scope.spawn(|| meter.disk(dir.path(), false));
            *locked(&meter.counted) =
                Some(Counted { disk, since: Instant::now(), took: Duration::from_secs(60), last: true });
            drop(counting);
            assert_eq!(waiting.join().expect("the thread").inodes, 7);
        });
    }

    #[tokio::test]
    async fn an_ended_directory_is_counted_once() {
        let dir = tempfile::tempdir().expect("directory");
        let meter = DiskMeter::default();
        std::fs::write(dir.path().join("a"), "a").expect("write");
        assert_eq!(meter.disk(dir.path(), true).inodes, 1);
        std::fs::write(dir.path().join("b"), "b").expect("write");
        assert_eq!(meter.disk(dir.path(), true).inodes, 1);
        // A fast count of a live directory is soon repeated.
        let meter = DiskMeter::default();
        assert_eq!(meter.disk(dir.path(), false).inodes, 2);
        std::fs::write(dir.path().join("c"), "c").expect("write");
        let is_counted = || meter.disk(dir.path(), false).inodes == 3;
        coracle_testing::until("the files are counted again", 20, is_counted).await;
        // After the end, the files are counted once more.
        assert_eq!(meter.disk(dir.path(), true).inodes, 3);
    }
}

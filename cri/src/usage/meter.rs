//! State for usage rates of an object: previous CPU times, and the last disk usage, because counting takes long. Only
//! requests update this state.

use std::path::Path;
use std::sync::{Mutex, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use coracle_tree::Usage;

use super::disk;
use crate::clock::now;
use crate::lock::locked;

/// Minimum time between two readings of a rate, in nanoseconds: `crictl stats` reads twice, a second apart.
const MIN_INTERVAL: i64 = 500_000_000;
/// A disk count is reused for this many times its own duration. So counting takes at most 2% of a CPU with any number
/// of requests.
const REUSE_FACTOR: u32 = 50;

/// State of one container or sandbox.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    rate: Mutex<Rate>,
    /// Boxed, because the files of most objects are never counted.
    disk: OnceLock<Box<DiskMeter>>,
}

/// State of the disk usage of one object.
#[derive(Debug, Default)]
struct DiskMeter {
    counted: Mutex<Option<Counted>>,
    /// Held during a count.
    counting: Mutex<()>,
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

    /// The disk usage of a directory. It is counted again when the last count is too old. `ended` means that the directory no
    /// longer changes: then one count is enough. During a count, other callers get the last result. Without a last
    /// result, they wait.
    pub(crate) fn disk(&self, dir: &Path, ended: bool) -> Disk {
        self.disk.get_or_init(Box::default).disk(dir, ended)
    }
}

// === impl DiskMeter ===

impl DiskMeter {
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
        let Usage { bytes, inodes } = disk(dir);
        let disk = Disk { at: now(), bytes, inodes };
        *locked(&self.counted) = Some(Counted { disk, since, took: since.elapsed(), last: ended });
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

    #[test]
    fn a_slow_count_is_reused_for_fifty_times_its_duration() {
        let disk = Disk { at: 0, bytes: 0, inodes: 0 };
        let counted = |ago: u64| Counted {
            disk,
            since: Instant::now().checked_sub(Duration::from_secs(ago)).expect("a clock that runs for long"),
            took: Duration::from_secs(3),
            last: false,
        };
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
        let meter = Meter::default();
        std::fs::write(dir.path().join("a"), "a").expect("write");
        assert_eq!(meter.disk(dir.path(), true).inodes, 1);
        std::fs::write(dir.path().join("b"), "b").expect("write");
        assert_eq!(meter.disk(dir.path(), true).inodes, 1);
        // A fast count of a live directory is soon repeated.
        let meter = Meter::default();
        assert_eq!(meter.disk(dir.path(), false).inodes, 2);
        std::fs::write(dir.path().join("c"), "c").expect("write");
        let is_counted = || meter.disk(dir.path(), false).inodes == 3;
        coracle_testing::until("the files are counted again", 20, is_counted).await;
        // After the end, the files are counted once more.
        assert_eq!(meter.disk(dir.path(), true).inodes, 3);
    }
}

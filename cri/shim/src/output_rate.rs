//! The speed at which a container's output is read. No I/O.
//!
//! A container that writes faster than the limit blocks in write(2). Without the limit, a container could write all the
//! time. It would occupy the disk of the node's store and the processor time of other pods' shims. The shim needs more
//! processor time to copy and format the output than the container needs to write it.

use std::time::{Duration, Instant};

/// Maximum average of a container in bytes per second. The larger of its output and the growth of its log counts.
const PER_SECOND: u64 = 16 << 20;
/// Bytes that a container may write at once.
const BURST: u64 = 64 << 20;
/// Minimum time without reads after the burst is used up: the time for 1 MiB at [`PER_SECOND`]. So the shim does not
/// wake up for each page.
const MIN_THROTTLE: Duration = Duration::from_micros(62_500);

/// The rate limit of a container's output: a token bucket of [`BURST`] bytes.
#[derive(Debug, Default)]
pub(crate) struct OutputRate {
    /// Bytes of [`BURST`] that are used up. Time reduces them.
    used: u64,
    /// Time at which `used` was last reduced.
    counted_at: Option<Instant>,
    /// End of the last pause.
    resumes: Option<Instant>,
}

// === impl OutputRate ===

impl OutputRate {
    /// Counts bytes that were read or are written to the log, and begins a pause if the burst is used up.
    pub(crate) fn count(&mut self, bytes: usize, now: Instant) {
        let passed = self.counted_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let regained =
            u64::try_from(passed.as_micros()).unwrap_or(u64::MAX).saturating_mul(PER_SECOND) / 1_000_000;
        self.used = self.used.saturating_sub(regained).saturating_add(bytes as u64);
        self.counted_at = Some(now);
        let excess = self.used.checked_sub(BURST);
        self.resumes = excess.map(|excess| now + MIN_THROTTLE.max(time_for(excess)));
    }

    /// Bytes of the burst that are used up.
    #[cfg(test)]
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// The end of the current pause. `None` if the output may be read.
    pub(crate) fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.resumes.filter(|end| *end > now)
    }
}

/// The time in which a container may write a number of bytes.
fn time_for(bytes: u64) -> Duration {
    Duration::from_micros(bytes.saturating_mul(1_000_000) / PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: usize = 64 << 10;

    /// Bytes that are written after `seconds` by a container that never stops writing.
    fn written_in(seconds: u64) -> u64 {
        let begin = Instant::now();
        let (mut rate, mut now, mut written) = (OutputRate::default(), begin, 0);
        while now < begin + Duration::from_secs(seconds) {
            match rate.paused_until(now) {
                Some(end) => now = end,
                None => {
                    rate.count(READ, now);
                    written += READ as u64;
                    now += Duration::from_micros(100);
                }
            }
        }
        written
    }

    #[test]
    fn output_without_end_is_slowed_down_after_a_burst() {
        assert!(written_in(60) < BURST + 61 * PER_SECOND, "{} bytes in a minute", written_in(60));
        assert!(written_in(60) > BURST + 59 * PER_SECOND, "{} bytes in a minute", written_in(60));
    }

    #[test]
    fn a_pause_is_as_long_as_what_exceeds_the_burst_takes() {
        let (mut rate, begin) = (OutputRate::default(), Instant::now());
        rate.count((BURST + 2 * PER_SECOND) as usize, begin);
        assert_eq!(rate.paused_until(begin), Some(begin + Duration::from_secs(2)));
    }

    #[test]
    fn short_and_slow_output_is_never_paused() {
        let begin = Instant::now();
        let mut rate = OutputRate::default();
        for _ in 0..BURST / READ as u64 - 1 {
            rate.count(READ, begin);
            assert_eq!(rate.paused_until(begin), None);
        }
        let mut rate = OutputRate::default();
        for second in 0..100 {
            let now = begin + Duration::from_secs(second);
            rate.count(PER_SECOND as usize - 1, now);
            assert_eq!(rate.paused_until(now), None);
        }
    }
}

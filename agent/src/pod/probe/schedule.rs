//! Times of probe attempts: every period; before the first success also extra attempts with back-off. Pure.
//!
//! The first probe often runs before the server listens. With a period of 10 s the container would be not ready for
//! that long, although it is ready after 200 ms. Failed extra attempts do not count, so the thresholds keep their
//! meaning.

use std::time::Duration;

use coracle_backoff::Backoff;

/// Delay before the first extra attempt. Each further delay is twice as long.
const FIRST_STEP: Duration = Duration::from_millis(100);
/// Back-off after the first attempt without a result. It doubles up to the period.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);

/// Times of the attempts of one probe.
#[derive(Debug)]
pub(super) struct Schedule {
    period: Duration,
    /// Time until the next regular attempt.
    left: Duration,
    /// Delay before the next extra attempt. None after the first success.
    step: Option<Duration>,
    /// Back-off after attempts without a result.
    backoff: Backoff,
}

/// Kinds of attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// One attempt in every period.
    Regular,
    /// An extra attempt: only its success counts.
    Extra,
}

// === impl Schedule ===

impl Schedule {
    /// One attempt in every period.
    pub(super) fn regular(period: Duration) -> Self {
        Self { period, left: period, step: None, backoff: Backoff::new(FIRST_BACKOFF, period) }
    }

    /// One attempt in every period, and extra attempts until the first success.
    pub(super) fn until_success(period: Duration) -> Self {
        Self { step: Some(FIRST_STEP), ..Self::regular(period) }
    }

    /// The delay after an attempt, and the kind of the next attempt.
    pub(super) fn next(&mut self, succeeded: bool) -> (Duration, Attempt) {
        self.backoff.reset();
        match self.step.filter(|step| !succeeded && *step < self.left) {
            Some(step) => {
                self.left -= step;
                self.step = Some(step * 2);
                (step, Attempt::Extra)
            }
            None => {
                self.step = None;
                (std::mem::replace(&mut self.left, self.period), Attempt::Regular)
            }
        }
    }

    /// The delay after an attempt without a result. The next attempt has the same kind.
    pub(super) fn retry(&mut self) -> Duration {
        self.backoff.next_delay()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times of attempts in milliseconds: regular attempts, and extra attempts.
    fn times(mut schedule: Schedule, until: u128, success_at: u128) -> (Vec<u128>, Vec<u128>) {
        let (mut now, mut attempt) = (Duration::ZERO, Attempt::Regular);
        let (mut regular, mut extra) = (Vec::new(), Vec::new());
        while now.as_millis() <= until {
            let list = if attempt == Attempt::Regular { &mut regular } else { &mut extra };
            list.push(now.as_millis());
            let delay;
            (delay, attempt) = schedule.next(now.as_millis() >= success_at);
            now += delay;
        }
        (regular, extra)
    }

    #[test]
    fn extra_attempts_lie_between_regular_ones_and_end_with_the_first_period() {
        let schedule = Schedule::until_success(Duration::from_secs(10));
        let (regular, extra) = times(schedule, 40_000, u128::MAX);
        assert_eq!(regular, [0, 10_000, 20_000, 30_000, 40_000], "as without extra attempts");
        assert_eq!(extra, [100, 300, 700, 1_500, 3_100, 6_300]);
    }

    #[test]
    fn extra_attempts_end_with_the_first_success() {
        let schedule = Schedule::until_success(Duration::from_secs(10));
        assert_eq!(times(schedule, 20_000, 300), (vec![0, 10_000, 20_000], vec![100, 300]));
        let schedule = Schedule::until_success(Duration::from_secs(1));
        assert_eq!(times(schedule, 2_000, u128::MAX), (vec![0, 1_000, 2_000], vec![100, 300, 700]));
        let schedule = Schedule::regular(Duration::from_secs(10));
        assert_eq!(times(schedule, 20_000, u128::MAX), (vec![0, 10_000, 20_000], vec![]));
    }

    #[test]
    fn attempts_without_a_result_are_repeated_up_to_the_period() {
        let mut schedule = Schedule::regular(Duration::from_secs(3));
        let seconds: Vec<u64> = (0..4).map(|_| schedule.retry().as_secs()).collect();
        assert_eq!(seconds, [1, 2, 3, 3]);
        schedule.next(true);
        assert_eq!(schedule.retry().as_secs(), 1);
    }
}

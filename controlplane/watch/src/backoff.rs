//! Back-off between attempts, with jitter.

use std::time::Duration;

/// The delay after a failure. It doubles with each failure, up to a maximum. Jitter adds up to a half of the delay. So
/// after a restart of the server, its clients do not all return at the same time.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// A back-off without failures.
    #[must_use]
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, next: first }
    }

    /// Records a success: the next delay is the shortest one.
    pub fn reset(&mut self) {
        self.next = self.first;
    }

    /// Waits after a failure.
    pub async fn wait(&mut self) {
        tokio::time::sleep(self.next_delay()).await;
    }

    /// The delay after a failure, with jitter.
    pub(crate) fn next_delay(&mut self) -> Duration {
        self.next_delay_up_to(self.max)
    }

    /// As [`next_delay`](Self::next_delay), with another maximum.
    pub(crate) fn next_delay_up_to(&mut self, max: Duration) -> Duration {
        let delay = self.next.min(max);
        self.next = delay.saturating_mul(2);
        delay + delay.mul_f64(rand::random_range(0.0..0.5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_delay(delay: Duration, seconds: u64) {
        let base = Duration::from_secs(seconds);
        assert!(delay >= base && delay <= base * 3 / 2, "{delay:?} is not {seconds} s with jitter");
    }

    #[test]
    fn a_delay_doubles_up_to_the_given_maximum_until_a_success() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
        for seconds in [1, 2, 4, 5, 5] {
            assert_delay(backoff.next_delay(), seconds);
        }
        for seconds in [10, 20, 30, 30] {
            assert_delay(backoff.next_delay_up_to(Duration::from_secs(30)), seconds);
        }
        assert_delay(backoff.next_delay(), 5);
        backoff.reset();
        assert_delay(backoff.next_delay(), 1);
    }
}

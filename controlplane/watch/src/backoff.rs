//! Pauses between attempts.

use std::time::Duration;

/// The pause after a failure. It doubles with each failure, up to a maximum. Jitter adds up to a half of the pause. So
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

    /// Records a success: the next pause is the shortest one.
    pub fn reset(&mut self) {
        self.next = self.first;
    }

    /// Waits after a failure.
    pub async fn wait(&mut self) {
        tokio::time::sleep(self.pause()).await;
    }

    /// The pause after a failure, with jitter.
    pub(crate) fn pause(&mut self) -> Duration {
        self.pause_up_to(self.max)
    }

    /// The same as [`pause`](Self::pause), with another maximum.
    pub(crate) fn pause_up_to(&mut self, max: Duration) -> Duration {
        let pause = self.next.min(max);
        self.next = pause.saturating_mul(2);
        pause + pause.mul_f64(rand::random_range(0.0..0.5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_pause(pause: Duration, seconds: u64) {
        let base = Duration::from_secs(seconds);
        assert!(pause >= base && pause <= base * 3 / 2, "{pause:?} is not {seconds} s with jitter");
    }

    #[test]
    fn a_pause_doubles_up_to_the_given_maximum_until_a_success() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
        for seconds in [1, 2, 4, 5, 5] {
            assert_pause(backoff.pause(), seconds);
        }
        for seconds in [10, 20, 30, 30] {
            assert_pause(backoff.pause_up_to(Duration::from_secs(30)), seconds);
        }
        assert_pause(backoff.pause(), 5);
        backoff.reset();
        assert_pause(backoff.pause(), 1);
    }
}

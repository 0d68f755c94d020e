//! The exponential back-off of retries, with or without jitter.
//!
//! The crate only calculates delays; its callers wait. The back-offs of many keys, such as pods, are elsewhere, because
//! their rules differ.

use std::time::Duration;

/// Exponential back-off of one operation. Each delay is twice the previous one, up to a maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
    has_jitter: bool,
}

// === impl Backoff ===

impl Backoff {
    /// The back-off of an operation that has not failed, without jitter.
    #[must_use]
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, next: first, has_jitter: false }
    }

    /// Lengthens each delay by a random part, up to half of it. So the clients of a restarted server do not all retry at
    /// the same time.
    #[must_use]
    pub const fn with_jitter(self) -> Self {
        Self { has_jitter: true, ..self }
    }

    /// Records a failure. Returns the delay before the retry.
    pub fn next_delay(&mut self) -> Duration {
        self.next_delay_up_to(self.max)
    }

    /// As [`next_delay`](Self::next_delay), with another maximum. For operations whose maximum depends on the failure.
    pub fn next_delay_up_to(&mut self, max: Duration) -> Duration {
        let delay = self.next.min(max);
        self.next = delay.saturating_mul(2);
        match self.has_jitter {
            true => delay.saturating_add(delay.mul_f64(rand::random_range(0.0..0.5))),
            false => delay,
        }
    }

    /// Records a success. The next delay is the first one.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_until_a_success() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
        assert_eq!([(); 5].map(|()| backoff.next_delay().as_secs()), [1, 2, 4, 5, 5]);
        let longer = Duration::from_secs(30);
        assert_eq!([(); 4].map(|()| backoff.next_delay_up_to(longer).as_secs()), [10, 20, 30, 30]);
        assert_eq!(backoff.next_delay().as_secs(), 5, "the other maximum is used once");
        backoff.reset();
        assert_eq!(backoff.next_delay().as_secs(), 1);
    }

    #[test]
    fn jitter_adds_at_most_a_half_and_does_not_accumulate() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5)).with_jitter();
        for seconds in [1, 2, 4, 5, 5] {
            let (base, delay) = (Duration::from_secs(seconds), backoff.next_delay());
            assert!(delay >= base && delay <= base * 3 / 2, "{delay:?} is not {seconds} s with jitter");
        }
        let mut delays = [(); 20].map(|()| backoff.next_delay()).to_vec();
        delays.dedup();
        assert!(delays.len() > 1, "jitter is random");
    }

    #[test]
    fn a_delay_does_not_overflow() {
        for mut backoff in [
            Backoff::new(Duration::from_secs(1), Duration::MAX),
            Backoff::new(Duration::from_secs(1), Duration::MAX).with_jitter(),
        ] {
            for _ in 0..100 {
                backoff.next_delay();
            }
            assert_eq!(backoff.next_delay(), Duration::MAX);
        }
    }
}

//! A token bucket, for rate limits. The bucket has no clock. The caller passes the time since the last call, so callers
//! can use different clocks.

use std::time::Duration;

/// Tolerated rounding error of the token count.
const ROUNDING: f64 = 1e-9;

/// The fill rate and the size of a bucket.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Tokens per second.
    pub per_second: f64,
    /// Maximum number of tokens in a bucket.
    pub burst: f64,
}

/// A bucket of tokens. Buckets of one limit share a [`Rate`], so it is not part of the bucket.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    tokens: f64,
}

// === impl TokenBucket ===

impl TokenBucket {
    /// A full bucket.
    #[must_use]
    pub fn full(rate: Rate) -> Self {
        Self { tokens: rate.burst }
    }

    /// Adds the tokens for the time since the last call, and takes one. Returns false if there is none.
    pub fn take(&mut self, rate: Rate, since_last: Duration) -> bool {
        self.tokens = (self.tokens + since_last.as_secs_f64() * rate.per_second).min(rate.burst);
        let has_token = self.tokens + ROUNDING >= 1.0;
        if has_token {
            self.tokens -= 1.0;
        }
        has_token
    }

    /// Time until the bucket has a token, from the last call of [`take`](Self::take).
    #[must_use]
    pub fn wait(&self, rate: Rate) -> Duration {
        let missing = (1.0 - self.tokens).max(0.0);
        Duration::try_from_secs_f64(missing / rate.per_second).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { per_second: 10.0, burst: 3.0 };

    #[test]
    fn a_bucket_is_full_at_first_and_fills_at_the_rate() {
        let mut bucket = TokenBucket::full(RATE);
        let mut take = |millis| bucket.take(RATE, Duration::from_millis(millis));
        assert!(take(0) && take(0) && take(0) && !take(0));
        assert!(!take(99) && take(1) && !take(0));
        assert_eq!((0..20).filter(|_| take(10)).count(), 2, "a token every 100 ms");
    }

    #[test]
    fn an_empty_bucket_has_a_token_after_its_wait() {
        let mut bucket = TokenBucket::full(RATE);
        assert_eq!(bucket.wait(RATE), Duration::ZERO);
        while bucket.take(RATE, Duration::ZERO) {}
        assert!(!bucket.take(RATE, Duration::from_millis(25)));
        let wait = bucket.wait(RATE);
        assert_eq!(wait.as_millis(), 75);
        assert!(bucket.take(RATE, wait));
        assert_eq!(bucket.wait(Rate { per_second: 1e-300, burst: 1.0 }), Duration::MAX);
    }

    #[test]
    fn unused_tokens_do_not_add_up_beyond_the_burst() {
        let mut bucket = TokenBucket::full(RATE);
        assert!(bucket.take(RATE, Duration::MAX));
        assert_eq!((0..10).filter(|_| bucket.take(RATE, Duration::ZERO)).count(), 2);
    }
}

//! Rate limits with the two numbers of the kubelet's settings, such as `registryPullQPS` and `registryBurst`.

use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError};

use coracle_token_bucket::{Rate, TokenBucket};
use tokio::time::Instant;

/// Maximum requests per second, and maximum requests at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestRate {
    /// Requests per second on average.
    pub per_second: NonZero<u32>,
    /// Maximum requests at once.
    pub burst: NonZero<u32>,
}

/// Refuses requests above a rate. Clones share the limit.
#[derive(Clone, Debug, Default)]
pub struct RateLimit(Option<Arc<Limit>>);

#[derive(Debug)]
struct Limit {
    rate: RequestRate,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    tokens: TokenBucket,
    /// Time at which the tokens were last counted.
    counted: Instant,
}

// === impl RequestRate ===

impl RequestRate {
    /// The rate of a token bucket.
    pub(crate) fn of_bucket(self) -> Rate {
        Rate { per_second: self.per_second.get().into(), burst: self.burst.get().into() }
    }
}

// === impl RateLimit ===

impl RateLimit {
    /// A limit to this rate. `None`: no limit.
    #[must_use]
    pub fn new(rate: Option<RequestRate>) -> Self {
        Self(rate.map(|rate| {
            let bucket = Bucket { tokens: TokenBucket::full(rate.of_bucket()), counted: Instant::now() };
            Arc::new(Limit { rate, bucket: Mutex::new(bucket) })
        }))
    }

    /// The rate. `None` without a limit.
    pub(crate) fn rate(&self) -> Option<RequestRate> {
        self.0.as_ref().map(|limit| limit.rate)
    }

    /// Counts a request. Returns false if it is above the rate.
    pub(crate) fn allows(&self) -> bool {
        let Some(Limit { rate, bucket }) = self.0.as_deref() else { return true };
        let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let since_last = now.duration_since(bucket.counted);
        bucket.counted = now;
        bucket.tokens.take(rate.of_bucket(), since_last)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_above_the_rate_are_refused_until_time_has_passed() {
        let rate = RequestRate { per_second: NonZero::new(2).unwrap(), burst: NonZero::new(3).unwrap() };
        let limit = RateLimit::new(Some(rate));
        let other = limit.clone();
        assert!(limit.allows() && other.allows() && limit.allows());
        assert!(!other.allows() && !limit.allows());
        tokio::time::advance(Duration::from_millis(500)).await;
        assert!(limit.allows() && !limit.allows());
        assert_eq!(limit.rate(), Some(rate));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_rate_all_requests_are_allowed() {
        let limit = RateLimit::new(None);
        assert!((0..1000).all(|_| limit.allows()) && limit.rate().is_none());
    }
}

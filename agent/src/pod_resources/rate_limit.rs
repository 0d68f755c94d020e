//! Rate limit of the pod resources API. All clients share one limit, as in the kubelet. An answer can contain the
//! devices of all pods, so a client that calls without a break would occupy a processor.

use std::sync::{Arc, Mutex, PoisonError};

use coracle_token_bucket::{Rate, TokenBucket};
use tokio::time::Instant;
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Calls per second and at once, as in the kubelet (`DefaultQPS`, `DefaultBurstTokens`).
const RATE: Rate = Rate { per_second: 100.0, burst: 10.0 };

/// A token bucket for all calls. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct RateLimit(Arc<Mutex<Bucket>>);

#[derive(Debug)]
struct Bucket {
    tokens: TokenBucket,
    /// Time at which the tokens were last counted.
    counted: Instant,
}

// === impl RateLimit ===

impl RateLimit {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(Bucket { tokens: TokenBucket::full(RATE), counted: Instant::now() })))
    }

    /// Takes a token. Returns false if no token is left.
    fn allows(&self) -> bool {
        let mut bucket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let since_last = now.duration_since(bucket.counted);
        bucket.counted = now;
        bucket.tokens.take(RATE, since_last)
    }
}

impl Interceptor for RateLimit {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        // Code and message are upstream's.
        if self.allows() { Ok(request) } else { Err(Status::resource_exhausted("rejected by rate limit")) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn calls_beyond_the_rate_are_refused() {
        let mut limit = RateLimit::new();
        let mut other = limit.clone();
        for _ in 0..5 {
            assert!(limit.call(Request::new(())).is_ok() && other.call(Request::new(())).is_ok());
        }
        assert_eq!(other.call(Request::new(())).unwrap_err().message(), "rejected by rate limit");
        tokio::time::advance(Duration::from_millis(25)).await;
        assert!(limit.allows() && limit.allows() && !limit.allows());
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!((0..100).filter(|_| limit.allows()).count(), 10, "unused calls do not add up");
    }
}

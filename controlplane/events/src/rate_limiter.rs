//! A limit on the rate at which events are sent. Events wait; the module drops none.

use coracle_token_bucket::{Rate, TokenBucket};
use tokio::time::Instant;

/// The limit, and the tokens that are left.
pub(crate) struct RateLimiter {
    rate: Rate,
    tokens: TokenBucket,
    /// Time at which the tokens were last counted.
    counted: Instant,
}

// === impl RateLimiter ===

impl RateLimiter {
    pub(crate) fn new(rate: Rate) -> Self {
        Self { rate, tokens: TokenBucket::full(rate), counted: Instant::now() }
    }

    /// Waits until one more event may be sent.
    pub(crate) async fn wait(&mut self) {
        loop {
            let now = Instant::now();
            let since_last = now.duration_since(self.counted);
            self.counted = now;
            if self.tokens.take(self.rate, since_last) {
                return;
            }
            tokio::time::sleep(self.tokens.wait(self.rate)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn events_beyond_the_burst_wait_for_the_rate() {
        let mut limiter = RateLimiter::new(Rate { per_second: 10.0, burst: 2.0 });
        let start = Instant::now();
        limiter.wait().await;
        limiter.wait().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        for _ in 0..10 {
            limiter.wait().await;
        }
        assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    }
}

//! Back-off of repairs of a table in the kernel that other processes change, or that the kernel refuses.

use std::time::Duration;

use coracle_backoff::Backoff;
use tokio::time::Instant;

/// First back-off. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// The back-off of repairs. A repair after a quiet time is not delayed.
#[derive(Debug)]
pub(crate) struct RepairBackoff {
    /// Time of the last repair. It may be in the future.
    last: Option<Instant>,
    /// Delay of the last repair.
    delay: Duration,
    backoff: Backoff,
}

// === impl RepairBackoff ===

impl Default for RepairBackoff {
    fn default() -> Self {
        let backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        Self { last: None, delay: Duration::ZERO, backoff }
    }
}

impl RepairBackoff {
    /// Waits before a repair if the last repair was recent. Otherwise another process that flushes the table after each
    /// repair would occupy a processor.
    pub(crate) async fn before_repair(&mut self) {
        if self.last.is_some_and(|last| last.elapsed() < MAX_BACKOFF + self.delay) {
            self.delay = self.backoff.next_delay();
        } else {
            self.delay = Duration::ZERO;
            self.backoff.reset();
        }
        tokio::time::sleep(self.delay).await;
        self.last = Some(Instant::now());
    }

    /// Waits after a failure.
    pub(crate) async fn after_failure(&mut self) {
        tokio::time::sleep_until(self.next_after_failure()).await;
    }

    /// The time of the next repair after a failure.
    pub(crate) fn next_after_failure(&mut self) -> Instant {
        self.delay = self.backoff.next_delay();
        let at = Instant::now() + self.delay;
        self.last = Some(at);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn repairs_in_sequence_have_growing_delays() {
        let mut backoff = RepairBackoff::default();
        let mut delays = Vec::new();
        for _ in 0..4 {
            let began = Instant::now();
            backoff.before_repair().await;
            delays.push(began.elapsed());
        }
        assert_eq!(delays, [Duration::ZERO, FIRST_BACKOFF, FIRST_BACKOFF * 2, FIRST_BACKOFF * 4]);
        tokio::time::advance(MAX_BACKOFF * 3).await;
        let began = Instant::now();
        backoff.before_repair().await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}

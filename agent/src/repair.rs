//! Pauses before repairs of a table in the kernel that other processes change, or that the kernel refuses.

use std::time::Duration;

use tokio::time::Instant;

/// The first pause; doubled up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// The pause before the next repair. A repair after a quiet time follows without a pause.
#[derive(Debug, Default)]
pub(crate) struct RepairPause {
    last: Option<Instant>,
    next: Duration,
}

// === impl RepairPause ===

impl RepairPause {
    /// Waits before a repair if the last one was recent. Otherwise another process that flushes the table after each
    /// repair would occupy a processor.
    pub(crate) async fn before_repair(&mut self) {
        let is_recent = self.last.is_some_and(|last| last.elapsed() < MAX_PAUSE + self.next);
        self.next = if is_recent { (self.next * 2).clamp(FIRST_PAUSE, MAX_PAUSE) } else { Duration::ZERO };
        tokio::time::sleep(self.next).await;
        self.last = Some(Instant::now());
    }

    /// Waits after a failure.
    pub(crate) async fn after_failure(&mut self) {
        tokio::time::sleep_until(self.next_after_failure()).await;
    }

    /// The time of the next repair after a failure.
    pub(crate) fn next_after_failure(&mut self) -> Instant {
        self.next = (self.next * 2).clamp(FIRST_PAUSE, MAX_PAUSE);
        let at = Instant::now() + self.next;
        self.last = Some(at);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn repairs_in_sequence_have_growing_pauses() {
        let mut pause = RepairPause::default();
        let mut waits = Vec::new();
        for _ in 0..4 {
            let began = Instant::now();
            pause.before_repair().await;
            waits.push(began.elapsed());
        }
        assert_eq!(waits, [Duration::ZERO, FIRST_PAUSE, FIRST_PAUSE * 2, FIRST_PAUSE * 4]);
        tokio::time::advance(MAX_PAUSE * 3).await;
        let began = Instant::now();
        pause.before_repair().await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}

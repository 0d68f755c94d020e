//! Retries of definitions whose objects could not be loaded. No event reports that the store works again, so a timer
//! starts the next attempt.

use std::collections::HashMap;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::AbortHandle;

/// Delay before the second attempt. It doubles with each further attempt, up to `MAX`.
const FIRST: Duration = Duration::from_millis(250);
const MAX: Duration = Duration::from_secs(60);

/// The definitions that wait for their next attempt.
pub(super) struct Retries {
    failed: HashMap<String, Failed>,
    /// Receives the name of a definition at the time of its next attempt.
    due: mpsc::Sender<String>,
}

struct Failed {
    /// The state of the definition that could not be served. A changed definition is not delayed.
    wanted: String,
    message: String,
    /// Number of failed attempts that started a timer.
    attempts: u32,
    /// Whether the timer runs.
    is_waiting: bool,
    timer: AbortHandle,
}

// === impl Retries ===

impl Retries {
    pub(super) fn new(due: mpsc::Sender<String>) -> Self {
        Self { failed: HashMap::new(), due }
    }

    /// The message of the last attempt, if a timer runs and the definition has not changed since.
    pub(super) fn waiting_message(&self, name: &str, wanted: &str) -> Option<&str> {
        let failed = self.failed.get(name).filter(|failed| failed.is_waiting && failed.wanted == wanted);
        failed.map(|failed| failed.message.as_str())
    }

    /// Records a failed attempt and starts a timer for the next attempt.
    pub(super) fn fail(&mut self, name: &str, wanted: String, message: String) {
        if let Some(failed) = self.failed.get_mut(name).filter(|failed| failed.is_waiting) {
            (failed.wanted, failed.message) = (wanted, message);
            return;
        }
        let attempts = self.failed.get(name).map_or(0, |former| former.attempts);
        let timer = self.start_timer(name, delay(attempts));
        let attempts = attempts.saturating_add(1);
        self.failed.insert(name.to_owned(), Failed { wanted, message, attempts, is_waiting: true, timer });
    }

    fn start_timer(&self, name: &str, delay: Duration) -> AbortHandle {
        let (due, name) = (self.due.clone(), name.to_owned());
        let timer = coracle_threads::spawn(async move {
            tokio::time::sleep(delay).await;
            // A closed channel means that the controller has ended.
            let _ = due.send(name).await;
        });
        timer.abort_handle()
    }

    /// Records that the timer of a definition has ended.
    pub(super) fn end_wait(&mut self, name: &str) {
        if let Some(failed) = self.failed.get_mut(name) {
            failed.is_waiting = false;
        }
    }

    /// Drops the attempts of a definition that is served or deleted, and ends its timer: another definition may get its
    /// name.
    pub(super) fn forget(&mut self, name: &str) {
        if let Some(failed) = self.failed.remove(name) {
            failed.timer.abort();
        }
    }
}

/// The delay after `attempts` earlier attempts.
fn delay(attempts: u32) -> Duration {
    FIRST.saturating_mul(1 << attempts.min(8)).min(MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paused clock moves only while all tasks wait for a timer.
    #[tokio::test(start_paused = true)]
    async fn delays_grow_and_each_definition_has_one_timer() {
        let (due, mut times) = mpsc::channel(4);
        let mut retries = Retries::new(due);
        let start = tokio::time::Instant::now();
        for passed in [1, 3, 7] {
            retries.fail("a", "1".to_owned(), "down".to_owned());
            retries.fail("a", "2".to_owned(), "still down".to_owned());
            assert_eq!(retries.waiting_message("a", "1"), None);
            assert_eq!(retries.waiting_message("a", "2"), Some("still down"));
            assert_eq!(times.recv().await.as_deref(), Some("a"));
            assert_eq!(start.elapsed().as_millis() / FIRST.as_millis(), passed);
            retries.end_wait("a");
            assert_eq!(retries.waiting_message("a", "2"), None);
        }
        retries.forget("a");
        assert!(retries.failed.is_empty() && times.try_recv().is_err());
        assert_eq!((delay(7), delay(8), delay(u32::MAX)), (Duration::from_secs(32), MAX, MAX));
    }

    #[tokio::test(start_paused = true)]
    async fn a_definition_that_is_created_again_has_one_timer() {
        let (due, mut times) = mpsc::channel(4);
        let mut retries = Retries::new(due);
        for _ in 0..3 {
            retries.forget("a");
            retries.fail("a", "1".to_owned(), "down".to_owned());
        }
        assert_eq!(times.recv().await.as_deref(), Some("a"));
        tokio::time::sleep(MAX).await;
        assert!(times.try_recv().is_err());
    }
}

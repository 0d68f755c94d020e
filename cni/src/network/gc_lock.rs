//! Lock between GC by executables and the recording of attachments (CNI specification, section 2, "Lifecycle &
//! Ordering").
//!
//! GC frees the resources of attachments that are not in its list, so no attachment is recorded while it runs. Pods
//! have priority: a GC for which a pod waits is killed after a few seconds, and repeated later.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{RwLock, RwLockReadGuard, watch};

/// Longest wait of a pod for a GC.
const MAX_POD_WAIT: Duration = Duration::from_secs(5);

/// The lock. Either one GC runs, or any number of attachments are recorded.
pub(super) struct GcLock {
    lock: RwLock<()>,
    /// Number of attachments that wait for the running GC.
    waiting: watch::Sender<usize>,
    /// Number of GC runs that have begun.
    runs: AtomicU64,
}

/// No GC runs while this guard is held.
pub(super) type RecordGuard<'c> = RwLockReadGuard<'c, ()>;

/// Counts one waiting attachment.
struct Waiting<'c>(&'c watch::Sender<usize>);

// === impl GcLock ===

impl Default for GcLock {
    fn default() -> Self {
        Self { lock: RwLock::default(), waiting: watch::channel(0).0, runs: AtomicU64::new(0) }
    }
}

impl GcLock {
    /// Begins a GC run, and returns its number.
    pub(super) fn begin(&self) -> u64 {
        self.runs.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Whether no later run has begun.
    pub(super) fn is_newest(&self, number: u64) -> bool {
        self.runs.load(Ordering::Relaxed) == number
    }

    /// Waits until no GC runs. Then an attachment may be recorded.
    pub(super) async fn record(&self) -> RecordGuard<'_> {
        let _waiting = Waiting::new(&self.waiting);
        self.lock.read().await
    }

    /// Runs a GC. Returns `None` if it was cancelled for an attachment that waited too long.
    pub(super) async fn run<T>(&self, gc: impl Future<Output = T>) -> Option<T> {
        let _guard = self.lock.write().await;
        // Cancel-safe: dropping a GC kills its plugin, and the next GC starts from the beginning.
        tokio::select! {
            biased;
            done = gc => Some(done),
            () = self.until_cancelled() => None,
        }
    }

    /// Waits until the GC must be cancelled: [`MAX_POD_WAIT`] has passed, and an attachment waits.
    async fn until_cancelled(&self) {
        tokio::time::sleep(MAX_POD_WAIT).await;
        // The sender is a field of `self`, so the wait cannot fail.
        let _ = self.waiting.subscribe().wait_for(|waiting| *waiting > 0).await;
    }
}

// === impl Waiting ===

impl<'c> Waiting<'c> {
    fn new(waiting: &'c watch::Sender<usize>) -> Self {
        waiting.send_modify(|waiting| *waiting += 1);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|waiting| *waiting -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_gc_is_cancelled_only_for_a_waiting_attachment_and_not_at_once() {
        let lock = GcLock::default();
        assert_eq!(lock.run(ready(1)).await, Some(1));
        let slow = tokio::time::sleep(Duration::from_secs(50));
        assert!(lock.run(slow).await.is_some(), "no attachment waits");
        let begun = Instant::now();
        let (given_up, waited) = tokio::join!(lock.run(pending::<()>()), async {
            drop(lock.record().await);
            begun.elapsed()
        });
        assert!(given_up.is_none() && waited >= MAX_POD_WAIT && waited < 2 * MAX_POD_WAIT, "{waited:?}");
        drop(lock.record().await);
    }
}

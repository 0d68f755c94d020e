//! GC by executables, beside which no attachment goes on record (section 2, "Lifecycle & Ordering"): they would take what
//! it is given for nobody's.
//!
//! A pod is worth more than tidiness: a GC that one waits for has a few seconds, is killed then, and comes again later.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{RwLock, RwLockReadGuard, watch};

/// How long a GC may keep a pod waiting.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Collecting {
    lock: RwLock<()>,
    /// How many wait for the GC that runs.
    waiting: watch::Sender<usize>,
    turns: AtomicU64,
}

/// While it is held, no GC runs.
pub(super) type Recording<'c> = RwLockReadGuard<'c, ()>;

/// One that waits, for as long as it does.
struct Waiting<'c>(&'c watch::Sender<usize>);

// === impl Collecting ===

impl Default for Collecting {
    fn default() -> Self {
        Self { lock: RwLock::default(), waiting: watch::channel(0).0, turns: AtomicU64::new(0) }
    }
}

impl Collecting {
    /// Begins a turn in which all plugins are to be told.
    pub(super) fn begin(&self) -> u64 {
        self.turns.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Whether no turn has begun since.
    pub(super) fn is_newest(&self, turn: u64) -> bool {
        self.turns.load(Ordering::Relaxed) == turn
    }

    pub(super) async fn recording(&self) -> Recording<'_> {
        let _waiting = Waiting::new(&self.waiting);
        self.lock.read().await
    }

    /// Runs a GC to its end. None when it was given up for somebody who waited too long.
    pub(super) async fn run<T>(&self, gc: impl Future<Output = T>) -> Option<T> {
        let _alone = self.lock.write().await;
        // Cancel-safe: what a GC that is dropped has begun is killed, and the next one begins anew.
        tokio::select! {
            biased;
            done = gc => Some(done),
            () = self.patience() => None,
        }
    }

    /// Ends when somebody waits, not before a GC of ordinary length would have ended.
    async fn patience(&self) {
        tokio::time::sleep(PATIENCE).await;
        // The sender is ours: there is no other end of this than what is waited for.
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
    async fn a_gc_is_given_up_only_for_who_waits_and_not_at_once() {
        let collecting = Collecting::default();
        assert_eq!(collecting.run(ready(1)).await, Some(1));
        let slow = tokio::time::sleep(Duration::from_secs(50));
        assert!(collecting.run(slow).await.is_some(), "nobody waits");
        let begun = Instant::now();
        let (given_up, waited) = tokio::join!(collecting.run(pending::<()>()), async {
            drop(collecting.recording().await);
            begun.elapsed()
        });
        assert!(given_up.is_none() && waited >= PATIENCE && waited < 2 * PATIENCE, "{waited:?}");
        drop(collecting.recording().await);
    }
}

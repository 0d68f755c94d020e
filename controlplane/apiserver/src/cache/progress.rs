//! The newest applied revision, and the requests that wait for a revision. A commit wakes only the requests that wait
//! for it.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{oneshot, watch};

/// Requests by the revision that they wait for.
type Waiting = BTreeMap<u64, Vec<oneshot::Sender<()>>>;

/// The newest applied revision, and the requests that wait for later revisions.
pub(super) struct Progress {
    reached: watch::Sender<u64>,
    waiting: Mutex<Waiting>,
}

impl Progress {
    pub(super) fn new(revision: u64) -> Self {
        Self { reached: watch::Sender::new(revision), waiting: Mutex::default() }
    }

    /// The newest applied revision.
    pub(super) fn revision(&self) -> u64 {
        *self.reached.borrow()
    }

    /// Receives each applied revision.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.reached.subscribe()
    }

    /// Sets the newest applied revision.
    pub(super) fn advance(&self, revision: u64) {
        self.reached.send_replace(revision);
        let mut waiting = self.lock();
        let later = waiting.split_off(&revision.saturating_add(1));
        let due = std::mem::replace(&mut *waiting, later);
        drop(waiting);
        for request in due.into_values().flatten() {
            // If the request was cancelled, its receiver was dropped.
            let _ = request.send(());
        }
    }

    /// Waits until the revision is applied, without a time limit. Returns false if the wait was cancelled, which does
    /// not happen: only requests that were dropped are removed.
    pub(super) async fn reach(&self, revision: u64) -> bool {
        let reached = {
            // `advance` takes the lock after it has set the revision, so no wake-up is missed.
            let mut waiting = self.lock();
            if self.revision() >= revision {
                return true;
            }
            let (request, reached) = oneshot::channel();
            let requests = waiting.entry(revision).or_default();
            if requests.len().is_power_of_two() {
                // Remove cancelled requests: many can accumulate while the store's watch is interrupted. The amortized
                // cost per request is constant.
                requests.retain(|request| !request.is_closed());
            }
            requests.push(request);
            reached
        };
        reached.await.is_ok()
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn a_revision_wakes_the_requests_that_wait_for_it() {
        let progress = Progress::new(1);
        assert_eq!(progress.reach(1).now_or_never(), Some(true));
        let mut third = Box::pin(progress.reach(3));
        let mut ended = Box::pin(progress.reach(3));
        let mut fifth = Box::pin(progress.reach(5));
        for waiting in [&mut third, &mut ended, &mut fifth] {
            assert_eq!(waiting.as_mut().now_or_never(), None);
        }
        drop(ended);
        progress.advance(2);
        assert_eq!(progress.lock().keys().copied().collect::<Vec<_>>(), [3, 5]);
        progress.advance(4);
        assert_eq!(progress.lock().keys().copied().collect::<Vec<_>>(), [5]);
        assert_eq!((third.now_or_never(), fifth.as_mut().now_or_never()), (Some(true), None));
        for _ in 0..100 {
            assert_eq!(Box::pin(progress.reach(5)).now_or_never(), None);
        }
        assert!(progress.lock()[&5].len() <= 4, "requests that ended are removed");
        progress.advance(5);
        assert_eq!(fifth.now_or_never(), Some(true));
        assert!(progress.lock().is_empty());
    }
}

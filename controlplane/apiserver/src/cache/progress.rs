//! The newest applied revision, and the requests that wait for a revision. A commit wakes only the requests that wait
//! for it.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{oneshot, watch};

/// The requests that wait for later revisions.
#[derive(Default)]
struct Waiting {
    /// Requests by the revision that they wait for.
    requests: BTreeMap<u64, Vec<oneshot::Sender<()>>>,
    /// Whether no further revisions are applied.
    is_closed: bool,
}

/// The newest applied revision, and the requests that wait for later revisions.
pub(super) struct Progress {
    reached: watch::Sender<u64>,
    waiting: Mutex<Waiting>,
}

/// Closes a [`Progress`] when it is dropped.
pub(super) struct Closing<'a>(&'a Progress);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
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
        let later = waiting.requests.split_off(&revision.saturating_add(1));
        let due = std::mem::replace(&mut waiting.requests, later);
        drop(waiting);
        for request in due.into_values().flatten() {
            // If the request was cancelled, its receiver was dropped.
            let _ = request.send(());
        }
    }

    /// Closes this progress when the result is dropped, for the task that applies the revisions. So a panic or a
    /// cancellation of the task also ends the waits.
    pub(super) fn close_on_drop(&self) -> Closing<'_> {
        Closing(self)
    }

    /// Ends all waits for later revisions, because no further revisions are applied.
    fn close(&self) {
        let mut waiting = self.lock();
        waiting.is_closed = true;
        let requests = std::mem::take(&mut waiting.requests);
        drop(waiting);
        drop(requests);
    }

    /// Waits until the revision is applied, without a time limit. Returns false if no further revisions are applied.
    pub(super) async fn reach(&self, revision: u64) -> bool {
        let reached = {
            // `advance` takes the lock after it has set the revision, so no wake-up is missed.
            let mut waiting = self.lock();
            if self.revision() >= revision {
                return true;
            }
            if waiting.is_closed {
                return false;
            }
            let (request, reached) = oneshot::channel();
            let requests = waiting.requests.entry(revision).or_default();
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
        assert_eq!(progress.lock().requests.keys().copied().collect::<Vec<_>>(), [3, 5]);
        progress.advance(4);
        assert_eq!(progress.lock().requests.keys().copied().collect::<Vec<_>>(), [5]);
        assert_eq!((third.now_or_never(), fifth.as_mut().now_or_never()), (Some(true), None));
        for _ in 0..100 {
            assert_eq!(Box::pin(progress.reach(5)).now_or_never(), None);
        }
        assert!(progress.lock().requests[&5].len() <= 4, "requests that ended are removed");
        progress.advance(5);
        assert_eq!(fifth.now_or_never(), Some(true));
        assert!(progress.lock().requests.is_empty());
    }

    #[test]
    fn no_request_waits_after_the_last_revision() {
        let progress = Progress::new(1);
        let closing = progress.close_on_drop();
        let mut waiting = Box::pin(progress.reach(2));
        assert_eq!(waiting.as_mut().now_or_never(), None);
        drop(closing);
        assert_eq!(waiting.now_or_never(), Some(false));
        assert_eq!(progress.reach(2).now_or_never(), Some(false));
        assert_eq!(progress.reach(1).now_or_never(), Some(true), "this revision is applied");
    }
}

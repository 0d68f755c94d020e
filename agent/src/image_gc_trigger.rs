//! Triggers of image garbage collection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};

/// Triggers image garbage collection. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Trigger {
    pub(crate) check: Arc<Notify>,
    pub(crate) pods_known: Arc<Notify>,
    /// Number of the last request to remove images.
    requested: Arc<AtomicU64>,
    /// Number of the last request that a pass has answered.
    completed: watch::Sender<u64>,
}

/// A requested removal of images.
#[derive(Debug)]
pub(crate) struct Collection {
    number: u64,
    completed: watch::Receiver<u64>,
}

// === impl Trigger ===

impl Trigger {
    /// Requests a check of the disk. Its free space may have changed: a pull has ended, or a container was removed.
    pub(crate) fn check_disk(&self) {
        self.check.notify_one();
    }

    /// Requests the removal of images even if disk usage is below the high threshold. The caller has found the disk
    /// full or short of space.
    pub(crate) fn no_room(&self) -> Collection {
        let number = self.requested.fetch_add(1, Ordering::AcqRel) + 1;
        self.check.notify_one();
        Collection { number, completed: self.completed.subscribe() }
    }

    /// Reports that all pods of this node are known, and so are the images in use.
    pub(crate) fn pods_are_known(&self) {
        self.pods_known.notify_one();
    }

    /// The number of the last request to remove images. None if a pass has answered it.
    pub(crate) fn pending(&self) -> Option<u64> {
        let requested = self.requested.load(Ordering::Acquire);
        (requested > *self.completed.borrow()).then_some(requested)
    }

    /// Reports that a pass has answered the requests up to this number.
    pub(crate) fn complete(&self, number: u64) {
        self.completed.send_replace(number);
    }
}

impl Default for Trigger {
    fn default() -> Self {
        Self {
            check: Arc::default(),
            pods_known: Arc::default(),
            requested: Arc::default(),
            completed: watch::channel(0).0,
        }
    }
}

// === impl Collection ===

impl Collection {
    /// Waits until the images are removed and their space is free. The wait takes at most `limit`.
    pub(crate) async fn wait(self, limit: Duration) {
        let Self { number, mut completed } = self;
        let all = async { completed.wait_for(|completed| *completed >= number).await.is_ok() };
        // After a timeout too, the caller reads the free space.
        let _ = tokio::time::timeout(limit, all).await;
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn a_collection_is_complete_after_the_pass_that_began_after_its_request() {
        let trigger = Trigger::default();
        assert_eq!(trigger.pending(), None);
        let first = trigger.no_room();
        let pass = trigger.pending();
        assert_eq!(pass, Some(1));
        let second = trigger.no_room();
        trigger.complete(1);
        first.wait(LIMIT).await;
        assert_eq!(trigger.pending(), Some(2), "a pass that ran before does not answer the second request");
        assert!(second.wait(LIMIT).now_or_never().is_none());
        let third = trigger.no_room();
        trigger.complete(u64::MAX);
        third.wait(LIMIT).await;
        assert_eq!(trigger.pending(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_a_collection_has_a_limit() {
        let (trigger, began) = (Trigger::default(), tokio::time::Instant::now());
        trigger.no_room().wait(LIMIT).await;
        assert_eq!(began.elapsed(), LIMIT);
    }
}

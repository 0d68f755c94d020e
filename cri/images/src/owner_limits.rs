//! Limits of concurrent pulls by owner, for example the namespace of the pods.
//!
//! Manifest and configuration of an image are in memory until its layers are fetched. A registry determines their size
//! and the duration of the fetch. Pulls of different owners do not wait for each other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum concurrent pulls of one owner. It exceeds the number of layers that one owner fetches at a time.
const MAX_OF_OWNER: usize = 16;

/// The limits of the owners that have or await a pull.
#[derive(Debug, Default)]
pub(crate) struct OwnerLimits(Mutex<HashMap<String, Weak<Semaphore>>>);

// === impl OwnerLimits ===

impl OwnerLimits {
    /// Waits until the owner may start a pull. The pull holds the permit; it is `None` only if the limit was closed, which
    /// does not happen.
    pub(crate) async fn acquire(&self, owner: &str) -> Option<OwnedSemaphorePermit> {
        self.of(owner).acquire_owned().await.ok()
    }

    fn of(&self, owner: &str) -> Arc<Semaphore> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, limit| limit.strong_count() > 0);
        if let Some(known) = all.get(owner).and_then(Weak::upgrade) {
            return known;
        }
        let limit = Arc::new(Semaphore::new(MAX_OF_OWNER));
        all.insert(owner.to_owned(), Arc::downgrade(&limit));
        limit
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn pulls_of_one_owner_wait_and_those_of_others_do_not() {
        let limits = OwnerLimits::default();
        let mut running = Vec::new();
        for _ in 0..MAX_OF_OWNER {
            running.push(limits.acquire("a").await.unwrap());
        }
        let mut waiting = std::pin::pin!(limits.acquire("a"));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(limits.acquire("b").await.unwrap());
        running.pop();
        let last = waiting.await.unwrap();
        drop((running, last));
        // Owners without pulls are removed.
        let _other = limits.acquire("c").await.unwrap();
        assert_eq!(limits.0.lock().unwrap().keys().collect::<Vec<_>>(), ["c"]);
    }
}

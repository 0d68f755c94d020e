//! The changed services that one consumer has not read yet.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use coracle_values::object::Key;
use tokio::sync::Notify;

/// Collects the keys of services that changed, or whose EndpointSlices changed.
#[derive(Debug, Default)]
pub(crate) struct Subscription {
    changed: Mutex<BTreeSet<Key>>,
    more: Notify,
}

// === impl Subscription ===

impl Subscription {
    pub(crate) fn add(&self, keys: &[Key]) {
        if keys.is_empty() {
            return;
        }
        self.changed.lock().unwrap_or_else(PoisonError::into_inner).extend(keys.iter().cloned());
        self.more.notify_one();
    }

    /// Waits for changes, and returns them all. Cancel safe: keys are taken only when it returns.
    pub(crate) async fn next(&self) -> BTreeSet<Key> {
        loop {
            let changed = self.take();
            if !changed.is_empty() {
                return changed;
            }
            self.more.notified().await;
        }
    }

    /// Returns the changes until now.
    pub(crate) fn take(&self) -> BTreeSet<Key> {
        std::mem::take(&mut *self.changed.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

//! Locks by key. A lock exists while it is held or awaited.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::OwnedMutexGuard;

/// A lock for each key.
#[derive(Debug)]
pub(super) struct Locks<K>(Mutex<HashMap<K, Weak<tokio::sync::Mutex<()>>>>);

// === impl Locks ===

impl<K> Default for Locks<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Clone + Eq + Hash> Locks<K> {
    /// Waits for the lock of a key, and holds it until the guard is dropped.
    pub(super) async fn lock(&self, key: &K) -> OwnedMutexGuard<()> {
        self.of(key).lock_owned().await
    }

    /// The lock of a key. It exists as long as a caller keeps it.
    pub(super) fn of(&self, key: &K) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(key).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::default();
        locks.insert(key.clone(), Arc::downgrade(&lock));
        lock
    }
}

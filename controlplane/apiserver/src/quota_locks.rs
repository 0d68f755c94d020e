//! Locks of namespaces with quotas. A request holds one from its check to its commit.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use tokio::sync::{Mutex, OwnedMutexGuard};

/// Number of locks that the namespaces share.
const LOCK_COUNT: usize = 64;

/// Locks, selected by a hash of the namespace.
pub(crate) struct Locks([Arc<Mutex<()>>; LOCK_COUNT]);

/// The lock of the namespace, if the request uses a quota.
pub(crate) type QuotaLock = Option<OwnedMutexGuard<()>>;

// === impl Locks ===

impl Default for Locks {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Arc::default()))
    }
}

impl Locks {
    pub(crate) async fn lock(&self, namespace: &str) -> OwnedMutexGuard<()> {
        let mut hasher = DefaultHasher::new();
        namespace.hash(&mut hasher);
        let index = usize::try_from(hasher.finish() % LOCK_COUNT as u64).unwrap_or(0);
        self.0[index].clone().lock_owned().await
    }
}

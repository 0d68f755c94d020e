//! Locks of namespaces with quotas. A request holds the lock of its namespace from the check to the commit.

use std::sync::Arc;

use coracle_store::Guard;
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::cache::QUOTA_GUARDS;

/// Locks, selected by a hash of the namespace.
pub(crate) struct Locks([Arc<Mutex<()>>; QUOTA_GUARDS]);

/// The permit to use the quotas of a namespace: the lock within this server, and the guard against other servers.
pub(crate) struct QuotaPermit {
    _lock: OwnedMutexGuard<()>,
    /// The commit fails if another server has used quotas of the namespace meanwhile. `None` if no other server can
    /// write, or if the kind needs no guard for quotas.
    pub(crate) guard: Option<Guard>,
}

/// The permit, if the request uses a quota.
pub(crate) type QuotaLock = Option<QuotaPermit>;

// === impl QuotaPermit ===

impl QuotaPermit {
    pub(crate) fn new(lock: OwnedMutexGuard<()>, guard: Option<Guard>) -> Self {
        Self { _lock: lock, guard }
    }
}

// === impl Locks ===

impl Default for Locks {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Arc::default()))
    }
}

impl Locks {
    pub(crate) async fn lock(&self, namespace: &str) -> OwnedMutexGuard<()> {
        self.0[slot(namespace)].clone().lock_owned().await
    }
}

/// The number of the lock and of the guard that a namespace shares with other namespaces. The hash FNV-1a gives the
/// same number in all versions of the server.
pub(crate) fn slot(namespace: &str) -> usize {
    let hash = namespace.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    usize::try_from(hash % QUOTA_GUARDS as u64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_of_a_namespace_never_changes() {
        assert_eq!((slot(""), slot("a"), slot("foobar")), (0x25, 0x0c, 0x28));
    }
}

//! Capacity that several owners share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum memory of one owner, as a multiple of the free memory. So one owner gets at most three quarters of the
/// total.
pub(super) const PER_FREE_BYTE: usize = 3;

/// Memory (bytes) or connections (number) that users or webhooks share. An owner that uses a large part must leave some
/// capacity for other owners.
#[derive(Clone)]
pub(super) struct SharedCapacity {
    bytes: usize,
    /// The part that each owner always gets, even if the total then exceeds `bytes`.
    granted: usize,
    reserved: Arc<Mutex<Reserved>>,
}

#[derive(Default)]
pub(super) struct Reserved {
    pub(super) total: usize,
    pub(super) owners: HashMap<String, usize>,
}

// === impl SharedCapacity ===

impl SharedCapacity {
    pub(super) fn new(bytes: usize) -> Self {
        Self::granting(bytes, 0)
    }

    /// A capacity from which each owner always gets `granted`.
    pub(super) fn granting(bytes: usize, granted: usize) -> Self {
        Self { bytes, granted, reserved: Arc::default() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Reserved> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves memory. Returns false if too little is free for the owner.
    pub(super) fn reserve(&self, owner: &str, bytes: usize) -> bool {
        let mut reserved = self.lock();
        let own = reserved.owners.get(owner).copied().unwrap_or_default() + bytes;
        let free = self.bytes.checked_sub(reserved.total + bytes);
        let is_free = free.is_some_and(|free| own <= free.saturating_mul(PER_FREE_BYTE));
        if own > self.granted && !is_free {
            return false;
        }
        reserved.total += bytes;
        reserved.owners.insert(owner.to_owned(), own);
        true
    }

    pub(super) fn release(&self, owner: &str, bytes: usize) {
        let mut reserved = self.lock();
        reserved.total = reserved.total.saturating_sub(bytes);
        if let Some(own) = reserved.owners.get_mut(owner) {
            *own = own.saturating_sub(bytes);
            if *own == 0 {
                reserved.owners.remove(owner);
            }
        }
    }
}

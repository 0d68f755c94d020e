//! Slots for layers that are fetched at the same time. They limit the memory of a node that pulls many images.
//!
//! A registry that sends slowly keeps its slots for hours. So one owner, for example the namespace of the pods, gets only a
//! part of them, and the images of others can still be pulled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// Maximum layers that all pulls together fetch at a time.
const MAX_FETCHES: usize = 8;
/// Maximum layers that the pulls of one owner fetch at a time. The others suffice for one more image.
const MAX_FETCHES_OF_OWNER: usize = 5;

/// All slots.
#[derive(Debug)]
pub(crate) struct FetchSlots {
    all: Arc<Semaphore>,
    /// The slots of each owner that uses or awaits one.
    owners: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// The right to fetch one layer, until it is dropped.
#[derive(Debug)]
pub(crate) struct FetchSlot {
    _all: OwnedSemaphorePermit,
    _owner: OwnedSemaphorePermit,
}

// === impl FetchSlots ===

impl Default for FetchSlots {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(MAX_FETCHES)), owners: Mutex::default() }
    }
}

impl FetchSlots {
    /// Waits for a slot, in the order of the calls of each owner.
    pub(crate) async fn acquire(&self, owner: &str) -> Result<FetchSlot, AcquireError> {
        // The owner's slot is first: a call that waits for it does not hold up other owners.
        let of_owner = self.slots_of(owner).acquire_owned().await?;
        let of_all = self.all.clone().acquire_owned().await?;
        Ok(FetchSlot { _all: of_all, _owner: of_owner })
    }

    fn slots_of(&self, owner: &str) -> Arc<Semaphore> {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slots) = owners.get(owner).and_then(Weak::upgrade) {
            return slots;
        }
        owners.retain(|_, slots| slots.strong_count() > 0);
        let slots = Arc::new(Semaphore::new(MAX_FETCHES_OF_OWNER));
        owners.insert(owner.to_owned(), Arc::downgrade(&slots));
        slots
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn acquire_now(slots: &FetchSlots, owner: &str) -> Option<FetchSlot> {
        slots.acquire(owner).now_or_never().map(|slot| slot.expect("slots are never closed"))
    }

    #[test]
    fn one_owner_does_not_get_all_slots() {
        let slots = FetchSlots::default();
        let mut held: Vec<FetchSlot> =
            (0..MAX_FETCHES_OF_OWNER).map(|_| acquire_now(&slots, "slow").expect("a slot")).collect();
        assert!(acquire_now(&slots, "slow").is_none());
        held.extend((held.len()..MAX_FETCHES).map(|_| acquire_now(&slots, "other").expect("a slot")));
        assert!(acquire_now(&slots, "third").is_none(), "all together have a limit");
        held.remove(0);
        assert!(acquire_now(&slots, "third").is_some());
        assert!(acquire_now(&slots, "slow").is_some());
    }

    #[test]
    fn owners_without_slots_are_forgotten() {
        let slots = FetchSlots::default();
        for number in 0..100 {
            drop(acquire_now(&slots, &number.to_string()));
        }
        assert!(slots.owners.lock().unwrap().len() <= 1);
    }
}

//! Queues requests with large bodies or objects until their part of a common budget is free.
//!
//! The tree of an object takes more than twenty times the memory of its text, and a write has several trees at a time.
//! So the large requests of all users share a budget of bytes. One user, or all service accounts of a namespace, gets
//! at most half of this budget. So a user with many large requests delays mostly its own requests.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of a unit of the budget.
const UNIT: usize = 1 << 10;
/// The budget of all running large requests: 4 MiB of bodies and stored objects. A larger request uses the whole
/// budget.
const BUDGET_UNITS: u32 = 4 << 10;
/// The part of the budget for one owner. A larger request of the owner uses the whole part.
const OWN_UNITS: u32 = BUDGET_UNITS / 2;

/// The running and the waiting large requests, or other work with a common budget.
pub(crate) struct LargeRequests {
    budget: Arc<Semaphore>,
    /// The part of the budget for one owner.
    own_units: u32,
    owners: Owners,
}

/// The part of each owner with large requests.
type Owners = Arc<Mutex<HashMap<String, Arc<Semaphore>>>>;

/// The right to process a large request, or its place in the queue, until it is dropped.
pub(crate) struct LargeRequestPermit {
    owner: String,
    owners: Owners,
    permits: Vec<OwnedSemaphorePermit>,
}

fn semaphore(units: u32) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(usize::try_from(units).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS)))
}

fn lock(owners: &Owners) -> MutexGuard<'_, HashMap<String, Arc<Semaphore>>> {
    owners.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl LargeRequests ===

impl LargeRequests {
    /// A budget of `units` units of any kind. One owner gets at most `own_units` of them.
    pub(crate) fn with_budget(units: u32, own_units: u32) -> Self {
        Self { budget: semaphore(units), own_units, owners: Owners::default() }
    }

    /// Waits for the permit of a request of an owner that processes `bytes` bytes.
    pub(crate) async fn enter(&self, owner: &str, bytes: usize) -> LargeRequestPermit {
        let units = u32::try_from(bytes.div_ceil(UNIT)).map_or(BUDGET_UNITS, |units| units.min(BUDGET_UNITS));
        self.enter_units(owner, units).await
    }

    /// Waits for the permit of work of an owner that needs `units` units, at most the whole budget.
    pub(crate) async fn enter_units(&self, owner: &str, units: u32) -> LargeRequestPermit {
        let most = self.own_units;
        let own = lock(&self.owners).entry(owner.to_owned()).or_insert_with(|| semaphore(most)).clone();
        // The permit is created before the waits, because a cancelled wait must also remove the entry of the owner.
        let mut permit =
            LargeRequestPermit { owner: owner.to_owned(), owners: self.owners.clone(), permits: Vec::new() };
        // The semaphores are never closed.
        permit.permits.extend(own.acquire_many_owned(units.min(most)).await.ok());
        permit.permits.extend(self.budget.clone().acquire_many_owned(units).await.ok());
        permit
    }
}

impl Default for LargeRequests {
    fn default() -> Self {
        Self::with_budget(BUDGET_UNITS, OWN_UNITS)
    }
}

// === impl LargeRequestPermit ===

impl Drop for LargeRequestPermit {
    fn drop(&mut self) {
        self.permits.clear();
        let mut owners = lock(&self.owners);
        // Each other large request of the owner, running or waiting, holds one more reference.
        if owners.get(&self.owner).is_some_and(|own| Arc::strong_count(own) == 1) {
            owners.remove(&self.owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn one_owner_gets_half_of_the_budget_and_leaves_the_rest_to_others() {
        let large = LargeRequests::default();
        let enter =
            |owner: &'static str, kibibytes: usize| large.enter(owner, kibibytes << 10).now_or_never();
        let first = enter("eve", 3000).unwrap();
        assert!(enter("eve", 1).is_none());
        let others = [enter("ann", 500).unwrap(), enter("ann", 500).unwrap()];
        assert!(enter("bob", 200).is_none(), "the budget is used up");
        drop(first);
        let bob = enter("bob", 200).unwrap();
        drop((bob, others));
        assert!(enter("eve", 100 << 10).is_some(), "larger than the budget");
        assert!(lock(&large.owners).is_empty());
    }
}

//! Queues requests with large bodies or objects until their part of a common budget is free.
//!
//! The tree of an object takes more than twenty times the memory of its text, and a write has several trees at a time. So
//! the large requests of all users share a budget of bytes. One user, or all service accounts of a namespace, gets at most
//! half of it: a user with many large requests delays mostly its own.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of a unit of the budget.
const UNIT: usize = 1 << 10;
/// The budget of all running large requests: 4 MiB of bodies and stored objects. A larger request uses all of it.
const BUDGET_UNITS: u32 = 4 << 10;
/// The part of the budget for one owner. A larger request of the owner uses all of that part.
const OWN_UNITS: u32 = BUDGET_UNITS / 2;

/// The running and the waiting large requests, or other work with a common budget.
pub(crate) struct LargeRequests {
    budget: Arc<Semaphore>,
    /// The part of the budget for one owner.
    own_units: u32,
    turns: Turns,
}

/// The part of each owner with large requests.
type Turns = Arc<Mutex<HashMap<String, Arc<Semaphore>>>>;

/// The turn of a large request, or its place in the queue. Dropping it ends the turn.
pub(crate) struct Turn {
    owner: String,
    turns: Turns,
    permits: Vec<OwnedSemaphorePermit>,
}

fn semaphore(units: u32) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(usize::try_from(units).unwrap_or(Semaphore::MAX_PERMITS)))
}

fn lock(turns: &Turns) -> MutexGuard<'_, HashMap<String, Arc<Semaphore>>> {
    turns.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl LargeRequests ===

impl LargeRequests {
    /// A budget of other units, of which one owner gets a part.
    pub(crate) fn with_budget(units: u32, own_units: u32) -> Self {
        Self { budget: semaphore(units), own_units, turns: Turns::default() }
    }

    /// Waits for the turn of a request of an owner that processes `bytes` bytes.
    pub(crate) async fn enter(&self, owner: &str, bytes: usize) -> Turn {
        let units = u32::try_from(bytes.div_ceil(UNIT)).map_or(BUDGET_UNITS, |units| units.min(BUDGET_UNITS));
        self.enter_units(owner, units).await
    }

    /// Waits for the turn of work of an owner that needs `units` units, at most the whole budget.
    pub(crate) async fn enter_units(&self, owner: &str, units: u32) -> Turn {
        let most = self.own_units;
        let own = lock(&self.turns).entry(owner.to_owned()).or_insert_with(|| semaphore(most)).clone();
        // Made before the waits: a cancelled wait must remove the entry of the owner, too.
        let mut turn = Turn { owner: owner.to_owned(), turns: self.turns.clone(), permits: Vec::new() };
        // The semaphores are never closed.
        turn.permits.extend(own.acquire_many_owned(units.min(most)).await.ok());
        turn.permits.extend(self.budget.clone().acquire_many_owned(units).await.ok());
        turn
    }
}

impl Default for LargeRequests {
    fn default() -> Self {
        Self::with_budget(BUDGET_UNITS, OWN_UNITS)
    }
}

// === impl Turn ===

impl Drop for Turn {
    fn drop(&mut self) {
        self.permits.clear();
        let mut turns = lock(&self.turns);
        // Each other large request of the owner, running or waiting, holds one more reference.
        if turns.get(&self.owner).is_some_and(|own| Arc::strong_count(own) == 1) {
            turns.remove(&self.owner);
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
        assert!(lock(&large.turns).is_empty());
    }
}

//! Turns of requests with large bodies or objects.
//!
//! The tree of an object takes more than twenty times the memory of its text, and a write has several trees at a time. So
//! one user, or all service accounts of a namespace, has one large request at work, and the large requests of all users
//! share a budget of bytes. A user with many of them delays only its own.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of a unit of the budget.
const UNIT: usize = 1 << 10;
/// The budget of all large requests at work: 4 MiB of bodies and stored objects. A larger request uses all of it.
const BUDGET_UNITS: u32 = 4 << 10;

/// The large requests at work and those that wait.
pub(crate) struct LargeRequests {
    budget: Arc<Semaphore>,
    turns: Turns,
}

/// One permit for each owner with large requests.
type Turns = Arc<Mutex<HashMap<String, Arc<Semaphore>>>>;

/// The turn of a large request, or its place in the queue. Dropping it ends the turn.
pub(crate) struct Turn {
    owner: String,
    turns: Turns,
    permits: Vec<OwnedSemaphorePermit>,
}

fn lock(turns: &Turns) -> MutexGuard<'_, HashMap<String, Arc<Semaphore>>> {
    turns.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl LargeRequests ===

impl LargeRequests {
    /// Waits for the turn of a request of an owner that processes `bytes` bytes.
    pub(crate) async fn enter(&self, owner: &str, bytes: usize) -> Turn {
        let own =
            lock(&self.turns).entry(owner.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(1))).clone();
        // Made before the waits: a cancelled wait must remove the entry of the owner, too.
        let mut turn = Turn { owner: owner.to_owned(), turns: self.turns.clone(), permits: Vec::new() };
        // The semaphores are never closed.
        turn.permits.extend(own.acquire_owned().await.ok());
        let units = u32::try_from(bytes.div_ceil(UNIT)).map_or(BUDGET_UNITS, |units| units.min(BUDGET_UNITS));
        turn.permits.extend(self.budget.clone().acquire_many_owned(units).await.ok());
        turn
    }
}

impl Default for LargeRequests {
    fn default() -> Self {
        let budget =
            Arc::new(Semaphore::new(usize::try_from(BUDGET_UNITS).unwrap_or(Semaphore::MAX_PERMITS)));
        Self { budget, turns: Turns::default() }
    }
}

// === impl Turn ===

impl Drop for Turn {
    fn drop(&mut self) {
        self.permits.clear();
        let mut turns = lock(&self.turns);
        // Each request of the owner that waits has another reference.
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
    fn one_large_request_of_an_owner_runs_at_a_time_and_delays_no_other_owner() {
        let large = LargeRequests::default();
        let enter = |owner: &'static str| large.enter(owner, 1 << 20);
        let first = enter("eve").now_or_never().unwrap();
        assert!(enter("eve").now_or_never().is_none());
        let others = ["ann", "bob", "joe"].map(|owner| enter(owner).now_or_never().unwrap());
        assert!(enter("zoe").now_or_never().is_none(), "the budget is used up");
        drop(first);
        let (next, last) = (enter("zoe").now_or_never().unwrap(), enter("eve").now_or_never());
        assert!(last.is_none());
        drop((next, others));
        assert!(large.enter("eve", 100 << 20).now_or_never().is_some(), "larger than the budget");
        assert!(lock(&large.turns).is_empty());
    }
}

//! Slots for functions that may take long, and limits on the requests that wait for a slot.
//!
//! Each owner of requests gets at most a part of the slots, and has one request in the queue for a slot. The owner's
//! other requests wait until that request leaves the queue. So the owners take turns, and an owner with many waiting
//! requests does not delay other owners.
//!
//! A waiting request holds its objects in memory, even after it has given its seats back. So the number of waiting
//! requests is limited, too.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures::FutureExt as _;

use crate::{
    error::{ApiError, Result},
    large_requests::{LargeRequestPermit, LargeRequests},
    waits,
};

/// Maximum number of concurrent functions: of all owners, and of one owner.
const CONCURRENCY: [u32; 2] = [2, 1];
/// Maximum number of requests that wait for a slot: of all owners, and of one owner.
const MAX_WAITING: [usize; 2] = [256, 32];
/// Maximum number of requests that wait for a slot for their body: of all owners, and of one owner. A body takes at
/// most a few tenths of a second. All mutating requests that one user may have in flight by default may wait.
const MAX_WAITING_BODIES: [usize; 2] = [512, 128];
/// Maximum waiting requests of one owner, as a multiple of the requests that may still wait. So a few owners cannot use
/// up the limit of all owners.
const PER_FREE: usize = 3;

/// The slots, and the requests that wait for a slot.
pub(crate) struct LongWork {
    slots: LargeRequests,
    /// Maximum number of waiting requests: of all owners, and of one owner.
    max_waiting: [usize; 2],
    waiting: Mutex<Waiting>,
}

/// Numbers of waiting requests. Requests of the empty owner do not count.
#[derive(Default)]
struct Waiting {
    total: usize,
    owners: HashMap<String, usize>,
}

/// A waiting request. When this value is dropped, the request no longer counts as waiting.
struct WaitingRequest<'a> {
    work: &'a LongWork,
    owner: &'a str,
}

// === impl LongWork ===

impl LongWork {
    /// The slots of functions that may take seconds.
    pub(crate) fn new() -> Self {
        Self::with_max_waiting(MAX_WAITING)
    }

    /// The slots of functions on the bodies of requests.
    pub(crate) fn for_bodies() -> Self {
        Self::with_max_waiting(MAX_WAITING_BODIES)
    }

    fn with_max_waiting(max_waiting: [usize; 2]) -> Self {
        let [all, own] = CONCURRENCY;
        let slots = LargeRequests::with_budget(all, own);
        Self { slots, max_waiting, waiting: Mutex::default() }
    }

    /// Waits for a slot for a function of an owner. A request that waits for a long time gives its seats back.
    ///
    /// # Errors
    /// Too many requests wait. The client may retry.
    pub(crate) async fn enter(&self, owner: &str) -> Result<LargeRequestPermit> {
        let mut slot = pin!(self.slots.enter_units(owner, 1));
        if let Some(permit) = slot.as_mut().now_or_never() {
            return Ok(permit);
        }
        let _waiting = self.wait(owner)?;
        Ok(waits::without_seats(slot).await)
    }

    /// Counts a waiting request, or refuses the request. The empty owner has no limit, because it stands for members of
    /// `system:masters`, and for tasks of this server.
    fn wait<'a>(&'a self, owner: &'a str) -> Result<WaitingRequest<'a>> {
        if owner.is_empty() {
            return Ok(WaitingRequest { work: self, owner });
        }
        let mut waiting = self.lock();
        let [all, of_owner] = self.max_waiting;
        let own = waiting.owners.get(owner).copied().unwrap_or_default();
        let free = all.checked_sub(waiting.total + 1);
        let is_free = free.is_some_and(|free| own < free.saturating_mul(PER_FREE));
        if own >= of_owner || !is_free {
            return Err(ApiError::too_many_requests());
        }
        waiting.total += 1;
        waiting.owners.insert(owner.to_owned(), own + 1);
        Ok(WaitingRequest { work: self, owner })
    }

    /// Number of waiting requests of an owner.
    #[cfg(test)]
    pub(crate) fn count_waiting(&self, owner: &str) -> usize {
        self.lock().owners.get(owner).copied().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the slot of an owner, and starts all waits that the owner may have. Further requests of the owner are
    /// refused.
    #[cfg(test)]
    pub(crate) async fn occupy<'a>(&'a self, owner: &'a str) -> impl Sized {
        let slot = self.slots.enter_units(owner, 1).await;
        let waiting: Vec<WaitingRequest<'a>> = std::iter::from_fn(|| self.wait(owner).ok()).collect();
        (slot, waiting)
    }
}

// === impl WaitingRequest ===

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        if self.owner.is_empty() {
            return;
        }
        let mut waiting = self.work.lock();
        waiting.total -= 1;
        if let Some(own) = waiting.owners.get_mut(self.owner) {
            *own -= 1;
            if *own == 0 {
                waiting.owners.remove(self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::future::BoxFuture;

    use super::*;

    type Entering<'a> = BoxFuture<'a, Result<LargeRequestPermit>>;

    /// A request that waits for a slot.
    fn waiting<'a>(work: &'a LongWork, owner: &'a str) -> Entering<'a> {
        let mut entering: Entering<'a> = Box::pin(work.enter(owner));
        assert!((&mut entering).now_or_never().is_none(), "{owner} does not wait");
        entering
    }

    /// The permit, if the request has its slot.
    fn entered(entering: &mut Entering<'_>) -> Option<LargeRequestPermit> {
        entering.now_or_never()?.ok()
    }

    #[tokio::test]
    async fn the_waiting_requests_of_one_owner_and_of_all_are_limited() {
        let work = LongWork::with_max_waiting([8, 3]);
        let slots = [work.enter("eve").await, work.enter("bob").await];
        let mut held: Vec<Entering<'_>> = (0..3).map(|_| waiting(&work, "eve")).collect();
        let code = |owner: &'static str| {
            let refused = work.enter(owner).now_or_never()?.err()?;
            assert_eq!(refused.details["retryAfterSeconds"], 1);
            Some(refused.code)
        };
        assert_eq!(code("eve"), Some(429));
        held.extend(["ann", "joe", "kim", "lea"].map(|owner| waiting(&work, owner)));
        assert_eq!(code("max"), Some(429), "the requests of all owners");
        held.push(waiting(&work, ""));
        drop(held.remove(0));
        held.push(waiting(&work, "max"));
        drop((held, slots));
        assert!(work.enter("eve").now_or_never().is_some());
        let counts = work.lock();
        assert!(counts.total == 0 && counts.owners.is_empty());
    }

    #[tokio::test]
    async fn owners_take_turns() {
        let work = LongWork::new();
        let first = [work.enter("ann").await, work.enter("joe").await];
        let mut of_eve = [(); 3].map(|()| waiting(&work, "eve"));
        let mut of_bob = waiting(&work, "bob");
        let [of_ann, of_joe] = first;
        drop(of_ann);
        let permit = entered(&mut of_eve[0]);
        assert!(permit.is_some());
        drop(of_joe);
        assert!(entered(&mut of_eve[1]).is_none(), "before the turn of another owner");
        assert!(entered(&mut of_bob).is_some());
        drop(permit);
        assert!(entered(&mut of_eve[1]).is_some());
    }
}

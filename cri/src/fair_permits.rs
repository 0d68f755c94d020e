//! Permits for long work. Owners share them: an owner with much work delays only its own work.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// A number of permits. Each owner, for example a namespace, has its own queue. At most `each` calls of an owner are in the
/// common queue or have a permit, so a call of another owner waits for only a few of these calls.
#[derive(Debug)]
pub struct FairPermits {
    permits: Semaphore,
    each: usize,
    /// Limits the permits of owners that already have a permit.
    further: Semaphore,
    /// The owners with calls.
    owners: Mutex<BTreeMap<String, Weak<Owner>>>,
}

/// The calls of an owner.
#[derive(Debug)]
struct Owner {
    queue: Arc<Semaphore>,
    /// A semaphore with one permit, for the first call of the owner. This call needs no permit of
    /// `FairPermits::further`.
    first: Arc<Semaphore>,
}

/// A permit. Dropping it lets the next call continue.
#[derive(Debug)]
pub struct FairPermit<'a> {
    // The semaphores are never closed, so each call has the permits that it has waited for.
    _shared: Option<SemaphorePermit<'a>>,
    _further: Option<SemaphorePermit<'a>>,
    _first: Option<OwnedSemaphorePermit>,
    _own: Option<OwnedSemaphorePermit>,
    /// Keeps the owner in `FairPermits::owners` while it has a permit.
    _owner: Arc<Owner>,
}

// === impl FairPermits ===

impl FairPermits {
    /// `most` is the maximum number of permits, and `each` is the maximum for one owner.
    #[must_use]
    pub const fn new(most: usize, each: usize) -> Self {
        Self::with_further(most, each, most)
    }

    /// As [`new`](Self::new), with a limit on the further permits of all owners together. A further permit is a permit
    /// that an owner has in addition to its first permit. Use this limit if calls hold their permits for long, so that
    /// a few owners cannot hold all permits.
    #[must_use]
    pub const fn with_further(most: usize, each: usize, further: usize) -> Self {
        Self {
            permits: Semaphore::const_new(most),
            each,
            further: Semaphore::const_new(further),
            owners: Mutex::new(BTreeMap::new()),
        }
    }

    /// Waits for a permit. Cancel-safe: a call that is dropped loses its place.
    pub async fn take(&self, owner: &str) -> FairPermit<'_> {
        let owner = self.owner(owner);
        let own = Arc::clone(&owner.queue).acquire_owned().await.ok();
        let (first, further) = tokio::select! {
            // Cancel safe: a dropped wait leaves the permit to other calls.
            biased;
            first = Arc::clone(&owner.first).acquire_owned() => (first.ok(), None),
            further = self.further.acquire() => (None, further.ok()),
        };
        let shared = self.permits.acquire().await.ok();
        FairPermit { _shared: shared, _further: further, _first: first, _own: own, _owner: owner }
    }

    /// The owner with this name. Removes owners without calls.
    fn owner(&self, name: &str) -> Arc<Owner> {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        owners.retain(|_, owner| owner.strong_count() > 0);
        if let Some(owner) = owners.get(name).and_then(Weak::upgrade) {
            return owner;
        }
        let queue = Arc::new(Semaphore::new(self.each));
        let owner = Arc::new(Owner { queue, first: Arc::new(Semaphore::new(1)) });
        owners.insert(name.to_owned(), Arc::downgrade(&owner));
        owner
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn an_owner_with_much_work_does_not_delay_others() {
        let permits = FairPermits::new(1, 1);
        let held = permits.take("a").await;
        let mut of_a: Vec<_> = (0..100).map(|_| Box::pin(permits.take("a"))).collect();
        for waiting in &mut of_a {
            assert!(waiting.now_or_never().is_none());
        }
        let mut of_b = Box::pin(permits.take("b"));
        assert!((&mut of_b).now_or_never().is_none(), "the permit is in use");
        drop(held);
        let permit = of_b.await;
        assert_eq!(permits.owners.lock().expect("lock").len(), 2);
        drop(permit);
        let mut done = 0;
        for waiting in of_a {
            drop(waiting.await);
            done += 1;
        }
        assert_eq!(done, 100, "all of them get a permit");
        drop(permits.take("c").await);
        assert_eq!(permits.owners.lock().expect("lock").len(), 1, "owners without calls are removed");
    }

    #[tokio::test]
    async fn an_owner_has_a_part_of_the_permits() {
        let permits = FairPermits::new(3, 2);
        let held = [permits.take("a").await, permits.take("a").await];
        assert!(permits.take("a").now_or_never().is_none());
        assert!(permits.take("b").now_or_never().is_some(), "a permit is left for others");
        drop(held);
        assert!(permits.take("a").now_or_never().is_some());
    }

    #[tokio::test]
    async fn owners_with_a_permit_leave_the_other_permits_to_owners_without_a_permit() {
        let permits = FairPermits::with_further(4, 2, 1);
        let of_a = [permits.take("a").await, permits.take("a").await];
        let of_b = permits.take("b").await;
        let mut second_of_b = Box::pin(permits.take("b"));
        assert!((&mut second_of_b).now_or_never().is_none(), "the further permit is in use");
        let of_c = permits.take("c").now_or_never();
        assert!(of_c.is_some(), "two owners hold all permits");
        drop(of_c);
        drop(of_a);
        assert!((&mut second_of_b).now_or_never().is_some(), "the further permit is free");
        drop(of_b);
        assert!(permits.take("b").now_or_never().is_some());
    }
}

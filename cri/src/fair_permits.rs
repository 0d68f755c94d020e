//! Permits for long work. Owners share them: an owner with much work delays its own work, and not that of others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// A number of permits. Each owner, for example a namespace, has its own queue. At most `each` calls of an owner are in the
/// common queue or have a permit, so a call of another owner waits for few of them.
#[derive(Debug)]
pub struct FairPermits {
    permits: Semaphore,
    each: usize,
    /// The owners with calls.
    owners: Mutex<BTreeMap<String, Weak<Semaphore>>>,
}

/// A permit. Dropping it lets the next call continue.
#[derive(Debug)]
pub struct FairPermit<'a> {
    // The semaphores are never closed, so both are present.
    _shared: Option<SemaphorePermit<'a>>,
    _own: Option<OwnedSemaphorePermit>,
}

// === impl FairPermits ===

impl FairPermits {
    /// `most` is the maximum number of permits, and `each` that of one owner.
    #[must_use]
    pub const fn new(most: usize, each: usize) -> Self {
        Self { permits: Semaphore::const_new(most), each, owners: Mutex::new(BTreeMap::new()) }
    }

    /// Waits for a permit. Cancel-safe: a call that is dropped loses its place.
    pub async fn take(&self, owner: &str) -> FairPermit<'_> {
        let own = self.queue_of(owner).acquire_owned().await.ok();
        let shared = self.permits.acquire().await.ok();
        FairPermit { _shared: shared, _own: own }
    }

    /// The queue of an owner. Forgets owners without calls.
    fn queue_of(&self, owner: &str) -> Arc<Semaphore> {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        owners.retain(|_, queue| queue.strong_count() > 0);
        if let Some(queue) = owners.get(owner).and_then(Weak::upgrade) {
            return queue;
        }
        let queue = Arc::new(Semaphore::new(self.each));
        owners.insert(owner.to_owned(), Arc::downgrade(&queue));
        queue
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
        assert_eq!(permits.owners.lock().expect("lock").len(), 1, "owners without calls are forgotten");
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
}

//! Work that is done once for all who want it at the same time.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OnceCell;

/// What is being done, by what it is done for.
pub(super) struct Flights<K, T>(Mutex<HashMap<K, Arc<OnceCell<Arc<T>>>>>);

/// Takes a flight off the list when the last who waits for it is gone, done or not.
struct Seat<'a, K: Eq + Hash, T> {
    flights: &'a Flights<K, T>,
    key: K,
    cell: Arc<OnceCell<Arc<T>>>,
}

// === impl Flights ===

impl<K: Clone + Eq + Hash, T> Flights<K, T> {
    /// Does the work, or waits for whoever does. Where that one is cancelled, another who waits begins anew.
    pub(super) async fn join<F: Future<Output = T>>(&self, key: K, work: impl FnOnce() -> F) -> Arc<T> {
        let cell = self.list().entry(key.clone()).or_default().clone();
        let seat = Seat { flights: self, key, cell };
        seat.cell.get_or_init(async move || Arc::new(work().await)).await.clone()
    }
}

impl<K, T> Flights<K, T> {
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.list().is_empty()
    }

    fn list(&self) -> MutexGuard<'_, HashMap<K, Arc<OnceCell<Arc<T>>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K, T> Default for Flights<K, T> {
    fn default() -> Flights<K, T> {
        Flights(Mutex::default())
    }
}

// === impl Seat ===

impl<K: Eq + Hash, T> Drop for Seat<'_, K, T> {
    fn drop(&mut self) {
        let mut list = self.flights.list();
        let listed = list.get(&self.key).is_some_and(|cell| Arc::ptr_eq(cell, &self.cell));
        // The list's and this one are the last. What is done is for those who waited, not for who comes later.
        if listed && (self.cell.initialized() || Arc::strong_count(&self.cell) <= 2) {
            list.remove(&self.key);
        }
    }
}

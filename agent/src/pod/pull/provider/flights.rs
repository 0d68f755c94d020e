//! Single-flight: concurrent calls with the same key share one execution and its result.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OnceCell;

/// The running executions by key.
pub(super) struct Flights<K, T>(Mutex<HashMap<K, Arc<OnceCell<Arc<T>>>>>);

/// Removes an execution from the map when its last waiter is dropped.
struct FlightGuard<'a, K: Eq + Hash, T> {
    flights: &'a Flights<K, T>,
    key: K,
    cell: Arc<OnceCell<Arc<T>>>,
}

// === impl Flights ===

impl<K: Clone + Eq + Hash, T> Flights<K, T> {
    /// Runs the work, or waits for the caller that runs it. If that caller is cancelled, a waiter starts again.
    pub(super) async fn join<F: Future<Output = T>>(&self, key: K, work: impl FnOnce() -> F) -> Arc<T> {
        let cell = self.list().entry(key.clone()).or_default().clone();
        let guard = FlightGuard { flights: self, key, cell };
        guard.cell.get_or_init(async move || Arc::new(work().await)).await.clone()
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

// === impl FlightGuard ===

impl<K: Eq + Hash, T> Drop for FlightGuard<'_, K, T> {
    fn drop(&mut self) {
        let mut list = self.flights.list();
        let listed = list.get(&self.key).is_some_and(|cell| Arc::ptr_eq(cell, &self.cell));
        // Two references mean that only the map and this guard hold the cell. A later caller must start new work.
        if listed && (self.cell.initialized() || Arc::strong_count(&self.cell) <= 2) {
            list.remove(&self.key);
        }
    }
}

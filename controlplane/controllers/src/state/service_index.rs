//! Index of services by a value that they have, such as an address or a node port.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cache::Change;
use crate::object::{Key, ObjectExt, Service};

/// The services of each value.
#[derive(Debug)]
pub(super) struct ServiceIndex<T>(Mutex<BTreeMap<T, BTreeSet<Key>>>);

// === impl ServiceIndex ===

impl<T> Default for ServiceIndex<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Copy + Ord> ServiceIndex<T> {
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<T, BTreeSet<Key>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a change of a service. `values` returns the values of a service. Returns the values whose services may
    /// have changed.
    pub(super) fn follow(
        &self,
        change: &Change<'_, Service>,
        values: impl Fn(&Service) -> BTreeSet<T>,
    ) -> BTreeSet<T> {
        let of = |service: Option<&Arc<Service>>| service.map(|service| values(service)).unwrap_or_default();
        let (old, new) = (of(change.old), of(change.new));
        if old == new && change.old.map(|service| service.uid()) == change.new.map(|service| service.uid()) {
            return BTreeSet::new();
        }
        let Some(key) = change.latest().map(|service| service.key()) else { return BTreeSet::new() };
        let mut services = self.lock();
        for value in &old {
            if let Some(keys) = services.get_mut(value) {
                keys.remove(&key);
                if keys.is_empty() {
                    services.remove(value);
                }
            }
        }
        for value in &new {
            services.entry(*value).or_default().insert(key.clone());
        }
        old.union(&new).copied().collect()
    }

    /// The services with this value.
    pub(super) fn services(&self, value: T) -> Vec<Key> {
        self.lock().get(&value).into_iter().flatten().cloned().collect()
    }
}

//! A limit of the node on streams to pods, or on logs of pods. The pods of one namespace cannot use up the limit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of permits of one namespace, as a multiple of the free permits. So a namespace can take at most three
/// quarters of all permits.
const PER_FREE: usize = 3;

/// The permits of a node. Clones share the permits.
#[derive(Clone, Debug)]
pub struct NamespaceLimit {
    most: usize,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    total: usize,
    namespaces: HashMap<String, usize>,
}

/// The permit for one stream or log. Dropping it releases the permit.
#[derive(Debug)]
pub struct NamespacePermit {
    limit: NamespaceLimit,
    namespace: String,
}

// === impl NamespaceLimit ===

impl NamespaceLimit {
    /// A limit of `most` permits.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, taken: Arc::default() }
    }

    /// A permit for a pod of the namespace. `None` if too few permits would be left for other namespaces.
    #[must_use]
    pub fn take(&self, namespace: &str) -> Option<NamespacePermit> {
        let mut taken = self.taken();
        let own = taken.namespaces.get(namespace).copied().unwrap_or_default() + 1;
        let free = self.most.checked_sub(taken.total + 1)?;
        if own > free.saturating_mul(PER_FREE) {
            return None;
        }
        taken.total += 1;
        taken.namespaces.insert(namespace.to_owned(), own);
        drop(taken);
        Some(NamespacePermit { limit: self.clone(), namespace: namespace.to_owned() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl NamespacePermit ===

impl Drop for NamespacePermit {
    fn drop(&mut self) {
        let mut taken = self.limit.taken();
        taken.total -= 1;
        if let Some(own) = taken.namespaces.get_mut(&self.namespace) {
            *own -= 1;
            if *own == 0 {
                taken.namespaces.remove(&self.namespace);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pods_of_one_namespace_leave_permits_for_others() {
        let limit = NamespaceLimit::new(16);
        let of = |namespace| std::iter::from_fn(|| limit.take(namespace)).collect::<Vec<_>>();
        let (many, few) = (of("a"), of("b"));
        assert_eq!((many.len(), few.len()), (12, 3));
        assert!(limit.take("a").is_none());
        drop((many, few));
        assert!(limit.taken().namespaces.is_empty());
        assert_eq!(limit.taken().total, 0);
    }
}

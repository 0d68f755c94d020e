//! Limit of the forwarded connections of all clients. Each of them needs a descriptor of this process, and a client has many.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_connections::Limits;

/// Divisor of the process's descriptor limit: the quotient is the maximum number of connections.
const SHARE: u64 = 8;
/// Maximum connections, even if the descriptor limit permits more.
const MAX: usize = 4 << 10;
/// Maximum connections of one namespace, as a multiple of the free ones: at most three quarters of all.
const PER_FREE: usize = 3;

/// The forwarded connections of this node.
#[derive(Clone, Debug)]
pub(super) struct ForwardLimit {
    most: usize,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    total: usize,
    namespaces: HashMap<String, usize>,
}

/// A forwarded connection; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct ForwardPermit {
    limit: ForwardLimit,
    namespace: String,
}

// === impl ForwardLimit ===

impl Default for ForwardLimit {
    fn default() -> Self {
        Self::new(Limits::share(SHARE, MAX).total)
    }
}

impl ForwardLimit {
    fn new(most: usize) -> Self {
        Self { most, taken: Arc::default() }
    }

    /// A permit for a connection to a pod of the namespace. None if too little would be left for others.
    pub(super) fn take(&self, namespace: &str) -> Option<ForwardPermit> {
        let mut taken = self.taken();
        let own = taken.namespaces.get(namespace).copied().unwrap_or_default() + 1;
        let free = self.most.checked_sub(taken.total + 1)?;
        if own > free.saturating_mul(PER_FREE) {
            return None;
        }
        taken.total += 1;
        taken.namespaces.insert(namespace.to_owned(), own);
        drop(taken);
        Some(ForwardPermit { limit: self.clone(), namespace: namespace.to_owned() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl ForwardPermit ===

impl Drop for ForwardPermit {
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
    fn forwarded_connections_of_one_namespace_leave_some_for_others() {
        let limit = ForwardLimit::new(16);
        let of = |namespace| std::iter::from_fn(|| limit.take(namespace)).collect::<Vec<_>>();
        let (many, few) = (of("a"), of("b"));
        assert_eq!((many.len(), few.len()), (12, 3));
        assert!(limit.take("a").is_none());
        drop((many, few));
        assert!(limit.taken().namespaces.is_empty());
        assert_eq!(limit.taken().total, 0);
        assert!(ForwardLimit::default().most >= 8);
    }
}

//! The number of concurrent requests with which the controllers create pods of one namespace.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::Semaphore;

/// Maximum concurrent requests for one namespace, of all controllers together. This number suffices to use both
/// processors of a small machine, and the group commit of the store.
const EACH: usize = 64;

/// The permits of the namespaces with requests. Namespaces do not share permits. So a webhook that delays the requests
/// of one namespace does not delay other namespaces.
#[derive(Debug, Default)]
pub(crate) struct PodCreations(Mutex<HashMap<String, Weak<Semaphore>>>);

// === impl PodCreations ===

impl PodCreations {
    /// The permits of a namespace. A request to create a pod holds one of them.
    pub(crate) fn permits(&self, namespace: &str) -> Arc<Semaphore> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(permits) = all.get(namespace).and_then(Weak::upgrade) {
            return permits;
        }
        all.retain(|_, permits| permits.strong_count() > 0);
        let permits = Arc::new(Semaphore::new(EACH));
        all.insert(namespace.to_owned(), Arc::downgrade(&permits));
        permits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controllers_share_the_permits_of_a_namespace() {
        let creations = PodCreations::default();
        let permits = creations.permits("a");
        let held = permits.try_acquire_many(u32::try_from(EACH).unwrap()).unwrap();
        assert!(creations.permits("a").try_acquire().is_err());
        assert!(creations.permits("b").try_acquire().is_ok(), "another namespace has its own permits");
        drop(held);
        assert!(creations.permits("a").try_acquire().is_ok());
        drop(permits);
        creations.permits("c");
        assert_eq!(creations.0.lock().unwrap().len(), 1, "namespaces without requests are forgotten");
    }
}

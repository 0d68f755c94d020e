//! The pods that end so that critical pods fit on the node, until they have released their resources.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Preempted pods that still have resources. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct PreemptedPods {
    uids: Arc<Mutex<HashSet<String>>>,
    released: Arc<Notify>,
}

// === impl PreemptedPods ===

impl PreemptedPods {
    /// Adds a pod. Returns whether it is new.
    pub(crate) fn add(&self, uid: &str) -> bool {
        self.lock().insert(uid.to_owned())
    }

    /// Whether the pod was preempted and still has resources.
    pub(crate) fn contains(&self, uid: &str) -> bool {
        self.lock().contains(uid)
    }

    /// Removes a pod that has released its resources.
    pub(crate) fn release(&self, uid: &str) {
        if self.lock().remove(uid) {
            self.released.notify_one();
        }
    }

    /// Waits until a preempted pod has released its resources. Cancel-safe: a notification is kept.
    pub(crate) async fn next_release(&self) {
        self.released.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<String>> {
        self.uids.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn only_the_end_of_a_preempted_pod_wakes_pod_sync() {
        let pods = PreemptedPods::default();
        assert!(pods.add("a") && !pods.add("a") && pods.contains("a"));
        pods.release("b");
        assert_eq!(pods.next_release().now_or_never(), None);
        pods.release("a");
        assert_eq!(pods.next_release().now_or_never(), Some(()));
        assert!(!pods.contains("a"));
    }
}

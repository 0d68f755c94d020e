//! Requested evictions, which the workers of the pods process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use super::super::state::{EVICTED, PREEMPTING, TERMINATED};
use super::preempted::PreemptedPods;

/// Evictions that the pods' workers have not processed yet; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Evictions {
    requested: Arc<Mutex<HashMap<String, Evicted>>>,
    /// The uids of evicted pods, for pod sync, which wakes their workers.
    woken: mpsc::UnboundedSender<String>,
    /// The pods that end for critical pods.
    preempted: PreemptedPods,
}

/// A requested eviction of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evicted {
    pub(crate) message: String,
    pub(crate) cause: EvictionCause,
    /// Grace period in seconds.
    pub(crate) grace: u32,
}

/// Cause of an eviction. The texts are eviction signals, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvictionCause {
    /// The pod exceeded one of its limits.
    Limit(&'static str),
    /// The node is short of a resource.
    Pressure(&'static str),
    /// The machine shuts down.
    Shutdown,
    /// A critical pod needs the resources of the pod.
    Preemption,
}

// === impl EvictionCause ===

impl EvictionCause {
    /// The eviction signal. None for a shutdown and for a preemption: Kubernetes does not count them as evictions.
    pub(crate) fn signal(self) -> Option<&'static str> {
        match self {
            Self::Limit(signal) | Self::Pressure(signal) => Some(signal),
            Self::Shutdown | Self::Preemption => None,
        }
    }

    /// The reason in the pod's status.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Limit(_) | Self::Pressure(_) => EVICTED,
            Self::Shutdown => TERMINATED,
            Self::Preemption => PREEMPTING,
        }
    }

    /// Whether the pod gets the condition `DisruptionTarget`.
    pub(crate) fn is_disruption(self) -> bool {
        !matches!(self, Self::Limit(_))
    }
}

// === impl Evictions ===

impl Evictions {
    /// Creates the set without evictions, and the receiver of the uids of evicted pods.
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<String>) {
        let (woken, receiver) = mpsc::unbounded_channel();
        (Self { requested: Arc::default(), woken, preempted: PreemptedPods::default() }, receiver)
    }

    /// The pods that end for critical pods.
    pub(crate) fn preempted(&self) -> &PreemptedPods {
        &self.preempted
    }

    /// Removes and returns the requested eviction of this pod.
    pub(crate) fn take(&self, uid: &str) -> Option<Evicted> {
        self.lock().remove(uid)
    }

    /// Requests the eviction of this pod.
    pub(in crate::pod) fn request(&self, uid: &str, evicted: Evicted) {
        self.lock().insert(uid.to_owned(), evicted);
        // If the receiver is gone, pod sync has ended, and the agent ends, too.
        let _ = self.woken.send(uid.to_owned());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Removes evictions of pods that are not on this node any more.
    pub(super) fn retain(&self, keep: impl Fn(&str) -> bool) {
        self.lock().retain(|uid, _| keep(uid));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Evicted>> {
        self.requested.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_eviction_wakes_the_pod_and_is_taken_once() {
        let (evictions, mut woken) = Evictions::new();
        let evicted =
            Evicted { message: "m".to_owned(), cause: EvictionCause::Pressure("nodefs.available"), grace: 1 };
        evictions.request("u", evicted.clone());
        assert_eq!(woken.recv().await.as_deref(), Some("u"));
        assert_eq!(evictions.take("other"), None);
        assert!(!evictions.is_empty());
        assert_eq!(evictions.take("u"), Some(evicted.clone()));
        assert_eq!(evictions.take("u"), None);
        assert!(evictions.is_empty());
        evictions.request("gone", evicted);
        evictions.retain(|uid| uid == "u");
        assert_eq!(evictions.take("gone"), None);
    }
}

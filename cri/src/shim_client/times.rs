//! How long a caller has patience with a shim.

use std::time::Duration;

/// How long a shim is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// For an answer that takes no work.
    pub answer: Duration,
    /// For something to be made or started in the pod.
    pub work: Duration,
    /// For a container, or all of the pod, to be ended by it.
    pub end: Duration,
    /// For the death of a shim that was killed.
    pub death: Duration,
}

// === impl Times ===

impl Default for Times {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(10),
            work: Duration::from_secs(240),
            // It gives up itself on a cgroup that stays busy for half a minute.
            end: Duration::from_secs(40),
            death: Duration::from_secs(10),
        }
    }
}

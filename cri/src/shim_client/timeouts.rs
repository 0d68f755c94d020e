//! Timeouts of calls to shims.

use std::time::Duration;

/// Timeouts of calls to shims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For calls without long work.
    pub answer: Duration,
    /// For creating or starting a container or process.
    pub work: Duration,
    /// For ending a container or the whole pod.
    pub end: Duration,
    /// For the death of a killed shim.
    pub death: Duration,
}

// === impl Timeouts ===

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(10),
            work: Duration::from_secs(240),
            // The shim itself stops waiting for a busy cgroup after half a minute.
            end: Duration::from_secs(40),
            death: Duration::from_secs(10),
        }
    }
}

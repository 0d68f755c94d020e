//! Timeouts of calls to shims.

use std::time::Duration;

/// Timeouts of calls to shims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Timeout of calls without long work.
    pub answer: Duration,
    /// Timeout of the start of a shim, the creation or start of a container or process, and a connection to a port.
    pub work: Duration,
    /// Timeout of the end of a container or of the whole pod.
    pub end: Duration,
    /// Maximum wait for the exit of a killed shim.
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

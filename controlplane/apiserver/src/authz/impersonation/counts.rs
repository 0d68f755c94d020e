//! Counts and durations of impersonations, for the metrics.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec};

/// Counts and durations of impersonations.
pub(crate) struct ImpersonationCounts {
    /// Requests that impersonate a user, by the mode that allows the impersonation. The mode is empty if no mode allows
    /// it.
    pub(crate) attempts: Counted,
    /// Checks of single permissions.
    pub(crate) checks: Counted,
}

/// A counter and a histogram of durations in seconds, both with the labels `mode` and `decision`.
pub(crate) struct Counted {
    pub(crate) number: IntCounterVec,
    pub(crate) durations: HistogramVec,
}

// === impl Counted ===

impl Counted {
    pub(super) fn add(&self, mode: &'static str, is_allowed: bool, took: Duration) {
        let labels = [mode, if is_allowed { "allowed" } else { "denied" }];
        self.number.with_label_values(&labels).inc();
        self.durations.with_label_values(&labels).observe(took.as_secs_f64());
    }
}

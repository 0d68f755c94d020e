//! Metrics of configuration files that are read again.

use prometheus::{IntCounterVec, IntGaugeVec};

use super::{counter, gauge};

/// Reads of a changed configuration file: their number and the time of the last read, by status.
pub(super) struct Reloads {
    pub(super) count: IntCounterVec,
    pub(super) last: IntGaugeVec,
}

// === impl Reloads ===

impl Reloads {
    pub(super) fn new(subject: &str) -> Self {
        let name = |suffix: &str| format!("apiserver_{subject}_config_controller_automatic_{suffix}");
        let reloads = format!("automatic reloads of {subject} configuration split by status.");
        Self {
            count: counter(&name("reloads_total"), &format!("Total number of {reloads}"), &["status"]),
            last: gauge(
                &name("reload_last_timestamp_seconds"),
                &format!("Timestamp of the last of the {reloads}"),
                &["status"],
            ),
        }
    }

    /// Counts a reload, which was successful if the changed file is valid.
    pub(super) fn record(&self, is_valid: bool) {
        let status = [if is_valid { "success" } else { "failure" }];
        self.count.with_label_values(&status).inc();
        self.last.with_label_values(&status).set(jiff::Timestamp::now().as_second());
    }
}

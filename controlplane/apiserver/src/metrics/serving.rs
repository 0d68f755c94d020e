//! Metrics of serving: requests that a limit ended, long-running ones, and failed TLS handshakes.

use std::sync::Arc;

use prometheus::{IntCounterVec, IntGauge, IntGaugeVec, core::Collector};

use super::{Request, SLI_LABELS, counter, gauge, remove_resource};

/// Metrics of serving.
pub(crate) struct ServingMetrics {
    terminations: IntCounterVec,
    long_running: IntGaugeVec,
    handshake_errors: IntCounterVec,
}

/// Marks the response to a request that a limit of this server ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terminated;

/// Counts a long-running request until all clones are dropped. The body of the response holds one, and so does an
/// upgraded connection.
#[derive(Clone)]
pub(crate) struct LongRunning {
    _counted: Arc<Counted>,
}

struct Counted(IntGauge);

// === impl ServingMetrics ===

impl ServingMetrics {
    pub(super) fn new() -> Self {
        let with_code: Vec<&str> = SLI_LABELS.into_iter().chain(["code"]).collect();
        let metrics = Self {
            terminations: counter(
                "apiserver_request_terminations_total",
                "Number of requests which apiserver terminated in self-defense.",
                &with_code,
            ),
            long_running: gauge(
                "apiserver_longrunning_requests",
                "Gauge of all active long-running apiserver requests broken out by verb, group, version, resource, \
                 scope and component.",
                &SLI_LABELS,
            ),
            handshake_errors: counter(
                "apiserver_tls_handshake_errors_total",
                "Number of connections whose TLS handshake failed.",
                &[],
            ),
        };
        // The number is present before the first error.
        metrics.handshake_errors.with_label_values::<&str>(&[]);
        metrics
    }

    pub(super) fn collectors(&self) -> [Box<dyn Collector>; 3] {
        [
            Box::new(self.terminations.clone()),
            Box::new(self.long_running.clone()),
            Box::new(self.handshake_errors.clone()),
        ]
    }

    /// Counts a request that a limit on duration or number ended.
    pub(crate) fn terminated(&self, request: &Request, code: u16) {
        let code = code.to_string();
        let labels: Vec<&str> = request.sli_labels().into_iter().chain([code.as_str()]).collect();
        self.terminations.with_label_values(&labels).inc();
    }

    /// Counts a long-running request until the result is dropped.
    pub(crate) fn begin_long(&self, request: &Request) -> LongRunning {
        let gauge = self.long_running.with_label_values(&request.sli_labels());
        gauge.inc();
        LongRunning { _counted: Arc::new(Counted(gauge)) }
    }

    /// Removes the counts of a resource that is not served any more.
    pub(super) fn forget(&self, group: &str, plural: &str) {
        remove_resource(&self.terminations, group, plural);
        remove_resource(&self.long_running, group, plural);
    }

    /// Counts a connection without a complete TLS handshake.
    pub(crate) fn failed_handshake(&self) {
        self.handshake_errors.with_label_values::<&str>(&[]).inc();
    }
}

// === impl Counted ===

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

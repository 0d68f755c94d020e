//! Metrics of serving: requests that a limit ended, long-running requests, and failed TLS handshakes.

use std::sync::Arc;

use coracle_kinds::Resource;
use prometheus::{
    Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, core::Collector,
};

use super::{
    Request, SLI_LABELS,
    buckets::{EVENT_SIZES, INITIAL_EVENTS},
    counter, gauge, histogram, remove_resource,
};
use crate::{in_flight::WatchPermit, unread_bytes::Reader};

/// Labels of the events of watches.
const WATCH_LABELS: [&str; 3] = ["group", "version", "resource"];

/// Metrics of serving.
pub(crate) struct ServingMetrics {
    terminations: IntCounterVec,
    long_running: IntGaugeVec,
    handshake_errors: IntCounterVec,
    initial_events: HistogramVec,
    watch_events: IntCounterVec,
    watch_sizes: HistogramVec,
}

/// Marks the response to a request that a limit of this server ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terminated;

/// Counts a long-running request until all clones are dropped. The body of the response and an upgraded connection each
/// hold a clone.
#[derive(Clone)]
pub(crate) struct LongRunning {
    _counted: Arc<Counted>,
    _watch: Option<WatchPermit>,
    reader: Option<Arc<Reader>>,
}

struct Counted(IntGauge);

/// Counts the events of one watch. Each event changes only atomic numbers.
pub(crate) struct WatchEvents {
    number: IntCounter,
    sizes: Histogram,
}

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
            initial_events: histogram(
                "apiserver_watch_list_duration_seconds",
                "Seconds until all objects of a watch that begins with them are sent, by group, version, resource and \
                 scope.",
                &INITIAL_EVENTS,
                &["group", "version", "resource", "scope"],
            ),
            watch_events: counter(
                "apiserver_watch_events_total",
                "Number of events sent in watch clients.",
                &WATCH_LABELS,
            ),
            watch_sizes: histogram(
                "apiserver_watch_events_sizes",
                "Watch event size distribution in bytes.",
                &EVENT_SIZES,
                &WATCH_LABELS,
            ),
        };
        // The number is present before the first error.
        metrics.handshake_errors.with_label_values::<&str>(&[]);
        metrics
    }

    pub(super) fn collectors(&self) -> [Box<dyn Collector>; 6] {
        [
            Box::new(self.terminations.clone()),
            Box::new(self.long_running.clone()),
            Box::new(self.handshake_errors.clone()),
            Box::new(self.initial_events.clone()),
            Box::new(self.watch_events.clone()),
            Box::new(self.watch_sizes.clone()),
        ]
    }

    /// Counts a request that a limit on duration or number ended.
    pub(crate) fn terminated(&self, request: &Request, code: u16) {
        let code = code.to_string();
        let labels: Vec<&str> = request.sli_labels().into_iter().chain([code.as_str()]).collect();
        self.terminations.with_label_values(&labels).inc();
    }

    /// Counts a long-running request until the result is dropped. `watch` is the permit of a watch, or `None` if the
    /// request has no such permit. `reader` is the reader of the response.
    pub(crate) fn begin_long(
        &self,
        request: &Request,
        watch: Option<WatchPermit>,
        reader: Option<Arc<Reader>>,
    ) -> LongRunning {
        let gauge = self.long_running.with_label_values(&request.sli_labels());
        gauge.inc();
        LongRunning { _counted: Arc::new(Counted(gauge)), _watch: watch, reader }
    }

    /// The durations of watches until their first objects are sent. `namespace` and `name` are from the request. Each
    /// is empty if the request does not have it.
    pub(crate) fn initial_events(&self, kind: &Resource, namespace: &str, name: &str) -> Histogram {
        let scope = match (name, namespace) {
            ("", "") => "cluster",
            ("", _) => "namespace",
            _ => "resource",
        };
        self.initial_events.with_label_values(&[&*kind.group, &*kind.version, &*kind.plural, scope])
    }

    /// The counts of the events of a watch.
    pub(crate) fn watch_events(&self, kind: &Resource) -> WatchEvents {
        let labels = [&*kind.group, &*kind.version, &*kind.plural];
        WatchEvents {
            number: self.watch_events.with_label_values(&labels),
            sizes: self.watch_sizes.with_label_values(&labels),
        }
    }

    /// Removes the counts of a resource that is not served any more.
    pub(super) fn forget(&self, group: &str, plural: &str) {
        remove_resource(&self.terminations, group, plural);
        remove_resource(&self.long_running, group, plural);
        remove_resource(&self.initial_events, group, plural);
        remove_resource(&self.watch_events, group, plural);
        remove_resource(&self.watch_sizes, group, plural);
    }

    /// Counts a connection without a complete TLS handshake.
    pub(crate) fn failed_handshake(&self) {
        self.handshake_errors.with_label_values::<&str>(&[]).inc();
    }
}

// === impl WatchEvents ===

impl WatchEvents {
    /// Counts an event. `size` is its encoding in bytes.
    pub(crate) fn sent(&self, size: usize) {
        self.number.inc();
        #[expect(clippy::cast_precision_loss, reason = "an event has less than 2^53 bytes")]
        self.sizes.observe(size as f64);
    }
}

// === impl LongRunning ===

impl LongRunning {
    /// The reader of the response. `None` if its client is not authenticated.
    pub(crate) fn reader(&self) -> Option<Arc<Reader>> {
        self.reader.clone()
    }
}

// === impl Counted ===

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

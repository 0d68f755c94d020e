//! The kubelet's own metrics, with its names, labels and buckets.
//!
//! Source: `pkg/kubelet/metrics/metrics.go` and `pkg/kubelet/server/metrics/metrics.go`. Events are counted as they
//! occur; all other values are read when a client gets the metrics. Labels have values of fixed sets or names of a
//! limited number of plugins, never text of pods or requests, so their number is limited.

mod current;
mod devices;
mod endings;
mod images;
mod operations;
mod pods;
mod pull_times;
mod registered;
pub(crate) mod relist;
mod requests;
mod resizes;
mod resource_managers;
mod starts;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use coracle_process_metrics::ProcessMetrics;
use prometheus::{
    DEFAULT_BUCKETS, HistogramVec, IntCounterVec, Registry, TextEncoder, core::Collector, proto::MetricFamily,
};

use crate::client;
use crate::metric::valid;
use crate::proxy_metrics::ProxyMetrics;
pub(crate) use current::Current;
use devices::DeviceMetrics;
pub(crate) use devices::PodResourcesCall;
use endings::EndingMetrics;
use images::ImageMetrics;
pub(crate) use operations::{CgroupOperation, CgroupOperations, VolumeOperations, plugin};
use pods::PodMetrics;
pub(crate) use pull_times::PullTimes;
use registered::Registered;
pub(crate) use requests::RequestLabels;
use requests::RequestMetrics;
pub(crate) use resizes::{InfeasibleReason, RequestedChange, ResizeMetrics, RetryTrigger};
use resource_managers::ManagerMetrics;
pub(crate) use resource_managers::{Boundary, Scope};
use starts::StartMetrics;

/// Bounds in seconds of calls of the runtime. The first bound is 5 ms, and each further bound is 2.5 times the previous
/// bound.
const OPERATIONS: [f64; 14] = [
    0.005,
    0.0125,
    0.031_25,
    0.078_125,
    0.195_312_5,
    0.488_281_25,
    1.220_703_125,
    3.051_757_812_5,
    7.629_394_531_25,
    19.073_486_328_125,
    47.683_715_820_312_5,
    119.209_289_550_781_25,
    298.023_223_876_953_1,
    745.058_059_692_382_8,
];

/// Reasons of rejections that are values of the label, as in the kubelet.
const REJECTIONS: [&str; 10] = [
    "NodeShutdown",
    "OutOfExtendedResources",
    "OutOfcpu",
    "OutOfephemeral-storage",
    "OutOfmemory",
    "OutOfpods",
    "PodOSNotSupported",
    "SysctlForbidden",
    "TopologyAffinityError",
    "UnexpectedAdmissionError",
];

/// Counters and durations of the operations on this node.
pub struct KubeletMetrics {
    registry: Registry,
    operations: Operations,
    requests: RequestMetrics,
    starts: StartMetrics,
    pub(crate) resizes: ResizeMetrics,
    /// Pulls of pods that start.
    pub(crate) pull_times: PullTimes,
    syncs: HistogramVec,
    images: ImageMetrics,
    pub(crate) endings: EndingMetrics,
    pub(crate) pods: PodMetrics,
    rejections: IntCounterVec,
    managers: ManagerMetrics,
    devices: DeviceMetrics,
    /// Set if the node has a service proxy.
    proxy: OnceLock<ProxyMetrics>,
    /// The metric of the feature gates.
    features: OnceLock<Arc<str>>,
}

/// Calls of the runtime.
struct Operations {
    total: IntCounterVec,
    errors: IntCounterVec,
    durations: HistogramVec,
}

impl std::fmt::Debug for KubeletMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubeletMetrics").finish_non_exhaustive()
    }
}

impl Default for KubeletMetrics {
    fn default() -> Self {
        let registry = Registry::new();
        valid(registry.register(Box::new(ProcessMetrics::new())));
        let all = Registered(&registry);
        Self {
            operations: Operations::new(&all),
            requests: RequestMetrics::new(&all),
            starts: StartMetrics::new(&all),
            resizes: ResizeMetrics::new(&all),
            pull_times: PullTimes::default(),
            syncs: all.with_buckets(DEFAULT_BUCKETS).histograms(
                "pod_worker_duration_seconds",
                "Duration in seconds to sync a single pod. Broken down by operation type: create, sync or kill",
                &["operation_type"],
            ),
            images: ImageMetrics::new(&all),
            endings: EndingMetrics::new(&all),
            pods: PodMetrics::new(&all),
            rejections: all.counters(
                "admission_rejections_total",
                "Cumulative number pod admission rejections by the Kubelet.",
                &["reason"],
            ),
            managers: ManagerMetrics::new(&all),
            devices: DeviceMetrics::new(&all),
            proxy: OnceLock::new(),
            features: OnceLock::new(),
            registry,
        }
    }
}

// === impl Operations ===

impl Operations {
    fn new(all: &Registered<'_>) -> Self {
        let labels = ["operation_type"];
        Self {
            total: all.counters(
                "runtime_operations_total",
                "Cumulative number of runtime operations by operation type.",
                &labels,
            ),
            errors: all.counters(
                "runtime_operations_errors_total",
                "Cumulative number of runtime operation errors by operation type.",
                &labels,
            ),
            durations: all.with_buckets(&OPERATIONS).histograms(
                "runtime_operations_duration_seconds",
                "Duration in seconds of runtime operations. Broken down by operation type.",
                &labels,
            ),
        }
    }
}

// === impl KubeletMetrics ===

impl KubeletMetrics {
    /// Counts a call of the runtime.
    pub(crate) fn operation(&self, operation: &'static str, took: Duration, succeeded: bool) {
        self.operations.total.with_label_values(&[operation]).inc();
        self.operations.durations.with_label_values(&[operation]).observe(took.as_secs_f64());
        if !succeeded {
            self.operations.errors.with_label_values(&[operation]).inc();
        }
    }

    /// Counts a pass of a pod's worker, with the job that it started.
    pub(crate) fn synced(&self, operation: &'static str, took: Duration) {
        self.syncs.with_label_values(&[operation]).observe(took.as_secs_f64());
    }

    /// Counts a pod that was not admitted. Reasons that the kubelet does not have count as `Other`.
    pub(crate) fn rejected(&self, reason: &'static str) {
        let reason = if REJECTIONS.contains(&reason) { reason } else { "Other" };
        self.rejections.with_label_values(&[reason]).inc();
    }

    /// Adds a metric of another part of the agent. Its name must be unique.
    pub(crate) fn show(&self, metric: Box<dyn Collector>) {
        valid(self.registry.register(metric));
    }

    /// Shows the metric of the feature gates, in the text format of Prometheus.
    pub(crate) fn show_features(&self, features: Arc<str>) {
        // The gates do not change, so this is called once.
        let _ = self.features.set(features);
    }

    /// Shows the metrics of the node's service proxy.
    pub(crate) fn show_proxy(&self, proxy: ProxyMetrics) {
        // The node has one service proxy, so this is called once.
        let _ = self.proxy.set(proxy);
    }

    /// All metrics in Prometheus' text format, with the metrics that the caller has read.
    pub(crate) fn text(&self, current: &Current) -> String {
        let mut families = self.registry.gather();
        families.extend(current.0.iter().cloned());
        let proxy = self.proxy.get().map(ProxyMetrics::text).unwrap_or_default();
        let features = self.features.get().map(|features| features.to_string()).unwrap_or_default();
        [encoded(&families), features, proxy, client::measured::text(), relist::text()].concat()
    }
}

fn encoded(families: &[MetricFamily]) -> String {
    // Writing to memory cannot fail, and each family has samples.
    TextEncoder::new().encode_to_string(families).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines that begin with a text.
    fn lines(text: &str, start: &str) -> Vec<String> {
        text.lines().filter(|line| line.starts_with(start)).map(str::to_owned).collect()
    }

    #[test]
    fn events_have_the_kubelets_names_labels_and_buckets() {
        let metrics = KubeletMetrics::default();
        metrics.operation("run_podsandbox", Duration::from_millis(20), true);
        metrics.operation("run_podsandbox", Duration::from_secs(1000), false);
        metrics.pod_started(true);
        metrics.pod_started(false);
        metrics.container_started("container", None);
        metrics.container_started("init_container", Some("ErrImagePull"));
        metrics.user_namespaced_pod_started(true);
        metrics.user_namespaced_pod_started(false);
        metrics.container_terminated("container", 137, "OOMKilled");
        metrics.container_terminated("init_container", 1 << 20, "text of a runtime");
        metrics.worker_started(Duration::from_millis(1));
        metrics.synced("create", Duration::from_millis(30));
        metrics.pod_runs(Duration::from_secs(7));
        metrics.pulled(200 << 20, Duration::from_secs(2));
        metrics.endings.evicted("nodefs.available");
        metrics.sandbox_run("gvisor", Duration::from_millis(20), false);
        metrics.rejected("OutOfcpu");
        metrics.rejected("UnsupportedField");
        metrics.image_collected(true);
        let labels = RequestLabels { method: "GET", path: "metrics", is_long: false };
        metrics.request(labels, Duration::from_millis(3));
        metrics.request(RequestLabels { method: "POST", path: "exec", is_long: true }, Duration::ZERO);
        let text = metrics.text(&Current::default());
        for line in [
            "# TYPE kubelet_runtime_operations_total counter",
            "kubelet_runtime_operations_total{operation_type=\"run_podsandbox\"} 2",
            "kubelet_runtime_operations_errors_total{operation_type=\"run_podsandbox\"} 1",
            "kubelet_runtime_operations_duration_seconds_bucket{operation_type=\"run_podsandbox\",le=\"0.0125\"} 0",
            "kubelet_runtime_operations_duration_seconds_bucket{operation_type=\"run_podsandbox\",le=\"0.03125\"} 1",
            "kubelet_runtime_operations_duration_seconds_bucket{operation_type=\"run_podsandbox\",le=\"+Inf\"} 2",
            "kubelet_started_pods_total 2",
            "kubelet_started_pods_errors_total 1",
            "kubelet_started_user_namespaced_pods_total 2",
            "kubelet_started_user_namespaced_pods_errors_total 1",
            "kubelet_terminated_containers_total{container_type=\"container\",exit_code=\"137\",reason=\"OOMKilled\"} 1",
            "kubelet_terminated_containers_total{container_type=\"init_container\",exit_code=\"other\",reason=\"other\"} 1",
            "kubelet_started_containers_total{container_type=\"container\"} 1",
            "kubelet_started_containers_total{container_type=\"init_container\"} 1",
            "kubelet_started_containers_errors_total{code=\"ErrImagePull\",container_type=\"init_container\"} 1",
            "kubelet_pod_worker_start_duration_seconds_bucket{le=\"0.005\"} 1",
            "kubelet_pod_worker_duration_seconds_count{operation_type=\"create\"} 1",
            "kubelet_pod_start_duration_seconds_bucket{le=\"6\"} 0",
            "kubelet_pod_start_duration_seconds_bucket{le=\"8\"} 1",
            "kubelet_image_pull_duration_seconds_bucket{image_size_in_bytes=\"100MB-500MB\",le=\"5\"} 1",
            "kubelet_run_podsandbox_duration_seconds_count{runtime_handler=\"gvisor\"} 1",
            "kubelet_run_podsandbox_errors_total{runtime_handler=\"gvisor\"} 1",
            "kubelet_admission_rejections_total{reason=\"OutOfcpu\"} 1",
            "kubelet_admission_rejections_total{reason=\"Other\"} 1",
            "kubelet_image_garbage_collected_total{reason=\"age\"} 1",
            "kubelet_evictions{eviction_signal=\"nodefs.available\"} 1",
            "kubelet_http_requests_total{long_running=\"false\",method=\"GET\",path=\"metrics\",server_type=\"readwrite\"} 1",
            "kubelet_http_requests_total{long_running=\"true\",method=\"POST\",path=\"exec\",server_type=\"readwrite\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        assert_eq!(lines(&text, "kubelet_http_requests_duration_seconds_count").len(), 1, "{text}");
        assert_eq!(lines(&text, "process_resident_memory_bytes ").len(), 1, "{text}");
    }

    #[test]
    fn image_volumes_are_counted_by_their_result() {
        let metrics = KubeletMetrics::default();
        metrics.image_volumes_mounted(2, true);
        metrics.image_volumes_mounted(1, false);
        let text = metrics.text(&Current::default());
        for line in [
            "# TYPE kubelet_image_volume_requested_total counter",
            "kubelet_image_volume_requested_total 3",
            "kubelet_image_volume_mounted_succeed_total 2",
            "kubelet_image_volume_mounted_errors_total 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn the_service_proxy_is_shown_where_it_runs() {
        let metrics = KubeletMetrics::default();
        let line = "\nkubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 0\n";
        assert!(!metrics.text(&Current::default()).contains(line));
        metrics.show_proxy(ProxyMetrics::default());
        metrics.show_features("feature 1\n".into());
        let text = metrics.text(&Current::default());
        assert!(text.contains(line) && text.contains("\nfeature 1\n"), "{text}");
    }

    #[test]
    fn starts_since_the_creation_and_resizes_are_counted() {
        let metrics = KubeletMetrics::default();
        metrics.created_pod_runs(Duration::from_secs(9), Some(Duration::from_secs(4)));
        metrics.created_pod_runs(Duration::from_secs(20), None);
        metrics.resizes.infeasible(InfeasibleReason::NodeAllocatable);
        metrics.resizes.infeasible(InfeasibleReason::CpuManager);
        metrics.resizes.accepted_later(RetryTrigger::PodsRemoved);
        metrics.resizes.applied(true, Duration::from_millis(30));
        let text = metrics.text(&Current::default());
        for line in [
            "kubelet_pod_start_total_duration_seconds_sum 29",
            "kubelet_pod_start_sli_duration_seconds_sum 5",
            "kubelet_pod_infeasible_resizes_total{reason_detail=\"insufficient_node_allocatable\"} 1",
            "kubelet_pod_infeasible_resizes_total{reason_detail=\"guaranteed_pod_cpu_manager_static_policy\"} 1",
            "kubelet_pod_deferred_accepted_resizes_total{retry_trigger=\"pods_removed\"} 1",
            "kubelet_pod_resize_duration_milliseconds_bucket{success=\"true\",le=\"10\"} 0",
            "kubelet_pod_resize_duration_milliseconds_bucket{success=\"true\",le=\"50\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn values_of_the_moment_are_added_and_empty_ones_left_out() {
        let mut current = Current::default();
        current.gauge("node", "A node.", ["node"], [(["a\"\n".to_owned()], 1)]);
        current.gauge("empty_gauge", "Nothing.", ["x"], []);
        current.gauge("plain", "A number.", [], [([], 3)]);
        current.counter("dropped", "Packets.", 4);
        let text = KubeletMetrics::default().text(&current);
        assert_eq!(lines(&text, "node{"), ["node{node=\"a\\\"\\n\"} 1"], "{text}");
        assert!(!text.contains("empty_gauge") && text.contains("\nplain 3\n"), "{text}");
        assert!(text.contains("# TYPE dropped counter\ndropped 4\n"), "{text}");
        assert!(current.text().starts_with("# HELP node A node.\n"));
    }
}

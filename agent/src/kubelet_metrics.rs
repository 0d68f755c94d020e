//! The kubelet's own metrics, with its names, labels and buckets.
//!
//! Source: `pkg/kubelet/metrics/metrics.go` and `pkg/kubelet/server/metrics/metrics.go`. Events are counted as they occur;
//! all other values are read when a client gets the metrics. Labels have values of fixed sets or names of a limited
//! number of plugins, never text of pods or requests, so their number is limited.

mod current;
mod devices;
mod endings;
mod operations;
mod pods;
mod pull_times;
mod registered;
pub(crate) mod relist;
mod resizes;
mod resource_managers;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use coracle_process_metrics::ProcessMetrics;
use prometheus::{
    DEFAULT_BUCKETS, Histogram, HistogramVec, IntCounter, IntCounterVec, Registry, TextEncoder,
    core::Collector, proto::MetricFamily,
};

use crate::client;
use crate::metric::valid;
use crate::proxy_metrics::ProxyMetrics;
pub(crate) use current::Current;
use devices::DeviceMetrics;
pub(crate) use devices::PodResourcesCall;
use endings::EndingMetrics;
pub(crate) use operations::{CgroupOperation, CgroupOperations, VolumeOperations, plugin};
use pods::PodMetrics;
pub(crate) use pull_times::PullTimes;
use registered::Registered;
pub(crate) use resizes::{InfeasibleReason, RequestedChange, ResizeMetrics, RetryTrigger};
use resource_managers::ManagerMetrics;
pub(crate) use resource_managers::{Boundary, Scope};

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
/// Bounds in seconds of the start of a pod.
const POD_STARTS: [f64; 25] = [
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0,
    480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];
/// Bounds in seconds of an image pull.
const PULLS: [f64; 18] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0,
    2700.0, 3600.0,
];
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Names of image sizes, with the number of bytes that each exceeds.
const IMAGE_SIZES: [(u64, &str); 12] = [
    (100 * GIB, "GT100GB"),
    (60 * GIB, "60GB-100GB"),
    (40 * GIB, "40GB-60GB"),
    (30 * GIB, "30GB-40GB"),
    (20 * GIB, "20GB-30GB"),
    (10 * GIB, "10GB-20GB"),
    (5 * GIB, "5GB-10GB"),
    (GIB, "1GB-5GB"),
    (500 * MIB, "500MB-1GB"),
    (100 * MIB, "100MB-500MB"),
    (10 * MIB, "10MB-100MB"),
    (0, "0-10MB"),
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
/// Reasons of terminated containers that are values of the label.
const EXIT_REASONS: [&str; 8] = [
    "",
    "Completed",
    "Error",
    "OOMKilled",
    "StartError",
    "ContainerCannotRun",
    "ContainerStatusUnknown",
    "DeadlineExceeded",
];
/// The value of a label for all other reasons and codes.
const OTHER: &str = "other";

/// Counters and durations of the operations on this node.
pub struct KubeletMetrics {
    registry: Registry,
    operations: Operations,
    requests: Requests,
    starts: Starts,
    pub(crate) resizes: ResizeMetrics,
    /// Pulls of pods that start.
    pub(crate) pull_times: PullTimes,
    syncs: HistogramVec,
    pulls: HistogramVec,
    pub(crate) endings: EndingMetrics,
    pub(crate) pods: PodMetrics,
    rejections: IntCounterVec,
    collected_images: IntCounterVec,
    /// Numbers of image volumes: requested, mounted and failed. A volume counts as mounted if its container was created.
    image_volumes: [IntCounter; 3],
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

/// Requests to the kubelet API.
struct Requests {
    total: IntCounterVec,
    durations: HistogramVec,
}

/// Starts of workers, sandboxes, containers and pods.
struct Starts {
    workers: Histogram,
    sandboxes: IntCounter,
    sandbox_errors: IntCounter,
    sandbox_durations: HistogramVec,
    sandbox_errors_by_handler: IntCounterVec,
    user_namespaced: IntCounter,
    user_namespaced_errors: IntCounter,
    containers: IntCounterVec,
    container_errors: IntCounterVec,
    terminations: IntCounterVec,
    pods: Histogram,
    /// Durations from the creation of a pod until it runs, with and without its pulls and init containers.
    pods_since_creation: [Histogram; 2],
}

/// Labels of a request to the kubelet API.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLabels {
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    /// Whether the request is an exec, attach or port-forward.
    pub(crate) is_long: bool,
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
            requests: Requests::new(&all),
            starts: Starts::new(&all),
            resizes: ResizeMetrics::new(&all),
            pull_times: PullTimes::default(),
            syncs: all.with_buckets(DEFAULT_BUCKETS).histograms(
                "pod_worker_duration_seconds",
                "Duration in seconds to sync a single pod. Broken down by operation type: create, sync or kill",
                &["operation_type"],
            ),
            pulls: all.with_buckets(&PULLS).histograms(
                "image_pull_duration_seconds",
                "Duration in seconds to pull an image.",
                &["image_size_in_bytes"],
            ),
            endings: EndingMetrics::new(&all),
            pods: PodMetrics::new(&all),
            rejections: all.counters(
                "admission_rejections_total",
                "Cumulative number pod admission rejections by the Kubelet.",
                &["reason"],
            ),
            collected_images: all.counters(
                "image_garbage_collected_total",
                "Total number of images garbage collected by the kubelet, whether through disk usage or image age.",
                &["reason"],
            ),
            image_volumes: [
                all.counter("image_volume_requested_total", "Number of requested image volumes."),
                all.counter(
                    "image_volume_mounted_succeed_total",
                    "Number of successful image volume mounts.",
                ),
                all.counter("image_volume_mounted_errors_total", "Number of failed image volume mounts."),
            ],
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

// === impl Requests ===

impl Requests {
    fn new(all: &Registered<'_>) -> Self {
        let labels = ["method", "path", "server_type", "long_running"];
        Self {
            total: all.counters(
                "http_requests_total",
                "Number of the http requests received since the server started",
                &labels,
            ),
            durations: all.with_buckets(DEFAULT_BUCKETS).histograms(
                "http_requests_duration_seconds",
                "Duration in seconds until the response of a http request begins",
                &labels,
            ),
        }
    }
}

// === impl Starts ===

impl Starts {
    fn new(all: &Registered<'_>) -> Self {
        Self {
            workers: all.with_buckets(DEFAULT_BUCKETS).histogram(
                "pod_worker_start_duration_seconds",
                "Duration in seconds from kubelet seeing a pod to starting a worker.",
            ),
            sandboxes: all.counter("started_pods_total", "Cumulative number of pods started"),
            sandbox_errors: all
                .counter("started_pods_errors_total", "Cumulative number of errors when starting pods"),
            sandbox_durations: all.with_buckets(DEFAULT_BUCKETS).histograms(
                "run_podsandbox_duration_seconds",
                "Duration in seconds of the run_podsandbox operations. Broken down by RuntimeClass.Handler.",
                &["runtime_handler"],
            ),
            sandbox_errors_by_handler: all.counters(
                "run_podsandbox_errors_total",
                "Cumulative number of the run_podsandbox operation errors by RuntimeClass.Handler.",
                &["runtime_handler"],
            ),
            user_namespaced: all.counter(
                "started_user_namespaced_pods_total",
                "Cumulative number of pods with user namespaces started. This metric will only be collected on Linux.",
            ),
            user_namespaced_errors: all.counter(
                "started_user_namespaced_pods_errors_total",
                "Cumulative number of errors when starting pods with user namespaces. \
                 This metric will only be collected on Linux.",
            ),
            containers: all.counters(
                "started_containers_total",
                "Cumulative number of containers started",
                &["container_type"],
            ),
            container_errors: all.counters(
                "started_containers_errors_total",
                "Cumulative number of errors when starting containers",
                &["container_type", "code"],
            ),
            terminations: all.counters(
                "terminated_containers_total",
                "Cumulative number of container terminations.",
                &["container_type", "exit_code", "reason"],
            ),
            pods: all.with_buckets(&POD_STARTS).histogram(
                "pod_start_duration_seconds",
                "Duration in seconds from kubelet seeing a pod for the first time to the pod starting to run",
            ),
            pods_since_creation: [
                all.with_buckets(&POD_STARTS).histogram(
                    "pod_start_total_duration_seconds",
                    "Duration in seconds from the creation of a pod until it runs, with the time to pull images and to \
                     run init containers",
                ),
                all.with_buckets(&POD_STARTS).histogram(
                    "pod_start_sli_duration_seconds",
                    "Duration in seconds from the creation of a pod without persistent volumes until it runs, without the \
                     time to pull images and to run init containers",
                ),
            ],
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

    /// Counts a request to the kubelet API. `took` is the time until the response begins. The kubelet's duration of an
    /// exec, attach or port-forward includes the session. So no duration of these requests is recorded here.
    pub(crate) fn request(&self, labels: RequestLabels, took: Duration) {
        let values = [labels.method, labels.path, "readwrite", if labels.is_long { "true" } else { "false" }];
        self.requests.total.with_label_values(&values).inc();
        if !labels.is_long {
            self.requests.durations.with_label_values(&values).observe(took.as_secs_f64());
        }
    }

    /// Counts an attempt to start a sandbox.
    pub(crate) fn pod_started(&self, succeeded: bool) {
        self.starts.sandboxes.inc();
        if !succeeded {
            self.starts.sandbox_errors.inc();
        }
    }

    /// Counts a call that runs a sandbox, by the handler of its RuntimeClass. Only administrators make RuntimeClasses,
    /// so the label has few values.
    pub(crate) fn sandbox_run(&self, handler: &str, took: Duration, succeeded: bool) {
        self.starts.sandbox_durations.with_label_values(&[handler]).observe(took.as_secs_f64());
        if !succeeded {
            self.starts.sandbox_errors_by_handler.with_label_values(&[handler]).inc();
        }
    }

    /// Counts an attempt to start the sandbox of a pod with a user namespace. [`Self::pod_started`] counts it as well.
    pub(crate) fn user_namespaced_pod_started(&self, succeeded: bool) {
        self.starts.user_namespaced.inc();
        if !succeeded {
            self.starts.user_namespaced_errors.inc();
        }
    }

    /// Counts the end of a container. `kind` is as for [`Self::container_started`]. Another runtime may report any
    /// reason and any code, so unknown reasons and unknown codes are counted together.
    pub(crate) fn container_terminated(&self, kind: &'static str, code: i32, reason: &str) {
        let code = if (0..=255).contains(&code) { code.to_string() } else { OTHER.to_owned() };
        let reason = EXIT_REASONS.into_iter().find(|known| *known == reason).unwrap_or(OTHER);
        self.starts.terminations.with_label_values(&[kind, code.as_str(), reason]).inc();
    }

    /// Counts an attempt to start a container. `kind` is `container`, `init_container` or `ephemeral_container`.
    /// `failure` is the reason in the container's status. The reason is a constant of this code.
    pub(crate) fn container_started(&self, kind: &'static str, failure: Option<&str>) {
        self.starts.containers.with_label_values(&[kind]).inc();
        if let Some(reason) = failure {
            self.starts.container_errors.with_label_values(&[kind, reason]).inc();
        }
    }

    /// Counts the start of a pod's worker. `after` is the time since the pod was received.
    pub(crate) fn worker_started(&self, after: Duration) {
        self.starts.workers.observe(after.as_secs_f64());
    }

    /// Counts a pass of a pod's worker, with the job that it started.
    pub(crate) fn synced(&self, operation: &'static str, took: Duration) {
        self.syncs.with_label_values(&[operation]).observe(took.as_secs_f64());
    }

    /// Counts a pod that runs. `after` is the time since the pod was received.
    pub(crate) fn pod_runs(&self, after: Duration) {
        self.starts.pods.observe(after.as_secs_f64());
    }

    /// Observes the time from the creation of a pod until it runs. `excluded` is the part of this time for pulls and
    /// init containers. `None` if the SLI does not include the pod.
    pub(crate) fn created_pod_runs(&self, after: Duration, excluded: Option<Duration>) {
        let [total, sli] = &self.starts.pods_since_creation;
        total.observe(after.as_secs_f64());
        if let Some(excluded) = excluded {
            sli.observe(after.saturating_sub(excluded).as_secs_f64());
        }
    }

    /// Counts a successful image pull. `size` is the size of the image in bytes, 0 if unknown.
    pub(crate) fn pulled(&self, size: u64, took: Duration) {
        self.pulls.with_label_values(&[image_size(size)]).observe(took.as_secs_f64());
    }

    /// Counts a pod that was not admitted. Reasons that the kubelet does not have count as `Other`.
    pub(crate) fn rejected(&self, reason: &'static str) {
        let reason = if REJECTIONS.contains(&reason) { reason } else { "Other" };
        self.rejections.with_label_values(&[reason]).inc();
    }

    /// Counts the removal of an unused image, because of its age or for space.
    pub(crate) fn image_collected(&self, for_age: bool) {
        self.collected_images.with_label_values(&[if for_age { "age" } else { "space" }]).inc();
    }

    /// Adds a metric of another part of the agent. Its name must be unique.
    pub(crate) fn show(&self, metric: Box<dyn Collector>) {
        valid(self.registry.register(metric));
    }

    /// Counts image volumes of a container, and whether the container could be created.
    pub(crate) fn image_volumes_mounted(&self, number: usize, succeeded: bool) {
        let number = u64::try_from(number).unwrap_or(u64::MAX);
        let [requested, mounted, failed] = &self.image_volumes;
        requested.inc_by(number);
        let result = if succeeded { mounted } else { failed };
        result.inc_by(number);
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

/// The name of an image's size.
fn image_size(bytes: u64) -> &'static str {
    IMAGE_SIZES.iter().find(|(above, _)| bytes > *above).map_or("N/A", |&(_, name)| name)
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

    #[test]
    fn sizes_of_images_are_those_of_the_kubelet() {
        let names = [0, 1, 10 << 20, (10 << 20) + 1, 3 << 30, 200 << 30].map(image_size);
        assert_eq!(names, ["N/A", "0-10MB", "0-10MB", "10MB-100MB", "1GB-5GB", "GT100GB"]);
    }
}

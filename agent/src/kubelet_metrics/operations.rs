//! Durations of operations on volumes and cgroups. The parts that run the operations make these metrics; the metrics of
//! the node show them.

use std::future::Future;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Volume;
use prometheus::{DEFAULT_BUCKETS, HistogramOpts, HistogramVec, core::Collector};

use super::valid;

/// Bounds in seconds of an operation on a volume.
const STORAGE: [f64; 13] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// `storage_operation_duration_seconds`. A clone shares the durations.
#[derive(Clone, Debug)]
pub(crate) struct VolumeOperations(HistogramVec);

/// `kubelet_cgroup_manager_duration_seconds`. A clone shares the durations.
#[derive(Clone, Debug)]
pub(crate) struct CgroupOperations(HistogramVec);

/// An operation on the cgroup of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CgroupOperation {
    Create,
    Update,
    Destroy,
}

// === impl VolumeOperations ===

impl Default for VolumeOperations {
    fn default() -> Self {
        let name = "storage_operation_duration_seconds";
        let opts = HistogramOpts::new(name, "Duration of an operation on a volume in seconds.");
        let labels = ["volume_plugin", "operation_name", "status", "migrated"];
        Self(valid(HistogramVec::new(opts.buckets(STORAGE.to_vec()), &labels)))
    }
}

impl VolumeOperations {
    /// Counts the mount of a volume. `plugin` is a result of the function [`plugin`].
    pub(crate) fn mounted(&self, plugin: &'static str, succeeded: bool, took: Duration) {
        let status = if succeeded { "success" } else { "fail-unknown" };
        let labels = [plugin, "volume_mount", status, "false"];
        self.0.with_label_values(&labels).observe(took.as_secs_f64());
    }

    /// The metric, for a registry.
    pub(crate) fn collector(&self) -> Box<dyn Collector> {
        Box::new(self.0.clone())
    }
}

// === impl CgroupOperations ===

impl Default for CgroupOperations {
    fn default() -> Self {
        let name = "kubelet_cgroup_manager_duration_seconds";
        let opts = HistogramOpts::new(name, "Duration of an operation on the cgroup of a pod in seconds.");
        Self(valid(HistogramVec::new(opts.buckets(DEFAULT_BUCKETS.to_vec()), &["operation_type"])))
    }
}

impl CgroupOperations {
    /// Runs an operation and counts it.
    pub(crate) async fn measure<T>(&self, operation: CgroupOperation, work: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let result = work.await;
        let name = match operation {
            CgroupOperation::Create => "create",
            CgroupOperation::Update => "update",
            CgroupOperation::Destroy => "destroy",
        };
        self.0.with_label_values(&[name]).observe(began.elapsed().as_secs_f64());
        result
    }

    /// The metric, for a registry.
    pub(crate) fn collector(&self) -> Box<dyn Collector> {
        Box::new(self.0.clone())
    }
}

/// The kubelet's name of a volume's plugin. For a claim, the plugin is known only from the persistent volume.
pub(crate) fn plugin(volume: &Volume) -> &'static str {
    let kinds = [
        (volume.config_map.is_some(), "kubernetes.io/configmap"),
        (volume.downward_api.is_some(), "kubernetes.io/downward-api"),
        (volume.empty_dir.is_some(), "kubernetes.io/empty-dir"),
        (volume.host_path.is_some(), "kubernetes.io/host-path"),
        (volume.image.is_some(), "kubernetes.io/image"),
        (volume.nfs.is_some(), "kubernetes.io/nfs"),
        (volume.projected.is_some(), "kubernetes.io/projected"),
        (volume.secret.is_some(), "kubernetes.io/secret"),
        (volume.persistent_volume_claim.is_some(), "kubernetes.io/persistent-claim"),
        (volume.ephemeral.is_some(), "kubernetes.io/persistent-claim"),
    ];
    kinds.into_iter().find(|(has, _)| *has).map_or("N/A", |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::super::{Current, KubeletMetrics};
    use super::*;

    #[tokio::test]
    async fn operations_have_the_names_labels_and_buckets_of_the_kubelet() {
        let (volumes, cgroups) = (VolumeOperations::default(), CgroupOperations::default());
        let metrics = KubeletMetrics::default();
        metrics.show(volumes.collector());
        metrics.show(cgroups.collector());
        volumes.mounted("kubernetes.io/secret", true, Duration::from_millis(200));
        volumes.mounted("kubernetes.io/nfs", false, Duration::from_secs(20));
        cgroups.measure(CgroupOperation::Create, async {}).await;
        cgroups.measure(CgroupOperation::Update, async {}).await;
        assert_eq!(cgroups.measure(CgroupOperation::Destroy, async { 7 }).await, 7);
        let text = metrics.text(&Current::default());
        let mount = |plugin: &str, status: &str| {
            format!(
                "migrated=\"false\",operation_name=\"volume_mount\",status=\"{status}\",volume_plugin=\"kubernetes.io/{plugin}\""
            )
        };
        let [secret, nfs] = [mount("secret", "success"), mount("nfs", "fail-unknown")];
        for line in [
            "# TYPE storage_operation_duration_seconds histogram".to_owned(),
            format!("storage_operation_duration_seconds_bucket{{{secret},le=\"0.1\"}} 0"),
            format!("storage_operation_duration_seconds_bucket{{{secret},le=\"0.25\"}} 1"),
            format!("storage_operation_duration_seconds_count{{{nfs}}} 1"),
            "# TYPE kubelet_cgroup_manager_duration_seconds histogram".to_owned(),
            "kubelet_cgroup_manager_duration_seconds_count{operation_type=\"create\"} 1".to_owned(),
            "kubelet_cgroup_manager_duration_seconds_count{operation_type=\"update\"} 1".to_owned(),
            "kubelet_cgroup_manager_duration_seconds_count{operation_type=\"destroy\"} 1".to_owned(),
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }
}

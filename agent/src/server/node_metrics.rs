//! `/metrics`: the kubelet's own metrics. The numbers of pods and containers, and the usage of volumes, are read for
//! each response.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_proto::cri::{
    ContainerState, ListContainersRequest, ListPodSandboxRequest, PodSandbox, PodSandboxState,
};
use http::Response;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{NodeSystemInfo, Pod, PodStatus};

use super::backend::{Backend, PodView};
use super::respond::on_blocking_thread;
use super::stats::exposition;
use crate::join::Renewal;
use crate::kubelet_metrics::{Current, plugin};
use crate::runtime::{Body, Runtime, RuntimeError};
use crate::source;
use crate::volume::{ClaimName, FileSystem};

/// Label with the state of containers.
const STATE: &str = "container_state";
/// Values of the label [`STATE`], in the order of [`Running::containers`].
const STATES: [(ContainerState, &str); 4] = [
    (ContainerState::ContainerCreated, "created"),
    (ContainerState::ContainerRunning, "running"),
    (ContainerState::ContainerExited, "exited"),
    (ContainerState::ContainerUnknown, "unknown"),
];

/// The pods with a ready sandbox, and the containers in each of [`STATES`].
#[derive(Debug, PartialEq, Eq)]
struct Running {
    pods: u64,
    containers: [u64; STATES.len()],
}

/// Answers a scrape.
pub(super) async fn metrics(backend: &Backend) -> Response<Body> {
    let mut current = Current::default();
    let node = backend.access.node().to_owned();
    current.gauge("kubelet_node_name", "The node's name. The count is always 1.", ["node"], [([node], 1)]);
    build_info(&mut current, &backend.properties.info);
    if let Some(cgroups) = &backend.cgroups {
        let version = if cgroups.is_v2() { 2 } else { 1 };
        current.gauge("kubelet_cgroup_version", "cgroup version of the node.", [], [([], version)]);
    }
    desired(&mut current, &*backend.pods);
    working(&mut current, &*backend.pods);
    match running(&*backend.runtime).await {
        Ok(running) => running.add(&mut current),
        // The other metrics show the failed calls.
        Err(error) => tracing::debug!(error = error.message(), "cannot count the running pods for a scrape"),
    }
    certificates(&mut current, backend.identity.renewals(), Timestamp::now());
    volumes(&mut current, &*backend.pods);
    resizes(&mut current, &*backend.pods);
    claims(&mut current, backend.claims.of(backend.pods.pods()).await);
    dropped_packets(&mut current, backend).await;
    let (metrics, dns) = (Arc::clone(&backend.metrics), backend.dns.clone());
    on_blocking_thread(move || {
        let mut text = metrics.text(&current);
        if let Some(dns) = &dns {
            text.push_str(&dns.render());
        }
        exposition(text)
    })
    .await
}

/// The version of the agent, as labels.
fn build_info(current: &mut Current, info: &NodeSystemInfo) {
    let platform = format!("linux/{}", info.architecture);
    let mut numbers = info.kubelet_version.trim_start_matches('v').split('.');
    let [major, minor] = [(); 2].map(|()| numbers.next().unwrap_or_default());
    let fields = [
        ("major", major),
        ("minor", minor),
        ("git_version", info.kubelet_version.as_str()),
        ("git_commit", ""),
        ("git_tree_state", "clean"),
        ("build_date", "1970-01-01T00:00:00Z"),
        ("go_version", ""),
        ("compiler", "rustc"),
        ("platform", platform.as_str()),
    ];
    let help =
        "A metric with a constant '1' value, whose labels are the version of the agent and the platform.";
    let labels = fields.map(|(label, _)| label);
    current.gauge("kubernetes_build_info", help, labels, [(fields.map(|(_, value)| value.to_owned()), 1)]);
}

/// `/metrics/slis`: results of health checks. `/healthz` has one check, which succeeds whenever the server answers.
pub(super) fn health() -> Response<Body> {
    let mut current = Current::default();
    let check = ["ping".to_owned(), "healthz".to_owned()];
    let help = "This metric records the result of a single healthcheck.";
    current.gauge("kubernetes_healthcheck", help, ["name", "type"], [(check, 1)]);
    exposition(current.text())
}

/// Numbers of desired and active pods. Each admitted static pod has a mirror pod.
fn desired(current: &mut Current, pods: &dyn PodView) {
    let all = pods.pods();
    let is_static = |pod: &&Arc<Pod>| pod.metadata.uid.as_deref().is_some_and(source::is_static);
    let statics = all.iter().filter(is_static).count();
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let samples = |number: usize| {
        let others = number.saturating_sub(statics);
        [([String::new()], count(others)), (["true".to_owned()], count(number - others))]
    };
    let of_pod =
        |pod: &Arc<Pod>| pod.spec.as_ref().and_then(|spec| Some(spec.ephemeral_containers.as_ref()?.len()));
    let ephemeral: usize = all.iter().filter_map(of_pod).sum();
    let help = "Current number of ephemeral containers in pods managed by this kubelet.";
    current.gauge("kubelet_managed_ephemeral_containers", help, [], [([], count(ephemeral))]);
    let help = "The number of mirror pods the kubelet will try to create (one per admitted static pod).";
    let mirrors = statics.saturating_sub(pods.rejected_statics());
    current.gauge("kubelet_mirror_pods", help, [], [([], count(mirrors))]);
    current.gauge(
        "kubelet_desired_pods",
        "The number of pods the kubelet is being instructed to run. static is true if the pod is not from the apiserver.",
        ["static"],
        samples(all.len()),
    );
    current.gauge(
        "kubelet_active_pods",
        "The number of pods the kubelet considers active and which are being considered when admitting new pods. \
         static is true if the pod is not from the apiserver.",
        ["static"],
        samples(pods.active()),
    );
}

/// Numbers of pods by lifecycle phase, by origin (desired, orphan or only in the runtime), and by whether they are
/// static.
fn working(current: &mut Current, pods: &dyn PodView) {
    const ORIGINS: [[&str; 2]; 5] = [
        ["desired", ""],
        ["desired", "true"],
        ["orphan", ""],
        ["orphan", "true"],
        ["runtime_only", "unknown"],
    ];
    let mut counts: BTreeMap<[&str; 3], u64> = BTreeMap::new();
    for lifecycle in ["sync", "terminating", "terminated"] {
        counts.extend(ORIGINS.map(|[config, is_static]| ([lifecycle, config, is_static], 0)));
    }
    let mut orphans = pods.orphans();
    for pod in pods.pods() {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let is_orphan = orphans.remove(uid);
        let phase = current_status(pods, &pod).and_then(|status| status.phase);
        let lifecycle = match phase.as_deref() {
            Some("Failed" | "Succeeded") => "terminated",
            _ if is_orphan || pod.metadata.deletion_timestamp.is_some() => "terminating",
            _ => "sync",
        };
        let config = if is_orphan { "orphan" } else { "desired" };
        let is_static = if source::is_static(uid) { "true" } else { "" };
        *counts.entry([lifecycle, config, is_static]).or_default() += 1;
    }
    let left = u64::try_from(orphans.len()).unwrap_or(u64::MAX);
    counts.insert(["terminating", "runtime_only", "unknown"], left);
    current.gauge(
        "kubelet_working_pods",
        "Number of pods the kubelet is actually running, broken down by lifecycle phase, whether the pod is desired, \
         orphaned, or runtime only (also orphaned), and whether the pod is static.",
        ["lifecycle", "config", "static"],
        counts.into_iter().map(|(labels, number)| (labels.map(str::to_owned), number)),
    );
}

/// The remaining validity of the client certificate and the serving certificate, 0 after their end, and the failures to
/// renew them. Certificates that the agent does not renew have no metrics.
fn certificates(current: &mut Current, renewals: [Option<Renewal>; 2], now: Timestamp) {
    // The names of the two counters have different forms, as in the kubelet.
    let kinds = [
        ("client", "kubelet_certificate_manager_client_expiration_renew_errors"),
        ("server", "kubelet_server_expiration_renew_errors"),
    ];
    for ((kind, failures), renewal) in kinds.into_iter().zip(renewals) {
        let Some(renewal) = renewal else { continue };
        current.counter(failures, "Counter of certificate renewal errors.", renewal.failures);
        let left =
            renewal.until.map(|end| u64::try_from(end.as_second() - now.as_second()).unwrap_or_default());
        let name = format!("kubelet_certificate_manager_{kind}_ttl_seconds");
        let help = format!("Gauge of the TTL (time-to-live) of the Kubelet's {kind} certificate in seconds.");
        current.gauge(&name, &help, [], left.map(|left| ([], left)));
    }
}

/// Counts the volumes of all pods, and of running pods, by the kubelet's name of their plugin.
fn volumes(current: &mut Current, pods: &dyn PodView) {
    let mut counts: BTreeMap<[String; 2], u64> = BTreeMap::new();
    for pod in pods.pods() {
        let phase = current_status(pods, &pod).and_then(|status| status.phase);
        let states: &[&str] = match phase.as_deref() {
            Some("Failed" | "Succeeded") => &[],
            Some("Running") => &["desired_state_of_world", "actual_state_of_world"],
            _ => &["desired_state_of_world"],
        };
        let plugins = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()).map(plugin);
        for (plugin, state) in plugins.flat_map(|plugin| states.iter().map(move |state| (plugin, *state))) {
            *counts.entry([plugin.to_owned(), state.to_owned()]).or_default() += 1;
        }
    }
    let help = "Number of volumes in Volume Manager";
    current.gauge("volume_manager_total_volumes", help, ["plugin_name", "state"], counts);
}

/// Numbers of pods with a pending resize and with a resize in progress, by their conditions.
fn resizes(current: &mut Current, pods: &dyn PodView) {
    let (mut deferred, mut infeasible, mut running) = (0, 0, 0);
    for pod in pods.pods() {
        let Some(status) = current_status(pods, &pod) else { continue };
        for condition in status.conditions.into_iter().flatten() {
            match (condition.type_.as_str(), condition.reason.as_deref()) {
                ("PodResizePending", Some("Infeasible")) => infeasible += 1,
                ("PodResizePending", _) => deferred += 1,
                ("PodResizeInProgress", _) => running += 1,
                _ => {}
            }
        }
    }
    let waiting = [(["deferred".to_owned()], deferred), (["infeasible".to_owned()], infeasible)];
    current.gauge("kubelet_pod_pending_resizes", "Number of pending resizes for pods.", ["reason"], waiting);
    let help = "Number of in-progress resizes for pods.";
    current.gauge("kubelet_pod_in_progress_resizes", help, [], [([], running)]);
}

/// The newest status that the node has computed, or the status in the API.
fn current_status(pods: &dyn PodView, pod: &Pod) -> Option<PodStatus> {
    pod.metadata.uid.as_deref().and_then(|uid| pods.status(uid)).or_else(|| pod.status.clone())
}

/// The volumes of claims.
fn claims(current: &mut Current, volumes: BTreeMap<ClaimName, FileSystem>) {
    type Value = fn(&FileSystem) -> u64;
    let metrics: [(&str, &str, Value); 6] = [
        ("capacity_bytes", "Capacity in bytes of the volume", |volume| volume.capacity),
        ("available_bytes", "Number of available bytes in the volume", |volume| volume.available),
        ("used_bytes", "Number of used bytes in the volume", |volume| volume.used),
        ("inodes", "Maximum number of inodes in the volume", |volume| volume.inodes),
        ("inodes_free", "Number of free inodes in the volume", |volume| volume.inodes_free),
        ("inodes_used", "Number of used inodes in the volume", |volume| volume.inodes_used),
    ];
    for (name, help, value) in metrics {
        let samples = volumes
            .iter()
            .map(|((namespace, claim), volume)| ([namespace.clone(), claim.clone()], value(volume)));
        let name = format!("kubelet_volume_stats_{name}");
        current.gauge(&name, help, ["namespace", "persistentvolumeclaim"], samples);
    }
}

/// The packets that the limit on the connections of pods has dropped.
async fn dropped_packets(current: &mut Current, backend: &Backend) {
    let Some(network) = backend.network.clone() else { return };
    let read = coracle_threads::spawn_blocking(move || network.dropped_by_connection_limit());
    if let Ok(Some(packets)) = read.await {
        current.counter(
            "coracle_connection_limit_dropped_packets_total",
            "Number of packets that the limit on the connections of pods dropped.",
            packets,
        );
    }
}

async fn running(runtime: &dyn Runtime) -> Result<Running, RuntimeError> {
    let sandboxes = runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await?.items;
    let containers = runtime.list_containers(ListContainersRequest::default()).await?.containers;
    let is_ready = |sandbox: &&PodSandbox| sandbox.state() == PodSandboxState::SandboxReady;
    let mut running = Running { pods: 0, containers: [0; STATES.len()] };
    sandboxes.iter().filter(is_ready).for_each(|_| running.pods += 1);
    for container in containers {
        let known = STATES.iter().zip(&mut running.containers);
        known.filter(|((state, _), _)| *state == container.state()).for_each(|(_, number)| *number += 1);
    }
    Ok(running)
}

// === impl Running ===

impl Running {
    fn add(&self, current: &mut Current) {
        current.gauge(
            "kubelet_running_pods",
            "Number of pods that have a running pod sandbox",
            [],
            [([], self.pods)],
        );
        let containers = STATES.iter().zip(self.containers);
        current.gauge(
            "kubelet_running_containers",
            "Number of containers currently running",
            [STATE],
            containers.map(|((_, name), number)| ([(*name).to_owned()], number)),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    struct Two;

    impl PodView for Two {
        fn pods(&self) -> Vec<Arc<Pod>> {
            vec![Arc::default(), Arc::default()]
        }

        fn active(&self) -> usize {
            1
        }
    }

    struct Listed(Vec<Arc<Pod>>);

    /// Four pods, of which one is an orphan, and an orphan of the runtime.
    struct Orphans;

    impl PodView for Orphans {
        fn pods(&self) -> Vec<Arc<Pod>> {
            let pod = |uid: &str, phase: &str, deleted: Option<&str>| -> Arc<Pod> {
                let metadata = serde_json::json!({"uid": uid, "deletionTimestamp": deleted});
                let pod = serde_json::json!({"metadata": metadata, "status": {"phase": phase}});
                Arc::new(serde_json::from_value(pod).unwrap())
            };
            vec![
                pod("runs", "Running", None),
                pod("deleted", "Running", Some("2026-01-02T03:04:05Z")),
                pod("0123456789abcdef0123456789abcdef", "Running", None),
                pod("done", "Succeeded", None),
            ]
        }

        fn orphans(&self) -> HashSet<String> {
            ["0123456789abcdef0123456789abcdef", "of-runtime"].map(str::to_owned).into()
        }

        fn rejected_statics(&self) -> usize {
            1
        }
    }

    #[test]
    fn a_rejected_static_pod_has_no_mirror_pod() {
        let mut current = Current::default();
        desired(&mut current, &Orphans);
        let text = current.text();
        for line in ["kubelet_mirror_pods 0", "kubelet_desired_pods{static=\"true\"} 1"] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn working_pods_are_counted_by_lifecycle_and_origin() {
        let mut current = Current::default();
        working(&mut current, &Orphans);
        let text = current.text();
        for (config, lifecycle, is_static, count) in [
            ("desired", "sync", "", 1),
            ("desired", "sync", "true", 0),
            ("desired", "terminating", "", 1),
            ("desired", "terminated", "", 1),
            ("orphan", "terminating", "true", 1),
            ("runtime_only", "terminating", "unknown", 1),
            ("runtime_only", "sync", "unknown", 0),
        ] {
            let labels = format!("config=\"{config}\",lifecycle=\"{lifecycle}\",static=\"{is_static}\"");
            let line = format!("kubelet_working_pods{{{labels}}} {count}");
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    impl PodView for Listed {
        fn pods(&self) -> Vec<Arc<Pod>> {
            self.0.clone()
        }
    }

    #[test]
    fn the_version_of_the_agent_is_shown() {
        let info = NodeSystemInfo {
            architecture: "amd64".to_owned(),
            kubelet_version: "v1.36.0+coracle.0.1.0".to_owned(),
            ..NodeSystemInfo::default()
        };
        let mut current = Current::default();
        build_info(&mut current, &info);
        let labels = "build_date=\"1970-01-01T00:00:00Z\",compiler=\"rustc\",git_commit=\"\",\
                      git_tree_state=\"clean\",git_version=\"v1.36.0+coracle.0.1.0\",go_version=\"\",\
                      major=\"1\",minor=\"36\",platform=\"linux/amd64\"";
        let line = format!("kubernetes_build_info{{{labels}}} 1");
        assert!(current.text().lines().any(|other| other == line), "no {line} in\n{}", current.text());
    }

    #[test]
    fn volumes_are_counted_by_plugin_and_state() {
        let pod = |phase: &str| -> Arc<Pod> {
            let volumes = serde_json::json!([{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}},
                {"name": "c", "configMap": {"name": "m"}}]);
            let pod = serde_json::json!({"spec": {"containers": [], "volumes": volumes}, "status": {"phase": phase}});
            Arc::new(serde_json::from_value(pod).unwrap())
        };
        let mut current = Current::default();
        volumes(&mut current, &Listed(vec![pod("Running"), pod("Pending"), pod("Failed")]));
        let text = current.text();
        for (plugin, state, count) in [
            ("empty-dir", "actual", 2),
            ("empty-dir", "desired", 4),
            ("configmap", "actual", 1),
            ("configmap", "desired", 2),
        ] {
            let labels = format!("plugin_name=\"kubernetes.io/{plugin}\",state=\"{state}_state_of_world\"");
            let line = format!("volume_manager_total_volumes{{{labels}}} {count}");
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn resizes_are_counted_by_their_conditions() {
        let pod = |kind: &str, reason: &str| -> Arc<Pod> {
            let conditions = serde_json::json!([{"type": "Ready", "status": "True"},
                {"type": kind, "status": "True", "reason": reason}]);
            let pod = serde_json::json!({"status": {"conditions": conditions}});
            Arc::new(serde_json::from_value(pod).unwrap())
        };
        let mut current = Current::default();
        let pending = "PodResizePending";
        let pods = vec![pod(pending, "Deferred"), pod(pending, "Infeasible"), pod(pending, "Infeasible")];
        resizes(&mut current, &Listed(pods));
        let text = current.text();
        for line in [
            "kubelet_pod_pending_resizes{reason=\"deferred\"} 1",
            "kubelet_pod_pending_resizes{reason=\"infeasible\"} 2",
            "kubelet_pod_in_progress_resizes 0",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn ephemeral_containers_of_all_pods_are_counted() {
        let pod = |names: &[&str]| -> Arc<Pod> {
            let added: Vec<_> = names.iter().map(|name| serde_json::json!({"name": name})).collect();
            let pod = serde_json::json!({"spec": {"containers": [], "ephemeralContainers": added}});
            Arc::new(serde_json::from_value(pod).unwrap())
        };
        let mut current = Current::default();
        let mut of_manifest = Pod::default();
        of_manifest.metadata.uid = Some("0123456789abcdef0123456789abcdef".to_owned());
        desired(&mut current, &Listed(vec![pod(&["a", "b"]), pod(&[]), pod(&["c"]), Arc::new(of_manifest)]));
        let text = current.text();
        for line in [
            "kubelet_managed_ephemeral_containers 3",
            "kubelet_mirror_pods 1",
            "kubelet_desired_pods{static=\"\"} 3",
            "kubelet_desired_pods{static=\"true\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn pods_containers_and_volumes_of_the_moment_are_shown() {
        let mut current = Current::default();
        desired(&mut current, &Two);
        Running { pods: 3, containers: [0, 4, 5, 0] }.add(&mut current);
        let now = Timestamp::UNIX_EPOCH;
        let renewal = Renewal { until: Timestamp::from_second(90).ok(), failures: 2 };
        certificates(&mut current, [Some(renewal), Some(Renewal { until: None, ..renewal })], now);
        let (name, claim) = ("n".to_owned(), "c".to_owned());
        let volume =
            FileSystem { capacity: 9, available: 3, used: 5, inodes: 8, inodes_free: 6, inodes_used: 2 };
        claims(&mut current, [((name, claim), volume)].into());
        let text = current.text();
        for (name, value) in [("capacity_bytes", 9), ("available_bytes", 3), ("used_bytes", 5), ("inodes", 8)]
        {
            let labels = "namespace=\"n\",persistentvolumeclaim=\"c\"";
            let line = format!("kubelet_volume_stats_{name}{{{labels}}} {value}");
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        for line in [
            "kubelet_desired_pods{static=\"\"} 2",
            "kubelet_desired_pods{static=\"true\"} 0",
            "kubelet_active_pods{static=\"\"} 1",
            "kubelet_certificate_manager_client_ttl_seconds 90",
            "kubelet_certificate_manager_client_expiration_renew_errors 2",
            "kubelet_server_expiration_renew_errors 2",
            "kubelet_running_pods 3",
            "kubelet_running_containers{container_state=\"running\"} 4",
            "kubelet_running_containers{container_state=\"exited\"} 5",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        assert!(!text.contains("server_ttl"), "{text}");
    }
}

//! Tests on the machine's cgroup tree, below a cgroup of the test.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::*;
use crate::kubelet_metrics::{Current, KubeletMetrics};

struct Scratch {
    root: String,
    cgroups: Cgroups,
}

impl Scratch {
    fn new(name: &str) -> Scratch {
        let root = format!("/coracle-test-{}-{name}", std::process::id());
        let config = CgroupConfig {
            root: root.clone(),
            driver: CgroupDriver::Cgroupfs,
            cpu_millis: 2000,
            memory: 512 << 20,
            pod_pids_limit: Some(100),
            reserved_pids: 20_000,
        };
        Scratch { cgroups: Cgroups::open(config).expect("root and a mounted cgroup hierarchy"), root }
    }

    /// Content of a controller's file, on v1 or v2.
    fn read(&self, path: &str, v1: &str, v2: &str) -> String {
        let (controller, file) = v1.split_once('/').expect("controller/file");
        let at = if self.cgroups.is_v2() {
            format!("/sys/fs/cgroup{path}/{v2}")
        } else {
            format!("/sys/fs/cgroup/{controller}{path}/{file}")
        };
        fs::read_to_string(&at).unwrap_or_else(|error| panic!("{at}: {error}")).trim().to_owned()
    }

    fn leftovers(&self) -> Vec<PathBuf> {
        let mounts = self.cgroups.shared.tree.directories("");
        mounts.into_iter().filter(|dir| dir.join("kubepods").exists()).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for dir in self.cgroups.shared.tree.directories("") {
            let _ = tree::remove_dir(&dir);
        }
    }
}

fn pod(uid: &str, resources: serde_json::Value) -> Pod {
    let container = json!({"name": "a", "resources": resources});
    serde_json::from_value(
        json!({"metadata": {"name": "p", "uid": uid}, "spec": {"containers": [container]}}),
    )
    .expect("pod")
}

#[tokio::test]
async fn cpusets_of_pods_and_containers_inherit_the_values_of_the_class() {
    let scratch = Scratch::new("cpusets");
    let parent = scratch.cgroups.ensure_pod(&pod("u3", json!({}))).await.expect("ensure").0;
    let Some(mount) = scratch.cgroups.shared.tree.cpuset_mount_of_v1() else {
        coracle_testing::skip!("on cgroup v2 cpusets always inherit");
    };
    let container = mount.join(format!("{}/c1", parent.trim_start_matches('/')));
    fs::create_dir(&container).expect("a container's cpuset");
    let cpus = |dir: &Path| fs::read_to_string(dir.join("cpuset.cpus")).expect("cpus").trim().to_owned();
    let values = (cpus(&container), cpus(&mount));
    fs::remove_dir(&container).expect("remove");
    assert_eq!(values.0, values.1);
}

#[test]
fn pods_leave_a_tenth_of_the_processes_free_or_the_reserved_ones() {
    assert_eq!(pids_for_pods(32_768, 0), 29_492);
    assert_eq!(pids_for_pods(32_768, 3_000), 29_492);
    assert_eq!(pids_for_pods(32_768, 10_000), 22_768);
    assert_eq!(pids_for_pods(32_768, i64::MAX), 1);
}

#[tokio::test]
async fn a_pod_is_limited_weighed_and_removed_with_all_below_it() {
    let scratch = Scratch::new("limits");
    let pod = pod(
        "u1",
        json!({"requests": {"cpu": "100m", "memory": "16Mi"}, "limits": {"cpu": "200m", "memory": "32Mi"}}),
    );
    let parent = scratch.cgroups.ensure_pod(&pod).await.expect("ensure").0;
    assert_eq!(parent, format!("{}/kubepods/burstable/podu1", scratch.root));
    assert_eq!(scratch.cgroups.ensure_pod(&pod).await.expect("again").0, parent);
    assert_eq!(scratch.read(&parent, "memory/memory.limit_in_bytes", "memory.max"), (32 << 20).to_string());
    assert_eq!(scratch.read(&parent, "cpu/cpu.cfs_quota_us", "cpu.max").split(' ').next(), Some("20000"));
    assert_eq!(scratch.read(&parent, "pids/pids.max", "pids.max"), "100");
    let all = pids_of_all_pods(20_000).expect("the machine's limits").to_string();
    assert_eq!(scratch.read(&format!("{}/kubepods", scratch.root), "pids/pids.max", "pids.max"), all);
    let of_all = format!("{}/kubepods", scratch.root);
    let memory = scratch.read(&of_all, "memory/memory.limit_in_bytes", "memory.max");
    assert_eq!(memory, (512 << 20).to_string());

    scratch.cgroups.update_qos(resources::pod_requests(&pod).cpu_millis).expect("weigh");
    let class = format!("{}/kubepods/burstable", scratch.root);
    let expected = if scratch.cgroups.is_v2() {
        limits::writes(&limits::of_pod(&pod), true)[0].value.clone()
    } else {
        "102".to_owned()
    };
    assert_eq!(scratch.read(&class, "cpu/cpu.shares", "cpu.weight"), expected);

    for dir in scratch.cgroups.shared.tree.directories("kubepods/burstable/podu1/container/inner") {
        fs::create_dir_all(dir).expect("a container's cgroups");
    }
    assert_eq!(scratch.cgroups.pods(), BTreeSet::from(["u1".to_owned()]));
    scratch.cgroups.remove_pod("u1").await.expect("remove");
    scratch.cgroups.remove_pod("u1").await.expect("remove the absent");
    assert!(scratch.cgroups.pods().is_empty());
    scratch.cgroups.remove_all().await.expect("remove all");
    assert_eq!(scratch.leftovers(), Vec::<PathBuf>::new());
}

#[test]
fn a_pod_is_removed_outside_the_executors_threads() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
    runtime.expect("runtime").block_on(async {
        let scratch = Scratch::new("apart");
        scratch.cgroups.ensure_pod(&pod("u6", json!({}))).await.expect("ensure");
        let (release, released) = std::sync::mpsc::channel::<()>();
        let blocks = tokio::task::spawn_blocking(move || released.recv().is_ok());
        let mut removal = std::pin::pin!(scratch.cgroups.remove_pod("u6"));
        // The removal cannot begin without a free thread for blocking calls.
        assert!(futures::poll!(removal.as_mut()).is_pending());
        assert_eq!(scratch.cgroups.pods(), BTreeSet::from(["u6".to_owned()]));
        drop(release);
        removal.await.expect("remove");
        assert!(scratch.cgroups.pods().is_empty());
        assert!(!blocks.await.expect("the thread"));
    });
}

#[tokio::test]
async fn a_pod_with_exclusive_cpus_has_no_quota() {
    let scratch = Scratch::new("exclusive");
    let list = json!({"cpu": "1", "memory": "32Mi"});
    let pod = pod("u5", json!({"requests": list, "limits": list}));
    let cgroups = scratch.cgroups.clone().with_quota(false);
    let parent = cgroups.ensure_pod(&pod).await.expect("ensure").0;
    cgroups.widen_pod(&pod, &pod).await.expect("widen");
    let quota = scratch.read(&parent, "cpu/cpu.cfs_quota_us", "cpu.max");
    assert!(["-1", "max 100000"].contains(&quota.as_str()), "{quota}");
    assert_eq!(scratch.read(&parent, "memory/memory.limit_in_bytes", "memory.max"), (32 << 20).to_string());
}

#[tokio::test]
async fn a_pod_shrinks_below_the_quota_of_an_ended_container() {
    let scratch = Scratch::new("shrink");
    let limited = |cpu: &str| pod("u4", json!({"limits": {"cpu": cpu, "memory": "32Mi"}}));
    scratch.cgroups.ensure_pod(&limited("500m")).await.expect("ensure");
    for dir in scratch.cgroups.shared.tree.directories("kubepods/guaranteed/podu4/container") {
        fs::create_dir_all(&dir).expect("a container's cgroup");
        if dir.join("cpu.cfs_quota_us").exists() {
            fs::write(dir.join("cpu.cfs_quota_us"), "50000").expect("its quota");
        }
    }
    let parent = scratch.cgroups.ensure_pod(&limited("200m")).await.expect("shrink").0;
    assert_eq!(scratch.read(&parent, "cpu/cpu.cfs_quota_us", "cpu.max").split(' ').next(), Some("20000"));
}

#[tokio::test]
async fn a_busy_cgroup_is_removed_after_its_last_process_has_exited() {
    let scratch = Scratch::new("busy");
    let pod = pod("u2", json!({}));
    scratch.cgroups.ensure_pod(&pod).await.expect("ensure");
    let mut child = Command::new("sleep").arg("0.1").spawn().expect("sleep");
    for dir in scratch.cgroups.shared.tree.directories("kubepods/besteffort/podu2") {
        fs::write(dir.join("cgroup.procs"), child.id().to_string()).expect("enter the cgroup");
    }
    let reaped = tokio::task::spawn_blocking(move || child.wait());
    scratch.cgroups.remove_pod("u2").await.expect("removed after the process ended");
    reaped.await.expect("join").expect("wait");
    assert!(scratch.cgroups.pods().is_empty());
}

#[tokio::test]
async fn a_pod_without_uid_has_no_cgroup() {
    let scratch = Scratch::new("nouid");
    let error = scratch.cgroups.ensure_pod(&Pod::default()).await.expect_err("no uid");
    assert!(matches!(error, CgroupError::NoUid(_)));
}

#[tokio::test]
async fn operations_on_pods_are_measured() {
    let scratch = Scratch::new("measured");
    let pod = pod("u8", json!({}));
    for _ in 0..2 {
        scratch.cgroups.ensure_pod(&pod).await.expect("ensure");
    }
    scratch.cgroups.remove_pod("u8").await.expect("removed");
    let metrics = KubeletMetrics::default();
    metrics.show(scratch.cgroups.operations().collector());
    let text = metrics.text(&Current::default());
    for operation in ["create", "update", "destroy"] {
        let labels = format!("operation_type=\"{operation}\"");
        let line = format!("kubelet_cgroup_manager_duration_seconds_count{{{labels}}} 1");
        assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
    }
}

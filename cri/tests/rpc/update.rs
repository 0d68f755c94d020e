//! UpdateContainerResources and UpdatePodSandboxResources, checked by the cgroup's files.

use std::time::Duration;

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use serde_json::json;
use tonic::{Code, Request, Status};

use crate::fixture::Machine;

const MIB: i64 = 1 << 20;

type Change = fn(&mut cri::LinuxContainerResources);

/// The values of a container's cgroup, by the file names of the machine's cgroup version.
struct Group {
    path: String,
    v2: bool,
    /// The container's OCI spec.
    spec: serde_json::Value,
}

impl Group {
    async fn of(machine: &Machine, id: &str) -> Self {
        let request = cri::ContainerStatusRequest { container_id: id.into(), verbose: true };
        let status = machine.runtime.container_status(Request::new(request)).await.expect("status");
        let info: serde_json::Value = serde_json::from_str(&status.into_inner().info["info"]).expect("info");
        let v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        Self {
            path: info["cgroup"].as_str().expect("cgroup").to_owned(),
            v2,
            spec: info["runtimeSpec"].clone(),
        }
    }

    fn read(&self, controller: &str, v1: &str, v2: &str) -> String {
        let (hierarchy, file) = if self.v2 { (String::new(), v2) } else { (format!("/{controller}"), v1) };
        let path = format!("/sys/fs/cgroup{hierarchy}{}/{file}", self.path);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}")).trim().to_owned()
    }

    fn memory(&self) -> String {
        self.read("memory", "memory.limit_in_bytes", "memory.max")
    }

    fn cpu(&self) -> [String; 2] {
        let shares = self.read("cpu", "cpu.shares", "cpu.weight");
        let quota = self.read("cpu", "cpu.cfs_quota_us", "cpu.max");
        [shares, quota.split(' ').next().unwrap_or_default().to_owned()]
    }
}

async fn update(
    machine: &Machine,
    id: &str,
    change: impl FnOnce(&mut cri::LinuxContainerResources),
) -> Result<(), Status> {
    let mut linux = cri::LinuxContainerResources::default();
    change(&mut linux);
    let request = cri::UpdateContainerResourcesRequest {
        container_id: id.into(),
        linux: Some(linux),
        ..Default::default()
    };
    machine.runtime.update_container_resources(Request::new(request)).await.map(|_| ())
}

async fn resources(machine: &Machine, id: &str) -> cri::LinuxContainerResources {
    machine.status(id).await.resources.expect("resources").linux.expect("linux")
}

fn limited(config: &mut cri::ContainerConfig) {
    let limits = cri::LinuxContainerResources {
        memory_limit_in_bytes: 64 * MIB,
        cpu_shares: 512,
        cpu_quota: 50_000,
        cpu_period: 100_000,
        oom_score_adj: 300,
        ..Default::default()
    };
    config.linux.get_or_insert_default().resources = Some(limits);
}

pub(crate) async fn limits_change_in_the_kernel_and_on_record(machine: &mut Machine) {
    let pod = machine.pod("update").await;
    let id = machine.create(&pod, "c", &["sleep", "1000"], limited).await.expect("create");
    let group = Group::of(machine, &id).await;
    assert_eq!(group.memory(), (64 * MIB).to_string());
    // The container is not started yet.
    update(machine, &id, |linux| linux.memory_limit_in_bytes = 256 * MIB).await.expect("grow");
    assert_eq!(group.memory(), (256 * MIB).to_string());
    machine.start(&id).await;
    let pid = machine.pid(&id).await;
    update(machine, &id, |linux| {
        linux.memory_limit_in_bytes = 32 * MIB;
        (linux.cpu_shares, linux.cpu_quota, linux.cpu_period) = (2048, 20_000, 50_000);
        linux.cpuset_cpus = "0".into();
        linux.oom_score_adj = 700;
    })
    .await
    .expect("shrink");
    assert_eq!(group.memory(), (32 * MIB).to_string());
    let shares = if group.v2 { "174" } else { "2048" };
    assert_eq!(group.cpu(), [shares, "20000"]);
    assert_eq!(group.read("cpuset", "cpuset.cpus", "cpuset.cpus"), "0");
    let score = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("score");
    assert_eq!(score.trim(), "700");
    let later = machine.exec(&id, &["cat", "/proc/self/oom_score_adj"], 0).await.expect("exec");
    assert_eq!(String::from_utf8_lossy(&later.stdout).trim(), "700", "score of later processes");
    let found = resources(machine, &id).await;
    assert_eq!((found.memory_limit_in_bytes, found.cpu_shares, found.oom_score_adj), (32 * MIB, 2048, 700));
    let shown = &Group::of(machine, &id).await.spec["linux"]["resources"];
    assert_eq!((&shown["memory"]["limit"], &shown["cpu"]["shares"]), (&json!(32 * MIB), &json!(2048)));
    assert!(shown["devices"].is_array(), "{shown}");
    // Annotations have no effect.
    let request = cri::UpdateContainerResourcesRequest {
        container_id: id.clone(),
        linux: Some(cri::LinuxContainerResources { memory_limit_in_bytes: 48 * MIB, ..Default::default() }),
        annotations: [("experimental.example/limit".to_owned(), "1".to_owned())].into(),
        ..Default::default()
    };
    machine.runtime.update_container_resources(Request::new(request)).await.expect("annotated");
    assert_eq!(group.memory(), (48 * MIB).to_string());
    let found = resources(machine, &id).await;
    assert_eq!(found.memory_limit_in_bytes, 48 * MIB);
    // A new runtime reads the limits from the record and can update them.
    machine.restart(Duration::ZERO).await;
    assert_eq!(resources(machine, &id).await, found);
    update(machine, &id, |linux| (linux.memory_limit_in_bytes, linux.cpu_quota) = (-1, -1))
        .await
        .expect("free");
    let none = if group.v2 { ["max", "max"] } else { ["9223372036854771712", "-1"] };
    assert_eq!([group.memory(), group.cpu()[1].clone()], none);
    machine.remove_pod(&pod).await;
}

pub(crate) async fn a_refused_change_changes_nothing(machine: &mut Machine) {
    let pod = machine.pod("refuse").await;
    let id = machine.create(&pod, "c", &["sleep", "1000"], limited).await.expect("create");
    machine.start(&id).await;
    let group = Group::of(machine, &id).await;
    let before = (group.memory(), group.cpu(), resources(machine, &id).await);
    let changes: [(Change, &str); 4] = [
        (|linux| (linux.cpu_shares, linux.cpuset_mems) = (1024, "99".into()), "cpuset.mems"),
        (|linux| (linux.cpu_quota, linux.memory_limit_in_bytes) = (10_000, 4096), "memory"),
        (|linux| linux.cpu_period = -1, "cpu_period"),
        (
            |linux| {
                linux.cpu_shares = 4096;
                linux.unified.insert("no.such.file".into(), "1".into());
            },
            "unified",
        ),
    ];
    for (change, word) in changes {
        let error = update(machine, &id, change).await.expect_err(word);
        let word = if group.v2 && word == "unified" { "no.such.file" } else { word };
        assert!(error.message().contains(word), "{error}");
        assert_eq!((group.memory(), group.cpu(), resources(machine, &id).await), before, "{word}");
    }
    let error = update(machine, "unknown", |_| {}).await.expect_err("unknown");
    assert_eq!(error.code(), Code::NotFound);
    machine.stop(&id, 0).await;
    let error = update(machine, &id, |linux| linux.cpu_shares = 2).await.expect_err("it ended");
    assert_eq!(error.code(), Code::FailedPrecondition);
    machine.remove_pod(&pod).await;
}

pub(crate) async fn an_update_of_pod_resources_is_recorded(machine: &mut Machine) {
    let pod = machine.pod("size").await;
    let limits =
        |bytes| Some(cri::LinuxContainerResources { memory_limit_in_bytes: bytes, ..Default::default() });
    let update = async |overhead, resources, pod: &str| {
        let request =
            cri::UpdatePodSandboxResourcesRequest { pod_sandbox_id: pod.to_owned(), overhead, resources };
        machine.runtime.update_pod_sandbox_resources(Request::new(request)).await
    };
    update(limits(MIB), limits(2 * MIB), &pod).await.expect("update");
    update(None, limits(3 * MIB), &pod).await.expect("update");
    assert_eq!(update(None, None, "unknown").await.expect_err("unknown").code(), Code::NotFound);
    machine.restart(Duration::ZERO).await;
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: true };
    let info =
        machine.runtime.pod_sandbox_status(Request::new(request)).await.expect("status").into_inner().info;
    let info: serde_json::Value = serde_json::from_str(&info["info"]).expect("info");
    let of = |name: &str| info[name]["linux"]["memory_limit_in_bytes"].as_i64();
    assert_eq!([of("overhead"), of("resources")], [Some(MIB), Some(3 * MIB)]);
    machine.remove_pod(&pod).await;
}

pub(crate) async fn unified_limits_reach_the_kernel(machine: &mut Machine) {
    if !std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        coracle_testing::skip!("cgroup v1 has no unified limits");
    }
    let unified = |value: i64| [("memory.high".to_owned(), value.to_string())].into();
    let pod = machine.pod("unified").await;
    let limited = |config: &mut cri::ContainerConfig| {
        let limits = cri::LinuxContainerResources { unified: unified(48 * MIB), ..Default::default() };
        config.linux.get_or_insert_default().resources = Some(limits);
    };
    let id = machine.create(&pod, "c", &["sleep", "1000"], limited).await.expect("create");
    let group = Group::of(machine, &id).await;
    let high = || group.read("memory", "none", "memory.high");
    assert_eq!(high(), (48 * MIB).to_string());
    machine.start(&id).await;
    update(machine, &id, |linux| linux.unified = unified(40 * MIB)).await.expect("update");
    assert_eq!(high(), (40 * MIB).to_string());
    assert_eq!(resources(machine, &id).await.unified, unified(40 * MIB));
    // Files that do not exist or are not limits are refused, and nothing changes.
    for wrong in ["memory.no_such", "cgroup.procs", "../memory.high"] {
        let refused =
            update(machine, &id, |linux| linux.unified = [(wrong.to_owned(), "1".to_owned())].into());
        assert!(refused.await.is_err(), "{wrong}");
    }
    assert_eq!(high(), (40 * MIB).to_string());
    machine.restart(Duration::ZERO).await;
    assert_eq!(resources(machine, &id).await.unified, unified(40 * MIB));
    machine.remove_pod(&pod).await;
}

//! Exclusive CPUs and memory of NUMA nodes: what the kernel lets containers use, before and after a restart of the
//! node.

use std::collections::BTreeSet;
use std::fs;

use coracle_integration::{Cluster, eventually, on_a_machine};
use serde_json::{Value, json};

use super::resize::guaranteed;

/// One CPU is reserved: 500 millicores, rounded up. The reserved memory is 200 MiB: 100 MiB of `system-reserved`, and
/// 100 MiB of the default threshold of evictions.
const FLAGS: [&str; 14] = [
    "--image-gc-high-threshold",
    "100",
    "--system-reserved",
    "cpu=500m,memory=100Mi",
    "--cpu-manager-policy",
    "static",
    "--memory-manager-policy",
    "Static",
    "--reserved-memory",
    "0:memory=200Mi",
    "--topology-manager-policy",
    "restricted",
    "--topology-manager-scope",
    "pod",
];

fn run(cluster: &Cluster, name: &str, resources: &Value) {
    let container =
        json!({"name": "c", "image": "busybox", "command": ["sleep", "100000"], "resources": resources});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]}});
    cluster.apply(&pod.to_string());
    cluster.kubectl(&["wait", &format!("pod/{name}"), "--for=condition=Ready", "--timeout=300s"]);
}

/// Runs a pod whose container exits at once, until its end is reported.
fn complete(cluster: &Cluster, name: &str, resources: &Value) {
    let container = json!({"name": "c", "image": "busybox", "command": ["true"], "resources": resources});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [container]}});
    cluster.apply(&pod.to_string());
    let succeeded = "--for=jsonpath={.status.phase}=Succeeded";
    cluster.kubectl(&["wait", &format!("pod/{name}"), succeeded, "--timeout=300s"]);
}

/// The numbers of a list in the kernel's format.
fn numbers(list: &str) -> BTreeSet<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        first.parse::<u32>().unwrap()..=last.parse().unwrap()
    };
    list.trim().split(',').flat_map(range).collect()
}

/// The CPUs (`Cpus`) or memory nodes (`Mems`) that the kernel lets a container use.
fn allowed(cluster: &Cluster, name: &str, what: &str) -> BTreeSet<u32> {
    allowed_list(&cluster.kubectl(&["exec", name, "--", "cat", "/proc/1/status"]), what)
}

/// The list in a status file of procfs.
fn allowed_list(status: &str, what: &str) -> BTreeSet<u32> {
    let prefix = format!("{what}_allowed_list:");
    numbers(status.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap())
}

/// Whether the container has no CPU quota. The file has one name on v2 and another one on v1.
fn has_no_quota(cluster: &Cluster, name: &str) -> bool {
    let command = "cat /sys/fs/cgroup/cpu.max 2>/dev/null || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us";
    let text = cluster.kubectl(&["exec", name, "--", "sh", "-c", command]);
    text.starts_with("max") || text.trim() == "-1"
}

fn wait_for_shared_cpus(cluster: &Cluster, expected: &BTreeSet<u32>) {
    eventually("the shared pool to change", 30, || allowed(cluster, "shared", "Cpus") == *expected);
}

fn pending_resize(cluster: &Cluster, name: &str) -> Option<String> {
    let pod = cluster.get(&["pod", name]);
    let conditions = pod["status"]["conditions"].as_array()?;
    let pending = conditions.iter().find(|condition| condition["type"] == "PodResizePending")?;
    Some(pending["message"].as_str()?.to_owned())
}

#[test]
fn a_guaranteed_pod_has_a_cpu_of_its_own_until_it_ends() {
    let all = numbers(&fs::read_to_string("/sys/devices/system/cpu/online").unwrap());
    if all.len() < 2 || all != allowed_list(&fs::read_to_string("/proc/self/status").unwrap(), "Cpus") {
        coracle_testing::skip!("a test needs two CPUs, and all that are online");
    }
    on_a_machine(move |machine| {
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up_with(machine, &mirrors, &FLAGS);
        run(&cluster, "shared", &json!({}));
        wait_for_shared_cpus(&cluster, &all);
        run(&cluster, "own", &guaranteed("1", "64Mi"));
        let own = allowed(&cluster, "own", "Cpus");
        let others: BTreeSet<u32> = all.difference(&own).copied().collect();
        assert_eq!(own.len(), 1, "{own:?}");
        wait_for_shared_cpus(&cluster, &others);
        assert_eq!(allowed(&cluster, "own", "Mems").len(), 1);
        assert!(has_no_quota(&cluster, "own"));
        // A container that starts now runs on the CPUs that the shared pool still has.
        run(&cluster, "later", &guaranteed("100m", "64Mi"));
        assert_eq!(allowed(&cluster, "later", "Cpus"), others);
        assert!(!has_no_quota(&cluster, "later"));
        let metrics = cluster.kubectl(&["get", "--raw", "/api/v1/nodes/node-1/proxy/metrics"]);
        assert!(metrics.contains("\nkubelet_cpu_manager_exclusive_cpu_allocation_count 1\n"), "{metrics}");
        let patch = json!({"spec": {"containers": [{"name": "c", "resources": guaranteed("500m", "64Mi")}]}});
        cluster.kubectl(&["patch", "pod", "own", "--subresource", "resize", "--patch", &patch.to_string()]);
        let message = eventually("the resize to be refused", 30, || pending_resize(&cluster, "own"));
        assert_eq!(
            message,
            "Resize is infeasible for Guaranteed Pods alongside CPU Manager policy \"static\""
        );
        cluster.stop();
        // The size of a virtual machine's memory can change at any time. Then the agent, like the kubelet, does not
        // start with this record. So the test removes it.
        fs::remove_file(machine.path("state/memory_manager_state")).unwrap();
        let recorded = || -> Value {
            let state = fs::read_to_string(machine.path("state/cpu_manager_state")).unwrap();
            serde_json::from_str(&state).unwrap()
        };
        let state = recorded();
        assert_eq!(
            (&state["policyName"], numbers(state["defaultCpuSet"].as_str().unwrap())),
            (&json!("static"), others.clone())
        );
        cluster.start();
        cluster.kubectl(&["wait", "pod", "--all", "--for=condition=Ready", "--timeout=60s"]);
        assert_eq!(allowed(&cluster, "own", "Cpus"), own);
        wait_for_shared_cpus(&cluster, &others);
        cluster.kubectl(&["delete", "pod", "own"]);
        wait_for_shared_cpus(&cluster, &all);
        for name in ["first", "second", "third"] {
            complete(&cluster, name, &guaranteed("1", "64Mi"));
            assert_eq!(recorded()["entries"], Value::Null, "{name} has its CPU after its end was reported");
        }
    });
}

//! Crashes and restarts of the node: pods continue, no state is lost, nothing leaks.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test panics, waits and prints figures"
)]

#[path = "restart/endpoints.rs"]
mod endpoints;
#[path = "restart/kubeconfig.rs"]
mod kubeconfig;
#[path = "restart/machine_shutdown.rs"]
mod machine_shutdown;
#[path = "restart/power_cut.rs"]
mod power_cut;
#[path = "restart/volume_updates.rs"]
mod volume_updates;
#[path = "restart/without_control_plane.rs"]
mod without_control_plane;

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use coracle_integration::{Cluster, Machine, ResourceSnapshot, eventually, on_a_machine};

const SLEEPERS: &str = r#"{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"sleepers"},
"spec":{"replicas":3,"selector":{"matchLabels":{"app":"s"}},"template":{"metadata":{"labels":{"app":"s"}},
"spec":{"terminationGracePeriodSeconds":1,"containers":[{"name":"c","image":"busybox","imagePullPolicy":"IfNotPresent",
"command":["sleep","100000"]}]}}}}"#;

fn with_sleepers(machine: &mut Machine) -> Cluster {
    let mirrors = machine.start_registry();
    let cluster = Cluster::up(machine, &mirrors);
    cluster.apply(SLEEPERS);
    cluster.kubectl(&["rollout", "status", "deployment/sleepers", "--timeout=300s"]);
    cluster
}

/// Each pod's container id and restarts.
fn containers(cluster: &Cluster) -> BTreeMap<String, (String, u64)> {
    let pods = cluster.get(&["pods"]);
    let of = |pod: &serde_json::Value| {
        let status = &pod["status"]["containerStatuses"][0];
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        (
            name,
            (
                status["containerID"].as_str().unwrap_or("").to_owned(),
                status["restartCount"].as_u64().unwrap_or(0),
            ),
        )
    };
    pods["items"].as_array().unwrap().iter().map(of).collect()
}

/// Process ids of the sleeping containers, from /proc.
fn sleepers(machine: &Machine) -> Vec<String> {
    let mut found = Vec::new();
    for hierarchy in ["memory", ""] {
        let root = std::path::Path::new("/sys/fs/cgroup").join(hierarchy).join(machine.name());
        walk(&root, &mut found);
    }
    found.retain(|pid| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|c| c.starts_with(b"sleep\x00100000"))
    });
    found.sort();
    found.dedup();
    found
}

/// Waits for three processes of sleeping containers. A pod may be Ready a moment before its process calls execve.
fn three_sleepers(machine: &Machine) -> Vec<String> {
    eventually("three sleepers", 10, || Some(sleepers(machine)).filter(|found| found.len() == 3))
}

fn walk(dir: &std::path::Path, found: &mut Vec<String>) {
    found.extend(fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default().lines().map(str::to_owned));
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            walk(&entry.path(), found);
        }
    }
}

#[test]
fn pods_survive_stops_and_kills_of_the_node() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let mut cluster = with_sleepers(machine);
        let (pids, known) = (three_sleepers(machine), containers(&cluster));
        assert_eq!(known.len(), 3);
        for kill in [false, true, true] {
            if kill {
                cluster.kill()
            } else {
                cluster.stop()
            }
            assert_eq!(sleepers(machine), pids);
            cluster.start();
            cluster.kubectl(&["rollout", "status", "deployment/sleepers", "--timeout=300s"]);
            assert_eq!(sleepers(machine), pids);
            assert_eq!(containers(&cluster), known);
        }
        cluster.down();
        assert_eq!(ResourceSnapshot::of(machine).added_since(&before), Vec::<&str>::new());
    });
}

#[test]
fn a_node_killed_while_pods_start_converges_and_leaks_nothing() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        for round in 0..6u64 {
            cluster.apply(SLEEPERS);
            std::thread::sleep(std::time::Duration::from_millis(round * 40));
            cluster.kill();
            cluster.start();
            cluster.kubectl(&["rollout", "status", "deployment/sleepers", "--timeout=300s"]);
            three_sleepers(machine);
            cluster.kubectl(&["delete", "deployment", "sleepers", "--wait=false"]);
            std::thread::sleep(std::time::Duration::from_millis(round * 40));
            cluster.kill();
            cluster.start();
            eventually("the pods to end", 60, || containers(&cluster).is_empty());
            assert_eq!(sleepers(machine), Vec::<String>::new());
        }
        cluster.down();
        assert_eq!(ResourceSnapshot::of(machine).added_since(&before), Vec::<&str>::new());
    });
}

#[test]
fn a_pod_whose_shim_is_killed_is_cleaned_up_and_restarted() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let mut cluster = with_sleepers(machine);
        let pids = three_sleepers(machine);
        let parent = |pid: &str| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit(')').next().unwrap().split_whitespace().nth(1).unwrap().to_owned()
        };
        let shim = parent(&pids[0]);
        assert!(Command::new("kill").args(["-9", &shim]).status().unwrap().success());
        eventually("the pod to be restarted", 60, || {
            let now = sleepers(machine);
            now.len() == 3 && !now.contains(&pids[0])
        });
        cluster.kubectl(&["rollout", "status", "deployment/sleepers", "--timeout=300s"]);
        cluster.down();
        assert_eq!(ResourceSnapshot::of(machine).added_since(&before), Vec::<&str>::new());
    });
}

#[test]
fn pods_do_not_run_twice_after_the_run_directory_was_removed() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let mut cluster = with_sleepers(machine);
        let pids = three_sleepers(machine);
        cluster.kill();
        for sandbox in fs::read_dir(machine.path("run/sandboxes")).unwrap() {
            fs::remove_dir_all(sandbox.unwrap().path()).unwrap();
        }
        cluster.start();
        eventually("new processes in place of the old ones", 60, || {
            let now = sleepers(machine);
            now.len() == 3 && !now.iter().any(|pid| pids.contains(pid))
        });
        cluster.down();
        assert_eq!(ResourceSnapshot::of(machine).added_since(&before), Vec::<&str>::new());
    });
}

#[test]
fn a_copy_of_the_state_taken_during_writes_opens() {
    on_a_machine(|machine| {
        let mut cluster = with_sleepers(machine);
        let writer = |cluster: &Cluster, from: u32| {
            for number in from..from + 10 {
                cluster.kubectl(&["create", "configmap", &format!("c{number}"), "--from-literal=a=b"]);
            }
        };
        writer(&cluster, 0);
        // Copies the durable state at a random instant during writes, as after a power cut.
        std::thread::scope(|scope| {
            scope.spawn(|| writer(&cluster, 10));
            let copied = Command::new("cp")
                .arg("-a")
                .arg(machine.path("state/store"))
                .arg(machine.path("copy"))
                .status();
            assert!(copied.unwrap().success());
        });
        cluster.stop();
        fs::rename(machine.path("state/store"), machine.path("whole")).unwrap();
        fs::rename(machine.path("copy"), machine.path("state/store")).unwrap();
        cluster.start();
        let names = cluster.kubectl(&["get", "configmaps", "-o", "name"]);
        for number in 0..10 {
            assert!(names.contains(&format!("configmap/c{number}\n")), "{names}");
        }
        cluster.kubectl(&["rollout", "status", "deployment/sleepers", "--timeout=300s"]);
    });
}

//! The processes that a container sees.

use std::path::{Path, PathBuf};

use coracle_proto::cri;
use coracle_testing::until;
use tonic::{Code, Status};

use crate::fixture::{Machine, security};
use crate::sh;

/// A container in the pid namespace of another container.
async fn container_in_pid_namespace(
    machine: &Machine,
    pod: &str,
    name: &str,
    target: &str,
) -> Result<String, Status> {
    machine
        .create(pod, name, &["sleep", "2000"], |config| {
            security(config).namespace_options = Some(cri::NamespaceOption {
                pid: cri::NamespaceMode::Target.into(),
                target_id: target.to_owned(),
                ..Default::default()
            });
        })
        .await
}

pub(super) async fn a_container_joins_the_pid_namespace_of_another(machine: &mut Machine) {
    let pod = machine.pod("target").await;
    let target = machine.run(&pod, "target", &["sleep", "1000"]).await;
    let debugger = container_in_pid_namespace(machine, &pod, "debugger", &target).await.expect("create");
    machine.start(&debugger).await;
    let namespace = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/pid")).expect("namespace");
    let (of_target, of_debugger) = (machine.pid(&target).await, machine.pid(&debugger).await);
    assert_eq!(namespace(of_debugger), namespace(of_target));
    assert_ne!(namespace(of_target), std::fs::read_link("/proc/self/ns/pid").expect("namespace"));
    assert_eq!(sh(machine, &debugger, "tr '\\0' ' ' </proc/1/cmdline").await, "sleep 1000");
    // A debugger with the same uid can inspect the target's processes.
    assert!(sh(machine, &debugger, "ls /proc/1/root/").await.contains("proc"));
    // The containers end independently, unless the first process of the namespace ends.
    let other = container_in_pid_namespace(machine, &pod, "other", &target).await.expect("create");
    machine.start(&other).await;
    machine.stop(&other, 0).await;
    assert_eq!(sh(machine, &debugger, "echo here").await, "here");

    let elsewhere = machine.pod("elsewhere").await;
    let stranger = container_in_pid_namespace(machine, &elsewhere, "stranger", &target).await;
    assert_eq!(stranger.expect_err("the target is in another pod").code(), Code::NotFound);
    machine.stop(&target, 0).await;
    machine.wait_exited(&debugger).await;
    let late = container_in_pid_namespace(machine, &pod, "late", &target).await;
    assert_eq!(late.expect_err("it has ended").code(), Code::FailedPrecondition);
    machine.remove_pod(&pod).await;
    machine.remove_pod(&elsewhere).await;
}

/// The directories of a cgroup, one in each hierarchy that has it.
fn cgroups(group: &str) -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    let v1 = std::fs::read_dir(&root).expect("cgroups").flatten().map(|entry| entry.path());
    v1.chain([root]).map(|mount| mount.join(group.trim_start_matches('/'))).filter(|at| at.is_dir()).collect()
}

/// A container in a foreign pid namespace, with a child that it does not reap.
async fn with_child(
    machine: &Machine,
    pod: &str,
    name: &str,
    pid: cri::NamespaceMode,
    target: &str,
) -> String {
    let id = machine.create(pod, name, &["sh", "-c", "sleep 9999 & exit 1"], |config| {
        security(config).namespace_options = Some(cri::NamespaceOption {
            pid: pid.into(),
            target_id: target.to_owned(),
            ..Default::default()
        });
    });
    id.await.expect("create")
}

pub(super) async fn an_exited_container_leaves_no_process(machine: &mut Machine) {
    let shared = |mode: cri::NamespaceMode| {
        move |config: &mut cri::PodSandboxConfig| {
            let security = config.linux.get_or_insert_default().security_context.get_or_insert_default();
            security.namespace_options =
                Some(cri::NamespaceOption { pid: mode.into(), ..Default::default() });
        }
    };
    for (name, mode) in [
        ("ends-pod", cri::NamespaceMode::Pod),
        ("ends-node", cri::NamespaceMode::Node),
        ("ends-target", cri::NamespaceMode::Target),
    ] {
        let of_pod = if mode == cri::NamespaceMode::Target { cri::NamespaceMode::Container } else { mode };
        let pod = machine.try_pod(name, shared(of_pod)).await.expect("sandbox");
        let stays = machine.create(&pod, "stays", &["sleep", "1000"], |config| {
            security(config).namespace_options =
                Some(cri::NamespaceOption { pid: of_pod.into(), ..Default::default() });
        });
        let stays = stays.await.expect("create");
        machine.start(&stays).await;
        let target = if mode == cri::NamespaceMode::Target { stays.as_str() } else { "" };
        let ends = with_child(machine, &pod, "ends", mode, target).await;
        machine.start(&ends).await;
        assert_eq!(machine.wait_exited(&ends).await.exit_code, 1);
        let group = machine.container_group(name, &ends);
        let left = || {
            let lists =
                cgroups(&group).into_iter().map(|own| std::fs::read_to_string(own.join("cgroup.procs")));
            lists.map(Result::unwrap_or_default).collect::<String>()
        };
        until(&format!("{name}: all processes end"), 20, || left().is_empty()).await;
        assert_eq!(sh(machine, &stays, "echo here").await, "here");
        machine.remove_pod(&pod).await;
    }
}

pub(super) async fn an_exec_runs_in_a_container_with_child_cgroups(machine: &mut Machine) {
    let pod = machine.pod("nested").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    // Like systemd in a container: all processes are in a child cgroup, and the controllers are delegated.
    let group = machine.container_group("nested", &id);
    let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    for own in cgroups(&group) {
        let below = own.join("init.scope");
        std::fs::create_dir(&below).expect("cgroup");
        for file in ["cpuset.cpus", "cpuset.mems"].iter().filter(|_| !unified) {
            if let Ok(value) = std::fs::read_to_string(own.join(file)) {
                std::fs::write(below.join(file), value).expect("write");
            }
        }
        std::fs::write(below.join("cgroup.procs"), machine.pid(&id).await.to_string()).expect("move");
        if unified {
            std::fs::write(own.join("cgroup.subtree_control"), "+pids").expect("hand down");
        }
    }
    assert_eq!(sh(machine, &id, "echo here").await, "here");
    if unified {
        assert_eq!(sh(machine, &id, "cat /proc/self/cgroup").await, "0::/init.scope");
    }
    machine.remove_pod(&pod).await;
}

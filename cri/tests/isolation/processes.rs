//! Which processes a container sees.

use coracle_proto::cri;
use tonic::{Code, Status};

use crate::fixture::{Machine, security};
use crate::sh;

/// A container that sees the processes of another.
async fn beside(machine: &Machine, pod: &str, name: &str, target: &str) -> Result<String, Status> {
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

pub(super) async fn a_container_joins_the_processes_of_another(machine: &mut Machine) {
    let pod = machine.pod("target").await;
    let target = machine.run(&pod, "target", &["sleep", "1000"]).await;
    let debugger = beside(machine, &pod, "debugger", &target).await.expect("create");
    machine.start(&debugger).await;
    let namespace = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/pid")).expect("namespace");
    let (of_target, of_debugger) = (machine.pid(&target).await, machine.pid(&debugger).await);
    assert_eq!(namespace(of_debugger), namespace(of_target));
    assert_ne!(namespace(of_target), std::fs::read_link("/proc/self/ns/pid").expect("namespace"));
    assert_eq!(sh(machine, &debugger, "tr '\\0' ' ' </proc/1/cmdline").await, "sleep 1000");
    // What a debugger is for, by the rights of the same user.
    assert!(sh(machine, &debugger, "ls /proc/1/root/").await.contains("proc"));
    // The end of the one is not that of the other, but for the namespace's first process.
    let other = beside(machine, &pod, "other", &target).await.expect("create");
    machine.start(&other).await;
    machine.stop(&other, 0).await;
    assert_eq!(sh(machine, &debugger, "echo here").await, "here");

    let elsewhere = machine.pod("elsewhere").await;
    let stranger = beside(machine, &elsewhere, "stranger", &target).await;
    assert_eq!(stranger.expect_err("of another pod").code(), Code::NotFound);
    machine.stop(&target, 0).await;
    machine.wait_exited(&debugger).await;
    let late = beside(machine, &pod, "late", &target).await;
    assert_eq!(late.expect_err("it has ended").code(), Code::FailedPrecondition);
    machine.remove_pod(&pod).await;
    machine.remove_pod(&elsewhere).await;
}

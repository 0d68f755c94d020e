//! Process 1 of a pod with a shared pid namespace: its user and its confinement.

use std::collections::BTreeSet;
use std::path::Path;

use coracle_proto::cri;
use cri::security_profile::ProfileType;
use tonic::{Code, Status};

use super::sh;
use super::user_namespace::{options, range};
use crate::fixture::{Machine, ends, security};

/// A profile that forbids one system call.
const NO_CHMOD: &str = r#"{"defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [{"names": ["chmod", "fchmodat"], "action": "SCMP_ACT_ERRNO"}]}"#;
/// A profile under which process 1 cannot wait.
const NO_WAIT: &str = r#"{"defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [{"names": ["poll", "ppoll"], "action": "SCMP_ACT_ERRNO"}]}"#;
/// A profile that kills every process.
const NO_LIFE: &str = r#"{"defaultAction": "SCMP_ACT_KILL_PROCESS"}"#;

async fn pod(
    machine: &Machine,
    name: &str,
    change: impl FnOnce(&mut cri::LinuxSandboxSecurityContext),
) -> Result<String, Status> {
    let shared = machine.try_pod(name, |config| {
        let context = config.linux.get_or_insert_default().security_context.get_or_insert_default();
        context.namespace_options.get_or_insert_default().pid = cri::NamespaceMode::Pod.into();
        change(context);
    });
    shared.await
}

fn localhost(file: &Path) -> cri::SecurityProfile {
    profile(ProfileType::Localhost, &file.to_string_lossy())
}

fn profile(kind: ProfileType, name: &str) -> cri::SecurityProfile {
    cri::SecurityProfile { profile_type: kind.into(), localhost_ref: name.to_owned() }
}

/// The pid of a pod's process 1.
async fn init_of(machine: &Machine, pod: &str) -> i32 {
    let shim = machine.shim_pid(pod).await;
    let children = std::fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).expect("children");
    let mut children = children.split_whitespace();
    let is_init = |pid: &&str| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.trim() == "coracle-init")
    };
    children.find(is_init).expect("an init").parse().expect("pid")
}

/// A line of `/proc/PID/status`, with single blanks between the words.
fn line(pid: i32, name: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).expect("line");
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A container in the pod's pid namespace.
async fn container(machine: &Machine, pod: &str, name: &str, uid: i64) -> String {
    let created = machine.create(pod, name, &["sleep", "1000"], |config| {
        let security = security(config);
        security.namespace_options.get_or_insert_default().pid = cri::NamespaceMode::Pod.into();
        security.run_as_user = Some(cri::Int64Value { value: uid });
    });
    let id = created.await.expect("create");
    machine.start(&id).await;
    id
}

pub(super) async fn process_1_has_the_pods_seccomp_profile(machine: &mut Machine) {
    let file = machine.path("no-chmod.json");
    std::fs::write(&file, NO_CHMOD).expect("write");
    let nobodys = line(std::process::id().cast_signed(), "Seccomp");
    let default = profile(ProfileType::RuntimeDefault, "");
    for (name, asked, privileged, mode) in [
        ("first-silent", None, false, nobodys.as_str()),
        ("first-free", Some(profile(ProfileType::Unconfined, "")), false, &nobodys),
        ("first-default", Some(default.clone()), false, "2"),
        ("first-localhost", Some(localhost(&file)), false, "2"),
        ("first-privileged", Some(default), true, &nobodys),
    ] {
        let made = pod(machine, name, |context| {
            context.seccomp = asked;
            context.privileged = privileged;
        });
        let pod = made.await.expect("sandbox");
        assert_eq!(line(init_of(machine, &pod).await, "Seccomp"), mode, "{name}");
        let id = container(machine, &pod, "c", 0).await;
        // The profile applies to process 1 only, not to containers.
        assert_eq!(sh(machine, &id, "touch /f; chmod 600 /f; echo $?").await, "0", "{name}");
        assert_eq!(sh(machine, &id, "cat /proc/1/comm").await, "coracle-init");
        machine.remove_pod(&pod).await;
    }
    // The deprecated field has the same effect.
    #[allow(deprecated, reason = "older kubelets set it")]
    let old = pod(machine, "first-old", |context| {
        context.seccomp_profile_path = format!("localhost/{}", file.display());
    });
    let old = old.await.expect("sandbox");
    assert_eq!(line(init_of(machine, &old).await, "Seccomp"), "2");
    machine.remove_pod(&old).await;
    std::fs::remove_file(file).expect("remove");
}

pub(super) async fn process_1_runs_as_the_pods_user(machine: &mut Machine) {
    let user = |context: &mut cri::LinuxSandboxSecurityContext| {
        context.run_as_user = Some(cri::Int64Value { value: 1000 });
        context.run_as_group = Some(cri::Int64Value { value: 3000 });
        context.supplemental_groups = vec![42];
        context.readonly_rootfs = true;
    };
    let plain = pod(machine, "first-user", user).await.expect("sandbox");
    let mapped = pod(machine, "first-mapped", |context| {
        user(context);
        let pid = cri::NamespaceMode::Pod.into();
        context.namespace_options = Some(cri::NamespaceOption { pid, ..options(range()) });
    });
    let mapped = mapped.await.expect("sandbox");
    for (pod, offset) in [(&plain, 0), (&mapped, range().host_id)] {
        let init = init_of(machine, pod).await;
        let ids = |id: u32| format!("{0} {0} {0} {0}", id + offset);
        assert_eq!((line(init, "Uid"), line(init, "Gid")), (ids(1000), ids(3000)));
        let groups: BTreeSet<String> = line(init, "Groups").split(' ').map(str::to_owned).collect();
        assert_eq!(groups, [3000, 42].map(|gid: u32| (gid + offset).to_string()).into());
        // CAP_SYS_PTRACE and no other capability.
        let trace = format!("{:016x}", 1_u64 << 19);
        let none = format!("{:016x}", 0);
        for set in ["CapInh", "CapEff", "CapPrm", "CapAmb"] {
            assert!([&trace, &none].contains(&&line(init, set)), "{set}");
        }
        assert_eq!(line(init, "NoNewPrivs"), "1");
    }
    // A container with the same uid can neither inspect nor kill process 1.
    let same = container(machine, &plain, "same", 1000).await;
    assert_eq!(
        sh(machine, &same, "grep ^Uid: /proc/1/status | tr '\t' ' '").await,
        "Uid: 1000 1000 1000 1000"
    );
    sh(machine, &same, "! ls /proc/1/root/ 2>/dev/null; kill -9 1; kill -0 1").await;
    let root = container(machine, &plain, "root", 0).await;
    assert_eq!(sh(machine, &root, "echo here").await, "here");
    // Process 1 of the pod ends with the shim.
    let init = init_of(machine, &plain).await;
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(machine.shim_pid(&plain).await),
        nix::sys::signal::Signal::SIGKILL,
    )
    .expect("kill");
    ends(init).await;
    machine.remove_pod(&plain).await;
    machine.remove_pod(&mapped).await;
}

pub(super) async fn an_unusable_profile_is_refused_and_leaves_nothing(machine: &mut Machine) {
    let before = machine.traces().await;
    let file = |name: &str, text: &str| {
        let file = machine.path(name);
        std::fs::write(&file, text).expect("write");
        file
    };
    let (no_profile, no_wait) = (file("none.json", "{}"), file("no-wait.json", NO_WAIT));
    let no_life = file("no-life.json", NO_LIFE);
    let absent = machine.path("absent.json");
    for (name, asked, code) in [
        ("absent", localhost(&absent), Code::InvalidArgument),
        ("relative", profile(ProfileType::Localhost, "absent.json"), Code::InvalidArgument),
        ("nameless", profile(ProfileType::Localhost, ""), Code::InvalidArgument),
        ("named", profile(ProfileType::RuntimeDefault, "/p.json"), Code::InvalidArgument),
        ("number", cri::SecurityProfile { profile_type: 7, ..Default::default() }, Code::InvalidArgument),
        ("none", localhost(&no_profile), Code::Unknown),
        ("no-wait", localhost(&no_wait), Code::Unknown),
        ("no-life", localhost(&no_life), Code::Unknown),
    ] {
        let refused = pod(machine, name, |context| context.seccomp = Some(asked)).await;
        let refused = refused.expect_err(name);
        assert_eq!(refused.code(), code, "{name}: {refused}");
        assert_eq!(machine.traces().await, before, "{name}");
    }
    // The profile is checked also if the pod has no process 1.
    let own = machine.try_pod("absent-own", |config| {
        let context = config.linux.get_or_insert_default().security_context.get_or_insert_default();
        context.seccomp = Some(localhost(&absent));
    });
    assert_eq!(own.await.expect_err("absent").code(), Code::InvalidArgument);
    let unloaded = pod(machine, "unloaded", |context| {
        context.apparmor = Some(profile(ProfileType::Localhost, "coracle-test-absent"));
    });
    assert_eq!(unloaded.await.expect_err("not loaded").code(), Code::InvalidArgument);
    let outside = pod(machine, "outside", |context| {
        context.run_as_user = Some(cri::Int64Value { value: 70_000 });
        let pid = cri::NamespaceMode::Pod.into();
        context.namespace_options = Some(cri::NamespaceOption { pid, ..options(range()) });
    });
    assert_eq!(outside.await.expect_err("not mapped").code(), Code::InvalidArgument);
    assert_eq!(machine.traces().await, before);
    for file in [no_profile, no_wait, no_life] {
        std::fs::remove_file(file).expect("remove");
    }
}

pub(super) async fn process_1_has_the_pods_apparmor_profile_if_the_kernel_has_apparmor(
    machine: &mut Machine,
) {
    let asked = |context: &mut cri::LinuxSandboxSecurityContext| {
        context.apparmor = Some(profile(ProfileType::RuntimeDefault, ""));
        context.run_as_user = Some(cri::Int64Value { value: 1000 });
        context.seccomp = Some(profile(ProfileType::RuntimeDefault, ""));
    };
    let pod = pod(machine, "first-apparmor", asked).await.expect("sandbox");
    let init = init_of(machine, &pod).await;
    let enabled = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled");
    if enabled.is_ok_and(|text| text.trim() == "Y") {
        let label = std::fs::read_to_string(format!("/proc/{init}/attr/current")).expect("label");
        assert_ne!(label.trim(), "unconfined");
    } else {
        coracle_testing::skip_part!("the kernel has no AppArmor");
    }
    let id = container(machine, &pod, "c", 0).await;
    assert_eq!(sh(machine, &id, "echo here").await, "here");
    machine.remove_pod(&pod).await;
}

//! Process 1 of a shared pid namespace: its resources, and the consequences of its end.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use coracle_proto::shim::InitProcess;
use futures::StreamExt as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid as Number;
use serde_json::{Value, json};

use crate::fixture::{Pod, until};
use crate::shim_client::{Closed, ErrorKind};

/// A pod with a process 1, and the pid of that process.
async fn shared(pod: Pod, change: impl FnOnce(&mut coracle_proto::shim::SandboxConfig)) -> (Pod, i32) {
    pod.end().await;
    let pod = Pod::start_with(|config| {
        config.share_pid = true;
        change(config);
    })
    .await;
    let init = pod.shim.hello().await.unwrap().init_pid;
    (pod, init)
}

/// The spec of a container that joins the pid namespace of a process.
fn joining(pod: &Pod, id: &str, pid: i32, script: &str) -> Value {
    let mut spec = pod.spec(id, script);
    spec["linux"]["namespaces"][1] = json!({ "type": "pid", "path": format!("/proc/{pid}/ns/pid") });
    spec
}

pub(crate) async fn process_1_has_its_own_program_and_root(pod: Pod) {
    // The configuration has a user, and a filter that allows everything.
    let process = InitProcess {
        uid: 1000,
        gid: 3000,
        groups: vec![42],
        seccomp_program: [6_u8, 0, 0, 0, 0, 0, 0xff, 0x7f].repeat(3000),
        ..InitProcess::default()
    };
    let (pod, init) = shared(pod, |config| config.init = Some(process)).await;
    let of = |name: &str| format!("/proc/{init}/{name}");
    let status = fs::read_to_string(of("status")).unwrap();
    for line in [
        "Name:\tcoracle-init",
        "Uid:\t1000\t1000\t1000\t1000",
        "Gid:\t3000\t3000\t3000\t3000",
        "Groups:\t42",
        "Seccomp:\t2",
    ] {
        assert!(status.contains(line), "{line}: {status}");
    }
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
    // SIGCHLD is signal 17.
    assert_ne!(u64::from_str_radix(mask, 16).unwrap() & (1 << 16), 0);
    assert_eq!(fs::read_to_string(of("cmdline")).unwrap(), "coracle-init\0");
    assert_eq!(fs::read_to_string(of("environ")).unwrap(), "");
    let mounts = fs::read_to_string(of("mountinfo")).unwrap();
    assert!(
        mounts.lines().count() == 1 && mounts.contains(" / / ro,") && mounts.contains("tmpfs"),
        "{mounts}"
    );
    let names = |name: &str| -> Vec<_> {
        fs::read_dir(of(name)).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    };
    assert_eq!(names("root"), ["coracle-init"]);
    assert_eq!(names("root/.."), ["coracle-init"]);
    assert_eq!(fs::metadata(of("exe")).unwrap().dev(), fs::metadata(of("root")).unwrap().dev());
    let open: Vec<_> = (0..3).map(|fd| fs::read_link(of(&format!("fd/{fd}"))).unwrap()).collect();
    assert!(open.iter().all(|open| open.to_string_lossy().starts_with("pipe:")), "{open:?}");
    assert_eq!(names("fd").len(), 3);
    for namespace in ["mnt", "cgroup"] {
        let other = |process: &str| fs::read_link(format!("/proc/{process}/ns/{namespace}")).unwrap();
        assert_ne!(other(&init.to_string()), other(&pod.shim.pid().to_string()), "{namespace}");
    }
    // Process 1 of the pod ends with the shim.
    kill(Number::from_raw(pod.shim.pid()), Signal::SIGKILL).unwrap();
    until(|| !Path::new(&of("cwd")).exists()).await;
    pod.abandon().await;
}

pub(crate) async fn the_end_of_process_1_ends_the_pod_and_the_exits_are_reported(pod: Pod) {
    let (mut pod, init) = shared(pod, |_| {}).await;
    let spec = joining(&pod, "inside", init, "trap '' TERM; sleep 1000");
    pod.run_request(pod.create_request("inside", &spec)).await;
    let alone = pod.run("alone", "sleep 1000").await;
    let waiting = joining(&pod, "waiting", init, "true");
    pod.shim.create(pod.create_request("waiting", &waiting)).await.unwrap();
    kill(Number::from_raw(init), Signal::SIGKILL).unwrap();
    let mut codes = BTreeMap::new();
    while let Some(event) = pod.events.next().await {
        codes.insert(event.container_id, event.exited.unwrap().code);
    }
    let killed = ["alone", "inside", "waiting"].map(|id| (id.to_owned(), 137));
    assert_eq!(codes, killed.into());
    assert_eq!(pod.shim.closed().await, Closed::Exited);
    assert!(!Path::new(&format!("/proc/{alone}/cwd")).exists());
    // The exits are recorded for an agent that was not connected.
    let exits = fs::read_dir(pod.dir.join("shim/exits")).unwrap().count();
    assert_eq!(exits, 3);
    pod.abandon().await;
}

pub(crate) async fn a_creator_joins_no_process_that_is_not_of_the_pod(pod: Pod) {
    let (pod, init) = shared(pod, |_| {}).await;
    let mut target = pod.run("target", "sleep 1000").await;
    let spec = joining(&pod, "debugger", target, "sleep 1000");
    let debugger = pod.run_request(pod.create_request("debugger", &spec)).await;
    let namespace = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap();
    assert_eq!(namespace(debugger), namespace(target));
    // These pids belong to no process of a container, as after a reuse of the target's pid.
    pod.shim.kill("target", libc::SIGKILL).await.unwrap();
    until(|| !Path::new(&format!("/proc/{target}")).exists()).await;
    for foreign in [target, std::process::id().cast_signed(), 1, pod.shim.pid()] {
        let spec = joining(&pod, "c", foreign, "sleep 1000");
        let error = pod.shim.create(pod.create_request("c", &spec)).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::WrongState, "{error}");
        assert!(error.message.contains("the pod has no process"), "{error}");
    }
    target = init;
    let spec = joining(&pod, "c", target, "sleep 1000");
    pod.run_request(pod.create_request("c", &spec)).await;
    pod.end().await;
}

/// Descriptors that are open in the process that starts the shim do not reach the pod's processes.
pub(crate) async fn inherited_descriptors_stay_outside(pod: Pod) {
    pod.end().await;
    let file = fs::File::open("/etc/hostname").or_else(|_absent| fs::File::open("/etc/passwd")).unwrap();
    let inode = file.metadata().unwrap().ino();
    // The descriptor has no close-on-exec flag, like descriptors inherited from a shell.
    let inherited = nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_DUPFD(60)).unwrap();
    let pod = Pod::start_with(|config| config.share_pid = true).await;
    let init = pod.shim.hello().await.unwrap().init_pid;
    let first = pod.run("c", "sleep 1000").await;
    for pid in [pod.shim.pid(), init, first] {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        let leaked = open.filter(|entry| fs::metadata(entry.path()).is_ok_and(|found| found.ino() == inode));
        assert_eq!(leaked.count(), 0, "{pid}");
    }
    nix::unistd::close(inherited).unwrap();
    pod.end().await;
}

//! Frozen containers: recovery from a checkpoint that an earlier runtime did not finish, and stops of frozen
//! containers.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::{eventually, eventually_async};
use tokio::time::timeout;
use tonic::Request;

use crate::checkpoint_pod::{count, empty_directory, goes_on, names, pod};
use crate::fixture::Machine;

/// A timeout that even a slow machine does not reach.
const LONG: Duration = Duration::from_secs(60);

/// The freezer cgroup of a container: the value that freezes it, and the file and line with its state.
struct Freezer {
    file: PathBuf,
    word: &'static str,
    state: (PathBuf, &'static str),
}

impl Freezer {
    fn of(machine: &Machine, pod: &str, id: &str) -> Self {
        let group = machine.container_group(pod, id);
        let v2 = Path::new("/sys/fs/cgroup").join(group.trim_start_matches('/'));
        if v2.join("cgroup.freeze").exists() {
            let state = (v2.join("cgroup.events"), "frozen 1");
            return Self { file: v2.join("cgroup.freeze"), word: "1", state };
        }
        let file = PathBuf::from(format!("/sys/fs/cgroup/freezer{group}/freezer.state"));
        Self { word: "FROZEN", state: (file.clone(), "FROZEN"), file }
    }

    fn freeze(&self) {
        std::fs::write(&self.file, self.word).expect("freeze");
        eventually("the cgroup to freeze", 10, || self.is_frozen());
    }

    fn is_frozen(&self) -> bool {
        let (file, line) = &self.state;
        std::fs::read_to_string(file).expect("state").lines().any(|found| found == *line)
    }
}

/// Creates the state that a runtime leaves when it is killed during a pod's checkpoint.
fn leave_incomplete_checkpoint(machine: &Machine, pod: &str, id: &str, output: &Path) -> Freezer {
    let freezer = Freezer::of(machine, pod, id);
    freezer.freeze();
    let layer = layer(machine, id);
    std::fs::create_dir_all(layer.join("checkpoint/checkpoint")).expect("directory");
    std::fs::write(layer.join("checkpoint.output"), output.display().to_string()).expect("note");
    std::fs::write(output.join(format!("{id}.tar")), "half").expect("file");
    freezer
}

pub(crate) fn layer(machine: &Machine, id: &str) -> PathBuf {
    machine.path("root/containers").join(id)
}

/// Waits until nothing is left of a checkpoint.
pub(crate) async fn nothing_is_left(machine: &Machine, id: &str, output: &Path) {
    let left = || {
        let mut left = names(output);
        left.extend(names(&layer(machine, id)).into_iter().filter(|name| name.starts_with("checkpoint")));
        left
    };
    eventually_async("nothing is left of the checkpoint", 10, async || left().is_empty()).await;
}

pub(crate) async fn containers_that_a_dead_runtime_froze_continue(machine: &mut Machine) {
    let (source, ids) = pod(machine, "frozen").await;
    count(machine, &ids[0]).await;
    let output = empty_directory(machine, "half-made");
    machine.close_runtime().await;
    leave_incomplete_checkpoint(machine, "frozen", &ids[0], &output);
    machine.open_runtime().await;
    goes_on(machine, &ids[0]).await;
    nothing_is_left(machine, &ids[0], &output).await;
    machine.remove_pod(&source).await;
    std::fs::remove_dir(&output).expect("remove");
}

/// Argument that makes the test program imitate CRIU.
const ROLE: &str = "--wait-as-criu";

/// Starts a process with CRIU's command line. The process ends at the end of its input. Returns when the command line
/// is visible.
fn criu_in(build_dir: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.arg0("/sbin/criu").arg(ROLE).arg(build_dir).stdin(Stdio::piped());
    let child = command.spawn().expect("a process");
    let called = || std::fs::read(format!("/proc/{}/cmdline", child.id())).unwrap_or_default();
    eventually("the command line of CRIU", 10, || called().starts_with(b"/sbin/criu\0"));
    child
}

/// Waits for the end of the input, if [`criu_in`] has started this program.
pub(crate) fn wait_if_called() -> Option<ExitCode> {
    if std::env::args().nth(1).is_none_or(|role| role != ROLE) {
        return None;
    }
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).expect("input");
    Some(ExitCode::SUCCESS)
}

pub(crate) async fn a_criu_that_outlives_its_runtime_delays_only_its_container(machine: &mut Machine) {
    let (source, ids) = pod(machine, "outlived").await;
    let beside = machine.pod("beside").await;
    let other = machine.run(&beside, "c", &["sleep", "1000"]).await;
    count(machine, &ids[0]).await;
    let output = empty_directory(machine, "outlived");
    machine.close_runtime().await;
    let dumped = leave_incomplete_checkpoint(machine, "outlived", &ids[0], &output);
    let waiting = leave_incomplete_checkpoint(machine, "outlived", &ids[1], &output);
    let mut criu = criu_in(&layer(machine, &ids[0]).join("checkpoint"));
    // A runtime that waits for CRIU at its start would never open and never serve the call.
    timeout(LONG, machine.open_runtime()).await.expect("the start does not wait for CRIU");
    let exec =
        timeout(LONG, machine.exec(&other, &["true"], 0)).await.expect("the call does not wait for CRIU");
    assert_eq!(exec.expect("exec").exit_code, 0);
    assert!(!waiting.is_frozen() && dumped.is_frozen());
    // This call waits for CRIU's end and then continues. A later call of another container overtakes it.
    let mut late = Box::pin(machine.exec(&ids[0], &["cat", "/count"], 0));
    tokio::select! {
        biased;
        early = &mut late => panic!("the call did not wait: {early:?}"),
        exec = machine.exec(&other, &["true"], 0) => assert_eq!(exec.expect("exec").exit_code, 0),
    }
    assert!(dumped.is_frozen());
    drop(criu.stdin.take());
    let late = timeout(LONG, late).await.expect("the call continues after CRIU's end");
    assert_eq!(late.expect("exec").exit_code, 0);
    nothing_is_left(machine, &ids[0], &output).await;
    goes_on(machine, &ids[0]).await;
    criu.wait().expect("its end");
    for pod in [source, beside] {
        machine.remove_pod(&pod).await;
    }
    std::fs::remove_dir(&output).expect("remove");
}

pub(crate) async fn a_frozen_container_can_be_stopped(machine: &mut Machine) {
    let (pod, ids) = pod(machine, "stopped").await;
    for id in &ids {
        Freezer::of(machine, "stopped", id).freeze();
    }
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: pod.clone() };
    // The signal of a stop does not end a frozen container.
    let stopped = timeout(LONG, machine.runtime.stop_pod_sandbox(Request::new(stop))).await;
    stopped.expect("the stop does not wait for the containers").expect("stop");
    for id in &ids {
        assert_eq!(machine.status(id).await.exit_code, 137);
    }
    machine.remove_pod(&pod).await;
}

//! Interrupted checkpoints: the runtime is killed, or the pod is stopped. Interruptions of a dump are tested only if
//! CRIU works.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::Instant;

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::{CRIU_STAND_IN, eventually_async, until, until_yielding};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use prost::Message;
use tonic::Request;

use crate::checkpoint::works;
use crate::checkpoint_frozen::{layer, nothing_is_left};
use crate::checkpoint_pod::{checkpoint, count, empty_directory, goes_on, names, pod, restore_request};
use crate::fixture::{Machine, alive, has_memory};

/// Argument that makes the test program execute a checkpoint or restore call, during which it is killed.
const ROLE: &str = "--make-checkpoint";
/// Command that holds 64 MiB in memory, so that its dump takes a while.
const HOLDER: &str = "(dd if=/dev/zero bs=1048576 count=64; sleep 10000) | tail -c 67108864";
const HELD_KB: u64 = 65_536;
/// Size of an incomplete dump of that memory.
const SOME: u64 = 4 << 20;

/// A process that is killed when the test ends.
struct EndsWithTest(Child);

impl Drop for EndsWithTest {
    fn drop(&mut self) {
        // The process may have ended.
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// If this program was started for it, executes the call of the request file, with its own runtime.
pub(crate) fn checkpoint_if_called() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, role, dir, cgroup_root, call, request] = arguments.as_slice() else { return None };
    if role != ROLE {
        return None;
    }
    let request = std::fs::read(request).expect("a request");
    let tokio = tokio::runtime::Runtime::new().expect("tokio");
    let made = tokio.block_on(async {
        let runtime = Machine::borrowed(Path::new(dir), cgroup_root).await;
        match Call::of(call, &request) {
            Call::Container(request) => runtime.checkpoint_container(Request::new(request)).await.map(drop),
            Call::Pod(request) => runtime.checkpoint_pod(Request::new(request)).await.map(drop),
            Call::Restore(request) => runtime.restore_pod(Request::new(*request)).await.map(drop),
        }
    });
    println!("the call came to its end: {made:?}");
    Some(if made.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The call that the process makes.
enum Call {
    Container(cri::CheckpointContainerRequest),
    Pod(cri::CheckpointPodRequest),
    Restore(Box<cri::RestorePodRequest>),
}

impl Call {
    fn of(name: &str, request: &[u8]) -> Self {
        match name {
            "container" => Self::Container(Message::decode(request).expect("a request")),
            "pod" => Self::Pod(Message::decode(request).expect("a request")),
            _ => Self::Restore(Box::new(Message::decode(request).expect("a request"))),
        }
    }

    /// The command that starts the process.
    fn command(&self, machine: &Machine) -> Command {
        let (name, request) = match self {
            Self::Container(request) => ("container", request.encode_to_vec()),
            Self::Pod(request) => ("pod", request.encode_to_vec()),
            Self::Restore(request) => ("restore", request.encode_to_vec()),
        };
        let file = machine.path("request");
        std::fs::write(&file, request).expect("write");
        let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
        command.arg(ROLE).arg(machine.path("")).arg(machine.cgroup_root()).arg(name).arg(file);
        command
    }
}

fn pod_request(pod: &str, ids: &[String], output: &Path) -> cri::CheckpointPodRequest {
    cri::CheckpointPodRequest {
        pod_sandbox_id: pod.to_owned(),
        output_path: output.display().to_string(),
        container_ids: ids.to_vec(),
        ..Default::default()
    }
}

/// Fault points of the checkpoint of a container.
const OF_CONTAINER: [&str; 6] = [
    "checkpoint.noted",
    "checkpoint.frozen",
    "checkpoint.dumped",
    "checkpoint.thawed",
    "checkpoint.written",
    "checkpoint.named",
];
/// Fault points of the checkpoint of a pod. `NAME:2` is the second pass, which belongs to the second container.
const OF_POD: [&str; 10] = [
    "checkpoint-pod.noted",
    "checkpoint-pod.noted:2",
    "checkpoint.frozen",
    "checkpoint.frozen:2",
    "checkpoint.dumped:2",
    "checkpoint.thawed",
    "checkpoint-pod.named",
    "checkpoint-pod.named:3",
    "checkpoint-pod.made",
    "checkpoint-pod.forgotten",
];
const OF_RESTORE: [&str; 4] =
    ["run.recorded", "restore-pod.container", "create.bundle:2", "restore-pod.container:2"];

/// Makes the call in another process, which aborts at the point if one is given. Returns whether the call completed.
async fn in_another_process(machine: &mut Machine, call: &Call, point: Option<&str>) -> bool {
    let mut command = call.command(machine);
    if works() != Some(true) {
        let dir = empty_directory(machine, "stand-in");
        let criu = dir.join("criu");
        std::fs::write(&criu, CRIU_STAND_IN).expect("write");
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&criu, executable).expect("mode");
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", dir.display()));
    }
    command.envs(point.map(|point| ("CORACLE_FAULT", point)));
    machine.lend().await;
    let mut runtime = EndsWithTest(command.spawn().expect("a process"));
    let what = format!("the runtime ends: {point:?}");
    let ended = until(&what, 50, || runtime.0.try_wait().expect("its end")).await;
    machine.take_back().await;
    let aborted = std::os::unix::process::ExitStatusExt::signal(&ended) == Some(6);
    assert_eq!(aborted, point.is_some(), "{point:?}: {ended}");
    ended.success()
}

pub(crate) async fn a_runtime_that_aborts_at_any_step_leaves_no_checkpoint(machine: &mut Machine) {
    let (source, ids) = pod(machine, "steps").await;
    count(machine, &ids[0]).await;
    let output = empty_directory(machine, "steps");
    let location = output.join("c.tar");
    let of_container = Call::Container(cri::CheckpointContainerRequest {
        // A container without connections: to keep them, CRIU needs iptables here.
        container_id: ids[1].clone(),
        location: location.display().to_string(),
        timeout: 0,
    });
    let of_pod = Call::Pod(pod_request(&source, &ids, &output));
    let cuts = OF_CONTAINER.iter().map(|point| (&of_container, point));
    for (call, point) in cuts.chain(OF_POD.iter().map(|point| (&of_pod, point))) {
        in_another_process(machine, call, Some(*point)).await;
        nothing_is_left(machine, &ids[0], &output).await;
        nothing_is_left(machine, &ids[1], &output).await;
        goes_on(machine, &ids[0]).await;
        assert_eq!(machine.exec(&ids[1], &["pwd"], 0).await.expect("exec").exit_code, 0, "{point}");
    }
    // An existing archive is replaced completely or not at all.
    std::fs::write(&location, "before").expect("write");
    in_another_process(machine, &of_container, Some("checkpoint.written")).await;
    assert_eq!(std::fs::read_to_string(&location).expect("it stays"), "before");
    assert_eq!(names(&output), ["c.tar"]);
    assert!(in_another_process(machine, &of_container, None).await, "a checkpoint");
    assert!(location.metadata().expect("the container runs").len() > 1024 && names(&output).len() == 1);
    std::fs::remove_file(&location).expect("remove");
    assert!(in_another_process(machine, &of_pod, None).await, "a checkpoint");
    is_not_half_restored(machine, &output).await;
    machine.remove_pod(&source).await;
    std::fs::remove_dir_all(&output).expect("remove");
}

async fn is_not_half_restored(machine: &mut Machine, output: &Path) {
    let before = machine.traces().await;
    let restore = Call::Restore(Box::new(restore_request(machine, output)));
    for point in OF_RESTORE {
        in_another_process(machine, &restore, Some(point)).await;
        assert_eq!(machine.traces().await, before, "after {point}");
    }
}

/// A pod with an additional container, whose dump takes a while.
async fn large_pod(machine: &Machine, name: &str) -> (String, Vec<String>) {
    let (pod, mut ids) = pod(machine, name).await;
    let holder = machine.run(&pod, "holder", &["sh", "-c", HOLDER]).await;
    let held = || async {
        let look = ["sh", "-c", "cat /proc/[0-9]*/status"];
        let statuses = machine.exec(&holder, &look, 0).await.expect("exec").stdout;
        let statuses = String::from_utf8_lossy(&statuses).into_owned();
        let sizes =
            statuses.lines().filter_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
        sizes.filter_map(|size| size.parse::<u64>().ok()).max().unwrap_or_default()
    };
    eventually_async("the process has its memory", 10, async || held().await > HELD_KB).await;
    ids.push(holder);
    (pod, ids)
}

/// Waits until CRIU writes the container's memory. Returns CRIU's processes.
async fn criu_writes(machine: &Machine, id: &str) -> Vec<i32> {
    let build_dir = layer(machine, id).join("checkpoint");
    let images = build_dir.join("checkpoint");
    let written = || {
        let files = std::fs::read_dir(&images).into_iter().flatten().flatten();
        let pages = files.filter(|file| file.file_name().to_string_lossy().starts_with("pages-"));
        pages.filter_map(|file| Some(file.metadata().ok()?.len())).sum::<u64>()
    };
    let mut criu = Vec::new();
    // CRIU may end in the intervals of other helpers.
    until_yielding("CRIU to write", 30, || {
        if criu.is_empty() {
            criu = criu_in(&build_dir);
        }
        let is_writing = written() >= SOME && !criu.is_empty();
        if is_writing { Ok(()) } else { Err(format!("{:?}", images.exists().then(|| names(&images)))) }
    })
    .await;
    criu
}

fn criu_in(build_dir: &Path) -> Vec<i32> {
    let wanted = build_dir.display().to_string();
    let processes = std::fs::read_dir("/proc").expect("processes").flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        let mut words = line.split('\0');
        words.next().is_some_and(|program| program.ends_with("criu")) && words.any(|word| word == wanted)
    })
    .collect()
}

fn send(pids: &[i32], signal: Signal) {
    for pid in pids {
        kill(Pid::from_raw(*pid), signal).expect("CRIU is running");
    }
}

pub(crate) async fn a_runtime_killed_during_a_dump_recovers(machine: &mut Machine) {
    if works() != Some(true) {
        coracle_testing::skip!("CRIU does not work on this machine");
    }
    let (source, ids) = large_pod(machine, "killed").await;
    println!("a pod has so much in memory that its checkpoint takes a while");
    let holder = &ids[2];
    let beside = machine.pod("beside").await;
    let other = machine.run(&beside, "c", &["sleep", "1000"]).await;
    let output = empty_directory(machine, "killed");
    machine.lend().await;
    let mut command = Call::Pod(pod_request(&source, &ids, &output)).command(machine);
    let mut runtime = EndsWithTest(command.spawn().expect("a process"));
    println!("a runtime in another process makes the checkpoint");
    let criu = criu_writes(machine, holder).await;
    runtime.0.kill().expect("kill");
    let ended = runtime.0.wait().expect("its end");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended), Some(9), "{ended}");
    let outlived = criu.iter().filter(|pid| alive(**pid)).count();
    let begun = Instant::now();
    machine.take_back().await;
    let exec = machine.exec(&other, &["true"], 0).await.expect("exec");
    assert_eq!(exec.exit_code, 0, "another pod's");
    let (opened, left) = (begun.elapsed(), criu.iter().filter(|pid| alive(**pid)).count());
    nothing_is_left(machine, holder, &output).await;
    println!(
        "CRIU: {outlived} outlived the runtime, {left} the next one's start ({opened:?}), gone {:?}",
        begun.elapsed()
    );
    if outlived == 0 {
        // CRIU ended too early; the recovery was tested without it.
        println!("CRIU ended before it could be seen to outlive its runtime");
    }
    for id in &ids {
        assert_eq!(machine.status(id).await.state, i32::from(cri::ContainerState::ContainerRunning));
        assert_eq!(machine.exec(id, &["pwd"], 0).await.expect("exec").exit_code, 0);
    }
    goes_on(machine, &ids[0]).await;
    checkpoint(machine, &source, &ids[..2], &output).await.expect("a new checkpoint");
    assert_eq!(names(&output).len(), 3, "{:?}", names(&output));
    // The checkpoint of a single container has no digest. Computing a digest would take the longest here.
    let alone = output.join("holder.tar");
    crate::checkpoint::checkpoint(machine, holder, &alone).await.expect("a new checkpoint of it as well");
    assert!(alone.metadata().expect("an archive").len() > HELD_KB << 10);
    goes_on(machine, &ids[0]).await;
    for pod in [source, beside] {
        machine.remove_pod(&pod).await;
    }
    std::fs::remove_dir_all::<PathBuf>(output).expect("remove");
}

pub(crate) async fn a_pod_is_stopped_while_criu_dumps_it(machine: &mut Machine) {
    if works() != Some(true) {
        coracle_testing::skip!("CRIU does not work on this machine");
    }
    let (pod, ids) = large_pod(machine, "stopped").await;
    let output = empty_directory(machine, "stopped");
    let holder = machine.pid(&ids[2]).await;
    let stop = async {
        let criu = criu_writes(machine, &ids[2]).await;
        // CRIU is stopped until its target is killed; otherwise it might finish the dump.
        send(&criu, Signal::SIGSTOP);
        let begun = Instant::now();
        let stop = cri::StopPodSandboxRequest { pod_sandbox_id: pod.clone() };
        let goes_on = async {
            until("the process is killed", 10, || !has_memory(holder)).await;
            send(&criu, Signal::SIGCONT);
        };
        let (stopped, ()) = tokio::join!(machine.runtime.stop_pod_sandbox(Request::new(stop)), goes_on);
        stopped.map(|_| begun.elapsed())
    };
    let (made, stopped) = tokio::join!(checkpoint(machine, &pod, &ids, &output), stop);
    println!("stopped within {:?}", stopped.expect("stopped"));
    let error = made.expect_err("the pod was stopped");
    assert!(error.message().contains("is being stopped"), "{error}");
    nothing_is_left(machine, &ids[2], &output).await;
    machine.remove_pod(&pod).await;
    std::fs::remove_dir(&output).expect("remove");
}

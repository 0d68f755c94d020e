//! Shims that live but do not respond: here stopped, otherwise frozen or blocked in the kernel.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use coracle_cri::ShimTimeouts;
use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::eventually_async;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::unistd::Pid;
use tokio::time::timeout;
use tonic::{Code, Request, Status};

use crate::client::Streams;
use crate::fixture::{Machine, alive, ends, has_memory};

/// A timeout that even a slow machine does not reach.
const LONG: Duration = Duration::from_secs(120);

/// Short timeouts, but long enough for a healthy shim.
fn timeouts() -> ShimTimeouts {
    let short = Duration::from_secs(3);
    ShimTimeouts { answer: short, work: short, end: short, ..ShimTimeouts::default() }
}

async fn restart(machine: &mut Machine) {
    machine.close_runtime().await;
    let opened = machine.open_runtime_with(|config| config.shim_timeouts = timeouts());
    timeout(LONG, opened).await.expect("the runtime starts");
}

fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).expect("signal");
}

async fn is_ready(machine: &Machine, pod: &str) -> bool {
    machine.sandbox(pod).await.state == i32::from(cri::PodSandboxState::SandboxReady)
}

async fn remove(machine: &Machine, pod: &str) {
    timeout(LONG, machine.remove_pod(pod)).await.expect("it is stopped and removed");
}

/// An argument of `sleep` that is unique on the machine.
fn long(digit: u8) -> String {
    format!("{digit}{:08}", std::process::id())
}

/// The processes with this last argument.
fn running(argument: &str) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").expect("processes").flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse::<i32>().ok());
    let named = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).rev().nth(1) == Some(argument.as_bytes())
    };
    pids.filter(|pid| named(pid) && alive(*pid)).collect()
}

pub(crate) async fn a_stopped_shim_does_not_block_the_start_of_the_runtime(machine: &mut Machine) {
    let before = machine.traces().await;
    let (stands, other) = (machine.pod("stands").await, machine.pod("other").await);
    let id = machine.run(&stands, "c", &["sleep", "1000"]).await;
    let beside = machine.run(&other, "c", &["sleep", "1000"]).await;
    let (shim, pid) = (machine.shim_pid(&stands).await, machine.pid(&id).await);
    send(shim, Signal::SIGSTOP);
    restart(machine).await;
    assert_eq!(machine.exec(&beside, &["true"], 0).await.expect("exec").exit_code, 0);
    assert!(is_ready(machine, &other).await && !is_ready(machine, &stands).await);
    assert!(alive(pid), "the shim was killed");
    assert_eq!(machine.status(&id).await.state, i32::from(cri::ContainerState::ContainerRunning));
    let refused = machine.exec(&id, &["true"], 0).await.expect_err("the shim does not respond");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let refused =
        machine.create(&stands, "d", &["true"], |_| {}).await.expect_err("the shim does not respond");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    // Another restart gives the same result.
    restart(machine).await;
    assert!(!is_ready(machine, &stands).await && alive(pid));
    timeout(LONG, machine.stop(&id, 1)).await.expect("it is stopped");
    ends(pid).await;
    let status = machine.status(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (255, "Unknown"));
    remove(machine, &stands).await;
    ends(shim).await;
    machine.remove_pod(&other).await;
    assert_eq!(machine.traces().await, before);
    machine.restart(Duration::ZERO).await;
}

pub(crate) async fn a_pod_is_ready_again_when_its_shim_responds(machine: &mut Machine) {
    let before = machine.traces().await;
    let pod = machine.pod("wakes").await;
    let stays = machine.run(&pod, "stays", &["sleep", "1000"]).await;
    let ends = machine
        .run(&pod, "ends", &["sh", "-c", "while [ ! -e /tmp/end ]; do usleep 20000; done; exit 7"])
        .await;
    machine.exec(&ends, &["touch", "/tmp/end"], 0).await.expect("exec");
    let shim = machine.shim_pid(&pod).await;
    send(shim, Signal::SIGSTOP);
    restart(machine).await;
    assert!(!is_ready(machine, &pod).await);
    send(shim, Signal::SIGCONT);
    eventually_async("the pod of the shim is ready again", 20, async || is_ready(machine, &pod).await).await;
    assert_eq!(machine.wait_exited(&ends).await.exit_code, 7);
    assert_eq!(machine.exec(&stays, &["true"], 0).await.expect("exec").exit_code, 0);
    // The runtime notices the end of this shim like that of any other shim.
    send(shim, Signal::SIGKILL);
    assert_eq!(machine.wait_exited(&stays).await.exit_code, 255);
    eventually_async("the pod of the shim is not ready", 20, async || !is_ready(machine, &pod).await).await;
    machine.remove_pod(&pod).await;
    // A shim that dies without responding again.
    machine.restart(Duration::ZERO).await;
    let pod = machine.pod("dies").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let shim = machine.shim_pid(&pod).await;
    send(shim, Signal::SIGSTOP);
    restart(machine).await;
    send(shim, Signal::SIGKILL);
    assert_eq!(machine.wait_exited(&id).await.exit_code, 255);
    machine.remove_pod(&pod).await;
    assert_eq!(machine.traces().await, before);
    machine.restart(Duration::ZERO).await;
}

pub(crate) async fn a_command_whose_client_disconnects_before_its_start_is_killed(machine: &mut Machine) {
    let before = machine.traces().await;
    let pod = machine.pod("impatient").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let shim = machine.shim_pid(&pod).await;
    let streams = Streams::open(machine).await;
    let descriptors = || std::fs::read_dir("/proc/self/fd").expect("descriptors").count();
    let command = long(5);
    let script = format!("trap '' HUP; sleep {command}; true");
    let open = descriptors();
    for (tty, wait) in [(false, 0), (true, 50), (false, 500), (true, 1000)] {
        let request = cri::ExecRequest {
            container_id: id.clone(),
            cmd: ["sh", "-c", &script].map(str::to_owned).to_vec(),
            stdin: true,
            stdout: true,
            tty,
            ..Default::default()
        };
        let url = machine.runtime.exec(Request::new(request)).await.expect("exec").into_inner().url;
        send(shim, Signal::SIGSTOP);
        let client = streams.connect(&url, "v5.channel.k8s.io").await;
        tokio::time::sleep(Duration::from_millis(wait)).await;
        drop(client);
        // Waits until the server has closed its end of the connection too. A command that starts before that is not
        // killed.
        eventually_async("the client is gone", 20, async || descriptors() <= open).await;
        send(shim, Signal::SIGCONT);
        // Later execs succeed.
        for _ in 0..3 {
            assert_eq!(machine.exec(&id, &["true"], 0).await.expect("exec").exit_code, 0);
        }
        eventually_async("the command of the exec is killed", 20, async || running(&command).is_empty())
            .await;
        eventually_async("the descriptors of the exec are closed", 20, async || descriptors() <= open).await;
    }
    drop(streams);
    machine.remove_pod(&pod).await;
    assert_eq!(machine.traces().await, before);
}

pub(crate) async fn an_unresponsive_shim_blocks_no_call(machine: &mut Machine) {
    let before = machine.traces().await;
    let pod = machine.pod("wedged").await;
    let first = machine.run(&pod, "first", &["sleep", "1000"]).await;
    let second = machine.run(&pod, "second", &["sleep", "1000"]).await;
    let made = machine.create(&pod, "made", &["sleep", "1000"], |_| {}).await.expect("create");
    let (shim, pids) =
        (machine.shim_pid(&pod).await, [machine.pid(&first).await, machine.pid(&second).await]);
    restart(machine).await;
    // A command that exceeds its timeout is killed with its descendants, even if the shim cannot report its end.
    let command = long(7);
    let wedge = async {
        eventually_async("the command runs", 20, async || !running(&command).is_empty()).await;
        send(shim, Signal::SIGSTOP);
    };
    let script = format!("sleep 1; sleep {command} & sleep {command}; true");
    let script = ["sh", "-c", &script];
    let late = machine.exec(&first, &script, 15);
    let (late, ()) = tokio::join!(timeout(LONG, late), wedge);
    assert_eq!(
        late.expect("it returns").expect_err("the exec exceeds its timeout").code(),
        Code::DeadlineExceeded
    );
    eventually_async("the command is killed", 20, async || running(&command).is_empty()).await;
    let silent = |result: Result<(), Status>| {
        let status = result.expect_err("it does not answer");
        assert!(status.message().contains("does not answer"), "{status}");
    };
    silent(timeout(LONG, machine.try_start(&made)).await.expect("it returns"));
    let exec = timeout(LONG, machine.exec(&first, &["true"], 1)).await.expect("it returns");
    assert_eq!(exec.expect_err("it does not answer").code(), Code::DeadlineExceeded);
    let reopen = cri::ReopenContainerLogRequest { container_id: first.clone() };
    let reopen = machine.runtime.reopen_container_log(Request::new(reopen));
    silent(timeout(LONG, reopen).await.expect("it returns").map(drop));
    let create = machine.create(&pod, "third", &["true"], |_| {});
    silent(timeout(LONG, create).await.expect("it returns").map(drop));
    timeout(LONG, machine.stop(&first, 1)).await.expect("it is stopped");
    // The first process of a namespace remains a zombie until all others in it are reaped.
    assert!(!has_memory(pids[0]) && has_memory(pids[1]));
    remove(machine, &pod).await;
    eventually_async("everything is removed", 20, async || ![shim, pids[0], pids[1]].into_iter().any(alive))
        .await;
    // A partly made container is undone when the undo is retried.
    eventually_async("nothing is left", 20, async || machine.traces().await == before).await;
    machine.restart(Duration::ZERO).await;
}

pub(crate) async fn a_command_that_starts_after_its_timeout_is_killed(machine: &mut Machine) {
    let before = machine.traces().await;
    restart(machine).await;
    let pod = machine.pod("late").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let shim = machine.shim_pid(&pod).await;
    send(shim, Signal::SIGSTOP);
    // The exec has no timeout: the caller gets an error about the shim, and no later result.
    let command = long(8);
    let script = format!("sleep {command} & sleep {command}; true");
    let script = ["sh", "-c", &script];
    let exec = timeout(LONG, machine.exec(&id, &script, 0));
    let refused = exec.await.expect("it returns").expect_err("it does not answer");
    assert!(refused.message().contains("does not answer"), "{refused}");
    send(shim, Signal::SIGCONT);
    // Twice, because the process may start during the check.
    for _ in 0..2 {
        eventually_async("the shim works", 20, async || machine.exec(&id, &["true"], 60).await.is_ok()).await;
        eventually_async("the command is ended", 20, async || running(&command).is_empty()).await;
    }
    let processes = machine.exec(&id, &["ps", "-o", "args"], 60).await.expect("exec").stdout;
    assert!(!String::from_utf8_lossy(&processes).contains(&command));
    machine.remove_pod(&pod).await;
    assert_eq!(machine.traces().await, before);
    machine.restart(Duration::ZERO).await;
}

pub(crate) async fn the_runtime_retries_a_shim_with_a_full_backlog(machine: &mut Machine) {
    let pod = machine.pod("asked").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let (shim, pid) = (machine.shim_pid(&pod).await, machine.pid(&id).await);
    machine.close_runtime().await;
    send(shim, Signal::SIGSTOP);
    // Fills the backlog of the shim's socket.
    let path = machine.path("state/sandboxes").join(&pod).join("shim.sock");
    let mut queue: Vec<OwnedFd> = Vec::new();
    let full = loop {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let one = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).expect("socket");
        let dir = std::fs::File::open(path.parent().expect("directory")).expect("directory");
        let short = format!("/proc/self/fd/{}/shim.sock", dir.as_raw_fd());
        match connect(one.as_raw_fd(), &UnixAddr::new(short.as_str()).expect("address")) {
            Ok(()) => queue.push(one),
            Err(errno) => break errno,
        }
        assert!(queue.len() < 5000);
    };
    assert_eq!(full, nix::errno::Errno::EAGAIN);
    let wakes = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        send(shim, Signal::SIGCONT);
    };
    tokio::join!(machine.open_runtime(), wakes);
    assert!(alive(pid), "the shim was killed");
    eventually_async("the pod of the shim is ready", 20, async || is_ready(machine, &pod).await).await;
    assert_eq!(machine.exec(&id, &["true"], 0).await.expect("exec").exit_code, 0);
    machine.remove_pod(&pod).await;
}

pub(crate) async fn a_shim_that_does_not_become_ready_is_killed(machine: &mut Machine) {
    use std::os::unix::fs::PermissionsExt;
    let before = machine.traces().await;
    let hangs = machine.path("hangs");
    let argument = long(9);
    std::fs::write(&hangs, format!("#!/bin/sh\nexec sleep {argument}\n")).expect("script");
    std::fs::set_permissions(&hangs, PermissionsExt::from_mode(0o755)).expect("executable");
    machine.close_runtime().await;
    machine
        .open_runtime_with(|config| (config.shim_timeouts, config.shim_binary) = (timeouts(), hangs.clone()))
        .await;
    let refused = timeout(LONG, machine.try_pod("never", |_| {})).await.expect("it returns");
    let refused = refused.expect_err("it is not ready");
    assert!(refused.message().contains("not ready within"), "{refused}");
    eventually_async("the shim is killed", 20, async || running(&argument).is_empty()).await;
    machine.restart(Duration::ZERO).await;
    assert_eq!(machine.traces().await, before);
}

pub(crate) async fn a_container_without_a_record_is_killed(machine: &mut Machine) {
    let before = machine.traces().await;
    let pod = machine.pod("lost").await;
    let argument = long(6);
    let (lost, stays) = (
        machine.run(&pod, "lost", &["sleep", &argument]).await,
        machine.run(&pod, "stays", &["sleep", "1000"]).await,
    );
    let pid = machine.pid(&lost).await;
    machine.close_runtime().await;
    let record = machine.path("state/containers").join(&lost).join("record.json");
    assert!(
        record.exists(),
        "{:?}",
        std::fs::read_dir(record.parent().expect("directory")).map(Vec::from_iter)
    );
    std::fs::write(record, "{").expect("torn");
    machine.open_runtime().await;
    eventually_async("the container without a record is killed", 20, async || {
        !alive(pid) && running(&argument).is_empty()
    })
    .await;
    assert_eq!(machine.exec(&stays, &["true"], 60).await.expect("exec").exit_code, 0);
    machine.remove_pod(&pod).await;
    assert_eq!(machine.traces().await, before);
}

//! Connections between a runtime and a shim that break while both processes live.

use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use coracle_proto::cri;
use coracle_testing::eventually_async;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{Shutdown, SockType, getsockopt, shutdown, sockopt};
use nix::unistd::Pid;
use tokio::time::timeout;

use crate::fixture::Machine;

/// A timeout that even a slow machine does not reach.
const LONG: Duration = Duration::from_secs(120);

/// Closes this process's connections to a shim, as after an invalid packet.
#[allow(unsafe_code, reason = "borrows descriptors of other owners in this process")]
fn cut(shim: i32) {
    let open = std::fs::read_dir("/proc/self/fd").expect("descriptors").flatten();
    let numbers: Vec<RawFd> = open.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut ended = 0;
    for raw in numbers {
        // SAFETY: the kernel refuses a descriptor that was closed meanwhile; a reused one is not a socket to a shim.
        let socket = unsafe { BorrowedFd::borrow_raw(raw) };
        let is_link = getsockopt(&socket, sockopt::SockType) == Ok(SockType::SeqPacket)
            && getsockopt(&socket, sockopt::PeerCredentials).is_ok_and(|peer| peer.pid() == shim);
        if is_link && shutdown(raw, Shutdown::Both).is_ok() {
            ended += 1;
        }
    }
    assert!(ended > 0, "there is no connection");
}

async fn is_ready(machine: &Machine, pod: &str) -> bool {
    machine.sandbox(pod).await.state == i32::from(cri::PodSandboxState::SandboxReady)
}

/// Command that waits for a file and exits with this code.
fn waits_for(file: &str, code: i32) -> [String; 3] {
    let script = format!("while [ ! -e {file} ]; do usleep 20000; done; exit {code}");
    ["sh".to_owned(), "-c".to_owned(), script]
}

pub(crate) async fn the_runtime_reconnects_after_a_broken_connection(machine: &mut Machine) {
    let before = machine.traces().await;
    let pod = machine.pod("cut").await;
    let waits = waits_for("/tmp/end", 7);
    let ends = machine.run(&pod, "ends", &waits.each_ref().map(String::as_str)).await;
    let stays = machine.run(&pod, "stays", &["sleep", "1000"]).await;
    let shim = machine.shim_pid(&pod).await;
    let exec = waits_for("/tmp/go", 9);
    let exec = exec.each_ref().map(String::as_str);
    // Containers continue, and the caller of a running command gets its result.
    let command = machine.exec(&stays, &exec, 0);
    let cutting = async {
        // The command counts as running when its process is visible in the container.
        eventually_async("the command runs", 20, async || {
            let processes = machine.exec(&stays, &["ps", "-o", "args"], 60).await.expect("exec").stdout;
            String::from_utf8_lossy(&processes).contains("/tmp/go")
        })
        .await;
        for _ in 0..3 {
            cut(shim);
            eventually_async("execs work again", 20, async || {
                machine.exec(&stays, &["true"], 60).await.is_ok()
            })
            .await;
            assert!(is_ready(machine, &pod).await);
        }
        machine.exec(&stays, &["touch", "/tmp/go"], 60).await.expect("exec");
    };
    let (command, ()) = tokio::join!(timeout(LONG, command), cutting);
    assert_eq!(command.expect("the result within the timeout").expect("exec").exit_code, 9);
    // A container ends while the connection is broken.
    machine.exec(&ends, &["touch", "/tmp/end"], 60).await.expect("exec");
    cut(shim);
    assert_eq!(machine.wait_exited(&ends).await.exit_code, 7);
    assert!(is_ready(machine, &pod).await);
    // The new connection reports the shim's death.
    kill(Pid::from_raw(shim), Signal::SIGKILL).expect("kill");
    assert_eq!(machine.wait_exited(&stays).await.exit_code, 255);
    machine.remove_pod(&pod).await;
    assert_eq!(machine.traces().await, before);
}

pub(crate) async fn a_pod_is_stopped_while_its_connection_is_cut(machine: &mut Machine) {
    let before = machine.traces().await;
    let pod = machine.pod("cutstop").await;
    machine.run(&pod, "c", &["sleep", "1000"]).await;
    let shim = machine.shim_pid(&pod).await;
    // The stopped shim does not respond, so that the runtime cannot reconnect meanwhile.
    kill(Pid::from_raw(shim), Signal::SIGSTOP).expect("stop");
    cut(shim);
    timeout(LONG, machine.remove_pod(&pod)).await.expect("it is stopped and removed");
    eventually_async("the shim is gone", 20, async || !crate::fixture::alive(shim)).await;
    assert_eq!(machine.traces().await, before);
}

pub(crate) async fn a_large_environment_reaches_the_command(machine: &mut Machine) {
    let pod = machine.pod("large").await;
    let large = |config: &mut cri::ContainerConfig| {
        config.envs = (0..12)
            .map(|number| cri::KeyValue { key: format!("LARGE{number}"), value: vec![b'x'; 100_000] })
            .collect();
    };
    let id = machine.create(&pod, "c", &["sleep", "1000"], large).await.expect("create");
    machine.start(&id).await;
    for _ in 0..3 {
        let answer = machine.exec(&id, &["sh", "-c", "echo ${#LARGE0} ${#LARGE11}"], 60).await.expect("exec");
        assert_eq!(String::from_utf8_lossy(&answer.stdout), "100000 100000\n");
    }
    machine.remove_pod(&pod).await;
}

pub(crate) async fn pods_have_the_original_limit_of_open_files(machine: &mut Machine) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (before, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("limit");
    setrlimit(Resource::RLIMIT_NOFILE, 777, hard).expect("limit");
    coracle_open_files::raise().expect("raised");
    assert_eq!(getrlimit(Resource::RLIMIT_NOFILE), Ok((hard, hard)));
    let pod = machine.pod("files").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let exec = machine.exec(&id, &["sh", "-c", "ulimit -Sn; ulimit -Hn"], 60).await.expect("exec");
    assert_eq!(String::from_utf8_lossy(&exec.stdout), format!("777\n{hard}\n"));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", machine.pid(&id).await)).expect("limits");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a limit");
    assert_eq!(line.split_whitespace().nth(3), Some("777"), "{line}");
    machine.remove_pod(&pod).await;
    setrlimit(Resource::RLIMIT_NOFILE, before, hard).expect("limit");
}

//! Compatibility with other versions: newer records and messages, and a replaced executable.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

use coracle_proto::cri;
use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{Error, Event, Packet, Reply, packet, reply};
use coracle_testing::{eventually, eventually_async};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind, connect, listen, recv,
    send, socket,
};
use prost::Message as _;

use crate::fixture::{Machine, alive};

/// A field of a later version: number 1000, a string.
const UNKNOWN: [u8; 7] = [0xc2, 0x3e, 4, b'm', b'o', b'r', b'e'];

async fn runs(machine: &Machine, id: &str) {
    assert_eq!(machine.exec(id, &["true"], 60).await.expect("exec").exit_code, 0);
}

/// A runtime that cannot read a record does not start, and does not touch the pod.
pub(crate) async fn records_of_a_later_version_are_not_changed(machine: &mut Machine) {
    let before = machine.traces().await;
    let pod = machine.pod("later").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let (shim, pid) = (machine.shim_pid(&pod).await, machine.pid(&id).await);
    for (kind, of) in [("sandboxes", &pod), ("containers", &id)] {
        machine.close_runtime().await;
        let path = machine.path("state").join(kind).join(of).join("record.json");
        let ours = std::fs::read(&path).expect("record");
        std::fs::write(&path, r#"{"version":2,"phase":{"asleep":{"since":7}}}"#).expect("write");
        let refused = machine.try_open_runtime_with(|_| {}).await.expect_err("the record cannot be read");
        assert!(refused.chain().contains("by a later version"), "{}", refused.chain());
        assert!(alive(shim) && alive(pid), "the pod continues to run");
        std::fs::write(&path, ours).expect("write");
        machine.open_runtime().await;
        runs(machine, &id).await;
    }
    machine.remove_pod(&pod).await;
    assert_eq!(machine.traces().await, before);
}

/// Environment variable that makes this program replace a shim.
const STAND_IN: &str = "CORACLE_STAND_IN";

/// The behaviour of the replacement.
#[derive(Clone, Copy)]
enum LaterShim {
    /// The later version does not support this version of the protocol any more.
    Refuses,
    /// Relays the shim's messages and adds unknown ones: a container in an unknown state, and unknown events.
    SaysMore,
}

/// A process at the shim's socket, until this is dropped. It has the command line of a shim, because the runtime
/// connects only to such a process.
struct ReplacedSocket {
    path: PathBuf,
    aside: PathBuf,
    process: Child,
}

impl ReplacedSocket {
    #[allow(clippy::disallowed_methods, reason = "there is no event for a listening socket")]
    fn take(dir: &Path, later: LaterShim) -> Self {
        let (path, aside) = (dir.join("shim.sock"), dir.join("shim.aside"));
        std::fs::rename(&path, &aside).expect("aside");
        let process = Command::new(std::env::current_exe().expect("the path of this program"))
            .args(["shim", "--dir"])
            .arg(dir)
            .env(STAND_IN, if matches!(later, LaterShim::Refuses) { "refuses" } else { "says-more" })
            .spawn()
            .expect("a stand-in");
        let place = Self { path, aside, process };
        eventually("the stand-in listens", 20, || place.path.exists());
        place
    }
}

impl Drop for ReplacedSocket {
    fn drop(&mut self) {
        self.process.kill().expect("kill");
        // The runtime runs in this process and may already have reaped this child.
        let _reaped = self.process.wait();
        std::fs::rename(&self.aside, &self.path).expect("back");
    }
}

/// Serves in place of a shim if the environment variable requests that. Each connection has its own thread.
pub(crate) fn stand_in_if_called() -> Option<ExitCode> {
    let later = match std::env::var(STAND_IN).ok()?.as_str() {
        "refuses" => LaterShim::Refuses,
        _ => LaterShim::SaysMore,
    };
    let dir = std::env::args_os().nth(3).expect("the directory");
    let at = std::fs::File::open(&dir).expect("directory");
    let listener = seqpacket();
    bind(listener.as_raw_fd(), &short(&at, "shim.new")).expect("bind");
    listen(&listener, Backlog::new(8).expect("backlog")).expect("listen");
    let dir = Path::new(&dir);
    std::fs::rename(dir.join("shim.new"), dir.join("shim.sock")).expect("rename the socket");
    while let Ok(raw) = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
        let at = at.try_clone().expect("directory");
        std::thread::spawn(move || serve(&adopt(raw), &at, later));
    }
    Some(ExitCode::FAILURE)
}

#[allow(unsafe_code, reason = "takes a descriptor from the kernel")]
fn adopt(raw: i32) -> OwnedFd {
    // SAFETY: the kernel has just created the descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(raw) }
}

fn seqpacket() -> OwnedFd {
    socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("socket")
}

fn short(dir: &std::fs::File, name: &str) -> UnixAddr {
    UnixAddr::new(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()).as_str()).expect("address")
}

/// The next packet. None at the end of the connection.
fn hear(from: &OwnedFd) -> Option<Vec<u8>> {
    let mut packet = vec![0; 1 << 20];
    let length = recv(from.as_raw_fd(), &mut packet, MsgFlags::empty()).unwrap_or_default();
    packet.truncate(length);
    (length > 0).then_some(packet)
}

fn say(to: &OwnedFd, packet: &[u8]) {
    let _gone = send(to.as_raw_fd(), packet, MsgFlags::MSG_NOSIGNAL);
}

fn serve(runtime: &OwnedFd, dir: &std::fs::File, later: LaterShim) {
    match later {
        LaterShim::Refuses => {
            while let Some(asked) = hear(runtime) {
                let id = Packet::decode(asked.as_slice()).expect("a packet").id;
                let message = "this shim serves protocol 2 and later ones".to_owned();
                let result = reply::Result::Error(Error { kind: Kind::Unsupported.into(), message });
                let body = packet::Body::Reply(Reply { result: Some(result) });
                say(runtime, &Packet { id, body: Some(body) }.encode_to_vec());
            }
        }
        LaterShim::SaysMore => {
            let shim = seqpacket();
            connect(shim.as_raw_fd(), &short(dir, "shim.aside")).expect("the shim");
            relay(runtime, &shim);
        }
    }
}

/// Relays packets without descriptors, and adds unknown fields and events of the shim.
fn relay(runtime: &OwnedFd, shim: &OwnedFd) {
    use std::os::fd::AsFd as _;
    loop {
        let mut ends = [runtime, shim].map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN));
        poll(&mut ends, PollTimeout::NONE).expect("poll");
        let ready = ends.map(|end| end.any().unwrap_or_default());
        if ready[0] {
            let Some(asked) = hear(runtime) else { return };
            say(shim, &asked);
        }
        if ready[1] {
            let Some(said) = hear(shim) else { return };
            let mut packet = Packet::decode(said.as_slice()).expect("a packet");
            let is_greeting = greeting(&mut packet);
            say(runtime, &[&packet.encode_to_vec()[..], &UNKNOWN].concat());
            if is_greeting {
                // An unknown event, an answer of an unknown type with the id of no call, and a packet without body.
                let event = Event { sequence: 1, container_id: first(&packet), ..Event::default() };
                let event = Packet { id: 0, body: Some(packet::Body::Event(event)) };
                let answer = Packet { id: 77, body: Some(packet::Body::Reply(Reply { result: None })) };
                for more in [event, answer, Packet { id: 78, body: None }] {
                    say(runtime, &[&more.encode_to_vec()[..], &UNKNOWN].concat());
                }
            }
        }
    }
}

/// Converts a packet with the shim's state to a packet of a later version. Returns false for other packets.
fn greeting(packet: &mut Packet) -> bool {
    let Some(packet::Body::Reply(Reply { result: Some(reply::Result::State(state)) })) = &mut packet.body
    else {
        return false;
    };
    state.protocol = 2;
    state.containers.iter_mut().for_each(|container| container.phase = 9);
    true
}

fn first(packet: &Packet) -> String {
    match &packet.body {
        Some(packet::Body::Reply(Reply { result: Some(reply::Result::State(state)) })) => {
            state.containers[0].container_id.clone()
        }
        _ => String::new(),
    }
}

/// The runtime reports the shim's error and does not touch the pod.
pub(crate) async fn a_shim_that_refuses_this_version_is_left_alone(machine: &mut Machine) {
    let before = machine.traces().await;
    let pod = machine.pod("refuses").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let (shim, pid) = (machine.shim_pid(&pod).await, machine.pid(&id).await);
    machine.close_runtime().await;
    let place = ReplacedSocket::take(&machine.path("state/sandboxes").join(&pod), LaterShim::Refuses);
    let refused = machine.try_open_runtime_with(|_| {}).await.expect_err("the shim refuses this version");
    let words = refused.chain();
    assert!(words.contains(&pod) && words.contains("serves protocol 2"), "{words}");
    assert!(alive(shim) && alive(pid), "the pod continues to run");
    drop(place);
    machine.open_runtime().await;
    runs(machine, &id).await;
    machine.remove_pod(&pod).await;
    assert_eq!(machine.traces().await, before);
}

/// The situation after a downgrade: this version talks to a shim of a later one.
pub(crate) async fn unknown_messages_of_a_later_shim_are_ignored(machine: &mut Machine) {
    let before = machine.traces().await;
    let pod = machine.pod("says-more").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let pid = machine.pid(&id).await;
    machine.close_runtime().await;
    let place = ReplacedSocket::take(&machine.path("state/sandboxes").join(&pod), LaterShim::SaysMore);
    machine.open_runtime().await;
    // After another call the runtime has read all packets.
    let reopen = cri::ReopenContainerLogRequest { container_id: id.clone() };
    let reopen = tonic::Request::new(reopen);
    use coracle_proto::cri::runtime_service_server::RuntimeService as _;
    machine.runtime.reopen_container_log(reopen).await.expect("the request is served");
    let status = machine.status(&id).await;
    assert_eq!(status.state, i32::from(cri::ContainerState::ContainerRunning), "{status:?}");
    assert_eq!(machine.sandbox(&pod).await.state, i32::from(cri::PodSandboxState::SandboxReady));
    machine.close_runtime().await;
    drop(place);
    machine.open_runtime().await;
    assert!(alive(pid));
    runs(machine, &id).await;
    machine.remove_pod(&pod).await;
    assert_eq!(machine.traces().await, before);
}

/// An upgrade replaces the executable of running shims.
pub(crate) async fn a_pod_outlives_its_executable(machine: &mut Machine) {
    let before = machine.traces().await;
    let program = machine.path("program");
    std::fs::copy(std::env::current_exe().expect("the path of this program"), &program).expect("copy");
    machine.close_runtime().await;
    machine.open_runtime_with(|config| config.shim_binary.clone_from(&program)).await;
    let shares = |config: &mut cri::PodSandboxConfig| {
        let linux = config.linux.get_or_insert_default();
        let options =
            linux.security_context.get_or_insert_default().namespace_options.get_or_insert_default();
        options.pid = cri::NamespaceMode::Pod.into();
    };
    let pod = machine.try_pod("outlives", shares).await.expect("sandbox");
    let first = machine.run(&pod, "first", &["sleep", "1000"]).await;
    std::fs::remove_file(&program).expect("remove");
    runs(machine, &first).await;
    // Another program is at the path.
    std::fs::write(&program, "#!/bin/sh\nexit 1\n").expect("write");
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("executable");
    machine.restart(Duration::ZERO).await;
    runs(machine, &first).await;
    let second = machine.run(&pod, "second", &["sh", "-c", "echo here; exec sleep 1000"]).await;
    runs(machine, &second).await;
    let log = machine.status(&second).await.log_path;
    eventually_async("the container writes", 20, async || {
        std::fs::read_to_string(&log).is_ok_and(|log| log.contains("here"))
    })
    .await;
    machine.stop(&first, 0).await;
    machine.remove(&first).await;
    machine.remove_pod(&pod).await;
    std::fs::remove_file(&program).expect("remove");
    assert_eq!(machine.traces().await, before);
}

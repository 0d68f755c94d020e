//! Compatibility of the messages between shim and runtime with recorded bytes of earlier versions.
//!
//! A pod outlives the program that started it. So every later version must read the recorded bytes, and encode the same
//! messages to the same bytes. If a test fails here, an upgrade or a downgrade would lose pods. A new field gets a new
//! number and changes no recording. A new message gets a new recording: `RECORD=1 cargo test -p coracle-proto`. Existing
//! recordings are never regenerated.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::fmt::{Debug, Write as _};
use std::path::{Path, PathBuf};

use coracle_proto::shim::container_state::Phase;
use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{
    Acknowledge, Attach, Attached, CloseStdin, Connect, Connected, ContainerState, CreateContainer, Created,
    DeleteContainer, Done, Error, Event, Exec, ExecStarted, ExecState, Exit, Hello, Hierarchy, IdMapping,
    ImageVolume, InitProcess, Overlay, Packet, ReopenLog, Reply, Request, Resize, RestoreContainer,
    SandboxConfig, Shutdown, Signal, StartContainer, State, Stream, packet, reply, request,
};
use prost::Message;

fn place(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("recorded/shim").join(format!("{name}.hex"))
}

/// Hexadecimal text with 32 bytes per line.
fn to_hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for line in bytes.chunks(32) {
        line.iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
        text.push('\n');
    }
    text
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

/// Asserts that the recording decodes to this message, and that the message encodes to the recorded bytes.
fn is_as_recorded<T: Message + Default + PartialEq + Debug>(name: &str, message: &T) {
    let path = place(name);
    let bytes = message.encode_to_vec();
    if !path.exists() && std::env::var_os("RECORD").is_some() {
        std::fs::write(&path, to_hex(&bytes)).unwrap();
    }
    let recorded = std::fs::read_to_string(&path).map(|text| from_hex(&text));
    let recorded = recorded.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(T::decode(recorded.as_slice()).as_ref(), Ok(message), "{name} is decoded to another message");
    assert_eq!(to_hex(&bytes), to_hex(&recorded), "{name} is encoded to other bytes");
}

fn text(text: &str) -> String {
    text.to_owned()
}

fn id() -> String {
    text("the-container")
}

fn create() -> CreateContainer {
    let overlay = Overlay {
        lower: vec![text("/layers/2"), text("/layers/1")],
        upper: text("/upper"),
        work: text("/work"),
        target: text("/target"),
        read_only: true,
    };
    let image =
        ImageVolume { source: text("image:1"), lower: vec![text("/layers/3")], sub_path: text("etc") };
    CreateContainer {
        container_id: id(),
        bundle: text("/bundle"),
        rootfs: Some(overlay),
        terminal: true,
        stdin: true,
        stdin_once: true,
        log_path: text("/logs/0.log"),
        log_max_size: 10 << 20,
        log_max_files: 5,
        images: vec![image],
        seccomp_program: vec![6, 0, 0, 0, 0, 0, 255, 127],
    }
}

fn exec() -> Exec {
    Exec {
        container_id: id(),
        exec_id: text("the-exec"),
        process: br#"{"args":["true"]}"#.to_vec(),
        terminal: true,
        has_stdin: true,
        has_stdout: true,
        has_stderr: true,
        adopts_orphans: true,
        process_in_file: true,
    }
}

fn restore() -> RestoreContainer {
    RestoreContainer {
        container_id: id(),
        program: text("/usr/sbin/criu"),
        images: text("/images"),
        work: text("/criu"),
        external: vec![text("/data")],
        streams: vec![Stream { pipe: text("pipe:[7]"), standard: 2 }],
    }
}

fn requests() -> Vec<(&'static str, request::Call)> {
    use request::Call;
    let signal = Signal { container_id: id(), exec_id: text("the-exec"), signal: 15, all: true };
    // The recording is older than the field `output_capacity`.
    let attach = Attach { container_id: id(), stdin: true, stdout: true, stderr: true, output_capacity: 0 };
    vec![
        ("request-hello", Call::Hello(Hello { protocol: 1 })),
        ("request-create", Call::Create(create())),
        ("request-start", Call::Start(StartContainer { container_id: id() })),
        ("request-signal", Call::Signal(signal)),
        ("request-exec", Call::Exec(exec())),
        ("request-resize", Call::Resize(Resize { container_id: id(), width: 80, height: 24 })),
        ("request-attach", Call::Attach(attach)),
        ("request-close-stdin", Call::CloseStdin(CloseStdin { container_id: id() })),
        ("request-reopen-log", Call::ReopenLog(ReopenLog { container_id: id() })),
        ("request-delete", Call::Delete(DeleteContainer { container_id: id() })),
        ("request-connect", Call::Connect(Connect { port: 8080 })),
        ("request-acknowledge", Call::Acknowledge(Acknowledge { sequence: 300 })),
        ("request-shutdown", Call::Shutdown(Shutdown {})),
        ("request-restore", Call::Restore(restore())),
    ]
}

fn exit() -> Exit {
    Exit { code: 137, signal: 9, oom_killed: true, at: 1_700_000_000_000_000_003 }
}

fn state() -> State {
    let container = |id: &str, phase: Phase, exit| ContainerState {
        container_id: text(id),
        phase: phase.into(),
        pid: 41,
        created_at: 1_700_000_000_000_000_001,
        started_at: 1_700_000_000_000_000_002,
        exit,
    };
    State {
        protocol: 1,
        sandbox_id: text("the-pod"),
        pid: 7,
        init_pid: 8,
        containers: vec![
            container("created", Phase::Created, None),
            container("running", Phase::Running, None),
            container("exited", Phase::Exited, Some(exit())),
        ],
        pending_events: 2,
        execs: vec![ExecState { container_id: text("running"), exec_id: text("the-exec"), pid: 42 }],
    }
}

fn replies() -> Vec<(&'static str, reply::Result)> {
    use reply::Result;
    let error = |kind: Kind| Result::Error(Error { kind: kind.into(), message: text("outer: inner") });
    let attached = Attached { terminal: true, has_stdin: true, has_stdout: true, has_stderr: true };
    vec![
        ("reply-done", Result::Done(Done {})),
        ("reply-state", Result::State(state())),
        ("reply-created", Result::Created(Created { pid: 41 })),
        ("reply-exec-started", Result::ExecStarted(ExecStarted { pid: 42 })),
        ("reply-attached", Result::Attached(attached)),
        ("reply-connected", Result::Connected(Connected {})),
        ("reply-internal", error(Kind::Internal)),
        ("reply-not-found", error(Kind::NotFound)),
        ("reply-already-exists", error(Kind::AlreadyExists)),
        ("reply-invalid", error(Kind::Invalid)),
        ("reply-wrong-state", error(Kind::WrongState)),
        ("reply-command-not-found", error(Kind::CommandNotFound)),
        ("reply-command-not-executable", error(Kind::CommandNotExecutable)),
        ("reply-connection-refused", error(Kind::ConnectionRefused)),
        ("reply-unsupported", error(Kind::Unsupported)),
    ]
}

fn event(container: &str, exec: &str) -> Event {
    Event { sequence: 12, container_id: text(container), exec_id: text(exec), exited: Some(exit()) }
}

#[test]
fn requests_of_a_runtime_match_their_recordings() {
    for (name, call) in requests() {
        let body = packet::Body::Request(Request { call: Some(call) });
        is_as_recorded(name, &Packet { id: 5, body: Some(body) });
    }
}

#[test]
fn replies_of_a_shim_match_their_recordings() {
    for (name, result) in replies() {
        let body = packet::Body::Reply(Reply { result: Some(result) });
        is_as_recorded(name, &Packet { id: 5, body: Some(body) });
    }
}

#[test]
fn events_of_a_shim_match_their_recording() {
    is_as_recorded("event", &Packet { id: 0, body: Some(packet::Body::Event(event("running", "the-exec"))) });
}

/// `exits/<container>` in a shim's directory.
#[test]
fn exit_files_of_a_shim_match_their_recording() {
    is_as_recorded("file-exit", &event("running", ""));
}

/// `shim.pb` in a shim's directory.
#[test]
fn the_configuration_file_of_a_shim_matches_its_recording() {
    let mapping = |host_id| IdMapping { container_id: 1, host_id, length: 65_536 };
    let init = InitProcess {
        uid: 1000,
        gid: 1001,
        groups: vec![1002],
        apparmor_profile: text("a-profile"),
        seccomp_program: vec![6, 0, 0, 0, 0, 0, 255, 127],
        seccomp_flags: vec![text("SECCOMP_FILTER_FLAG_LOG")],
    };
    let config = SandboxConfig {
        protocol: 1,
        sandbox_id: text("the-pod"),
        socket: text("/run/shim.sock"),
        hostname: text("host"),
        own_network: true,
        own_ipc: true,
        own_uts: true,
        share_pid: true,
        sysctls: [(text("net.ipv4.ip_forward"), text("1"))].into(),
        shm_size: 64 << 20,
        shim_cgroup: text("/shims/the-pod"),
        shm_dir: text("/run/shm"),
        oom_score_adj: -998,
        uid_mappings: vec![mapping(100_000)],
        gid_mappings: vec![mapping(200_000)],
        mount_label: text("system_u:object_r:container_file_t:s0"),
        process_label: text("system_u:system_r:container_t:s0"),
        init: Some(init),
        open_files: 1024,
        hierarchies: vec![Hierarchy { mount: text("/sys/fs/cgroup/cpu"), controllers: text("cpu,cpuacct") }],
    };
    is_as_recorded("file-config", &config);
}

/// An unknown field: number 1000, a string.
const UNKNOWN: [u8; 7] = [0xc2, 0x3e, 4, b'm', b'o', b'r', b'e'];

#[test]
fn additions_of_a_later_version_are_ignored() {
    let entries: Vec<_> = std::fs::read_dir(place("x").parent().unwrap()).unwrap().collect();
    assert!(entries.len() > 10, "{entries:?}");
    for entry in entries {
        let path = entry.unwrap().path();
        let recorded = from_hex(&std::fs::read_to_string(&path).unwrap());
        let more = [&recorded[..], &UNKNOWN[..]].concat();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("file-")) {
            let read =
                SandboxConfig::decode(more.as_slice()).is_ok() || Event::decode(more.as_slice()).is_ok();
            assert!(read, "{}", path.display());
        } else {
            assert_eq!(
                Packet::decode(more.as_slice()),
                Packet::decode(recorded.as_slice()),
                "{}",
                path.display()
            );
        }
    }
    let message = |inner: &[u8]| [&[inner.len().try_into().unwrap()], inner].concat();
    // An unknown call, reply or event of a later version is decoded without content; it is not an error.
    let packet =
        |body: u8| Packet::decode([&[8, 5, body << 3 | 2], &message(&UNKNOWN)[..]].concat().as_slice());
    let read = |body| Ok(Packet { id: 5, body: Some(body) });
    assert_eq!(packet(2), read(packet::Body::Request(Request { call: None })));
    assert_eq!(packet(3), read(packet::Body::Reply(Reply { result: None })));
    assert_eq!(packet(4), read(packet::Body::Event(Event::default())));
    assert_eq!(packet(15), Ok(Packet { id: 5, body: None }));
}

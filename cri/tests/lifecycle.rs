//! Complete pods through runtime, shim and kernel, checked by the kernel's view.
//!
//! Runs as root in its own network namespace. The test program is also the shim, as the real binary is: with the
//! arguments `shim --dir DIR` it holds a pod.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program with its own main")]

#[path = "lifecycle/client.rs"]
mod client;
#[path = "lifecycle/fixture.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod fixture;

use std::process::ExitCode;
use std::time::Duration;

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::eventually_async;
use fixture::{Machine, Session, alive, ends, tests};
use futures::StreamExt;
use nix::sched::CloneFlags;
use tonic::Request;

fn main() -> ExitCode {
    let session = match Session::begin(CloneFlags::CLONE_NEWNET) {
        Ok(session) => session,
        Err(end) => return end,
    };
    session.run(tests![
        a_container_runs_logs_and_ends,
        execs_return_output_code_and_time_out,
        stop_sends_the_signal_and_then_kills,
        a_pod_has_a_network_and_files_of_its_own,
        containers_do_not_inherit_the_runtimes_umask,
        events_come_once_and_in_order,
        a_restarted_runtime_finds_all_objects,
        a_dead_shim_ends_its_pod,
        the_exit_code_survives_the_shim,
        failures_leave_nothing,
        unknown_ids_are_handled_as_the_cri_requires,
        security_reaches_the_kernel,
        streams_carry_commands_and_connections,
        attach_logs_and_statistics_are_true,
    ])
}

async fn a_container_runs_logs_and_ends(machine: &mut Machine) {
    let pod = machine.pod("logs").await;
    let id = machine.run(&pod, "c", &["sh", "-c", "echo out; echo err >&2; exit 3"]).await;
    let status = machine.wait_exited(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (3, "Error"));
    assert!(status.started_at > 0 && status.finished_at >= status.started_at);
    let log = std::fs::read_to_string(&status.log_path).expect("log");
    let lines: Vec<&str> = log.lines().map(|line| line.split_once(' ').expect("time").1).collect();
    assert!(lines.contains(&"stdout F out") && lines.contains(&"stderr F err"), "{log}");
    machine.remove_pod(&pod).await;
}

async fn execs_return_output_code_and_time_out(machine: &mut Machine) {
    let pod = machine.pod("exec").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let answer = machine.exec(&id, &["sh", "-c", "echo a; echo b >&2; exit 7"], 0).await.expect("exec");
    assert_eq!(
        (answer.stdout.as_slice(), answer.stderr.as_slice(), answer.exit_code),
        (&b"a\n"[..], &b"b\n"[..], 7)
    );
    assert_eq!(machine.exec(&id, &["/no/such"], 0).await.expect("exec").exit_code, 127);
    let late = machine.exec(&id, &["sh", "-c", "sleep 99 & sleep 98"], 1);
    // The limit is shorter than the sleep of either process.
    let late = tokio::time::timeout(Duration::from_secs(60), late).await.expect("the exec times out");
    let late = late.expect_err("too long");
    assert_eq!(late.code(), tonic::Code::DeadlineExceeded, "{late}");
    // The deadline is shorter than the sleep of either process.
    eventually_async("the processes of the exec are killed", 5, async || {
        let left = machine.exec(&id, &["ps"], 0).await.expect("exec");
        let left = String::from_utf8_lossy(&left.stdout).into_owned();
        !left.contains("sleep 99") && !left.contains("sleep 98")
    })
    .await;
    machine.remove_pod(&pod).await;
}

/// Waits until a container has logged the text.
async fn logs(machine: &Machine, id: &str, text: &str) {
    let log = machine.status(id).await.log_path;
    eventually_async(&format!("{id} writes {text:?}"), 10, async || {
        std::fs::read_to_string(&log).is_ok_and(|written| written.contains(text))
    })
    .await;
}

async fn stop_sends_the_signal_and_then_kills(machine: &mut Machine) {
    let pod = machine.pod("stop").await;
    // The trap must be set before the signal is sent.
    let script = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done";
    let handles = machine.run(&pod, "handles", &["sh", "-c", script]).await;
    logs(machine, &handles, "ready").await;
    machine.stop(&handles, 60).await;
    assert_eq!(machine.status(&handles).await.exit_code, 5);
    let script = "trap '' TERM; echo ready; while :; do sleep 1; done";
    let ignores = machine.run(&pod, "ignores", &["sh", "-c", script]).await;
    logs(machine, &ignores, "ready").await;
    let pid = machine.pid(&ignores).await;
    machine.stop(&ignores, 1).await;
    assert_eq!(machine.status(&ignores).await.exit_code, 137);
    assert!(!alive(pid));
    machine.remove_pod(&pod).await;
}

async fn a_pod_has_a_network_and_files_of_its_own(machine: &mut Machine) {
    let pod = machine.pod("net").await;
    let sandbox = machine.sandbox(&pod).await;
    let ip = sandbox.network.expect("network").ip;
    assert!(ip.starts_with("10.88."), "{ip}");
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let shell = "cat /etc/hostname /etc/resolv.conf /etc/hosts; ip -4 addr; hostname; df /dev/shm";
    let answer = machine.exec(&id, &["sh", "-c", shell], 0).await.expect("exec");
    let text = String::from_utf8_lossy(&answer.stdout).into_owned();
    for expected in
        ["host-net", "nameserver 10.43.0.10", &format!("{ip}\thost-net"), &format!("inet {ip}"), "/dev/shm"]
    {
        assert!(text.contains(expected), "{expected} is missing in {text}");
    }
    machine.remove_pod(&pod).await;
}

async fn containers_do_not_inherit_the_runtimes_umask(machine: &mut Machine) {
    let before = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    let pod = machine.pod("umask").await;
    let ordinary = |config: &mut cri::ContainerConfig| {
        fixture::security(config).run_as_user = Some(cri::Int64Value { value: 1000 });
    };
    let script =
        "umask; cat /etc/hosts /etc/hostname /etc/resolv.conf >/dev/null && ls / >/dev/null && exit 4";
    let id = machine.create(&pod, "c", &["sh", "-c", script], ordinary).await.expect("create");
    machine.start(&id).await;
    let end = machine.wait_exited(&id).await;
    nix::sys::stat::umask(before);
    let log = std::fs::read_to_string(&end.log_path).expect("log");
    assert_eq!(end.exit_code, 4, "{log}");
    assert!(log.contains("stdout F 0022"), "{log}");
    machine.remove_pod(&pod).await;
}

async fn events_come_once_and_in_order(machine: &mut Machine) {
    let stream =
        machine.runtime.get_container_events(Request::new(cri::GetEventsRequest {})).await.expect("events");
    let mut events = stream.into_inner();
    let pod = machine.pod("events").await;
    let id = machine.run(&pod, "c", &["true"]).await;
    machine.wait_exited(&id).await;
    machine.remove_pod(&pod).await;
    // Its event comes after a repeated event of the first pod.
    let next_pod = machine.pod("next-events").await;
    let (mut received, mut is_next) = (Vec::new(), false);
    let is_over = |received: &Vec<String>| received.iter().any(|event| event == "pod 3");
    while !is_next || !is_over(&received) {
        let event = tokio::time::timeout(Duration::from_secs(60), events.next()).await;
        let event = event.expect("an event").expect("the stream is open").expect("an event");
        is_next |= event.container_id == next_pod;
        // The first listener also gets events of earlier tests.
        let who = match event.container_id {
            who if who == pod => "pod",
            who if who == id => "container",
            _ => continue,
        };
        received.push(format!("{who} {}", event.container_event_type));
    }
    let of = |who: &str| received.iter().filter(|event| event.starts_with(who)).cloned().collect::<Vec<_>>();
    assert_eq!(of("container"), ["container 0", "container 1", "container 2", "container 3"]);
    assert_eq!(of("pod"), ["pod 0", "pod 1", "pod 2", "pod 3"]);
    machine.remove_pod(&next_pod).await;
}

/// A script that waits for [`go_on`].
fn waiting(then: &str) -> String {
    format!("while [ ! -e /tmp/go ]; do usleep 20000; done; {then}")
}

/// Ends the wait of a container's first process.
fn go_on(pid: i32) {
    std::fs::write(format!("/proc/{pid}/root/tmp/go"), "").expect("write");
}

async fn a_restarted_runtime_finds_all_objects(machine: &mut Machine) {
    let pod = machine.pod("again").await;
    let stays = machine.run(&pod, "stays", &["sleep", "1000"]).await;
    let ends = machine.run(&pod, "ends", &["sh", "-c", &waiting("exit 9")]).await;
    let (pid, ends_pid) = (machine.pid(&stays).await, machine.pid(&ends).await);
    let before = machine.sandbox(&pod).await;
    machine.close_runtime().await;
    go_on(ends_pid);
    fixture::ends(ends_pid).await;
    machine.open_runtime().await;
    assert_eq!(machine.sandbox(&pod).await, before);
    assert_eq!(machine.pid(&stays).await, pid);
    assert!(alive(pid));
    assert_eq!(machine.wait_exited(&ends).await.exit_code, 9);
    assert_eq!(machine.exec(&stays, &["true"], 0).await.expect("exec").exit_code, 0);
    machine.remove_pod(&pod).await;
}

async fn a_dead_shim_ends_its_pod(machine: &mut Machine) {
    let pod = machine.pod("dead").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let (shim, pid) = (machine.shim_pid(&pod).await, machine.pid(&id).await);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(shim), nix::sys::signal::Signal::SIGKILL)
        .expect("kill");
    let status = machine.wait_exited(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (255, "Unknown"));
    ends(pid).await;
    assert_eq!(machine.sandbox(&pod).await.state, i32::from(cri::PodSandboxState::SandboxNotready));
    machine.remove_pod(&pod).await;
    // The shim of another pod dies while the runtime is stopped.
    let pod = machine.pod("dead-alone").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let (shim, pid) = (machine.shim_pid(&pod).await, machine.pid(&id).await);
    machine.close_runtime().await;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(shim), nix::sys::signal::Signal::SIGKILL)
        .expect("kill");
    machine.open_runtime().await;
    assert_eq!(machine.status(&id).await.exit_code, 255);
    ends(pid).await;
    machine.remove_pod(&pod).await;
}

/// Containers end and then their shim dies while the runtime is stopped. The shim's records have the exit codes.
async fn the_exit_code_survives_the_shim(machine: &mut Machine) {
    let pod = machine.pod("unseen").await;
    let ends = machine.run(&pod, "ends", &["sh", "-c", &waiting("exit 9")]).await;
    let script = ["sh", "-c", &waiting("x=a; while :; do x=$x$x; done")];
    let hog = machine.create(&pod, "hog", &script, |config| {
        config.linux.get_or_insert_default().resources =
            Some(cri::LinuxContainerResources { memory_limit_in_bytes: 32 << 20, ..Default::default() });
    });
    let hog = hog.await.expect("create");
    machine.start(&hog).await;
    let stays = machine.run(&pod, "stays", &["sleep", "1000"]).await;
    let shim = machine.shim_pid(&pod).await;
    let pids = [machine.pid(&ends).await, machine.pid(&hog).await];
    machine.close_runtime().await;
    pids.into_iter().for_each(go_on);
    let exits = machine.path("state/sandboxes").join(&pod).join("exits");
    for id in [&ends, &hog] {
        let recorded = async || std::fs::metadata(exits.join(id)).is_ok_and(|written| written.len() > 0);
        eventually_async("the shim records the exit", 10, recorded).await;
    }
    let latest =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock").as_nanos();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(shim), nix::sys::signal::Signal::SIGKILL)
        .expect("kill");
    fixture::ends(shim).await;
    machine.open_runtime().await;
    let end = machine.wait_exited(&ends).await;
    assert_eq!((end.exit_code, end.reason.as_str(), end.message.as_str()), (9, "Error", ""));
    assert!(end.finished_at > end.started_at && u128::from(end.finished_at.unsigned_abs()) <= latest);
    let end = machine.wait_exited(&hog).await;
    assert_eq!((end.exit_code, end.reason.as_str()), (137, "OOMKilled"));
    assert_eq!(machine.wait_exited(&stays).await.reason, "Unknown");
    machine.remove_pod(&pod).await;
}

async fn failures_leave_nothing(machine: &mut Machine) {
    let pod = machine.pod("fail").await;
    let before = machine.traces().await;
    let absent = machine.create(&pod, "absent", &["/no/such/command"], |_| {}).await.expect("create");
    let error = machine.try_start(&absent).await.expect_err("no such command");
    assert!(error.message().contains("/no/such/command"), "{error}");
    let status = machine.status(&absent).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (127, "StartError"));
    machine.remove(&absent).await;
    let bad_user = |config: &mut cri::ContainerConfig| {
        let security = fixture::security(config);
        security.run_as_username = "nobody-here".into();
    };
    assert!(machine.create(&pod, "c", &["true"], bad_user).await.is_err());
    assert_eq!(machine.traces().await, before);
    let taken = machine.try_pod("fail", |_| {}).await.expect_err("the name is in use");
    assert_eq!(taken.code(), tonic::Code::AlreadyExists);
    machine.remove_pod(&pod).await;
}

async fn unknown_ids_are_handled_as_the_cri_requires(machine: &mut Machine) {
    machine.stop("unknown", 1).await;
    machine.remove_pod("unknown").await;
    let status = cri::ContainerStatusRequest { container_id: "unknown".into(), verbose: false };
    let error = machine.runtime.container_status(Request::new(status)).await.expect_err("unknown");
    assert_eq!(error.code(), tonic::Code::NotFound);
}

async fn security_reaches_the_kernel(machine: &mut Machine) {
    let pod = machine.pod("secure").await;
    let secure = |config: &mut cri::ContainerConfig| {
        let security = fixture::security(config);
        security.run_as_user = Some(cri::Int64Value { value: 1000 });
        security.run_as_group = Some(cri::Int64Value { value: 2000 });
        security.supplemental_groups = vec![3000];
        security.no_new_privs = true;
        security.seccomp = Some(cri::SecurityProfile::default());
        security.readonly_rootfs = true;
        security.masked_paths = vec!["/proc/kcore".into()];
        let limits = cri::LinuxContainerResources {
            memory_limit_in_bytes: 32 << 20,
            cpu_quota: 50_000,
            cpu_period: 100_000,
            oom_score_adj: 500,
            ..Default::default()
        };
        config.linux.get_or_insert_default().resources = Some(limits);
    };
    let id = machine.create(&pod, "c", &["sleep", "1000"], secure).await.expect("create");
    machine.start(&id).await;
    let pid = machine.pid(&id).await;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').unwrap_or_default().1.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(field("Uid"), "1000 1000 1000 1000");
    assert_eq!(field("Gid"), "2000 2000 2000 2000");
    assert_eq!(field("Groups"), "2000 3000");
    assert_eq!(field("NoNewPrivs"), "1");
    assert_eq!(field("Seccomp"), "2");
    assert_eq!(field("CapBnd"), "00000000a80425fb");
    assert_eq!(std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("score").trim(), "500");
    let write = machine.exec(&id, &["sh", "-c", "echo x > /file"], 0).await.expect("exec");
    assert_ne!(write.exit_code, 0, "the root is read-only");
    let inside = machine.exec(&id, &["grep", "Seccomp:", "/proc/self/status"], 0).await.expect("exec");
    assert!(String::from_utf8_lossy(&inside.stdout).contains('2'), "an exec has the profile too");
    let hog = machine
        .create(&pod, "hog", &["sh", "-c", "x=a; while :; do x=$x$x; done"], secure)
        .await
        .expect("create");
    machine.start(&hog).await;
    let end = machine.wait_exited(&hog).await;
    assert_eq!((end.exit_code, end.reason.as_str()), (137, "OOMKilled"));
    machine.remove_pod(&pod).await;
}

async fn streams_carry_commands_and_connections(machine: &mut Machine) {
    let pod = machine.pod("streams").await;
    let id =
        machine.run(&pod, "c", &["sh", "-c", "echo hello from the pod | nc -l -p 8080; sleep 1000"]).await;
    let streams = client::Streams::open(machine).await;
    let request = |words: &[&str], tty: bool| cri::ExecRequest {
        container_id: id.clone(),
        cmd: words.iter().map(|word| (*word).to_owned()).collect(),
        tty,
        stdin: true,
        stdout: true,
        stderr: !tty,
    };
    let open = async |request: cri::ExecRequest| {
        machine.runtime.exec(Request::new(request)).await.expect("exec").into_inner().url
    };
    let url = open(request(&["sh", "-c", "cat; echo err >&2; exit 4"], false)).await;
    let socket = streams.connect(&url, "v5.channel.k8s.io").await;
    let [_, out, err, status, _] = client::exchange(socket, &[b"\x00some input", b"\xff\x00"]).await;
    assert_eq!((out.as_str(), err.as_str()), ("some input", "err\n"));
    assert!(status.contains(r#""message":"4","reason":"ExitCode""#), "{status}");
    let url =
        open(request(&["sh", "-c", "until stty size | grep -v '^0'; do sleep 0.1; done; tty"], true)).await;
    let socket = streams.connect(&url, "v4.channel.k8s.io").await;
    let [_, out, _, status, _] = client::exchange(socket, &[b"\x04{\"Width\":123,\"Height\":45}"]).await;
    assert!(out.contains("45 123") && out.contains("/dev/pts/"), "{out}");
    assert!(status.contains("Success"), "{status}");
    let forward = cri::PortForwardRequest { pod_sandbox_id: pod.clone(), port: vec![8080] };
    let url = machine.runtime.port_forward(Request::new(forward)).await.expect("forward").into_inner().url;
    let socket = streams.connect(&url, "v4.channel.k8s.io").await;
    let [data, error, ..] = client::exchange(socket, &[]).await;
    assert!(data.starts_with("\u{90}\u{1f}"), "the port, its low byte first");
    assert!(data.ends_with("hello from the pod\n"), "{data:?} {error:?}");
    machine.remove_pod(&pod).await;
}

async fn attach_logs_and_statistics_are_true(machine: &mut Machine) {
    let pod = machine.pod("attach").await;
    let interactive = |config: &mut cri::ContainerConfig| {
        config.stdin = true;
        config.stdin_once = true;
    };
    let command =
        ["sh", "-c", "dd if=/dev/zero of=/tmp/zero bs=1M count=3 2>/dev/null; echo made; cat; echo end"];
    let id = machine.create(&pod, "c", &command, interactive).await.expect("create");
    machine.start(&id).await;
    let log = machine.status(&id).await.log_path;
    logs(machine, &id, "made").await;
    let stats = machine
        .runtime
        .container_stats(Request::new(cri::ContainerStatsRequest { container_id: id.clone() }));
    let stats = stats.await.expect("stats").into_inner().stats.expect("stats");
    assert!(stats.writable_layer.expect("layer").used_bytes.expect("bytes").value >= 3 << 20);
    assert!(stats.memory.expect("memory").usage_bytes.expect("bytes").value > 0);
    assert!(stats.cpu.expect("cpu").usage_core_nano_seconds.expect("nanoseconds").value > 0);
    let stats = machine
        .runtime
        .pod_sandbox_stats(Request::new(cri::PodSandboxStatsRequest { pod_sandbox_id: pod.clone() }));
    let linux = stats.await.expect("stats").into_inner().stats.expect("stats").linux.expect("linux");
    assert_eq!(linux.network.expect("network").default_interface.expect("interface").name, "eth0");
    assert!(linux.process.expect("processes").process_count.expect("count").value >= 1);
    std::fs::rename(&log, format!("{log}.old")).expect("rotate");
    let reopen = cri::ReopenContainerLogRequest { container_id: id.clone() };
    machine.runtime.reopen_container_log(Request::new(reopen)).await.expect("reopen");
    let streams = client::Streams::open(machine).await;
    let attach =
        cri::AttachRequest { container_id: id.clone(), stdin: true, tty: false, stdout: true, stderr: true };
    // A client without input leaves standard input open.
    let viewer = cri::AttachRequest { stdin: false, ..attach.clone() };
    let url = machine.runtime.attach(Request::new(viewer)).await.expect("attach").into_inner().url;
    client::leave(streams.connect(&url, "v5.channel.k8s.io").await).await;
    let url = machine.runtime.attach(Request::new(attach)).await.expect("attach").into_inner().url;
    let socket = streams.connect(&url, "v5.channel.k8s.io").await;
    let [_, out, _, status, _] = client::exchange(socket, &[b"\x00typed\n", b"\xff\x00"]).await;
    assert_eq!(out, "typed\nend\n");
    assert!(status.contains("Success"), "{status}");
    assert_eq!(machine.wait_exited(&id).await.exit_code, 0);
    assert!(std::fs::read_to_string(&log).expect("log").contains("stdout F typed"));
    machine.remove_pod(&pod).await;
}

//! Execs: additional processes in a container.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::time::Instant;

use oci_spec::runtime::Process;
use serde_json::{Value, json};

use crate::fixture::{Pod, cgroup_mounts};
use crate::shim_client::{ErrorKind, ExecStdio, StartResult};

pub(crate) fn process(args: &[&str]) -> Value {
    json!({ "user": { "uid": 0, "gid": 0 }, "args": args, "env": ["PATH=/bin"], "cwd": "/" })
}

fn parse(process: Value) -> Process {
    serde_json::from_value(process).unwrap()
}

/// Runs an exec and returns its exit code and both outputs.
pub(crate) async fn output(pod: &mut Pod, id: &str, process: Value) -> (i32, String) {
    let (mut read, write) = std::io::pipe().unwrap();
    let stdio = ExecStdio::Pipes {
        stdin: None,
        stdout: Some(OwnedFd::from(write.try_clone().unwrap())),
        stderr: Some(OwnedFd::from(write)),
    };
    let began = Instant::now();
    pod.shim.exec("c", id, &parse(process), stdio).await.unwrap();
    println!("  exec {:.1} ms", began.elapsed().as_secs_f64() * 1e3);
    let code = pod.exit("c", id).await.code;
    let mut text = String::new();
    read.read_to_string(&mut text).unwrap();
    (code, text)
}

pub(crate) async fn an_exec_reads_writes_and_ends_with_its_code(mut pod: Pod) {
    pod.run("c", "sleep 1000").await;
    let (input, mut typing) = std::io::pipe().unwrap();
    let (mut read, write) = std::io::pipe().unwrap();
    let stdio = ExecStdio::Pipes { stdin: Some(input.into()), stdout: Some(write.into()), stderr: None };
    let script = process(&["sh", "-c", "cat; echo $HOME $$; cat /proc/1/comm; exit 42"]);
    pod.shim.exec("c", "e", &parse(script), stdio).await.unwrap();
    typing.write_all(b"typed\n").unwrap();
    drop(typing);
    let mut text = String::new();
    read.read_to_string(&mut text).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!((lines[0], lines[2]), ("typed", "sleep"));
    assert!(lines[1].starts_with("/root "), "{text}");
    assert_eq!(pod.exit("c", "e").await.code, 42);
    pod.end().await;
}

pub(crate) async fn an_exec_has_the_seccomp_profile_and_the_limits_of_its_container(mut pod: Pod) {
    pod.run("c", "sleep 1000").await;
    let mut script = process(&[
        "sh",
        "-c",
        "grep -E 'Seccomp:|NoNew|CapEff|SigIgn|SigBlk' /proc/self/status; \
         cat /proc/self/cgroup; busybox chroot / true; ulimit -n; ls /proc/self/fd | wc -l; \
         cat /proc/self/oom_score_adj",
    ]);
    script["rlimits"] = json!([{ "type": "RLIMIT_NOFILE", "soft": 100, "hard": 200 }]);
    script["capabilities"] =
        json!({ "bounding": ["CAP_CHOWN"], "effective": ["CAP_CHOWN"], "permitted": ["CAP_CHOWN"] });
    script["oomScoreAdj"] = json!(77);
    let (_, text) = output(&mut pod, "e", script).await;
    assert!(text.contains("Seccomp:\t2"), "{text}");
    assert!(text.contains("NoNewPrivs:\t0"), "{text}");
    assert!(text.contains("CapEff:\t0000000000000001"), "{text}");
    assert!(
        text.contains("SigIgn:\t0000000000000000") && text.contains("SigBlk:\t0000000000000000"),
        "{text}"
    );
    // The container's seccomp profile applies.
    assert!(text.contains("chroot: can't change root directory to '/': Function not implemented"), "{text}");
    assert!(text.contains("\n100\n4\n77\n"), "{text}");
    // The exec is in the container's cgroups, which are the roots of its cgroup namespace.
    assert!(text.contains(":memory:/\n") || text.contains("0::/\n"), "{text}");
    let mut script = process(&["grep", "NoNewPrivs", "/proc/self/status"]);
    script["noNewPrivileges"] = json!(true);
    assert_eq!(output(&mut pod, "f", script).await.1.trim(), "NoNewPrivs:\t1");
    pod.end().await;
}

pub(crate) async fn absent_and_non_executable_commands_are_distinguished(mut pod: Pod) {
    pod.run("c", "sleep 1000").await;
    let none = || ExecStdio::Pipes { stdin: None, stdout: None, stderr: None };
    let error = pod.shim.exec("c", "e", &parse(process(&["nothing"])), none()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::CommandNotFound, "{error}");
    let error = pod.shim.exec("c", "e", &parse(process(&["/etc/forbidden"])), none()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::CommandNotExecutable, "{error}");
    let error = pod.shim.exec("x", "e", &parse(process(&["true"])), none()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound, "{error}");
    let mut away = process(&["true"]);
    away["cwd"] = json!("/no/such/place");
    let error = pod.shim.exec("c", "e", &parse(away), none()).await.unwrap_err();
    assert!(error.message.contains("/no/such/place"), "{error}");
    // After a failure the id can be used again.
    let (code, _) = output(&mut pod, "e", process(&["false"])).await;
    assert_eq!(code, 1);
    pod.end().await;
}

pub(crate) async fn an_exec_with_a_terminal_has_one(mut pod: Pod) {
    pod.run("c", "sleep 1000").await;
    let script = process(&["sh", "-c", "tty; read line; echo got $line; exit 9"]);
    let begun = pod.shim.exec("c", "e", &parse(script), ExecStdio::Terminal).await.unwrap();
    let StartResult::Started(started) = begun else { panic!("the shim does not answer") };
    let mut master = std::fs::File::from(started.terminal.unwrap());
    let mut output = String::new();
    let mut buffer = [0; 1024];
    while !output.contains("/dev/pts/") {
        let count = master.read(&mut buffer).unwrap();
        output.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    master.write_all(b"hello\n").unwrap();
    assert_eq!(pod.exit("c", "e").await.code, 9);
    while let Ok(count) = master.read(&mut buffer) {
        if count == 0 {
            break;
        }
        output.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    assert!(output.contains("got hello"), "{output}");
    pod.end().await;
}

pub(crate) async fn a_terminal_without_a_client_is_hung_up(mut pod: Pod) {
    pod.run("c", "sleep 1000").await;
    let script = process(&["sleep", "1000"]);
    let begun = pod.shim.exec("c", "e", &parse(script), ExecStdio::Terminal).await.unwrap();
    let StartResult::Started(started) = begun else { panic!("the shim does not answer") };
    drop(started.terminal);
    assert_eq!(pod.exit("c", "e").await.signal, libc::SIGHUP);
    pod.end().await;
}

pub(crate) async fn an_exec_as_another_user_has_its_ids_and_no_more_rights(mut pod: Pod) {
    pod.run("c", "sleep 1000").await;
    let mut script =
        process(&["sh", "-c", "id; echo $HOME; grep CapEff /proc/self/status; echo again > /dev/stdout"]);
    script["user"] = json!({ "uid": 1000, "gid": 1000, "additionalGids": [7] });
    let (code, text) = output(&mut pod, "e", script).await;
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("uid=1000") && text.contains("gid=1000") && text.contains("groups=7"), "{text}");
    assert!(text.contains("/home/user"), "{text}");
    assert!(text.contains("CapEff:\t0000000000000000"), "{text}");
    assert!(text.contains("again"), "{text}");
    pod.end().await;
}

/// Freezes a cgroup, as root of the container can.
fn freeze(cgroup: &str) {
    let places = cgroup_mounts().into_iter().map(|mount| mount.join(cgroup.trim_start_matches('/')));
    let mut files = places
        .flat_map(|place| [(place.join("freezer.state"), "FROZEN"), (place.join("cgroup.freeze"), "1")]);
    let (file, state) = files.find(|(file, _)| file.exists()).unwrap();
    std::fs::write(file, state).unwrap();
}

pub(crate) async fn execs_of_a_frozen_container_leave_descriptors_for_the_pod(mut pod: Pod) {
    pod.run("c", "sleep 1000").await;
    freeze(&format!("{}/c", pod.cgroup));
    let mut starting = tokio::task::JoinSet::new();
    for number in 0..400 {
        let shim = pod.shim.clone();
        starting.spawn(async move {
            let stdio = ExecStdio::Pipes { stdin: None, stdout: None, stderr: None };
            shim.exec("c", &format!("e{number}"), &parse(process(&["true"])), stdio).await.map(drop)
        });
    }
    let error = starting.join_next().await.unwrap().unwrap().unwrap_err();
    assert!(error.message.contains("have not started yet"), "{error}");
    let held = std::fs::read_dir(format!("/proc/{}/fd", pod.shim.pid())).unwrap().count();
    assert!(held < 300, "{held}");
    pod.run("d", "exit 3").await;
    assert_eq!(pod.exit("d", "").await.code, 3);
    drop(starting);
    // Ends the frozen processes.
    pod.end().await;
}

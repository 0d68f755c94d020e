//! ExecSync: its result after a timeout and with long outputs, and its leftovers.

use std::time::Duration;

use coracle_proto::cri;
use coracle_testing::eventually_async;
use tonic::{Code, Request};

use crate::fixture::Machine;
use crate::wire::Wire;

/// A timeout that even a slow machine does not reach.
const LONG: Duration = Duration::from_secs(300);

fn request(id: &str, script: &str, timeout: i64) -> Request<cri::ExecSyncRequest> {
    let cmd = ["sh", "-c", script].map(str::to_owned).into();
    Request::new(cri::ExecSyncRequest { container_id: id.to_owned(), cmd, timeout })
}

pub(crate) async fn an_exec_timeout_returns_the_output(machine: &mut Machine) {
    let pod = machine.pod("late-exec").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let mut wire = Wire::open(machine).await;
    let script = "echo begun; echo why >&2; sleep 999";
    // The timeout begins before the command does; a slow machine needs a longer one.
    for seconds in [5, 30, 120] {
        let late = wire.client.exec_sync(request(&id, script, seconds)).await.expect_err("too long");
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
        let text = late.message();
        if text.contains(r#"stdout: "begun""#) && text.contains(r#"stderr: "why""#) {
            break;
        }
        assert!(seconds < 120, "{text}");
    }
    // The error must fit into the client's header limit; otherwise the timeout would become another failure.
    let script = "dd if=/dev/urandom bs=1000 count=50; dd if=/dev/urandom bs=1000 count=50 >&2; sleep 99";
    let long = format!("sleep 99; : {}", "é".repeat(20_000));
    let mut other = wire.client.clone();
    let (late, long) =
        tokio::join!(wire.client.exec_sync(request(&id, script, 5)), other.exec_sync(request(&id, &long, 5)));
    for late in [late, long] {
        let late = late.expect_err("too long");
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    }
    drop(other);
    wire.close().await;
    machine.restart(Duration::ZERO).await;
    machine.remove_pod(&pod).await;
}

pub(crate) async fn output_is_returned_while_a_descendant_holds_the_pipe(machine: &mut Machine) {
    let pod = machine.pod("held").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let script = "echo hi; echo oh >&2; sleep 9500 & exit 3";
    // Both calls succeed, because the command itself ends in time. The call with a timeout takes at most that time.
    let call = async |timeout: i64| {
        let answer = tokio::time::timeout(LONG, machine.exec(&id, &["sh", "-c", script], timeout)).await;
        let answer = answer.expect("the call does not wait for the descendant").expect("it ended");
        let (stdout, stderr) = (answer.stdout.as_slice(), answer.stderr.as_slice());
        assert_eq!((stdout, stderr, answer.exit_code), (&b"hi\n"[..], &b"oh\n"[..], 3));
    };
    tokio::join!(call(0), call(60));
    let processes = machine.exec(&id, &["ps"], 0).await.expect("exec").stdout;
    let processes = String::from_utf8_lossy(&processes).into_owned();
    assert_eq!(
        processes.matches("sleep 9500").count(),
        2,
        "what a command leaves behind goes on: {processes}"
    );
    machine.remove_pod(&pod).await;
}

pub(crate) async fn an_exec_timeout_kills_all_descendants(machine: &mut Machine) {
    let pod = machine.pod("tree").await;
    let own = "setsid sleep 1001 & (sleep 1002 &); exec sleep 1000";
    let id = machine.run(&pod, "c", &["sh", "-c", own]).await;
    // The script starts three kinds of processes: one in another session, an orphan in another session without
    // environment and outputs, and one that starts others continuously.
    let script = "setsid sleep 994 & \
        (env -i /bin/setsid /bin/sh -c 'sleep 993 >/dev/null 2>&1 & exit' &); \
        setsid sh -c 'while :; do (setsid sleep 992 &); usleep 20000; done' & \
        sleep 991";
    let late = machine.exec(&id, &["sh", "-c", script], 5).await.expect_err("too long");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    // The deadline is shorter than any of these sleeps.
    let processes = eventually_async("the processes of the exec are killed", 50, async || {
        let processes = machine.exec(&id, &["ps"], 0).await.expect("exec").stdout;
        let processes = String::from_utf8_lossy(&processes).into_owned();
        // Zombies have no arguments. This container does not reap them.
        Some(processes).filter(|all| !all.contains("sleep 9") && !all.contains("usleep 2"))
    })
    .await;
    for own in ["sleep 1000", "sleep 1001", "sleep 1002"] {
        assert!(processes.contains(own), "{own}, a process of the container, is missing: {processes}");
    }
    machine.remove_pod(&pod).await;
}

pub(crate) async fn the_largest_exec_output_fits_into_a_message(machine: &mut Machine) {
    let pod = machine.pod("full").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let mut wire = Wire::open(machine).await;
    let script = "dd if=/dev/zero bs=1M count=20 2>/dev/null & dd if=/dev/zero bs=1M count=20 >&2 2>/dev/null; \
        wait; exit 5";
    let answer = wire.client.exec_sync(request(&id, script, 600)).await.expect("it fits").into_inner();
    assert_eq!(answer.exit_code, 5, "the command did not run to its end");
    let (stdout, stderr) = (answer.stdout.len(), answer.stderr.len());
    assert!(stdout > 0 && stderr > 0 && stdout + stderr > 15 << 20, "{stdout} and {stderr}");
    wire.close().await;
    machine.restart(Duration::ZERO).await;
    machine.remove_pod(&pod).await;
}

pub(crate) async fn outputs_of_one_pod_take_bounded_memory(machine: &mut Machine) {
    let pod = machine.pod("loud").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let script = "head -c 15728640 /dev/zero; sleep 20";
    let mut calls = Vec::new();
    for _ in 0..4 {
        let mut wire = Wire::open(machine).await;
        let request = request(&id, script, 600);
        calls.push(tokio::spawn(async move {
            let answer = wire.client.exec_sync(request).await;
            wire.close().await;
            answer.map(|answer| answer.into_inner().stdout.len())
        }));
    }
    let (mut full, mut refused) = (0, 0);
    for call in calls {
        match call.await.expect("no panic") {
            Ok(length) => {
                assert_eq!(length, 15 << 20);
                full += 1;
            }
            Err(status) => {
                assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                assert!(status.message().contains("limited to 32 MiB"), "{status}");
                refused += 1;
            }
        }
    }
    assert!(full <= 2 && refused >= 2, "{full} complete, {refused} refused");
    machine.restart(Duration::ZERO).await;
    machine.remove_pod(&pod).await;
}

/// Descriptors, threads and kilobytes of a process.
#[derive(Debug)]
struct ProcessResources {
    descriptors: usize,
    threads: u64,
    memory: u64,
}

impl ProcessResources {
    fn of(pid: i32) -> Self {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).expect("field");
            line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("number")
        };
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").count();
        Self { descriptors, threads: field("Threads:"), memory: field("VmRSS:") }
    }
}

/// Runs 2,000 execs, or `EXECS` execs on a slow emulated machine.
pub(crate) async fn thousands_of_execs_leave_nothing(machine: &mut Machine) {
    let pod = machine.pod("many").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let (runtime, shim) = (nix::unistd::getpid().as_raw(), machine.shim_pid(&pod).await);
    let many = async |count: usize| {
        for _ in 0..count {
            let answer = machine.exec(&id, &["echo", "x"], 120).await.expect("exec");
            assert_eq!((answer.stdout.as_slice(), answer.exit_code), (&b"x\n"[..], 0));
        }
    };
    let all = std::env::var("EXECS").map_or(2000, |count| count.parse().expect("a number"));
    // The first execs make allocations that are kept.
    many(all / 10).await;
    let before = [ProcessResources::of(runtime), ProcessResources::of(shim)];
    many(all).await;
    let after = [ProcessResources::of(runtime), ProcessResources::of(shim)];
    println!("  {before:?} {after:?}");
    for (before, after, slack) in
        before.iter().zip(&after).zip([8192, 1024]).map(|((before, after), slack)| (before, after, slack))
    {
        // The number of threads for blocking work varies, and with it the number of descriptors. A leak per exec would
        // be in the thousands.
        assert!(after.descriptors <= before.descriptors + 20, "{before:?} {after:?}");
        assert!(after.threads <= before.threads + 20, "{before:?} {after:?}");
        assert!(after.memory <= before.memory + slack, "{before:?} {after:?}");
    }
    machine.remove_pod(&pod).await;
}

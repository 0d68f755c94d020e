//! What happens in the middle of a dump by CRIU: the runtime is killed, the pod is stopped. Only where CRIU works.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Request;

use crate::checkpoint::works;
use crate::checkpoint_frozen::{layer, nothing_is_left};
use crate::checkpoint_pod::{checkpoint, empty_directory, goes_on, names, pod};
use crate::fixture::{Machine, alive, has_memory};

/// As which the test is called to be killed.
const ROLE: &str = "--make-checkpoint";
/// Keeps so many bytes in memory: its dump takes a while.
const HOLDER: &str = "(dd if=/dev/zero bs=1048576 count=64; sleep 10000) | tail -c 67108864";
const HELD_KB: u64 = 65_536;
/// So many bytes in images are of what it holds.
const SOME: u64 = 4 << 20;

/// A process that a failed test does not leave behind.
struct EndsWithTest(Child);

impl Drop for EndsWithTest {
    fn drop(&mut self) {
        // It may have ended.
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// A process with a runtime of its own that makes a pod's checkpoint, if that is what this one was called for.
pub(crate) fn checkpoint_if_called() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, role, dir, cgroup_root, pod, output, ids @ ..] = arguments.as_slice() else { return None };
    if role != ROLE {
        return None;
    }
    let tokio = tokio::runtime::Runtime::new().expect("tokio");
    let made = tokio.block_on(async {
        let runtime = Machine::borrowed(Path::new(dir), cgroup_root).await;
        let request = cri::CheckpointPodRequest {
            pod_sandbox_id: pod.clone(),
            output_path: output.clone(),
            container_ids: ids.to_vec(),
            ..Default::default()
        };
        runtime.checkpoint_pod(Request::new(request)).await
    });
    println!("the checkpoint came to its end: {made:?}");
    Some(ExitCode::FAILURE)
}

/// A pod with one more container, whose dump takes a while.
async fn large_pod(machine: &Machine, name: &str) -> (String, Vec<String>) {
    let (pod, mut ids) = pod(machine, name).await;
    let holder = machine.run(&pod, "holder", &["sh", "-c", HOLDER]).await;
    let held = || async {
        let look = ["sh", "-c", "cat /proc/[0-9]*/status"];
        let seen = machine.exec(&holder, &look, 0).await.expect("exec").stdout;
        let seen = String::from_utf8_lossy(&seen).into_owned();
        let sizes = seen.lines().filter_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
        sizes.filter_map(|size| size.parse::<u64>().ok()).max().unwrap_or_default()
    };
    for _ in 0..600 {
        if held().await > HELD_KB {
            ids.push(holder);
            return (pod, ids);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("it holds {} kB", held().await);
}

/// Waits until CRIU writes what a container holds in memory; says which processes that are.
async fn criu_writes(machine: &Machine, id: &str) -> Vec<i32> {
    let workshop = layer(machine, id).join("checkpoint");
    let images = workshop.join("checkpoint");
    let written = || {
        let files = std::fs::read_dir(&images).into_iter().flatten().flatten();
        let pages = files.filter(|file| file.file_name().to_string_lossy().starts_with("pages-"));
        pages.filter_map(|file| Some(file.metadata().ok()?.len())).sum::<u64>()
    };
    let begun = Instant::now();
    let mut criu = Vec::new();
    while written() < SOME || criu.is_empty() {
        if criu.is_empty() {
            criu = criu_in(&workshop);
        }
        let files = || images.exists().then(|| names(&images));
        assert!(begun.elapsed() < Duration::from_secs(180), "CRIU writes nothing: {:?}", files());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    criu
}

fn criu_in(workshop: &Path) -> Vec<i32> {
    let wanted = workshop.display().to_string();
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
        kill(Pid::from_raw(*pid), signal).expect("it is at work");
    }
}

pub(crate) async fn a_runtime_killed_while_criu_dumps_finds_all_again(machine: &mut Machine) {
    if works() != Some(true) {
        return println!("CRIU does not work here");
    }
    let (source, ids) = large_pod(machine, "killed").await;
    println!("a pod has so much in memory that its checkpoint takes a while");
    let holder = &ids[2];
    let beside = machine.pod("beside").await;
    let other = machine.run(&beside, "c", &["sleep", "1000"]).await;
    let output = empty_directory(machine, "killed");
    machine.lend().await;
    let mut command = Command::new(std::env::current_exe().expect("our own path"));
    command.arg(ROLE).arg(machine.path("")).arg(machine.cgroup_root()).arg(&source).arg(&output).args(&ids);
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
        // The kernel gave it no time: what came after the kill was tried all the same.
        println!("CRIU ended before it could be seen to outlive its runtime");
    }
    for id in &ids {
        assert_eq!(machine.status(id).await.state, i32::from(cri::ContainerState::ContainerRunning));
        assert_eq!(machine.exec(id, &["pwd"], 0).await.expect("exec").exit_code, 0);
    }
    goes_on(machine, &ids[0]).await;
    checkpoint(machine, &source, &ids[..2], &output).await.expect("a new checkpoint");
    assert_eq!(names(&output).len(), 3, "{:?}", names(&output));
    // Alone, since then nobody works out a digest, which takes longer here than all else.
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
        return println!("CRIU does not work here");
    }
    let (pod, ids) = large_pod(machine, "stopped").await;
    let output = empty_directory(machine, "stopped");
    let holder = machine.pid(&ids[2]).await;
    let stop = async {
        let criu = criu_writes(machine, &ids[2]).await;
        // It stands until what it dumps is killed, or it might be through with all of it by then.
        send(&criu, Signal::SIGSTOP);
        let begun = Instant::now();
        let stop = cri::StopPodSandboxRequest { pod_sandbox_id: pod.clone() };
        let goes_on = async {
            while has_memory(holder) {
                assert!(begun.elapsed() < Duration::from_secs(60), "it is not killed");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            send(&criu, Signal::SIGCONT);
        };
        let (stopped, ()) = tokio::join!(machine.runtime.stop_pod_sandbox(Request::new(stop)), goes_on);
        stopped.map(|_| begun.elapsed())
    };
    let (made, stopped) = tokio::join!(checkpoint(machine, &pod, &ids, &output), stop);
    println!("stopped within {:?}", stopped.expect("stopped"));
    let error = made.expect_err("it was stopped");
    assert!(error.message().contains("is being stopped"), "{error}");
    nothing_is_left(machine, &ids[2], &output).await;
    machine.remove_pod(&pod).await;
    std::fs::remove_dir(&output).expect("remove");
}

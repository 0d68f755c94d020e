//! Simulates a power cut and a boot: kills every process of the node, removes its mounts and its run directory.

use std::fs;
use std::path::Path;
use std::process::Command;

use coracle_integration::{Agent, Cluster, Machine, end_cgroup};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Kills an agent and its pods as a power cut does.
pub(crate) fn of_agent(machine: &Machine, agent: &mut Agent, number: u8) {
    agent.end(Signal::SIGKILL);
    let (run, state) = (agent.path("run"), agent.path("state"));
    clear(&run, &state, &format!("{}-{number}", machine.name()), || agent.host().command("sh"));
}

/// Kills a single-process cluster and its pods as a power cut does.
pub(crate) fn of_cluster(machine: &Machine, cluster: &mut Cluster) {
    cluster.kill();
    clear(&machine.path("run"), &machine.path("state"), machine.name(), || Command::new("sh"));
}

fn clear(run: &Path, state: &Path, cgroup: &str, shell: impl Fn() -> Command) {
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        if line.contains("shim\0") && line.contains(run.to_str().unwrap()) {
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }
    end_cgroup(cgroup);
    let unmount = format!(
        "awk '{{print $5}}' /proc/self/mountinfo | grep -E '^({}|{})(/|$)' | tac | xargs -r -n1 umount -l",
        run.display(),
        state.display()
    );
    let output = shell().args(["-c", &unmount]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::remove_dir_all(run).unwrap();
}

//! Cleanup of a test's cgroup, in all cgroup hierarchies of the machine.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::within;

/// Kills every process in the cgroup `name` and below, and removes the cgroup. Does nothing if it is absent or the root.
pub fn end_cgroup(name: &str) {
    let name = name.trim_matches('/');
    if name.is_empty() || name.split('/').any(|part| part == "..") {
        return;
    }
    // A process may fork while another is killed, and a killed process leaves its cgroup a moment later: try again.
    let _is_gone = within(1, || {
        let groups = below(name);
        groups.iter().for_each(|group| kill_all(group));
        // Removes children before their parents.
        groups.iter().rev().for_each(|group| drop(fs::remove_dir(group)));
        groups.is_empty()
    });
}

/// The cgroups `name` of all hierarchies and all cgroups below them, parents before children.
fn below(name: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut groups: Vec<PathBuf> = hierarchies
        .chain([root.to_owned()])
        .map(|root| root.join(name))
        .filter(|group| group.is_dir())
        .collect();
    let mut at = 0;
    while let Some(group) = groups.get(at).cloned() {
        let children = fs::read_dir(group).into_iter().flatten().flatten().map(|entry| entry.path());
        groups.extend(children.filter(|path| path.is_dir()));
        at += 1;
    }
    groups
}

fn kill_all(group: &Path) {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    for pid in text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 1) {
        let _gone = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

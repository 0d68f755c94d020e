//! A snapshot of the resources that a test uses, as the kernel reports them. Tests compare snapshots to find leaks.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use coracle_testing::{run, until};

use crate::Machine;

/// Processes, links, mounts, cgroups, nftables tables and files of a machine.
#[derive(Debug, PartialEq, Eq)]
pub struct ResourceSnapshot(BTreeSet<String>);

impl ResourceSnapshot {
    /// Takes a snapshot.
    #[must_use]
    pub fn of(machine: &Machine) -> Self {
        Self::with(machine, &[])
    }

    /// Like [`of`](Self::of), with the files in more of the machine's directories.
    #[must_use]
    pub fn with(machine: &Machine, dirs: &[&str]) -> Self {
        let ours =
            ["", "run"].map(|name| machine.path(name).display().to_string().trim_end_matches('/').to_owned());
        let is_ours = |text: &str| ours.iter().any(|directory| text.contains(directory));
        let mut found = BTreeSet::new();
        found.extend(processes(is_ours));
        found.extend(run("ip", &["-o", "link"]).lines().filter_map(|line| {
            let name = line.split(": ").nth(1)?.split('@').next()?;
            Some(format!("link {name}"))
        }));
        found.extend(run("nft", &["list", "tables"]).lines().map(str::to_owned));
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        found.extend(mounts.lines().filter(|line| is_ours(line)).map(|line| format!("mount {line}")));
        for hierarchy in fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
            cgroups(&hierarchy.path().join(machine.name()), &mut found);
        }
        cgroups(&Path::new("/sys/fs/cgroup").join(machine.name()), &mut found);
        for dir in ["run", "state/pods", "state/containers", "logs"].iter().chain(dirs) {
            files(&machine.path(dir), &mut found);
        }
        Self(found)
    }

    /// Polls `take` until five snapshots in a row are equal. Then no resource is being added or removed.
    ///
    /// # Panics
    /// When the snapshots still differ after two minutes.
    pub async fn stable(take: impl Fn() -> Self) -> Self {
        let (mut last, mut equal) = (take(), 1);
        let is_stable = || {
            let before = std::mem::replace(&mut last, take());
            equal = if before == last { equal + 1 } else { 1 };
            equal == 5
        };
        until("five equal snapshots in a row", 20, is_stable).await;
        last
    }

    /// Resources in this snapshot that `before` does not contain.
    #[must_use]
    pub fn added_since<'a>(&'a self, before: &'a Self) -> Vec<&'a str> {
        self.0.difference(&before.0).map(String::as_str).collect()
    }
}

/// Command lines of processes that contain the path of one of the machine's directories.
fn processes(is_ours: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        if is_ours(&command) && !command.starts_with("docker-registry") {
            found.push(format!("process {command}"));
        }
    }
    found
}

fn cgroups(dir: &Path, found: &mut BTreeSet<String>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    found.insert(format!("cgroup {}", dir.display()));
    for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
        cgroups(&entry.path(), found);
    }
}

fn files(dir: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        found.insert(format!("file {}", entry.path().display()));
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            files(&entry.path(), found);
        }
    }
}

//! Resources of a process: memory, descriptors, threads.

use std::fs;

use coracle_integration::Machine;

/// Current resources of one process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessUsage {
    /// Anonymous memory in kB.
    anonymous: u64,
    files: usize,
    threads: usize,
}

impl ProcessUsage {
    pub(crate) fn of(pid: u32) -> Self {
        let rollup =
            fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("smaps_rollup of the process");
        let kilobytes =
            |line: &str| line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok());
        let anonymous =
            rollup.lines().filter(|line| line.starts_with("Anonymous:")).filter_map(kilobytes).sum();
        let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).expect(what).count();
        Self { anonymous, files: count("fd"), threads: count("task") }
    }

    /// Whether memory has grown by at most `slack` kB, and descriptors and threads by at most four each. Fragmentation
    /// explains `slack`. In an hour, a leak of a few bytes per call exceeds it.
    pub(crate) fn has_not_grown_since(&self, earlier: &Self, slack: u64) -> bool {
        self.anonymous <= earlier.anonymous + slack
            && self.files <= earlier.files + 4
            && self.threads <= earlier.threads + 4
    }
}

/// Process ids and command lines of the machine's shims. A pod with a shared pid namespace has two: the shim and process
/// 1, which is the younger.
pub(crate) fn shims(machine: &Machine) -> Vec<(i32, String)> {
    let ours = machine.path("run").display().to_string();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(pid) = pid.filter(|_| command.contains(" shim ") && command.contains(&ours)) {
            found.push((pid, command));
        }
    }
    found
}

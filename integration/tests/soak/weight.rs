//! What a process holds of the machine.

use std::fs;

use coracle_integration::Machine;

/// Of one process, now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weight {
    /// Memory that is no file's, in kB.
    anonymous: u64,
    files: usize,
    threads: usize,
}

impl Weight {
    pub(crate) fn of(pid: u32) -> Self {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("its memory");
        let kilobytes =
            |line: &str| line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok());
        let anonymous =
            rollup.lines().filter(|line| line.starts_with("Anonymous:")).filter_map(kilobytes).sum();
        let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).expect(what).count();
        Self { anonymous, files: count("fd"), threads: count("task") }
    }

    /// Up to so many kB more are another arrangement of the same; in an hour, a leak of some bytes a call is more.
    pub(crate) fn is_flat_since(&self, earlier: &Self, slack: u64) -> bool {
        self.anonymous <= earlier.anonymous + slack
            && self.files <= earlier.files + 4
            && self.threads <= earlier.threads + 4
    }
}

/// The machine's shims by process and command line; a pod with one pid namespace has two, its first process
/// being the younger.
pub(crate) fn shims(machine: &Machine) -> Vec<(i32, String)> {
    let ours = machine.path("").display().to_string();
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

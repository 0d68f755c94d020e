//! Memory of the node's processes.

use std::fmt;
use std::fs;

use coracle_integration::Machine;

/// Proportional set sizes, in kB.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    node: u64,
    shims: u64,
    /// Number of shims.
    pods: usize,
}

impl Memory {
    /// Memory of the node's process and of all shims of the machine.
    pub(crate) fn of(machine: &Machine, pid: u32) -> Self {
        let run = machine.path("run").display().to_string();
        let mut shims = Vec::new();
        for process in fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path()) {
            let command = fs::read(process.join("cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            if command.contains(" shim ") && command.contains(&run) {
                shims.extend(pss(&process.join("smaps_rollup")));
            }
        }
        let node = pss(format!("/proc/{pid}/smaps_rollup").as_ref()).expect("the node's process");
        Self { node, shims: shims.iter().sum(), pods: shims.len() }
    }

    /// Whether memory has grown by at most a fifth.
    pub(crate) fn is_flat_since(&self, earlier: &Self) -> bool {
        let within = |now: u64, then: u64| now * 5 <= then * 6;
        self.pods == earlier.pods && within(self.node, earlier.node) && within(self.shims, earlier.shims)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, shims, pods } = self;
        write!(f, "PSS {node} kB of the node, {shims} kB of {pods} shims")
    }
}

/// PSS in kB. None if the process has ended.
fn pss(rollup: &std::path::Path) -> Option<u64> {
    let text = fs::read_to_string(rollup).ok()?;
    text.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse().ok())
}

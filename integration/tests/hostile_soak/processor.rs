//! Shares of the processor: what a machine with systemd gives its services, its pods, and its users.
//!
//! ```text
//! <machine>            weight above the weight of other programs, so that they do not fail probes
//! <machine>/node       the node's own processes: the default weight, like system.slice
//! <machine>/clients    this test: the default weight, because clients of a real node run elsewhere
//! <machine>/kubepods   the pods: the agent sets its weight
//! ```

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// The hierarchies with the cpu controller, on v1 and on v2: the mount point below `/sys/fs/cgroup`, the file of the
/// weight, and four times the default weight.
const HIERARCHIES: [(&str, &str, &str); 2] = [("cpu", "cpu.shares", "4096"), ("", "cpu.weight", "400")];

/// The cgroups of the node and of this test. Dropping this value moves the test process back into its former cgroup:
/// `Machine` kills all processes in its own cgroup when it is dropped.
pub(crate) struct Shares {
    machine: PathBuf,
    former: PathBuf,
}

impl Shares {
    /// Creates the cgroups below the cgroup `machine` and moves this process to `clients`.
    pub(crate) fn divide(machine: &str) -> Self {
        let root = Path::new("/sys/fs/cgroup");
        let (hierarchy, file, weight) = HIERARCHIES
            .map(|(name, file, weight)| (root.join(name), file, weight))
            .into_iter()
            .find(|(hierarchy, ..)| hierarchy.join("cgroup.procs").exists())
            .expect("a hierarchy with the cpu controller");
        let shares = Self { machine: hierarchy.join(machine), former: hierarchy.join(own_cgroup()) };
        for path in [hierarchy.as_path(), &shares.machine] {
            fs::create_dir_all(path).unwrap();
            // v1 has no such file.
            let _absent = write(&path.join("cgroup.subtree_control"), "+cpu");
        }
        for group in ["node", "clients"] {
            fs::create_dir_all(shares.machine.join(group)).unwrap();
        }
        write(&shares.machine.join(file), weight).unwrap();
        shares.enter("clients", std::process::id());
        shares
    }

    /// Moves the node's process. Its later children follow it, until the runtime gives them a pod's cgroup.
    pub(crate) fn enter_node(&self, pid: u32) {
        self.enter("node", pid);
    }

    fn enter(&self, group: &str, pid: u32) {
        write(&self.machine.join(group).join("cgroup.procs"), &pid.to_string()).unwrap();
    }
}

impl Drop for Shares {
    fn drop(&mut self) {
        let moved = write(&self.former.join("cgroup.procs"), &std::process::id().to_string());
        assert!(moved.is_ok() || std::thread::panicking(), "cannot leave the machine's cgroup: {moved:?}");
    }
}

fn write(file: &Path, text: &str) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(file)?.write_all(text.as_bytes())
}

/// The cgroup of this process in the hierarchy with the cpu controller, without the slash at its beginning.
fn own_cgroup() -> String {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap();
    let of_cpu = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next()?;
        let path = fields.next()?.trim_start_matches('/').to_owned();
        Some((controllers.to_owned(), path))
    };
    let all: Vec<(String, String)> = text.lines().filter_map(of_cpu).collect();
    let on_v1 = all.iter().find(|(controllers, _)| controllers.split(',').any(|name| name == "cpu"));
    on_v1.or_else(|| all.iter().find(|(controllers, _)| controllers.is_empty())).expect("a cgroup").1.clone()
}

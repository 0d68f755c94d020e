//! The node's executable, which a container's first process and execs run until execve (CVE-2019-5736).

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::process::Stdio;

use coracle_integration::{Machine, eventually};
use nix::fcntl::OFlag;
use nix::sys::statvfs::{FsFlags, fstatvfs};

use super::cgroups::{directory, freezer, parent};
use super::{EXEC_TIMEOUT, Pids, container_config, on_an_attacker};

/// Opens the executable of a process. Like the attacker, the test keeps the descriptor open until no process runs the
/// executable.
fn hold(pid: u64) -> File {
    let open = OFlag::O_PATH.bits();
    File::options().read(true).custom_flags(open).open(format!("/proc/{pid}/exe")).unwrap()
}

fn is_read_only(held: &File) -> bool {
    fstatvfs(held).unwrap().flags().contains(FsFlags::ST_RDONLY)
}

fn can_be_written(held: &File) -> bool {
    File::options().write(true).open(format!("/proc/self/fd/{}", held.as_raw_fd())).is_ok()
}

#[test]
fn the_executable_of_a_starting_container_is_read_only() {
    on_an_attacker(Pids::Pod, |attacker| {
        let mut config = container_config(Pids::Pod);
        config["metadata"]["name"] = "waits".into();
        let id = attacker.create(&config, Pids::Pod);
        // A created container waits for its start. Until then, its process runs the shim's executable.
        let pid = attacker.pid(&id);
        let shim = parent(pid);
        let held = [pid, shim].map(hold);
        assert!(held.iter().all(is_read_only));
        attacker.cri.crictl(&["rmp", "-f", &attacker.pod]);
        assert!(held.iter().all(is_read_only));
        assert!(!held.iter().any(can_be_written));
    });
}

#[test]
fn the_executable_of_a_starting_exec_is_read_only() {
    on_an_attacker(Pids::Container, |attacker| {
        let first = attacker.pid(&attacker.id);
        let group = directory(first, "freezer");
        let (file, frozen, thawed) = freezer(&group);
        // An exec joins the cgroup before it executes the command, and waits there.
        fs::write(&file, frozen).unwrap();
        let mut exec = attacker.cri.command();
        exec.args(["exec", "-s", "--timeout", EXEC_TIMEOUT, &attacker.id, "true"]);
        let mut exec = exec.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let pid = eventually("the exec in the cgroup of the container", 30, || {
            let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap();
            pids.lines().filter_map(|pid| pid.parse::<u64>().ok()).find(|pid| *pid != first)
        });
        let held = hold(pid);
        fs::write(&file, thawed).unwrap();
        assert!(exec.wait().unwrap().success());
        let [of_exec, of_node] = [held.metadata(), fs::metadata(Machine::coracle())].map(Result::unwrap);
        assert_eq!(
            (of_exec.dev(), of_exec.ino()),
            (of_node.dev(), of_node.ino()),
            "the process does not run the executable of the node any more"
        );
        assert!(is_read_only(&held));
        attacker.cri.crictl(&["rmp", "-f", &attacker.pod]);
        assert!(is_read_only(&held) && !can_be_written(&held));
    });
}

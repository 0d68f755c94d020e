//! The node's executable, which a container's first process runs until execve (CVE-2019-5736).

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;

use nix::fcntl::OFlag;
use nix::sys::statvfs::{FsFlags, fstatvfs};

use super::{Pids, container_config, on_an_attacker};

#[test]
fn the_executable_of_a_starting_container_is_read_only() {
    on_an_attacker(Pids::Pod, |attacker| {
        let mut config = container_config(Pids::Pod);
        config["metadata"]["name"] = "waits".into();
        let id = attacker.create(&config, Pids::Pod);
        // A created container waits for its start. Until then, its process runs the shim's executable.
        let pid = attacker.cri.json(&["inspect", &id])["info"]["pid"].as_u64().unwrap();
        let shim = parent(pid);
        // The attacker holds a descriptor until no process runs the executable.
        let held = [pid, shim].map(|pid| {
            let open = OFlag::O_PATH.bits();
            File::options().read(true).custom_flags(open).open(format!("/proc/{pid}/exe")).unwrap()
        });
        let read_only =
            || held.iter().all(|held| fstatvfs(held).unwrap().flags().contains(FsFlags::ST_RDONLY));
        assert!(read_only());
        attacker.cri.crictl(&["rmp", "-f", &attacker.pod]);
        assert!(read_only());
        for held in &held {
            let again = format!("/proc/self/fd/{}", held.as_raw_fd());
            assert!(File::options().write(true).open(again).is_err());
        }
    });
}

fn parent(pid: u64) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
    line.trim().parse().unwrap()
}

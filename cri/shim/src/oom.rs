//! Detects OOM kills in a v1 cgroup that systemd has removed already.
//!
//! systemd removes a scope's cgroups after its last process ends, while the shim is still processing that exit. The
//! kernel's counter is removed with the cgroup, and v1 keeps no counter in the parent. So eventfds are used. The file
//! `memory.oom_control` signals an eventfd at every OOM, and once more at the cgroup's removal (memory.rst, "OOM
//! Control"; `memcg_event_remove` in mm/memcontrol-v1.c). A second eventfd, which is signalled only at the removal,
//! distinguishes the two cases.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::cgroup::{self, Hierarchy};

/// Milliseconds to wait for the removal event. The removal has already been observed.
const REMOVAL_TIMEOUT_MS: u16 = 1000;

/// OOM notifications of one cgroup.
#[derive(Debug)]
pub(crate) struct OomEvents {
    shortages: EventFd,
    removal: EventFd,
}

// === impl OomEvents ===

impl OomEvents {
    /// Registers for notifications if systemd may remove the counter, which applies to a cgroup of a systemd unit on
    /// v1. Otherwise returns `None`.
    pub(crate) fn listen(hierarchies: &[Hierarchy], path: &str) -> Option<io::Result<Self>> {
        coracle_systemd::unit::of_path(path).filter(|_| cgroup::is_below_root(path))?;
        let memory = hierarchies.iter().find(|hierarchy| hierarchy.has("memory"))?;
        Some(Self::at(&memory.at(path)))
    }

    fn at(cgroup: &Path) -> io::Result<Self> {
        let new = || EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let events = Self { shortages: new()?, removal: new()? };
        // The kernel signals eventfds in the reverse order of their registration. So when `removal` is signalled,
        // `shortages` was signalled before. No cgroup ever reaches the threshold of -1 bytes (unsigned maximum).
        register(cgroup, &events.removal, "memory.usage_in_bytes", "-1")?;
        register(cgroup, &events.shortages, "memory.oom_control", "")?;
        Ok(events)
    }

    /// Whether an OOM happened. The cgroup has been removed. The call waits for the kernel's removal event.
    pub(crate) fn has_occurred(&self) -> bool {
        // The wait is needed: without the removal event, a single signal might come from the removal itself.
        let _ = poll(
            &mut [PollFd::new(self.removal.as_fd(), PollFlags::POLLIN)],
            PollTimeout::from(REMOVAL_TIMEOUT_MS),
        );
        self.shortages.read().is_ok_and(|events| events > 1)
    }
}

/// Registers an eventfd, see cgroup-v1/memcg_test.rst, "cgroup.event_control".
fn register(cgroup: &Path, event: &EventFd, file: &str, argument: &str) -> io::Result<()> {
    let watched = File::open(cgroup.join(file))?;
    let line = format!("{} {} {argument}", event.as_fd().as_raw_fd(), watched.as_raw_fd());
    OpenOptions::new().write(true).open(cgroup.join("cgroup.event_control"))?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use coracle_testing::{eventually, skip};

    use super::*;

    #[test]
    fn only_a_systemd_unit_on_v1_needs_events() {
        let v1 = [Hierarchy::new("/nowhere", "memory")];
        let v2 = [Hierarchy::new("/nowhere", "")];
        assert!(OomEvents::listen(&v1, "/a.slice/x.scope").is_some());
        assert!(OomEvents::listen(&v1, "/kubepods/pod1/x").is_none());
        assert!(OomEvents::listen(&v2, "/a.slice/x.scope").is_none());
    }

    #[test]
    fn an_oom_kill_is_reported_after_the_cgroup_is_removed() {
        // Needs root and the memory controller on v1.
        let hierarchies = cgroup::hierarchies().unwrap();
        let Some(memory) = hierarchies.iter().find(|hierarchy| hierarchy.has("memory")) else {
            skip!("no memory controller of cgroup v1 is mounted");
        };
        let hog = "dd if=/dev/zero of=/dev/null bs=64M count=1 status=none";
        for (name, command, expected) in [("short", hog, true), ("idle", "true", false)] {
            let cgroup = memory.make(&format!("/coracle-oom-{}-{name}", std::process::id())).unwrap();
            std::fs::write(cgroup.join("memory.limit_in_bytes"), "8388608").unwrap();
            std::fs::write(cgroup.join("memory.swappiness"), "0").unwrap();
            let events = OomEvents::at(&cgroup).unwrap();
            let script = format!("echo 0 >{}/cgroup.procs && exec {command}", cgroup.display());
            let ended = std::process::Command::new("sh").args(["-c", &script]).status().unwrap();
            eventually("the cgroup to be removed", 10, || {
                !std::fs::remove_dir(&cgroup).is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
            });
            assert_eq!((ended.success(), events.has_occurred()), (!expected, expected), "{name}");
        }
    }
}

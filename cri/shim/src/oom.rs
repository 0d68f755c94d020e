//! Whether the kernel killed for want of memory in a cgroup of v1 that is gone.
//!
//! A scope ends with its last process, and systemd removes its cgroups while the shim still hears of that end. The
//! kernel's count goes with them, and v1 counts in no cgroup above. What stays are events: an eventfd is told of every
//! want of memory, and once more when the cgroup is removed (memory.rst, "OOM Control"; `memcg_event_remove` in
//! mm/memcontrol-v1.c). To tell one from the other there is a second one, a witness that is told of the removal alone.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::cgroup::{self, Hierarchy};

/// How long the kernel may take from a cgroup's removal, which has been seen, to its last word, in milliseconds.
const LIMIT: u16 = 1000;

/// What the kernel tells of one cgroup.
#[derive(Debug)]
pub(crate) struct OomEvents {
    shortages: EventFd,
    removal: EventFd,
}

// === impl OomEvents ===

impl OomEvents {
    /// Listens, if systemd may take the count away: to a unit's cgroup on v1.
    pub(crate) fn listen(hierarchies: &[Hierarchy], path: &str) -> Option<io::Result<Self>> {
        coracle_systemd::unit::of_path(path).filter(|_| cgroup::is_below_root(path))?;
        let memory = hierarchies.iter().find(|hierarchy| hierarchy.has("memory"))?;
        Some(Self::at(&memory.at(path)))
    }

    fn at(cgroup: &Path) -> io::Result<Self> {
        let new = || EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let events = Self { shortages: new()?, removal: new()? };
        // The kernel tells who came last first, so this one is told when the other one has been. No cgroup uses so much.
        register(cgroup, &events.removal, "memory.usage_in_bytes", "-1")?;
        register(cgroup, &events.shortages, "memory.oom_control", "")?;
        Ok(events)
    }

    /// Whether there was a want of memory, now that the cgroup is gone. Waits for the kernel's last word.
    pub(crate) fn happened(&self) -> bool {
        // Without that word one event may be the removal's.
        let _ = poll(&mut [PollFd::new(self.removal.as_fd(), PollFlags::POLLIN)], PollTimeout::from(LIMIT));
        self.shortages.read().is_ok_and(|events| events > 1)
    }
}

/// cgroup-v1/memcg_test.rst, "cgroup.event_control".
fn register(cgroup: &Path, event: &EventFd, file: &str, argument: &str) -> io::Result<()> {
    let watched = File::open(cgroup.join(file))?;
    let line = format!("{} {} {argument}", event.as_fd().as_raw_fd(), watched.as_raw_fd());
    OpenOptions::new().write(true).open(cgroup.join("cgroup.event_control"))?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_unit_on_v1_loses_its_count() {
        let v1 = [Hierarchy::new("/nowhere", "memory")];
        let v2 = [Hierarchy::new("/nowhere", "")];
        assert!(OomEvents::listen(&v1, "/a.slice/x.scope").is_some());
        assert!(OomEvents::listen(&v1, "/kubepods/pod1/x").is_none());
        assert!(OomEvents::listen(&v2, "/a.slice/x.scope").is_none());
    }

    #[test]
    fn a_want_of_memory_is_known_when_the_cgroup_is_gone() {
        // Only root may, and only where the controller is v1's.
        let hierarchies = cgroup::hierarchies().unwrap();
        let memory = hierarchies.iter().find(|hierarchy| hierarchy.has("memory"));
        let Some(memory) = memory.filter(|_| nix::unistd::geteuid().is_root()) else { return };
        let hog = "dd if=/dev/zero of=/dev/null bs=64M count=1 status=none";
        for (name, command, expected) in [("short", hog, true), ("idle", "true", false)] {
            let cgroup = memory.make(&format!("/coracle-oom-{}-{name}", std::process::id())).unwrap();
            std::fs::write(cgroup.join("memory.limit_in_bytes"), "8388608").unwrap();
            std::fs::write(cgroup.join("memory.swappiness"), "0").unwrap();
            let events = OomEvents::at(&cgroup).unwrap();
            let script = format!("echo 0 >{}/cgroup.procs && exec {command}", cgroup.display());
            let ended = std::process::Command::new("sh").args(["-c", &script]).status().unwrap();
            while std::fs::remove_dir(&cgroup).is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
            {
                std::thread::yield_now();
            }
            assert_eq!((ended.success(), events.happened()), (!expected, expected), "{name}");
        }
    }
}

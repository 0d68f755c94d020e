//! The host's mount namespace, and whether its later mounts propagate to the pod.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::sched::{CloneFlags, setns};

use crate::kernel;

/// The mount namespace that the shim was started in.
#[derive(Debug)]
pub(crate) struct HostMounts {
    namespace: OwnedFd,
    propagate_here: bool,
}

// === impl HostMounts ===

impl HostMounts {
    /// Captures the current namespace, before the shim leaves it.
    pub(crate) fn capture() -> io::Result<Self> {
        let namespace = fs::File::open("/proc/self/ns/mnt")?.into();
        let propagate_here = root_is_shared(&coracle_tree::read_lossy("/proc/self/mountinfo")?);
        Ok(Self { namespace, propagate_here })
    }

    /// Whether mounts made on the host after the pod's start propagate to the pod's namespace. They propagate if the
    /// root mount is shared, as systemd makes it. The kernel's default is private.
    pub(crate) fn propagate_here(&self) -> bool {
        self.propagate_here
    }

    /// Runs `act` in the host's mount namespace.
    pub(crate) fn visit<T>(&self, act: impl FnOnce() -> T) -> io::Result<T> {
        let own = fs::File::open("/proc/self/ns/mnt")?;
        setns(kernel::borrow(self.as_raw_fd()), CloneFlags::CLONE_NEWNS)?;
        let done = act();
        setns(own, CloneFlags::CLONE_NEWNS)?;
        Ok(done)
    }
}

impl AsRawFd for HostMounts {
    fn as_raw_fd(&self) -> RawFd {
        self.namespace.as_raw_fd()
    }
}

/// Whether the topmost mount at `/` is shared, see `mountinfo` in proc(5).
fn root_is_shared(mountinfo: &str) -> bool {
    let fields = |line: &'_ str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let root = mountinfo.lines().map(fields).rfind(|fields| fields.get(4).is_some_and(|at| at == "/"));
    root.is_some_and(|fields| {
        fields.iter().skip(6).take_while(|f| *f != "-").any(|option| option.starts_with("shared:"))
    })
}

#[cfg(test)]
mod tests {
    use super::root_is_shared;

    #[test]
    fn only_a_shared_root_propagates_later_mounts() {
        let line = |options: &str| format!("22 1 8:1 / / rw,relatime {options}- ext4 /dev/vda rw\n");
        assert!(root_is_shared(&line("shared:1 ")));
        assert!(root_is_shared(&line("master:2 shared:3 ")));
        assert!(!root_is_shared(&line("")));
        assert!(!root_is_shared(&line("master:2 ")));
        // The covered root mount and mounts at other paths do not count.
        assert!(!root_is_shared(&(line("shared:1 ") + &line(""))));
        let other = "30 22 0:5 / /proc rw shared:9 - proc proc rw\n";
        assert!(!root_is_shared(&(line("") + other)));
        assert!(!root_is_shared(""));
    }
}

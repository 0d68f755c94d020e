//! Namespaces and directories of processes by descriptor. A pid is a process's own only until its parent has waited for it.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

/// A pid namespace of the pod, and the process whose number the runtime names it by.
#[derive(Debug)]
pub(crate) struct PidNamespace {
    pub(crate) pid: i32,
    pub(crate) fd: OwnedFd,
}

// === impl PidNamespace ===

impl PidNamespace {
    /// That of a child which the caller has not waited for. `None` if the child is a zombie.
    pub(crate) fn of_child(pid: i32) -> Option<Self> {
        let file = File::open(format!("/proc/{pid}/ns/pid")).ok()?;
        Some(Self { pid, fd: file.into() })
    }

    /// The path of the held namespace for what wants one. It is good in this process and its forks.
    pub(crate) fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd())
    }
}

/// The pid and the namespace's name of a path that names a namespace by a process: `/proc/PID/ns/NAME`.
pub(crate) fn named(path: &Path) -> Option<(i32, &str)> {
    let (pid, name) = path.to_str()?.strip_prefix("/proc/")?.split_once("/ns/")?;
    Some((pid.parse().ok()?, name))
}

/// A child that this process has not waited for yet.
pub(crate) fn is_child(pid: i32) -> bool {
    use nix::sys::wait::{Id, WaitPidFlag, waitid};
    let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    pid > 1 && waitid(Id::Pid(nix::unistd::Pid::from_raw(pid)), look).is_ok()
}

/// Descriptor of a process's directory in /proc. Look-ups through it fail once the process has ended, even if its pid is in
/// use again.
pub(crate) fn directory(pid: i32) -> io::Result<OwnedFd> {
    if pid <= 1 {
        return Err(ErrorKind::NotFound.into());
    }
    Ok(File::open(format!("/proc/{pid}"))?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_one_until_it_is_waited_for() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id().cast_signed();
        assert!(is_child(pid));
        child.wait().unwrap();
        assert!(!is_child(pid) && !is_child(1) && !is_child(0));
    }

    #[test]
    fn a_namespace_is_named_by_a_process_or_not() {
        assert_eq!(named(Path::new("/proc/7/ns/pid")), Some((7, "pid")));
        for path in ["/proc/self/ns/pid", "/run/netns/x", "/proc/7/ns", "/proc//ns/pid"] {
            assert_eq!(named(Path::new(path)), None, "{path}");
        }
    }
}

//! Processes and their namespaces by descriptor. A pid is not reused until the parent has reaped the process.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

/// A pid namespace of the pod. The runtime refers to the namespace by the path `/proc/PID/ns/pid` of the process `pid`.
#[derive(Debug)]
pub(crate) struct PidNamespace {
    pub(crate) pid: i32,
    pub(crate) fd: OwnedFd,
}

// === impl PidNamespace ===

impl PidNamespace {
    /// The namespace of a child that the caller has not reaped. `None` if the child is a zombie.
    pub(crate) fn of_child(pid: i32) -> Option<Self> {
        let file = File::open(format!("/proc/{pid}/ns/pid")).ok()?;
        Some(Self { pid, fd: file.into() })
    }

    /// A path to the held namespace. It is valid in this process and its forks.
    pub(crate) fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd())
    }
}

/// Parses a namespace path `/proc/PID/ns/NAME` into pid and name.
pub(crate) fn parse_namespace_path(path: &Path) -> Option<(i32, &str)> {
    let (pid, name) = path.to_str()?.strip_prefix("/proc/")?.split_once("/ns/")?;
    Some((pid.parse().ok()?, name))
}

/// Whether the process is a child that this process has not reaped yet.
pub(crate) fn is_child(pid: i32) -> bool {
    use nix::sys::wait::{Id, WaitPidFlag, waitid};
    let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    pid > 1 && waitid(Id::Pid(nix::unistd::Pid::from_raw(pid)), look).is_ok()
}

/// Opens a process's directory in /proc. Look-ups through it fail after the process has ended, even if its
/// pid is reused.
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
    fn a_process_is_a_child_until_it_is_reaped() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id().cast_signed();
        assert!(is_child(pid));
        child.wait().unwrap();
        assert!(!is_child(pid) && !is_child(1) && !is_child(0));
    }

    #[test]
    fn only_namespace_paths_of_a_pid_are_parsed() {
        assert_eq!(parse_namespace_path(Path::new("/proc/7/ns/pid")), Some((7, "pid")));
        for path in ["/proc/self/ns/pid", "/run/netns/x", "/proc/7/ns", "/proc//ns/pid"] {
            assert_eq!(parse_namespace_path(Path::new(path)), None, "{path}");
        }
    }
}

//! Processes and their namespaces by descriptor. A pid is not reused until the parent has reaped the process.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use nix::fcntl::{OFlag, openat, readlinkat};
use nix::sys::stat::Mode;

use crate::kernel;

/// A pid namespace of the pod. The runtime refers to the namespace by the path `/proc/PID/ns/pid` of the process `pid`.
#[derive(Debug)]
pub(crate) struct PidNamespace {
    pub(crate) pid: i32,
    pub(crate) fd: OwnedFd,
}

/// The directory in /proc of a process. Look-ups through it fail after the process has been reaped, even if its pid is
/// reused.
#[derive(Debug)]
pub(crate) struct ProcDirectory(OwnedFd);

// === impl ProcDirectory ===

impl ProcDirectory {
    /// Opens the directory of the process that `pidfd` refers to, and that has had this pid. An error if the process
    /// has been reaped.
    pub(crate) fn open(pidfd: &OwnedFd, pid: i32) -> io::Result<Self> {
        let directory = directory(pid)?;
        // The process is not reaped, so the pid was not reused before the directory was opened. Signal 0 only checks
        // whether the process exists.
        kernel::send_signal(pidfd, 0)?;
        Ok(Self(directory))
    }

    /// The text of the link `/proc/PID/ns/user`. It is the same for all processes of a user namespace.
    pub(crate) fn user_namespace(&self) -> io::Result<OsString> {
        Ok(readlinkat(&self.0, "ns/user")?)
    }

    /// The text of `/proc/PID/cgroup`.
    pub(crate) fn cgroups(&self) -> io::Result<String> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let mut file = File::from(openat(&self.0, "cgroup", flags, Mode::empty())?);
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
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
    fn a_directory_is_of_the_opened_process_until_it_is_reaped() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = child.id().cast_signed();
        let pidfd = kernel::pidfd_open(pid).unwrap();
        let opened = ProcDirectory::open(&pidfd, pid).unwrap();
        let own = std::fs::read_link("/proc/self/ns/user").unwrap();
        assert_eq!(opened.user_namespace().unwrap(), own.into_os_string());
        assert_eq!(opened.cgroups().unwrap(), coracle_tree::read_lossy("/proc/self/cgroup").unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(opened.user_namespace().is_err() && opened.cgroups().is_err());
        assert!(ProcDirectory::open(&pidfd, pid).is_err());
    }

    #[test]
    fn a_process_with_a_reused_pid_is_not_read() {
        if !coracle_testing::has_own_pids() {
            let test = "process::tests::a_process_with_a_reused_pid_is_not_read";
            return coracle_testing::run_with_own_pids(test);
        }
        let open = |pid| {
            let pidfd = kernel::pidfd_open(pid).unwrap();
            (ProcDirectory::open(&pidfd, pid).unwrap(), pidfd)
        };
        let ((first, pidfd), second) = coracle_testing::reuse_pid(open);
        assert!(first.user_namespace().is_err() && first.cgroups().is_err());
        assert!(ProcDirectory::open(&pidfd, second.pid()).is_err());
        let (second, _pidfd) = open(second.pid());
        assert!(second.user_namespace().is_ok() && second.cgroups().is_ok());
    }

    #[test]
    fn only_namespace_paths_of_a_pid_are_parsed() {
        assert_eq!(parse_namespace_path(Path::new("/proc/7/ns/pid")), Some((7, "pid")));
        for path in ["/proc/self/ns/pid", "/run/netns/x", "/proc/7/ns", "/proc//ns/pid"] {
            assert_eq!(parse_namespace_path(Path::new(path)), None, "{path}");
        }
    }
}

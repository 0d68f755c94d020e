//! Processes and namespaces by descriptor. A pid is a process's own only until its parent has waited for it.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use crate::kernel;

/// A process of a cgroup.
#[derive(Debug)]
pub(crate) struct Member {
    pidfd: OwnedFd,
}

/// A pid namespace of the pod, and the process whose number the runtime names it by.
#[derive(Debug)]
pub(crate) struct PidNamespace {
    pub(crate) pid: i32,
    pub(crate) fd: OwnedFd,
}

// === impl Member ===

impl Member {
    /// Opens the process of a pid that was read from the cgroup of that path. `None` if the number is another
    /// process's by now, which is not in the cgroup.
    pub(crate) fn open(pid: i32, cgroup: &str) -> Option<Self> {
        // 0 means the reader's own process, 1 the machine's.
        let pidfd = kernel::pidfd_open(Some(pid).filter(|pid| *pid > 1)?).ok()?;
        // If the process of the descriptor has ended meanwhile, this is another's and the signal reaches none.
        let lives = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        is_in(&lives, cgroup).then_some(Self { pidfd })
    }

    /// A process that has ended takes no signal, which is no error.
    pub(crate) fn signal(&self, signal: i32) -> io::Result<()> {
        match kernel::pidfd_signal(&self.pidfd, signal) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            sent => sent,
        }
    }

    pub(crate) fn into_pidfd(self) -> OwnedFd {
        self.pidfd
    }
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

/// Whether a process lives in a cgroup or below, by its `/proc/PID/cgroup`: one line a hierarchy,
/// `NUMBER:CONTROLLERS:PATH`.
fn is_in(lives: &str, cgroup: &str) -> bool {
    let cgroup = cgroup.trim_matches('/');
    let mut paths = lives.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    !cgroup.is_empty()
        && paths.any(|path| {
            let below = path.trim_start_matches('/').strip_prefix(cgroup);
            below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
}

/// Descriptor of a process's directory in /proc. Look-ups through it fail once the process has ended, whoever has its
/// pid then.
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
    fn a_process_is_in_its_cgroup_and_in_those_above() {
        let lives = "4:memory:/pods/p/c\n1:name=systemd:/\n0::/\n";
        for cgroup in ["/pods/p/c", "pods/p/c/", "/pods/p", "/pods"] {
            assert!(is_in(lives, cgroup), "{cgroup}");
        }
        for cgroup in ["/pods/p/c/d", "/pods/p/c2", "/pod", "", "/", "/p/c"] {
            assert!(!is_in(lives, cgroup), "{cgroup}");
        }
    }

    #[test]
    fn only_a_member_of_the_cgroup_is_opened() {
        let own = std::process::id().cast_signed();
        let lives = fs::read_to_string("/proc/self/cgroup").unwrap();
        let cgroup = lives.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find(|path| *path != "/");
        if let Some(cgroup) = cgroup {
            assert!(Member::open(own, cgroup).is_some_and(|member| member.signal(0).is_ok()));
        }
        assert!(Member::open(own, "/no/such/cgroup").is_none());
        assert!(Member::open(1, "/").is_none() && Member::open(0, "/").is_none());
        assert!(Member::open(i32::MAX, "/").is_none());
    }

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

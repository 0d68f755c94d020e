//! Processes by descriptor. A pid can be reused after its process has ended; a descriptor stays with its process.
#![allow(unsafe_code, reason = "pidfd_open and pidfd_send_signal have no safe wrapper")]

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd, OwnedFd};

use nix::fcntl::{OFlag, openat};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Maximum bytes of a process's command line that are read. In the command lines of the node's own programs, this part
/// contains the directory argument.
const COMMAND_LINE_MAX: u64 = 16 << 10;
/// Maximum bytes of another file of a process's directory in /proc.
const FILE_MAX: u64 = 16 << 20;

/// A process, and its directory in /proc.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    pidfd: OwnedFd,
    /// Opening a file through this descriptor fails after the process has ended.
    directory: OwnedFd,
}

// === impl Process ===

impl Process {
    /// Opens a process; `NotFound` if the pid is unused or its process has ended.
    pub(crate) fn open(pid: i32) -> io::Result<Self> {
        if pid <= 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        let pidfd = open(pid)?;
        let directory = File::open(format!("/proc/{pid}"))?.into();
        // The process is alive, so the pid was not reused before the directory was opened.
        if !is_alive(&pidfd) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Self { pid, pidfd, directory })
    }

    /// Opens a process that was listed in a cgroup; `NotFound` if it has ended or is in another cgroup.
    pub(crate) fn in_group(pid: i32, group: &str) -> io::Result<Self> {
        let process = Self::open(pid)?;
        if is_in(&process.read("cgroup")?, group) { Ok(process) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Opens a child of a live process; `NotFound` if it has ended or has another parent.
    pub(crate) fn child_of(pid: i32, parent: i32) -> io::Result<Self> {
        let process = Self::open(pid)?;
        if parent_in(&process.read("stat")?) == Some(parent) {
            Ok(process)
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    pub(crate) fn is_alive(&self) -> bool {
        is_alive(&self.pidfd)
    }

    /// Opens a file of the process's directory in /proc.
    pub(crate) fn file(&self, name: &str, flags: OFlag) -> io::Result<File> {
        Ok(openat(&self.directory, name, flags | OFlag::O_CLOEXEC, Mode::empty())?.into())
    }

    /// Reads a file of the process's directory in /proc; `FileTooLarge` above 16 MiB. A process can have a mountinfo of
    /// a hundred thousand long lines (`fs.mount-max`).
    pub(crate) fn read(&self, name: &str) -> io::Result<String> {
        text_of(self.file(name, OFlag::O_RDONLY)?, FILE_MAX)
    }

    /// Waits for the end of the process. Cancel safe.
    pub(crate) async fn ended(&self) -> io::Result<()> {
        watch(self.pidfd.try_clone()?)?.readable().await.map(drop)
    }
}

/// The text of a file of at most `max` bytes; `FileTooLarge` for a larger file.
fn text_of(file: impl io::Read, max: u64) -> io::Result<String> {
    let mut text = Vec::new();
    file.take(max + 1).read_to_end(&mut text)?;
    if text.len() as u64 > max {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Opens a process; `NotFound` if the pid is unused.
pub(crate) fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and no memory.
    let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let Some(raw) = i32::try_from(raw).ok().filter(|fd| *fd >= 0) else {
        let error = io::Error::last_os_error();
        let gone = error.raw_os_error() == Some(libc::ESRCH);
        return Err(if gone { io::ErrorKind::NotFound.into() } else { error });
    };
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Registers a process's descriptor. It becomes readable at the end of the process, and stays readable.
pub(crate) fn watch(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the `AsyncFd` owns the descriptor and nothing else closes it.
    let registered = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
    registered.map_err(|error| io::Error::other(error.to_string()))
}

/// Sends a signal to the opened process, pidfd_send_signal(2). An error if it has ended.
pub(crate) fn send(pidfd: &OwnedFd, signal: i32) -> io::Result<()> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is open, and no siginfo is passed.
    match unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The first 16 KiB of a process's command line (proc_pid_cmdline(5)); empty after its end. Any process can declare all
/// of its memory to be its command line (`PR_SET_MM_MAP`).
pub(crate) fn command_line(pid: i32) -> Vec<u8> {
    let mut line = Vec::new();
    let read = File::open(format!("/proc/{pid}/cmdline"))
        .and_then(|file| file.take(COMMAND_LINE_MAX).read_to_end(&mut line));
    if read.is_ok() { line } else { Vec::new() }
}

/// Whether a process has the user, the user namespace and the pid namespace of this process, as the node's own programs
/// have. Any process can have the command line of such a program.
pub(crate) fn is_of_node(pid: i32) -> bool {
    let status = std::fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    // The first number is the real user. For a program with the set-user-id bit, the real user is the user that has
    // started the program.
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    let user = users.split_whitespace().next().and_then(|user| user.parse::<u32>().ok());
    let is_shared = |name: &str| {
        let namespace = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/{name}")).ok();
        namespace("self").is_some_and(|own| namespace(&pid.to_string()) == Some(own))
    };
    user == Some(nix::unistd::getuid().as_raw()) && ["user", "pid"].into_iter().all(is_shared)
}

/// Whether a process has not ended. A zombie has ended.
pub(crate) fn is_alive(pidfd: &OwnedFd) -> bool {
    let mut ended = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut ended, PollTimeout::ZERO) == Ok(0)
}

/// Whether a process is in a cgroup or its descendants, by its `/proc/PID/cgroup`: one line per hierarchy,
/// `NUMBER:CONTROLLERS:PATH`.
fn is_in(cgroups: &str, group: &str) -> bool {
    let group = group.trim_matches('/');
    let mut paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    !group.is_empty()
        && paths.any(|path| {
            let below = path.trim_start_matches('/').strip_prefix(group);
            below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
}

/// The parent in a `/proc/PID/stat`. The name in parentheses can contain any character.
fn parent_in(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Fuzz target: the stat and the cgroups of a process.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(text: &str) {
    let _parent = parent_in(text);
    assert!(!is_in(text, "/"), "no process is in a cgroup without a name");
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_process_is_opened_only_while_it_is_alive() {
        let own = std::process::id().cast_signed();
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = child.id().cast_signed();
        let process = super::Process::child_of(pid, own).unwrap();
        assert_eq!(process.pid(), pid);
        assert_eq!(super::Process::child_of(pid, 1).unwrap_err().kind(), std::io::ErrorKind::NotFound);
        assert!(process.is_alive() && process.read("stat").is_ok());
        super::send(&process.pidfd, libc::SIGKILL).unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive() && process.read("stat").is_err());
        assert!(super::send(&process.pidfd, libc::SIGKILL).is_err());
        for absent in [pid, 0, -1, i32::MAX] {
            assert_eq!(
                super::Process::open(absent).unwrap_err().kind(),
                std::io::ErrorKind::NotFound,
                "{absent}"
            );
        }
    }

    #[test]
    fn a_file_of_a_process_has_a_limited_size() {
        assert_eq!(super::text_of(&b"12345"[..], 5).unwrap(), "12345");
        let error = super::text_of(std::io::repeat(b'x'), 1 << 20).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn the_beginning_of_a_long_command_line_is_read() {
        let long = "x".repeat(100 << 10);
        let mut command = std::process::Command::new("sh");
        // The shell waits for the end of its input.
        command.args(["-c", "read x", &long, &long, &long]).stdin(std::process::Stdio::piped());
        let mut child = command.spawn().unwrap();
        let pid = child.id().cast_signed();
        let read = || super::command_line(pid);
        // The kernel shows the command line a moment after the exec.
        let is_visible = || read().starts_with(b"sh\0-c\0read x\0xx");
        coracle_testing::eventually("the command line", 10, is_visible);
        assert_eq!(read().len() as u64, super::COMMAND_LINE_MAX);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(read(), b"");
    }

    #[test]
    fn a_zombie_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id().cast_signed();
        let process = super::open(pid).unwrap();
        coracle_testing::eventually("the end of the process", 10, || !super::is_alive(&process));
        assert_eq!(super::Process::open(pid).unwrap_err().kind(), std::io::ErrorKind::NotFound);
        child.wait().unwrap();
    }

    #[test]
    fn a_process_is_in_its_cgroup_and_its_parents() {
        let cgroups = "4:memory:/pods/p/c\n1:name=systemd:/\n0::/\n";
        for group in ["/pods/p/c", "pods/p/c/", "/pods/p", "/pods"] {
            assert!(super::is_in(cgroups, group), "{group}");
        }
        for group in ["/pods/p/c/d", "/pods/p/c2", "/pod", "", "/", "/p/c"] {
            assert!(!super::is_in(cgroups, group), "{group}");
        }
    }

    #[test]
    fn the_parent_is_parsed_after_any_name() {
        assert_eq!(super::parent_in("7 (a) b) S 5 7 7"), Some(5));
        assert_eq!(super::parent_in("7 (a"), None);
    }
}

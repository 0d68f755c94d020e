//! The limit of open descriptors. The node needs several for each pod, so the usual soft limit of 1024
//! suffices for about three hundred pods. Programs that the node starts (pods, plugins, hooks, CRIU) keep the
//! original limit, because some use select(2) or close every possible descriptor.
#![allow(
    unsafe_code,
    reason = "a child sets its limit between its fork and its exec; close_range has no safe wrapper"
)]

use std::io;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};
use nix::sys::signal::SigSet;

/// Directory with the descriptors of the calling process.
pub const DIRECTORY: &str = "/proc/self/fd";

/// The soft limit with which this process was started.
static ORIGINAL_LIMIT: OnceLock<rlim_t> = OnceLock::new();

/// Raises the soft limit of this process to its hard limit. Children get the original limit from [`restore_limit`].
///
/// # Errors
/// If the kernel refuses.
pub fn raise() -> io::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    ORIGINAL_LIMIT.get_or_init(|| soft);
    Ok(())
}

/// First descriptor that is not a standard stream.
const FIRST: RawFd = 3;

/// Marks all inherited descriptors close-on-exec, so that started programs (shims, hooks, plugins) do not inherit
/// them. Descriptors that the process opens itself are close-on-exec anyway. Needs Linux 5.11.
///
/// # Errors
/// The error of close_range(2).
pub fn mark_inherited_close_on_exec() -> io::Result<()> {
    close_range(FIRST, RawFd::MAX, libc::CLOSE_RANGE_CLOEXEC)
}

/// The descriptor in a path such as `/proc/self/fd/3`. `None` for any other path. A process can open the path only while
/// it has this descriptor.
#[must_use]
pub fn descriptor_of(path: &Path) -> Option<RawFd> {
    path.strip_prefix(DIRECTORY).ok()?.to_str()?.parse().ok()
}

/// Gives the calling thread a descriptor table of its own, which has the standard streams and `keep` only. A child that
/// this thread forks then need not copy and close the other descriptors of the process. A node has several thousand.
///
/// The thread must not use any descriptor that it did not open itself. So it must not wake an async task, because a
/// wake-up uses such a descriptor. The thread must end after this work, because other work may need the descriptors.
///
/// All signals of the thread are blocked: a signal handler of the process, such as that of the async runtime, also uses such
/// a descriptor, and a signal that this thread handled would be lost. Programs that the thread starts inherit the mask.
///
/// # Errors
/// The error of close_range(2), or of the signal mask. The thread may then still share the table of the process.
pub fn detach_thread(keep: Option<RawFd>) -> io::Result<()> {
    SigSet::all().thread_block()?;
    let keep = keep.filter(|fd| *fd >= FIRST);
    // The kernel copies only the descriptors below the first descriptor that it closes, so it does not visit the others.
    close_range(keep.map_or(FIRST, |fd| fd.saturating_add(1)), RawFd::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    match keep {
        Some(keep) if keep > FIRST => close_range(FIRST, keep - 1, 0),
        _ => Ok(()),
    }
}

fn close_range(first: RawFd, last: RawFd, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: three integers. The callers close descriptors only in a table that the thread does not share.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The soft limit for children. `None` if this process did not raise its own limit.
pub fn limit_of_children() -> Option<u64> {
    // The C library's type of a limit has 32 or 64 bits.
    ORIGINAL_LIMIT.get().and_then(|soft| u64::try_from(u128::from(*soft)).ok())
}

/// Gives a command the original soft limit.
pub fn restore_limit(command: &mut Command) {
    let Some(soft) = ORIGINAL_LIMIT.get().copied() else { return };
    let set = move || {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        Ok(setrlimit(Resource::RLIMIT_NOFILE, soft.min(hard), hard)?)
    };
    // SAFETY: between fork and exec the closure makes two system calls and touches no shared memory.
    unsafe { command.pre_exec(set) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_started_program_has_no_inherited_descriptor() {
        let file = std::fs::File::open("/dev/null").expect("open");
        let inherited = nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_DUPFD(100)).expect("a duplicate");
        let has = || {
            let test = format!("test -e /proc/self/fd/{inherited}");
            Command::new("sh").args(["-c", &test]).status().expect("a shell").success()
        };
        assert!(has(), "a duplicate is inherited");
        mark_inherited_close_on_exec().expect("marked");
        assert!(!has());
    }

    #[test]
    fn a_detached_thread_has_the_standard_streams_and_the_kept_descriptor_only() {
        let files: Vec<_> = (0..4)
            .map(|_| std::fs::File::open("/dev/null").expect("open"))
            .map(std::os::fd::OwnedFd::from)
            .collect();
        let numbers: Vec<RawFd> = files.iter().map(std::os::fd::AsRawFd::as_raw_fd).collect();
        let last = *numbers.last().expect("four files");
        let open = |directory: &str| -> Vec<RawFd> {
            let is_open = |fd: &RawFd| std::fs::symlink_metadata(format!("{directory}/{fd}")).is_ok();
            [0, 1, 2].into_iter().chain(numbers.iter().copied()).filter(is_open).collect()
        };
        let before = open("/proc/self/fd");
        for keep in [None, Some(1), Some(numbers[0]), Some(last)] {
            let mut expected = before.clone();
            expected.retain(|fd| *fd < FIRST || Some(*fd) == keep);
            let found = std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    detach_thread(keep).expect("detached");
                    open("/proc/thread-self/fd")
                });
                thread.join().expect("the thread ends")
            });
            assert_eq!(found, expected, "{keep:?}");
        }
        assert_eq!(open("/proc/self/fd"), before, "the other threads keep theirs");
    }

    #[test]
    fn a_detached_thread_handles_no_signal() {
        use nix::sys::signal::Signal;
        let thread = std::thread::spawn(|| {
            detach_thread(None).expect("detached");
            SigSet::thread_get_mask().expect("the mask")
        });
        let blocked = thread.join().expect("the thread ends");
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGCHLD, Signal::SIGHUP] {
            assert!(blocked.contains(signal), "{signal}");
        }
    }

    #[test]
    fn a_started_program_has_the_original_limit() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("limit");
        setrlimit(Resource::RLIMIT_NOFILE, 777, hard).expect("limit");
        assert_eq!(limit_of_children(), None);
        raise().expect("raised");
        raise().expect("once more");
        assert_eq!(limit_of_children(), Some(777));
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE), Ok((hard, hard)));
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -Sn; ulimit -Hn"]);
        restore_limit(&mut command);
        let output = command.output().expect("a shell");
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("777\n{hard}\n"));
    }
}

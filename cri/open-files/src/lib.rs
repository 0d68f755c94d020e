//! How many descriptors the node may have open: some for each pod, so that the usual soft limit of 1024 is that of some
//! three hundred pods. What the node starts (pods, plugins, hooks, CRIU) keeps that limit: programs that use select(2),
//! or close every descriptor that they may have, count on it.
#![allow(
    unsafe_code,
    reason = "a child sets its limit between its fork and its exec; close_range has no safe wrapper"
)]

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::OnceLock;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The soft limit that this process began with.
static BEFORE: OnceLock<u64> = OnceLock::new();

/// Lets this process have as many descriptors open as it may ask for. What it starts begins with what it had until now.
///
/// # Errors
/// When the kernel refuses.
pub fn raise() -> std::io::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    BEFORE.get_or_init(|| soft);
    Ok(())
}

/// Keeps the descriptors that this process was started with from every program that it starts: shims, hooks, plugins.
/// All that it opens itself is close-on-exec anyway. Linux 5.11.
///
/// # Errors
/// The kernel's.
pub fn keep_inherited() -> std::io::Result<()> {
    const FIRST: libc::c_uint = 3;
    // SAFETY: three integers; the call closes nothing.
    let marked =
        unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if marked == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// The soft limit of what is started; none when it is our own.
pub fn of_children() -> Option<u64> {
    BEFORE.get().copied()
}

/// Gives a command the limit that we began with.
pub fn limit(command: &mut Command) {
    let Some(soft) = of_children() else { return };
    let set = move || {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        Ok(setrlimit(Resource::RLIMIT_NOFILE, soft.min(hard), hard)?)
    };
    // SAFETY: between fork and exec it makes two system calls and touches nothing that is shared.
    unsafe { command.pre_exec(set) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_started_has_no_inherited_descriptor() {
        let file = std::fs::File::open("/dev/null").expect("open");
        let inherited = nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_DUPFD(100)).expect("a duplicate");
        let has = || {
            let test = format!("test -e /proc/self/fd/{inherited}");
            Command::new("sh").args(["-c", &test]).status().expect("a shell").success()
        };
        assert!(has(), "a duplicate is inherited");
        keep_inherited().expect("marked");
        assert!(!has());
    }

    #[test]
    fn what_is_started_has_the_limit_that_we_began_with() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("limit");
        setrlimit(Resource::RLIMIT_NOFILE, 777, hard).expect("limit");
        assert_eq!(of_children(), None);
        raise().expect("raised");
        raise().expect("once more");
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE), Ok((hard, hard)));
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -Sn; ulimit -Hn"]);
        limit(&mut command);
        let told = command.output().expect("a shell");
        assert_eq!(String::from_utf8_lossy(&told.stdout), format!("777\n{hard}\n"));
    }
}

//! How many descriptors the node may have open: some for each pod, so that the usual soft limit of 1024 is that of some
//! three hundred pods. What the node starts (pods, plugins, hooks, CRIU) keeps that limit: programs that use select(2),
//! or close every descriptor that they may have, count on it.
#![allow(unsafe_code, reason = "a child sets its limit between its fork and its exec")]

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

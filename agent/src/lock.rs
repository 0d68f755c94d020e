//! Lock of a run directory: only one process at a time runs the node.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Maximum wait for a killed holder to exit: the kernel frees its memory before it closes its files.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Maximum wait if the holder has exited. A process that the holder forked just before keeps the holder's descriptors
/// until it executes its own program.
const MAX_WAIT_FOR_CHILD: Duration = Duration::from_secs(5);
/// Interval between two checks of a holder that does not seem to be exiting.
const STEP: Duration = Duration::from_millis(20);
/// Maximum checks of such a holder. A recent signal or unlock may become visible only at the second check.
const MAX_CHECKS: u32 = 5;

/// Flag of a process that exits, in its `stat`: `PF_EXITING` of include/linux/sched.h.
const EXITING: u64 = 4;
/// SIGKILL in a mask of signals.
const KILLED: u64 = 1 << 8;

/// State of the process that is recorded as the holder of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Running,
    /// The process was killed or is exiting.
    Exiting,
    /// The process has exited, or another process has just taken the lock and has not written its pid yet.
    Gone,
}

/// The lock of the node that this process runs.
static HELD: Mutex<Option<Lock>> = Mutex::new(None);

/// Held as long as the process runs the node. The kernel releases it when the process exits.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: Flock<File>,
}

impl Lock {
    /// Locks `<run dir>/coracle.lock`. Waits for a killed holder that is about to exit, and for the children that it
    /// forked.
    ///
    /// # Errors
    /// When another process holds the lock: the error names that process. Also when the file cannot be created, locked
    /// or written.
    pub(crate) fn acquire(run_dir: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(run_dir).with_context(|| format!("cannot create {}", run_dir.display()))?;
        let path = run_dir.join("coracle.lock");
        let context = || format!("cannot open {}", path.display());
        let begin = Instant::now();
        let end = begin + MAX_WAIT;
        let mut checks = 0;
        loop {
            let mut options = OpenOptions::new();
            let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let mut file = options.open(&path).with_context(context)?;
            // A user who can read a file can lock it (flock(2)). Earlier versions let all users read it.
            file.set_permissions(Permissions::from_mode(0o600)).with_context(context)?;
            match Flock::lock(file.try_clone()?, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => {
                    file.set_len(0)?;
                    file.rewind()?;
                    write!(file, "{}", std::process::id())?;
                    return Ok(Self { _file: lock });
                }
                Err((_, Errno::EWOULDBLOCK)) => {}
                Err((_, errno)) => {
                    return Err(errno).with_context(|| format!("cannot lock {}", path.display()));
                }
            }
            let mut holder = String::new();
            file.read_to_string(&mut holder)?;
            let holder = holder.trim();
            let run_dir = run_dir.display();
            match wait_for(holder.parse().ok(), end)? {
                Holder::Exiting if Instant::now() >= end => bail!(
                    "cannot take {run_dir}: process {holder} was killed and has not ended within {} s",
                    MAX_WAIT.as_secs()
                ),
                Holder::Gone if begin.elapsed() >= MAX_WAIT_FOR_CHILD => bail!(
                    "cannot take {run_dir}: process {holder} has ended, but another process has its lock; find \
                     that process with: fuser {}",
                    path.display()
                ),
                Holder::Running if checks >= MAX_CHECKS => bail!(
                    "{run_dir} is in use by process {holder} (another coracle?); stop it, or use other directories"
                ),
                Holder::Running => checks += 1,
                Holder::Exiting | Holder::Gone => {}
            }
        }
    }

    /// Keeps the lock until [`release_held`]. The tasks of a node end later than the function that has started them. If
    /// another process took the lock before, both would change the same pods, networks and images.
    pub(crate) fn hold(self) {
        *HELD.lock().unwrap_or_else(PoisonError::into_inner) = Some(self);
    }

    /// The pid of the process that holds the run directory, if any.
    pub(crate) fn holder(run_dir: &Path) -> Option<i32> {
        let file = OpenOptions::new().read(true).write(true).open(run_dir.join("coracle.lock")).ok()?;
        let mut copy = file.try_clone().ok()?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(_) => None,
            Err(_) => {
                let mut pid = String::new();
                copy.read_to_string(&mut pid).ok()?;
                pid.trim().parse().ok()
            }
        }
    }

    /// The time since a process last locked the run directory. `None` if that is not known: the clock was set back.
    pub(crate) fn age(run_dir: &Path) -> Option<Duration> {
        let locked = std::fs::metadata(run_dir.join("coracle.lock")).and_then(|found| found.modified());
        locked.ok()?.elapsed().ok()
    }
}

/// Releases the lock that this process keeps, if any. To be called after the end of all tasks. Without it, a thread
/// that waits in the kernel, for example for a stalled mount, would keep the lock of a process that has ended.
pub(crate) fn release_held() {
    drop(HELD.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// Waits for a process that is about to exit, until `until` at the latest. If the process is not about to exit, the
/// function waits one interval. Returns the state before the wait.
fn wait_for(pid: Option<i32>, until: Instant) -> anyhow::Result<Holder> {
    let process = pid.and_then(Pid::from_raw).map(|pid| (pid, pidfd_open(pid, PidfdFlags::empty())));
    let Some((pid, Ok(process))) = process else {
        poll(&mut [], PollTimeout::try_from(STEP).unwrap_or(PollTimeout::ZERO))?;
        return Ok(Holder::Gone);
    };
    let is_ending = is_about_to_exit(pid.as_raw_nonzero().get());
    let left = if is_ending { until.saturating_duration_since(Instant::now()) } else { STEP };
    let left = PollTimeout::try_from(left.max(STEP)).unwrap_or(PollTimeout::MAX);
    match poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], left) {
        Ok(_) | Err(Errno::EINTR) => Ok(if is_ending { Holder::Exiting } else { Holder::Running }),
        Err(errno) => Err(errno).context("cannot wait for the end of the process that holds the lock"),
    }
}

/// Whether a process was killed or is exiting.
fn is_about_to_exit(pid: i32) -> bool {
    let read = |name: &str| coracle_tree::read_lossy(format!("/proc/{pid}/{name}")).unwrap_or_default();
    is_exiting(&read("stat")) || is_killed(&read("status"))
}

/// Whether the `stat` of a process has the exiting flag. After the name, the state is field 1 and the flags are field
/// 7; see proc_pid_stat(5).
fn is_exiting(stat: &str) -> bool {
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields.split_whitespace().collect::<Vec<_>>());
    let Some(fields) = fields else { return false };
    let flags = fields.get(6).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or_default();
    matches!(fields.first(), Some(&("Z" | "X"))) || flags & EXITING != 0
}

/// Whether SIGKILL is pending in the `status` of a process, for its main thread or for the process.
fn is_killed(status: &str) -> bool {
    let pending = ["SigPnd:", "ShdPnd:"].map(|name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        u64::from_str_radix(line.trim(), 16).unwrap_or_default()
    });
    pending.iter().any(|pending| pending & KILLED != 0)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    const DIRECTORY: &str = "CORACLE_TEST_LOCK";

    /// Started by the other tests as another process: takes the lock, and allocates so much memory that its exit
    /// takes long.
    #[test]
    #[ignore = "not a test: the program that other tests start as the holder of the lock"]
    fn holder() {
        let Some(dir) = std::env::var_os(DIRECTORY) else { return };
        let _lock = Lock::acquire(Path::new(&dir)).expect("lock");
        let memory = vec![1_u8; 2 << 30];
        println!("\nholds {}", memory.len());
        poll(&mut [], PollTimeout::NONE).expect("killed meanwhile");
    }

    fn start_holder(dir: &Path) -> Child {
        let mut command = Command::new(std::env::current_exe().expect("test"));
        command.args(["--exact", "lock::tests::holder", "--ignored", "--nocapture"]).env(DIRECTORY, dir);
        let mut holder = command.stdout(Stdio::piped()).spawn().expect("holder");
        let mut printed = String::new();
        let mut output = holder.stdout.take().expect("output");
        while !printed.contains("holds") {
            let mut more = [0; 256];
            let len = output.read(&mut more).expect("read");
            assert_ne!(len, 0, "{printed}");
            printed.push_str(&String::from_utf8_lossy(&more[..len]));
        }
        holder
    }

    #[test]
    fn a_holder_that_was_killed_is_waited_for() {
        let dir = tempfile::tempdir().expect("directory");
        let mut holder = start_holder(dir.path());
        holder.kill().expect("kill");
        drop(Lock::acquire(dir.path()).expect("it ends"));
        holder.wait().expect("wait");
    }

    #[test]
    fn a_child_of_an_ended_holder_is_waited_for() {
        let dir = tempfile::tempdir().expect("directory");
        // The script behaves like a node that is killed between a fork and the execution of the program.
        let script = "exec 9>>coracle.lock; flock -x 9; echo $$ >coracle.lock; sleep 0.5 &";
        let holder = Command::new("sh").args(["-c", script]).current_dir(dir.path()).status();
        assert!(holder.expect("sh").success());
        drop(Lock::acquire(dir.path()).expect("the child ends"));
    }

    #[test]
    fn a_holder_that_runs_on_is_named() {
        let dir = tempfile::tempdir().expect("directory");
        let _lock = Lock::acquire(dir.path()).expect("lock");
        let error = Lock::acquire(dir.path()).expect_err("held").to_string();
        assert!(error.contains(&format!("in use by process {}", std::process::id())), "{error}");
        // `acquire` waits up to MAX_WAIT only for a holder that is exiting.
        let holder = i32::try_from(std::process::id()).ok();
        assert_eq!(wait_for(holder, Instant::now()).expect("the state of the holder"), Holder::Running);
    }

    #[test]
    fn an_exiting_process_is_detected() {
        assert!(is_exiting("7 (a) b) R 1 7 7 0 -1 4194308 0"));
        assert!(is_exiting("7 (a) Z 1 7 7 0 -1 4194304 0"));
        assert!(!is_exiting("7 (a) S 1 7 7 0 -1 4194304 0"));
        assert!(!is_exiting(""));
        assert!(is_killed("SigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n"));
        assert!(is_killed("SigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\n"));
        assert!(!is_killed("SigPnd:\t0000000000000000\nShdPnd:\t0000000000004000\n"));
    }
}

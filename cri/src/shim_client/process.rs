//! The process of a shim: starts it, watches it by a pidfd, and reaps it if it is a child of this process.
#![allow(unsafe_code, reason = "waitid on a pidfd has no safe wrapper")]

use std::ffi::OsStr;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::io::Read as _;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};

use coracle_proto::shim::SandboxConfig;
use coracle_threads::Threads;
use prost::Message as _;
use tokio::sync::{OwnedRwLockReadGuard, RwLock, oneshot, watch};
use tokio::time::timeout;

use super::error::{Error, ErrorKind};
use super::timeouts::Timeouts;
use crate::pidfd;

/// File name of the configuration in a shim's directory.
const CONFIG: &str = "shim.pb";

/// Threads that start shims. Each thread ends after its work, because it does not share the descriptors of the process.
static STARTERS: Threads = Threads::new("shim-start");

/// A process. Any number of tasks can wait for its end.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pid: i32,
    pidfd: Arc<OwnedFd>,
    alive: watch::Receiver<bool>,
    /// Locked by the task that reaps the process.
    pid_is_own: Arc<RwLock<()>>,
}

// === impl Process ===

impl Process {
    /// Watches a process. If the process is a child of this process, reaps it after its exit.
    pub(super) fn open(pid: i32) -> Result<Self, Error> {
        let failed = |error: &std::io::Error| {
            let kind = if error.kind() == NotFound { ErrorKind::Gone } else { ErrorKind::Internal };
            Error::new(kind, format!("cannot open the shim's process {pid}: {error}"))
        };
        let pidfd = pidfd::open(pid).map_err(|error| failed(&error))?;
        let watched = pidfd.try_clone().and_then(pidfd::watch);
        let watched = watched.map_err(|error| failed(&error))?;
        let (sender, alive) = watch::channel(true);
        let pid_is_own = Arc::new(RwLock::new(()));
        let reaping = Arc::clone(&pid_is_own);
        coracle_threads::spawn(async move {
            tokio::select! {
                // The result is not needed, because a pidfd stays readable after the process has ended.
                _ = watched.readable() => {}
                // No handle is left. A dead child stays a zombie until this process ends.
                () = sender.closed() => return,
            }
            let _pid_is_unused = reaping.write().await;
            reap(watched.get_ref());
            let _ = sender.send(false);
        });
        Ok(Self { pid, pidfd: Arc::new(pidfd), alive, pid_is_own })
    }

    /// Watches the shim at the other end of a socket. The socket reports the pid of the time when the shim began to
    /// listen, so another process may have this pid now.
    pub(super) fn open_peer(pid: i32, dir: &Path) -> Result<Self, Error> {
        let process = Self::open(pid)?;
        if is_of_directory(pid, dir) && pidfd::is_alive(&process.pidfd) {
            return Ok(process);
        }
        Err(Error::new(ErrorKind::Gone, format!("process {pid} is no longer the shim of {}", dir.display())))
    }

    /// Until the guard is dropped, a child of this process is not reaped, so the child's pid is not reused.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] if the process has ended: another process may already have its pid.
    pub(super) async fn keep_pid(&self) -> Result<OwnedRwLockReadGuard<()>, Error> {
        let guard = Arc::clone(&self.pid_is_own).read_owned().await;
        if self.is_alive() {
            return Ok(guard);
        }
        Err(Error::new(ErrorKind::Gone, format!("the shim (process {}) has ended", self.pid)))
    }

    /// Whether the process has not ended.
    pub(super) fn is_alive(&self) -> bool {
        pidfd::is_alive(&self.pidfd)
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    pub(super) fn pidfd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.pidfd)
    }

    /// Waits for the end of the process. Cancel safe.
    pub(super) async fn ended(&self) {
        let mut alive = self.alive.clone();
        let _ = alive.wait_for(|alive| !alive).await;
    }

    /// Whether the process has ended, or ends within a second: its socket closes a moment before its end.
    pub(super) async fn is_ending(&self) -> bool {
        let grace = std::time::Duration::from_secs(1);
        tokio::time::timeout(grace, self.ended()).await.is_ok()
    }

    pub(super) async fn kill_and_reap(&self) {
        let _ended_meanwhile = pidfd::send(&self.pidfd, libc::SIGKILL);
        self.ended().await;
    }
}

/// Reaps the process. ECHILD means that it is a child of another process, which reaps it.
fn reap(pidfd: &OwnedFd) {
    let Ok(id) = libc::id_t::try_from(pidfd.as_raw_fd()) else { return };
    // SAFETY: siginfo_t is plain data, for which all zeroes is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `info` outlives the call.
    unsafe { libc::waitid(libc::P_PIDFD, id, &raw mut info, libc::WEXITED | libc::WNOHANG) };
}

/// Writes the configuration, starts the shim and waits until it is ready. After the timeout the shim is killed.
pub(super) async fn spawn(
    binary: &Path,
    dir: &Path,
    config: &SandboxConfig,
    timeouts: Timeouts,
) -> Result<Process, Error> {
    let (begun, begins) = oneshot::channel();
    let (binary, of, config) = (binary.to_owned(), dir.to_owned(), config.encode_to_vec());
    let mut starting = coracle_threads::spawn_blocking(move || start_detached(binary, of, config, begun));
    if let Ok(pid) = timeout(timeouts.work, &mut starting).await {
        let pid =
            pid.map_err(|error| Error::new(ErrorKind::Spawn, format!("cannot start a shim: {error}")))??;
        return Process::open(pid);
    }
    // The blocking task reaps the child only at its end, so the pid is not reused before that.
    if !starting.is_finished()
        && let Ok(process) = begins.await.map(Process::open)
    {
        let _asleep = timeout(timeouts.death, process?.kill_and_reap()).await;
    }
    kill_unreachable(dir, timeouts).await;
    // The shim may have become ready at the last moment.
    if let Ok(Ok(Ok(pid))) = timeout(timeouts.death, starting).await
        && let Ok(process) = Process::open(pid)
    {
        let _asleep = timeout(timeouts.death, process.kill_and_reap()).await;
    }
    Err(Error::new(ErrorKind::Spawn, format!("cannot start the shim: not ready within {:?}", timeouts.work)))
}

/// Ends the shim of a directory to which no client can connect, see [`super::Shim::kill_unreachable`].
pub(super) async fn kill_unreachable(dir: &Path, timeouts: Timeouts) {
    let wanted = dir.to_owned();
    let strays = coracle_threads::spawn_blocking(move || of_directory(&wanted)).await;
    for pid in strays.unwrap_or_default() {
        kill_shim(pid, dir, timeouts).await;
    }
}

/// Kills a process with the command line of the shim of a directory, and waits for its end. Returns whether the process
/// had this command line.
pub(super) async fn kill_shim(pid: i32, dir: &Path, timeouts: Timeouts) -> bool {
    let Ok(process) = Process::open(pid) else { return false };
    // The pid may have been reused before the process was opened. From here on the pid is not reused.
    if !is_of_directory(pid, dir) {
        return false;
    }
    tracing::warn!(pid, dir = %dir.display(), "killing a shim to which no client can connect");
    if timeout(timeouts.death, process.kill_and_reap()).await.is_err() {
        tracing::warn!(pid, "a killed shim is in uninterruptible sleep");
    }
    true
}

/// Starts the shim from a thread without the descriptors of the process, because the child would copy and close all of
/// them. That thread cannot wake tasks, because a wake-up needs a descriptor. So the current thread waits for that
/// thread.
fn start_detached(
    binary: PathBuf,
    dir: PathBuf,
    config: Vec<u8>,
    begun: oneshot::Sender<i32>,
) -> Result<i32, Error> {
    let (child, children) = mpsc::channel();
    let (done, results) = mpsc::channel();
    let started = STARTERS.run(move || {
        if let Err(error) = coracle_open_files::detach_thread(coracle_open_files::descriptor_of(&binary)) {
            // The start continues, but the child copies all descriptors of the process.
            tracing::debug!(error = %error, "cannot detach the descriptors of a thread");
        }
        let _abandoned = done.send(start(&binary, &dir, &config, &child));
        ControlFlow::Break(())
    });
    started.map_err(|error| Error::new(ErrorKind::Spawn, format!("cannot start a thread: {error}")))?;
    if let Ok(pid) = children.recv() {
        let _timed_out = begun.send(pid);
    }
    let ended = |_| Err(Error::new(ErrorKind::Spawn, "the thread that starts the shim ended"));
    results.recv().unwrap_or_else(ended)
}

fn start(binary: &Path, dir: &Path, config: &[u8], begun: &mpsc::Sender<i32>) -> Result<i32, Error> {
    let failed = |doing: &str, path: &Path, error: &std::io::Error| {
        Error::new(ErrorKind::Spawn, format!("cannot {doing} {}: {error}", path.display()))
    };
    std::fs::create_dir_all(dir).map_err(|error| failed("create the directory", dir, &error))?;
    let path = dir.join(CONFIG);
    write_whole(&path, config).map_err(|error| failed("write", &path, &error))?;
    let path = dir.join("shim.log");
    let log = std::fs::OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
    let log = log.map_err(|error| failed("open", &path, &error))?;
    // The shim reports on its standard output: "ready", or an error message.
    let mut command = Command::new(binary);
    // `binary` may be the path of a descriptor. With this argument 0, the process list shows the same name for every
    // shim.
    command.arg0("/proc/self/exe").arg("shim").arg("--dir").arg(dir).current_dir("/").env_clear();
    if let Some(armed) = std::env::var_os(coracle_fault::VARIABLE) {
        command.env(coracle_fault::VARIABLE, armed);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut child = command.spawn().map_err(|error| failed("start", binary, &error))?;
    let _timed_out = begun.send(child.id().cast_signed());
    let mut report = String::new();
    if let Some(mut output) = child.stdout.take() {
        let _ = output.read_to_string(&mut report);
    }
    let (sibling, report) = parse_output(&report);
    if report == "ready" {
        let Some(pid) = sibling else {
            return i32::try_from(child.id())
                .map_err(|error| Error::new(ErrorKind::Spawn, error.to_string()));
        };
        // The started process has forked the shim, and ends.
        let _ = child.wait();
        return Ok(pid);
    }
    let status = child.wait().map(|status| status.to_string()).unwrap_or_default();
    if let Some(pid) = sibling {
        let _ = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(pid), None);
    }
    let report = if report.is_empty() { status } else { report };
    Err(Error::new(ErrorKind::Spawn, format!("cannot start the shim: {report}")))
}

/// Parses the shim's output: the pid of the shim, if it differs from the started process, and the other lines.
fn parse_output(output: &str) -> (Option<i32>, String) {
    let pid_of = |line: &str| line.strip_prefix("pid ")?.parse::<i32>().ok().filter(|pid| *pid > 0);
    let rest: Vec<&str> = output.lines().filter(|line| pid_of(line).is_none()).collect();
    (output.lines().find_map(pid_of), rest.join("\n").trim().to_owned())
}

/// Writes a file by renaming. A sync is not needed: the state directory is a tmpfs, which a machine crash removes.
fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    super::file::write_private(&temporary, bytes)?;
    std::fs::rename(&temporary, path)
}

pub(super) async fn read_config(dir: &Path) -> Result<SandboxConfig, Error> {
    let path: PathBuf = dir.join(CONFIG);
    let failed = |kind, error: &dyn std::error::Error| {
        Error::new(kind, format!("cannot read {}: {error}", path.display()))
    };
    let bytes = tokio::fs::read(&path).await.map_err(|error| match error.kind() {
        NotFound | NotADirectory => failed(ErrorKind::Gone, &error),
        _ => failed(ErrorKind::Internal, &error),
    })?;
    SandboxConfig::decode(bytes.as_slice()).map_err(|error| failed(ErrorKind::Gone, &error))
}

/// The processes with a directory's shim command line: the shim, and the processes that it forked for the pod.
fn of_directory(dir: &Path) -> Vec<i32> {
    all().filter(|pid| is_of_directory(*pid, dir)).collect()
}

/// The pids of all processes.
pub(super) fn all() -> impl Iterator<Item = i32> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn is_of_directory(pid: i32, dir: &Path) -> bool {
    is_shim_of(&pidfd::command_line(pid), dir)
}

/// Whether a command line (of /proc), or its beginning, belongs to the shim of this directory.
fn is_shim_of(line: &[u8], dir: &Path) -> bool {
    shim_directory(line).is_some_and(|of| of == dir)
}

/// DIR of a command line (of /proc), or of its beginning: `… shim --dir DIR`.
pub(super) fn shim_directory(line: &[u8]) -> Option<PathBuf> {
    let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    let [_, b"shim", b"--dir", of, ..] = words.as_slice() else { return None };
    Some(PathBuf::from(OsStr::from_bytes(of)))
}

#[cfg(test)]
mod tests {
    /// A shim can end between the connection and this call. This must not count as a shim that cannot be reached.
    #[test]
    fn a_missing_process_is_reported_as_gone() {
        assert_eq!(super::Process::open(i32::MAX).unwrap_err().kind, super::ErrorKind::Gone);
    }

    #[tokio::test]
    async fn the_pid_of_an_ended_process_is_not_kept() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = super::Process::open(child.id().cast_signed()).unwrap();
        drop(process.keep_pid().await.unwrap());
        process.kill_and_reap().await;
        let _reaped = child.wait();
        assert_eq!(process.keep_pid().await.unwrap_err().kind, super::ErrorKind::Gone);
    }

    /// The program is not a shim: its first line is not "ready".
    #[test]
    fn the_pid_and_the_report_of_a_shim_come_from_the_thread_that_starts_it() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("s");
        let start = |program: &str| {
            let (begun, mut begins) = super::oneshot::channel();
            let error = super::start_detached(program.into(), dir.clone(), Vec::new(), begun).unwrap_err();
            (error.to_string(), begins.try_recv().is_ok_and(|pid| pid > 0))
        };
        let report = format!("cannot start the shim: shim --dir {}", dir.display());
        assert_eq!(start("/bin/echo"), (report, true));
        let (error, has_begun) = start("/no/such/program");
        assert!(error.starts_with("cannot start /no/such/program: ") && !has_begun, "{error}");
    }

    #[test]
    fn a_shim_is_recognised_by_its_command_line() {
        let is_ours = |line: &str| super::is_shim_of(line.as_bytes(), "/run/coracle/s/1".as_ref());
        assert!(is_ours("/proc/self/exe\0shim\0--dir\0/run/coracle/s/1\0"));
        for other in [
            "/proc/self/exe\0shim\0--dir\0/run/coracle/s/12\0",
            "grep\0shim --dir /run/coracle/s/1\0",
            "coracle\0runtime\0--dir\0/run/coracle/s/1\0",
            "",
        ] {
            assert!(!is_ours(other), "{other}");
        }
    }

    #[test]
    fn the_pid_is_parsed_from_the_output_in_any_order() {
        assert_eq!(super::parse_output("pid 42\nready\n"), (Some(42), "ready".to_owned()));
        assert_eq!(super::parse_output("ready\npid 42\n"), (Some(42), "ready".to_owned()));
        assert_eq!(super::parse_output("ready\n"), (None, "ready".to_owned()));
        assert_eq!(
            super::parse_output("pid 0\nset the host name\n"),
            (None, "pid 0\nset the host name".to_owned())
        );
        assert_eq!(super::parse_output(""), (None, String::new()));
    }
}

//! The shim as a process: started, watched by a pidfd, reaped when it is our child.
#![allow(unsafe_code, reason = "waitid on a pidfd has no safe wrapper here")]

use std::io::ErrorKind::{NotADirectory, NotFound};
use std::io::Read as _;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use coracle_proto::shim::SandboxConfig;
use prost::Message as _;
use tokio::sync::{OwnedRwLockReadGuard, RwLock, oneshot, watch};
use tokio::time::timeout;

use super::error::{Error, ErrorKind};
use super::times::Times;
use crate::pidfd;

/// Name of the configuration in a shim's directory.
const CONFIG: &str = "shim.pb";

/// A process that can be waited for by any number of tasks.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pid: i32,
    pidfd: Arc<OwnedFd>,
    alive: watch::Receiver<bool>,
    /// Taken by the task that reaps.
    pid_is_own: Arc<RwLock<()>>,
}

// === impl Process ===

impl Process {
    /// Watches a process. Reaps it when it dies, if it is a child of ours.
    pub(super) fn open(pid: i32) -> Result<Self, Error> {
        let failed = |error: &std::io::Error| {
            let kind = if error.kind() == NotFound { ErrorKind::Gone } else { ErrorKind::Internal };
            Error::new(kind, format!("open the shim's pid {pid}: {error}"))
        };
        let pidfd = pidfd::open(pid).map_err(|error| failed(&error))?;
        let watched = pidfd.try_clone().and_then(pidfd::watch);
        let watched = watched.map_err(|error| failed(&error))?;
        let (sender, alive) = watch::channel(true);
        let pid_is_own = Arc::new(RwLock::new(()));
        let reaping = Arc::clone(&pid_is_own);
        tokio::spawn(async move {
            tokio::select! {
                // Only observed: the kernel keeps a pidfd readable for ever after the death.
                _ = watched.readable() => {}
                // Nobody is interested any more; a child of ours then waits for our own end.
                () = sender.closed() => return,
            }
            let _nobody_uses_its_pid = reaping.write().await;
            reap(watched.get_ref());
            let _ = sender.send(false);
        });
        Ok(Self { pid, pidfd: Arc::new(pidfd), alive, pid_is_own })
    }

    /// Watches the shim of a directory, at the other end of a socket. Its pid is of the time when it began to listen.
    pub(super) fn open_peer(pid: i32, dir: &Path) -> Result<Self, Error> {
        let process = Self::open(pid)?;
        if is_of_directory(pid, dir) && pidfd::is_alive(&process.pidfd) {
            return Ok(process);
        }
        Err(Error::new(
            ErrorKind::Gone,
            format!("process {pid} is not the shim of {} any more", dir.display()),
        ))
    }

    /// As long as the guard lives, a child of this process keeps its pid, at worst as a zombie.
    pub(super) async fn keep_pid(&self) -> OwnedRwLockReadGuard<()> {
        Arc::clone(&self.pid_is_own).read_owned().await
    }

    /// Whether the process has not ended, by a look.
    pub(super) fn is_alive(&self) -> bool {
        pidfd::is_alive(&self.pidfd)
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits for the death. Cancel safe.
    pub(super) async fn died(&self) {
        let mut alive = self.alive.clone();
        let _ = alive.wait_for(|alive| !alive).await;
    }

    /// Whether the process is dead, or dies within the moment that passes between the end of its
    /// socket and the end of itself.
    pub(super) async fn is_dying(&self) -> bool {
        let grace = std::time::Duration::from_secs(1);
        tokio::time::timeout(grace, self.died()).await.is_ok()
    }

    pub(super) async fn kill_and_reap(&self) {
        let _ended_meanwhile = pidfd::send(&self.pidfd, libc::SIGKILL);
        self.died().await;
    }
}

/// ECHILD says that another process is the parent: then it is not for us to reap.
fn reap(pidfd: &OwnedFd) {
    let Ok(id) = libc::id_t::try_from(pidfd.as_raw_fd()) else { return };
    // SAFETY: siginfo_t is plain data, for which all zeroes is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `info` outlives the call.
    unsafe { libc::waitid(libc::P_PIDFD, id, &raw mut info, libc::WEXITED | libc::WNOHANG) };
}

/// Writes the configuration, starts the shim and waits for its word that it is ready. One that is late is killed.
pub(super) async fn spawn(
    binary: &Path,
    dir: &Path,
    config: &SandboxConfig,
    times: Times,
) -> Result<Process, Error> {
    let (begun, begins) = oneshot::channel();
    let (binary, of, config) = (binary.to_owned(), dir.to_owned(), config.encode_to_vec());
    let mut starting = tokio::task::spawn_blocking(move || spawn_blocking(&binary, &of, &config, begun));
    if let Ok(pid) = timeout(times.work, &mut starting).await {
        let pid = pid.map_err(|error| Error::new(ErrorKind::Spawn, format!("start a shim: {error}")))??;
        return Process::open(pid);
    }
    // As long as it is not heard to the end its number is its own.
    if !starting.is_finished()
        && let Ok(process) = begins.await.map(Process::open)
    {
        let _asleep = timeout(times.death, process?.kill_and_reap()).await;
    }
    end_stray(dir, times).await;
    // It may have been ready in the last moment.
    if let Ok(Ok(Ok(pid))) = timeout(times.death, starting).await
        && let Ok(process) = Process::open(pid)
    {
        let _asleep = timeout(times.death, process.kill_and_reap()).await;
    }
    Err(Error::new(ErrorKind::Spawn, format!("start the shim: it was not ready within {:?}", times.work)))
}

/// Ends the shim of a directory that nobody can talk to, as [`super::Shim::end_stray`] says.
pub(super) async fn end_stray(dir: &Path, times: Times) {
    let wanted = dir.to_owned();
    let strays = tokio::task::spawn_blocking(move || of_directory(&wanted)).await;
    for pid in strays.unwrap_or_default() {
        let Ok(process) = Process::open(pid) else { continue };
        // The number may have become somebody else's meanwhile; from here on it is not given away.
        if is_of_directory(pid, dir) {
            tracing::warn!(pid, dir = %dir.display(), "ending a shim that nobody can talk to");
            if timeout(times.death, process.kill_and_reap()).await.is_err() {
                tracing::warn!(pid, "a killed shim does not die: it sleeps in the kernel");
            }
        }
    }
}

fn spawn_blocking(
    binary: &Path,
    dir: &Path,
    config: &[u8],
    begun: oneshot::Sender<i32>,
) -> Result<i32, Error> {
    let failed = |doing: &str, path: &Path, error: &std::io::Error| {
        Error::new(ErrorKind::Spawn, format!("{doing} {}: {error}", path.display()))
    };
    std::fs::create_dir_all(dir).map_err(|error| failed("make the directory", dir, &error))?;
    let path = dir.join(CONFIG);
    write_whole(&path, config).map_err(|error| failed("write", &path, &error))?;
    let path = dir.join("shim.log");
    let log = std::fs::OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
    let log = log.map_err(|error| failed("open", &path, &error))?;
    // Its words come on the standard output: "ready", or why not.
    let mut command = Command::new(binary);
    // The path may be a descriptor's. The process list shows the same for every shim.
    command.arg0("/proc/self/exe").arg("shim").arg("--dir").arg(dir).current_dir("/").env_clear();
    if let Some(armed) = std::env::var_os(coracle_fault::VARIABLE) {
        command.env(coracle_fault::VARIABLE, armed);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut child = command.spawn().map_err(|error| failed("start", binary, &error))?;
    let _nobody_waits = begun.send(child.id().cast_signed());
    let mut words = String::new();
    if let Some(mut output) = child.stdout.take() {
        let _ = output.read_to_string(&mut words);
    }
    let (sibling, words) = heard(&words);
    if words == "ready" {
        let Some(pid) = sibling else {
            return i32::try_from(child.id())
                .map_err(|error| Error::new(ErrorKind::Spawn, error.to_string()));
        };
        // It has nothing more to do.
        let _ = child.wait();
        return Ok(pid);
    }
    let status = child.wait().map(|status| status.to_string()).unwrap_or_default();
    if let Some(pid) = sibling {
        let _ = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(pid), None);
    }
    let words = if words.is_empty() { status } else { words };
    Err(Error::new(ErrorKind::Spawn, format!("start the shim: {words}")))
}

/// The pid of the child that became the pod, when it is not the one that was started, and all else.
fn heard(words: &str) -> (Option<i32>, String) {
    let pid_of = |line: &str| line.strip_prefix("pid ")?.parse::<i32>().ok().filter(|pid| *pid > 0);
    let rest: Vec<&str> = words.lines().filter(|line| pid_of(line).is_none()).collect();
    (words.lines().find_map(pid_of), rest.join("\n").trim().to_owned())
}

/// The state directory is a tmpfs and gone after a crash of the machine, so renaming is enough.
fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    super::file::write_private(&temporary, bytes)?;
    std::fs::rename(&temporary, path)
}

pub(super) async fn read_config(dir: &Path) -> Result<SandboxConfig, Error> {
    let path: PathBuf = dir.join(CONFIG);
    let failed =
        |kind, error: &dyn std::error::Error| Error::new(kind, format!("read {}: {error}", path.display()));
    let bytes = tokio::fs::read(&path).await.map_err(|error| match error.kind() {
        NotFound | NotADirectory => failed(ErrorKind::Gone, &error),
        _ => failed(ErrorKind::Internal, &error),
    })?;
    SandboxConfig::decode(bytes.as_slice()).map_err(|error| failed(ErrorKind::Gone, &error))
}

/// The processes that were started as the shim of a directory: the shim itself, and what it forked for the pod.
fn of_directory(dir: &Path) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_of_directory(*pid, dir)).collect()
}

fn is_of_directory(pid: i32, dir: &Path) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| is_shim_of(&line, dir))
}

/// Whether a command line, as the kernel has it, is `… shim --dir DIR`.
fn is_shim_of(line: &[u8], dir: &Path) -> bool {
    let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    matches!(words.as_slice(), [_, b"shim", b"--dir", of, ..] if *of == dir.as_os_str().as_bytes())
}

#[cfg(test)]
mod tests {
    /// It may end between our connection and this look at it: nobody is to take that for a shim that he cannot talk to.
    #[test]
    fn a_process_that_has_ended_is_gone() {
        assert_eq!(super::Process::open(i32::MAX).unwrap_err().kind, super::ErrorKind::Gone);
    }

    #[test]
    fn a_shim_is_known_by_its_command_line() {
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
    fn the_pods_pid_is_told_from_its_words_in_any_order() {
        assert_eq!(super::heard("pid 42\nready\n"), (Some(42), "ready".to_owned()));
        assert_eq!(super::heard("ready\npid 42\n"), (Some(42), "ready".to_owned()));
        assert_eq!(super::heard("ready\n"), (None, "ready".to_owned()));
        assert_eq!(super::heard("pid 0\nset the host name\n"), (None, "pid 0\nset the host name".to_owned()));
        assert_eq!(super::heard(""), (None, String::new()));
    }
}

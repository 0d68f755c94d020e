//! The shim as a process: started, watched by a pidfd, reaped when it is our child.
#![allow(unsafe_code, reason = "pidfd_open and waitid on a pidfd have no safe wrapper here")]

use std::io::Read as _;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use coracle_proto::shim::SandboxConfig;
use prost::Message as _;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use super::error::{Error, ErrorKind};

/// Name of the configuration in a shim's directory.
const CONFIG: &str = "shim.pb";

/// A process that can be waited for by any number of tasks.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pid: i32,
    pidfd: Arc<OwnedFd>,
    alive: watch::Receiver<bool>,
}

// === impl Process ===

impl Process {
    /// Watches a process. Reaps it when it dies, if it is a child of ours.
    pub(super) fn open(pid: i32) -> Result<Self, Error> {
        let failed = |error: &std::io::Error| {
            Error::new(ErrorKind::Gone, format!("open the shim's pid {pid}: {error}"))
        };
        // SAFETY: pidfd_open takes two integers and no memory.
        let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let raw = i32::try_from(raw)
            .ok()
            .filter(|fd| *fd >= 0)
            .ok_or_else(|| failed(&std::io::Error::last_os_error()))?;
        // SAFETY: the kernel has just made this descriptor for us.
        let pidfd = unsafe { OwnedFd::from_raw_fd(raw) };
        let watched = pidfd.try_clone().and_then(register);
        let watched = watched.map_err(|error| failed(&error))?;
        let (sender, alive) = watch::channel(true);
        tokio::spawn(async move {
            tokio::select! {
                // Only observed: the kernel keeps a pidfd readable for ever after the death.
                _ = watched.readable() => {}
                // Nobody is interested any more; a child of ours then waits for our own end.
                () = sender.closed() => return,
            }
            reap(watched.get_ref());
            let _ = sender.send(false);
        });
        Ok(Self { pid, pidfd: Arc::new(pidfd), alive })
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
        // SAFETY: the descriptor is open, and no siginfo is passed.
        let _ = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.pidfd.as_raw_fd(),
                libc::SIGKILL,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        self.died().await;
    }
}

fn register(fd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the `AsyncFd` owns the descriptor and nothing else closes it.
    let registered = unsafe { AsyncFd::register_with_interest(fd, tokio::io::Interest::READABLE) };
    registered.map_err(|error| std::io::Error::other(error.to_string()))
}

/// ECHILD says that another process is the parent: then it is not for us to reap.
fn reap(pidfd: &OwnedFd) {
    let Ok(id) = libc::id_t::try_from(pidfd.as_raw_fd()) else { return };
    // SAFETY: siginfo_t is plain data, for which all zeroes is a value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `info` outlives the call.
    unsafe { libc::waitid(libc::P_PIDFD, id, &raw mut info, libc::WEXITED | libc::WNOHANG) };
}

/// Writes the configuration, starts the shim and waits for its word that it is ready.
pub(super) async fn spawn(binary: &Path, dir: &Path, config: &SandboxConfig) -> Result<Process, Error> {
    let (binary, dir, config) = (binary.to_owned(), dir.to_owned(), config.encode_to_vec());
    let pid = tokio::task::spawn_blocking(move || spawn_blocking(&binary, &dir, &config))
        .await
        .map_err(|error| Error::new(ErrorKind::Spawn, format!("start a shim: {error}")))??;
    Process::open(pid)
}

fn spawn_blocking(binary: &Path, dir: &Path, config: &[u8]) -> Result<i32, Error> {
    let failed = |doing: &str, path: &Path, error: &std::io::Error| {
        Error::new(ErrorKind::Spawn, format!("{doing} {}: {error}", path.display()))
    };
    std::fs::create_dir_all(dir).map_err(|error| failed("make the directory", dir, &error))?;
    let path = dir.join(CONFIG);
    write_whole(&path, config).map_err(|error| failed("write", &path, &error))?;
    let path = dir.join("shim.log");
    let log = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    let log = log.map_err(|error| failed("open", &path, &error))?;
    // Its words come on the standard output: "ready", or why not.
    let mut command = Command::new(binary);
    command.arg("shim").arg("--dir").arg(dir).current_dir("/").env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut child = command.spawn().map_err(|error| failed("start", binary, &error))?;
    let mut words = String::new();
    if let Some(mut output) = child.stdout.take() {
        let _ = output.read_to_string(&mut words);
    }
    if words.trim() == "ready" {
        return i32::try_from(child.id()).map_err(|error| Error::new(ErrorKind::Spawn, error.to_string()));
    }
    let status = child.wait().map(|status| status.to_string()).unwrap_or_default();
    let words = if words.trim().is_empty() { status } else { words.trim().to_owned() };
    Err(Error::new(ErrorKind::Spawn, format!("start the shim: {words}")))
}

/// The state directory is a tmpfs and gone after a crash of the machine, so renaming is enough.
fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    std::fs::write(&temporary, bytes)?;
    std::fs::rename(&temporary, path)
}

pub(super) async fn read_config(dir: &Path) -> Result<SandboxConfig, Error> {
    let path: PathBuf = dir.join(CONFIG);
    let gone = |error: &dyn std::error::Error| {
        Error::new(ErrorKind::Gone, format!("read {}: {error}", path.display()))
    };
    let bytes = tokio::fs::read(&path).await.map_err(|error| gone(&error))?;
    SandboxConfig::decode(bytes.as_slice()).map_err(|error| gone(&error))
}

//! The per-pod shim: holds the namespaces, runs the containers, keeps stdio and exit codes.
//!
//! One process a pod, started as `coracle shim --dir DIR`. It *is* the pod: it unshares the network,
//! ipc, uts and mount namespaces and keeps them by living. Start reading at [`main`], then `setup`
//! (from a process to a pod, in kernel order) and `shim` (the loop and its calls, one a file).
//!
//! Invariants:
//! - single-threaded, without tokio: one poll loop, nothing in it blocks and nothing polls by time;
//! - calls the container library only in `creator`, a fork that ends after one container;
//! - nothing grows with time: an absent agent costs one event per container that ended;
//! - file systems are mounted in a namespace of the shim's own and vanish with it;
//! - knows neither CRI nor Kubernetes, only OCI specs and its own protocol.

mod cgroup;
mod console;
mod container;
mod creator;
mod events;
mod exec;
mod fault;
mod host_mounts;
mod identity;
mod init;
mod kernel;
mod log;
mod null;
mod oom;
mod overlay;
mod process;
mod program;
mod report;
mod restorer;
mod seccomp;
mod selinux;
mod setup;
mod shim;
mod stdio;
mod terminal;
mod user_namespace;
mod wire;

#[cfg(any(test, feature = "fuzzing"))]
pub use crate::log::fuzz as fuzz_log;
#[cfg(any(test, feature = "fuzzing"))]
pub use crate::wire::fuzz as fuzz_wire;

use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use coracle_proto::shim::SandboxConfig;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use prost::Message as _;

use crate::kernel::Fork;
use crate::setup::{Pod, SetupError};
use crate::shim::Shim;

/// What the command line says.
#[derive(Clone, Debug)]
pub struct ShimArgs {
    /// Holds `shim.pb`, the pod's configuration, and all that the shim keeps.
    pub dir: PathBuf,
}

#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("understand {}", .path.display())]
    Decode { path: PathBuf, source: prost::DecodeError },
    #[error("close inherited descriptors")]
    Inherited(#[source] io::Error),
    #[error("limit the open descriptors")]
    OpenFiles(#[source] nix::Error),
    #[error("become the pod")]
    Setup(#[source] SetupError),
    #[error("report that the pod is ready")]
    Ready(#[source] io::Error),
    #[error("wait for events")]
    Loop(#[source] nix::Error),
}

/// Becomes the pod of `args.dir` and serves it until it is shut down.
///
/// Must be called before any thread exists. The standard output carries to whoever started us a line
/// `pid NUMBER` when the pod is another child of theirs than the one that they started, and a line `ready`
/// or the reason why not.
#[must_use]
pub fn main(args: ShimArgs) -> ExitCode {
    match run(&args.dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let text = fault::chain(&error);
            report::note(&text);
            let _ = writeln!(io::stdout(), "{text}");
            ExitCode::FAILURE
        }
    }
}

fn run(dir: &Path) -> Result<(), StartError> {
    // Whatever the process that starts the runtime has open is neither the pod's nor its containers'.
    kernel::close_all_but(&[]).map_err(StartError::Inherited)?;
    let path = dir.join("shim.pb");
    let bytes = std::fs::read(&path).map_err(|source| StartError::Read { path: path.clone(), source })?;
    let mut config =
        SandboxConfig::decode(bytes.as_slice()).map_err(|source| StartError::Decode { path, source })?;
    // Before anything is forked, which inherits it.
    limit_open_files(config.open_files).map_err(StartError::OpenFiles)?;
    let (side, hierarchies, cgroups) = setup::be_born(&config).map_err(StartError::Setup)?;
    if let Fork::Parent(pid) = side {
        // Who started us is to reap it, whatever becomes of it.
        return writeln!(io::stdout(), "pid {pid}").map_err(StartError::Ready);
    }
    let pod = setup::enter(&config, dir, hierarchies, cgroups).map_err(StartError::Setup)?;
    ready().map_err(StartError::Ready)?;
    // It is there: its filter is not to be kept for as long as the pod lives.
    config.init = None;
    move_into_cgroups(&pod);
    Shim::new(config, dir.to_owned(), pod).serve().map_err(StartError::Loop)
}

/// Who started us may have more than its pods are to begin with.
fn limit_open_files(soft: u64) -> nix::Result<()> {
    if soft == 0 {
        return Ok(());
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, soft.min(hard), hard)
}

/// For a cgroup that it could not be born in. By a fork, and after the word: the kernel lets the move wait
/// for some milliseconds (an RCU grace period), and the agent and we have better to do meanwhile.
fn move_into_cgroups(pod: &Pod) {
    let left = pod.own_cgroups.left();
    if left.is_empty() {
        return;
    }
    let pids = [std::process::id().cast_signed(), pod.init.as_ref().map_or(0, |init| init.pid())];
    let forked = kernel::fork_briefly(|| {
        for pid in pids.into_iter().filter(|pid| *pid > 0) {
            if let Err(error) = cgroup::put(left, pid) {
                report::note(&fault::chain(&error));
            }
        }
    });
    if let Err(error) = forked {
        report::note(&format!("fork to move into the shim's cgroup: {error}"));
    }
}

/// Says so, and lets go of the pipe.
fn ready() -> io::Result<()> {
    let mut out = io::stdout();
    out.write_all(b"ready\n")?;
    out.flush()?;
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    kernel::place(null.as_raw_fd(), 1)
}

//! The shim: one process per pod that holds its namespaces, runs its containers, and keeps their output and
//! exit codes.
//!
//! It is started as `coracle shim --dir DIR`. The process itself is the pod: it unshares the network, ipc,
//! uts and mount namespaces, which exist as long as it runs. Start reading at [`main`], then `setup` (from a
//! process to a pod) and `shim` (the event loop; one file per call).
//!
//! Invariants:
//! - It is single-threaded and does not use tokio: one poll loop, in which no step blocks. A timer is used for polling
//!   only while a container is deleted (`shim/delete.rs`).
//! - Only its forks call the container library: those that make a container (`creator`) or become an exec (`identity`).
//! - Its memory does not grow with time. Without an agent it queues only one event per ended process.
//! - It mounts file systems in its own mount namespace, so they are unmounted at its end.
//! - The shim uses OCI specs and its own protocol, and no types of the CRI or Kubernetes.

mod call_error;
mod call_id;
mod cgroup;
mod console;
mod container;
mod creator;
mod events;
mod exec;
mod host_mounts;
mod identity;
mod init;
mod kernel;
mod log;
mod null;
mod oom;
mod output_rate;
mod overlay;
mod process;
mod program;
mod report;
mod restorer;
mod rlimits;
mod seccomp;
mod selinux;
mod setup;
mod shim;
mod stdio;
mod terminal;
mod user_namespace;
mod wire;

#[cfg(any(test, feature = "fuzzing"))]
pub use crate::identity::fuzz_home;
#[cfg(any(test, feature = "fuzzing"))]
pub use crate::log::fuzz as fuzz_log;
#[cfg(any(test, feature = "fuzzing"))]
pub use crate::report::fuzz as fuzz_report;
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

/// Command line arguments of the shim.
#[derive(Clone, Debug)]
pub struct ShimArgs {
    /// The pod's directory. It has the configuration `shim.pb` and all other files of the shim.
    pub dir: PathBuf,
}

#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot decode {}", .path.display())]
    Decode { path: PathBuf, source: prost::DecodeError },
    #[error("cannot close inherited descriptors")]
    Inherited(#[source] io::Error),
    #[error("cannot limit the open descriptors")]
    OpenFiles(#[source] nix::Error),
    #[error("cannot set up the pod")]
    Setup(#[source] SetupError),
    #[error("cannot report that the pod is ready")]
    Ready(#[source] io::Error),
    #[error("cannot wait for events")]
    Loop(#[source] nix::Error),
}

/// Sets up the pod of `args.dir` and serves it until it is shut down.
///
/// Must be called before any thread exists. The caller reads standard output. The caller gets a line `pid NUMBER` if
/// the pod is a sibling of the started process, then a line `ready` or the error.
#[must_use]
pub fn main(args: ShimArgs) -> ExitCode {
    match run(&args.dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let text = call_error::chain(&error);
            report::note(&text);
            let _ = writeln!(io::stdout(), "{text}");
            ExitCode::FAILURE
        }
    }
}

/// Gives the calling thread, and the processes that it starts, an empty session keyring.
///
/// A program that starts shims calls this before it has threads. Otherwise containers could read the keys of the
/// program's session, such as Kerberos tickets of an administrator. Each shim makes a keyring of its own, but this
/// fails after a container has used up root's quota of keys.
///
/// # Errors
/// On a kernel without keys, and if root has used up its quota.
pub fn leave_session_keyring() -> io::Result<()> {
    kernel::new_session_keyring()
}

fn run(dir: &Path) -> Result<(), StartError> {
    // If this fails, the pod has the keyring of its runtime.
    let _ = kernel::new_session_keyring();
    // Descriptors that the runtime inherited belong neither to the pod nor to its containers.
    kernel::close_all_but(&[]).map_err(StartError::Inherited)?;
    let path = dir.join("shim.pb");
    let bytes = std::fs::read(&path).map_err(|source| StartError::Read { path: path.clone(), source })?;
    let mut config =
        SandboxConfig::decode(bytes.as_slice()).map_err(|source| StartError::Decode { path, source })?;
    // The limit is set before the first fork, because children inherit it.
    limit_open_files(config.open_files).map_err(StartError::OpenFiles)?;
    let forked = setup::fork_into_cgroup(&config).map_err(StartError::Setup)?;
    if let Fork::Parent(pid) = forked.side {
        // The caller reaps the sibling in every case.
        return writeln!(io::stdout(), "pid {pid}").map_err(StartError::Ready);
    }
    let pod =
        setup::enter(&config, dir, forked.hierarchies, forked.own_cgroups).map_err(StartError::Setup)?;
    ready().map_err(StartError::Ready)?;
    // Process 1 has started: its seccomp program is not needed any more.
    config.init = None;
    move_into_cgroups(&pod);
    Shim::new(config, dir.to_owned(), pod).serve().map_err(StartError::Loop)
}

/// Sets the soft limit of open descriptors for the pod. The inherited limit of the runtime may be higher.
fn limit_open_files(soft: u64) -> nix::Result<()> {
    if soft == 0 {
        return Ok(());
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, rlimits::amount(soft).min(hard), hard)
}

/// Moves the shim into its cgroups, if it was not forked in them. A fork of the shim makes the move after `ready` is
/// reported. The move takes some milliseconds (an RCU grace period), and must not delay the agent or the shim.
fn move_into_cgroups(pod: &Pod) {
    let left = pod.own_cgroups.not_entered();
    if left.is_empty() {
        return;
    }
    let pids = [std::process::id().cast_signed(), pod.init.as_ref().map_or(0, |init| init.pid())];
    let forked = kernel::fork_briefly(|| {
        for pid in pids.into_iter().filter(|pid| *pid > 0) {
            if let Err(error) = cgroup::put(left, pid) {
                report::note(&call_error::chain(&error));
            }
        }
    });
    if let Err(error) = forked {
        report::note(&format!("cannot fork to move into the shim's cgroup: {error}"));
    }
}

/// Reports that the pod is ready and closes the pipe to the caller.
fn ready() -> io::Result<()> {
    let mut out = io::stdout();
    out.write_all(b"ready\n")?;
    out.flush()?;
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    kernel::dup_to(null.as_raw_fd(), 1)
}

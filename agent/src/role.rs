//! The roles of the binary, one per file, and their shared parts: async runtime, signals, error output.

pub(crate) mod agent;
#[cfg(feature = "controlplane")]
pub(crate) mod backup;
pub(crate) mod check;
#[cfg(feature = "controlplane")]
pub(crate) mod cluster;
pub(crate) mod cni;
pub(crate) mod command_line;
mod control;
#[cfg(feature = "controlplane")]
pub(crate) mod controlplane;
pub(crate) mod down;
pub(crate) mod image;
mod joined_dns;
mod node;
mod output;
mod program_pages;
mod progress;
mod remote_runtime;
pub(crate) mod runtime;
mod signals;
#[cfg(feature = "controlplane")]
pub(crate) mod token;
#[cfg(feature = "controlplane")]
pub(crate) mod up;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use coracle_error_chain::chain;
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::settings::Node;
use crate::{directories, lock};

/// Bytes of a thread's stack. A stack of 2 MiB could become one huge page with Debian's default setting of the kernel.
const STACK: usize = (2 << 20) - (64 << 10);

/// Exit status of an agent on a machine that has not joined a cluster (`EX_CONFIG` of sysexits.h). The unit
/// `coracle-agent.service` does not restart an agent with this status.
const NOT_JOINED: u8 = 78;

/// Runs a role to its end on the async runtime.
pub(crate) fn block_on(role: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    // The future is boxed. Otherwise each function of tokio that runs a future would be compiled once for each role.
    block_on_boxed(Box::pin(role))
}

fn block_on_boxed(role: LocalBoxFuture<'_, anyhow::Result<()>>) -> anyhow::Result<ExitCode> {
    // Two workers: the node mostly waits for the kernel, and each further thread costs memory.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(16)
        .thread_stack_size(STACK)
        // Idle threads must end before the program's pages are released, because an ending thread would load pages
        // again.
        .thread_keep_alive(program_pages::HEARTBEAT / 2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    runtime.spawn(program_pages::release_after_start().boxed());
    let result = runtime.block_on(role);
    // A blocking call that hangs (a stalled mount) must not prevent the end of the process.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    lock::release_held();
    result.map(|()| ExitCode::SUCCESS)
}

/// Prints the error with its causes as one sentence on standard error. Returns the exit status.
pub(crate) fn fail(error: &anyhow::Error) -> ExitCode {
    let text = chain(&**error);
    let is_root = nix::unistd::geteuid().is_root();
    let hint = hint(&text).or_else(|| if is_root { None } else { hint_for_user(&text) });
    let sentence = match hint {
        Some(hint) => format!("coracle: {text}; {hint}\n"),
        None => format!("coracle: {text}\n"),
    };
    // If standard error is closed, the error cannot be reported.
    drop(std::io::stderr().write_all(sentence.as_bytes()));
    ExitCode::from(status(error))
}

/// The exit status of an error.
fn status(error: &anyhow::Error) -> u8 {
    if error.is::<agent::NotJoined>() { NOT_JOINED } else { 1 }
}

/// Advice for errors of the kernel. The function matches the text of the error, because errors of the running node
/// arrive as text.
fn hint(text: &str) -> Option<&'static str> {
    let has = |part: &str| text.contains(part);
    if ["No space left on device", "Disk quota exceeded"].into_iter().any(has) {
        return Some("free disk space; `coracle image list` and `coracle image rm` remove images");
    }
    let missing = [
        "Function not implemented",
        "Protocol not supported",
        "Address family not supported",
        "No such device",
    ];
    let is_missing = missing.into_iter().any(has) && !text.contains("coracle check");
    is_missing.then_some("`coracle check` lists missing features of the kernel")
}

/// Advice for a user without the rights of root, who is not permitted to read the files of the node.
fn hint_for_user(text: &str) -> Option<&'static str> {
    text.contains("Permission denied").then_some("run the command as root, for example with sudo")
}

/// `coracle version`.
pub(crate) fn version() -> anyhow::Result<ExitCode> {
    print(&format!("coracle {}\n", env!("CARGO_PKG_VERSION")))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes to standard output. A closed reader (`| head`) is not an error.
fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Fails unless the process runs as root.
fn require_root() -> anyhow::Result<()> {
    anyhow::ensure!(nix::unistd::geteuid().is_root(), "this command must run as root; use sudo");
    Ok(())
}

/// Makes the directories of a node. Directories that earlier versions have made become private.
///
/// A node that still has to join calls [`repair`] first, so that a refused join leaves nothing in the state directory.
fn prepare(node: &Node) -> anyhow::Result<()> {
    directories::prepare(&node.dirs.state, &[directories::NODE_STATE, directories::RUNTIME_STATE])?;
    directories::prepare(&node.dirs.run, &[directories::NODE_RUN, directories::RUNTIME_RUN])?;
    directories::make_logs(&node.pod_log_dir)
}

/// Makes the run directory. Directories that earlier versions have made become private.
fn repair(node: &Node) -> anyhow::Result<()> {
    directories::repair(&node.dirs.state, &[directories::NODE_STATE, directories::RUNTIME_STATE])?;
    directories::prepare(&node.dirs.run, &[directories::NODE_RUN, directories::RUNTIME_RUN])
}

/// Raises the limit of open files: each pod and each connection needs descriptors.
fn raise_open_files() {
    if let Err(error) = coracle_open_files::raise() {
        tracing::warn!(%error, "cannot raise the limit of open files, which limits the number of pods");
    }
}

/// A token that SIGINT or SIGTERM cancels.
fn until_signalled() -> anyhow::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let cancel = token.clone();
    coracle_threads::spawn(async move {
        tokio::select! {
            // Cancel safe: both signals have the same effect.
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        tracing::info!("shutting down; pods keep running");
        cancel.cancel();
    });
    Ok(token)
}

/// Removes a socket. If this fails, the next start removes it.
fn remove_socket(path: &std::path::Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::debug!(path = %path.display(), %error, "cannot remove the socket");
    }
}

/// Listens on a unix socket, and replaces the socket of a dead process. Only root may connect.
fn listen(path: &std::path::Path) -> anyhow::Result<tokio::net::UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    let context = || format!("cannot listen on {}", path.display());
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(context)?;
    }
    coracle_tree::remove_file(path).with_context(context)?;
    let listener = tokio::net::UnixListener::bind(path).with_context(context)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).with_context(context)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::mpsc;

    use super::{NOT_JOINED, agent, block_on, hint, hint_for_user, status};
    use crate::lock::Lock;

    /// Data of a task. The end of the task drops it, and the drop sends the holder of the lock.
    struct AtEnd {
        run_dir: PathBuf,
        holder: mpsc::Sender<Option<i32>>,
    }

    impl Drop for AtEnd {
        fn drop(&mut self) {
            self.holder.send(Lock::holder(&self.run_dir)).expect("the test waits");
        }
    }

    #[test]
    fn the_unit_of_the_agent_does_not_restart_an_agent_that_has_not_joined() {
        let unit = include_str!("../../examples/systemd/coracle-agent.service");
        assert!(unit.contains(&format!("\nRestartPreventExitStatus={NOT_JOINED}\n")));
        assert_eq!(status(&agent::NotJoined.into()), NOT_JOINED);
        assert_eq!(status(&anyhow::anyhow!("the disk is full")), 1);
    }

    #[test]
    fn the_lock_is_kept_until_the_tasks_of_the_role_have_ended() {
        let dir = tempfile::tempdir().expect("directory");
        let (holder, found) = mpsc::channel();
        let at_end = AtEnd { run_dir: dir.path().to_owned(), holder };
        let ended = block_on(async {
            Lock::acquire(dir.path())?.hold();
            tokio::spawn(async move {
                let _at_end = at_end;
                std::future::pending::<()>().await;
            });
            Ok(())
        });
        assert!(ended.is_ok());
        let own = i32::try_from(std::process::id()).ok();
        assert_eq!(found.recv().expect("the task has ended"), own);
        // Wait, because a process that another test has just forked holds the descriptor until it executes its program.
        drop(Lock::acquire(dir.path()).expect("the lock is released"));
    }

    #[test]
    fn kernel_errors_name_a_remedy() {
        let full = "cannot pull nginx: cannot write /var/lib/x: No space left on device";
        assert!(hint(full).is_some_and(|hint| hint.contains("free disk space")));
        let missing = "cannot open the pod network: cannot open a netlink socket: Protocol not supported";
        assert!(hint(missing).is_some_and(|hint| hint.contains("coracle check")));
        assert_eq!(hint("cannot read /a: No such file or directory"), None);
        assert_eq!(hint("cannot read /a: Permission denied"), None, "root needs other advice");
        assert!(hint_for_user("cannot read /a: Permission denied").is_some_and(|hint| hint.contains("sudo")));
        assert_eq!(hint_for_user("cannot read /a: No such file or directory"), None);
    }
}

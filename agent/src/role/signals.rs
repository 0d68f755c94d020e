//! Signals that end a node or a control plane: SIGINT and SIGTERM. Pods keep running, unless the machine shuts down and the
//! settings give the pods a period to end.
//!
//! The services of systemd and OpenRC stop before the network. At SIGTERM the node finds out whether the machine shuts
//! down: `systemctl is-system-running` prints `stopping`, or the service script of OpenRC has made a file.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::settings::Node;

/// The file in the run directory that the service script of OpenRC makes when the machine shuts down.
const SHUTDOWN_FILE: &str = "machine-shutdown";
/// The directory that exists if systemd is the init system, see sd_booted(3).
const SYSTEMD: &str = "/run/systemd/system";
/// Maximum time to wait for systemctl.
const SYSTEMCTL_LIMIT: Duration = Duration::from_secs(2);
/// Time that the process needs to end, in addition to the periods of the pods and the drain of an API server. It
/// includes the rest of a start, the reports of ended pods, the last connections and the last audit events.
const STOP_MARGIN: Duration = Duration::from_secs(60);

/// Tokens that the signals cancel.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeSignals {
    /// The node stops, and the pods keep running.
    pub(crate) stop: CancellationToken,
    /// The machine shuts down. The agent ends the pods, and then the node stops.
    pub(crate) machine: CancellationToken,
    /// A signal after the stop: the process does not wait for requests in flight.
    pub(crate) now: CancellationToken,
}

/// Tokens that the signals of a control plane without a node cancel.
#[cfg(feature = "controlplane")]
#[derive(Debug, Default)]
pub(super) struct PlaneSignals {
    /// The control plane stops.
    pub(super) stop: CancellationToken,
    /// A second signal: the process does not wait for requests in flight.
    pub(super) now: CancellationToken,
}

/// The signals of a control plane whose API server serves requests for up to `drain` during its shutdown.
#[cfg(feature = "controlplane")]
pub(super) fn of_plane(drain: Duration) -> anyhow::Result<PlaneSignals> {
    let signals = PlaneSignals::default();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (stop, now) = (signals.stop.clone(), signals.now.clone());
    coracle_threads::spawn(async move {
        next(&mut interrupt, &mut terminate).await;
        tracing::info!("shutting down; pods keep running");
        extend_for_drain(drain);
        stop.cancel();
        next(&mut interrupt, &mut terminate).await;
        now.cancel();
    });
    Ok(signals)
}

/// The signals of this node. A second signal stops the node without waiting for the pods. `drain` is the maximum time for
/// which an API server in this process serves requests during its shutdown.
pub(super) fn of_node(node: &Node, drain: Duration) -> anyhow::Result<NodeSignals> {
    let signals = NodeSignals::default();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let file = node.dirs.run.join(SHUTDOWN_FILE);
    // A file that exists at the start belongs to an earlier shutdown.
    drop(std::fs::remove_file(&file));
    let (periods, cancelled) = (node.shutdown_periods.clone(), signals.clone());
    coracle_threads::spawn(async move {
        let is_terminated = next(&mut interrupt, &mut terminate).await;
        if is_terminated && !periods.is_empty() && is_shutting_down(&file).await {
            tracing::info!("the machine shuts down");
            extend_stop_timeout(periods.limit() + drain + STOP_MARGIN);
            cancelled.machine.cancel();
            next(&mut interrupt, &mut terminate).await;
        }
        tracing::info!("shutting down; pods keep running");
        extend_for_drain(drain);
        cancelled.stop.cancel();
        next(&mut interrupt, &mut terminate).await;
        cancelled.now.cancel();
    });
    Ok(signals)
}

/// Waits for the next signal. Returns whether it is SIGTERM.
async fn next(interrupt: &mut Signal, terminate: &mut Signal) -> bool {
    tokio::select! {
        // Cancel-safe: the other signal is not lost.
        _ = interrupt.recv() => false,
        _ = terminate.recv() => true,
    }
}

/// Whether the machine is shutting down. `file` is the file of OpenRC's script.
async fn is_shutting_down(file: &Path) -> bool {
    if file.exists() {
        return true;
    }
    if !Path::new(SYSTEMD).exists() {
        return false;
    }
    let mut command = tokio::process::Command::new("systemctl");
    command.arg("is-system-running").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    coracle_open_files::restore_limit(command.as_std_mut());
    match tokio::time::timeout(SYSTEMCTL_LIMIT, command.output()).await {
        Ok(Ok(output)) => is_stopping(&output.stdout),
        Ok(Err(error)) => {
            tracing::warn!(%error, "cannot run systemctl to find out whether the machine shuts down");
            false
        }
        Err(_elapsed) => {
            tracing::warn!("systemctl did not answer whether the machine shuts down");
            false
        }
    }
}

/// Whether this output of `systemctl is-system-running` is the state of a machine that shuts down.
fn is_stopping(output: &[u8]) -> bool {
    output.trim_ascii() == b"stopping"
}

/// Asks systemd for the time of an API server that serves requests during its shutdown. `TimeoutStopSec` may be shorter.
fn extend_for_drain(drain: Duration) {
    if !drain.is_zero() {
        extend_stop_timeout(drain + STOP_MARGIN);
    }
}

/// Asks systemd to wait longer before it kills the service. Has no effect without systemd.
fn extend_stop_timeout(time: Duration) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = notify(&socket, &format!("EXTEND_TIMEOUT_USEC={}", time.as_micros())) {
        tracing::warn!(%error, "cannot request a longer stop timeout from systemd");
    }
}

/// Sends a message to the service manager, as sd_notify(3). A name that begins with `@` is the name of an abstract
/// socket.
fn notify(socket: &OsStr, message: &str) -> std::io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_stopping_system_shuts_down() {
        assert!(is_stopping(b"stopping\n"));
        for other in ["running\n", "degraded\n", "starting\n", "maintenance\n", "offline\n", "unknown\n", ""]
        {
            assert!(!is_stopping(other.as_bytes()), "{other}");
        }
    }

    #[tokio::test]
    async fn the_file_of_the_service_script_means_that_the_machine_shuts_down() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(SHUTDOWN_FILE);
        std::fs::write(&file, "").unwrap();
        assert!(is_shutting_down(&file).await);
    }

    #[test]
    fn the_service_scripts_use_the_names_of_this_module() {
        let script = include_str!("../../../examples/openrc/coracle");
        assert!(script.contains(&format!("/{SHUTDOWN_FILE}\"")), "{script}");
        // systemd ignores messages of a service without this line.
        for unit in [
            include_str!("../../../examples/systemd/coracle.service"),
            include_str!("../../../examples/systemd/coracle-agent.service"),
        ] {
            assert!(unit.contains("\nNotifyAccess=main\n"), "{unit}");
        }
    }

    #[test]
    fn messages_arrive_at_a_socket_of_either_kind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("coracle-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        for (manager, socket) in [
            (UnixDatagram::bind(&path).unwrap(), path.as_os_str().to_owned()),
            (UnixDatagram::bind_addr(&address).unwrap(), format!("@{name}").into()),
        ] {
            notify(&socket, "EXTEND_TIMEOUT_USEC=5").unwrap();
            let mut buffer = [0; 64];
            let length = manager.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"EXTEND_TIMEOUT_USEC=5");
        }
    }
}

//! `coracle up`: control plane and node in one process.

use std::time::Duration;

use coracle_agent::{CertificateFiles, Identity};
use tokio_util::sync::CancellationToken;

use crate::directories;
use crate::lock::Lock;
use crate::settings::{Credentials, Settings};

/// Maximum time for the start of the control plane when the machine shuts down. It is less than the time that the init system
/// gives the process in addition to the periods of the pods.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Runs until SIGINT or SIGTERM.
pub(crate) async fn run(settings: Settings) -> anyhow::Result<()> {
    super::require_root()?;
    super::raise_open_files();
    check_runtime(settings.container_runtime_endpoint())?;
    let mut node = settings.node();
    super::prepare(&node)?;
    directories::prepare(&node.dirs.state, &[directories::PLANE_STATE])?;
    Lock::acquire(&node.dirs.run)?.hold();
    let signals = super::signals::of_node(&node, settings.control_plane().drain_limit())?;
    let now = signals.now.clone();
    // The node is stopped first: it sends its last status to the API server.
    let plane_shutdown = CancellationToken::new();
    let starting = super::controlplane::start(&settings, plane_shutdown.clone());
    let starting = super::controlplane::until(&signals.stop, starting);
    let Some(started) = before_shutdown(&signals.machine, starting).await else {
        tracing::warn!("the control plane has not started in time; pods keep running");
        return Ok(());
    };
    let Some(plane) = started? else { return Ok(()) };
    node.api_server_port = Some(plane.address().port());
    let addresses = if node.ips.is_empty() { coracle_agent::node::own_addresses() } else { node.ips.clone() };
    let identity = plane.node_identity(&node.name, &addresses)?;
    let files = CertificateFiles { certificate: identity.serving_cert, key: identity.serving_key };
    let credentials = Credentials { identity: Identity::Files(files), client_ca: Some(identity.client_ca) };
    let result = super::node::run(node, credentials, identity.client, signals).await;
    plane_shutdown.cancel();
    // A further signal ends the wait for requests in flight.
    let _stopped = now.run_until_cancelled(plane.stopped()).await;
    result
}

/// Refuses the setting `container-runtime-endpoint`: `coracle up` runs pods by the built-in container runtime.
fn check_runtime(endpoint: Option<&str>) -> anyhow::Result<()> {
    anyhow::ensure!(
        endpoint.is_none(),
        "container-runtime-endpoint cannot be set with `coracle up`, which runs pods by the built-in container runtime: \
         use `coracle controlplane` and `coracle agent`, or unset it"
    );
    Ok(())
}

/// The result of a start. When the machine shuts down, the start continues for a limited time, because the agent ends
/// the pods, and starts only after the control plane. `None` if the time is over.
async fn before_shutdown<T>(machine: &CancellationToken, start: impl Future<Output = T>) -> Option<T> {
    let over = async {
        machine.cancelled().await;
        tokio::time::sleep(START_LIMIT).await;
    };
    tokio::select! {
        biased;
        started = start => Some(started),
        () = over => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_container_runtime_is_refused() {
        assert!(check_runtime(None).is_ok());
        let error = check_runtime(Some("unix:///run/containerd/containerd.sock")).unwrap_err().to_string();
        assert!(error.contains("container-runtime-endpoint") && error.contains("coracle agent"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_continues_for_a_limited_time_when_the_machine_shuts_down() {
        let machine = CancellationToken::new();
        let after = |time: Duration| async move {
            tokio::time::sleep(time).await;
            7
        };
        assert_eq!(before_shutdown(&machine, after(START_LIMIT * 3)).await, Some(7));
        machine.cancel();
        assert_eq!(before_shutdown(&machine, after(START_LIMIT / 2)).await, Some(7));
        assert_eq!(before_shutdown(&machine, after(START_LIMIT * 3)).await, None);
    }
}

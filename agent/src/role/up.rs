//! `coracle up`: control plane and node in one process.

use coracle_agent::{CertificateFiles, Identity};

use crate::directories;
use crate::lock::Lock;
use crate::settings::{Credentials, Settings};

/// Runs until SIGINT or SIGTERM.
pub(crate) async fn run(settings: Settings) -> anyhow::Result<()> {
    super::require_root()?;
    super::raise_open_files();
    let node = settings.node();
    super::prepare(&node)?;
    directories::prepare(&node.dirs.state, &[directories::PLANE_STATE])?;
    Lock::acquire(&node.dirs.run)?.hold();
    let signals = super::signals::of_node(&node)?;
    // The node is stopped first: it sends its last status to the API server.
    let plane_shutdown = tokio_util::sync::CancellationToken::new();
    let starting = super::controlplane::start(&settings, plane_shutdown.clone());
    // A shutdown of the machine ends the start, too: the agent, which ends pods, does not run yet.
    let starting = super::controlplane::until(&signals.stop, starting);
    let started = super::controlplane::until(&signals.machine, starting).await?;
    let Some(plane) = started.flatten() else { return Ok(()) };
    let addresses = if node.ips.is_empty() { coracle_agent::node::own_addresses() } else { node.ips.clone() };
    let identity = plane.node_identity(&node.name, &addresses)?;
    let files = CertificateFiles { certificate: identity.serving_cert, key: identity.serving_key };
    let credentials = Credentials { identity: Identity::Files(files), client_ca: Some(identity.client_ca) };
    let result = super::node::run(node, credentials, identity.client, signals).await;
    plane_shutdown.cancel();
    plane.stopped().await;
    result
}

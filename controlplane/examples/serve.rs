//! Runs the control plane alone, to try clients by hand: `cargo run -p coracle-controlplane --example serve -- DIR
//! ADDRESS [TOKEN-FILE]`. If the environment variable `NODE` is set, it also writes the credentials of the node with
//! that name. Users start `coracle controlplane` instead.

use std::path::Path;

use coracle_controlplane::{ControlPlaneConfig, start};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().ok_or("usage: serve DIR ADDRESS [TOKEN-FILE]")?;
    let mut config = ControlPlaneConfig::new(Path::new(&directory));
    config.listen = arguments.next().ok_or("usage: serve DIR ADDRESS [TOKEN-FILE]")?.parse()?;
    config.token_file = arguments.next().map(Into::into);
    let shutdown = CancellationToken::new();
    let plane = start(config, shutdown.clone()).await?;
    if let Ok(node) = std::env::var("NODE") {
        plane.node_identity(&node, &[plane.address().ip()])?;
    }
    tokio::signal::ctrl_c().await?;
    shutdown.cancel();
    plane.stopped().await;
    Ok(())
}

//! `coracle runtime`: the CRI server alone.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use coracle_cni::{Network, NetworkConfig};
use coracle_cri::{Runtime, RuntimeConfig};
use coracle_images::{Images, ImagesConfig};
use ipnetwork::IpNetwork;

use crate::lock::Lock;

/// Flags of `coracle runtime`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Where to listen
    #[arg(long, value_name = "unix://PATH", default_value = "unix:///run/coracle/cri.sock")]
    listen: String,
    /// What outlives a boot: images and the containers' writable layers
    #[arg(long, value_name = "DIR", default_value = "/var/lib/coracle")]
    root: PathBuf,
    /// What goes with a boot: records and sockets
    #[arg(long, value_name = "DIR", default_value = "/run/coracle")]
    state: PathBuf,
    /// Network configuration lists (CNI); without it, the built-in bridge network
    #[arg(long, value_name = "DIR")]
    cni_conf_dir: Option<PathBuf>,
    /// Registry mirrors, a folder per host with a hosts.toml, as containerd has them
    #[arg(long, value_name = "DIR")]
    registry_config_dir: Option<PathBuf>,
    /// Addresses of the built-in network's pods; repeat it for a second family
    #[arg(long, value_name = "CIDR", default_value = "10.88.0.0/16")]
    pod_cidr: Vec<IpNetwork>,
    /// The bridge that pods hang on
    #[arg(long, value_name = "NAME", default_value = "coracle0")]
    bridge: String,
    /// The nftables table that is ours
    #[arg(long, value_name = "NAME", default_value = "coracle")]
    nft_table: String,
    /// The cgroup below which all of ours are
    #[arg(long, value_name = "PATH", default_value = "/")]
    cgroup_root: String,
    /// Where streams (exec, attach, port-forward) are served; port 0 chooses one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    stream_listen: std::net::SocketAddr,
}

/// Serves until SIGINT or SIGTERM; containers go on after it.
pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<()> {
    super::require_root()?;
    let socket = arguments.listen.strip_prefix("unix://").unwrap_or(&arguments.listen);
    anyhow::ensure!(socket.starts_with('/'), "--listen wants unix:// and an absolute path, not {socket}");
    let (root, state) = (std::path::absolute(&arguments.root)?, std::path::absolute(&arguments.state)?);
    let _lock = Lock::take(&state)?;
    let mut images = ImagesConfig::new(&root);
    images.registry_config_dir = arguments.registry_config_dir;
    let images = Images::open(images).await.context("cannot open the image store")?;
    let network = Network::open(NetworkConfig {
        conf_dir: arguments.cni_conf_dir,
        state_dir: state.join("cni"),
        bridge: arguments.bridge,
        table: arguments.nft_table,
        mtu: None,
    });
    let network = network.await.context("cannot open the pod network")?;
    if network.ready().is_err() {
        network.set_pod_cidrs(arguments.pod_cidr).await.context("cannot make the pod network")?;
    }
    let streams = tokio::net::TcpListener::bind(arguments.stream_listen)
        .await
        .with_context(|| format!("cannot listen on {}", arguments.stream_listen))?;
    let state_dir = state.clone();
    let config = RuntimeConfig {
        root,
        state,
        cgroup_root: arguments.cgroup_root,
        stream_url: format!("http://{}", streams.local_addr()?),
        ..RuntimeConfig::default()
    };
    let runtime = Runtime::open(config, images.clone(), network).await.context("cannot open the runtime")?;
    let listener = super::listen(socket.as_ref())?;
    let shutdown = super::until_signalled()?;
    let streaming = tokio::spawn(coracle_cri::serve_streams(runtime.clone(), streams, shutdown.clone()));
    let control = {
        let (state, shutdown) = (state_dir, shutdown.clone());
        tokio::spawn(async move { super::control::serve(&state, images, shutdown).await })
    };
    tracing::info!(socket, "serving the container runtime interface");
    let served = runtime.serve(listener, shutdown).await.context("the CRI service stopped");
    streaming.await?;
    control.await??;
    served
}

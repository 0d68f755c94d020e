//! `coracle runtime`: the CRI server alone.

use anyhow::Context;
use coracle_agent::PullActivity;
use coracle_cni::{Network, NetworkConfig};
use coracle_cri::{Runtime, RuntimeConfig};
use coracle_images::Images;

use crate::directories;
use crate::lock::Lock;
use crate::settings;

/// Serves until SIGINT or SIGTERM. Containers keep running.
pub(crate) async fn run(settings: settings::Runtime) -> anyhow::Result<()> {
    super::require_root()?;
    super::raise_open_files();
    directories::prepare(&settings.root, &[directories::RUNTIME_STATE])?;
    directories::prepare(&settings.state, &[directories::RUNTIME_RUN])?;
    Lock::acquire(&settings.state)?.hold();
    let images = settings.image_store.config(&settings.root);
    let images = Images::open(images).await.context("cannot open the image store")?;
    let network = network(&settings).await?;
    let streams = tokio::net::TcpListener::bind(settings.stream_listen)
        .await
        .with_context(|| format!("cannot listen on {}", settings.stream_listen))?;
    let config = RuntimeConfig {
        root: settings.root,
        state: settings.state.clone(),
        cgroup_root: settings.cgroup_root,
        cgroup_driver: settings.cgroup_driver,
        log_max_size: settings.log_max_size,
        log_max_files: settings.log_max_files,
        nri: settings.nri,
        cdi_dirs: settings.cdi_spec_dirs,
        stream_url: format!("http://{}", streams.local_addr()?),
        stream_idle_limit: settings.stream_idle_limit,
        ..RuntimeConfig::default()
    };
    let runtime = Runtime::open(config, images.clone(), network).await.context("cannot open the runtime")?;
    // A runtime without a node has no heartbeats.
    let (_, heartbeats) = tokio::sync::watch::channel(());
    coracle_threads::spawn(super::program_pages::release_when_idle(runtime.changes(), heartbeats));
    let listener = super::listen(&settings.socket)?;
    let shutdown = super::until_signalled()?;
    let streaming = tokio::spawn(coracle_cri::serve_streams(runtime.clone(), streams, shutdown.clone()));
    let control = {
        let (state, shutdown) = (settings.state, shutdown.clone());
        // A runtime without a node evicts no pods.
        let served = super::control::Served::new(images, PullActivity::default());
        tokio::spawn(async move { super::control::serve(&state, served, shutdown).await })
    };
    tracing::info!(socket = %settings.socket.display(), "serving the container runtime interface");
    let served = runtime.serve(listener, shutdown).await.context("the CRI service stopped");
    streaming.await?;
    control.await??;
    super::remove_socket(&settings.socket);
    served
}

/// The network of a configuration list, or the built-in one with these addresses.
async fn network(settings: &settings::Runtime) -> anyhow::Result<Network> {
    let network = Network::open(NetworkConfig {
        conf_dir: settings.cni.conf_dir.clone(),
        bin_dirs: settings.cni.bin_dirs.clone(),
        state_dir: settings.state.join("cni"),
        root_dir: settings.root.join("cni"),
        bridge: settings.bridge.clone(),
        table: settings.nft_table.clone(),
        mtu: settings.mtu,
        served: Vec::new(),
        check_sources: settings.cni.check_sources,
    });
    let network = network.await.context("cannot open the pod network")?;
    network.set_max_connections(settings.cni.max_connections);
    let made = network.set_pod_cidrs(settings.pod_cidrs.clone()).await;
    made.context("cannot make the pod network")?;
    Ok(network)
}

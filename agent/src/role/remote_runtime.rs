//! The node on another container runtime (`coracle agent --container-runtime-endpoint`): the agent alone, with containerd
//! or CRI-O behind the CRI.
//!
//! The runtime stores images, runs containers and attaches them to a network by its own CNI configuration. Settings of
//! these parts are rejected at the start.

use std::sync::Arc;

use anyhow::Context;
use coracle_agent::node::PodNetwork;
use coracle_agent::runtime::{Host, NodeRuntime, Remote, RuntimeError};
use coracle_cri::CgroupDriver;
use coracle_proto::cri;

use super::signals::NodeSignals;
use crate::settings::{Credentials, Node};

/// Runs the node until one of the signals. Pods keep running, unless the machine shuts down.
pub(crate) async fn run(
    mut node: Node,
    endpoint: &str,
    credentials: Credentials,
    client: kube::Client,
    signals: NodeSignals,
) -> anyhow::Result<()> {
    let runtime = Arc::new(Remote::connect(endpoint).await?);
    check_cgroup_driver(&runtime, node.cgroup_driver).await?;
    tracing::info!(
        endpoint,
        "another container runtime runs the pods: its own settings apply to networks, images, registries and NRI"
    );
    tracing::warn!("container logs are not rotated by the agent: the container runtime must do that");
    // The overlay attaches pods through the built-in network, which another runtime does not use.
    node.overlay = None;
    let config = super::node::agent_config(&node, credentials, &signals);
    let network = PodNetwork::of_runtime(Arc::<Remote>::clone(&runtime));
    let runtime = NodeRuntime::remote(runtime);
    coracle_agent::run(config, client, runtime, network, signals.stop).await.context("the agent stopped")
}

/// Checks that the runtime has the same cgroup driver as the agent. The agent makes the cgroup of a pod, and the
/// runtime makes the cgroups of its containers below it.
async fn check_cgroup_driver(runtime: &Remote, ours: CgroupDriver) -> anyhow::Result<()> {
    let theirs = match runtime.runtime_config(cri::RuntimeConfigRequest {}).await {
        Ok(config) => config.linux.map(|linux| linux.cgroup_driver()),
        // containerd before 2.0 does not have this call.
        Err(RuntimeError::Unsupported(_)) => None,
        Err(error) => return Err(error).context("cannot ask the container runtime for its cgroup driver"),
    };
    let (theirs, name) = match theirs {
        None => {
            tracing::warn!(
                "the container runtime does not report its cgroup driver: it must be that of --cgroup-driver"
            );
            return Ok(());
        }
        Some(cri::CgroupDriver::Systemd) => (CgroupDriver::Systemd, "systemd"),
        Some(cri::CgroupDriver::Cgroupfs) => (CgroupDriver::Cgroupfs, "cgroupfs"),
    };
    anyhow::ensure!(
        theirs == ours,
        "the container runtime makes cgroups with {name}: use --cgroup-driver {name}, or change the runtime's setting"
    );
    Ok(())
}

//! Device plugins, drivers of dynamic resource allocation, and the pod resources API.

use std::path::Path;
use std::sync::Arc;

use futures::FutureExt as _;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::config::AgentConfig;
use crate::device_plugins::{DevicePluginConfig, DevicePlugins, sockets};
use crate::kubelet_metrics::KubeletMetrics;
use crate::node::NodeAgent;
use crate::pod::NodeContext;
use crate::pod_resources::PodResources;

/// Reads the records of devices. Also returns a receiver, which gets the uid of a pod when the health of one of its
/// devices changes.
pub(super) fn open_devices(
    config: &AgentConfig,
    agent: &NodeAgent,
    metrics: Arc<KubeletMetrics>,
) -> (DevicePlugins, mpsc::UnboundedReceiver<String>) {
    let devices = DevicePluginConfig {
        sockets: plugin_root(config).join(sockets::DEVICE_PLUGINS),
        records: config.state_dir.join("agent/devices"),
    };
    DevicePlugins::open(devices, &agent.properties().info.boot_id, agent.devices(), metrics)
}

/// Starts the tasks that serve drivers, device plugins and the pod resources API.
pub(super) fn spawn_device_tasks(tasks: &mut JoinSet<()>, node: &Arc<NodeContext>) {
    tasks.spawn(node.dra.clone().run(Arc::new(node.devices.clone())).boxed());
    tasks.spawn(node.devices.clone().run().boxed());
    let (pods, devices, dra) = (node.pods.clone(), node.devices.clone(), node.dra.clone());
    let (managers, metrics) = (node.managers.clone(), Arc::clone(&node.metrics));
    let resources = PodResources { pods, devices, dra, managers, metrics };
    tasks.spawn(resources.serve(plugin_root(&node.config).join(sockets::POD_RESOURCES)).boxed());
}

/// The directory that plugins use as the kubelet's root directory.
fn plugin_root(config: &AgentConfig) -> &Path {
    config.plugin_registry_dir.parent().unwrap_or(&config.state_dir)
}

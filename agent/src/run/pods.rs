//! Tasks that watch the node's pods and run them.

use std::sync::Arc;

use futures::FutureExt as _;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::devices::spawn_device_tasks;
use crate::image_gc::{Collected, ImageGc};
use crate::node::NodeAgent;
use crate::pod::sync::Inputs;
use crate::pod::{self, NodeContext};
use crate::source::{self, Sources};
use crate::system_oom;
use crate::volume::local_cleanup;

/// The pods that other tasks name, by their uids.
pub(super) struct PodSignals {
    pub(super) evicted: mpsc::UnboundedReceiver<String>,
    /// Pods whose devices have changed.
    pub(super) device_changes: mpsc::UnboundedReceiver<String>,
}

/// Watches the node's pods and runs them, with the caches, status writes and garbage collection that they need.
pub(super) fn spawn_pod_tasks(
    tasks: &mut JoinSet<()>,
    node: &Arc<NodeContext>,
    agent: &NodeAgent,
    signals: PodSignals,
) {
    let (changes, received) = mpsc::channel(256);
    let (node_object, pods) = (agent.node(), node.pods.clone());
    let PodSignals { evicted, device_changes } = signals;
    let inputs = Inputs { changes: received, node_object, pods, evicted, device_changes };
    let collected = Collected {
        runtime: Arc::clone(&node.runtime),
        pods: node.pods.clone(),
        recorder: node.recorder.clone(),
        pull_records: Arc::clone(&node.pull_records),
        metrics: Arc::clone(&node.metrics),
    };
    let image_gc = ImageGc::new(node.config.image_gc, collected, node.image_gc.clone());
    let statuses = node.statuses.clone();
    let (client, name) = (node.configs.client().clone(), node.config.node_name.clone());
    let directories = local_cleanup::Directories {
        volumes: node.config.local_volume_dir.clone(),
        pods: node.volumes.pods_dir().to_owned(),
    };
    spawn_device_tasks(tasks, node);
    if let Some(task) = node.managers.task(Arc::clone(&node.runtime)) {
        tasks.spawn(task.boxed());
    }
    tasks.spawn(pod::Eviction::new(Arc::clone(node), agent.heartbeats()).run().boxed());
    tasks.spawn(pod::LimitEviction::new(Arc::clone(node)).run().boxed());
    tasks.spawn(system_oom::run(node.recorder.clone()).boxed());
    tasks.spawn(local_cleanup::run(client, name, directories).boxed());
    tasks.spawn(async move { statuses.run().await }.boxed());
    tasks.spawn(image_gc.run().boxed());
    tasks.spawn(pod::sync::run(Arc::clone(node), inputs).boxed());
    let with_slices = node.config.service_proxy.is_some() || node.config.dns.is_some();
    tasks.spawn(node.services.clone().run(with_slices).boxed());
    tasks.spawn(node.configs.checkpoint().clone().run(node.recorder.many_starts()).boxed());
    tasks.spawn(source::run(sources(node, agent), changes).boxed());
}

/// Inputs of the sources of pods.
fn sources(node: &NodeContext, agent: &NodeAgent) -> Sources {
    Sources {
        client: node.configs.client().clone(),
        health: node.configs.health().clone(),
        node_name: node.config.node_name.clone(),
        node: agent.node(),
        manifests: node.config.static_pods.clone(),
        mirrors: node.statuses.mirrors().clone(),
    }
}

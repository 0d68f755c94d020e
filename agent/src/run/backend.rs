//! State of the handlers of the kubelet API, from the shared state of the pods.

use std::sync::Arc;

use crate::configuration;
use crate::node::{NodeAgent, PodNetwork};
use crate::pod::{self, NodeContext};
use crate::runtime::Streams;
use crate::server::{Access, Backend, ComponentPages, LogWatches};
use crate::volume::ClaimUsage;

pub(super) fn backend(
    node: &Arc<NodeContext>,
    agent: &NodeAgent,
    streams: Arc<dyn Streams>,
    network: PodNetwork,
) -> Backend {
    let config = &node.config;
    Backend {
        pods: Arc::new(node.pods.clone()),
        runtime: Arc::clone(&node.runtime),
        streams,
        access: Arc::new(Access::new(node.configs.client().clone(), &config.node_name)),
        configuration: Arc::new(configuration::shown(config)),
        pages: Arc::new(ComponentPages::new(config.flags.clone())),
        logs: LogWatches::open(),
        ends: Arc::default(),
        metrics: Arc::clone(&node.metrics),
        claims: ClaimUsage::new(config.state_dir.join("pods")),
        identity: config.identity.clone(),
        network: Some(network),
        properties: agent.properties(),
        state_dir: config.state_dir.clone(),
        log_dir: config.pod_log_dir.clone(),
        disk_usages: Some(Arc::new(pod::DiskUsages::new(Arc::clone(node)))),
        cgroups: Some(node.cgroups.clone()),
        dns: config.dns.is_some().then(Arc::default),
    }
}

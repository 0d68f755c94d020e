//! Configurations of the agent's parts, from the configuration of the agent.

use coracle_proto::cri::VersionResponse;

use crate::config::{AgentConfig, Identity};
use crate::dra::DraConfig;
use crate::node::NodeConfig;
use crate::server::{Certificate, ServerConfig};

pub(super) fn server_config(config: &AgentConfig) -> ServerConfig {
    ServerConfig {
        listen: config.kubelet_listen,
        certificate: match &config.identity {
            Identity::Files(files) => Certificate::Files(files.clone()),
            Identity::Joined(membership) => Certificate::Current(membership.serving()),
            Identity::Requested(serving) => Certificate::Current(serving.serving()),
        },
        client_ca: config.client_ca.clone(),
        tls: config.tls.clone(),
        handlers: config.handlers,
    }
}

pub(super) fn node_config(config: &AgentConfig, version: &VersionResponse) -> NodeConfig {
    NodeConfig {
        name: config.node_name.clone(),
        ips: config.node_ips.clone(),
        labels: config.node_labels.clone(),
        taints: config.node_taints.clone(),
        provider_id: config.provider_id.clone(),
        register: config.register_node,
        kubelet_port: config.kubelet_listen.port(),
        max_pods: config.max_pods,
        lease_seconds: config.lease_seconds,
        eviction: config.eviction,
        reserved: [config.system_reserved.clone(), config.kube_reserved.clone()],
        state_dir: config.state_dir.clone(),
        runtime_version: format!("{}://{}", version.runtime_name, version.runtime_version),
        overlay: config.overlay.clone(),
        local_volume_dir: config.local_volume_dir.clone(),
        machine_shutdown: config.machine_shutdown.clone(),
    }
}

pub(super) fn dra_config(config: &AgentConfig) -> DraConfig {
    DraConfig {
        node: config.node_name.clone(),
        registry: config.plugin_registry_dir.clone(),
        records: config.state_dir.join("agent/claims"),
    }
}

//! Configurations of the agent's parts, from the configuration of the agent.

use std::collections::BTreeMap;

use coracle_proto::cri::VersionResponse;
use coracle_values::Quantity;

use crate::cgroup::CgroupConfig;
use crate::config::{AgentConfig, Identity};
use crate::dra::DraConfig;
use crate::node::{MachineProperties, NodeConfig};
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
        has_external_cloud: config.reports.has_external_cloud,
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

pub(super) fn cgroup_config(config: &AgentConfig, properties: &MachineProperties) -> CgroupConfig {
    CgroupConfig {
        root: config.cgroup_root.clone(),
        driver: config.cgroup_driver,
        cpu_millis: properties.cpu_millis(),
        memory: properties.memory_of_pods,
        pod_pids_limit: config.pod_pids_limit,
        reserved_pids: reserved_pids([&config.system_reserved, &config.kube_reserved]),
    }
}

/// Number of processes that are reserved for the system and for the node's own processes.
fn reserved_pids(reserved: [&BTreeMap<String, String>; 2]) -> i64 {
    let amounts = reserved.into_iter().filter_map(|amounts| amounts.get("pid"));
    let amounts = amounts.filter_map(|amount| Quantity::parse(amount).ok());
    amounts.map(Quantity::value).fold(0, i64::saturating_add)
}

pub(super) fn dra_config(config: &AgentConfig) -> DraConfig {
    DraConfig {
        node: config.node_name.clone(),
        registry: config.plugin_registry_dir.clone(),
        records: config.state_dir.join("agent/claims"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_processes_of_the_system_and_of_the_node_are_added() {
        let of = |pids: Option<&str>| -> BTreeMap<String, String> {
            pids.map(|pids| ("pid".to_owned(), pids.to_owned())).into_iter().collect()
        };
        let sum = |system, own| reserved_pids([&of(system), &of(own)]);
        assert_eq!(sum(None, None), 0);
        assert_eq!(sum(Some("1k"), None), 1000);
        assert_eq!(sum(Some("1000"), Some("500")), 1500);
        assert_eq!(sum(Some("9223372036854775807"), Some("1")), i64::MAX);
    }
}

//! Tasks that serve the node's network: the service proxy, DNS, health checks and network policies.

use std::sync::Arc;

use futures::FutureExt as _;
use tokio::task::JoinSet;

use crate::address_announcer::AddressAnnouncer;
use crate::cluster_dns::ClusterDns;
use crate::network_policy::{self, NetworkPolicies};
use crate::node::NodeAgent;
use crate::node_balancer::NodeBalancer;
use crate::node_health;
use crate::overlay_guard;
use crate::pod::{self, NodeContext};
use crate::policy_gate::GateEnd;
use crate::proxy_health;
use crate::service_health::ServiceHealth;
use crate::service_proxy::{NodeProperties, ServiceProxy};

/// Starts the tasks that proxy Services, answer DNS queries of pods and answer health checks of the node. The settings
/// can disable each task. Without the service proxy, a task protects the port of the overlay.
pub(super) fn spawn_service_tasks(
    tasks: &mut JoinSet<()>,
    node: &Arc<NodeContext>,
    agent: &NodeAgent,
    dns_metrics: Arc<coracle_dns::Metrics>,
) {
    let config = &node.config;
    let served_here = config.dns.as_ref().map_or(&[][..], |dns| &dns.addresses);
    let overlay = pod::admit::in_use::overlay_port(config);
    if config.service_proxy.is_none() {
        tasks.spawn(overlay_guard::run(config.tables.services.clone(), overlay, agent.node()).boxed());
    }
    if let Some(settings) = &config.service_proxy {
        let balancer = Arc::new(NodeBalancer::new(Arc::clone(node)));
        tasks.spawn(Arc::clone(&balancer).publish(agent.node()).boxed());
        let proxy = ServiceProxy::new(settings.clone(), &config.node_name, served_here, overlay, balancer);
        let state = proxy.state();
        node.metrics.show_proxy(state.metrics());
        let ranges = settings.node_port_addresses.clone().into();
        let health = ServiceHealth::new(&config.node_name, node.services.clone(), state.clone(), ranges);
        tasks.spawn(health.run().boxed());
        tasks.spawn(proxy_health::serve(settings.healthz, settings.status, state, agent.node()).boxed());
        let properties =
            NodeProperties { object: agent.node(), pod_ranges: agent.ranges(), addresses: agent.ips() };
        tasks.spawn(proxy.run(node.services.clone(), properties).boxed());
        let ranges = &settings.load_balancer_ips;
        let announcer = AddressAnnouncer::new(&config.node_name, ranges, node.services.clone());
        tasks.spawn(announcer.run(agent.node(), agent.renewals()).boxed());
    }
    if let Some(settings) = &config.dns {
        node.services.measure_dns(Arc::clone(&dns_metrics));
        tasks.spawn(node.services.clone().watch_namespaces().boxed());
        let dns = ClusterDns::new(settings.clone(), served_here, &config.cluster_domain, &config.run_dir)
            .with_metrics(dns_metrics);
        tasks.spawn(dns.run(node.services.clone(), agent.node()).boxed());
    }
    if let Some(address) = config.healthz {
        tasks.spawn(node_health::serve(address).boxed());
    }
}

/// Enforces network policies. If the settings disable the enforcement, removes the table and the record of an earlier
/// run.
pub(super) fn spawn_network_policies(
    tasks: &mut JoinSet<()>,
    node: &Arc<NodeContext>,
    requests: Option<GateEnd>,
) {
    match (&node.config.network_policy_table, requests) {
        (Some(table), Some(requests)) => {
            tasks.spawn(NetworkPolicies::new(node, table, requests).run().boxed());
        }
        _ => {
            let (table, record) =
                (node.config.tables.policies.clone(), network_policy::record(&node.config.state_dir));
            tasks.spawn(network_policy::remove(table, record).boxed());
        }
    }
}

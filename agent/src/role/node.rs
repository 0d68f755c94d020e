//! Wiring of a node: images, network, runtime, the CRI socket and the agent. Shared by `up` and `agent`.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Context;
use coracle_agent::node::PodNetwork;
use coracle_agent::runtime::NodeRuntime;
use coracle_agent::{AgentConfig, DnsConfig, PullActivity, TableNames};
use coracle_cni::{Network, NetworkConfig};
use coracle_cri::{Runtime, RuntimeConfig};
use coracle_images::Images;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::signals::NodeSignals;
use crate::settings::{Credentials, Node};

/// The parts of a node, opened.
pub(crate) struct OpenRuntime {
    pub(crate) images: Images,
    pub(crate) network: Network,
    pub(crate) runtime: Runtime,
}

/// Opens images, network and runtime, which recovers running pods. Clients of the CRI socket get URLs at `streams` for
/// exec, attach and port-forward; the kubelet API needs no such address.
pub(crate) async fn open(node: &Node, streams: Option<SocketAddr>) -> anyhow::Result<OpenRuntime> {
    let images = node.images.store.config(&node.dirs.state);
    let images = Images::open(images).await.context("cannot open the image store")?;
    let network = Network::open(NetworkConfig {
        conf_dir: node.cni.conf_dir.clone(),
        bin_dirs: node.cni.bin_dirs.clone(),
        state_dir: node.dirs.run.join("cni"),
        root_dir: node.dirs.state.join("cni"),
        bridge: node.bridge.clone(),
        table: node.nft_table.clone(),
        mtu: node.mtu,
        served: node.dns.served_here(),
        check_sources: node.cni.check_sources,
    });
    let network = network.await.context("cannot open the pod network")?;
    network.set_max_connections(node.cni.max_connections);
    let defaults = RuntimeConfig::default();
    let config = RuntimeConfig {
        root: node.dirs.state.clone(),
        state: node.dirs.run.clone(),
        cgroup_root: node.cgroup_root.clone(),
        cgroup_driver: node.cgroup_driver,
        log_max_size: node.log_max_size,
        nri: node.nri.clone(),
        cdi_dirs: node.cdi_spec_dirs.clone(),
        log_max_files: node.log_max_files,
        stream_idle_limit: node.stream_idle_limit,
        stream_url: streams.map_or(defaults.stream_url, |address| format!("http://{address}")),
        ..defaults
    };
    let runtime =
        Runtime::open(config, images.clone(), network.clone()).await.context("cannot open the runtime")?;
    Ok(OpenRuntime { images, network, runtime })
}

/// Runs the node until one of the signals. Pods keep running, unless the machine shuts down.
pub(crate) async fn run(
    node: Node,
    credentials: Credentials,
    client: kube::Client,
    signals: NodeSignals,
) -> anyhow::Result<()> {
    let shutdown = signals.stop.clone();
    let streams = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
    let streams = streams.context("cannot listen for streams on loopback")?;
    let OpenRuntime { images, network, runtime } = open(&node, Some(streams.local_addr()?)).await?;
    let streaming = tokio::spawn(coracle_cri::serve_streams(runtime.clone(), streams, shutdown.clone()));
    let config = agent_config(&node, credentials, &signals);
    let heartbeats = config.heartbeats.subscribe();
    coracle_threads::spawn(super::program_pages::release_when_idle(runtime.changes(), heartbeats));
    let socket = node.dirs.run.join("cri.sock");
    let listener = super::listen(&socket)?;
    let served = tokio::spawn(runtime.clone().serve(listener, shutdown.clone()));
    let run_dir = node.dirs.run.clone();
    let control = {
        let served = super::control::Served::new(images, config.pulls.clone());
        let shutdown = shutdown.clone();
        tokio::spawn(async move { super::control::serve(&run_dir, served, shutdown).await })
    };
    let agent = coracle_agent::run(
        config,
        client,
        NodeRuntime::in_process(runtime),
        PodNetwork::Cni(network),
        shutdown.clone(),
    );
    let result = agent.await.context("the agent stopped");
    shutdown.cancel();
    served.await?.context("the CRI service stopped")?;
    streaming.await?;
    control.await??;
    super::remove_socket(&socket);
    result
}

pub(super) fn agent_config(node: &Node, credentials: Credentials, signals: &NodeSignals) -> AgentConfig {
    AgentConfig {
        node_name: node.name.clone(),
        state_dir: node.dirs.state.clone(),
        run_dir: node.dirs.run.clone(),
        local_volume_dir: node.local_volume_dir.clone(),
        plugin_registry_dir: node.plugin_registry_dir.clone(),
        pod_log_dir: node.pod_log_dir.clone(),
        static_pods: node.static_pods.clone(),
        cgroup_root: node.cgroup_root.clone(),
        cgroup_driver: node.cgroup_driver,
        kubelet_listen: node.kubelet_listen,
        api_server_port: node.api_server_port,
        healthz: node.healthz,
        node_ips: node.ips.clone(),
        overlay: node.overlay.clone(),
        resolv_conf: node.dns.resolv_conf.clone().unwrap_or_default(),
        max_pods: node.max_pods,
        pods_per_core: node.pods_per_core,
        pod_pids_limit: node.pod_pids_limit,
        pod_policy: node.pod_policy.clone(),
        cluster_dns: node.dns.addresses.clone(),
        service_proxy: node.service_proxy.clone(),
        tables: TableNames {
            services: crate::settings::service_table(&node.nft_table),
            policies: crate::settings::policy_table(&node.nft_table),
        },
        network_policy_table: node.network_policy_table.clone(),
        bridge: node.bridge.clone(),
        dns: dns_config(node),
        cluster_domain: node.dns.domain.clone(),
        register_node: node.register,
        node_labels: node.labels.clone(),
        node_taints: node.taints.clone(),
        provider_id: node.provider_id.clone(),
        reports: node.reports,
        lease_seconds: node.lease_seconds,
        heartbeats: watch::Sender::new(()),
        pulls: PullActivity::default(),
        eviction: node.eviction,
        shutdown_periods: node.shutdown_periods.clone(),
        machine_shutdown: signals.machine.clone(),
        system_reserved: node.system_reserved.clone(),
        kube_reserved: node.kube_reserved.clone(),
        resource_managers: node.resource_managers.clone(),
        identity: credentials.identity,
        client_ca: credentials.client_ca,
        tls: node.serving.tls.clone(),
        handlers: node.serving.handlers,
        image_gc: node.images.gc,
        image_verification: node.images.verification.clone(),
        credential_providers: node.images.credential_providers.clone(),
        flags: node.shown.flags.clone(),
        feature_metrics: Arc::clone(&node.shown.feature_metrics),
    }
}

/// The settings of the node's DNS server. `None` if the node serves no DNS.
fn dns_config(node: &Node) -> Option<DnsConfig> {
    let addresses = node.dns.served_here();
    (!addresses.is_empty()).then(|| DnsConfig {
        addresses,
        resolv_conf: node.dns.resolv_conf.clone().unwrap_or_default(),
        stub_domains: node.dns.stub_domains.clone(),
    })
}

#[cfg(test)]
mod tests {
    use coracle_agent::{CertificateFiles, Identity};

    use super::*;
    use crate::settings::Settings;

    #[test]
    fn the_agent_gets_the_settings_of_a_kubelet_configuration() {
        let settings = Settings::of_kubelet_file(
            "seccompDefault: true\nallowedUnsafeSysctls: [net.core.somaxconn]\ncpuCFSQuota: false\n\
             crashLoopBackOff: {maxContainerRestartPeriod: 30s}\ntlsMinVersion: VersionTLS13\n\
             enableDebuggingHandlers: false\nproviderID: vendor://a\nmaxPods: 7\npodsPerCore: 9\nnodeStatusMaxImages: 3\n\
             eventRecordQPS: 5\nsystemReserved: {pid: \"9\"}\n",
        );
        let files = Identity::Files(CertificateFiles::default());
        let credentials = Credentials { identity: files, client_ca: None };
        let config = agent_config(&settings.node(), credentials, &NodeSignals::default());
        let policy = &config.pod_policy;
        assert!(policy.seccomp_default && !policy.cpu_quota && policy.allowed_sysctls.len() == 1);
        assert_eq!(policy.max_restart_wait.as_secs(), 30);
        assert!(config.tls.requires_tls13 && !config.handlers.debugging && config.handlers.system_log);
        assert_eq!((config.provider_id.as_deref(), config.max_pods), (Some("vendor://a"), 7));
        assert_eq!(config.pods_per_core, 9);
        assert_eq!(config.reports.max_images, Some(3));
        assert_eq!(config.reports.event_rate.map(|rate| rate.per_second.get()), Some(5));
        assert_eq!(config.system_reserved["pid"], "9");
    }
}

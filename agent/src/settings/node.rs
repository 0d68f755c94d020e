//! Settings of a node.

mod checked;
mod directories;
mod dns;
mod images;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZero;
use std::path::PathBuf;

use anyhow::Context;
use coracle_agent::{
    AllowedImages, AllowedSysctl, CpuSet, EvictionThresholds, PodPolicy, ServiceProxyConfig, ShutdownPeriods,
    StaticPodSources,
};
use coracle_images::PinPattern;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Taint;

use super::built_in_runtime::built_in_runtime;
use super::cni::{self, Cni};
use super::eviction;
use super::feature_gates::FeatureGates;
use super::sources::Sources;
use super::table::settings;
use super::value::{
    ByteSize, CountOrAll, GoDuration, IdleTimeout, PathOrOff, Percent, Resources, StubServer, Thresholds,
};
use super::{
    Dirs, Serving, address_or_port, cgroup, image_pull, labels, overlay, pod_policy, reports,
    resource_managers, serving, shutdown, static_pods,
};
use checked::Explicit;
pub(crate) use checked::{Node, ShownSettings};

settings! {
    /// Settings of a node. A node works with the defaults.
    pub(crate) struct NodeSettings = "node";

    /// Directory of the container logs, one subdirectory per pod.
    pod_log_dir: PathBuf = default "/var/log/pods", "DIR";
    /// Directory with the manifests of static pods, or one manifest. The node runs these pods also without a control
    /// plane.
    pod_manifest_path: Option<PathBuf> = unset "", "PATH";
    /// URL with the manifests of further static pods: one Pod or a PodList, in YAML or JSON.
    manifest_url: Option<String> = unset "", "URL";
    /// Headers of the requests to manifest-url: NAME:VALUE.
    manifest_url_header: Vec<String> = default "", "HEADERS";
    /// Interval of the requests to manifest-url, at least one second.
    http_check_frequency: GoDuration = default "20s", "DURATION";
    /// Directory of local volumes: each claim of the storage class local-path gets a subdirectory. Only root can enter it.
    local_volume_dir: Option<PathBuf> = unset "local-volumes in the state directory", "DIR";
    /// Directory in which drivers of dynamic resource allocation register, each by a socket. Device plugins have the directory
    /// device-plugins beside it.
    plugin_registry_dir: Option<PathBuf>
        = unset "/var/lib/kubelet/plugins_registry, or plugins_registry in a state directory that is not the default", "DIR";
    /// Cgroup that contains kubepods.
    cgroup_root: String = default "/", "PATH";
    /// Program that makes cgroups: cgroupfs (the node itself) or systemd.
    cgroup_driver: cgroup::Driver = default "cgroupfs", "DRIVER";
    /// Socket of another container runtime that runs the pods, by the CRI: containerd or CRI-O. Only for `coracle agent`.
    container_runtime_endpoint: Option<String> = unset "the built-in one", "ENDPOINT";
    /// Name of the node.
    node_name: Option<String> = unset "the host's name", "NAME", also "hostname-override";
    /// Addresses of the node; the first one is the primary address.
    node_ip: Vec<IpAddr> = unset "found from the routes", "IP";
    /// Create the Node object if it does not exist.
    register_node: bool = default "true", "BOOL";
    /// Labels of the Node object: key=value.
    node_labels: BTreeMap<String, String> = default "", "LABELS";
    /// Taints of the Node object when the node creates it: key=value:effect.
    register_with_taints: Vec<Taint> = default "", "TAINTS";
    /// external: a cloud controller manager completes the Node object. The node creates it with the taint
    /// node.cloudprovider.kubernetes.io/uninitialized, and keeps the addresses that are in its status.
    cloud_provider: Option<reports::CloudProvider> = unset "", "PROVIDER";
    /// Id of the machine at its cloud provider, for the Node object when the node creates it.
    provider_id: Option<String> = unset "", "ID";
    /// Maximum number of images in the status of the Node object, the largest first; -1: no limit.
    node_status_max_images: CountOrAll = default "50", "COUNT";
    /// Maximum number of requests for events per second on average; 0: no limit. Further events wait.
    event_qps: u32 = default "0", "COUNT";
    /// Maximum number of requests for events at once, if event-qps is set.
    event_burst: NonZero<u32> = default "100", "COUNT";
    /// Address and port of the kubelet API.
    kubelet_listen: Option<SocketAddr> = unset "port 10250 of all addresses", "ADDRESS";
    /// Port of the node's health check (/healthz) at 127.0.0.1, as the kubelet's healthzPort; 0: disabled.
    healthz_port: u16 = default "0", "PORT";
    /// Addresses of the cluster's DNS service, for pods with dnsPolicy ClusterFirst.
    cluster_dns: Vec<IpAddr> = unset "the address with number 10 of the service range, where the node serves DNS itself", "IP";
    /// Serve DNS for pods at the addresses of cluster-dns.
    serve_dns: Option<bool> = unset "true without cluster-dns, false with agent --kubeconfig", "BOOL";
    /// Servers for names below a domain: domain=address[:port]. Several servers of one domain are queried in their
    /// order.
    dns_stub_domains: Vec<StubServer> = default "", "SERVERS";
    /// Proxy Services with nftables. Disable it where kube-proxy or another program proxies them.
    service_proxy: Option<bool> = unset "true, false with agent --kubeconfig", "BOOL";
    /// Enforce NetworkPolicies with nftables. Disable it where the network plugin enforces them.
    network_policy: Option<bool> = unset "true, false with agent --kubeconfig", "BOOL";
    /// Drop packets that pods of the built-in network send from addresses that are not their own (hardware, IP, ARP,
    /// neighbour discovery).
    check_pod_sources: bool = default "true", "BOOL";
    /// Maximum connections that a pod of the built-in network begins and the node tracks at the same time; 0: no limit.
    pod_max_connections: Option<u32> = unset "a quarter of net.netfilter.nf_conntrack_max", "COUNT";
    /// Ranges of addresses that Services may take by externalIPs. Other external IPs are ignored, because a tenant
    /// could take over any address with them.
    service_external_ips: Vec<IpNetwork> = default "", "CIDR";
    /// Ranges of addresses that Services may take by status.loadBalancer. Others are ignored. Empty: all addresses; only
    /// controllers of load balancers may then have the permission to write services/status.
    service_load_balancer_ips: Vec<IpNetwork> = default "", "CIDR";
    /// Ranges of the node's addresses at which Services have node ports. Empty: all addresses but loopback.
    node_port_addresses: Vec<IpNetwork> = default "", "CIDR", also "nodeport-addresses";
    /// Address and port of the service proxy's health checks (/healthz and /livez), as kube-proxy's; port 0: disabled.
    service_proxy_healthz: Option<SocketAddr> = unset "port 10256 of all addresses", "ADDRESS";
    /// Address and port of the service proxy's mode (/proxyMode) and metrics (/metrics); port 0: disabled.
    service_proxy_status: Option<SocketAddr> = unset "127.0.0.1:10249", "ADDRESS";
    /// DNS domain of the cluster.
    cluster_domain: String = default "cluster.local", "DOMAIN";
    /// Resolver configuration of the host, for pods with dnsPolicy Default. Empty: none.
    resolv_conf: PathOrOff = default "/etc/resolv.conf", "FILE";
    /// Directory of network configurations (CNI). Without a configuration, or with an empty path, pods use the built-in
    /// bridge network.
    cni_conf_dir: PathOrOff = default "/etc/cni/net.d", "DIR";
    /// Directories of network plugins (CNI) that are not built in.
    cni_bin_dir: Vec<PathBuf> = default "/opt/cni/bin", "DIR";
    /// Name of the bridge of the built-in network.
    bridge: String = default "coracle0", "NAME";
    /// Name of the node's nftables table. Its tables of Services and NetworkPolicies have the suffixes -services and
    /// -policies.
    nft_table: String = default "coracle", "NAME";
    /// Maximum packet size (MTU) of pods, in bytes.
    mtu: Option<u32> = unset "the MTU of the path to other nodes", "BYTES";
    /// How packets reach the pods of other nodes: vxlan, host-gw (routes; all nodes in one subnet), udp (a tun device) or none.
    overlay: overlay::Overlay = default "vxlan", "BACKEND";
    /// Name of the overlay's interface. Names of further interfaces begin with it.
    overlay_interface: Option<String> = unset "coracle. and the VNI", "NAME";
    /// Network identifier of VXLAN, from 1 to 16777215.
    overlay_vni: u32 = default "1", "VNI";
    /// UDP port of VXLAN.
    overlay_port: u16 = default "8472", "PORT";
    /// UDP port of the overlay on kernels without VXLAN.
    overlay_udp_port: u16 = default "8285", "PORT";
    /// Route packets between nodes of one subnet without VXLAN.
    overlay_direct_routing: bool = default "false", "BOOL";
    /// Number that marks the overlay's routes in the kernel (rtm_protocol), at least 5.
    overlay_route_protocol: u8 = default "67", "NUMBER";
    /// Maximum number of pods.
    max_pods: u32 = default "110", "COUNT";
    /// Maximum number of pods for each CPU, if that is less than max-pods; 0: no limit.
    pods_per_core: u32 = default "0", "COUNT";
    /// Maximum number of processes of a pod; -1: no limit.
    pod_max_pids: i64 = default "-1", "COUNT";
    /// Use the container runtime's default seccomp profile (RuntimeDefault) for containers without a profile. Otherwise
    /// they are unconfined. Running containers keep their profile.
    seccomp_default: bool = default "false", "BOOL";
    /// Sysctls that pods may set in addition to the safe ones: names, or starts of names with * at the end. Possible are
    /// those of namespaces: kernel.shm*, kernel.msg*, kernel.sem, fs.mqueue.* and net.*.
    allowed_unsafe_sysctls: Vec<AllowedSysctl> = default "", "SYSCTLS";
    /// Enforce the CPU limits of containers by quotas. Otherwise a limit only replaces a missing request. Running containers
    /// keep their quota.
    cpu_cfs_quota: bool = default "true", "BOOL";
    /// Maximum wait before a container that crashes repeatedly starts again, from 1s to 5m.
    max_container_restart_period: GoDuration = default "5m", "DURATION";
    /// Resources reserved for the system: cpu, memory and ephemeral-storage, which pods cannot request, and pid, the number
    /// of processes that all pods together leave free.
    system_reserved: Resources = default "", "RESOURCES";
    /// Resources reserved for the node's own processes, in addition to system-reserved.
    kube_reserved: Resources = default "", "RESOURCES";
    /// CPUs that no container gets exclusively, such as 0-1,8. Their number replaces cpu in system-reserved and kube-reserved.
    reserved_cpus: Option<CpuSet> = unset "the lowest ones, as many as the reserved cpu", "CPUS";
    /// Exclusive CPUs for containers of Guaranteed pods that request whole CPUs: none or static. static needs reserved
    /// cpu. Before a change, drain the node and delete cpu_manager_state in the state directory.
    cpu_manager_policy: resource_managers::CpuPolicy = default "none", "POLICY";
    /// Options of the policy static, each true or false: full-pcpus-only, strict-cpu-reservation,
    /// prefer-align-cpus-by-uncorecache, distribute-cpus-across-numa; with the feature gate
    /// CPUManagerPolicyAlphaOptions also align-by-socket and distribute-cpus-across-cores.
    cpu_manager_policy_options: BTreeMap<String, String> = default "", "OPTIONS";
    /// Memory from as few NUMA nodes as possible for containers of Guaranteed pods: None or Static. Static needs
    /// reserved-memory. Before a change, drain the node and delete memory_manager_state in the state directory.
    memory_manager_policy: resource_managers::MemoryPolicy = default "None", "POLICY";
    /// Memory reserved for the system by NUMA node, for the policy Static, such as 0:memory=1Gi. The sum must equal the
    /// memory in system-reserved, kube-reserved and eviction-hard.
    reserved_memory: resource_managers::MemoryReservations = default "", "MEMORY";
    /// How strictly CPUs, memory and devices must be on the same NUMA nodes: none, best-effort, restricted or
    /// single-numa-node.
    topology_manager_policy: resource_managers::TopologyPolicy = default "none", "POLICY";
    /// What the topology manager aligns: each container, or all containers of a pod.
    topology_manager_scope: resource_managers::TopologyScope = default "container", "SCOPE";
    /// Options of the topology manager: prefer-closest-numa-nodes (true or false), max-allowable-numa-nodes (8 or
    /// more).
    topology_manager_policy_options: BTreeMap<String, String> = default "", "OPTIONS";
    /// Thresholds below which the node is under pressure, gets no new pods and evicts pods. The signals are
    /// memory.available, nodefs.available, nodefs.inodesFree and pid.available, each with a quantity or a percentage. A
    /// signal that is not listed has no threshold. Images are on nodefs: of imagefs.available and nodefs.available, and of
    /// both signals inodesFree, the larger threshold applies.
    eviction_hard: Option<Thresholds>
        = unset "memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<5%,pid.available<5%", "THRESHOLDS";
    /// Keep the default thresholds of the signals that eviction-hard does not list.
    merge_default_eviction_settings: bool = default "false", "BOOL";
    /// Thresholds below which the node is under pressure, and evicts pods after the time in eviction-soft-grace-period. The
    /// signals are those of eviction-hard.
    eviction_soft: Option<Thresholds> = unset "", "THRESHOLDS";
    /// Time for which a threshold of eviction-soft must be crossed before pods are evicted, such as
    /// memory.available=90s.
    eviction_soft_grace_period: BTreeMap<String, String> = default "", "DURATIONS";
    /// Maximum grace period in seconds of pods that are evicted for eviction-soft.
    eviction_max_pod_grace_period: u32 = default "0", "SECONDS";
    /// Amounts above the thresholds of eviction-hard that must be available before a shortage ends: a quantity or a
    /// percentage for each signal, such as memory.available=200Mi.
    eviction_minimum_reclaim: Option<Thresholds> = unset "", "AMOUNTS";
    /// Time for which the node stays under pressure after a resource was last short.
    eviction_pressure_transition_period: GoDuration = default "5m", "DURATION";
    /// Time that pods have to end when the machine shuts down, including the time of critical pods; 0: the node does not end
    /// pods.
    shutdown_grace_period: GoDuration = default "0", "DURATION";
    /// Part of shutdown-grace-period in which critical pods end, after all other pods.
    shutdown_grace_period_critical_pods: GoDuration = default "0", "DURATION";
    /// Seconds that groups of pods have to end when the machine shuts down, by the lowest priority of the group, such as
    /// 0=60,1000=20. The group with the lowest priority ends first. Not together with shutdown-grace-period.
    shutdown_grace_period_by_pod_priority: BTreeMap<String, String> = default "", "SECONDS";
    /// Percentage of nodefs.available in the default of eviction-hard.
    disk_free_percent: Option<Percent> = unset "10", "PERCENT";
    /// Duration of the node's lease in seconds. The node renews it every quarter of this duration.
    node_lease_seconds: NonZero<u16> = default "40", "SECONDS";
    /// Disk usage in percent at which the node removes unused images; 100: never.
    image_gc_high_threshold: Percent = default "85", "PERCENT";
    /// Disk usage in percent at which the removal of images stops. The longest unused images are removed first.
    image_gc_low_threshold: Option<Percent> = unset "80, or 5 less than image-gc-high-threshold", "PERCENT";
    /// Minimum time between the pull of an image and its removal.
    image_minimum_gc_age: GoDuration = default "2m", "DURATION";
    /// Age at which an unused image is removed although the disk has room; 0: never.
    image_maximum_gc_age: GoDuration = default "0", "DURATION";
    /// Images that are never removed as unused: a name, a prefix and *, or a word between two *.
    pinned_image: Vec<PinPattern> = default "", "PATTERN";
    /// Directory of registry mirrors: a subdirectory per host with a hosts.toml, as for containerd.
    registry_config_dir: Option<PathBuf> = unset "", "DIR";
    /// Time without progress after which the pull of an image fails, at least one second.
    image_pull_progress_timeout: GoDuration = default "5m", "DURATION";
    /// Maximum number of layers of one image that are fetched at the same time. Values above 8 have no effect.
    max_concurrent_downloads: NonZero<u16> = default "3", "COUNT";
    /// Maximum size of an unpacked layer of an image.
    max_layer_size: ByteSize = default "64Gi", "BYTES";
    /// Maximum number of files, directories and other entries of a layer of an image.
    max_layer_entries: NonZero<u32> = default "4000000", "COUNT";
    /// Pull one image at a time. By default, images are pulled at the same time.
    serialize_image_pulls: bool = default "false", "BOOL";
    /// Maximum number of images that are pulled at the same time. More than 1 only without serialize-image-pulls.
    max_parallel_image_pulls: Option<NonZero<u32>> = unset "no limit", "COUNT";
    /// Maximum number of image pulls per second on average; 0: no limit. A pull above the limit fails, and is repeated after
    /// a back-off.
    registry_qps: u32 = default "0", "COUNT";
    /// Maximum number of image pulls at once, if registry-qps is set.
    registry_burst: NonZero<u32> = default "10", "COUNT";
    /// Images of the store that a pod may use without a verification of its pull secrets. NeverVerify: all.
    /// NeverVerifyPreloadedImages: those that the node did not pull. NeverVerifyAllowlistedImages: those of
    /// preloaded-images-verification-allowlist. AlwaysVerify: none.
    image_pull_credentials_verification_policy: image_pull::Policy
        = default "NeverVerifyPreloadedImages", "POLICY";
    /// Names of images with registry and without tag and digest (docker.io/library/busybox), or prefixes of such names that
    /// end with /*, for NeverVerifyAllowlistedImages.
    preloaded_images_verification_allowlist: Vec<AllowedImages> = default "", "IMAGES";
    /// CredentialProviderConfig of the kubelet: programs that provide credentials of registries.
    image_credential_provider_config: Option<PathBuf> = unset "", "FILE";
    /// Directory of the programs of image-credential-provider-config.
    image_credential_provider_bin_dir: Option<PathBuf> = unset "", "DIR";
    /// Socket for NRI plugins. Empty: none.
    nri_socket: Option<PathOrOff> = unset "/var/run/nri/nri.sock", "PATH";
    /// Directory of NRI plugins that start with the runtime. Empty: none.
    nri_plugin_dir: Option<PathOrOff> = unset "/opt/nri/plugins", "DIR";
    /// Directory of the configurations of NRI plugins.
    nri_plugin_config_dir: PathBuf = default "/etc/nri/conf.d", "DIR";
    /// Time in which an NRI plugin must register, and receive all pods.
    nri_plugin_registration_timeout: GoDuration = default "5s", "DURATION";
    /// Time in which an NRI plugin must answer any other request.
    nri_plugin_request_timeout: GoDuration = default "2s", "DURATION";
    /// Directories of device descriptions (CDI). A later directory takes precedence.
    cdi_spec_dir: Vec<PathBuf> = default "/etc/cdi,/var/run/cdi", "DIR";
    /// Size at which a container's log file is rotated.
    container_log_max_size: ByteSize = default "10Mi", "BYTES", also "log-max-size";
    /// Maximum number of log files of a container.
    container_log_max_files: u32 = default "5", "COUNT", also "log-max-files";
    /// Time after which an idle stream (exec, attach, port-forward) is closed: a duration or seconds; 0: never.
    streaming_connection_idle_timeout: IdleTimeout = default "4h", "DURATION", also "stream-idle-seconds";
    /// Certificate of the kubelet API (only with `agent --kubeconfig`).
    tls_cert_file: Option<PathBuf> = unset "a self-signed certificate in cert-dir", "FILE";
    /// Private key of tls-cert-file.
    tls_private_key_file: Option<PathBuf> = unset "", "FILE";
    /// CA that signs the client certificates of the kubelet API (only with `agent --kubeconfig`).
    client_ca_file: Option<PathBuf> = unset "client certificates are refused", "FILE";
    /// Request the certificate of the kubelet API from the cluster, and renew it (only with `agent --kubeconfig`).
    server_tls_bootstrap: bool = default "false", "BOOL";
    /// Require that the node's client certificate is renewed before its end. A joined node always renews it. With
    /// `agent --kubeconfig`, true is refused.
    rotate_certificates: bool = default "false", "BOOL";
    /// Minimum version of TLS of the kubelet API: VersionTLS12 or VersionTLS13.
    kubelet_tls_min_version: serving::TlsVersion = default "VersionTLS12", "VERSION";
    /// Cipher suites of the kubelet API for TLS 1.2, by their names in Go. Those of TLS 1.3 are always in use.
    kubelet_tls_cipher_suites: Vec<String> = unset "all supported ones", "SUITE";
    /// Serve logs, exec, attach, port-forward, checkpoints and settings of the kubelet API. Without them, kubectl logs and
    /// exec do not work on this node.
    enable_debugging_handlers: bool = default "true", "BOOL";
    /// Serve the logs of the node below /logs/ of the kubelet API.
    enable_system_log_handler: bool = default "true", "BOOL";
    /// Directory of the certificates that the node makes or requests.
    cert_dir: Option<PathBuf> = unset "agent/pki in the state directory", "DIR";
}

/// Default address of the service proxy's mode and metrics, as kube-proxy's.
const PROXY_STATUS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);

/// Checked settings of pods. `None` for each invalid part.
struct PodSettings {
    static_pods: Option<StaticPodSources>,
    /// Periods of pods at a shutdown.
    shutdown_periods: Option<ShutdownPeriods>,
    eviction: Option<EvictionThresholds>,
    policy: Option<PodPolicy>,
}

// === impl NodeSettings ===

built_in_runtime!(NodeSettings);

impl NodeSettings {
    /// Checks settings that depend on each other. All errors are collected in `sources`. None after an error.
    pub(super) fn decide(self, dirs: &Dirs, gates: &FeatureGates, sources: &mut Sources) -> Option<Node> {
        let name = sources.take(self.node_name.clone().map_or_else(host_name, Ok));
        let overlay = name.as_deref().and_then(|name| sources.take(overlay::decide(&self, name)));
        let (images, dns, explicit) = (self.images(sources), self.dns(), self.explicit());
        let serving = sources.take(Serving::decide(&self, &dirs.state));
        let pods = self.pods(sources);
        let directories = self.directories(&dirs.state, sources);
        let resource_managers = sources.take(resource_managers::decide(&self, gates));
        let reserved = resource_managers::reserved(&self);
        let nri = sources.take(self.nri(&dirs.run));
        let directories = directories?;
        Some(Node {
            dirs: dirs.clone(),
            cni: self.cni(),
            nri: nri?,
            reports: reports::decide(&self),
            service_proxy: self.service_proxy.unwrap_or(true).then(|| self.proxy()),
            local_volume_dir: directories.local_volumes,
            plugin_registry_dir: directories.plugin_registry,
            pod_log_dir: directories.pod_logs,
            static_pods: pods.static_pods?,
            cgroup_root: self.cgroup_root,
            cgroup_driver: self.cgroup_driver.into(),
            name: name?,
            ips: self.node_ip,
            register: self.register_node,
            labels: sources.take(labels::check(&self.node_labels)).map(|()| self.node_labels)?,
            taints: self.register_with_taints,
            provider_id: self.provider_id,
            kubelet_listen: address_or_port(self.kubelet_listen, 10250),
            api_server_port: None,
            healthz: served(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), self.healthz_port)),
            dns,
            explicit,
            network_policy_table: self.network_policy.unwrap_or(true).then(|| policy_table(&self.nft_table)),
            bridge: self.bridge,
            nft_table: self.nft_table,
            mtu: self.mtu,
            overlay: overlay?,
            max_pods: pod_policy::max_pods(self.max_pods, self.pods_per_core, pod_policy::cpus()),
            pods_per_core: self.pods_per_core,
            pod_pids_limit: Some(self.pod_max_pids).filter(|limit| *limit > 0),
            pod_policy: pods.policy?,
            system_reserved: reserved.system,
            kube_reserved: reserved.own,
            resource_managers: resource_managers?,
            eviction: pods.eviction?,
            shutdown_periods: pods.shutdown_periods?,
            lease_seconds: self.node_lease_seconds.get(),
            images: images?,
            cdi_spec_dirs: self.cdi_spec_dir,
            log_max_size: self.container_log_max_size.0,
            log_max_files: self.container_log_max_files,
            stream_idle_limit: self.streaming_connection_idle_timeout.0,
            serving: serving?,
            shown: ShownSettings::default(),
        })
    }

    fn pods(&self, sources: &mut Sources) -> PodSettings {
        PodSettings {
            static_pods: sources.take(static_pods::decide(self)),
            shutdown_periods: sources.take(shutdown::decide(self)),
            eviction: sources.take(eviction::decide(self)),
            policy: sources.take(pod_policy::decide(self)),
        }
    }

    fn explicit(&self) -> Explicit {
        Explicit {
            serve_dns: self.serve_dns.is_some(),
            service_proxy: self.service_proxy.is_some(),
            network_policy: self.network_policy.is_some(),
        }
    }

    fn cni(&self) -> Cni {
        let (conf_dir, bin_dirs) = (self.cni_conf_dir.clone(), self.cni_bin_dir.clone());
        cni::decide(conf_dir, bin_dirs, self.check_pod_sources, self.pod_max_connections)
    }

    pub(super) fn proxy(&self) -> ServiceProxyConfig {
        ServiceProxyConfig {
            table: service_table(&self.nft_table),
            external_ips: self.service_external_ips.clone(),
            load_balancer_ips: self.service_load_balancer_ips.clone(),
            node_port_addresses: self.node_port_addresses.clone(),
            healthz: served(address_or_port(self.service_proxy_healthz, 10256)),
            status: served(self.service_proxy_status.unwrap_or(PROXY_STATUS)),
        }
    }
}

/// The address, unless its port is 0.
fn served(address: SocketAddr) -> Option<SocketAddr> {
    Some(address).filter(|address| address.port() != 0)
}

/// Name of the nftables table of Services, beside the node's own table.
pub(crate) fn service_table(nft_table: &str) -> String {
    format!("{nft_table}-services")
}

/// Name of the nftables table of NetworkPolicies, beside the node's own table.
pub(crate) fn policy_table(nft_table: &str) -> String {
    format!("{nft_table}-policies")
}

fn host_name() -> anyhow::Result<String> {
    let name = nix::unistd::gethostname().context("cannot read the host's name; use --node-name")?;
    Ok(name.to_string_lossy().to_lowercase())
}

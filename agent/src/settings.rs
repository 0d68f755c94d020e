//! Flags and the configuration file: both have the same names, and a flag overrides the file.

mod cgroup;
mod cni;
mod control_plane;
mod image_gc;
mod log_line;
mod nri;
mod overlay;
mod ranges;
mod runtime;
mod serving;

use std::io::IsTerminal;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use cni::Cni;
use coracle_agent::{Identity, ImageGcPolicy};
use coracle_cri::{CgroupDriver, NriSettings};
use coracle_images::PinPattern;
use serde::Deserialize;

pub(crate) use control_plane::{ControlPlane, ControlPlaneSettings};
pub(crate) use runtime::{Runtime, RuntimeSettings};
pub(crate) use serving::Serving;

/// Where the configuration is looked for when no `--config` names one.
const DEFAULT_FILE: &str = "/etc/coracle/config.toml";
/// Maximum size of the configuration in bytes.
const FILE_MAX: u64 = 1 << 20;

/// How to log.
#[derive(Args)]
pub(crate) struct LogSettings {
    /// What to log: error, warn, info, debug, trace, or a filter such as `info,coracle_cri=debug`.
    #[arg(long, global = true, default_value = "info", value_name = "LEVEL", help_heading = "Log")]
    log_level: String,
    /// How to log.
    #[arg(long, global = true, default_value = "text", value_name = "FORMAT", help_heading = "Log")]
    log_format: LogFormat,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

/// Where things are kept, and the file with all other settings.
#[derive(Args, Clone, Default)]
pub(crate) struct Places {
    /// Configuration file (TOML, keys as the flags, in the tables node and control-plane) [default: /etc/coracle/config.toml if there]
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    /// What outlives a boot: images, volumes, pods, store, keys [default: /var/lib/coracle]
    #[arg(long, value_name = "DIR", global = true)]
    state_dir: Option<PathBuf>,
    /// What goes with a boot: sockets and records [default: /run/coracle]
    #[arg(long, value_name = "DIR", global = true)]
    run_dir: Option<PathBuf>,
}

/// The configuration file.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct File {
    state_dir: Option<PathBuf>,
    run_dir: Option<PathBuf>,
    node: NodeSettings,
    control_plane: ControlPlaneSettings,
    runtime: RuntimeSettings,
}

/// Settings of a node. Every one is optional: the defaults make a working node.
#[derive(Args, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct NodeSettings {
    /// Container logs, a directory per pod [default: /var/log/pods]
    #[arg(long, value_name = "DIR")]
    pod_log_dir: Option<PathBuf>,
    /// The cgroup that holds kubepods [default: /]
    #[arg(long, value_name = "PATH")]
    cgroup_root: Option<String>,
    /// Who makes cgroups [default: cgroupfs]
    #[arg(long, value_name = "DRIVER")]
    cgroup_driver: Option<cgroup::Driver>,
    /// The node's name [default: the host's name]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// An address of the node, may be repeated [default: found from the routes]
    #[arg(long, value_name = "IP")]
    node_ip: Vec<IpAddr>,
    /// Where the kubelet API listens [default: port 10250 of every address]
    #[arg(long, value_name = "ADDRESS")]
    kubelet_listen: Option<SocketAddr>,
    /// Network configuration lists (CNI), empty = none; without one, the built-in bridge network
    /// [default: /etc/cni/net.d]
    #[arg(long, value_name = "DIR")]
    cni_conf_dir: Option<String>,
    /// Network plugins that are not built in (CNI), may be repeated [default: /opt/cni/bin]
    #[arg(long, value_name = "DIR")]
    cni_bin_dir: Vec<PathBuf>,
    /// The bridge that pods hang on [default: coracle0]
    #[arg(long, value_name = "NAME")]
    bridge: Option<String>,
    /// The nftables table that is ours [default: coracle]
    #[arg(long, value_name = "NAME")]
    nft_table: Option<String>,
    /// Most bytes of a packet of pods [default: what the way to other nodes leaves]
    #[arg(long, value_name = "BYTES")]
    mtu: Option<u32>,
    /// How pods of other nodes are reached [default: vxlan]
    #[arg(long, value_name = "HOW")]
    overlay: Option<overlay::Overlay>,
    /// The overlay's interface; of others that it needs this is the head [default: coracle. and the VNI]
    #[arg(long, value_name = "NAME")]
    overlay_interface: Option<String>,
    /// Number of the VXLAN [default: 1]
    #[arg(long, value_name = "VNI")]
    overlay_vni: Option<u32>,
    /// UDP port of the VXLAN [default: 8472]
    #[arg(long, value_name = "PORT")]
    overlay_port: Option<u16>,
    /// UDP port of the overlay without VXLAN [default: 8285]
    #[arg(long, value_name = "PORT")]
    overlay_udp_port: Option<u16>,
    /// Whether nodes of one subnet route to each other without VXLAN [default: false]
    #[arg(long, value_name = "BOOL")]
    overlay_direct_routing: Option<bool>,
    /// Number by which the overlay's routes are known in the kernel (rtm_protocol) [default: 67]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(5..))]
    overlay_route_protocol: Option<u8>,
    /// Resolver configuration given to pods [default: /etc/resolv.conf]
    #[arg(long, value_name = "FILE")]
    resolv_conf: Option<PathBuf>,
    /// Pods that the node takes [default: 110]
    #[arg(long, value_name = "COUNT")]
    max_pods: Option<u32>,
    /// Seconds without a word after which the node is given up; it says one four times as often [default: 40]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u16).range(1..))]
    node_lease_seconds: Option<u16>,
    /// Percent of the state directory's disk that are free, or the node takes no pods [default: 10]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    disk_free_percent: Option<u8>,
    /// Percent of the images' disk in use from which on unused images are removed; 100 = never [default: 85]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    image_gc_high_threshold: Option<u8>,
    /// Percent in use down to which they are removed, those longest unused first [default: 80]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    image_gc_low_threshold: Option<u8>,
    /// How long an image is kept after it was pulled [default: 2m]
    #[arg(long, value_name = "DURATION")]
    image_minimum_gc_age: Option<image_gc::Age>,
    /// How long an unused image is kept though there is room; 0 = for ever [default: 0]
    #[arg(long, value_name = "DURATION")]
    image_maximum_gc_age: Option<image_gc::Age>,
    /// Images that are never removed as unused, may be repeated: a name, its beginning and *, or a word between two *
    #[arg(long, value_name = "PATTERN")]
    pinned_image: Vec<PinPattern>,
    /// Registry mirrors, a folder per host with a hosts.toml, as containerd has them
    #[arg(long, value_name = "DIR")]
    registry_config_dir: Option<PathBuf>,
    /// Programs that know registries' credentials: the kubelet's CredentialProviderConfig
    #[arg(long, value_name = "FILE")]
    image_credential_provider_config: Option<PathBuf>,
    /// The directory with these programs
    #[arg(long, value_name = "DIR")]
    image_credential_provider_bin_dir: Option<PathBuf>,
    /// Where NRI plugins connect; empty = none may [default: /var/run/nri/nri.sock]
    #[arg(long, value_name = "PATH", value_parser = nri::place())]
    nri_socket: Option<PathBuf>,
    /// NRI plugins that are started with the runtime; empty = none [default: /opt/nri/plugins]
    #[arg(long, value_name = "DIR", value_parser = nri::place())]
    nri_plugin_dir: Option<PathBuf>,
    /// Configurations of those plugins [default: /etc/nri/conf.d]
    #[arg(long, value_name = "DIR")]
    nri_plugin_config_dir: Option<PathBuf>,
    /// Bytes of one container log file before it is rotated [default: 10485760]
    #[arg(long, value_name = "BYTES")]
    log_max_size: Option<u64>,
    /// Files kept of one container's log [default: 5]
    #[arg(long, value_name = "COUNT")]
    log_max_files: Option<u32>,
    /// Seconds after which a stream (exec, attach, port-forward) on which nothing moves is given up; 0 = never
    /// [default: 14400]
    #[arg(long, value_name = "SECONDS")]
    stream_idle_seconds: Option<u32>,
    /// Certificate of the kubelet API (`agent --kubeconfig` only) [default: one that the node makes, self-signed]
    #[arg(long, value_name = "FILE")]
    tls_cert_file: Option<PathBuf>,
    /// Key of that certificate
    #[arg(long, value_name = "FILE")]
    tls_private_key_file: Option<PathBuf>,
    /// CA whose client certificates may call the kubelet API (`agent --kubeconfig` only) [default: none may]
    #[arg(long, value_name = "FILE")]
    client_ca_file: Option<PathBuf>,
    /// Request the certificate of the kubelet API from the cluster, and renew it (`agent --kubeconfig` only)
    /// [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    server_tls_bootstrap: Option<bool>,
    /// Certificates that the node makes or requests [default: agent/pki in the state directory]
    #[arg(long, value_name = "DIR")]
    cert_dir: Option<PathBuf>,
}

/// Where a role keeps its things, all decided.
#[derive(Clone, Debug)]
pub(crate) struct Dirs {
    pub(crate) state: PathBuf,
    pub(crate) run: PathBuf,
}

/// A node's settings, all decided.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) dirs: Dirs,
    pub(crate) pod_log_dir: PathBuf,
    pub(crate) cgroup_root: String,
    pub(crate) cgroup_driver: CgroupDriver,
    pub(crate) name: String,
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) kubelet_listen: SocketAddr,
    pub(crate) cni: Cni,
    pub(crate) bridge: String,
    pub(crate) nft_table: String,
    pub(crate) mtu: Option<u32>,
    pub(crate) overlay: Option<coracle_cni::OverlayConfig>,
    pub(crate) resolv_conf: PathBuf,
    pub(crate) max_pods: u32,
    pub(crate) lease_seconds: u16,
    pub(crate) disk_free_percent: u8,
    pub(crate) image_gc: ImageGcPolicy,
    pub(crate) pinned_images: Vec<PinPattern>,
    pub(crate) registry_config_dir: Option<PathBuf>,
    pub(crate) credential_providers: Option<(PathBuf, PathBuf)>,
    pub(crate) nri: NriSettings,
    pub(crate) log_max_size: u64,
    pub(crate) log_max_files: u32,
    pub(crate) stream_idle_limit: Option<Duration>,
    pub(crate) serving: Serving,
}

/// What an agent on its own serves and verifies with.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    pub(crate) identity: Identity,
    pub(crate) client_ca: Option<PathBuf>,
}

/// All settings of one start: flags over file over defaults.
pub(crate) struct Settings {
    dirs: Dirs,
    node: NodeSettings,
    plane: ControlPlaneSettings,
}

// === impl LogSettings ===

impl LogSettings {
    /// Sends the log to standard error from now on.
    pub(crate) fn start(&self) -> anyhow::Result<()> {
        let filter = tracing_subscriber::EnvFilter::try_new(directives(&self.log_level))
            .with_context(|| format!("--log-level {} is not a level or filter", self.log_level))?;
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| log_line::LogLine);
        match self.log_format {
            LogFormat::Text => log.with_target(false).with_ansi(std::io::stderr().is_terminal()).init(),
            LogFormat::Json => log.json().init(),
        }
        Ok(())
    }
}

/// The API client tells of every failed request, which whoever asked tells as well, and of each server whose certificate
/// it does not check: a machine that joins checks the cluster by its hash instead, and would seem to check nothing.
fn directives(level: &str) -> String {
    match level {
        "error" | "warn" | "info" => format!("{level},kube_client::client=off"),
        _ => level.to_owned(),
    }
}

// === impl Settings ===

impl Settings {
    /// Reads the file that the flags name, or the default one if it is there, and lays the flags over it.
    pub(crate) fn load(
        places: Places,
        node: NodeSettings,
        plane: ControlPlaneSettings,
    ) -> anyhow::Result<Self> {
        let file = File::find(places.config.as_deref())?;
        let or = |flag: Option<PathBuf>, file, default: &str| flag.or(file).unwrap_or_else(|| default.into());
        Ok(Self {
            dirs: Dirs {
                state: absolute(or(places.state_dir, file.state_dir, "/var/lib/coracle"))?,
                run: absolute(or(places.run_dir, file.run_dir, "/run/coracle"))?,
            },
            node: node.over(file.node),
            plane: plane.over(file.control_plane),
        })
    }

    pub(crate) fn dirs(&self) -> Dirs {
        self.dirs.clone()
    }

    pub(crate) fn node(&self) -> anyhow::Result<Node> {
        let node = self.node.clone();
        let serving = Serving::decide(&self.node, &self.dirs.state)?;
        let providers = (node.image_credential_provider_config, node.image_credential_provider_bin_dir);
        let credential_providers = match providers {
            (Some(file), Some(programs)) => Some((file, programs)),
            (None, None) => None,
            _ => anyhow::bail!(
                "image-credential-provider-config and image-credential-provider-bin-dir go together: set both or none"
            ),
        };
        let name = node.node_name.map_or_else(host_name, Ok)?;
        let asked = overlay::Asked {
            overlay: node.overlay,
            vni: node.overlay_vni,
            port: node.overlay_port,
            udp_port: node.overlay_udp_port,
            direct_routing: node.overlay_direct_routing,
            route_protocol: node.overlay_route_protocol,
        };
        Ok(Node {
            overlay: overlay::decide(asked, (node.overlay_interface, &name), node.mtu)?,
            credential_providers,
            dirs: self.dirs(),
            pod_log_dir: absolute(node.pod_log_dir.unwrap_or_else(|| "/var/log/pods".into()))?,
            cgroup_root: node.cgroup_root.unwrap_or_else(|| "/".into()),
            cgroup_driver: cgroup::decide(node.cgroup_driver),
            name,
            ips: node.node_ip,
            kubelet_listen: node.kubelet_listen.unwrap_or_else(|| every_address(10250)),
            cni: cni::decide(node.cni_conf_dir, node.cni_bin_dir),
            bridge: node.bridge.unwrap_or_else(|| "coracle0".into()),
            nft_table: node.nft_table.unwrap_or_else(|| "coracle".into()),
            mtu: node.mtu,
            resolv_conf: node.resolv_conf.unwrap_or_else(|| "/etc/resolv.conf".into()),
            max_pods: node.max_pods.unwrap_or(110),
            lease_seconds: node.node_lease_seconds.unwrap_or(40),
            disk_free_percent: node.disk_free_percent.unwrap_or(10),
            image_gc: image_gc::decide(
                (node.image_gc_high_threshold, node.image_gc_low_threshold),
                (node.image_minimum_gc_age, node.image_maximum_gc_age),
            )?,
            pinned_images: node.pinned_image,
            registry_config_dir: node.registry_config_dir,
            nri: nri::decide(
                (node.nri_socket, node.nri_plugin_dir, node.nri_plugin_config_dir),
                &self.dirs.run,
            ),
            log_max_size: node.log_max_size.unwrap_or(10 << 20),
            log_max_files: node.log_max_files.unwrap_or(5),
            stream_idle_limit: stream_idle_limit(node.stream_idle_seconds),
            serving,
        })
    }

    pub(crate) fn control_plane(&self) -> anyhow::Result<ControlPlane> {
        self.plane.clone().decide(self.dirs())
    }
}

impl NodeSettings {
    fn over(self, file: Self) -> Self {
        Self {
            pod_log_dir: self.pod_log_dir.or(file.pod_log_dir),
            cgroup_root: self.cgroup_root.or(file.cgroup_root),
            cgroup_driver: self.cgroup_driver.or(file.cgroup_driver),
            node_name: self.node_name.or(file.node_name),
            node_ip: if self.node_ip.is_empty() { file.node_ip } else { self.node_ip },
            kubelet_listen: self.kubelet_listen.or(file.kubelet_listen),
            cni_conf_dir: self.cni_conf_dir.or(file.cni_conf_dir),
            cni_bin_dir: if self.cni_bin_dir.is_empty() { file.cni_bin_dir } else { self.cni_bin_dir },
            bridge: self.bridge.or(file.bridge),
            nft_table: self.nft_table.or(file.nft_table),
            mtu: self.mtu.or(file.mtu),
            overlay: self.overlay.or(file.overlay),
            overlay_interface: self.overlay_interface.or(file.overlay_interface),
            overlay_vni: self.overlay_vni.or(file.overlay_vni),
            overlay_port: self.overlay_port.or(file.overlay_port),
            overlay_udp_port: self.overlay_udp_port.or(file.overlay_udp_port),
            overlay_direct_routing: self.overlay_direct_routing.or(file.overlay_direct_routing),
            overlay_route_protocol: self.overlay_route_protocol.or(file.overlay_route_protocol),
            resolv_conf: self.resolv_conf.or(file.resolv_conf),
            max_pods: self.max_pods.or(file.max_pods),
            node_lease_seconds: self.node_lease_seconds.or(file.node_lease_seconds),
            disk_free_percent: self.disk_free_percent.or(file.disk_free_percent),
            image_gc_high_threshold: self.image_gc_high_threshold.or(file.image_gc_high_threshold),
            image_gc_low_threshold: self.image_gc_low_threshold.or(file.image_gc_low_threshold),
            image_minimum_gc_age: self.image_minimum_gc_age.or(file.image_minimum_gc_age),
            image_maximum_gc_age: self.image_maximum_gc_age.or(file.image_maximum_gc_age),
            pinned_image: if self.pinned_image.is_empty() { file.pinned_image } else { self.pinned_image },
            registry_config_dir: self.registry_config_dir.or(file.registry_config_dir),
            image_credential_provider_config: self
                .image_credential_provider_config
                .or(file.image_credential_provider_config),
            image_credential_provider_bin_dir: self
                .image_credential_provider_bin_dir
                .or(file.image_credential_provider_bin_dir),
            nri_socket: self.nri_socket.or(file.nri_socket),
            nri_plugin_dir: self.nri_plugin_dir.or(file.nri_plugin_dir),
            nri_plugin_config_dir: self.nri_plugin_config_dir.or(file.nri_plugin_config_dir),
            log_max_size: self.log_max_size.or(file.log_max_size),
            log_max_files: self.log_max_files.or(file.log_max_files),
            stream_idle_seconds: self.stream_idle_seconds.or(file.stream_idle_seconds),
            tls_cert_file: self.tls_cert_file.or(file.tls_cert_file),
            tls_private_key_file: self.tls_private_key_file.or(file.tls_private_key_file),
            client_ca_file: self.client_ca_file.or(file.client_ca_file),
            server_tls_bootstrap: self.server_tls_bootstrap.or(file.server_tls_bootstrap),
            cert_dir: self.cert_dir.or(file.cert_dir),
        }
    }
}

impl File {
    /// The file that a flag names, or the default one if it is there.
    fn find(named: Option<&Path>) -> anyhow::Result<Self> {
        match named {
            Some(path) => Self::read(path),
            None if Path::new(DEFAULT_FILE).exists() => Self::read(Path::new(DEFAULT_FILE)),
            None => Ok(Self::default()),
        }
    }

    fn read(path: &Path) -> anyhow::Result<Self> {
        let text = coracle_agent::read_text(path, FILE_MAX)
            .with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text).map_err(|error: toml::de::Error| {
            // The library's own text draws the line over several; ours is one sentence.
            let before = text.get(..error.span().map_or(0, |span| span.start)).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            anyhow::anyhow!("{} line {line}: {}", path.display(), error.message())
        })
    }
}

/// Paths are used from several processes and namespaces: relative ones would mean something else there.
fn absolute(path: PathBuf) -> anyhow::Result<PathBuf> {
    std::path::absolute(&path).with_context(|| format!("{} is not a path", path.display()))
}

/// None for a stream that is never given up.
fn stream_idle_limit(asked: Option<u32>) -> Option<Duration> {
    Some(asked.unwrap_or(4 * 3600)).filter(|count| *count > 0).map(seconds)
}

fn seconds(count: u32) -> Duration {
    Duration::from_secs(count.into())
}

/// A port of all addresses that the machine has: of both families where one socket can have them.
fn every_address(port: u16) -> SocketAddr {
    let only_v6 = std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only");
    let any = match only_v6.as_deref().map(str::trim) {
        Ok("0") => Ipv6Addr::UNSPECIFIED.into(),
        _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    SocketAddr::new(any, port)
}

fn host_name() -> anyhow::Result<String> {
    let name = nix::unistd::gethostname().context("cannot read the host's name")?;
    Ok(name.to_string_lossy().to_lowercase())
}

#[cfg(test)]
mod tests;

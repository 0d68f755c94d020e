//! Flags and the configuration file: both have the same names, and a flag overrides the file.

use std::io::IsTerminal;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use ipnetwork::{IpNetwork, Ipv4Network};
use serde::Deserialize;

/// Where the configuration is looked for when no `--config` names one.
const DEFAULT_FILE: &str = "/etc/coracle/config.toml";

/// How to log.
#[derive(Args)]
pub(crate) struct LogSettings {
    /// What to log: error, warn, info, debug, trace, or a filter such as `info,coracle_cri=debug`.
    #[arg(long, global = true, default_value = "info", value_name = "LEVEL")]
    log_level: String,
    /// How to log.
    #[arg(long, global = true, default_value = "text", value_name = "FORMAT")]
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
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// What outlives a boot: images, volumes, pods, store, keys [default: /var/lib/coracle]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// What goes with a boot: sockets and records [default: /run/coracle]
    #[arg(long, value_name = "DIR")]
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
    /// The node's name [default: the host's name]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// An address of the node, may be repeated [default: found from the routes]
    #[arg(long, value_name = "IP")]
    node_ip: Vec<IpAddr>,
    /// Where the kubelet API listens [default: 0.0.0.0:10250]
    #[arg(long, value_name = "ADDRESS")]
    kubelet_listen: Option<SocketAddr>,
    /// The bridge that pods hang on [default: coracle0]
    #[arg(long, value_name = "NAME")]
    bridge: Option<String>,
    /// The nftables table that is ours [default: coracle]
    #[arg(long, value_name = "NAME")]
    nft_table: Option<String>,
    /// MTU of bridge and pods [default: the kernel's]
    #[arg(long, value_name = "BYTES")]
    mtu: Option<u32>,
    /// Resolver configuration given to pods [default: /etc/resolv.conf]
    #[arg(long, value_name = "FILE")]
    resolv_conf: Option<PathBuf>,
    /// Pods that the node takes [default: 110]
    #[arg(long, value_name = "COUNT")]
    max_pods: Option<u32>,
    /// Registry mirrors, a folder per host with a hosts.toml, as containerd has them
    #[arg(long, value_name = "DIR")]
    registry_config_dir: Option<PathBuf>,
    /// Bytes of one container log file before it is rotated [default: 10485760]
    #[arg(long, value_name = "BYTES")]
    log_max_size: Option<u64>,
    /// Files kept of one container's log [default: 5]
    #[arg(long, value_name = "COUNT")]
    log_max_files: Option<u32>,
    /// Certificate of the kubelet API (`agent` only; `up` makes its own)
    #[arg(long, value_name = "FILE")]
    tls_cert_file: Option<PathBuf>,
    /// Key of that certificate
    #[arg(long, value_name = "FILE")]
    tls_private_key_file: Option<PathBuf>,
    /// CA whose client certificates may call the kubelet API
    #[arg(long, value_name = "FILE")]
    client_ca_file: Option<PathBuf>,
}

/// Settings of the control plane.
#[derive(Args, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct ControlPlaneSettings {
    /// Where the API server listens [default: 0.0.0.0:6443]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// The address that clients are told [default: found from the routes]
    #[arg(long, value_name = "IP")]
    advertise_address: Option<IpAddr>,
    /// Range that nodes' pod ranges are cut from [default: 10.42.0.0/16]
    #[arg(long, value_name = "CIDR")]
    cluster_cidr: Option<IpNetwork>,
    /// Range of service addresses [default: 10.43.0.0/16]
    #[arg(long, value_name = "CIDR")]
    service_cidr: Option<Ipv4Network>,
    /// Static tokens: lines of token,user,uid,"group,group"
    #[arg(long, value_name = "FILE")]
    token_auth_file: Option<PathBuf>,
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
    pub(crate) name: String,
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) kubelet_listen: SocketAddr,
    pub(crate) bridge: String,
    pub(crate) nft_table: String,
    pub(crate) mtu: Option<u32>,
    pub(crate) resolv_conf: PathBuf,
    pub(crate) max_pods: u32,
    pub(crate) registry_config_dir: Option<PathBuf>,
    pub(crate) log_max_size: u64,
    pub(crate) log_max_files: u32,
    pub(crate) credentials: Option<Credentials>,
}

/// Files that an agent on its own serves and verifies with.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    pub(crate) client_ca: PathBuf,
}

/// The control plane's settings, all decided but for what it finds out itself.
#[derive(Clone, Debug)]
pub(crate) struct ControlPlane {
    pub(crate) dirs: Dirs,
    pub(crate) listen: SocketAddr,
    pub(crate) advertise_address: Option<IpAddr>,
    pub(crate) cluster_cidr: IpNetwork,
    pub(crate) service_cidr: Ipv4Network,
    pub(crate) token_auth_file: Option<PathBuf>,
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
        let filter = tracing_subscriber::EnvFilter::try_new(&self.log_level)
            .with_context(|| format!("--log-level {} is not a level or filter", self.log_level))?;
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
        match self.log_format {
            LogFormat::Text => log.with_target(false).with_ansi(std::io::stderr().is_terminal()).init(),
            LogFormat::Json => log.json().init(),
        }
        Ok(())
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
        let file = match &places.config {
            Some(path) => File::read(path)?,
            None if Path::new(DEFAULT_FILE).exists() => File::read(Path::new(DEFAULT_FILE))?,
            None => File::default(),
        };
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
        let credentials = match (node.tls_cert_file, node.tls_private_key_file, node.client_ca_file) {
            (Some(certificate), Some(key), Some(client_ca)) => {
                Some(Credentials { certificate, key, client_ca })
            }
            (None, None, None) => None,
            _ => anyhow::bail!(
                "tls-cert-file, tls-private-key-file and client-ca-file go together: set all or none"
            ),
        };
        Ok(Node {
            dirs: self.dirs(),
            pod_log_dir: absolute(node.pod_log_dir.unwrap_or_else(|| "/var/log/pods".into()))?,
            cgroup_root: node.cgroup_root.unwrap_or_else(|| "/".into()),
            name: node.node_name.map_or_else(host_name, Ok)?,
            ips: node.node_ip,
            kubelet_listen: node.kubelet_listen.unwrap_or_else(|| ([0, 0, 0, 0], 10250).into()),
            bridge: node.bridge.unwrap_or_else(|| "coracle0".into()),
            nft_table: node.nft_table.unwrap_or_else(|| "coracle".into()),
            mtu: node.mtu,
            resolv_conf: node.resolv_conf.unwrap_or_else(|| "/etc/resolv.conf".into()),
            max_pods: node.max_pods.unwrap_or(110),
            registry_config_dir: node.registry_config_dir,
            log_max_size: node.log_max_size.unwrap_or(10 << 20),
            log_max_files: node.log_max_files.unwrap_or(5),
            credentials,
        })
    }

    pub(crate) fn control_plane(&self) -> anyhow::Result<ControlPlane> {
        let plane = self.plane.clone();
        Ok(ControlPlane {
            dirs: self.dirs(),
            listen: plane.listen.unwrap_or_else(|| ([0, 0, 0, 0], 6443).into()),
            advertise_address: plane.advertise_address,
            cluster_cidr: plane.cluster_cidr.map_or_else(|| "10.42.0.0/16".parse(), Ok)?,
            service_cidr: plane.service_cidr.map_or_else(|| "10.43.0.0/16".parse(), Ok)?,
            token_auth_file: plane.token_auth_file,
        })
    }
}

impl NodeSettings {
    fn over(self, file: Self) -> Self {
        Self {
            pod_log_dir: self.pod_log_dir.or(file.pod_log_dir),
            cgroup_root: self.cgroup_root.or(file.cgroup_root),
            node_name: self.node_name.or(file.node_name),
            node_ip: if self.node_ip.is_empty() { file.node_ip } else { self.node_ip },
            kubelet_listen: self.kubelet_listen.or(file.kubelet_listen),
            bridge: self.bridge.or(file.bridge),
            nft_table: self.nft_table.or(file.nft_table),
            mtu: self.mtu.or(file.mtu),
            resolv_conf: self.resolv_conf.or(file.resolv_conf),
            max_pods: self.max_pods.or(file.max_pods),
            registry_config_dir: self.registry_config_dir.or(file.registry_config_dir),
            log_max_size: self.log_max_size.or(file.log_max_size),
            log_max_files: self.log_max_files.or(file.log_max_files),
            tls_cert_file: self.tls_cert_file.or(file.tls_cert_file),
            tls_private_key_file: self.tls_private_key_file.or(file.tls_private_key_file),
            client_ca_file: self.client_ca_file.or(file.client_ca_file),
        }
    }
}

impl ControlPlaneSettings {
    fn over(self, file: Self) -> Self {
        Self {
            listen: self.listen.or(file.listen),
            advertise_address: self.advertise_address.or(file.advertise_address),
            cluster_cidr: self.cluster_cidr.or(file.cluster_cidr),
            service_cidr: self.service_cidr.or(file.service_cidr),
            token_auth_file: self.token_auth_file.or(file.token_auth_file),
        }
    }
}

impl File {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
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

fn host_name() -> anyhow::Result<String> {
    let name = nix::unistd::gethostname().context("cannot read the host's name")?;
    Ok(name.to_string_lossy().to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Result<File, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn a_flag_overrides_the_file_and_the_file_the_default() {
        let from_file = file("[node]\nbridge = \"fromfile\"\nmax-pods = 7").unwrap().node;
        let flags = NodeSettings { bridge: Some("fromflag".into()), ..NodeSettings::default() };
        let dirs = Dirs { state: "/s".into(), run: "/r".into() };
        let settings = Settings { dirs, node: flags.over(from_file), plane: ControlPlaneSettings::default() };
        let node = settings.node().unwrap();
        assert_eq!((node.bridge.as_str(), node.max_pods, node.cgroup_root.as_str()), ("fromflag", 7, "/"));
    }

    #[test]
    fn an_unknown_key_is_an_error_that_names_it() {
        let error = file("[node]\nbrigde = \"x\"").err().unwrap().to_string();
        assert!(error.contains("brigde"), "{error}");
    }

    #[test]
    fn half_a_set_of_credentials_is_refused() {
        let node = NodeSettings { tls_cert_file: Some("/c".into()), ..NodeSettings::default() };
        let dirs = Dirs { state: "/s".into(), run: "/r".into() };
        let settings = Settings { dirs, node, plane: ControlPlaneSettings::default() };
        assert!(settings.node().is_err());
    }
}

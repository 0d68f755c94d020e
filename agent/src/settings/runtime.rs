//! Settings of the runtime alone: flags, the table `[runtime]` of the file, defaults.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use coracle_cri::{CgroupDriver, NriSettings};
use coracle_images::PinPattern;
use ipnetwork::IpNetwork;
use serde::Deserialize;

use super::cni::{self, Cni};
use super::{File, absolute, cgroup};

/// Flags of `coracle runtime`, and the keys of `[runtime]`. Every one is optional.
#[derive(Args, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct RuntimeSettings {
    /// Configuration file (TOML, keys as the flags, in the table runtime) [default: /etc/coracle/config.toml if there]
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,
    /// Where to listen [default: unix:///run/coracle/cri.sock]
    #[arg(long, value_name = "unix://PATH")]
    listen: Option<String>,
    /// What outlives a boot: images and the containers' writable layers [default: /var/lib/coracle]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// What goes with a boot: records and sockets [default: /run/coracle]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Network configuration lists (CNI), empty = none; without one, the built-in bridge network
    /// [default: /etc/cni/net.d]
    #[arg(long, value_name = "DIR")]
    cni_conf_dir: Option<String>,
    /// Network plugins that are not built in (CNI), may be repeated [default: /opt/cni/bin]
    #[arg(long, value_name = "DIR")]
    cni_bin_dir: Vec<PathBuf>,
    /// Registry mirrors, a folder per host with a hosts.toml, as containerd has them
    #[arg(long, value_name = "DIR")]
    registry_config_dir: Option<PathBuf>,
    /// Images that a kubelet is told not to collect, may be repeated: a name, its beginning and *, or a word between two *
    #[arg(long, value_name = "PATTERN")]
    pinned_image: Vec<PinPattern>,
    /// Addresses of the built-in network's pods; repeat it for a second family [default: 10.88.0.0/16]
    #[arg(long, value_name = "CIDR")]
    pod_cidr: Vec<IpNetwork>,
    /// The bridge that pods hang on [default: coracle0]
    #[arg(long, value_name = "NAME")]
    bridge: Option<String>,
    /// The nftables table that is ours [default: coracle]
    #[arg(long, value_name = "NAME")]
    nft_table: Option<String>,
    /// The cgroup below which all of ours are [default: /]
    #[arg(long, value_name = "PATH")]
    cgroup_root: Option<String>,
    /// Who makes cgroups [default: cgroupfs]
    #[arg(long, value_name = "DRIVER")]
    cgroup_driver: Option<cgroup::Driver>,
    /// Where NRI plugins connect; empty = none may [default: /var/run/nri/nri.sock]
    #[arg(long, value_name = "PATH", value_parser = super::nri::place())]
    nri_socket: Option<PathBuf>,
    /// NRI plugins that are started with the runtime; empty = none [default: /opt/nri/plugins]
    #[arg(long, value_name = "DIR", value_parser = super::nri::place())]
    nri_plugin_dir: Option<PathBuf>,
    /// Configurations of those plugins [default: /etc/nri/conf.d]
    #[arg(long, value_name = "DIR")]
    nri_plugin_config_dir: Option<PathBuf>,
    /// Where streams (exec, attach, port-forward) are served; port 0 chooses one [default: 127.0.0.1:0]
    #[arg(long, value_name = "ADDRESS")]
    stream_listen: Option<SocketAddr>,
    /// Seconds after which a stream on which nothing moves is given up; 0 = never [default: 14400]
    #[arg(long, value_name = "SECONDS")]
    stream_idle_seconds: Option<u32>,
}

/// The runtime's settings, all decided.
#[derive(Clone, Debug)]
pub(crate) struct Runtime {
    pub(crate) socket: PathBuf,
    pub(crate) root: PathBuf,
    pub(crate) state: PathBuf,
    pub(crate) cni: Cni,
    pub(crate) registry_config_dir: Option<PathBuf>,
    pub(crate) pinned_images: Vec<PinPattern>,
    pub(crate) pod_cidrs: Vec<IpNetwork>,
    pub(crate) bridge: String,
    pub(crate) nft_table: String,
    pub(crate) cgroup_root: String,
    pub(crate) cgroup_driver: CgroupDriver,
    pub(crate) stream_listen: SocketAddr,
    pub(crate) stream_idle_limit: Option<Duration>,
    pub(crate) nri: NriSettings,
}

// === impl RuntimeSettings ===

impl RuntimeSettings {
    /// Flags over file over defaults.
    pub(crate) fn load(self) -> anyhow::Result<Runtime> {
        let file = File::find(self.config.as_deref())?.runtime;
        self.over(file).decide()
    }

    fn over(self, file: Self) -> Self {
        Self {
            config: None,
            listen: self.listen.or(file.listen),
            root: self.root.or(file.root),
            state: self.state.or(file.state),
            cni_conf_dir: self.cni_conf_dir.or(file.cni_conf_dir),
            cni_bin_dir: if self.cni_bin_dir.is_empty() { file.cni_bin_dir } else { self.cni_bin_dir },
            registry_config_dir: self.registry_config_dir.or(file.registry_config_dir),
            pinned_image: if self.pinned_image.is_empty() { file.pinned_image } else { self.pinned_image },
            pod_cidr: if self.pod_cidr.is_empty() { file.pod_cidr } else { self.pod_cidr },
            bridge: self.bridge.or(file.bridge),
            nft_table: self.nft_table.or(file.nft_table),
            cgroup_root: self.cgroup_root.or(file.cgroup_root),
            cgroup_driver: self.cgroup_driver.or(file.cgroup_driver),
            nri_socket: self.nri_socket.or(file.nri_socket),
            nri_plugin_dir: self.nri_plugin_dir.or(file.nri_plugin_dir),
            nri_plugin_config_dir: self.nri_plugin_config_dir.or(file.nri_plugin_config_dir),
            stream_listen: self.stream_listen.or(file.stream_listen),
            stream_idle_seconds: self.stream_idle_seconds.or(file.stream_idle_seconds),
        }
    }

    fn decide(self) -> anyhow::Result<Runtime> {
        let listen = self.listen.unwrap_or_else(|| "unix:///run/coracle/cri.sock".into());
        let socket = listen.strip_prefix("unix://").unwrap_or(&listen);
        anyhow::ensure!(socket.starts_with('/'), "--listen wants unix:// and an absolute path, not {listen}");
        let state = absolute(self.state.unwrap_or_else(|| "/run/coracle".into()))?;
        let nri = (self.nri_socket, self.nri_plugin_dir, self.nri_plugin_config_dir);
        let default = "10.88.0.0/16".parse::<IpNetwork>()?;
        Ok(Runtime {
            socket: socket.into(),
            root: absolute(self.root.unwrap_or_else(|| "/var/lib/coracle".into()))?,
            nri: super::nri::decide(nri, &state),
            state,
            cni: cni::decide(self.cni_conf_dir, self.cni_bin_dir),
            registry_config_dir: self.registry_config_dir,
            pinned_images: self.pinned_image,
            pod_cidrs: if self.pod_cidr.is_empty() { vec![default] } else { self.pod_cidr },
            bridge: self.bridge.unwrap_or_else(|| "coracle0".into()),
            nft_table: self.nft_table.unwrap_or_else(|| "coracle".into()),
            cgroup_root: self.cgroup_root.unwrap_or_else(|| "/".into()),
            cgroup_driver: cgroup::decide(self.cgroup_driver),
            stream_listen: self.stream_listen.unwrap_or_else(|| ([127, 0, 0, 1], 0).into()),
            stream_idle_limit: super::stream_idle_limit(self.stream_idle_seconds),
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches as _;

    use super::*;

    #[test]
    fn a_flag_overrides_the_file_and_the_file_the_default() {
        let text = "[runtime]\nbridge = \"fromfile\"\nroot = \"/fromfile\"\ncgroup-driver = \"systemd\"";
        let file: File = toml::from_str(text).unwrap();
        let flags = RuntimeSettings { bridge: Some("fromflag".into()), ..RuntimeSettings::default() };
        let runtime = flags.over(file.runtime).decide().unwrap();
        let decided = (runtime.bridge.as_str(), runtime.root, runtime.nft_table.as_str());
        assert_eq!(decided, ("fromflag", "/fromfile".into(), "coracle"));
        assert_eq!(runtime.cgroup_driver, CgroupDriver::Systemd);
    }

    #[test]
    fn streams_may_be_idle_for_four_hours_or_as_long_as_is_said() {
        let limit = |seconds| {
            let flags = RuntimeSettings { stream_idle_seconds: seconds, ..RuntimeSettings::default() };
            flags.decide().unwrap().stream_idle_limit.map(|limit| limit.as_secs())
        };
        assert_eq!([limit(None), limit(Some(7)), limit(Some(0))], [Some(4 * 3600), Some(7), None]);
    }

    #[test]
    fn an_empty_flag_keeps_plugins_out() {
        let command = RuntimeSettings::augment_args(clap::Command::new("runtime"));
        let words = ["runtime", "--nri-socket", "", "--nri-plugin-dir", ""];
        let flags = RuntimeSettings::from_arg_matches(&command.get_matches_from(words)).unwrap();
        let nri = flags.decide().unwrap().nri;
        assert_eq!((nri.socket, nri.plugins), (None, None));
    }

    #[test]
    fn a_relative_socket_is_refused() {
        let flags = RuntimeSettings { listen: Some("cri.sock".into()), ..RuntimeSettings::default() };
        assert!(flags.decide().unwrap_err().to_string().contains("cri.sock"));
    }
}

//! Settings of `coracle runtime`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use coracle_cri::{CgroupDriver, NriSettings};
use coracle_images::PinPattern;
use ipnetwork::IpNetwork;

use super::cni::{self, Cni};
use super::sources::Sources;
use super::table::{Flags, settings};
use super::value::{IdleTimeout, PathOrOff};
use super::{DefaultLevel, LogSettings, absolute, cgroup, log_unknown_variables, nri, sources};

settings! {
    /// Settings of `coracle runtime`.
    pub(crate) struct RuntimeSettings = "runtime";

    /// Configuration file: TOML with keys like the flags, in the table runtime.
    config: Option<PathBuf> = unset "/etc/coracle/config.toml if it exists", "FILE";
    /// Socket of the container runtime interface.
    listen: String = default "unix:///run/coracle/cri.sock", "unix://PATH";
    /// Directory of data that is kept across boots: images and the containers' writable layers.
    root: PathBuf = default "/var/lib/coracle", "DIR";
    /// Directory of data that is valid until the next boot: records and sockets.
    state: PathBuf = default "/run/coracle", "DIR";
    /// Directory of network configurations (CNI). Without a configuration, or with an empty path, pods use the built-in
    /// bridge network.
    cni_conf_dir: PathOrOff = default "/etc/cni/net.d", "DIR";
    /// Directories of network plugins (CNI) that are not built in.
    cni_bin_dir: Vec<PathBuf> = default "/opt/cni/bin", "DIR";
    /// Directory of registry mirrors: a subdirectory per host with a hosts.toml, as for containerd.
    registry_config_dir: Option<PathBuf> = unset "", "DIR";
    /// Images that a kubelet must not remove as unused: a name, a prefix and *, or a word between two *.
    pinned_image: Vec<PinPattern> = default "", "PATTERN";
    /// Ranges of pod addresses of the built-in network, at most one of each family.
    pod_cidr: Vec<IpNetwork> = default "10.88.0.0/16", "CIDR";
    /// Name of the bridge of the built-in network.
    bridge: String = default "coracle0", "NAME";
    /// Name of the nftables table.
    nft_table: String = default "coracle", "NAME";
    /// Cgroup that contains all cgroups of pods.
    cgroup_root: String = default "/", "PATH";
    /// Program that makes cgroups: cgroupfs (the runtime itself) or systemd.
    cgroup_driver: cgroup::Driver = default "cgroupfs", "DRIVER";
    /// Socket for NRI plugins. Empty: none.
    nri_socket: Option<PathOrOff> = unset "/var/run/nri/nri.sock", "PATH";
    /// Directory of NRI plugins that start with the runtime. Empty: none.
    nri_plugin_dir: Option<PathOrOff> = unset "/opt/nri/plugins", "DIR";
    /// Directory of the configurations of NRI plugins.
    nri_plugin_config_dir: PathBuf = default "/etc/nri/conf.d", "DIR";
    /// Address of the streaming server (exec, attach, port-forward). Port 0 chooses a free port.
    stream_listen: SocketAddr = default "127.0.0.1:0", "ADDRESS";
    /// Time after which an idle stream is closed: a duration or seconds; 0: never.
    streaming_connection_idle_timeout: IdleTimeout = default "4h", "DURATION", also "stream-idle-seconds";
}

/// Checked settings of the runtime.
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
    /// Resolves flags, environment and file, and starts the log.
    pub(crate) fn load(log: &Flags<LogSettings>, flags: &Flags<Self>) -> anyhow::Result<Runtime> {
        let mut sources = sources(flags)?;
        let log = log.resolve(&mut sources);
        let settings = flags.resolve(&mut sources);
        let file = settings.as_ref().and_then(|settings| settings.config.clone());
        let runtime = settings.and_then(|settings| settings.decide(&mut sources));
        sources.check()?;
        log.context("a setting is invalid")?.start(DefaultLevel::Server);
        tracing::debug!(?file, "settings resolved");
        log_unknown_variables(&sources);
        runtime.context("a setting is invalid")
    }

    fn decide(self, sources: &mut Sources) -> Option<Runtime> {
        let socket = sources.take(socket(&self.listen));
        let root = sources.take(absolute(&self.root));
        let state = sources.take(absolute(&self.state));
        if self.pod_cidr.is_empty() {
            sources.problems.push("pod-cidr is empty: name at least one range".to_owned());
        }
        let state = state?;
        Some(Runtime {
            socket: socket?,
            root: root?,
            nri: nri::decide(self.nri_socket, self.nri_plugin_dir, self.nri_plugin_config_dir, &state),
            state,
            cni: cni::decide(self.cni_conf_dir, self.cni_bin_dir, true, Some(0)),
            registry_config_dir: self.registry_config_dir,
            pinned_images: self.pinned_image,
            pod_cidrs: self.pod_cidr,
            bridge: self.bridge,
            nft_table: self.nft_table,
            cgroup_root: self.cgroup_root,
            cgroup_driver: self.cgroup_driver.into(),
            stream_listen: self.stream_listen,
            stream_idle_limit: self.streaming_connection_idle_timeout.0,
        })
    }
}

fn socket(listen: &str) -> anyhow::Result<PathBuf> {
    let socket = listen.strip_prefix("unix://").unwrap_or(listen);
    anyhow::ensure!(
        socket.starts_with('/'),
        "--listen must be an absolute path or unix:///PATH, not {listen}"
    );
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::super::TABLES;
    use super::super::file::File;
    use super::*;

    fn resolve(words: &[&str], file: &str) -> Result<Runtime, String> {
        let command = Flags::<RuntimeSettings>::augment_args(clap::Command::new("runtime"));
        let matches = command.get_matches_from(std::iter::once("runtime").chain(words.iter().copied()));
        let flags = Flags::<RuntimeSettings>::from_arg_matches(&matches).unwrap();
        let mut sources =
            Sources { file: File::parse_toml(file, "f.toml", TABLES).unwrap(), ..Sources::default() };
        let runtime =
            flags.resolve(&mut sources).and_then(|runtime: RuntimeSettings| runtime.decide(&mut sources));
        sources.check().map_err(|problems| problems.to_string())?;
        Ok(runtime.unwrap())
    }

    #[test]
    fn a_flag_overrides_the_file_and_the_file_the_default() {
        let file = "[runtime]\nbridge = \"fromfile\"\nroot = \"/fromfile\"\ncgroup-driver = \"systemd\"";
        let runtime = resolve(&["--bridge", "fromflag"], file).unwrap();
        let decided = (runtime.bridge.as_str(), runtime.root, runtime.nft_table.as_str());
        assert_eq!(decided, ("fromflag", "/fromfile".into(), "coracle"));
        assert_eq!(runtime.cgroup_driver, CgroupDriver::Systemd);
    }

    #[test]
    fn the_idle_timeout_of_streams_is_four_hours_by_default() {
        let limit =
            |words: &[&str]| resolve(words, "").unwrap().stream_idle_limit.map(|limit| limit.as_secs());
        assert_eq!(limit(&[]), Some(4 * 3600));
        assert_eq!(limit(&["--stream-idle-seconds", "7"]), Some(7));
        assert_eq!(limit(&["--streaming-connection-idle-timeout", "1h30m"]), Some(5400));
        assert_eq!(limit(&["--stream-idle-seconds=0"]), None);
    }

    #[test]
    fn an_empty_flag_switches_plugins_off() {
        let nri = resolve(&["--nri-socket", "", "--nri-plugin-dir", ""], "").unwrap().nri;
        assert_eq!((nri.socket, nri.plugins), (None, None));
    }

    #[test]
    fn a_relative_socket_is_refused() {
        assert!(resolve(&["--listen", "cri.sock"], "").unwrap_err().contains("cri.sock"));
    }
}

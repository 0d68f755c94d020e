//! Settings of `coracle runtime`.

use std::net::SocketAddr;
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use coracle_cri::{CgroupDriver, NriSettings};
use coracle_images::PinPattern;
use ipnetwork::IpNetwork;

use super::built_in_runtime::built_in_runtime;
use super::cni::{self, Cni};
use super::image_store::ImageStore;
use super::sources::Sources;
use super::table::{Flags, settings};
use super::value::{ByteSize, GoDuration, IdleTimeout, PathOrOff};
use super::{DefaultLevel, LogSettings, absolute, cgroup, log_unknown_variables, sources};

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
    /// Time without progress after which the pull of an image fails, at least one second.
    image_pull_progress_timeout: GoDuration = default "5m", "DURATION";
    /// Maximum number of layers of one image that are fetched at the same time. Values above 8 have no effect.
    max_concurrent_downloads: NonZero<u16> = default "3", "COUNT";
    /// Maximum size of an unpacked layer of an image.
    max_layer_size: ByteSize = default "64Gi", "BYTES";
    /// Maximum number of files, directories and other entries of a layer of an image.
    max_layer_entries: NonZero<u32> = default "4000000", "COUNT";
    /// Images that a kubelet must not remove as unused: a name, a prefix and *, or a word between two *.
    pinned_image: Vec<PinPattern> = default "", "PATTERN";
    /// Ranges of pod addresses of the built-in network, at most one of each family.
    pod_cidr: Vec<IpNetwork> = default "10.88.0.0/16", "CIDR";
    /// Name of the bridge of the built-in network.
    bridge: String = default "coracle0", "NAME";
    /// Maximum packet size (MTU) of pods, in bytes.
    mtu: Option<u32> = unset "the kernel's default", "BYTES";
    /// Drop packets that pods of the built-in network send from addresses that are not their own (hardware, IP, ARP,
    /// neighbour discovery).
    check_pod_sources: bool = default "true", "BOOL";
    /// Maximum connections that a pod of the built-in network begins and the machine tracks at the same time; 0: no
    /// limit.
    pod_max_connections: u32 = default "0", "COUNT";
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
    /// Time in which an NRI plugin must register, and receive all pods.
    nri_plugin_registration_timeout: GoDuration = default "5s", "DURATION";
    /// Time in which an NRI plugin must answer any other request.
    nri_plugin_request_timeout: GoDuration = default "2s", "DURATION";
    /// Directories of device descriptions (CDI). A later directory takes precedence.
    cdi_spec_dir: Vec<PathBuf> = default "/etc/cdi,/var/run/cdi", "DIR";
    /// Size at which a container's log file is rotated; 0: only the kubelet rotates it.
    container_log_max_size: ByteSize = default "10Mi", "BYTES";
    /// Maximum number of log files of a container.
    container_log_max_files: u32 = default "5", "COUNT";
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
    pub(crate) image_store: ImageStore,
    pub(crate) pod_cidrs: Vec<IpNetwork>,
    pub(crate) bridge: String,
    pub(crate) mtu: Option<u32>,
    pub(crate) nft_table: String,
    pub(crate) cgroup_root: String,
    pub(crate) cgroup_driver: CgroupDriver,
    pub(crate) log_max_size: u64,
    pub(crate) log_max_files: u32,
    pub(crate) stream_listen: SocketAddr,
    pub(crate) stream_idle_limit: Option<Duration>,
    pub(crate) nri: NriSettings,
    pub(crate) cdi_spec_dirs: Vec<PathBuf>,
}

// === impl RuntimeSettings ===

built_in_runtime!(RuntimeSettings);

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
        let image_store = sources.take(self.image_store().checked());
        let state = state?;
        let nri = sources.take(self.nri(&state));
        Some(Runtime {
            socket: socket?,
            root: root?,
            nri: nri?,
            state,
            cni: self.cni(),
            image_store: image_store?,
            pod_cidrs: self.pod_cidr,
            bridge: self.bridge,
            mtu: self.mtu,
            nft_table: self.nft_table,
            cgroup_root: self.cgroup_root,
            cgroup_driver: self.cgroup_driver.into(),
            log_max_size: self.container_log_max_size.0,
            log_max_files: self.container_log_max_files,
            cdi_spec_dirs: self.cdi_spec_dir,
            stream_listen: self.stream_listen,
            stream_idle_limit: self.streaming_connection_idle_timeout.0,
        })
    }

    fn cni(&self) -> Cni {
        let (conf_dir, bin_dirs) = (self.cni_conf_dir.clone(), self.cni_bin_dir.clone());
        cni::decide(conf_dir, bin_dirs, self.check_pod_sources, Some(self.pod_max_connections))
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
    use std::path::Path;

    use clap::{Args as _, FromArgMatches as _};
    use coracle_cri::RuntimeConfig;
    use coracle_images::ImagesConfig;

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
    fn the_defaults_are_those_of_the_runtime_and_of_the_image_store() {
        let runtime = resolve(&[], "").unwrap();
        let default = RuntimeConfig::default();
        let logs = (runtime.log_max_size, runtime.log_max_files);
        assert_eq!(logs, (default.log_max_size, default.log_max_files));
        assert_eq!(runtime.cdi_spec_dirs, default.cdi_dirs);
        let nri = (runtime.nri.registration_timeout, runtime.nri.request_timeout);
        assert_eq!(nri, (default.nri.registration_timeout, default.nri.request_timeout));
        let (store, default) = (runtime.image_store.config(Path::new("/s")), ImagesConfig::new("/s"));
        let limits = |config: &ImagesConfig| (config.limits.layer_bytes, config.limits.layer_entries);
        assert_eq!(limits(&store), limits(&default));
        let downloads = |config: &ImagesConfig| (config.progress_timeout, config.parallel_layers);
        assert_eq!(downloads(&store), downloads(&default));
    }

    #[test]
    fn settings_reach_the_image_store_and_the_network() {
        let words = [
            "--image-pull-progress-timeout=90s",
            "--max-concurrent-downloads=7",
            "--max-layer-size=1Gi",
            "--max-layer-entries=9",
            "--check-pod-sources=false",
            "--pod-max-connections=100",
            "--mtu=1400",
        ];
        let runtime = resolve(&words, "").unwrap();
        let store = runtime.image_store.config(Path::new("/s"));
        assert_eq!((store.progress_timeout.as_secs(), store.parallel_layers), (90, 7));
        assert_eq!((store.limits.layer_bytes, store.limits.layer_entries), (1 << 30, 9));
        assert_eq!((runtime.cni.check_sources, runtime.cni.max_connections), (false, Some(100)));
        assert_eq!(runtime.mtu, Some(1400));
        let problem = resolve(&["--image-pull-progress-timeout=0"], "").unwrap_err();
        assert!(problem.contains("image-pull-progress-timeout must be at least 1s"), "{problem}");
        let problem = resolve(&["--max-layer-size=0"], "").unwrap_err();
        assert!(problem.contains("max-layer-size must be more than 0"), "{problem}");
        for name in ["nri-plugin-registration-timeout", "nri-plugin-request-timeout"] {
            let problem = resolve(&[&format!("--{name}=0")], "").unwrap_err();
            assert!(problem.contains(&format!("{name} must be more than 0")), "{problem}");
        }
    }

    #[test]
    fn a_relative_socket_is_refused() {
        assert!(resolve(&["--listen", "cri.sock"], "").unwrap_err().contains("cri.sock"));
    }
}

//! Settings of all roles. The value of a setting comes from the first of these sources that has one: a flag, an
//! environment variable, a key of the configuration file, a default.
//!
//! [`table`] declares settings, [`sources`] resolves them, [`value`] parses them. [`mod@file`] parses TOML, [`kubelet`]
//! the kubelet's YAML. [`node`], [`control_plane`] and [`runtime`] are the tables. All invalid settings are reported
//! together.

mod audit_mode;
mod built_in_runtime;
mod cgroup;
mod cni;
mod control_plane;
mod eviction;
mod feature_gates;
mod field;
mod file;
mod image_gc;
mod image_pull;
mod image_store;
mod kubelet;
mod labels;
mod log;
mod log_line;
mod nearest;
mod node;
mod nri;
mod overlay;
mod pod_policy;
mod ranges;
#[cfg(test)]
mod reference;
mod remote_runtime;
mod reports;
mod resource_managers;
mod runtime;
mod serving;
mod shutdown;
mod sources;
mod static_pods;
mod table;
mod value;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use coracle_agent::Identity;

use file::File;
use nearest::Tables;
use sources::Sources;
use table::{Table, settings};

#[cfg(feature = "controlplane")]
pub(crate) use control_plane::ControlPlane;
pub(crate) use control_plane::ControlPlaneSettings;
pub(crate) use feature_gates::FeatureSettings;
pub(crate) use log::{DefaultLevel, LogSettings};
use node::ShownSettings;
pub(crate) use node::{Node, NodeSettings, policy_table, service_table};
pub(crate) use runtime::{Runtime, RuntimeSettings};
pub(crate) use serving::Serving;
pub(crate) use table::Flags;

/// Path of the configuration file if `--config` is not set.
const DEFAULT_FILE: &str = "/etc/coracle/config.toml";
/// The default of `state-dir`.
const DEFAULT_STATE_DIR: &str = "/var/lib/coracle";
/// Maximum size of the configuration in bytes.
const FILE_MAX: u64 = 1 << 20;
/// All tables of the file.
const TABLES: &Tables = &[
    (LogSettings::KEY, LogSettings::FIELDS),
    (PathSettings::KEY, PathSettings::FIELDS),
    (FeatureSettings::KEY, FeatureSettings::FIELDS),
    (NodeSettings::KEY, NodeSettings::FIELDS),
    (ControlPlaneSettings::KEY, ControlPlaneSettings::FIELDS),
    (RuntimeSettings::KEY, RuntimeSettings::FIELDS),
];

settings! {
    /// The configuration file and the directories.
    pub(crate) struct PathSettings = "";

    /// Configuration file: TOML with keys like the flags, in the tables node, control-plane and runtime; or a
    /// KubeletConfiguration (.yaml, .yml, .json).
    config: Option<PathBuf> = unset "/etc/coracle/config.toml if it exists", "FILE";
    /// Directory of files that are merged into the KubeletConfiguration of config in the order of their names: parts of
    /// a KubeletConfiguration, each with the extension .conf. A later file takes precedence.
    config_dir: Option<PathBuf> = unset "", "DIR";
    /// Directory of data that is kept across boots: images, volumes, pods, store, keys.
    state_dir: PathBuf = default "/var/lib/coracle", "DIR";
    /// Directory of data that is valid until the next boot: sockets and records.
    run_dir: PathBuf = default "/run/coracle", "DIR";
}

/// The directories of a role, as absolute paths.
#[derive(Clone, Debug)]
pub(crate) struct Dirs {
    pub(crate) state: PathBuf,
    pub(crate) run: PathBuf,
}

/// Certificates of the kubelet API of an agent.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    pub(crate) identity: Identity,
    pub(crate) client_ca: Option<PathBuf>,
}

/// Flags of one start, unparsed.
#[derive(Default)]
pub(crate) struct AllFlags {
    pub(crate) log: Flags<LogSettings>,
    pub(crate) paths: Flags<PathSettings>,
    pub(crate) features: Flags<FeatureSettings>,
    pub(crate) node: Flags<NodeSettings>,
    pub(crate) plane: Flags<ControlPlaneSettings>,
}

/// All settings of one start, checked.
pub(crate) struct Settings {
    config: Option<PathBuf>,
    config_dir: Option<PathBuf>,
    container_runtime_endpoint: Option<String>,
    dirs: Dirs,
    node: Node,
    #[cfg(feature = "controlplane")]
    plane: ControlPlane,
    #[cfg(feature = "controlplane")]
    server_features: coracle_controlplane::ServerFeatures,
    /// The metric of the feature gates.
    feature_metrics: Arc<str>,
    /// Settings that have a value, but no effect on a runtime in another process.
    ignored_by_remote_runtime: Vec<&'static str>,
    /// The text of each setting, by its table and its name.
    resolved: BTreeMap<&'static str, BTreeMap<&'static str, String>>,
}

// === impl Settings ===

impl Settings {
    /// Resolves flags, environment and file of a server, and starts the log.
    ///
    /// # Errors
    /// When the file cannot be read or parsed, or with all settings that are invalid.
    pub(crate) fn load(flags: AllFlags) -> anyhow::Result<Self> {
        Self::load_with(flags, DefaultLevel::Server)
    }

    /// Like [`Self::load`], for a command that ends. The default level of its log is higher.
    pub(crate) fn load_for_command(flags: AllFlags) -> anyhow::Result<Self> {
        Self::load_with(flags, DefaultLevel::Command)
    }

    fn load_with(flags: AllFlags, level: DefaultLevel) -> anyhow::Result<Self> {
        let mut sources = sources(&flags.paths)?;
        let settings = Self::resolve(flags, &mut sources);
        sources.check()?;
        let (log, settings) = settings.context("a setting is invalid")?;
        log.start(level);
        tracing::debug!(file = ?settings.config, directory = ?settings.config_dir, "settings resolved");
        #[cfg(feature = "controlplane")]
        if level == DefaultLevel::Server {
            settings.log_ignored_pools();
        }
        log_unknown_variables(&sources);
        Ok(settings)
    }

    /// Resolves all settings. Returns `None` if `sources` has problems.
    fn resolve(flags: AllFlags, sources: &mut Sources) -> Option<(LogSettings, Self)> {
        let ignored_by_remote_runtime = remote_runtime::ignored(&flags.node, sources);
        let log = flags.log.resolve(sources);
        let paths = flags.paths.resolve(sources);
        let features = flags.features.resolve(sources);
        let node = flags.node.resolve(sources);
        let plane = flags.plane.resolve(sources);
        // The file may have settings of other roles. These settings are checked as well.
        let _checked = Flags::<RuntimeSettings>::default().resolve(sources);
        let paths: PathSettings = paths?;
        let state = sources.take(absolute(&paths.state_dir));
        let run = sources.take(absolute(&paths.run_dir));
        let dirs = Dirs { state: state?, run: run? };
        let endpoint = node.as_ref().and_then(|node: &NodeSettings| node.container_runtime_endpoint.clone());
        let gates = features.as_ref().map(|features| features.feature_gates.clone()).unwrap_or_default();
        let node = node.and_then(|node: NodeSettings| node.decide(&dirs, &gates, sources));
        let ranges = plane.as_ref().and_then(|plane: &ControlPlaneSettings| plane.ranges(sources));
        let service_range = ranges.as_ref().map(|ranges| ranges.service);
        #[cfg(feature = "controlplane")]
        let plane = plane.zip(ranges).and_then(|(plane, ranges)| plane.decide(&dirs, ranges, sources));
        let mut node = node?;
        node.dns.serve_in(service_range?);
        let settings = Self {
            config: paths.config,
            config_dir: paths.config_dir,
            container_runtime_endpoint: endpoint,
            node,
            #[cfg(feature = "controlplane")]
            plane: plane?,
            #[cfg(feature = "controlplane")]
            server_features: features.as_ref()?.feature_gates.of_server(),
            feature_metrics: gates.metrics(),
            dirs,
            ignored_by_remote_runtime,
            resolved: std::mem::take(&mut sources.resolved),
        };
        features.is_some().then_some((log?, settings))
    }

    /// Logs the ranges of `load-balancer-pool` whose addresses this node ignores.
    #[cfg(feature = "controlplane")]
    fn log_ignored_pools(&self) {
        for range in self.ignored_pools() {
            tracing::warn!(%range, "a range of load-balancer-pool is not in service-load-balancer-ips: nodes ignore its addresses");
        }
    }

    #[cfg(feature = "controlplane")]
    fn ignored_pools(&self) -> Vec<ipnetwork::IpNetwork> {
        let proxy = self.node.service_proxy.as_ref();
        let permitted = proxy.map_or(&[][..], |proxy| &proxy.load_balancer_ips);
        ranges::ignored_pools(&self.plane.load_balancer_pool, permitted)
    }

    /// The ranges of `service-external-ips` of this process. `None` without the service proxy: another proxy serves the
    /// Services then.
    #[cfg(feature = "controlplane")]
    pub(crate) fn external_ips(&self) -> Option<Vec<ipnetwork::IpNetwork>> {
        self.node.service_proxy.as_ref().map(|proxy| proxy.external_ips.clone())
    }

    pub(crate) fn dirs(&self) -> Dirs {
        self.dirs.clone()
    }

    pub(crate) fn node(&self) -> Node {
        let mut node = self.node.clone();
        let (flags, feature_metrics) = (self.flags_of(NodeSettings::KEY), self.feature_metrics());
        node.shown = ShownSettings { flags, feature_metrics };
        node
    }

    /// The settings of a table and those outside tables, as texts by the names of their flags.
    fn flags_of(&self, table: &str) -> BTreeMap<String, String> {
        let tables = ["", table].into_iter().filter_map(|table| self.resolved.get(table));
        tables.flatten().map(|(name, text)| ((*name).to_owned(), text.clone())).collect()
    }

    /// The socket of the container runtime that runs the pods. `None` for the built-in runtime.
    pub(crate) fn container_runtime_endpoint(&self) -> Option<&str> {
        self.container_runtime_endpoint.as_deref()
    }

    /// Fails if a setting has a value, but no effect on a runtime in another process.
    pub(crate) fn check_remote_runtime(&self) -> anyhow::Result<()> {
        let ignored = &self.ignored_by_remote_runtime;
        anyhow::ensure!(
            ignored.is_empty(),
            "{} cannot be set with --container-runtime-endpoint: that runtime has its own settings",
            ignored.join(", ")
        );
        Ok(())
    }

    /// The feature gates that are switches of the API server.
    #[cfg(feature = "controlplane")]
    pub(crate) fn server_features(&self) -> coracle_controlplane::ServerFeatures {
        self.server_features
    }

    /// The metric of the feature gates in the text format of Prometheus.
    pub(crate) fn feature_metrics(&self) -> Arc<str> {
        Arc::clone(&self.feature_metrics)
    }

    #[cfg(feature = "controlplane")]
    pub(crate) fn control_plane(&self) -> ControlPlane {
        self.plane.clone()
    }

    /// The settings of the control plane as texts, by the names of their flags.
    #[cfg(feature = "controlplane")]
    pub(crate) fn control_plane_flags(&self) -> BTreeMap<String, String> {
        self.flags_of(ControlPlaneSettings::KEY)
    }
}

/// Starts the log of a command that has no other settings.
pub(crate) fn start_log(flags: &Flags<LogSettings>) -> anyhow::Result<()> {
    let mut sources = Sources::new(std::env::vars_os());
    let log = flags.resolve(&mut sources);
    sources.check()?;
    if let Some(log) = log {
        log.start(DefaultLevel::Command);
    }
    Ok(())
}

/// Reads the environment and the configuration files. Flags or the environment name the files.
fn sources<T: Table>(flags: &Flags<T>) -> anyhow::Result<Sources> {
    let mut sources = Sources::new(std::env::vars_os());
    let named = |name: &str| {
        let flag = flags.flag_values().get(name).and_then(|texts| texts.last());
        flag.or_else(|| sources.environment.get(&field::variable(name))).map(PathBuf::from)
    };
    let default = || Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.exists());
    let (config, config_dir) = (named("config").or_else(default), named("config-dir"));
    sources.file = read(config.as_deref(), config_dir.as_deref())?;
    Ok(sources)
}

/// Reads a TOML file, or the kubelet's YAML and the files that are merged into it.
fn read(config: Option<&Path>, config_dir: Option<&Path>) -> anyhow::Result<File> {
    if let Some(path) = config.filter(|path| !is_of_kubelet(path)) {
        anyhow::ensure!(
            config_dir.is_none(),
            "config-dir belongs to a KubeletConfiguration, and {} is TOML; set config to a .yaml file",
            path.display()
        );
        let kubelet::Text { place, text } = text(path)?;
        return File::parse_toml(&text, &place, TABLES);
    }
    let further = config_dir.map(kubelet::in_directory).transpose()?.unwrap_or_default();
    let all = config.into_iter().chain(further.iter().map(PathBuf::as_path));
    kubelet::parse(&all.map(text).collect::<anyhow::Result<Vec<_>>>()?)
}

/// Whether the file has the kubelet's format.
fn is_of_kubelet(path: &Path) -> bool {
    matches!(path.extension().and_then(|extension| extension.to_str()), Some("yaml" | "yml" | "json"))
}

fn text(path: &Path) -> anyhow::Result<kubelet::Text> {
    let text = coracle_agent::read_text(path, FILE_MAX)
        .with_context(|| format!("cannot read the configuration {}", path.display()))?;
    Ok(kubelet::Text { place: path.display().to_string(), text })
}

fn log_unknown_variables(sources: &Sources) {
    let known: Vec<_> = TABLES.iter().map(|(_, fields)| *fields).collect();
    for variable in sources.unknown_variables(&known) {
        let did_you_mean = nearest::variable_like(variable, TABLES);
        tracing::warn!(variable, did_you_mean, "ignoring an environment variable that is not a setting");
    }
}

/// Makes a path absolute, because other processes and mount namespaces that use it have other working directories.
fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("{} is not a path", path.display()))
}

/// The address, or all addresses with this port. One socket serves both families if `bindv6only` is 0.
fn address_or_port(address: Option<SocketAddr>, port: u16) -> SocketAddr {
    address.unwrap_or_else(|| {
        let only_v6 = std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only");
        let any = match only_v6.as_deref().map(str::trim) {
            Ok("0") => Ipv6Addr::UNSPECIFIED.into(),
            _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        };
        SocketAddr::new(any, port)
    })
}

#[cfg(test)]
mod tests;

//! Settings of the node resource interface (NRI).

use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_cri::NriSettings;

use super::value::PathOrOff;

/// Run directory of the node's own runtime. A second runtime has another directory, and must not start the node's
/// plugins.
const OWN_RUN_DIR: &str = "/run/coracle";

/// Settings of plugins as the user gave them.
pub(super) struct Plugins {
    pub(super) socket: Option<PathOrOff>,
    /// Directory of the plugins.
    pub(super) dir: Option<PathOrOff>,
    /// Directory of their configurations.
    pub(super) config_dir: PathBuf,
    pub(super) registration_timeout: Duration,
    pub(super) request_timeout: Duration,
}

// === impl Plugins ===

impl Plugins {
    /// The runtime with the default run directory uses the default paths of NRI. Another runtime has its socket in its
    /// own run directory, and starts no plugins unless a setting names them. Refuses timeouts with which each plugin
    /// fails.
    pub(super) fn decide(self, run_dir: &Path) -> anyhow::Result<NriSettings> {
        for (name, timeout) in
            [("registration", self.registration_timeout), ("request", self.request_timeout)]
        {
            anyhow::ensure!(!timeout.is_zero(), "nri-plugin-{name}-timeout must be more than 0");
        }
        let own = run_dir == Path::new(OWN_RUN_DIR);
        let socket = self.socket.unwrap_or_else(|| {
            PathOrOff(Some(if own { "/var/run/nri/nri.sock".into() } else { run_dir.join("nri.sock") }))
        });
        let plugins = self.dir.unwrap_or_else(|| PathOrOff(own.then(|| "/opt/nri/plugins".into())));
        Ok(NriSettings {
            socket: socket.0,
            plugins: plugins.0,
            configs: self.config_dir,
            registration_timeout: self.registration_timeout,
            request_timeout: self.request_timeout,
            ..NriSettings::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_nodes_own_runtime_uses_the_default_paths() {
        let of = |socket, plugins, run_dir| {
            let plugins = Plugins {
                socket,
                dir: plugins,
                config_dir: "/etc/nri/conf.d".into(),
                registration_timeout: Duration::from_secs(5),
                request_timeout: Duration::from_secs(2),
            };
            let settings = plugins.decide(Path::new(run_dir)).unwrap();
            (settings.socket, settings.plugins)
        };
        let own = of(None, None, "/run/coracle");
        assert_eq!(own, (Some("/var/run/nri/nri.sock".into()), Some("/opt/nri/plugins".into())));
        assert_eq!(of(None, None, "/tmp/other"), (Some("/tmp/other/nri.sock".into()), None));
        assert_eq!(of(Some(PathOrOff(None)), Some(PathOrOff(None)), "/run/coracle"), (None, None));
    }
}

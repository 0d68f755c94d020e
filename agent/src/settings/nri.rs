//! Settings of the node resource interface (NRI).

use std::path::{Path, PathBuf};

use coracle_cri::NriSettings;

use super::value::PathOrOff;

/// Run directory of the node's own runtime. A second runtime has another directory, and must not start the node's
/// plugins.
const OWN_RUN_DIR: &str = "/run/coracle";

/// The runtime with the default run directory uses the default paths of NRI. Another runtime has its socket in its own
/// run directory, and starts no plugins unless a setting names them. `plugins` is the directory of the plugins, and
/// `configs` is the directory of their configurations.
pub(super) fn decide(
    socket: Option<PathOrOff>,
    plugins: Option<PathOrOff>,
    configs: PathBuf,
    run_dir: &Path,
) -> NriSettings {
    let own = run_dir == Path::new(OWN_RUN_DIR);
    let socket = socket.unwrap_or_else(|| {
        PathOrOff(Some(if own { "/var/run/nri/nri.sock".into() } else { run_dir.join("nri.sock") }))
    });
    let plugins = plugins.unwrap_or_else(|| PathOrOff(own.then(|| "/opt/nri/plugins".into())));
    NriSettings { socket: socket.0, plugins: plugins.0, configs, ..NriSettings::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_nodes_own_runtime_uses_the_default_paths() {
        let of = |socket, plugins, run_dir| {
            let settings = decide(socket, plugins, "/etc/nri/conf.d".into(), Path::new(run_dir));
            (settings.socket, settings.plugins)
        };
        let own = of(None, None, "/run/coracle");
        assert_eq!(own, (Some("/var/run/nri/nri.sock".into()), Some("/opt/nri/plugins".into())));
        assert_eq!(of(None, None, "/tmp/other"), (Some("/tmp/other/nri.sock".into()), None));
        assert_eq!(of(Some(PathOrOff(None)), Some(PathOrOff(None)), "/run/coracle"), (None, None));
    }
}

//! Settings of NRI, the same for every role that has a runtime.

use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser};
use coracle_cri::NriSettings;

/// What the flags say: a socket, a folder of plugins, a folder of their configurations.
pub(crate) type Asked = (Option<PathBuf>, Option<PathBuf>, Option<PathBuf>);

/// The run directory of a node's own runtime. Another one is beside it, and must not take its plugins.
const OWN: &str = "/run/coracle";

/// Reads a flag that may be empty, which clap's own paths may not.
pub(crate) fn place() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// Decides what was not asked for: the places that NRI plugins know, for the runtime with the default
/// run directory; for another, a socket below its own. An empty path switches off.
pub(crate) fn decide((socket, plugins, configs): Asked, run_dir: &Path) -> NriSettings {
    let own = run_dir == Path::new(OWN);
    let socket = socket.unwrap_or_else(|| match own {
        true => "/var/run/nri/nri.sock".into(),
        false => run_dir.join("nri.sock"),
    });
    let plugins = plugins.or_else(|| own.then(|| "/opt/nri/plugins".into()));
    let some = |path: PathBuf| (!path.as_os_str().is_empty()).then_some(path);
    let defaults = NriSettings::default();
    NriSettings {
        socket: some(socket),
        plugins: plugins.and_then(some),
        configs: configs.unwrap_or(defaults.configs),
        ..defaults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_nodes_own_runtime_uses_the_known_places() {
        let own = decide((None, None, None), Path::new("/run/coracle"));
        assert_eq!(own.socket, Some("/var/run/nri/nri.sock".into()));
        assert_eq!(own.plugins, Some("/opt/nri/plugins".into()));
        let other = decide((None, None, None), Path::new("/tmp/other"));
        assert_eq!((other.socket, other.plugins), (Some("/tmp/other/nri.sock".into()), None));
        let off = decide((Some("".into()), Some("".into()), None), Path::new("/run/coracle"));
        assert_eq!((off.socket, off.plugins), (None, None));
    }
}

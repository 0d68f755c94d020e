//! Settings without an effect on another container runtime (`--container-runtime-endpoint`).

use super::NodeSettings;
use super::field::variable;
use super::sources::Sources;
use super::table::{Flags, Table};

/// Settings of networks, images and containers. Another container runtime has its own settings for them.
const BUILT_IN_RUNTIME_SETTINGS: [&str; 27] = [
    "cni-conf-dir",
    "cni-bin-dir",
    "bridge",
    "nft-table",
    "mtu",
    "overlay",
    "overlay-interface",
    "overlay-vni",
    "overlay-port",
    "overlay-udp-port",
    "overlay-direct-routing",
    "overlay-route-protocol",
    "pinned-image",
    "registry-config-dir",
    "image-pull-progress-timeout",
    "max-concurrent-downloads",
    "max-layer-size",
    "max-layer-entries",
    "nri-socket",
    "nri-plugin-dir",
    "nri-plugin-config-dir",
    "nri-plugin-registration-timeout",
    "nri-plugin-request-timeout",
    "cdi-spec-dir",
    "container-log-max-size",
    "container-log-max-files",
    "streaming-connection-idle-timeout",
];

/// The names of such settings that a flag, the environment or the file sets.
pub(super) fn ignored(flags: &Flags<NodeSettings>, sources: &Sources) -> Vec<&'static str> {
    let is_set = |name: &'static str| {
        flags.flag_values().contains_key(name)
            || sources.environment.contains_key(&variable(name))
            || sources.file.get(NodeSettings::KEY, name).is_some()
    };
    BUILT_IN_RUNTIME_SETTINGS.into_iter().filter(|name| is_set(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_a_setting() {
        let known: Vec<&str> = NodeSettings::FIELDS.iter().flat_map(|field| field.names()).collect();
        for name in BUILT_IN_RUNTIME_SETTINGS {
            assert!(known.contains(&name), "{name}");
        }
    }

    #[test]
    fn a_setting_counts_only_when_it_is_set() {
        let flags = Flags::default();
        assert!(ignored(&flags, &Sources::default()).is_empty());
        let variables = [("CORACLE_BRIDGE".into(), "b".into()), ("CORACLE_MAX_PODS".into(), "9".into())];
        assert_eq!(ignored(&flags, &Sources::new(variables)), ["bridge"]);
    }
}

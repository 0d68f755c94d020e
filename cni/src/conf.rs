//! Network configuration lists: what of a CNI list we run in process.
//!
//! A list of `bridge` with `host-local` (and `portmap`, `firewall` or `loopback`, whose work is done in any
//! case) is ours. Any other plugin is refused by name: running foreign plugins is not built yet.

use std::path::{Path, PathBuf};

use ipnetwork::IpNetwork;
use serde::Deserialize;

use crate::error::Error;

/// What a list says of our network.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Conf {
    pub(crate) bridge: Option<String>,
    pub(crate) mtu: Option<u32>,
    pub(crate) subnets: Vec<IpNetwork>,
}

#[derive(Deserialize)]
struct List {
    #[serde(default)]
    plugins: Vec<Plugin>,
}

#[derive(Deserialize)]
struct Plugin {
    #[serde(rename = "type")]
    kind: String,
    bridge: Option<String>,
    mtu: Option<u32>,
    #[serde(default)]
    ipam: Ipam,
}

#[derive(Default, Deserialize)]
struct Ipam {
    #[serde(default, rename = "type")]
    kind: String,
    subnet: Option<IpNetwork>,
    #[serde(default)]
    ranges: Vec<Vec<Range>>,
}

#[derive(Deserialize)]
struct Range {
    subnet: IpNetwork,
}

/// Reads the first list of the directory, by name, as CNI runtimes choose it; none when there is none.
pub(crate) fn read(dir: &Path) -> Result<Option<Conf>, Error> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| Error::File { action, path, source }
    };
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed("read", dir))? {
        let path = entry.map_err(failed("read", dir))?.path();
        if path.extension().is_some_and(|e| e == "conflist" || e == "conf" || e == "json") {
            files.push(path);
        }
    }
    files.sort();
    let Some(path) = files.first() else { return Ok(None) };
    let text = std::fs::read_to_string(path).map_err(failed("read", path))?;
    parse(&text).map(Some).map_err(|reason| Error::Configuration { path: path.clone(), reason })
}

fn parse(text: &str) -> Result<Conf, String> {
    let list: List = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let plugins = if list.plugins.is_empty() {
        vec![serde_json::from_str::<Plugin>(text).map_err(|error| error.to_string())?]
    } else {
        list.plugins
    };
    let foreign =
        |plugin: &&Plugin| !["bridge", "portmap", "firewall", "loopback"].contains(&plugin.kind.as_str());
    if let Some(plugin) = plugins.iter().find(foreign) {
        return Err(format!(
            "plugin type {:?} cannot be run: only bridge, portmap, firewall and loopback are built in",
            plugin.kind
        ));
    }
    let bridge = plugins.into_iter().find(|p| p.kind == "bridge").ok_or("no plugin of type bridge")?;
    if bridge.ipam.kind != "host-local" {
        return Err(format!("ipam type {:?} cannot be run: only host-local is built in", bridge.ipam.kind));
    }
    let mut subnets: Vec<IpNetwork> = bridge.ipam.subnet.into_iter().collect();
    for set in bridge.ipam.ranges {
        match &set[..] {
            [range] => subnets.push(range.subnet),
            _ => return Err("each range set must have exactly one range".to_owned()),
        }
    }
    if subnets.is_empty() {
        return Err("ipam names no subnet".to_owned());
    }
    Ok(Conf { bridge: bridge.bridge, mtu: bridge.mtu, subnets })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bridge_list_is_ours() {
        let text = r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge","bridge":"cni0","mtu":1400,
            "ipam":{"type":"host-local","ranges":[[{"subnet":"10.1.0.0/16"}],[{"subnet":"fd00::/64"}]]}},{"type":"portmap"}]}"#;
        let subnets = vec!["10.1.0.0/16".parse().unwrap(), "fd00::/64".parse().unwrap()];
        assert_eq!(parse(text), Ok(Conf { bridge: Some("cni0".into()), mtu: Some(1400), subnets }));
    }

    #[test]
    fn what_we_cannot_run_is_refused_by_name() {
        let refused = |text: &str| parse(text).unwrap_err();
        assert!(refused(r#"{"plugins":[{"type":"macvlan"}]}"#).contains("\"macvlan\""));
        assert!(refused(r#"{"type":"bridge","ipam":{"type":"dhcp"}}"#).contains("\"dhcp\""));
        assert!(refused(r#"{"type":"bridge","ipam":{"type":"host-local"}}"#).contains("no subnet"));
        assert!(refused("{").contains("EOF"));
    }
}

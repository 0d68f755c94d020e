//! Settings of the overlay between nodes.

use clap::ValueEnum;
use coracle_cni::{Backend, OverlayConfig};
use serde::Deserialize;

/// How pods of other nodes are reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Overlay {
    /// VXLAN, in the kernel; in UDP where the kernel has none
    Vxlan,
    /// Routes by the nodes' addresses, which must be in one subnet
    HostGw,
    /// IP in UDP, through a tun device
    Udp,
    /// Not by us
    None,
}

/// What the flags say, before names and MTU.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asked {
    pub(crate) overlay: Option<Overlay>,
    pub(crate) vni: Option<u32>,
    pub(crate) port: Option<u16>,
    pub(crate) udp_port: Option<u16>,
    pub(crate) direct_routing: Option<bool>,
    pub(crate) route_protocol: Option<u8>,
}

/// Decides what was not asked for: flannel's numbers, so that its nodes and ours form one network.
pub(crate) fn decide(
    asked: Asked,
    (interface, node): (Option<String>, &str),
    mtu: Option<u32>,
) -> anyhow::Result<Option<OverlayConfig>> {
    let vni = asked.vni.unwrap_or(1);
    anyhow::ensure!((1..1 << 24).contains(&vni), "overlay-vni is a number from 1 to 16777215, not {vni}");
    let backend = match asked.overlay.unwrap_or(Overlay::Vxlan) {
        Overlay::Vxlan => Backend::Vxlan {
            vni,
            port: asked.port.unwrap_or(8472),
            direct_routing: asked.direct_routing.unwrap_or(false),
        },
        Overlay::HostGw => Backend::HostGw,
        Overlay::Udp => Backend::Udp,
        Overlay::None => return Ok(None),
    };
    Ok(Some(OverlayConfig {
        backend,
        interface: interface.unwrap_or_else(|| format!("coracle.{vni}").chars().take(11).collect()),
        identity: node.to_owned(),
        mtu,
        udp_port: asked.udp_port.unwrap_or(8285),
        route_protocol: asked.route_protocol.unwrap_or(OverlayConfig::ROUTE_PROTOCOL),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_flannels() {
        let config = decide(Asked::default(), (None, "n1"), None).unwrap().unwrap();
        assert_eq!(config.backend, Backend::Vxlan { vni: 1, port: 8472, direct_routing: false });
        assert_eq!((config.interface.as_str(), config.udp_port), ("coracle.1", 8285));
        let none = Asked { overlay: Some(Overlay::None), ..Asked::default() };
        assert!(decide(none, (None, "n1"), None).unwrap().is_none());
        let wrong = Asked { vni: Some(1 << 24), ..Asked::default() };
        assert!(decide(wrong, (None, "n1"), None).is_err());
    }
}

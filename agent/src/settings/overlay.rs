//! Settings of the overlay between nodes.

use clap::ValueEnum;
use coracle_cni::{Backend, OverlayConfig};

use super::NodeSettings;
use super::value::choices;

/// The transport of packets to the pods of other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Overlay {
    /// VXLAN in the kernel. UDP on kernels without VXLAN.
    Vxlan,
    /// Routes to the addresses of the nodes, which must be in one subnet.
    HostGw,
    /// IP in UDP, through a tun device.
    Udp,
    /// No overlay.
    None,
}

choices!(Overlay);

/// The overlay of the node named `node`. The defaults are flannel's numbers, so that nodes with flannel and nodes with
/// coracle can form one network.
pub(super) fn decide(settings: &NodeSettings, node: &str) -> anyhow::Result<Option<OverlayConfig>> {
    let vni = settings.overlay_vni;
    anyhow::ensure!((1..1 << 24).contains(&vni), "overlay-vni is {vni}: use a number from 1 to 16777215");
    let route_protocol = settings.overlay_route_protocol;
    // Linux has names for the numbers below 5: redirect, kernel, boot, static.
    anyhow::ensure!(
        route_protocol >= 5,
        "overlay-route-protocol is {route_protocol}: use a number from 5 to 255"
    );
    let backend = match settings.overlay {
        Overlay::Vxlan => Backend::Vxlan {
            vni,
            port: settings.overlay_port,
            direct_routing: settings.overlay_direct_routing,
        },
        Overlay::HostGw => Backend::HostGw,
        Overlay::Udp => Backend::Udp,
        Overlay::None => return Ok(None),
    };
    let interface = settings.overlay_interface.clone();
    Ok(Some(OverlayConfig {
        backend,
        interface: interface.unwrap_or_else(|| format!("coracle.{vni}").chars().take(11).collect()),
        identity: node.to_owned(),
        mtu: settings.mtu,
        udp_port: settings.overlay_udp_port,
        route_protocol,
    }))
}

#[cfg(test)]
mod tests {
    use super::super::tests::node_settings;
    use super::*;

    fn of(text: &str) -> anyhow::Result<Option<OverlayConfig>> {
        decide(&node_settings(text).unwrap(), "n1")
    }

    #[test]
    fn the_defaults_are_flannels() {
        let config = of("").unwrap().unwrap();
        assert_eq!(config.backend, Backend::Vxlan { vni: 1, port: 8472, direct_routing: false });
        assert_eq!((config.interface.as_str(), config.udp_port), ("coracle.1", 8285));
        assert_eq!(config.route_protocol, OverlayConfig::ROUTE_PROTOCOL);
        assert!(of("overlay = \"none\"").unwrap().is_none());
        assert!(of("overlay-vni = 16777216").is_err());
        assert!(of("overlay-route-protocol = 4").is_err());
    }
}

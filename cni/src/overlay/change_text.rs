//! The text of changes of the kernel's tables in errors.

use std::collections::BTreeMap;

use super::plan::{Change, OutInterface, Port};
use crate::link::format_mac;

/// Describes a change. `names` has the interfaces of the overlay.
pub(crate) fn describe(change: &Change, names: &BTreeMap<Port, String>) -> String {
    let name = |port: &Port| names.get(port).map_or("the overlay's interface", String::as_str);
    match change {
        Change::RemoveDevice(port) => format!("to remove the interface {}", name(port)),
        Change::MakeDevice(port, _) => format!("to make the interface {}", name(port)),
        Change::SetDevice(port, _) => format!("to change the interface {}", name(port)),
        Change::RemoveAddress(port, ip) => format!("to remove the address {ip} of {}", name(port)),
        Change::AddAddress(port, ip) => format!("to add the address {ip} to {}", name(port)),
        Change::RemoveRoute(to, _) => format!("to remove the route to {to}"),
        Change::AddRoute(to, route) => {
            let via = route.via.map(|via| format!(" via {via}")).unwrap_or_default();
            let out = match route.out {
                OutInterface::Device(port) => name(&port).to_owned(),
                OutInterface::Interface(index) => format!("the interface with the index {index}"),
            };
            format!("to add the route to {to}{via} through {out}")
        }
        Change::RemoveNeighbour(n) => format!("to remove the neighbour {} of {}", n.ip, name(&n.port)),
        Change::AddNeighbour(n) => {
            format!("to add the neighbour {} ({}) to {}", n.ip, format_mac(&n.mac), name(&n.port))
        }
        Change::RemoveForward(f) => {
            format!("to remove the forwarding entry {} of {}", format_mac(&f.mac), name(&f.port))
        }
        Change::AddForward(f) => {
            format!("to add the forwarding entry {} to {} on {}", format_mac(&f.mac), f.to, name(&f.port))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Neighbour, Route};
    use super::*;

    #[test]
    fn changes_name_their_objects() {
        let names = BTreeMap::from([(Port::Vxlan4, "cora.4".to_owned())]);
        let route = |out| Route { via: Some([10, 0, 0, 2].into()), out, source: None, mtu: Some(1400) };
        let to = "10.42.1.0/24".parse().unwrap();
        let ip = [10, 0, 0, 2].into();
        let neighbour = Neighbour { port: Port::Vxlan4, ip, mac: [2, 0, 0, 0, 0, 1] };
        for (change, text) in [
            (Change::RemoveDevice(Port::Vxlan4), "to remove the interface cora.4"),
            (
                Change::AddRoute(to, route(OutInterface::Device(Port::Vxlan4))),
                "to add the route to 10.42.1.0/24 via 10.0.0.2 through cora.4",
            ),
            (
                Change::AddRoute(to, route(OutInterface::Interface(7))),
                "to add the route to 10.42.1.0/24 via 10.0.0.2 through the interface with the index 7",
            ),
            (Change::AddNeighbour(neighbour), "to add the neighbour 10.0.0.2 (02:00:00:00:00:01) to cora.4"),
        ] {
            assert_eq!(describe(&change, &names), text);
        }
    }
}

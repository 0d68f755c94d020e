//! Owners of the hardware addresses of VXLAN devices. Pure.
//!
//! The kernel has one destination for each hardware address. A node that announces the hardware address of another node
//! would get the packets for that node.

use std::collections::HashMap;
use std::net::IpAddr;

use foldhash::fast::RandomState;
use ipnetwork::IpNetwork;

use super::{Forward, Mac, Neighbour, Port, Route, hardware_address};

/// The entries for one range of a peer.
pub(super) struct PlannedRange {
    pub(super) to: IpNetwork,
    /// Address of the peer's node.
    pub(super) by: IpAddr,
    /// Whether the peer's pods use the family of the range.
    pub(super) answers: bool,
    pub(super) route: Route,
    pub(super) hop: Option<(Forward, Neighbour)>,
}

/// The owner of each hardware address.
pub(super) struct Owners<'a>(HashMap<(Port, Mac), Owner<'a>, RandomState>);

/// A peer that announces a hardware address.
#[derive(Clone, Copy)]
struct Owner<'a> {
    name: &'a str,
    to: IpAddr,
    /// Whether the address is derived from the name.
    is_derived: bool,
    /// Another peer from whose name the address is derived as well. An attacker can choose such a name.
    colliding_peer: Option<&'a str>,
}

// === impl PlannedRange ===

impl PlannedRange {
    /// The hardware address of the next hop, and the device for it.
    pub(super) fn announced(&self) -> Option<(Port, Mac)> {
        self.hop.map(|(forward, _)| (forward.port, forward.mac))
    }
}

// === impl Owners ===

impl<'a> Owners<'a> {
    /// If several peers announce one address, the owner is the peer from whose name the address is derived, otherwise
    /// the first peer. If the address is derived from the names of several peers, none of them is the owner.
    pub(super) fn of(planned: &[(&'a String, Vec<PlannedRange>)]) -> Self {
        let mut owners = Self(HashMap::with_capacity_and_hasher(planned.len(), RandomState::default()));
        for (name, ranges) in planned {
            let name: &'a str = name;
            for (Forward { port, mac, to }, _) in ranges.iter().filter_map(|range| range.hop) {
                let is_derived = hardware_address(name, port == Port::Vxlan6) == mac;
                owners.add(port, mac, Owner { name, to, is_derived, colliding_peer: None });
            }
        }
        owners
    }

    fn add(&mut self, port: Port, mac: Mac, new: Owner<'a>) {
        let owner = self.0.entry((port, mac)).or_insert(new);
        if !new.is_derived {
            return;
        }
        if !owner.is_derived {
            *owner = new;
        } else if owner.name != new.name && owner.to != new.to {
            owner.colliding_peer = Some(new.name);
        }
    }

    /// The owner of the hardware address of this range's next hop, if it is another node with another destination.
    pub(super) fn conflicting_owner(&self, name: &str, range: &PlannedRange) -> Option<&'a str> {
        let (forward, _) = range.hop?;
        self.other_than(name, forward)
    }

    fn other_than(&self, name: &str, Forward { port, mac, to }: Forward) -> Option<&'a str> {
        let owner = self.0.get(&(port, mac))?;
        match owner.colliding_peer {
            Some(colliding_peer) if owner.name == name => Some(colliding_peer),
            Some(_) => Some(owner.name),
            None => (owner.name != name && owner.to != to).then_some(owner.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_derived_from_two_names_belongs_to_neither() {
        let mac = [2; 6];
        let to = |number: u8| IpAddr::from([192, 0, 2, number]);
        let forward = |number: u8| Forward { port: Port::Vxlan4, mac, to: to(number) };
        let mut owners = Owners(HashMap::default());
        for (name, number, is_derived) in [("n1", 1, false), ("n2", 2, true), ("n2", 2, true)] {
            owners.add(Port::Vxlan4, mac, Owner { name, to: to(number), is_derived, colliding_peer: None });
        }
        let other = |owners: &Owners<'_>, name: &str, number| {
            owners.other_than(name, forward(number)).map(str::to_owned)
        };
        assert_eq!(other(&owners, "n2", 2), None);
        assert_eq!(other(&owners, "n1", 1).as_deref(), Some("n2"));
        owners.add(
            Port::Vxlan4,
            mac,
            Owner { name: "n3", to: to(3), is_derived: true, colliding_peer: None },
        );
        assert_eq!(other(&owners, "n2", 2).as_deref(), Some("n3"));
        assert_eq!(other(&owners, "n3", 3).as_deref(), Some("n2"));
        assert_eq!(other(&owners, "n1", 1).as_deref(), Some("n2"));
    }
}

//! Owners of the hardware addresses of VXLAN devices. Pure.
//!
//! The kernel has one destination for each hardware address. A node that announces the address of another one would get
//! the packets for it.

use std::collections::HashMap;
use std::net::IpAddr;

use foldhash::fast::RandomState;
use ipnetwork::IpNetwork;

use super::{Forward, Mac, Neighbour, Port, Route, hardware_address};

/// The entries for one range of a peer.
pub(super) struct PlannedRange {
    pub(super) to: IpNetwork,
    pub(super) by: IpAddr,
    pub(super) answers: bool,
    pub(super) route: Route,
    pub(super) hop: Option<(Forward, Neighbour)>,
}

/// Name and destination of the owner of each hardware address.
pub(super) struct Owners<'a>(HashMap<(Port, Mac), (&'a str, IpAddr), RandomState>);

// === impl PlannedRange ===

impl PlannedRange {
    /// The hardware address of the next hop.
    pub(super) fn announced(&self) -> Option<(Port, Mac)> {
        self.hop.map(|(forward, _)| (forward.port, forward.mac))
    }
}

// === impl Owners ===

impl<'a> Owners<'a> {
    /// Of several peers with one address, the owner is the one from whose name the address is derived, else the first one.
    pub(super) fn of(planned: &[(&'a String, Vec<PlannedRange>)]) -> Self {
        let mut owners = HashMap::with_capacity_and_hasher(planned.len(), RandomState::default());
        for (name, ranges) in planned {
            let name: &'a str = name;
            for (Forward { port, mac, to }, _) in ranges.iter().filter_map(|range| range.hop) {
                let owner = owners.entry((port, mac)).or_insert((name, to));
                if hardware_address(name, port == Port::Vxlan6) == mac {
                    *owner = (name, to);
                }
            }
        }
        Self(owners)
    }

    /// The owner of the hardware address of this range's next hop, if it is another node with another destination.
    pub(super) fn another(&self, name: &str, range: &PlannedRange) -> Option<&'a str> {
        let (Forward { port, mac, to }, _) = range.hop?;
        let (owner, destination) = *self.0.get(&(port, mac))?;
        (owner != name && destination != to).then_some(owner)
    }
}

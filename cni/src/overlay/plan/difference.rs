//! The changes from one state of the tables to another.

use std::collections::HashSet;
use std::net::IpAddr;

use super::super::Mac;
use super::{Change, Device, Kind, Neighbour, OutInterface, Port, Route, Tables};

/// The changes from observed to desired tables.
pub(crate) fn difference(wanted: &Tables, observed: &Tables) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut gone: HashSet<Port> = HashSet::new();
    for (port, device) in &observed.devices {
        if wanted.devices.get(port).is_none_or(|want| must_be_replaced(want, device)) {
            changes.push(Change::RemoveDevice(*port));
            gone.insert(*port);
        }
    }
    for (port, want) in &wanted.devices {
        match observed.devices.get(port).filter(|_| !gone.contains(port)) {
            None => {
                changes.push(Change::MakeDevice(*port, want.clone()));
                changes.extend(want.addresses.iter().map(|ip| Change::AddAddress(*port, *ip)));
            }
            Some(have) => {
                if (&want.kind, want.mtu, want.up) != (&have.kind, have.mtu, have.up) {
                    changes.push(Change::SetDevice(*port, want.clone()));
                }
                let (add, remove) = (&want.addresses - &have.addresses, &have.addresses - &want.addresses);
                changes.extend(remove.iter().map(|ip| Change::RemoveAddress(*port, *ip)));
                changes.extend(add.iter().map(|ip| Change::AddAddress(*port, *ip)));
            }
        }
    }
    entries(wanted, observed, &gone, &mut changes);
    changes
}

/// Whether a device has to be replaced, because the kernel cannot change a property of an existing device. The kernel
/// can change the addresses, the uplink and the MTU.
fn must_be_replaced(want: &Device, have: &Device) -> bool {
    match (&want.kind, &have.kind) {
        (
            Kind::Vxlan { vni, port, mac, learning, local, .. },
            Kind::Vxlan {
                vni: has_vni,
                port: has_port,
                mac: has_mac,
                learning: has_learning,
                local: has_local,
                ..
            },
        ) => {
            (vni, port, mac, learning, local.is_ipv6())
                != (has_vni, has_port, has_mac, has_learning, has_local.is_ipv6())
        }
        (Kind::Tun, Kind::Tun) => false,
        _ => true,
    }
}

fn entries(wanted: &Tables, observed: &Tables, gone: &HashSet<Port>, changes: &mut Vec<Change>) {
    let leaves_by_gone =
        |route: &Route| matches!(route.out, OutInterface::Device(port) if gone.contains(&port));
    for (to, have) in &observed.routes {
        // A route to the same range is replaced without a removal, so that no packet is lost. An IPv6 route of another
        // device is removed first, because with this route the kernel would refuse the next hop of the new route.
        let must_be_removed = |want: &Route| to.is_ipv6() && want.out != have.out;
        if wanted.routes.get(to).is_none_or(must_be_removed) && !leaves_by_gone(have) {
            changes.push(Change::RemoveRoute(*to, *have));
        }
    }
    let is_kept = |port: Port| !gone.contains(&port);
    let neighbour =
        |((port, ip), mac): (&(Port, IpAddr), &Mac)| Neighbour { port: *port, ip: *ip, mac: *mac };
    // The kernel replaces an entry with the same address. A later removal would remove the new entry.
    let old =
        observed.neighbours.iter().filter(|(key, _)| is_kept(key.0) && !wanted.neighbours.contains_key(key));
    changes.extend(old.map(|entry| Change::RemoveNeighbour(neighbour(entry))));
    let old = observed.forwards.iter().filter(|f| is_kept(f.port) && !wanted.forwards.contains(f));
    changes.extend(old.map(|f| Change::RemoveForward(*f)));
    let new = wanted.forwards.iter().filter(|f| !is_kept(f.port) || !observed.forwards.contains(f));
    changes.extend(new.map(|f| Change::AddForward(*f)));
    let new = wanted.neighbours.iter();
    let new = new.filter(|(key, mac)| !is_kept(key.0) || observed.neighbours.get(key) != Some(mac));
    changes.extend(new.map(|entry| Change::AddNeighbour(neighbour(entry))));
    for (to, want) in &wanted.routes {
        if leaves_by_gone(want) || observed.routes.get(to) != Some(want) {
            changes.push(Change::AddRoute(*to, *want));
        }
    }
}

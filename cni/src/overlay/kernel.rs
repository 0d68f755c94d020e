//! Access to the kernel's tables: dumps, and messages that change them.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnetwork::IpNetwork;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage};
use netlink_packet_route::route::{RouteAttribute, RouteHeader, RouteMessage, RouteMetric, RouteProtocol};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::change_text::describe;
use super::device;
use super::error::OverlayError;
use super::message::{
    InterfaceAddress, address, forward, ip, is_link_local, is_ours, neighbour, new_route, old_route,
    read_address, read_forward, read_neighbour,
};
use super::plan::{Change, Device, Kind, OutInterface, Port, Route, Tables, Uplink};
use crate::route_socket::{RefusedRequest, Request, RouteSocket};
use crate::sysctl;

/// Maximum attempts of a dump. A dump is repeated if the table changes during the dump.
const DUMP_ATTEMPTS: usize = 10;

/// The tables of one network namespace.
pub(crate) struct Kernel {
    socket: RouteSocket,
    names: BTreeMap<Port, String>,
    /// Protocol number of our routes (`rtm_protocol`).
    protocol: RouteProtocol,
    indexes: BTreeMap<Port, u32>,
    /// The interfaces that the last call of [`uplinks`](Self::uplinks) found.
    uplinks: Vec<u32>,
    /// Indexes of foreign interfaces that conflict with an interface of the overlay: they have its name, or its VNI and
    /// UDP port.
    blockers: Vec<u32>,
}

// === impl Kernel ===

impl Kernel {
    pub(crate) fn open(names: BTreeMap<Port, String>, protocol: u8) -> Result<Self, OverlayError> {
        let socket = RouteSocket::open();
        let socket = socket.map_err(|source| OverlayError::Socket { action: "open", source })?;
        Ok(Self {
            socket,
            names,
            protocol: protocol.into(),
            indexes: BTreeMap::new(),
            uplinks: Vec::new(),
            blockers: Vec::new(),
        })
    }

    /// Whether the kernel supports VXLAN. Without support, a request for a device without VNI fails with EOPNOTSUPP.
    pub(crate) fn has_vxlan(&mut self) -> Result<bool, OverlayError> {
        let refused = self.send(vec![Request::new(device::vxlan_probe(), NLM_F_CREATE | NLM_F_EXCL)])?;
        Ok(refused.iter().all(|refused| refused.error.raw_os_error() != Some(libc::EOPNOTSUPP)))
    }

    pub(crate) fn name(&self, port: Port) -> Option<&str> {
        self.names.get(&port).map(String::as_str)
    }

    pub(crate) fn is_foreign_link(&self, message: &RouteNetlinkMessage) -> bool {
        let (RouteNetlinkMessage::NewLink(link) | RouteNetlinkMessage::DelLink(link)) = message else {
            return false;
        };
        self.port_of(link.header.index).is_none()
    }

    /// The overlay's interfaces, their uplinks, and foreign interfaces that conflict with them.
    pub(crate) fn watched(&self) -> Vec<u32> {
        self.indexes.values().chain(&self.uplinks).chain(&self.blockers).copied().collect()
    }

    /// The interfaces with these addresses. Addresses without an interface are left out.
    pub(crate) fn uplinks(&mut self, addresses: &[IpAddr]) -> Result<Vec<Uplink>, OverlayError> {
        let mut found: Vec<(IpNetwork, u32)> = Vec::new();
        for InterfaceAddress { ip, prefix_length, index } in self.addresses()? {
            if let (true, Ok(network)) = (addresses.contains(&ip), IpNetwork::new(ip, prefix_length)) {
                found.push((network, index));
            }
        }
        let mut uplinks = Vec::new();
        for (address, index) in found {
            let link = self.link(LinkId::Index(index))?;
            if let Some(mtu) = link.as_ref().and_then(device::mtu) {
                uplinks.push(Uplink { address, index, mtu });
            }
        }
        self.uplinks = uplinks.iter().map(|uplink: &Uplink| uplink.index).collect();
        // The uplinks are in the order of the node's addresses, so that the first address of a family stays first.
        uplinks.sort_by_key(|uplink| addresses.iter().position(|ip| *ip == uplink.address.ip()));
        Ok(uplinks)
    }

    /// Reads our objects, and foreign objects on our devices.
    pub(crate) fn observe(&mut self) -> Result<Tables, OverlayError> {
        let mut tables = Tables::default();
        self.indexes.clear();
        self.blockers.clear();
        for (port, name) in self.names.clone() {
            if let Some(link) = self.link(LinkId::Name(&name))? {
                let Some(device) = device::read(&link, port) else {
                    self.blockers.push(link.header.index);
                    return Err(OverlayError::ForeignInterface { name });
                };
                self.indexes.insert(port, link.header.index);
                tables.devices.insert(port, device);
            }
        }
        // The kernel makes link-local addresses, and the overlay does not use them.
        for InterfaceAddress { ip, index, .. } in self.addresses()? {
            if is_link_local(ip) {
                continue;
            }
            if let Some(device) = self.port_of(index).and_then(|port| tables.devices.get_mut(&port)) {
                device.addresses.insert(ip);
            }
        }
        let ports: Vec<(Port, u32)> = self.indexes.iter().map(|(port, index)| (*port, *index)).collect();
        for (port, index) in ports.into_iter().filter(|(port, _)| *port != Port::Tun) {
            let forwards = self.neighbours(AddressFamily::Bridge, index)?;
            tables.forwards.extend(forwards.iter().filter_map(|m| read_forward(m, port)));
            for family in [AddressFamily::Inet, AddressFamily::Inet6] {
                let neighbours = self.neighbours(family, index)?;
                let permanent = neighbours.iter().filter_map(|m| read_neighbour(m, port));
                tables.neighbours.extend(permanent.map(|n| ((n.port, n.ip), n.mac)));
            }
        }
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            for message in self.routes(family)? {
                tables.routes.extend(self.read_route(&message));
            }
        }
        Ok(tables)
    }

    /// Applies the changes: removed and new devices first, one by one, then all other changes in one batch. All changes
    /// are tried. Returns the first error that [`is_reported`].
    pub(crate) fn run(&mut self, changes: &[Change]) -> Result<(), OverlayError> {
        let mut result = Ok(());
        let mut rest = Vec::new();
        for change in changes {
            match change {
                Change::RemoveDevice(port) => {
                    if let Some(index) = self.indexes.remove(port) {
                        result = result
                            .and(self.send_one(change, Request { message: device::remove(index), flags: 0 }));
                    }
                }
                Change::MakeDevice(port, wanted) => {
                    let made = self.make_device(change, *port, wanted)?;
                    result = result.and(made);
                }
                other => rest.push(other),
            }
        }
        let batched = self.batch(&rest);
        result.and(batched)
    }

    /// Makes a device unless it exists. The outer error is a failure of the netlink socket: no further call would
    /// succeed.
    fn make_device(
        &mut self,
        change: &Change,
        port: Port,
        wanted: &Device,
    ) -> Result<Result<(), OverlayError>, OverlayError> {
        let name = self.names.get(&port).cloned().unwrap_or_default();
        let made = match device::make(&name, wanted) {
            Some(message) => self.send_one(change, Request::new(message, NLM_F_CREATE | NLM_F_EXCL)),
            None => Ok(()),
        };
        let Some(link) = self.link(LinkId::Name(&name))? else {
            // The kernel also returns EEXIST for another device with the same VNI and port.
            return Ok(made.and(Err(self.missing(name, port, wanted)?)));
        };
        self.indexes.insert(port, link.header.index);
        // A kernel without IPv6 refuses this request. The error is ignored.
        self.send(vec![Request::new(device::without_own_address(link.header.index), 0)])?;
        // Pods can send packets that look like packets of peers to the device's UDP port. So the device ignores router
        // advertisements.
        let made = made.and(
            sysctl::no_router_advertisements(&name)
                .map_err(|source| OverlayError::Parameter { name: name.clone(), source: Box::new(source) }),
        );
        let set = Request::new(device::set(link.header.index, wanted), 0);
        Ok(made.and(self.send_one(change, set)))
    }

    /// The reason why a device does not exist although its creation succeeded or failed with EEXIST.
    fn missing(&mut self, name: String, port: Port, wanted: &Device) -> Result<OverlayError, OverlayError> {
        let Kind::Vxlan { vni, port: udp_port, .. } = wanted.kind else {
            return Ok(OverlayError::Missing { name });
        };
        let mut query = LinkMessage::default();
        query.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        let links = self.dump("list links", &RouteNetlinkMessage::GetLink(query))?;
        let conflicts = |link: &LinkMessage| {
            device::read(link, port).is_some_and(|device| device::conflict(&device.kind, &wanted.kind))
        };
        let other = links.into_iter().find_map(|message| match message {
            RouteNetlinkMessage::NewLink(link) if conflicts(&link) => Some(link),
            _ => None,
        });
        self.blockers.extend(other.as_ref().map(|link| link.header.index));
        let other = other.as_ref().and_then(device::name);
        Ok(OverlayError::VniInUse { name, other: other.into(), vni, port: udp_port })
    }

    fn send_one(&mut self, change: &Change, request: Request) -> Result<(), OverlayError> {
        let refused = self.send(vec![request])?;
        match refused.into_iter().next() {
            Some(RefusedRequest { error: source, .. }) if is_reported(change, &source) => {
                Err(OverlayError::Change { what: describe(change, &self.names), source })
            }
            _ => Ok(()),
        }
    }

    fn batch(&mut self, changes: &[&Change]) -> Result<(), OverlayError> {
        let (mut requests, mut change_of) =
            (Vec::with_capacity(changes.len()), Vec::with_capacity(changes.len()));
        for change in changes {
            if let Change::SetDevice(port, wanted) = change
                && let Some(index) = self.indexes.get(port)
            {
                requests.extend(device::move_message(*index, wanted).map(|message| Request::new(message, 0)));
            }
            requests.extend(self.request(change));
            change_of.resize(requests.len(), *change);
        }
        let refused = self.send(requests)?;
        let mut failed = refused.into_iter().filter_map(|RefusedRequest { index, error: source }| {
            let change = change_of.get(index)?;
            let what = || describe(change, &self.names);
            is_reported(change, &source).then(|| OverlayError::Change { what: what(), source })
        });
        failed.next().map_or(Ok(()), Err)
    }

    fn send(&mut self, requests: Vec<Request>) -> Result<Vec<RefusedRequest>, OverlayError> {
        let sent = self.socket.batch(requests);
        sent.map_err(|source| OverlayError::Socket { action: "send changes", source })
    }

    /// The message of a change. `None` if its device does not exist.
    fn request(&self, change: &Change) -> Option<Request> {
        let index = |port: &Port| self.indexes.get(port).copied();
        let set = NLM_F_CREATE | NLM_F_REPLACE;
        let (message, flags) = match change {
            Change::SetDevice(port, wanted) => (device::set(index(port)?, wanted), 0),
            Change::AddAddress(port, ip) => {
                (RouteNetlinkMessage::NewAddress(address(index(port)?, *ip)), set)
            }
            Change::RemoveAddress(port, ip) => {
                (RouteNetlinkMessage::DelAddress(address(index(port)?, *ip)), 0)
            }
            Change::AddForward(f) => (RouteNetlinkMessage::NewNeighbour(forward(index(&f.port)?, f)), set),
            Change::RemoveForward(f) => (RouteNetlinkMessage::DelNeighbour(forward(index(&f.port)?, f)), 0),
            Change::AddNeighbour(n) => {
                (RouteNetlinkMessage::NewNeighbour(neighbour(index(&n.port)?, n)), set)
            }
            Change::RemoveNeighbour(n) => {
                (RouteNetlinkMessage::DelNeighbour(neighbour(index(&n.port)?, n)), 0)
            }
            Change::AddRoute(to, route) => {
                let out = match route.out {
                    OutInterface::Device(port) => index(&port)?,
                    OutInterface::Interface(index) => index,
                };
                (RouteNetlinkMessage::NewRoute(new_route(*to, route, out, self.protocol)), set)
            }
            Change::RemoveRoute(to, _) => (RouteNetlinkMessage::DelRoute(old_route(*to, self.protocol)), 0),
            Change::RemoveDevice(_) | Change::MakeDevice(..) => return None,
        };
        Some(Request { message, flags })
    }

    /// Protocol number of our routes (`rtm_protocol`).
    pub(crate) fn protocol(&self) -> RouteProtocol {
        self.protocol
    }

    /// Whether the last call of [`uplinks`](Self::uplinks) found this interface.
    pub(crate) fn is_uplink(&self, index: u32) -> bool {
        self.uplinks.contains(&index)
    }

    pub(crate) fn port_of(&self, index: u32) -> Option<Port> {
        self.indexes.iter().find(|(_, i)| **i == index).map(|(port, _)| *port)
    }

    fn link(&mut self, id: LinkId<'_>) -> Result<Option<LinkMessage>, OverlayError> {
        let mut message = LinkMessage::default();
        match id {
            LinkId::Index(index) => message.header.index = index,
            LinkId::Name(name) => message.attributes.push(LinkAttribute::IfName(name.to_owned())),
        }
        message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        match self.socket.get(RouteNetlinkMessage::GetLink(message)) {
            Ok(RouteNetlinkMessage::NewLink(link)) => Ok(Some(link)),
            Err(error) if error.raw_os_error() != Some(libc::ENODEV) => {
                Err(OverlayError::Socket { action: "look up a link", source: error })
            }
            _ => Ok(None),
        }
    }

    fn addresses(&mut self) -> Result<Vec<InterfaceAddress>, OverlayError> {
        let found =
            self.dump("list addresses", &RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
        Ok(found.iter().filter_map(read_address).collect())
    }

    fn neighbours(
        &mut self,
        family: AddressFamily,
        index: u32,
    ) -> Result<Vec<NeighbourMessage>, OverlayError> {
        let mut query = NeighbourMessage::default();
        query.header.family = family;
        query.attributes.push(NeighbourAttribute::IfIndex(index));
        let found = self.dump("list neighbours", &RouteNetlinkMessage::GetNeighbour(query))?;
        let own = found.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewNeighbour(message) if message.header.ifindex == index => Some(message),
            _ => None,
        });
        Ok(own.collect())
    }

    fn routes(&mut self, family: AddressFamily) -> Result<Vec<RouteMessage>, OverlayError> {
        let mut query = RouteMessage::default();
        query.header.address_family = family;
        query.header.table = RouteHeader::RT_TABLE_MAIN;
        query.header.protocol = self.protocol;
        let found = match self.dump("list routes", &RouteNetlinkMessage::GetRoute(query)) {
            // A kernel without IPv6 does not have the table.
            Err(OverlayError::Socket { source, .. }) if source.raw_os_error() == Some(libc::ENOENT) => {
                Vec::new()
            }
            found => found?,
        };
        let protocol = self.protocol;
        let own = found.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewRoute(message) if is_ours(&message, protocol) => Some(message),
            _ => None,
        });
        Ok(own.collect())
    }

    fn dump(
        &mut self,
        action: &'static str,
        query: &RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, OverlayError> {
        let mut attempts = 0;
        loop {
            let mut found = Vec::new();
            attempts += 1;
            match self.socket.dump(query.clone(), |message| found.push(message)) {
                Ok(()) => return Ok(found),
                Err(error) if error.kind() == io::ErrorKind::Interrupted && attempts < DUMP_ATTEMPTS => {}
                Err(source) => return Err(OverlayError::Socket { action, source }),
            }
        }
    }

    /// The route in a message. `None` for a route with a metric that our routes do not have.
    pub(crate) fn read_route(&self, message: &RouteMessage) -> Option<(IpNetwork, Route)> {
        let mut to = match message.header.address_family {
            AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            _ => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        // `IP6_RT_PRIO_USER`: the default metric of IPv6.
        let metric = if to.is_ipv4() { 0 } else { 1024 };
        let (mut via, mut source, mut out, mut mtu) = (None, None, 0, None);
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Destination(address) => to = ip(address)?,
                RouteAttribute::Gateway(address) => via = ip(address),
                RouteAttribute::PrefSource(address) => source = ip(address),
                RouteAttribute::Oif(index) => out = *index,
                RouteAttribute::Priority(other) if *other != metric => return None,
                RouteAttribute::Metrics(metrics) => {
                    mtu = metrics.iter().find_map(|metric| match metric {
                        RouteMetric::Mtu(mtu) => Some(*mtu),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        let to = IpNetwork::new(to, message.header.destination_prefix_length).ok()?;
        let out = self.port_of(out).map_or(OutInterface::Interface(out), OutInterface::Device);
        Some((to, Route { via, out, source, mtu }))
    }
}

enum LinkId<'a> {
    Index(u32),
    Name(&'a str),
}

/// Whether the error of a change is reported. Removing an absent object or adding an existing one is not an error.
fn is_reported(change: &Change, error: &io::Error) -> bool {
    let absent = [libc::ENOENT, libc::ESRCH, libc::ENODEV, libc::EADDRNOTAVAIL];
    let is_absent = error.raw_os_error().is_some_and(|code| absent.contains(&code));
    match change {
        Change::RemoveDevice(_)
        | Change::RemoveAddress(..)
        | Change::RemoveRoute(..)
        | Change::RemoveNeighbour(_)
        | Change::RemoveForward(_) => !is_absent,
        Change::AddAddress(..) | Change::MakeDevice(..) => error.raw_os_error() != Some(libc::EEXIST),
        _ => true,
    }
}

//! The overlay between nodes: pods reach the pods of other nodes. A node has a name, ranges and addresses. The caller
//! finds the other nodes and announces this node.
//!
//! ```text
//! peers ──► plan::Plan ──► plan::difference ──► one batch of netlink messages
//!                               ▲
//!   kernel's tables ── one dump ┘   at the start, and after the notification of a foreign change
//! ```
//! Between dumps the overlay knows the tables: it compares the kernel's notification of each change with the plan. So a
//! changed peer costs a few messages, independent of the number of peers, and an idle node has no cost.
//!
//! The layout on the wire and in the kernel is flannel's. Each peer has a forwarding entry (hardware address → node), a
//! neighbour entry, and a route (range → first address of the range as the next hop → device).

mod address;
mod change_text;
mod device;
mod error;
mod foreign_change;
mod kernel;
mod message;
mod monitor;
mod offload;
mod plan;
mod probe;
mod range;
mod tunnel;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};

use ipnetwork::IpNetwork;

pub use address::{AddressMonitor, LocalAddress, local_addresses};
pub use error::{ForeignDevice, OverlayError};
use kernel::Kernel;
use monitor::{BURST, Monitor};
pub use offload::Offload;
use plan::{Change, Node, Plan, Port, Tables, Uplink};
pub use probe::{ProbePath, ProbeResult, examine};
pub use range::merged;
use tunnel::Tunnel;

use crate::name_lock::{NameLocks, SharedName};

/// A hardware address.
pub type Mac = [u8; 6];

/// Backend of the overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// VXLAN (RFC 7348), in the kernel. [`Backend::Udp`] replaces it on kernels without VXLAN.
    Vxlan {
        /// The network's number.
        vni: u32,
        /// The UDP port of all nodes.
        port: u16,
        /// Whether nodes in one subnet route to each other without a tunnel.
        direct_routing: bool,
    },
    /// Routes to the nodes' addresses, which must all be in one subnet.
    HostGw,
    /// IP in UDP, through a tun device. Slow, but needs no kernel support except tun.
    Udp,
}

/// Configuration of the overlay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayConfig {
    /// Backend for all peers.
    pub backend: Backend,
    /// Name of the VXLAN interface. Names of further interfaces begin with it.
    pub interface: String,
    /// Name of the node. Hardware addresses are derived from it.
    pub identity: String,
    /// Maximum packet size between pods in bytes. `None` means that it is derived from the uplink's MTU.
    pub mtu: Option<u32>,
    /// The UDP port of [`Backend::Udp`].
    pub udp_port: u16,
    /// Protocol number of the overlay's routes (`rtm_protocol`). The overlay removes any other route with this number.
    pub route_protocol: u8,
}

impl OverlayConfig {
    /// The default: a number without a registered owner.
    pub const ROUTE_PROTOCOL: u8 = 67;
}

/// This node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Local {
    /// The ranges of the node's pods, at most one of each family.
    pub cidrs: Vec<IpNetwork>,
    /// The node's addresses for other nodes, at most one of each family.
    pub addresses: Vec<IpAddr>,
}

/// Another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The ranges of the peer's pods.
    pub cidrs: Vec<IpNetwork>,
    /// The peer's backend.
    pub kind: PeerKind,
    /// The peer's addresses, at most one of each family.
    pub ends: Vec<End>,
    /// Whether the peer's bridge has the second address of each range even while the peer has no pods, as on nodes of
    /// Coracle.
    pub bridged: bool,
}

/// An address of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// The address.
    pub ip: IpAddr,
    /// VNI and hardware address of the peer's VXLAN interface.
    pub vtep: Option<(u32, Mac)>,
}

/// The data that other nodes need to reach a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// Backend of the node.
    pub kind: PeerKind,
    /// The node's addresses.
    pub ends: Vec<End>,
}

/// Backend of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerKind {
    /// VXLAN.
    Vxlan,
    /// Routes.
    HostGw,
    /// IP in UDP.
    Udp,
}

/// Result of [`Overlay::apply`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    /// Maximum packet size between pods in bytes.
    pub mtu: Option<u32>,
    /// Peers that cannot be reached, and why.
    pub refused: Vec<(String, String)>,
    /// Changes made in the kernel.
    pub changes: usize,
    /// Whether the paths to all peers changed: another uplink, address or MTU, or a new device.
    pub moved: bool,
}

/// The overlay of one network namespace. Calls block only while the kernel executes them.
pub struct Overlay {
    /// The configuration. Its backend is replaced if the kernel does not support it.
    config: OverlayConfig,
    kernel: Kernel,
    monitor: Monitor,
    tunnel: Option<Tunnel>,
    plan: Plan,
    /// Whether the kernel's tables are as planned. False after an error or a foreign change.
    known: bool,
    uplinks: Vec<Uplink>,
    /// Whether [`foreign_change`](Self::foreign_change) was cancelled between the first and the last related
    /// notification.
    notified: bool,
    /// Whether a notification concerned an uplink.
    uplink_changed: bool,
    /// Locks of interface name and route protocol number.
    names: Option<NameLocks>,
}

// === impl PeerKind ===

impl PeerKind {
    /// Flannel's name of the backend.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Vxlan => "vxlan",
            Self::HostGw => "host-gw",
            Self::Udp => "udp",
        }
    }
}

// === impl Overlay ===

impl Overlay {
    /// Opens sockets, and checks the kernel's support for VXLAN if it is configured. Changes nothing in the kernel.
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When the interface name or the route protocol number is invalid, or a netlink socket cannot be opened.
    pub fn open(mut config: OverlayConfig) -> Result<Self, OverlayError> {
        let names = names(&config.interface)?;
        // `RTPROT_STATIC` and below (linux/rtnetlink.h).
        if config.route_protocol < 5 {
            return Err(OverlayError::RouteProtocol { number: config.route_protocol });
        }
        let mut kernel = Kernel::open(names, config.route_protocol)?;
        if matches!(config.backend, Backend::Vxlan { .. }) && !kernel.has_vxlan()? {
            tracing::warn!("the kernel has no VXLAN, using a UDP tunnel in this process");
            config.backend = Backend::Udp;
        }
        let unconfigured = Node { config: config.clone(), local: Local::default(), uplinks: Vec::new() };
        Ok(Self {
            monitor: Monitor::open()?,
            config,
            kernel,
            tunnel: None,
            plan: Plan::new(unconfigured, &BTreeMap::new(), &BTreeMap::new()),
            known: false,
            uplinks: Vec::new(),
            notified: false,
            uplink_changed: false,
            names: None,
        })
    }

    /// Locks the interface name and the route protocol number in the network namespace. So no other overlay removes the
    /// devices and routes of this overlay. Waits for an overlay that is about to end.
    ///
    /// # Errors
    /// When another overlay has the same interface name or number, or a lock cannot be taken.
    pub async fn lock_names(&mut self) -> Result<(), OverlayError> {
        let number = self.config.route_protocol.to_string();
        let interface = &self.config.interface;
        let names = [
            SharedName { kind: "overlay interface", name: interface, setting: "--overlay-interface" },
            SharedName { kind: "route protocol number", name: &number, setting: "--overlay-route-protocol" },
        ];
        let names = NameLocks::take(&names).await;
        self.names = Some(names.map_err(|error| OverlayError::NameLock(Box::new(error)))?);
        Ok(())
    }

    /// Maximum packet size between pods in bytes, for these addresses of the node.
    ///
    /// # Errors
    /// When netlink cannot be used.
    pub fn mtu(&mut self, addresses: &[IpAddr]) -> Result<Option<u32>, OverlayError> {
        Ok(plan::pod_mtu(&self.config, &self.kernel.uplinks(addresses)?))
    }

    /// The data that other nodes need to reach this node, for each of these addresses.
    #[must_use]
    pub fn announced(&self, addresses: &[IpAddr]) -> Announcement {
        let end = |ip: &IpAddr| {
            let vtep = match self.config.backend {
                Backend::Vxlan { vni, .. } => {
                    Some((vni, plan::hardware_address(&self.config.identity, ip.is_ipv6())))
                }
                Backend::HostGw | Backend::Udp => None,
            };
            End { ip: *ip, vtep }
        };
        let kind = match self.config.backend {
            Backend::Vxlan { .. } => PeerKind::Vxlan,
            Backend::HostGw => PeerKind::HostGw,
            Backend::Udp => PeerKind::Udp,
        };
        Announcement { kind, ends: addresses.iter().map(end).collect() }
    }

    /// Changes the kernel's tables to the plan for these peers. `path_mtus` has the path MTU in bytes of each peer that
    /// full packets do not reach. A repeated call repairs the tables.
    ///
    /// # Errors
    /// When no interface has an address of the node, or a socket fails. Also when a foreign interface has the overlay's
    /// name or VNI, or the kernel refuses a change: then all other changes are made.
    pub fn apply(
        &mut self,
        local: &Local,
        peers: &BTreeMap<String, Peer>,
        path_mtus: &BTreeMap<String, u32>,
    ) -> Result<Applied, OverlayError> {
        let made = self.make_all(local, peers, path_mtus);
        // Notifications are read even after a failure: one of them reports when the cause of the failure is gone.
        self.monitor.listen_to(self.kernel.watched())?;
        let mut applied = made?;
        let uplinks = self.plan.uplinks();
        applied.refused = self.plan.refused().to_vec();
        applied.moved |= std::mem::take(&mut self.uplink_changed) || self.uplinks != uplinks;
        self.uplinks = uplinks.to_vec();
        self.known = true;
        Ok(applied)
    }

    fn make_all(
        &mut self,
        local: &Local,
        peers: &BTreeMap<String, Peer>,
        path_mtus: &BTreeMap<String, u32>,
    ) -> Result<Applied, OverlayError> {
        let mut changes = if std::mem::take(&mut self.known) && self.plan.addresses() == local.addresses {
            self.plan.follow(local, peers, path_mtus)
        } else {
            let (observed, uplinks) = self.observe(local, !peers.is_empty())?;
            let node = Node { config: self.config.clone(), local: local.clone(), uplinks };
            self.plan = Plan::new(node, peers, path_mtus);
            plan::difference(self.plan.tables(), &observed)
        };
        let mut applied = Applied { mtu: self.plan.mtu(), ..Applied::default() };
        // The kernel may have removed entries of a changed device, so the tables are read once more.
        for _ in 0..3 {
            applied.changes += changes.len();
            self.make(&changes)?;
            if !changes.iter().any(Change::removes_other_objects) {
                break;
            }
            applied.moved = true;
            changes = plan::difference(self.plan.tables(), &self.kernel.observe()?);
        }
        Ok(applied)
    }

    /// Waits until another process changed the overlay's objects in the kernel, or an uplink's state such as its MTU.
    /// The next [`apply`](Self::apply) compares all tables. Cancel safe.
    pub async fn foreign_change(&mut self) {
        let Self { kernel, monitor, plan, .. } = self;
        if !self.notified {
            let uplink_changed = AtomicBool::new(false);
            let is_foreign_change = |message: &_| {
                let is_foreign = kernel.is_foreign_change(message, plan.tables());
                uplink_changed.fetch_or(is_foreign && kernel.is_foreign_link(message), Ordering::Relaxed);
                is_foreign
            };
            monitor.wait_for(is_foreign_change).await;
            self.uplink_changed |= uplink_changed.into_inner();
            (self.known, self.notified) = (false, true);
        }
        // Related changes arrive together: wait for all of them.
        tokio::time::sleep(BURST).await;
        let is_uplink_change =
            |message: &_| kernel.is_foreign_change(message, plan.tables()) && kernel.is_foreign_link(message);
        self.uplink_changed |= monitor.drain(is_uplink_change);
        self.notified = false;
    }

    /// The paths to these peers since the last [`apply`](Self::apply), for [`examine`].
    #[must_use]
    pub fn paths(&self, peers: &BTreeSet<String>) -> Vec<ProbePath> {
        self.plan.paths(peers)
    }

    /// Whether the VXLAN devices compute checksums, and if not, why. The setting outlives the process.
    ///
    /// # Errors
    /// When the kernel does not report the setting.
    pub fn offload(&self) -> Result<Offload, OverlayError> {
        for name in self.vxlan_devices() {
            let state = offload::get(name);
            let state = state.map_err(|source| OverlayError::Change {
                what: format!("to read the checksum offload of {name}"),
                source,
            })?;
            if state != Offload::On {
                return Ok(state);
            }
        }
        Ok(Offload::On)
    }

    /// Lets the VXLAN devices (`on`) or the kernel compute checksums. Some networks lose packets whose checksums the
    /// device computed.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_offload(&self, on: bool) -> Result<(), OverlayError> {
        for name in self.vxlan_devices() {
            let set = offload::set(name, on);
            set.map_err(|source| OverlayError::Change {
                what: format!("to change the checksum offload of {name}"),
                source,
            })?;
        }
        Ok(())
    }

    /// The names of the VXLAN devices. A tun device never computes checksums.
    fn vxlan_devices(&self) -> impl Iterator<Item = &str> {
        let devices = self.plan.tables().devices.keys();
        let devices = devices.filter(move |port| self.known && **port != Port::Tun);
        devices.filter_map(move |port| self.kernel.name(*port))
    }

    /// Removes all objects of the overlay from the kernel.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove(&mut self) -> Result<(), OverlayError> {
        self.known = false;
        self.tunnel = None;
        let observed = self.kernel.observe()?;
        self.kernel.run(&plan::difference(&Tables::default(), &observed))
    }

    fn observe(&mut self, local: &Local, needed: bool) -> Result<(Tables, Vec<Uplink>), OverlayError> {
        // The tables that are read now contain all changes notified so far.
        self.monitor.drain(|_| false);
        self.notified = false;
        let uplinks = self.kernel.uplinks(&local.addresses)?;
        if needed && uplinks.is_empty() {
            let addresses: Vec<String> = local.addresses.iter().map(IpAddr::to_string).collect();
            return Err(OverlayError::NoUplink { addresses: addresses.join(", ") });
        }
        let mut observed = self.kernel.observe()?;
        if self.tunnel.is_none() {
            // Another process may hold the device. Then opening the device fails.
            observed.devices.remove(&Port::Tun);
        }
        Ok((observed, uplinks))
    }

    fn make(&mut self, changes: &[Change]) -> Result<(), OverlayError> {
        for change in changes {
            match change {
                Change::MakeDevice(Port::Tun, _) => {
                    let name = tunnel_name(&self.config.interface);
                    match &mut self.tunnel {
                        Some(tunnel) => tunnel.open_again(&name)?,
                        None => self.tunnel = Some(Tunnel::open(&name)?),
                    }
                }
                Change::RemoveDevice(Port::Tun) => self.tunnel = None,
                _ => {}
            }
        }
        if let Some(tunnel) = &mut self.tunnel {
            let socket = |uplink: &Uplink| SocketAddr::new(uplink.address.ip(), self.config.udp_port);
            tunnel.listen(&self.plan.uplinks().iter().map(socket).collect::<Vec<_>>())?;
            tunnel.set_nodes(self.plan.tunnels());
        }
        self.kernel.run(changes)
    }
}

fn tunnel_name(interface: &str) -> String {
    format!("{interface}-udp")
}

/// Whether the kernel supports VXLAN. The check can load the kernel module, and makes no device. Without VXLAN the
/// backend `vxlan` uses a UDP tunnel.
///
/// # Errors
/// When a netlink socket cannot be opened or used.
pub fn has_vxlan() -> Result<bool, OverlayError> {
    Kernel::open(BTreeMap::new(), 0)?.has_vxlan()
}

/// The interfaces' names, within the kernel's 15 bytes.
fn names(interface: &str) -> Result<BTreeMap<Port, String>, OverlayError> {
    let is_name = |c: u8| c.is_ascii_alphanumeric() || b".-_".contains(&c);
    let dots = interface.bytes().all(|c| c == b'.');
    if dots || interface.len() > 11 || !interface.bytes().all(is_name) {
        return Err(OverlayError::Name { name: interface.to_owned() });
    }
    Ok(BTreeMap::from([
        (Port::Vxlan4, interface.to_owned()),
        (Port::Vxlan6, format!("{interface}-v6")),
        (Port::Tun, tunnel_name(interface)),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_the_kernel() {
        assert!(names("coracle.1").unwrap().values().all(|name| name.len() <= 15));
        for wrong in ["", "..", "a/b", "twelve-bytes", "a b"] {
            assert!(names(wrong).is_err(), "{wrong}");
        }
    }
}

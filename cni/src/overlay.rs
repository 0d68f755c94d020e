//! The overlay: pods of other nodes are reached from here. Knows nodes by name, ranges and addresses; what tells of
//! them, and to whom this node is told, is its user's.
//!
//! ```text
//! peers ──► plan::wanted ──► plan::difference ──► one batch of netlink messages
//!                               ▲
//!   kernel's tables ── one dump ┘   at the start, and when a notification tells of a foreign change
//! ```
//! Between dumps the tables are known: whatever changes them is notified, and what is notified is compared with
//! what is wanted. So a changed peer costs a few messages, however many peers there are, and an idle node nothing.
//!
//! The layout on the wire and in the kernel is flannel's: per peer a forwarding entry (its hardware address → its
//! node), a neighbour entry and a route (its range → by the range's first address → by the device).

mod address;
mod device;
mod error;
mod kernel;
mod message;
mod monitor;
mod offload;
mod plan;
mod probe;
mod range;
mod socket;
mod tunnel;

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ipnetwork::IpNetwork;

pub use address::{LocalAddress, local_addresses};
pub use error::OverlayError;
use kernel::Kernel;
use monitor::Monitor;
use plan::{Change, Port, Tables, Uplink, Wanted};
pub use probe::{Passes, Way, examine};
pub use range::merged;
use tunnel::Tunnel;

/// A hardware address.
pub type Mac = [u8; 6];

/// How this node reaches others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// VXLAN (RFC 7348), in the kernel. Where the kernel has none, [`Backend::Udp`] takes its place.
    Vxlan {
        /// The network's number.
        vni: u32,
        /// The UDP port of all nodes.
        port: u16,
        /// Nodes in one subnet route to each other without a tunnel.
        direct_routing: bool,
    },
    /// Routes by the nodes' addresses, which must all be in one subnet.
    HostGw,
    /// IP in UDP, through a tun device: slow, and needs nothing of the kernel.
    Udp,
}

/// What is set about the overlay.
#[derive(Debug, Clone)]
pub struct OverlayConfig {
    /// How nodes are reached.
    pub backend: Backend,
    /// The VXLAN interface's name; of others that are needed it is the head.
    pub interface: String,
    /// What the interfaces' hardware addresses follow from: the node's name.
    pub identity: String,
    /// Most bytes of a packet between pods; what the uplink leaves when absent.
    pub mtu: Option<u32>,
    /// The UDP port of [`Backend::Udp`].
    pub udp_port: u16,
}

/// This node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Local {
    /// The ranges of its pods, at most one of each family.
    pub cidrs: Vec<IpNetwork>,
    /// Its addresses for other nodes, at most one of each family.
    pub addresses: Vec<IpAddr>,
}

/// Another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The ranges of its pods.
    pub cidrs: Vec<IpNetwork>,
    /// What it speaks.
    pub kind: PeerKind,
    /// Where it is reached, at most once in each family.
    pub ends: Vec<End>,
}

/// An address of a node's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// The address.
    pub ip: IpAddr,
    /// Network number and hardware address of the VXLAN interface behind it.
    pub vtep: Option<(u32, Mac)>,
}

/// What a node speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerKind {
    /// VXLAN.
    Vxlan,
    /// Nothing: it routes.
    HostGw,
    /// IP in UDP.
    Udp,
}

/// What came of an [`Overlay::apply`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    /// Bytes of the longest packet between pods that passes every device.
    pub mtu: Option<u32>,
    /// Peers that cannot be reached as they are, and why.
    pub refused: Vec<(String, String)>,
    /// Changes made in the kernel.
    pub changes: usize,
    /// Whether the ways to all peers are others than before: another uplink, address or MTU, or a device made anew.
    pub moved: bool,
}

/// The overlay of one network namespace. Blocks only as long as the kernel works.
pub struct Overlay {
    config: OverlayConfig,
    backend: Backend,
    kernel: Kernel,
    monitor: Monitor,
    tunnel: Option<Tunnel>,
    /// The kernel's tables as far as they are known, and the uplinks; nothing after an error or a foreign change.
    known: Option<(Tables, Vec<Uplink>, Vec<IpAddr>)>,
    uplinks: Vec<Uplink>,
    ways: Vec<Way>,
    /// Something was told of an uplink.
    shaken: bool,
}

// === impl PeerKind ===

impl PeerKind {
    /// Its name, as flannel has it.
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
    /// Opens sockets, and finds out whether the kernel has VXLAN if that is wanted. Nothing else is changed yet. To
    /// be called within a tokio runtime.
    ///
    /// # Errors
    /// When the interface's name cannot be one, or netlink cannot be used.
    pub fn open(config: OverlayConfig) -> Result<Self, OverlayError> {
        let names = names(&config.interface)?;
        let mut kernel = Kernel::open(names)?;
        let backend = match config.backend {
            Backend::Vxlan { .. } if !kernel.has_vxlan()? => {
                tracing::warn!(
                    "the kernel has no VXLAN: pod packets between nodes go through this process, in UDP"
                );
                Backend::Udp
            }
            backend => backend,
        };
        Ok(Self {
            monitor: Monitor::open()?,
            config,
            backend,
            kernel,
            tunnel: None,
            known: None,
            uplinks: Vec::new(),
            ways: Vec::new(),
            shaken: false,
        })
    }

    /// Bytes of the longest packet between pods, with these addresses of the node.
    ///
    /// # Errors
    /// When netlink cannot be used.
    pub fn mtu(&mut self, addresses: &[IpAddr]) -> Result<Option<u32>, OverlayError> {
        Ok(plan::pod_mtu(&self.config, self.backend, &self.kernel.uplinks(addresses)?))
    }

    /// What other nodes must know of this one to reach it, for each of these addresses.
    #[must_use]
    pub fn announced(&self, addresses: &[IpAddr]) -> (PeerKind, Vec<End>) {
        let end = |ip: &IpAddr| {
            let vtep = match self.backend {
                Backend::Vxlan { vni, .. } => {
                    Some((vni, plan::hardware_address(&self.config.identity, ip.is_ipv6())))
                }
                Backend::HostGw | Backend::Udp => None,
            };
            End { ip: *ip, vtep }
        };
        let kind = match self.backend {
            Backend::Vxlan { .. } => PeerKind::Vxlan,
            Backend::HostGw => PeerKind::HostGw,
            Backend::Udp => PeerKind::Udp,
        };
        (kind, addresses.iter().map(end).collect())
    }

    /// Makes the kernel's tables what these peers need. `narrow` has peers to which less than a full packet passes,
    /// in bytes. Calling it again repairs.
    ///
    /// # Errors
    /// When no interface has an address of the node, a foreign interface is in the way, or the kernel refuses; what
    /// could be done is done.
    pub fn apply(
        &mut self,
        local: &Local,
        peers: &BTreeMap<String, Peer>,
        narrow: &HashMap<String, u32>,
    ) -> Result<Applied, OverlayError> {
        let known = self.known.take().filter(|(_, _, addresses)| *addresses == local.addresses);
        let (mut seen, uplinks) = match known {
            Some((tables, uplinks, _)) => (tables, uplinks),
            None => self.observe(local, !peers.is_empty())?,
        };
        let wanted = plan::wanted((&self.config, self.backend), (local, &uplinks), peers, narrow);
        let mtu = plan::pod_mtu(&self.config, self.backend, &uplinks);
        let mut applied = Applied { mtu, ..Applied::default() };
        // A device that was changed may have taken entries with it: that is looked at once more.
        for _ in 0..3 {
            let changes = plan::difference(&wanted.tables, &seen);
            applied.changes += changes.len();
            self.make(&changes, &wanted, &uplinks)?;
            if !changes.iter().any(Change::has_consequences) {
                break;
            }
            applied.moved = true;
            seen = self.kernel.observe()?;
        }
        let listened = uplinks.iter().map(|uplink| uplink.index).chain(self.kernel.indexes()).collect();
        self.monitor.listen_to(listened)?;
        applied.refused = wanted.refused;
        applied.moved |= std::mem::take(&mut self.shaken) || self.uplinks != uplinks;
        self.ways = wanted.ways;
        self.uplinks.clone_from(&uplinks);
        self.known = Some((wanted.tables, uplinks, local.addresses.clone()));
        Ok(applied)
    }

    /// Waits until somebody else changed what the overlay keeps in the kernel or stands on, such as the uplink's
    /// MTU. Then [`apply`](Self::apply) looks at everything. Cancel safe.
    pub async fn news(&mut self) {
        let Self { kernel, monitor, known, .. } = self;
        // While nothing is known, an address that comes may be the missing one.
        let none = Tables::default();
        let tables = known.as_ref().map_or(&none, |(tables, ..)| tables);
        let shaken = AtomicBool::new(false);
        let is_news = |message: &_| {
            let news = kernel.is_news(message, tables);
            shaken.fetch_or(news && kernel.is_foreign_link(message), Ordering::Relaxed);
            news
        };
        monitor.news(is_news).await;
        self.shaken |= shaken.into_inner();
        let tables = known.take().map(|(tables, ..)| tables).unwrap_or_default();
        // What changes comes in showers: one look for all of it.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let kernel = &self.kernel;
        let is_shaking = |message: &_| kernel.is_news(message, &tables) && kernel.is_foreign_link(message);
        self.shaken |= self.monitor.drain(is_shaking);
    }

    /// The ways to the peers of the last [`apply`](Self::apply), for [`examine`].
    #[must_use]
    pub fn ways(&self) -> &[Way] {
        &self.ways
    }

    /// Has devices sum up packets, or the kernel before them: for networks in which what devices sum up is lost.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_offload(&self, on: bool) -> Result<(), OverlayError> {
        let devices = self.known.iter().flat_map(|(tables, ..)| tables.devices.keys());
        for name in devices.filter_map(|port| self.kernel.name(*port)) {
            let set = offload::set(name, on);
            set.map_err(|source| OverlayError::Change {
                what: format!("checksum offload of {name}"),
                source,
            })?;
        }
        Ok(())
    }

    /// Removes everything of the overlay's from the kernel.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove(&mut self) -> Result<(), OverlayError> {
        self.known = None;
        self.tunnel = None;
        let seen = self.kernel.observe()?;
        self.kernel.run(&plan::difference(&Tables::default(), &seen))
    }

    fn observe(&mut self, local: &Local, needed: bool) -> Result<(Tables, Vec<Uplink>), OverlayError> {
        // What was told until now is in the tables that are read now.
        self.monitor.drain(|_| false);
        let uplinks = self.kernel.uplinks(&local.addresses)?;
        if needed && uplinks.is_empty() {
            let addresses: Vec<String> = local.addresses.iter().map(IpAddr::to_string).collect();
            return Err(OverlayError::NoUplink { addresses: addresses.join(", ") });
        }
        let mut seen = self.kernel.observe()?;
        if self.tunnel.is_none() {
            // A device that another process holds; opening ours will say so.
            seen.devices.remove(&Port::Tun);
        }
        Ok((seen, uplinks))
    }

    fn make(&mut self, changes: &[Change], wanted: &Wanted, uplinks: &[Uplink]) -> Result<(), OverlayError> {
        for change in changes {
            match change {
                Change::MakeDevice(Port::Tun, _) => {
                    self.tunnel = Some(Tunnel::open(&tunnel_name(&self.config.interface))?);
                }
                Change::RemoveDevice(Port::Tun) => self.tunnel = None,
                _ => {}
            }
        }
        if let Some(tunnel) = &mut self.tunnel {
            let port = self.config.udp_port;
            let sockets: Vec<_> = uplinks.iter().map(|u| SocketAddr::new(u.address.ip(), port)).collect();
            tunnel.listen(&sockets)?;
            tunnel.lead(wanted.tunnels.clone());
        }
        self.kernel.run(changes)
    }
}

fn tunnel_name(interface: &str) -> String {
    format!("{interface}-udp")
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

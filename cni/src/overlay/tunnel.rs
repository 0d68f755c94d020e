//! UDP tunnel through a tun device, for kernels without VXLAN. Compatible with flannel's udp backend: a datagram is an
//! IP packet without further header.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use ipnetwork::IpNetwork;
use tokio::io::unix::AsyncFd;
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;

use super::error::OverlayError;

/// Maximum size of an IP packet.
const MAX_PACKET: usize = 64 << 10;

/// Delay after a failure, because the next attempt may fail at once: for example a read from a deleted device.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// Addresses in the header of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PacketAddresses {
    source: IpAddr,
    destination: IpAddr,
}

/// The device, and the tasks that move packets between the device and UDP sockets. Dropping this value ends them.
pub(crate) struct Tunnel {
    device: Arc<AsyncFd<File>>,
    ranges: Arc<RwLock<NodeRanges>>,
    sockets: Vec<(SocketAddr, Arc<UdpSocket>)>,
    tasks: Vec<JoinHandle<()>>,
}

/// Sorted ranges without overlap, each with its node.
#[derive(Default)]
struct NodeRanges(Vec<(IpNetwork, IpAddr)>);

// === impl Tunnel ===

impl Tunnel {
    /// Makes the device. The caller sets it up.
    pub(crate) fn open(name: &str) -> Result<Self, OverlayError> {
        let device = open_device(name)?;
        Ok(Self { device, ranges: Arc::default(), sockets: Vec::new(), tasks: Vec::new() })
    }

    /// Makes the device again after its deletion. The sockets are kept, because an aborted task may still use its
    /// socket, and so the address, for some time.
    pub(crate) fn open_again(&mut self, name: &str) -> Result<(), OverlayError> {
        self.tasks.drain(..).for_each(|task| task.abort());
        self.device = open_device(name)?;
        Ok(())
    }

    /// Sets the node of each range.
    pub(crate) fn set_nodes(&self, mut ranges: Vec<(IpNetwork, IpAddr)>) {
        ranges.sort_by_key(|(range, _)| range.network());
        *self.ranges.write().unwrap_or_else(PoisonError::into_inner) = NodeRanges(ranges);
    }

    /// Moves packets between the device and only these addresses of the node.
    pub(crate) fn listen(&mut self, addresses: &[SocketAddr]) -> Result<(), OverlayError> {
        if !self.tasks.is_empty() && self.sockets.iter().map(|(address, _)| address).eq(addresses) {
            return Ok(());
        }
        self.tasks.drain(..).for_each(|task| task.abort());
        self.sockets.retain(|(address, _)| addresses.contains(address));
        let kept = std::mem::take(&mut self.sockets);
        for address in addresses {
            let old = kept.iter().find(|(of, _)| of == address).map(|(_, socket)| socket.clone());
            let socket = old.map_or_else(|| bind(*address), Ok);
            let socket = socket.map_err(|source| OverlayError::Tunnel { action: "open a socket", source })?;
            self.sockets.push((*address, socket));
        }
        let sockets: Vec<_> = self.sockets.iter().map(|(_, socket)| socket.clone()).collect();
        let port = addresses.first().map_or(0, SocketAddr::port);
        self.tasks.push(tokio::spawn(forward_from_pods(
            self.device.clone(),
            sockets.clone(),
            self.ranges.clone(),
            port,
        )));
        for socket in sockets {
            self.tasks.push(tokio::spawn(forward_to_pods(self.device.clone(), socket, self.ranges.clone())));
        }
        Ok(())
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn open_device(name: &str) -> Result<Arc<AsyncFd<File>>, OverlayError> {
    let device = tun::open(name).map(Arc::new);
    device.map_err(|source| OverlayError::Tunnel { action: "make a tun device", source })
}

fn bind(address: SocketAddr) -> io::Result<Arc<UdpSocket>> {
    let socket = std::net::UdpSocket::bind(address)?;
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket).map(Arc::new)
}

/// Forwards packets from local pods to other nodes.
async fn forward_from_pods(
    device: Arc<AsyncFd<File>>,
    sockets: Vec<Arc<UdpSocket>>,
    ranges: Arc<RwLock<NodeRanges>>,
    port: u16,
) {
    let mut buffer = vec![0; MAX_PACKET];
    loop {
        let Ok(mut ready) = device.readable().await else { return };
        let length = match ready.try_io(|file| file.get_ref().read(&mut buffer)) {
            Ok(Ok(length)) => length,
            Ok(Err(error)) => {
                tracing::debug!(%error, "cannot read from the tun device");
                tokio::time::sleep(AFTER_ERROR).await;
                continue;
            }
            Err(_nothing_there) => continue,
        };
        let packet = buffer.get(..length).unwrap_or_default();
        let to = PacketAddresses::of(packet).and_then(|addresses| {
            ranges.read().unwrap_or_else(PoisonError::into_inner).node_of(addresses.destination)
        });
        let Some(to) = to else { continue };
        let has_family = |socket: &&Arc<UdpSocket>| {
            socket.local_addr().is_ok_and(|address| address.is_ipv4() == to.is_ipv4())
        };
        if let Some(socket) = sockets.iter().find(has_family) {
            // A packet that cannot be sent is lost, as on any link.
            let _lost = socket.send_to(packet, (to, port)).await;
        }
    }
}

/// Forwards packets from other nodes to local pods. Accepts a packet only from a known node, and only if its source
/// address is in the ranges of that node.
async fn forward_to_pods(
    device: Arc<AsyncFd<File>>,
    socket: Arc<UdpSocket>,
    ranges: Arc<RwLock<NodeRanges>>,
) {
    let mut buffer = vec![0; MAX_PACKET];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "cannot receive packets of the UDP tunnel");
                tokio::time::sleep(AFTER_ERROR).await;
                continue;
            }
        };
        let packet = buffer.get(..length).unwrap_or_default();
        let is_from =
            |ip| ranges.read().unwrap_or_else(PoisonError::into_inner).node_of(ip) == Some(from.ip());
        if PacketAddresses::of(packet).is_some_and(|addresses| is_from(addresses.source)) {
            let _lost = device.get_ref().write(packet);
        }
    }
}

// === impl PacketAddresses ===

impl PacketAddresses {
    /// None if the packet is not a complete IPv4 or IPv6 header.
    fn of(packet: &[u8]) -> Option<Self> {
        let v4 = |at: usize| Some(IpAddr::from(*packet.get(at..)?.first_chunk::<4>()?));
        let v6 = |at: usize| Some(IpAddr::from(*packet.get(at..)?.first_chunk::<16>()?));
        match packet.first()? >> 4 {
            4 => Some(Self { source: v4(12)?, destination: v4(16)? }),
            6 => Some(Self { source: v6(8)?, destination: v6(24)? }),
            _ => None,
        }
    }
}

// === impl NodeRanges ===

impl NodeRanges {
    fn node_of(&self, ip: IpAddr) -> Option<IpAddr> {
        let after = self.0.partition_point(|(range, _)| range.network() <= ip);
        let (range, node) = self.0.get(after.checked_sub(1)?)?;
        range.contains(ip).then_some(*node)
    }
}

#[expect(unsafe_code, reason = "a tun device is made by an ioctl")]
mod tun {
    use std::fs::{File, OpenOptions};
    use std::io;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;

    use tokio::io::unix::AsyncFd;

    nix::ioctl_write_ptr_bad!(
        /// `TUNSETIFF`
        set_interface,
        0x4004_54ca,
        libc::ifreq
    );

    pub(super) fn open(name: &str) -> io::Result<AsyncFd<File>> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
        let flags = libc::c_short::try_from(libc::IFF_TUN | libc::IFF_NO_PI).unwrap_or_default();
        let mut request = libc::ifreq {
            ifr_name: [0; libc::IFNAMSIZ],
            ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: flags },
        };
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        // SAFETY: the request is a complete ifreq, which the kernel accesses only during the call.
        unsafe { set_interface(file.as_raw_fd(), &raw const request) }?;
        // SAFETY: the file owns one descriptor, which is open and does not change during the file's life.
        unsafe { AsyncFd::register(file) }.map_err(|error| error.into_parts().1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_sent_to_the_node_with_its_range() {
        let way = |range: &str, node: &str| (range.parse().unwrap(), node.parse().unwrap());
        let ranges = NodeRanges(vec![
            way("10.42.1.0/24", "192.0.2.1"),
            way("10.42.3.0/24", "192.0.2.3"),
            way("fd42::/64", "192.0.2.1"),
        ]);
        let node = |ip: &str| ranges.node_of(ip.parse().unwrap()).map(|ip| ip.to_string());
        assert_eq!(node("10.42.1.255").as_deref(), Some("192.0.2.1"));
        assert_eq!(node("10.42.3.7").as_deref(), Some("192.0.2.3"));
        assert_eq!(node("fd42::7").as_deref(), Some("192.0.2.1"));
        assert_eq!((node("10.42.2.1"), node("10.41.0.1"), node("fd43::1")), (None, None, None));
    }

    #[test]
    fn invalid_ip_packets_have_no_source_and_destination() {
        assert_eq!(PacketAddresses::of(&[]), None);
        assert_eq!(PacketAddresses::of(&[0x45; 19]), None);
        assert_eq!(PacketAddresses::of(&[0x65; 39]), None);
        assert_eq!(PacketAddresses::of(&[0x15; 80]), None);
        assert!(PacketAddresses::of(&[0x45; 20]).is_some() && PacketAddresses::of(&[0x65; 40]).is_some());
    }
}

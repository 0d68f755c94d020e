//! Detection of address conflicts (RFC 5227 §2.4): another machine announces an address that this node announces, too.
//!
//! Packet filters in the kernel select these announcements, so other packets wake no thread. An announcement counts
//! only if it arrives at the interface that has the address. Packets of pods arrive at other interfaces.
#![allow(unsafe_code, reason = "AF_PACKET sockets and filters have no safe interface")]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::task::{Context, Poll, ready};

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::announced_address::by_interface;
use crate::error::Error;
use crate::link::{Link, Links};
use crate::socket_filter::{EQUAL, LOAD, LOAD_HALF, RETURN, attach};

/// Maximum bytes that are read of a packet. Later options of an advertisement are ignored.
const PACKET_MAX: usize = 1500;
/// Maximum packets that are read in one step.
const PACKETS_MAX: usize = 256;
/// Maximum addresses of one filter. Each address takes up to 16 bytes in the kernel. The kernel limits a filter to
/// `net.core.optmem_max`: 20 KiB before Linux 6.8.
const ADDRESSES_MAX: usize = 1024;
/// Maximum addresses in a block of a filter. A conditional jump skips at most 255 instructions.
const BLOCK_MAX: usize = 200;
/// Type of a neighbour advertisement, and of its option with the hardware address.
const ADVERTISEMENT: u8 = 136;
const HARDWARE_ADDRESS: u8 = 2;

/// Receives the announcements of other machines for addresses of this node.
pub struct ConflictMonitor {
    listeners: Vec<Listener>,
    /// The hardware addresses of all interfaces of this machine. If two interfaces are in one network, the kernel sends
    /// ARP requests for the address of one interface through the other.
    own: BTreeSet<[u8; 6]>,
}

/// A socket for one protocol on one interface.
struct Listener {
    socket: AsyncFd<OwnedFd>,
    protocol: Protocol,
    addresses: BTreeSet<IpAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Arp,
    NeighbourDiscovery,
}

// === impl ConflictMonitor ===

impl ConflictMonitor {
    /// Monitors the interfaces that have these addresses. Addresses without an interface, and interfaces without
    /// Ethernet addresses, are left out. Closing the monitor may take about 10 ms.
    ///
    /// # Errors
    /// When an interface has been removed meanwhile, or a socket cannot be opened.
    pub async fn open(addresses: &BTreeSet<IpAddr>) -> Result<Self, Error> {
        let failed = |source| Error::Socket { action: "monitor announced addresses", source };
        let links = Links::in_own_namespace()?;
        let mut listeners = Vec::new();
        for (name, addresses) in by_interface(addresses) {
            let link = links.get(&name).await?;
            let Ok(mac) = <[u8; 6]>::try_from(&link.mac[..]) else { continue };
            for protocol in [Protocol::Arp, Protocol::NeighbourDiscovery] {
                let is_of = |address: &&IpAddr| address.is_ipv4() == (protocol == Protocol::Arp);
                let addresses: BTreeSet<IpAddr> = addresses.iter().filter(is_of).copied().collect();
                if !addresses.is_empty() {
                    listeners.push(Listener::open(protocol, &link, mac, addresses).map_err(failed)?);
                }
            }
        }
        Ok(Self { listeners, own: own_hardware_addresses() })
    }

    /// Waits for announcements, and returns the announced addresses. Cancel safe.
    ///
    /// # Errors
    /// When a socket fails, for example because its interface is down. Then the monitor must be opened again.
    pub async fn next(&mut self) -> io::Result<BTreeSet<IpAddr>> {
        let poll = |context: &mut Context<'_>| {
            let mut polled = self.listeners.iter().map(|listener| listener.poll(context, &self.own));
            polled.find(Poll::is_ready).unwrap_or(Poll::Pending)
        };
        std::future::poll_fn(poll).await
    }
}

// === impl Listener ===

impl Listener {
    fn open(protocol: Protocol, link: &Link, mac: [u8; 6], addresses: BTreeSet<IpAddr>) -> io::Result<Self> {
        let socket = match protocol {
            Protocol::Arp => arp_socket(link.index, &arp_program(mac, &addresses))?,
            Protocol::NeighbourDiscovery => discovery_socket(&link.name, &discovery_program(&addresses))?,
        };
        // SAFETY: the `AsyncFd` owns the descriptor and nothing else closes it.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }?;
        Ok(Self { socket, protocol, addresses })
    }

    fn poll(&self, context: &mut Context<'_>, own: &BTreeSet<[u8; 6]>) -> Poll<io::Result<BTreeSet<IpAddr>>> {
        let mut buffer = [0; PACKET_MAX];
        loop {
            let mut readable = ready!(self.socket.poll_read_ready(context))?;
            let mut found = BTreeSet::new();
            for _ in 0..PACKETS_MAX {
                match recv(self.socket.get_ref().as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                    Ok(length) => {
                        found.extend(self.conflict(buffer.get(..length).unwrap_or_default(), own));
                    }
                    Err(Errno::EAGAIN) => {
                        readable.clear_ready();
                        break;
                    }
                    Err(Errno::EINTR) => {}
                    Err(error) => return Poll::Ready(Err(error.into())),
                }
            }
            if !found.is_empty() {
                return Poll::Ready(Ok(found));
            }
        }
    }

    /// The announced address, if it belongs to this node and another machine sent the packet.
    fn conflict(&self, packet: &[u8], own: &BTreeSet<[u8; 6]>) -> Option<IpAddr> {
        let (address, mac) = match self.protocol {
            Protocol::Arp => sender(packet)?,
            Protocol::NeighbourDiscovery => advertised(packet)?,
        };
        (!own.contains(&mac) && self.addresses.contains(&address)).then_some(address)
    }
}

fn own_hardware_addresses() -> BTreeSet<[u8; 6]> {
    let all = getifaddrs().into_iter().flatten();
    all.filter_map(|one| one.address?.as_link_addr()?.addr()).collect()
}

/// Addresses of the sender of an ARP packet. In a probe the IP address is unspecified.
fn sender(packet: &[u8]) -> Option<(IpAddr, [u8; 6])> {
    // Ethernet, IPv4, the lengths of their addresses and any operation.
    let [0, 1, 8, 0, 6, 4, _, _, rest @ ..] = packet else { return None };
    let (mac, rest) = rest.split_first_chunk::<6>()?;
    let address = rest.first_chunk::<4>()?;
    Some((Ipv4Addr::from(*address).into(), *mac))
}

/// Addresses in a neighbour advertisement.
fn advertised(packet: &[u8]) -> Option<(IpAddr, [u8; 6])> {
    let (header, rest) = packet.split_first_chunk::<8>()?;
    let (target, mut options) = rest.split_first_chunk::<16>()?;
    if header[0] != ADVERTISEMENT {
        return None;
    }
    while let [kind, length, ..] = options {
        let (option, others) = options.split_at_checked(8 * usize::from(*length))?;
        if *kind == HARDWARE_ADDRESS {
            let mac = option.get(2..8)?.try_into().ok()?;
            return Some((Ipv6Addr::from(*target).into(), mac));
        }
        if option.is_empty() {
            return None;
        }
        options = others;
    }
    None
}

/// A socket for the ARP packets that arrive at an interface.
fn arp_socket(index: u32, program: &[libc::sock_filter]) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the call has no pointers. Without a protocol the socket receives nothing before it is bound.
    let raw = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let socket = unsafe { OwnedFd::from_raw_fd(raw) };
    attach(&socket, program)?;
    // SAFETY: all-zero bytes are a valid sockaddr_ll.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = u16::try_from(libc::AF_PACKET).unwrap_or_default();
    to.sll_protocol = u16::try_from(libc::ETH_P_ARP).unwrap_or_default().to_be();
    to.sll_ifindex = i32::try_from(index).unwrap_or_default();
    let length = u32::try_from(size_of_val(&to)).unwrap_or_default();
    // SAFETY: the address outlives the call, and the length is that of the address.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const to).cast(), length) };
    if bound == 0 { Ok(socket) } else { Err(io::Error::last_os_error()) }
}

/// A socket for the neighbour advertisements that arrive at an interface.
fn discovery_socket(interface: &str, program: &[libc::sock_filter]) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Inet6, SockType::Raw, flags, SockProtocol::IcmpV6)?;
    attach(&socket, program)?;
    setsockopt(&socket, sockopt::BindToDevice, &OsString::from(interface))?;
    // Removes packets that arrived before the filter and the interface were set. Each read removes one.
    let mut buffer = [0; 1];
    while recv(socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT).is_ok() {}
    Ok(socket)
}

const LOAD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const REFUSE: libc::sock_filter = libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: 0 };
const PASS: libc::sock_filter = libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: u32::MAX };
/// `SKF_AD_OFF + SKF_AD_PKTTYPE`: to which machine a frame is sent.
const PACKET_TYPE: u32 = 0xffff_f000 + 4;
/// `PACKET_OTHERHOST`, also the type of frames of unknown VLANs.
const OTHER_HOST: u32 = 3;
/// `SKF_NET_OFF` plus the offset of the hop limit in the IPv6 header.
const HOP_LIMIT: u32 = 0xfff0_0000 + 7;

fn load(code: u16, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: 0, k }
}

/// Skips `jt` instructions if the loaded value equals `k`, else `jf`.
fn equal(k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: EQUAL, jt, jf, k }
}

/// Passes ARP packets whose sender has one of the addresses and not this hardware address.
fn arp_program(mac: [u8; 6], addresses: &BTreeSet<IpAddr>) -> Vec<libc::sock_filter> {
    let [first, second, third, fourth, fifth, sixth] = mac;
    let mut steps = vec![
        load(LOAD_BYTE, PACKET_TYPE),
        equal(OTHER_HOST, 4, 0),
        load(LOAD_HALF, 12),
        equal(u32::from(u16::from_be_bytes([fifth, sixth])), 0, 3),
        load(LOAD, 8),
        equal(u32::from_be_bytes([first, second, third, fourth]), 0, 1),
        REFUSE,
        load(LOAD, 14),
    ];
    steps.extend(among(addresses));
    steps
}

/// Passes neighbour advertisements of this link whose target ends with the last four bytes of one of the addresses. The
/// hop limit is lower in a packet that a router has forwarded (RFC 4861, section 7.1).
fn discovery_program(addresses: &BTreeSet<IpAddr>) -> Vec<libc::sock_filter> {
    let mut steps = vec![
        load(LOAD_BYTE, HOP_LIMIT),
        equal(u32::from(u8::MAX), 0, 2),
        load(LOAD_BYTE, 0),
        equal(u32::from(ADVERTISEMENT), 1, 0),
        REFUSE,
        load(LOAD, 20),
    ];
    steps.extend(among(addresses));
    steps
}

/// Passes packets whose loaded word is the last four bytes of one of the addresses, and refuses other packets. The
/// addresses of a block share one instruction that passes a packet.
fn among(addresses: &BTreeSet<IpAddr>) -> Vec<libc::sock_filter> {
    let end = |address: &IpAddr| match address {
        IpAddr::V4(address) => address.to_bits(),
        IpAddr::V6(address) => {
            let [.., a, b, c, d] = address.octets();
            u32::from_be_bytes([a, b, c, d])
        }
    };
    let ends: Vec<u32> = addresses.iter().take(ADDRESSES_MAX).map(end).collect();
    let mut steps = Vec::new();
    for block in ends.chunks(BLOCK_MAX) {
        // `PASS` is at the end of the block, after the jump to the next block, so each comparison jumps over a
        // different distance.
        let last = u8::try_from(block.len()).unwrap_or(u8::MAX);
        let distances = (1..=last).rev();
        steps.extend(block.iter().zip(distances).map(|(end, distance)| equal(*end, distance, 0)));
        steps.extend([load(JUMP, 1), PASS]);
    }
    steps.push(REFUSE);
    steps
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use coracle_testing::{in_new_namespace_async, ip};

    use super::*;
    use crate::announce::{frame, send};
    use crate::announced_address::announce_address;

    /// Hardware address of another machine.
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 7];

    /// Index and hardware address of an interface.
    async fn index_and_mac(name: &str) -> (u32, [u8; 6]) {
        let link = Links::in_own_namespace().unwrap().get(name).await.unwrap();
        (link.index, link.mac[..].try_into().unwrap())
    }

    async fn announcements_of_the_link_are_conflicts() {
        for pair in ["uplink", "pod"] {
            ip(&format!("link add name {pair}0 type veth peer name {pair}1"));
            ip(&format!("link set {pair}1 up"));
            ip(&format!("link set {pair}0 up"));
        }
        ip("addr add 192.0.2.1/24 dev uplink0");
        ip("addr add fd99::1/64 dev uplink0 nodad");
        let all =
            ["192.0.2.77", "192.0.2.78", "fd99::77", "fd99::78"].map(|ip| ip.parse::<IpAddr>().unwrap());
        let addresses = BTreeSet::from(all);
        for address in &addresses {
            announce_address(*address, None, Duration::from_secs(60)).await.unwrap();
        }
        let (own, link, pod) =
            (index_and_mac("uplink0").await.1, index_and_mac("uplink1").await, index_and_mac("pod1").await.0);
        let mut monitor = ConflictMonitor::open(&addresses).await.unwrap();
        for [address, next] in [[all[0], all[1]], [all[2], all[3]]] {
            send(link.0, &[frame(OTHER, address)]).unwrap();
            assert_eq!(monitor.next().await.unwrap(), BTreeSet::from([address]));
            // These frames are not conflicts: frames of this machine, a frame with another address, a frame at an
            // interface of pods.
            send(link.0, &[frame(own, address), frame(link.1, address)]).unwrap();
            let other_address = if address.is_ipv4() { "192.0.2.79" } else { "fd99::79" };
            send(link.0, &[frame(OTHER, other_address.parse().unwrap())]).unwrap();
            send(pod, &[frame(OTHER, address)]).unwrap();
            if address.is_ipv6() {
                // A router has forwarded this frame. The hop limit follows 14 bytes of Ethernet and 7 of IPv6.
                let mut forwarded = frame(OTHER, address);
                forwarded[14 + 7] = 254;
                send(link.0, &[forwarded]).unwrap();
            }
            send(link.0, &[frame(OTHER, next)]).unwrap();
            assert_eq!(monitor.next().await.unwrap(), BTreeSet::from([next]));
        }
    }

    #[test]
    fn an_announcement_of_the_link_is_a_conflict_and_one_of_a_pod_is_not() {
        in_new_namespace_async(announcements_of_the_link_are_conflicts);
    }

    #[test]
    fn incomplete_packets_announce_nothing() {
        let arp = frame(OTHER, "192.0.2.77".parse().unwrap());
        let advertisement = frame(OTHER, "fd99::77".parse().unwrap());
        // The bytes do not include the Ethernet and IPv6 headers.
        let (arp, advertisement) = (&arp[14..], &advertisement[54..]);
        assert_eq!(sender(arp), Some(("192.0.2.77".parse().unwrap(), OTHER)));
        assert_eq!(advertised(advertisement), Some(("fd99::77".parse().unwrap(), OTHER)));
        assert!((0..18).all(|length| sender(&arp[..length]).is_none()));
        assert!((0..32).all(|length| advertised(&advertisement[..length]).is_none()));
        let mut endless = advertisement.to_vec();
        endless[24..26].copy_from_slice(&[1, 0]);
        assert_eq!(advertised(&endless), None, "an option without a length");
    }

    #[test]
    fn the_kernel_accepts_programs_of_any_number_of_addresses() {
        let addresses: BTreeSet<IpAddr> = (0..2000_u32).map(|number| Ipv4Addr::from(number).into()).collect();
        // The kernel translates an instruction into one or two instructions of 8 bytes. The reserve of 1024 bytes is
        // for load instructions, which need more.
        let most = (20_480 - 1024) / 16;
        assert!(arp_program([0; 6], &addresses).len() <= most);
        assert!(discovery_program(&addresses).len() <= most);
    }

    #[test]
    fn programs_pass_all_of_their_addresses_and_no_others() {
        let passes = |steps: &[libc::sock_filter], word: u32| {
            let mut at = 0;
            loop {
                let step = steps[at];
                at += 1;
                match step.code {
                    EQUAL => at += usize::from(if step.k == word { step.jt } else { step.jf }),
                    JUMP => at += usize::try_from(step.k).unwrap(),
                    _ => return step.k != 0,
                }
            }
        };
        for count in [0, 1, 2, BLOCK_MAX, BLOCK_MAX + 1, ADDRESSES_MAX] {
            let ends: Vec<u32> = (0..u32::MAX).step_by(2).take(count).collect();
            let steps = among(&ends.iter().map(|end| Ipv4Addr::from(*end).into()).collect());
            assert!(ends.iter().all(|end| passes(&steps, *end) && !passes(&steps, end + 1)), "{count}");
        }
        assert!(!passes(&among(&BTreeSet::new()), 0));
    }
}

//! Announcement of addresses: a gratuitous ARP request for IPv4, an unsolicited neighbour advertisement for IPv6 (RFC
//! 5227 §3, RFC 4861 §7.2.6). Neighbours replace cached entries of earlier owners.
#![allow(unsafe_code, reason = "AF_PACKET sockets have no safe address type")]

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::thread::JoinHandle;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use tracing::debug;

use crate::link::Link;
use crate::netns::Netns;

const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;

/// Announces the addresses from inside the link's namespace, on a separate thread. When the thread closes its packet
/// socket, the kernel waits some 10 ms for a grace period. A failure is only logged: neighbours also find the address
/// by ARP requests and neighbour solicitations. `None` if no thread was started.
pub(crate) fn announce(netns: Netns, link: &Link, addresses: &[IpAddr]) -> Option<JoinHandle<()>> {
    let mac = <[u8; 6]>::try_from(&link.mac[..]).ok()?;
    let frames: Vec<_> = addresses.iter().map(|address| frame(mac, *address)).collect();
    let index = link.index;
    if frames.is_empty() {
        return None;
    }
    let thread = std::thread::Builder::new().name("announce".to_owned()).spawn(move || {
        if let Err(error) = netns.enter().and_then(|()| send(index, &frames)) {
            debug!(%error, "cannot announce addresses");
        }
    });
    thread.inspect_err(|error| debug!(%error, "cannot start a thread to announce addresses")).ok()
}

/// Sends frames through an interface of the calling thread's network namespace.
pub(crate) fn send(index: u32, frames: &[Vec<u8>]) -> io::Result<()> {
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: all-zero bytes are a valid sockaddr_ll.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = u16::try_from(libc::AF_PACKET).unwrap_or_default();
    to.sll_ifindex = i32::try_from(index).unwrap_or_default();
    let length = u32::try_from(size_of_val(&to)).unwrap_or_default();
    for frame in frames {
        // SAFETY: the frame and the address outlive the call, and each pointer is passed with the length of its data.
        let sent = unsafe {
            libc::sendto(
                socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                libc::MSG_DONTWAIT,
                (&raw const to).cast(),
                length,
            )
        };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// The frame that announces an address.
pub(crate) fn frame(mac: [u8; 6], address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => request(mac, address),
        IpAddr::V6(address) => advertisement(mac, address),
    }
}

fn ethernet(to: [u8; 6], from: [u8; 6], kind: u16) -> Vec<u8> {
    [&to[..], &from[..], &kind.to_be_bytes()[..]].concat()
}

/// An ARP request of the address for itself, as broadcast.
fn request(mac: [u8; 6], address: Ipv4Addr) -> Vec<u8> {
    let mut frame = ethernet([0xff; 6], mac, ARP);
    frame.extend_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend_from_slice(&mac);
    frame.extend_from_slice(&address.octets());
    frame.extend_from_slice(&[0; 6]);
    frame.extend_from_slice(&address.octets());
    frame
}

/// A neighbour advertisement with the override flag, to all nodes.
fn advertisement(mac: [u8; 6], address: Ipv6Addr) -> Vec<u8> {
    const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    const ICMP: u8 = 58;
    let mut body = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    body.extend_from_slice(&address.octets());
    body.extend_from_slice(&[2, 1]);
    body.extend_from_slice(&mac);
    let length = u16::try_from(body.len()).unwrap_or_default().to_be_bytes();
    let pseudo =
        [&address.octets()[..], &ALL_NODES.octets(), &[0, 0], &length, &[0, 0, 0, ICMP], &body].concat();
    body[2..4].copy_from_slice(&checksum(&pseudo).to_be_bytes());
    let mut frame = ethernet([0x33, 0x33, 0, 0, 0, 1], mac, IPV6);
    frame.extend_from_slice(&[0x60, 0, 0, 0]);
    frame.extend_from_slice(&length);
    frame.extend_from_slice(&[ICMP, 255]);
    frame.extend_from_slice(&address.octets());
    frame.extend_from_slice(&ALL_NODES.octets());
    frame.extend_from_slice(&body);
    frame
}

/// The Internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [0x0a, 0x58, 1, 2, 3, 4];

    #[test]
    fn an_arp_request_has_the_address_as_its_sender_and_its_target() {
        let frame = frame(MAC, "10.0.0.7".parse().unwrap());
        assert_eq!(frame.len(), 42);
        assert_eq!(
            (&frame[..6], &frame[28..32], &frame[38..]),
            (&[0xff; 6][..], &[10, 0, 0, 7][..], &[10, 0, 0, 7][..])
        );
    }

    #[test]
    fn an_advertisement_has_a_checksum_that_a_receiver_accepts() {
        let frame = frame(MAC, "fd00::7".parse().unwrap());
        assert_eq!(frame.len(), 86);
        let (body, addresses) = (&frame[54..], &frame[22..54]);
        let pseudo = [addresses, &[0, 0, 0, 32, 0, 0, 0, 58], body].concat();
        assert_eq!(checksum(&pseudo), 0);
    }
}

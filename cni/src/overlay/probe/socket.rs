//! Echo requests and replies over raw sockets.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt};

const HEADER: usize = 8;
/// Replies are read after this number of requests: the default socket buffer holds about a hundred packets.
const READ_INTERVAL: usize = 32;
/// Size of the receive buffer in bytes, for replies that arrive between two reads.
const RECEIVE_BUFFER: usize = 4 << 20;

/// An echo request to send.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    /// Index of the path that the request tests.
    pub(super) index: usize,
    pub(super) to: IpAddr,
    /// Size of the packet, including the IP header.
    pub(super) bytes: u32,
}

/// Replies of a round so far.
struct Replies<'a> {
    requests: &'a [Request],
    indexes: HashSet<usize>,
    buffer: Vec<u8>,
}

/// One raw socket for each address family. Only the IPv4 socket exists if the kernel has no IPv6.
pub(super) struct ProbeSockets {
    // These are raw sockets: send and receive work as on a datagram socket, so the standard library's type is used.
    v4: UdpSocket,
    v6: Option<UdpSocket>,
    round: u16,
}

// === impl ProbeSockets ===

impl ProbeSockets {
    pub(super) fn open() -> io::Result<Self> {
        let open = |family, protocol| -> io::Result<UdpSocket> {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            Ok(socket(family, SockType::Raw, flags, protocol)?.into())
        };
        let v4 = open(AddressFamily::Inet, SockProtocol::Icmp)?;
        let v6 = open(AddressFamily::Inet6, SockProtocol::IcmpV6).ok();
        disable_fragmentation(&v4, false)?;
        v6.iter().try_for_each(|socket| disable_fragmentation(socket, true))?;
        for socket in std::iter::once(&v4).chain(&v6) {
            // Without the privilege for a larger buffer, the default remains.
            let _refused = setsockopt(socket, sockopt::RcvBufForce, &RECEIVE_BUFFER);
        }
        // The first round number differs between processes, so that a process does not take replies to requests of
        // another process.
        let round = u16::try_from(std::process::id() & 0xffff).unwrap_or_default();
        Ok(Self { v4, v6, round })
    }

    /// Sends all requests. Returns the indexes of the paths that replied before the timeout. The timeout starts with
    /// the last request.
    pub(super) fn round(&mut self, requests: &[Request], timeout: Duration) -> io::Result<HashSet<usize>> {
        self.round = self.round.wrapping_add(1);
        let (mut sent, mut replies) = (HashSet::new(), Replies::to(requests));
        for (number, request) in requests.iter().enumerate() {
            // If the buffer overflowed, replies would be lost, and working peers would look unreachable.
            if number % READ_INTERVAL == 0 {
                self.read_replies(&mut replies);
            }
            if self.send_when_writable(number, &mut replies, timeout)? {
                sent.insert(request.index);
            }
        }
        let end = Instant::now() + timeout;
        self.read_replies(&mut replies);
        while replies.indexes.len() < sent.len() && self.wait(None, end)? {
            self.read_replies(&mut replies);
        }
        Ok(replies.indexes)
    }

    /// Sends a request as soon as the buffer has room. Returns false if it cannot be sent.
    fn send_when_writable(
        &self,
        number: usize,
        replies: &mut Replies<'_>,
        timeout: Duration,
    ) -> io::Result<bool> {
        let Some(Request { to, bytes, .. }) = replies.requests.get(number).copied() else { return Ok(false) };
        let end = Instant::now() + timeout;
        loop {
            match self.send(number, to, bytes) {
                Ok(_) => return Ok(true),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Ok(false),
                Err(_full) => {}
            }
            if !self.wait(Some(to), end)? {
                return Ok(false);
            }
            self.read_replies(replies);
        }
    }

    /// Reads pending replies.
    fn read_replies(&self, replies: &mut Replies<'_>) {
        for socket in std::iter::once(&self.v4).chain(&self.v6) {
            while let Ok((length, from)) = socket.recv_from(&mut replies.buffer) {
                let packet = replies.buffer.get(..length).unwrap_or_default();
                let Some((number, bytes)) = self.answer(packet, from.is_ipv4()) else { continue };
                let request = replies
                    .requests
                    .get(number)
                    .filter(|request| (request.to, request.bytes) == (from.ip(), bytes));
                replies.indexes.extend(request.map(|request| request.index));
            }
        }
    }

    fn send(&self, number: usize, to: IpAddr, bytes: u32) -> io::Result<usize> {
        let (socket, kind, ip_header) = match to {
            IpAddr::V4(_) => (Some(&self.v4), 8, 20),
            IpAddr::V6(_) => (self.v6.as_ref(), 128, 40),
        };
        let length = (bytes as usize).saturating_sub(ip_header).max(HEADER);
        let mut packet = vec![0; length];
        packet[0] = kind;
        packet[4..6].copy_from_slice(&self.round.to_be_bytes());
        packet[6..8].copy_from_slice(&u16::try_from(number).unwrap_or(u16::MAX).to_be_bytes());
        if to.is_ipv4() {
            // The kernel writes the checksum of ICMPv6.
            let sum = checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        socket.ok_or(io::ErrorKind::Unsupported)?.send_to(&packet, SocketAddr::new(to, 0))
    }

    /// Waits until `end` for a packet or, with `to`, for room in the send buffer. Returns false after the timeout.
    fn wait(&self, to: Option<IpAddr>, end: Instant) -> io::Result<bool> {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        let poll_for = |socket, v4: bool| match to {
            // Room for sending matters only on the socket that sends.
            Some(to) if to.is_ipv4() == v4 => PollFd::new(socket, PollFlags::POLLIN | PollFlags::POLLOUT),
            _ => PollFd::new(socket, PollFlags::POLLIN),
        };
        let v6 = self.v6.as_ref().map(|socket| poll_for(socket.as_fd(), false));
        let mut fds: Vec<_> = std::iter::once(poll_for(self.v4.as_fd(), true)).chain(v6).collect();
        match poll(&mut fds, timeout) {
            Err(nix::Error::EINTR) => Ok(true),
            ready => Ok(ready? > 0),
        }
    }

    /// The sequence number of the request that a reply answers, and the size of the packet.
    fn answer(&self, packet: &[u8], v4: bool) -> Option<(usize, u32)> {
        // Raw IPv4 sockets deliver the IP header, raw IPv6 sockets do not.
        let (start, kind, ip_header) =
            if v4 { (usize::from(packet.first()? & 15) * 4, 0, 0) } else { (0, 129, 40) };
        let [found, _, _, _, round0, round1, number0, number1, ..] = *packet.get(start..)? else {
            return None;
        };
        let is_ours = found == kind && u16::from_be_bytes([round0, round1]) == self.round;
        let bytes = u32::try_from(packet.len() + ip_header).ok()?;
        is_ours.then_some((usize::from(u16::from_be_bytes([number0, number1])), bytes))
    }
}

// === impl Replies ===

impl<'a> Replies<'a> {
    fn to(requests: &'a [Request]) -> Self {
        Self { requests, indexes: HashSet::new(), buffer: vec![0; 65536] }
    }
}

/// The Internet checksum (RFC 1071).
fn checksum(packet: &[u8]) -> u16 {
    let words = packet.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

pub(super) use options::disable_fragmentation;

#[expect(unsafe_code, reason = "no dependency has a safe wrapper for these socket options")]
mod options {
    use std::io;
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    /// Disables fragmentation, and ignores recorded path MTUs.
    pub(in super::super) fn disable_fragmentation(socket: &UdpSocket, v6: bool) -> io::Result<()> {
        let (level, name, value) = if v6 {
            (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)
        } else {
            (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)
        };
        let size = libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or_default();
        // SAFETY: the value is an int of that size, which lives until the call returns.
        let result = unsafe {
            libc::setsockopt(socket.as_raw_fd(), level, name, std::ptr::from_ref(&value).cast(), size)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn a_packet_with_its_checksum_sums_up_to_zero() {
        let mut packet = vec![8, 0, 0, 0, 1, 2, 3, 4, 5];
        let sum = checksum(&packet);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(checksum(&packet), 0);
    }

    #[test]
    fn replies_are_found_and_packets_above_the_maximum_get_no_reply() {
        let mut probe_sockets = ProbeSockets::open().expect("these tests need root");
        let requests: [Request; 3] = [
            Request { index: 7, to: Ipv4Addr::LOCALHOST.into(), bytes: 1400 },
            Request { index: 8, to: Ipv6Addr::LOCALHOST.into(), bytes: 84 },
            Request { index: 9, to: Ipv4Addr::new(127, 0, 0, 2).into(), bytes: 70_000 },
        ];
        let answered = probe_sockets.round(&requests, Duration::from_millis(500)).unwrap();
        assert!(answered.contains(&7) && !answered.contains(&9), "{answered:?}");
    }
}

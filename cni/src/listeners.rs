//! Listening sockets in the caller's network namespace, by `sock_diag(7)`.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload, Nla as _,
};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP, IPPROTO_UDP};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};

use crate::ports::Protocol;

/// `TCP_CLOSE` and `TCP_LISTEN` (`net/tcp_states.h`). A bound, unconnected UDP socket is in state `TCP_CLOSE`.
const CLOSED: u32 = 1 << 7;
const LISTENING: u32 = 1 << 10;
/// `IPPROTO_SCTP`.
const SCTP: u8 = 132;
/// `INET_DIAG_SKV6ONLY` (`linux/inet_diag.h`).
const V6_ONLY: u16 = 11;
/// Maximum size of a dump's part in bytes.
const MAX_MESSAGE: usize = 64 << 10;

/// A socket that receives packets to a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// The transport protocol.
    pub protocol: Protocol,
    /// The address. An unspecified address means all addresses of its family.
    pub address: IpAddr,
    /// The port.
    pub port: u16,
    /// The socket's inode, as links in `/proc/<pid>/fd` name it; 0 for a socket of the kernel.
    pub inode: u32,
    /// Whether the socket is an IPv6 socket that does not accept IPv4.
    pub v6_only: bool,
}

// === impl Listener ===

impl Listener {
    /// Whether packets to this address may reach the socket. `None` means any address.
    #[must_use]
    pub fn takes(&self, address: Option<IpAddr>) -> bool {
        let Some(address) = address else { return true };
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(_)) if own.is_unspecified() => true,
            (IpAddr::V6(own), IpAddr::V6(_)) if own.is_unspecified() => true,
            (IpAddr::V6(own), IpAddr::V4(_)) if own.is_unspecified() => !self.v6_only,
            (own, other) => own.to_canonical() == other,
        }
    }
}

/// All listening sockets of a transport protocol. Blocks until the kernel answers.
///
/// # Errors
/// When the kernel does not answer.
pub fn listeners(protocol: Protocol) -> io::Result<Vec<Listener>> {
    let (number, states) = match protocol {
        Protocol::Tcp => (IPPROTO_TCP, LISTENING),
        Protocol::Udp => (IPPROTO_UDP, CLOSED),
        Protocol::Sctp => (SCTP, LISTENING),
    };
    // The request itself would make the kernel load the protocol's module.
    if protocol == Protocol::Sctp && !Path::new("/proc/net/sctp").exists() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for (family, socket_id) in [(AF_INET, SocketId::new_v4()), (AF_INET6, SocketId::new_v6())] {
        let states = StateFlags::from_bits_retain(states);
        let extensions = ExtensionFlags::empty();
        let request = InetRequest { family, protocol: number, extensions, states, socket_id };
        dump(request, |answer| found.push(listener(protocol, &answer)))?;
    }
    // A UDP socket has no bound port before its first use.
    found.retain(|listener| listener.port != 0);
    Ok(found)
}

fn listener(protocol: Protocol, answer: &InetResponse) -> Listener {
    let id = &answer.header.socket_id;
    let v6_only = answer.nlas.iter().any(|nla| match nla {
        Nla::Other(other) if other.kind() == V6_ONLY => {
            let mut value = vec![0; other.value_len()];
            other.emit_value(&mut value);
            value.first() == Some(&1)
        }
        _ => false,
    });
    let (address, port) = (id.source_address, id.source_port);
    Listener { protocol, address, port, inode: answer.header.inode, v6_only }
}

fn dump(request: InetRequest, mut each: impl FnMut(InetResponse)) -> io::Result<()> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let payload = NetlinkPayload::from(SockDiagMessage::InetRequest(request));
    let mut message = NetlinkMessage::new(header, payload);
    message.finalize();
    let mut out = vec![0; message.buffer_len()];
    message.serialize(&mut out);
    socket.send_to(&out, &SocketAddr::new(0, 0), 0)?;
    let mut buffer = Vec::with_capacity(MAX_MESSAGE);
    loop {
        buffer.clear();
        socket.recv(&mut buffer, 0)?;
        let mut rest = buffer.as_slice();
        while let Some(length) = rest.first_chunk().map(|length| u32::from_ne_bytes(*length) as usize) {
            let Some(message) = rest.get(..length).filter(|_| length >= 16) else { break };
            let message = NetlinkMessage::<SockDiagMessage>::deserialize(message);
            match message.map_err(io::Error::other)?.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(answer)) => each(*answer),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                NetlinkPayload::Done(_) => return Ok(()),
                _ => {}
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    fn of(protocol: Protocol, port: u16) -> Vec<Listener> {
        listeners(protocol).unwrap().into_iter().filter(|listener| listener.port == port).collect()
    }

    #[test]
    fn sockets_that_listen_are_found_with_their_addresses() {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = tcp.local_addr().unwrap().port();
        let [found] = of(Protocol::Tcp, port).try_into().unwrap();
        assert!(found.takes(None) && found.takes("127.0.0.1".parse().ok()));
        assert!(!found.takes("192.0.2.1".parse().ok()) && !found.takes("::1".parse().ok()));
        assert_eq!(of(Protocol::Udp, port), []);
        let udp = UdpSocket::bind("[::]:0").unwrap();
        let port = udp.local_addr().unwrap().port();
        let [found] = of(Protocol::Udp, port).try_into().unwrap();
        assert!(found.takes("192.0.2.1".parse().ok()) && found.takes("::1".parse().ok()));
        assert_ne!(found.inode, 0);
        let only = Listener { v6_only: true, ..found };
        assert!(!only.takes("192.0.2.1".parse().ok()));
        listeners(Protocol::Sctp).unwrap();
    }

    #[test]
    fn a_connected_socket_does_not_listen() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(server.local_addr().unwrap()).unwrap();
        assert_eq!(of(Protocol::Udp, client.local_addr().unwrap().port()), []);
    }
}

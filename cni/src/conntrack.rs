//! Removal of conntrack entries of datagrams to host ports.
//!
//! An entry is made by the first packet between two addresses and ports, and decides the target of all further packets
//! until it expires. A client that keeps sending by UDP would reach a removed pod, or the next pod with its address. A
//! client that sent before the port existed would never reach the pod.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use crate::nft::message::{Attributes, BODY, NLMSG_ERROR, attributes, errno_of, kind_of, messages};
use crate::nft::{Channel, Mapping};

/// `NFNL_SUBSYS_CTNETLINK`, and its messages (`linux/netfilter/nfnetlink_conntrack.h`).
const NEW: u16 = 0x100;
const GET: u16 = 0x101;
const DELETE: u16 = 0x102;
const NLMSG_DONE: u16 = 3;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;

/// Attributes of a connection: the packets in the original direction, the id and the zone.
const ORIGINAL: u16 = 1;
const ID: u16 = 12;
const ZONE: u16 = 18;
const FILTER: u16 = 25;

/// The parts of a connection that are needed here.
struct Flow<'a> {
    original: &'a [u8],
    protocol: u8,
    to: IpAddr,
    port: u16,
    /// Id and zone, which distinguish it from another connection between the same ends.
    exactly: Attributes,
}

/// Removes entries of packets to these ports of this machine, whatever their target is.
pub(crate) fn forget(channel: &mut Channel, ports: &[Mapping]) -> io::Result<()> {
    let mut groups: BTreeMap<(u8, u8), Vec<&Mapping>> = BTreeMap::new();
    for port in ports {
        let family = if port.to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        groups.entry((family as u8, port.protocol.number())).or_default().push(port);
    }
    let mut first = Ok(());
    for ((family, protocol), ports) in groups {
        let answer = channel.request(GET, DUMP, family, &question(protocol, &ports))?;
        let mut here = HashMap::new();
        for message in messages(&answer) {
            if let Some(error) = error_of(message) {
                return Err(error);
            }
            let flow = Flow::of(message).filter(|flow| flow.protocol == protocol);
            if let Some(flow) = flow.filter(|flow| ports.iter().any(|port| flow.came_by(port, &mut here))) {
                first = first.and(delete(channel, family, &flow));
            }
        }
    }
    first
}

/// Lists the connections of the protocol, filtered by port if there is one port only. The kernel may ignore the
/// filter, as for SCTP.
fn question(protocol: u8, ports: &[&Mapping]) -> Attributes {
    const BY_PROTOCOL: u32 = 1 << 3;
    const BY_PORT: u32 = 1 << 5;
    let (port, filter) = match ports {
        [one] => (one.host_port, BY_PROTOCOL | BY_PORT),
        _ => (0, BY_PROTOCOL),
    };
    let transport = Attributes::default().bytes(1, &[protocol]).bytes(3, &port.to_be_bytes());
    let question = Attributes::default().nest(ORIGINAL, Attributes::default().nest(2, transport));
    question.nest(FILTER, Attributes::default().bytes(1, &filter.to_ne_bytes()))
}

fn delete(channel: &mut Channel, family: u8, flow: &Flow<'_>) -> io::Result<()> {
    let named = Attributes::default().nested(ORIGINAL, flow.original).and(&flow.exactly);
    let answer = channel.request(DELETE, ACK, family, &named)?;
    match messages(&answer).find_map(error_of) {
        // It expired in the meantime.
        Some(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// The error in a message, also in the end of a list.
fn error_of(message: &[u8]) -> Option<io::Error> {
    let errno = errno_of(message);
    let is_error = [NLMSG_ERROR, NLMSG_DONE].contains(&kind_of(message)) && errno > 0;
    is_error.then(|| io::Error::from_raw_os_error(errno))
}

// === impl Flow ===

impl<'a> Flow<'a> {
    fn of(message: &'a [u8]) -> Option<Self> {
        if kind_of(message) != NEW {
            return None;
        }
        let body = message.get(BODY..)?;
        let original = member(body, ORIGINAL)?;
        let (ends, transport) = (member(original, 1)?, member(original, 2)?);
        let to = match (member(ends, 2), member(ends, 4)) {
            (Some(v4), _) => Ipv4Addr::from(<[u8; 4]>::try_from(v4).ok()?).into(),
            (_, Some(v6)) => Ipv6Addr::from(<[u8; 16]>::try_from(v6).ok()?).into(),
            _ => return None,
        };
        let exactly = [ID, ZONE].into_iter().filter_map(|kind| Some((kind, member(body, kind)?)));
        Some(Self {
            original,
            protocol: *member(transport, 1)?.first()?,
            to,
            port: u16::from_be_bytes(member(transport, 3)?.try_into().ok()?),
            exactly: exactly.fold(Attributes::default(), |all, (kind, value)| all.bytes(kind, value)),
        })
    }

    /// Whether the port's rules apply to it. Packets that are forwarded to the same port of another machine do not
    /// count.
    fn came_by(&self, port: &Mapping, here: &mut HashMap<IpAddr, bool>) -> bool {
        self.port == port.host_port
            && match port.host_ip {
                Some(ip) => ip == self.to,
                None => *here.entry(self.to).or_insert_with(|| is_here(self.to)),
            }
    }
}

/// Whether the address belongs to this machine: binding to another fails.
fn is_here(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).err().is_none_or(|error| error.kind() != io::ErrorKind::AddrNotAvailable)
}

fn member(of: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(of).find(|(other, _)| *other == kind).map(|(_, value)| value)
}

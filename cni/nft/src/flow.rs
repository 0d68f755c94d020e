//! Conntrack entries: listing, removal and marks.
//!
//! The first packet between two addresses and ports creates an entry. The entry decides the target of all further
//! packets until it expires. Without the removal, a client that keeps sending UDP packets would reach a removed target,
//! or a new target with the same address.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::message::{
    Attributes, BODY, Channel, NLMSG_ERROR, Request, errno_of, kind_of, member, messages, number_of,
};

/// `NFNL_SUBSYS_CTNETLINK`, and its messages (`linux/netfilter/nfnetlink_conntrack.h`).
const NEW: u16 = 0x100;
const GET: u16 = 0x101;
const DELETE: u16 = 0x102;
const GET_STATS: u16 = 0x105;
const NLMSG_DONE: u16 = 3;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;

/// Attributes of a connection or a request: the packets in the original and in the reply direction, the mark, the id,
/// the zone, the mask of the mark, and the filter of a list.
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const MARK: u16 = 8;
const ID: u16 = 12;
const ZONE: u16 = 18;
const MARK_MASK: u16 = 21;
const FILTER: u16 = 25;
/// Attributes of a filter: the fields to compare in each direction.
const ORIGINAL_FLAGS: u16 = 1;
const REPLY_FLAGS: u16 = 2;

/// The parts of a conntrack entry that identify its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// Number of the transport protocol.
    pub protocol: u8,
    /// The client's address before translation.
    pub from: IpAddr,
    /// The destination to which the client sends.
    pub to: IpAddr,
    /// The port to which the client sends; 0 if the protocol has no ports.
    pub port: u16,
    /// The address that answers: the translated destination.
    pub answered_by: IpAddr,
    /// The port that answers; 0 if the protocol has no ports.
    pub answering_port: u16,
    /// The mark of the connection.
    pub mark: u32,
}

/// Connections to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowSelector {
    /// All connections, of both address families.
    All,
    /// Connections that begin at the address or are answered by it. The kernel filters the list, but reads its whole
    /// table: once for each end, and once more for IPv6.
    Of(IpAddr),
}

/// Numbers of connections that [`mark_flows`] handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MarkCounts {
    /// Entries that the kernel listed.
    pub listed: usize,
    /// Entries for which the caller wants the bit set.
    pub with_bit: usize,
}

/// Maximum number of ports that are listed separately. For more ports one list of all connections is cheaper.
const PORTS_MAX: usize = 16;

/// Deletes the entries of the protocol and address family to these ports for which `stale` returns true. For few ports,
/// a kernel that supports the filter lists only the entries to these ports. Returns the number of listed entries.
///
/// # Errors
/// If the kernel refuses the list, no entry is deleted. If the kernel refuses a deletion, the other stale entries are
/// still deleted, and the first error is returned.
pub fn delete_flows(
    channel: &mut Channel,
    is_ipv4: bool,
    protocol: u8,
    ports: &BTreeSet<u16>,
    mut stale: impl FnMut(&Flow) -> bool,
) -> io::Result<usize> {
    let family = if is_ipv4 { libc::AF_INET } else { libc::AF_INET6 } as u8;
    let (mut found, mut error, mut listed) = (Vec::new(), None, 0);
    let filters: Vec<_> = match ports.len() {
        0 => return Ok(0),
        1..=PORTS_MAX => ports.iter().map(|port| (dump_filter(protocol, Some(*port)), Some(*port))).collect(),
        _ => vec![(dump_filter(protocol, None), None)],
    };
    for (filter, only) in filters {
        channel.request_each(Request { kind: GET, flags: DUMP, family }, &filter, |message| {
            error = error.take().or_else(|| error_of(message));
            let Some(flow) = flow_of(message) else { return };
            listed += 1;
            let is_selected = only.map_or_else(|| ports.contains(&flow.port), |port| port == flow.port);
            if is_selected && flow.protocol == protocol && stale(&flow) {
                found.extend(name_of(message));
            }
        })?;
    }
    if let Some(error) = error {
        return Err(error);
    }
    let mut first = Ok(());
    for named in &found {
        first = first.and(act(channel, DELETE, family, named));
    }
    first.map(|()| listed)
}

/// Number of connections that the kernel tracks in the network namespace. A new connection is counted before its first
/// packet reaches a filter.
///
/// # Errors
/// When the kernel refuses the request.
pub fn count_flows(channel: &mut Channel) -> io::Result<u32> {
    const ENTRIES: u16 = 1;
    let answer = channel.request(GET_STATS, 0, libc::AF_UNSPEC as u8, &Attributes::default())?;
    if let Some(error) = messages(&answer).find_map(error_of) {
        return Err(error);
    }
    number_of(&answer, ENTRIES).ok_or_else(|| io::Error::other("the kernel did not count the connections"))
}

/// Sets or clears a bit in the marks of connections. `wanted` returns the bit's value for a connection, or `None` to
/// keep its mark.
///
/// # Errors
/// If the kernel refuses the list, no connection is changed. If the kernel refuses a change, the other connections are
/// still changed, and the first error is returned.
pub fn mark_flows(
    channel: &mut Channel,
    ends: FlowSelector,
    bit: u32,
    mut wanted: impl FnMut(&Flow) -> Option<bool>,
) -> io::Result<MarkCounts> {
    let family = ends.family();
    let (mut changes, mut error, mut marked) = (Vec::new(), None, MarkCounts::default());
    for dump in ends.dump_requests() {
        let request = Request { kind: GET, flags: DUMP, family };
        channel.request_each(request, &dump.filter, |message| {
            error = error.take().or_else(|| error_of(message));
            let Some(flow) = flow_of(message) else { return };
            marked.listed += 1;
            // A kernel before 5.9 ignores the filter.
            let Some(is_set) = ends.include(&flow).then(|| wanted(&flow)).flatten() else { return };
            marked.with_bit += usize::from(is_set);
            if is_set != (flow.mark & bit != 0) {
                changes
                    .extend(name_of(message).map(|named| (flow.from, named, if is_set { bit } else { 0 })));
            }
        })?;
        if dump.is_probe && marked.listed > 0 {
            break;
        }
    }
    if let Some(error) = error {
        return Err(error);
    }
    let mut first = Ok(());
    for (from, named, value) in changes {
        let change = named.bytes(MARK, &value.to_be_bytes()).bytes(MARK_MASK, &bit.to_be_bytes());
        first = first.and(act(channel, NEW, FlowSelector::Of(from).family(), &change));
    }
    first.map(|()| marked)
}

/// A request for a list of connections.
struct DumpRequest {
    filter: Attributes,
    /// Whether this request is a probe for an inverted filter. If the list of a probe is not empty, the list has all
    /// connections.
    is_probe: bool,
}

/// A filter by the source of the packets in one direction. `tuple` and `flags` are the attributes of that direction.
fn by_source(address: IpAddr, tuple: u16, flags: u16) -> Attributes {
    const BY_SOURCE: u32 = 1;
    let (kind, octets) = match address {
        IpAddr::V4(v4) => (1, v4.octets().to_vec()),
        IpAddr::V6(v6) => (3, v6.octets().to_vec()),
    };
    let ends = Attributes::default().nest(1, Attributes::default().bytes(kind, &octets));
    let filter = Attributes::default().bytes(flags, &BY_SOURCE.to_ne_bytes());
    Attributes::default().nest(tuple, ends).nest(FILTER, filter)
}

// === impl FlowSelector ===

impl FlowSelector {
    fn family(self) -> u8 {
        let family = match self {
            Self::All => libc::AF_UNSPEC,
            Self::Of(IpAddr::V4(_)) => libc::AF_INET,
            Self::Of(IpAddr::V6(_)) => libc::AF_INET6,
        };
        family as u8
    }

    fn include(self, flow: &Flow) -> bool {
        match self {
            Self::All => true,
            Self::Of(address) => flow.from == address || flow.answered_by == address,
        }
    }

    /// The requests whose lists together contain all these connections. If a probe returns a connection, the later
    /// requests are unnecessary. A connection must meet all conditions of a filter, so each end of the connections
    /// needs its own list.
    fn dump_requests(self) -> Vec<DumpRequest> {
        let Self::Of(address) = self else {
            return vec![DumpRequest { filter: Attributes::default(), is_probe: false }];
        };
        let by = |tuple, flags| DumpRequest { filter: by_source(address, tuple, flags), is_probe: false };
        let both = [by(ORIGINAL, ORIGINAL_FLAGS), by(REPLY, REPLY_FLAGS)];
        // Linux 6.18 inverts the comparison of IPv6 addresses (`ctnetlink_filter_match_tuple`): it lists all
        // connections except the connections of the address. A filter for an address that no connection has then lists
        // all connections.
        let unused = by_source(Ipv6Addr::UNSPECIFIED.into(), ORIGINAL, ORIGINAL_FLAGS);
        let probe = address.is_ipv6().then_some(DumpRequest { filter: unused, is_probe: true });
        probe.into_iter().chain(both).collect()
    }
}

/// Lists the connections of the protocol, filtered by port if one is given. The kernel may ignore the filter, as for
/// SCTP.
fn dump_filter(protocol: u8, port: Option<u16>) -> Attributes {
    const BY_PROTOCOL: u32 = 1 << 3;
    const BY_PORT: u32 = 1 << 5;
    let filter = if port.is_some() { BY_PROTOCOL | BY_PORT } else { BY_PROTOCOL };
    let port = port.unwrap_or_default();
    let transport = Attributes::default().bytes(1, &[protocol]).bytes(3, &port.to_be_bytes());
    let attributes = Attributes::default().nest(ORIGINAL, Attributes::default().nest(2, transport));
    attributes.nest(FILTER, Attributes::default().bytes(ORIGINAL_FLAGS, &filter.to_ne_bytes()))
}

/// Deletes or changes one entry.
fn act(channel: &mut Channel, kind: u16, family: u8, named: &Attributes) -> io::Result<()> {
    let answer = channel.request(kind, ACK, family, named)?;
    match messages(&answer).find_map(error_of) {
        // The entry expired in the meantime.
        Some(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// The error in a message, including the message that ends a list.
fn error_of(message: &[u8]) -> Option<io::Error> {
    let errno = errno_of(message);
    let is_error = [NLMSG_ERROR, NLMSG_DONE].contains(&kind_of(message)) && errno > 0;
    is_error.then(|| io::Error::from_raw_os_error(errno))
}

/// The entry in a message.
fn flow_of(message: &[u8]) -> Option<Flow> {
    if kind_of(message) != NEW {
        return None;
    }
    let body = message.get(BODY..)?;
    let (original, reply) = (member(body, ORIGINAL)?, member(body, REPLY)?);
    let transport = member(original, 2)?;
    let number =
        |of: &[u8], kind| member(of, kind).and_then(|port| port.try_into().ok()).map(u16::from_be_bytes);
    let mark = member(body, MARK).and_then(|mark| mark.try_into().ok()).map(u32::from_be_bytes);
    Some(Flow {
        protocol: *member(transport, 1)?.first()?,
        from: address(original, 1)?,
        to: address(original, 2)?,
        port: number(transport, 3).unwrap_or_default(),
        answered_by: address(reply, 1)?,
        answering_port: number(member(reply, 2)?, 2).unwrap_or_default(),
        mark: mark.unwrap_or_default(),
    })
}

/// The attributes that identify the entry in a message: id and zone distinguish it from another connection between the
/// same ends.
fn name_of(message: &[u8]) -> Option<Attributes> {
    let body = message.get(BODY..)?;
    let exactly = [ID, ZONE].into_iter().filter_map(|kind| Some((kind, member(body, kind)?)));
    let named = Attributes::default().nested(ORIGINAL, member(body, ORIGINAL)?);
    Some(exactly.fold(named, |all, (kind, value)| all.bytes(kind, value)))
}

/// An address of a tuple. `end` is the attribute for IPv4: 1 is the source and 2 the destination. The attribute for
/// IPv6 is greater by 2.
fn address(tuple: &[u8], end: u16) -> Option<IpAddr> {
    let ends = member(tuple, 1)?;
    match (member(ends, end), member(ends, end + 2)) {
        (Some(v4), _) => Some(Ipv4Addr::from(<[u8; 4]>::try_from(v4).ok()?).into()),
        (_, Some(v6)) => Some(Ipv6Addr::from(<[u8; 16]>::try_from(v6).ok()?).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(from: IpAddr, to: IpAddr, ports: [u16; 2]) -> Attributes {
        let of = |address: IpAddr, [v4, v6]: [u16; 2], all: Attributes| match address {
            IpAddr::V4(address) => all.bytes(v4, &address.octets()),
            IpAddr::V6(address) => all.bytes(v6, &address.octets()),
        };
        let ends = of(to, [2, 4], of(from, [1, 3], Attributes::default()));
        let transport = Attributes::default().bytes(1, &[17]);
        let transport = transport.bytes(2, &ports[0].to_be_bytes()).bytes(3, &ports[1].to_be_bytes());
        Attributes::default().nest(1, ends).nest(2, transport)
    }

    /// Makes an entry of UDP from `from` to `to`, which `answered_by` answers.
    fn connect(channel: &mut Channel, from: IpAddr, to: IpAddr, answered_by: IpAddr) {
        const TIMEOUT: u16 = 7;
        let family = FlowSelector::Of(from).family();
        let entry = Attributes::default().nest(ORIGINAL, tuple(from, to, [4000, 53]));
        let entry = entry.nest(REPLY, tuple(answered_by, from, [53, 4000])).number(TIMEOUT, 600);
        let answer = channel.request(NEW, ACK | 0x600, family, &entry).unwrap();
        assert!(messages(&answer).find_map(error_of).is_none(), "{from} {to}");
    }

    #[test]
    fn the_connections_of_one_address_are_listed_without_the_others() {
        let thread = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("this test needs root");
            let mut channel = Channel::open().unwrap();
            let (others, mut made) = (500, 0);
            assert_eq!(count_flows(&mut channel).unwrap(), 0);
            for prefix in ["10.0", "fd00:"] {
                let ip = |rest: String| -> IpAddr {
                    let text = if prefix == "10.0" {
                        format!("10.0.{rest}")
                    } else {
                        format!("fd00::{}", rest.replace('.', ":"))
                    };
                    text.parse().unwrap()
                };
                let (pod, peer, service) = (ip("9.9".into()), ip("8.8".into()), ip("7.7".into()));
                for number in 0..others {
                    let client = ip(format!("{}.{}", 20 + number / 100, 1 + number % 100));
                    connect(&mut channel, client, peer, peer);
                }
                connect(&mut channel, pod, peer, peer);
                connect(&mut channel, ip("30.1".into()), service, pod);
                let mut asked = 0;
                let decide = |_: &Flow| {
                    asked += 1;
                    Some(true)
                };
                let done = mark_flows(&mut channel, FlowSelector::Of(pod), 1, decide).unwrap();
                let v4 = prefix == "10.0";
                let is_filtered = v4 || done.listed == 2;
                let listed = |count| if is_filtered { count } else { others + 2 };
                assert_eq!((done, asked), (MarkCounts { listed: listed(2), with_bit: 2 }, 2), "{prefix}");
                let only = |port| BTreeSet::from([port]);
                let unused =
                    delete_flows(&mut channel, v4, 17, &only(54), |_| panic!("no connection to the port"));
                assert_eq!(unused.unwrap(), 0, "the connections of other ports are not listed");
                assert_eq!(delete_flows(&mut channel, v4, 17, &only(53), |_| false).unwrap(), others + 2);
                let fresh =
                    mark_flows(&mut channel, FlowSelector::Of(ip("6.6".into())), 1, |_| Some(true)).unwrap();
                assert_eq!(
                    fresh,
                    MarkCounts { listed: listed(0), with_bit: 0 },
                    "an address without connections"
                );
                made += others + 2;
                assert_eq!(count_flows(&mut channel).unwrap() as usize, made);
                let keep = |flow: &Flow| (flow.from.is_ipv4() == v4).then_some(flow.mark & 1 != 0);
                let marked = mark_flows(&mut channel, FlowSelector::All, 1, keep).unwrap();
                assert_eq!(marked, MarkCounts { listed: made, with_bit: 2 }, "both families");
                let clear = |flow: &Flow| (flow.from.is_ipv4() == v4).then_some(false);
                mark_flows(&mut channel, FlowSelector::All, 1, clear).unwrap();
                let marked = mark_flows(&mut channel, FlowSelector::All, 1, |flow| Some(flow.mark & 1 != 0));
                assert_eq!(marked.unwrap().with_bit, 0, "the marks of {prefix} are cleared");
            }
        });
        thread.join().unwrap();
    }
}

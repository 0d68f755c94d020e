//! Conntrack entries: listing, removal and marks.
//!
//! An entry is made by the first packet between two addresses and ports, and decides the target of all further packets
//! until it expires. A client that keeps sending by UDP would reach a removed target, or the next one with its address.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::message::{
    Attributes, BODY, Channel, NLMSG_ERROR, Request, attributes, errno_of, kind_of, messages,
};

/// `NFNL_SUBSYS_CTNETLINK`, and its messages (`linux/netfilter/nfnetlink_conntrack.h`).
const NEW: u16 = 0x100;
const GET: u16 = 0x101;
const DELETE: u16 = 0x102;
const NLMSG_DONE: u16 = 3;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;

/// Attributes of a connection: the packets in the original and in the reply direction, the id and the zone.
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const MARK: u16 = 8;
const ID: u16 = 12;
const ZONE: u16 = 18;
const MARK_MASK: u16 = 21;
const FILTER: u16 = 25;

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

/// Deletes the entries of the protocol and address family for which `stale` is true. With a port, the kernel lists only
/// entries to that port, if it can. Returns the number of deleted entries.
///
/// # Errors
/// When the kernel refuses the list or a deletion. All stale entries are tried.
pub fn delete_flows(
    channel: &mut Channel,
    is_ipv4: bool,
    protocol: u8,
    port: Option<u16>,
    mut stale: impl FnMut(&Flow) -> bool,
) -> io::Result<usize> {
    let family = if is_ipv4 { libc::AF_INET } else { libc::AF_INET6 } as u8;
    let (mut found, mut error) = (Vec::new(), None);
    channel.request_each(
        Request { kind: GET, flags: DUMP, family },
        &question(protocol, port),
        |message| {
            error = error.take().or_else(|| error_of(message));
            if let Some((flow, named)) = flow_of(message)
                && flow.protocol == protocol
                && stale(&flow)
            {
                found.push(named);
            }
        },
    )?;
    if let Some(error) = error {
        return Err(error);
    }
    let mut first = Ok(());
    for named in &found {
        first = first.and(act(channel, DELETE, family, named));
    }
    first.map(|()| found.len())
}

/// Sets or clears a bit of the marks of all connections of an address family. `wanted` decides about each connection;
/// with `None` its mark stays. Returns the number of connections that have the bit then, as far as `wanted` decided.
///
/// # Errors
/// When the kernel refuses the list or a change. All connections are tried.
pub fn mark_flows(
    channel: &mut Channel,
    is_ipv4: bool,
    bit: u32,
    mut wanted: impl FnMut(&Flow) -> Option<bool>,
) -> io::Result<usize> {
    let family = if is_ipv4 { libc::AF_INET } else { libc::AF_INET6 } as u8;
    let (mut changes, mut error, mut count) = (Vec::new(), None, 0);
    let request = Request { kind: GET, flags: DUMP, family };
    channel.request_each(request, &Attributes::default(), |message| {
        error = error.take().or_else(|| error_of(message));
        let Some((flow, named)) = flow_of(message) else { return };
        let Some(is_set) = wanted(&flow) else { return };
        count += usize::from(is_set);
        if is_set != (flow.mark & bit != 0) {
            changes.push((named, if is_set { bit } else { 0 }));
        }
    })?;
    if let Some(error) = error {
        return Err(error);
    }
    let mut first = Ok(());
    for (named, value) in changes {
        let marked = named.bytes(MARK, &value.to_be_bytes()).bytes(MARK_MASK, &bit.to_be_bytes());
        first = first.and(act(channel, NEW, family, &marked));
    }
    first.map(|()| count)
}

/// Lists the connections of the protocol, filtered by port if one is given. The kernel may ignore the filter, as for
/// SCTP.
fn question(protocol: u8, port: Option<u16>) -> Attributes {
    const BY_PROTOCOL: u32 = 1 << 3;
    const BY_PORT: u32 = 1 << 5;
    let filter = if port.is_some() { BY_PROTOCOL | BY_PORT } else { BY_PROTOCOL };
    let port = port.unwrap_or_default();
    let transport = Attributes::default().bytes(1, &[protocol]).bytes(3, &port.to_be_bytes());
    let question = Attributes::default().nest(ORIGINAL, Attributes::default().nest(2, transport));
    question.nest(FILTER, Attributes::default().bytes(1, &filter.to_ne_bytes()))
}

/// Deletes or changes one entry.
fn act(channel: &mut Channel, kind: u16, family: u8, named: &Attributes) -> io::Result<()> {
    let answer = channel.request(kind, ACK, family, named)?;
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

/// The entry in a message, with the attributes that identify it: id and zone distinguish it from another connection
/// between the same ends.
fn flow_of(message: &[u8]) -> Option<(Flow, Attributes)> {
    if kind_of(message) != NEW {
        return None;
    }
    let body = message.get(BODY..)?;
    let (original, reply) = (member(body, ORIGINAL)?, member(body, REPLY)?);
    let transport = member(original, 2)?;
    let number =
        |of: &[u8], kind| member(of, kind).and_then(|port| port.try_into().ok()).map(u16::from_be_bytes);
    let mark = member(body, MARK).and_then(|mark| mark.try_into().ok()).map(u32::from_be_bytes);
    let flow = Flow {
        protocol: *member(transport, 1)?.first()?,
        from: address(original, 1)?,
        to: address(original, 2)?,
        port: number(transport, 3).unwrap_or_default(),
        answered_by: address(reply, 1)?,
        answering_port: number(member(reply, 2)?, 2).unwrap_or_default(),
        mark: mark.unwrap_or_default(),
    };
    let exactly = [ID, ZONE].into_iter().filter_map(|kind| Some((kind, member(body, kind)?)));
    let named = Attributes::default().nested(ORIGINAL, original);
    Some((flow, exactly.fold(named, |all, (kind, value)| all.bytes(kind, value))))
}

/// An address of a tuple: 1 is the source and 2 the destination. Those of IPv6 follow.
fn address(tuple: &[u8], end: u16) -> Option<IpAddr> {
    let ends = member(tuple, 1)?;
    match (member(ends, end), member(ends, end + 2)) {
        (Some(v4), _) => Some(Ipv4Addr::from(<[u8; 4]>::try_from(v4).ok()?).into()),
        (_, Some(v6)) => Some(Ipv6Addr::from(<[u8; 16]>::try_from(v6).ok()?).into()),
        _ => None,
    }
}

fn member(of: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(of).find(|(other, _)| *other == kind).map(|(_, value)| value)
}

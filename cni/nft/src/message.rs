//! nf_tables messages as bytes: the part of `linux/netfilter/nf_tables.h` that packet filters and NAT need.
//!
//! A [`Batch`] is one transaction: the kernel applies it completely or not at all.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::sys::socket::{setsockopt, sockopt::SndBufForce};

/// `NFNL_SUBSYS_NFTABLES`.
pub(crate) const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NESTED: u16 = 0x8000;
const BYTE_ORDER: u16 = 0x4000;
const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;
/// Message with an error, or with the acknowledgement of a request.
pub const NLMSG_ERROR: u16 = 2;
/// Length in bytes of the netlink header of each message (`struct nlmsghdr`).
const HEADER: usize = 16;
/// Offset in bytes of the attributes in a message: they follow the netlink header and `struct nfgenmsg`.
pub const BODY: usize = 20;
/// Maximum size in bytes of a send with the default socket buffer of the kernel: a third of that buffer. A larger send
/// first enlarges the buffer.
const MAX_SEND: usize = 64 << 10;

/// `NFPROTO_INET`: one table for both families.
pub const INET: u8 = 1;
/// `NFPROTO_BRIDGE`: frames of bridges.
pub const BRIDGE: u8 = 7;

/// Message types of the subsystem.
#[derive(Debug, Clone, Copy)]
pub enum Verb {
    /// Makes a table, unless it exists.
    NewTable = 0,
    /// Reads a table.
    GetTable = 1,
    /// Removes a table with its content.
    DeleteTable = 2,
    /// Makes a chain, unless it exists.
    NewChain = 3,
    /// Reads a chain.
    GetChain = 4,
    /// Removes an unused chain.
    DeleteChain = 5,
    /// Appends a rule.
    NewRule = 6,
    /// Lists rules.
    GetRule = 7,
    /// Removes a rule, or all rules of a chain.
    DeleteRule = 8,
    /// Makes a set or map, unless it exists.
    NewSet = 9,
    /// Lists the sets of a table.
    GetSet = 10,
    /// Removes an unused set or map.
    DeleteSet = 11,
    /// Adds elements to a set or map.
    NewElements = 12,
    /// Lists the elements of a set.
    GetElements = 13,
    /// Removes elements of a set or map.
    DeleteElements = 14,
}

/// A tree of netlink attributes under construction.
#[derive(Debug, Default, Clone, PartialEq, Eq, Hash)]
pub struct Attributes {
    bytes: Vec<u8>,
    /// Whether an attribute is longer than the maximum of its length field, 64 KiB.
    too_long: bool,
}

impl Attributes {
    /// Appends an attribute with these bytes.
    #[must_use]
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let Ok(length) = u16::try_from(value.len() + 4) else { return Self { too_long: true, ..self } };
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    /// Appends all attributes of `others`.
    #[must_use]
    pub fn and(mut self, others: &Self) -> Self {
        self.bytes.extend_from_slice(&others.bytes);
        self.too_long |= others.too_long;
        self
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are no attributes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends a text.
    #[must_use]
    pub fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(kind, &bytes)
    }

    /// Appends a number in network byte order.
    #[must_use]
    pub fn number(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// Appends a list of attributes.
    #[must_use]
    pub fn nest(self, kind: u16, inner: Attributes) -> Self {
        let nested = self.nested(kind, &inner.bytes);
        Self { too_long: nested.too_long | inner.too_long, ..nested }
    }

    /// Like [`nest`](Self::nest), but `fill` appends the attributes in place, without a copy.
    #[must_use]
    pub(crate) fn nest_with(mut self, kind: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let at = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&(kind | NESTED).to_ne_bytes());
        let mut filled = fill(self);
        match (u16::try_from(filled.bytes.len() - at), filled.bytes.get_mut(at..at + 2)) {
            (Ok(length), Some(field)) => field.copy_from_slice(&length.to_ne_bytes()),
            _ => filled.too_long = true,
        }
        filled
    }

    /// Like [`nest`](Self::nest), with attributes received from the kernel.
    #[must_use]
    pub fn nested(self, kind: u16, inner: &[u8]) -> Self {
        self.bytes(kind | NESTED, inner)
    }
}

/// Family and resource id of a message (`struct nfgenmsg`).
#[derive(Clone, Copy)]
struct Target {
    family: u8,
    resource: u16,
}

/// One transaction under construction.
#[derive(Debug, Default)]
pub struct Batch {
    buffer: Vec<u8>,
    sequence: u32,
    /// Offset of the last message, which requests the acknowledgement.
    last: usize,
    too_long: bool,
}

impl Batch {
    /// An empty transaction.
    #[must_use]
    pub fn new() -> Self {
        let mut batch = Self { buffer: Vec::with_capacity(4096), ..Self::default() };
        batch.message(
            BATCH_BEGIN,
            REQUEST,
            Target { family: 0, resource: SUBSYSTEM },
            &Attributes::default(),
        );
        batch
    }

    /// Appends a message about an object of this family.
    pub fn push(&mut self, family: u8, verb: Verb, attributes: &Attributes) {
        let flags = match verb {
            Verb::DeleteTable
            | Verb::DeleteElements
            | Verb::DeleteChain
            | Verb::DeleteRule
            | Verb::DeleteSet => REQUEST,
            Verb::NewRule => REQUEST | CREATE | APPEND,
            _ => REQUEST | CREATE,
        };
        self.message((SUBSYSTEM << 8) | verb as u16, flags, Target { family, resource: 0 }, attributes);
    }

    /// Whether the transaction changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sequence <= 1
    }

    /// The messages.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer
    }

    fn message(&mut self, kind: u16, flags: u16, target: Target, attributes: &Attributes) {
        self.sequence += 1;
        self.last = if kind == BATCH_END { self.last } else { self.buffer.len() };
        self.too_long |= attributes.too_long;
        let length = u32::try_from(20 + attributes.len()).unwrap_or(u32::MAX);
        self.buffer.extend_from_slice(&length.to_ne_bytes());
        self.buffer.extend_from_slice(&kind.to_ne_bytes());
        self.buffer.extend_from_slice(&flags.to_ne_bytes());
        self.buffer.extend_from_slice(&self.sequence.to_ne_bytes());
        self.buffer.extend_from_slice(&[0; 4]);
        self.buffer.extend_from_slice(&[target.family, 0]);
        self.buffer.extend_from_slice(&target.resource.to_be_bytes());
        self.buffer.extend_from_slice(&attributes.bytes);
    }
}

/// Header of a request.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Subsystem and message type.
    pub kind: u16,
    /// Netlink flags besides `NLM_F_REQUEST`.
    pub flags: u16,
    /// Address family.
    pub family: u8,
}

/// The socket of one process for all its transactions. The kernel reports it as the author of each change.
#[derive(Debug)]
pub struct Channel {
    socket: Socket,
    port: u32,
}

// === impl Channel ===

impl Channel {
    /// Opens the socket.
    ///
    /// # Errors
    /// When the kernel has no netfilter netlink.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        let port = socket.bind_auto()?.port_number();
        Ok(Self { socket, port })
    }

    /// The channel's netlink port, which identifies the channel's own changes in notifications.
    #[must_use]
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Sends the transaction and reads the result: the first error, or the acknowledgement of the last message. The
    /// kernel sends the acknowledgement only after the commit.
    ///
    /// # Errors
    /// When the kernel rejects a part. Then the transaction has no effect.
    pub fn commit(&mut self, mut batch: Batch) -> io::Result<()> {
        if batch.too_long {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "an attribute of the transaction is longer than 64 KiB",
            ));
        }
        if batch.is_empty() {
            return Ok(());
        }
        let flags = batch.last + 6;
        batch.buffer[flags] |= ACK as u8;
        batch.message(BATCH_END, REQUEST, Target { family: 0, resource: SUBSYSTEM }, &Attributes::default());
        verdict(&self.exchange_all(&batch.buffer)?)
    }

    /// Whether the kernel has the object.
    ///
    /// # Errors
    /// When the socket fails or the kernel answers with an error.
    pub fn has(&mut self, verb: Verb, family: u8, named: &Attributes) -> io::Result<bool> {
        match self.get(verb, family, named) {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether the kernel has any object that matches the description. An error of the kernel counts as no object.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn has_any(&mut self, verb: Verb, family: u8, of: &Attributes) -> io::Result<bool> {
        let answer = self.request((SUBSYSTEM << 8) | verb as u16, DUMP, family, of)?;
        let mut kinds = messages(&answer).map(kind_of);
        Ok(kinds.any(|kind| kind >> 8 == SUBSYSTEM))
    }

    /// The kernel's description of the object.
    ///
    /// # Errors
    /// When the socket fails or the kernel answers with an error.
    pub fn get(&mut self, verb: Verb, family: u8, named: &Attributes) -> io::Result<Vec<u8>> {
        let answer = self.request((SUBSYSTEM << 8) | verb as u16, ACK, family, named)?;
        verdict(&answer).map(|()| answer)
    }

    /// The complete response of a netfilter subsystem to one message. The response may contain an error of the kernel.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn request(
        &mut self,
        kind: u16,
        flags: u16,
        family: u8,
        attributes: &Attributes,
    ) -> io::Result<Vec<u8>> {
        let mut query = Batch::default();
        query.message(kind, REQUEST | flags, Target { family, resource: 0 }, attributes);
        self.exchange_all(&query.buffer)
    }

    fn exchange_all(&mut self, message: &[u8]) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        self.exchange(message, |answer| all.extend_from_slice(answer))?;
        Ok(all)
    }

    /// Like [`request`](Self::request), but passes each message of the answer to `take`, so that a long list is never
    /// in memory as a whole.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn request_each(
        &mut self,
        request: Request,
        attributes: &Attributes,
        mut take: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let Request { kind, flags, family } = request;
        let mut query = Batch::default();
        query.message(kind, REQUEST | flags, Target { family, resource: 0 }, attributes);
        self.exchange(&query.buffer, |answer| messages(answer).for_each(&mut take))
    }

    /// Lists objects of the subsystem: passes each message to `take`.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn dump(&mut self, verb: Verb, of: &Attributes, take: impl FnMut(&[u8])) -> io::Result<()> {
        self.request_each(
            Request { kind: (SUBSYSTEM << 8) | verb as u16, flags: DUMP, family: INET },
            of,
            take,
        )
    }

    fn exchange(&mut self, message: &[u8], mut take: impl FnMut(&[u8])) -> io::Result<()> {
        if message.len() > MAX_SEND {
            // A transaction of any size must be one send.
            setsockopt(&self.socket, SndBufForce, &message.len())?;
        }
        self.socket.send_to(message, &SocketAddr::new(0, 0), 0)?;
        // The kernel responds before the send returns. An object and its acknowledgement are separate datagrams. The
        // parts of a list are separate datagrams, too: the kernel writes a part while the previous part is read.
        let mut answer = Vec::with_capacity(16384);
        loop {
            answer.clear();
            match self.socket.recv(&mut answer, libc::MSG_DONTWAIT) {
                Ok(_) => take(&answer),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

fn verdict(answer: &[u8]) -> io::Result<()> {
    let mut acknowledged = false;
    for message in messages(answer).filter(|message| kind_of(message) == NLMSG_ERROR) {
        match errno_of(message) {
            0 => acknowledged = true,
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
    if acknowledged { Ok(()) } else { Err(io::Error::other("the kernel gave no answer")) }
}

/// The messages of a datagram with their headers, up to the first incomplete one.
pub fn messages(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(rest.get(..4)?.try_into().ok()?) as usize;
        let message = rest.get(..length).filter(|_| length >= HEADER)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The value of the first attribute of this type.
pub(crate) fn member(of: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(of).find(|(other, _)| *other == kind).map(|(_, value)| value)
}

/// Attributes with their types, up to the first incomplete one.
pub fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let [l0, l1, k0, k1] = *rest.get(..4)? else { return None };
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([k0, k1]) & !(NESTED | BYTE_ORDER), value))
    })
}

/// Type of a message of [`messages`].
#[must_use]
pub fn kind_of(message: &[u8]) -> u16 {
    message.get(4..6).and_then(|kind| kind.try_into().ok()).map(u16::from_ne_bytes).unwrap_or_default()
}

/// The error in a message as a positive number, or 0.
#[must_use]
pub fn errno_of(message: &[u8]) -> i32 {
    let code = message.get(HEADER..HEADER + 4).and_then(|code| code.try_into().ok());
    code.map(i32::from_ne_bytes).unwrap_or_default().wrapping_neg()
}

/// A numeric attribute of the first message of an answer.
#[must_use]
pub fn number_of(answer: &[u8], kind: u16) -> Option<u32> {
    let mut attributes = attributes(messages(answer).next()?.get(BODY..)?);
    let value = attributes.find(|(of, _)| *of == kind)?.1;
    Some(u32::from_be_bytes(value.get(..4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_over_16_bits_is_an_error() {
        let most = vec![0; usize::from(u16::MAX) - 4];
        assert!(!Attributes::default().bytes(1, &most).too_long);
        let more = [&most[..], &[0]].concat();
        for long in [
            Attributes::default().bytes(1, &more),
            Attributes::default().nest(1, Attributes::default().bytes(1, &more)).text(2, "t"),
            Attributes::default().text(2, "t").and(&Attributes::default().bytes(1, &more)),
            Attributes::default().nest_with(1, |inner| inner.bytes(1, &most)).text(2, "t"),
        ] {
            let mut batch = Batch::new();
            batch.push(INET, Verb::NewTable, &long);
            let error = Channel::open().unwrap().commit(batch).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }
}

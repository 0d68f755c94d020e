//! nf_tables messages: what of `linux/netfilter/nf_tables.h` a NAT table needs, as bytes.
//!
//! A [`Batch`] is one transaction: the kernel takes all of it or nothing.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};

/// `NFNL_SUBSYS_NFTABLES`.
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NESTED: u16 = 0x8000;
const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;
const NLMSG_ERROR: u16 = 2;

/// `NFPROTO_INET`: one table for both families.
pub(crate) const INET: u8 = 1;

/// Message types of the subsystem.
#[derive(Clone, Copy)]
pub(crate) enum Verb {
    NewTable = 0,
    GetTable = 1,
    DeleteTable = 2,
    NewChain = 3,
    GetChain = 4,
    NewRule = 6,
    NewSet = 9,
    NewElements = 12,
}

/// A tree of netlink attributes under construction.
#[derive(Default, Clone)]
pub(crate) struct Attributes(Vec<u8>);

impl Attributes {
    pub(crate) fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(crate) fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(kind, &bytes)
    }

    pub(crate) fn number(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub(crate) fn nest(self, kind: u16, inner: Attributes) -> Self {
        self.bytes(kind | NESTED, &inner.0)
    }
}

/// One transaction under construction.
pub(crate) struct Batch {
    buffer: Vec<u8>,
    sequence: u32,
    last: usize,
}

impl Batch {
    pub(crate) fn new() -> Self {
        let mut batch = Self { buffer: Vec::with_capacity(4096), sequence: 0, last: 0 };
        batch.message(BATCH_BEGIN, REQUEST, (0, SUBSYSTEM), &Attributes::default());
        batch
    }

    pub(crate) fn push(&mut self, verb: Verb, attributes: &Attributes) {
        let flags = match verb {
            Verb::DeleteTable => REQUEST,
            Verb::NewRule => REQUEST | CREATE | APPEND,
            _ => REQUEST | CREATE,
        };
        self.message((SUBSYSTEM << 8) | verb as u16, flags, (INET, 0), attributes);
    }

    fn message(&mut self, kind: u16, flags: u16, (family, resource): (u8, u16), attributes: &Attributes) {
        self.sequence += 1;
        self.last = if kind == BATCH_END { self.last } else { self.buffer.len() };
        let length = u32::try_from(20 + attributes.0.len()).unwrap_or(u32::MAX);
        self.buffer.extend_from_slice(&length.to_ne_bytes());
        self.buffer.extend_from_slice(&kind.to_ne_bytes());
        self.buffer.extend_from_slice(&flags.to_ne_bytes());
        self.buffer.extend_from_slice(&self.sequence.to_ne_bytes());
        self.buffer.extend_from_slice(&[0; 4]);
        self.buffer.extend_from_slice(&[family, 0]);
        self.buffer.extend_from_slice(&resource.to_be_bytes());
        self.buffer.extend_from_slice(&attributes.0);
    }
}

/// A socket over which one process sends its transactions: the kernel names it as the author of each change.
pub(crate) struct Channel {
    socket: Socket,
    port: u32,
}

// === impl Channel ===

impl Channel {
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        let port = socket.bind_auto()?.port_number();
        Ok(Self { socket, port })
    }

    /// Its number, by which events tell our own changes from others.
    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    /// Sends the transaction and reads the kernel's verdict: the first error, or the acknowledgement of
    /// the last message, which only comes when all was committed.
    pub(crate) fn commit(&mut self, mut batch: Batch) -> io::Result<()> {
        let flags = batch.last + 6;
        batch.buffer[flags] |= ACK as u8;
        batch.message(BATCH_END, REQUEST, (0, SUBSYSTEM), &Attributes::default());
        verdict(&self.ask(&batch.buffer)?)
    }

    /// Whether the kernel has the object.
    pub(crate) fn has(&mut self, verb: Verb, family: u8, named: &Attributes) -> io::Result<bool> {
        match self.get(verb, family, named) {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The kernel's description of the object.
    pub(crate) fn get(&mut self, verb: Verb, family: u8, named: &Attributes) -> io::Result<Vec<u8>> {
        let mut query = Batch { buffer: Vec::new(), sequence: 0, last: 0 };
        query.message((SUBSYSTEM << 8) | verb as u16, REQUEST | ACK, (family, 0), named);
        let answer = self.ask(&query.buffer)?;
        verdict(&answer).map(|()| answer)
    }

    fn ask(&mut self, message: &[u8]) -> io::Result<Vec<u8>> {
        self.socket.send_to(message, &SocketAddr::new(0, 0), 0)?;
        let mut all = Vec::new();
        // The kernel answers before the send returns; a description and its acknowledgement come apart.
        loop {
            let mut answer = Vec::with_capacity(16384);
            match self.socket.recv(&mut answer, libc::MSG_DONTWAIT) {
                Ok(_) => all.extend_from_slice(&answer),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(all),
                Err(error) => return Err(error),
            }
        }
    }
}

fn verdict(answer: &[u8]) -> io::Result<()> {
    let mut rest = answer;
    let mut acknowledged = false;
    while let [l0, l1, l2, l3, k0, k1, ..] = *rest {
        let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        if length < 16 || length > rest.len() {
            break;
        }
        if let (NLMSG_ERROR, Some(code)) = (u16::from_ne_bytes([k0, k1]), rest.get(16..20)) {
            match i32::from_ne_bytes([code[0], code[1], code[2], code[3]]) {
                0 => acknowledged = true,
                errno => return Err(io::Error::from_raw_os_error(-errno)),
            }
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    if acknowledged { Ok(()) } else { Err(io::Error::other("the kernel gave no answer")) }
}

/// A number among the attributes of the first message of an answer.
pub(crate) fn number_of(answer: &[u8], kind: u16) -> Option<u32> {
    let length = u32::from_ne_bytes(answer.get(..4)?.try_into().ok()?) as usize;
    let mut attributes = answer.get(20..length)?;
    loop {
        let header = attributes.get(..4)?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        if u16::from_ne_bytes([header[2], header[3]]) == kind {
            return Some(u32::from_be_bytes(attributes.get(4..8)?.try_into().ok()?));
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

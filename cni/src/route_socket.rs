//! A route netlink socket for dumps, and for many changes in one message.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// Maximum size of a send: well below the kernel's default socket buffer.
const CHUNK: usize = 48 << 10;
/// Maximum size of an answer: the kernel fills dumps up to 32 KiB.
const MAX_ANSWER: usize = 64 << 10;
/// `NLM_F_DUMP_INTR`: the table changed while it was read.
const INTERRUPTED: u16 = 0x10;

/// A request for one change.
pub(crate) struct Request {
    pub(crate) message: RouteNetlinkMessage,
    /// Flags besides `NLM_F_REQUEST`.
    pub(crate) flags: u16,
}

/// A request that the kernel refused.
#[derive(Debug)]
pub(crate) struct RefusedRequest {
    /// Index in the list of the requests.
    pub(crate) index: usize,
    pub(crate) error: io::Error,
}

/// A socket of the namespace in which it was opened. Calls block until the kernel answers.
pub(crate) struct RouteSocket {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

// === impl Request ===

impl Request {
    pub(crate) fn new(message: RouteNetlinkMessage, flags: u16) -> Self {
        Self { message, flags }
    }
}

// === impl RouteSocket ===

impl RouteSocket {
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        // Without this option the kernel ignores the filters of dumps.
        socket.set_netlink_get_strict_chk(true)?;
        // With this option, errors contain no copy of the request.
        socket.set_cap_ack(true)?;
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(MAX_ANSWER) })
    }

    /// Dumps a table, and calls `each` for each entry.
    pub(crate) fn dump(
        &mut self,
        request: RouteNetlinkMessage,
        mut each: impl FnMut(RouteNetlinkMessage),
    ) -> io::Result<()> {
        self.sequence += 1;
        let mut out = Vec::new();
        put(&mut out, request, NLM_F_DUMP, self.sequence)?;
        self.socket.send_to(&out, &SocketAddr::new(0, 0), 0)?;
        let mut end = None;
        let mut interrupted = false;
        while end.is_none() {
            self.receive(|header, payload| {
                interrupted |= header.flags & INTERRUPTED != 0;
                match payload {
                    NetlinkPayload::InnerMessage(message) => each(message),
                    NetlinkPayload::Done(done) => end = Some(errno(done.code)),
                    NetlinkPayload::Error(error) => end = Some(errno(error.raw_code())),
                    _ => {}
                }
            })?;
        }
        if interrupted {
            return Err(io::ErrorKind::Interrupted.into());
        }
        end.unwrap_or(Ok(()))
    }

    /// Requests one object.
    pub(crate) fn get(&mut self, request: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        self.sequence += 1;
        let mut out = Vec::new();
        put(&mut out, request, 0, self.sequence)?;
        self.socket.send_to(&out, &SocketAddr::new(0, 0), 0)?;
        let mut answer = Err(io::ErrorKind::UnexpectedEof.into());
        self.receive(|_, payload| match payload {
            NetlinkPayload::InnerMessage(message) => answer = Ok(message),
            NetlinkPayload::Error(error) => answer = Err(error.to_io()),
            _ => {}
        })?;
        answer
    }

    /// Makes these changes, each on its own. Returns the refused requests. The kernel answers a request only if the
    /// request fails or asks for an acknowledgement, so one acknowledgement for some hundred changes is enough.
    pub(crate) fn batch(&mut self, requests: Vec<Request>) -> io::Result<Vec<RefusedRequest>> {
        let first = self.sequence.wrapping_add(1);
        let mut refused = Vec::new();
        let mut out = Vec::with_capacity(CHUNK);
        let mut requests = requests.into_iter().peekable();
        while let Some(Request { message, flags }) = requests.next() {
            self.sequence = self.sequence.wrapping_add(1);
            let ends = requests.peek().is_none() || out.len() > CHUNK - 1024;
            put(&mut out, message, flags | if ends { NLM_F_ACK } else { 0 }, self.sequence)?;
            if ends {
                self.socket.send_to(&out, &SocketAddr::new(0, 0), 0)?;
                self.answers(first, &mut refused)?;
                out.clear();
            }
        }
        Ok(refused)
    }

    /// Reads errors until the acknowledgement of the last request.
    fn answers(&mut self, first: u32, refused: &mut Vec<RefusedRequest>) -> io::Result<()> {
        let last = self.sequence;
        let mut ended = false;
        while !ended {
            self.receive(|header, payload| {
                if let NetlinkPayload::Error(error) = payload {
                    if error.code.is_some() {
                        let index = header.sequence_number.wrapping_sub(first) as usize;
                        refused.push(RefusedRequest { index, error: error.to_io() });
                    }
                    ended |= header.sequence_number == last;
                }
            })?;
        }
        Ok(())
    }

    fn receive(
        &mut self,
        each: impl FnMut(NetlinkHeader, NetlinkPayload<RouteNetlinkMessage>),
    ) -> io::Result<()> {
        self.buffer.clear();
        self.socket.recv(&mut self.buffer, 0)?;
        parse(&self.buffer, each);
        Ok(())
    }
}

/// Calls `each` for each message that can be parsed. Attributes of newer kernels are ignored.
pub(crate) fn parse(bytes: &[u8], mut each: impl FnMut(NetlinkHeader, NetlinkPayload<RouteNetlinkMessage>)) {
    let mut rest = bytes;
    while let Some(length) = rest.first_chunk().map(|length| u32::from_ne_bytes(*length) as usize) {
        let Some(message) = rest.get(..length).filter(|_| length >= 16) else { return };
        match NetlinkMessage::<RouteNetlinkMessage>::deserialize(message) {
            Ok(message) => each(message.header, message.payload),
            Err(error) => tracing::debug!(%error, "a netlink message cannot be read"),
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
}

fn put(out: &mut Vec<u8>, request: RouteNetlinkMessage, flags: u16, sequence: u32) -> io::Result<()> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    header.sequence_number = sequence;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
    message.finalize();
    let (start, length) = (out.len(), message.buffer_len());
    out.resize(start + length.next_multiple_of(4), 0);
    let place = out.get_mut(start..start + length).ok_or(io::ErrorKind::InvalidData)?;
    message.serialize(place);
    Ok(())
}

fn errno(code: i32) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code.saturating_abs())) }
}

//! The agent's connection: one packet per datagram, with descriptors. Never blocks.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{Event, Packet, Reply, Request, packet, reply};
use nix::cmsg_space;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind, listen,
    recvmsg, sendmsg, setsockopt, socket, sockopt,
};
use prost::Message as _;

use crate::call_error::CallError;
use crate::console::short_socket_path;
use crate::kernel;

/// Maximum descriptors in one packet; the protocol sends at most three.
const MAX_FDS: usize = 8;
/// Maximum bytes of a packet. Packets of the protocol are much smaller; large data is sent as a file. Instead of a
/// larger reply, an error is sent.
const MAX_PACKET: usize = 1 << 20;
/// Length of the accept queue. All queued agents except the last have already ended.
const BACKLOG: i32 = 128;
/// Maximum packets queued for an agent that does not read. If more packets are queued, the agent is disconnected. It
/// gets the complete state when it reconnects.
const MAX_QUEUED: usize = 4096;

/// A listening SEQPACKET socket.
#[derive(Debug)]
pub(crate) struct Listener(OwnedFd);

/// The connected agent.
#[derive(Debug)]
pub(crate) struct Agent {
    socket: OwnedFd,
    queued: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
}

/// Result of a receive.
#[expect(clippy::large_enum_variant, reason = "one at a time, on the stack, for the length of a call")]
pub(crate) enum Received {
    Request {
        id: u64,
        request: Request,
        fds: Vec<OwnedFd>,
    },
    /// No packet is available.
    Nothing,
    /// The agent has disconnected, or sent an invalid packet.
    End,
}

// === impl Listener ===

impl Listener {
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        coracle_tree::remove_file(path)?;
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::from(io::ErrorKind::InvalidFilename));
        };
        let dir = std::fs::File::open(parent)?;
        bind(fd.as_raw_fd(), &UnixAddr::new(&short_socket_path(&dir, &name.to_string_lossy()))?)?;
        listen(&fd, Backlog::new(BACKLOG)?)?;
        Ok(Self(fd))
    }

    pub(crate) fn accept(&self) -> io::Result<Agent> {
        let raw = accept4(self.0.as_raw_fd(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK)?;
        let socket = kernel::adopt(vec![raw]).pop().ok_or_else(|| io::Error::other("no socket"))?;
        // The system's limit may be below a packet's size. SndBufForce ignores this limit, if permitted.
        let _ = setsockopt(&socket, sockopt::SndBufForce, &MAX_PACKET)
            .or_else(|_| setsockopt(&socket, sockopt::SndBuf, &MAX_PACKET));
        Ok(Agent { socket, queued: VecDeque::new() })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

// === impl Agent ===

impl Agent {
    pub(crate) fn receive(&self) -> Received {
        match self.datagram() {
            Ok(Some((bytes, fds))) => match Packet::decode(bytes.as_slice()) {
                Ok(Packet { id, body: Some(packet::Body::Request(request)) }) => {
                    Received::Request { id, request, fds }
                }
                // The packet is from a later protocol version. It counts as an empty request, which is answered with an
                // error.
                Ok(Packet { id, .. }) => Received::Request { id, request: Request { call: None }, fds },
                Err(_) => Received::End,
            },
            Ok(None) => Received::End,
            Err(nix::Error::EAGAIN | nix::Error::EINTR) => Received::Nothing,
            Err(_) => Received::End,
        }
    }

    fn datagram(&self) -> nix::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        let raw = self.socket.as_raw_fd();
        let peek = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC;
        let length = recvmsg::<()>(raw, &mut [IoSliceMut::new(&mut [])], None, peek)?.bytes;
        let mut buffer = vec![0_u8; length.clamp(1, MAX_PACKET)];
        let mut control = cmsg_space!([RawFd; MAX_FDS]);
        let mut slices = [IoSliceMut::new(&mut buffer)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
        let message = recvmsg::<()>(raw, &mut slices, Some(&mut control), flags)?;
        let (bytes, is_cut) = (message.bytes, message.flags.contains(MsgFlags::MSG_CTRUNC));
        let fds = received_fds(&control);
        if is_cut {
            return Err(nix::Error::ENOBUFS);
        }
        buffer.truncate(bytes);
        Ok(if bytes == 0 { None } else { Some((buffer, fds)) })
    }

    pub(crate) fn reply(
        &mut self,
        id: u64,
        result: Result<(reply::Result, Vec<OwnedFd>), CallError>,
    ) -> io::Result<()> {
        let (result, fds) = result.unwrap_or_else(|error| (reply::Result::Error(error.into()), Vec::new()));
        let packet = |result| Packet { id, body: Some(packet::Body::Reply(Reply { result: Some(result) })) };
        let answer = packet(result);
        let length = answer.encoded_len();
        if length > MAX_PACKET {
            let error = CallError::new(
                Kind::Internal,
                format!("the answer has {length} bytes, the maximum is {MAX_PACKET}"),
            );
            return self.send(&packet(reply::Result::Error(error.into())), Vec::new());
        }
        self.send(&answer, fds)
    }

    pub(crate) fn event(&mut self, event: &Event) -> io::Result<()> {
        self.send(&Packet { id: 0, body: Some(packet::Body::Event(event.clone())) }, Vec::new())
    }

    fn send(&mut self, packet: &Packet, fds: Vec<OwnedFd>) -> io::Result<()> {
        if self.queued.len() >= MAX_QUEUED {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.queued.push_back((packet.encode_to_vec(), fds));
        self.flush()
    }

    /// Sends queued packets, as many as the socket accepts.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while let Some((packet, fds)) = self.queued.front() {
            let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
            let rights = [ControlMessage::ScmRights(&raw)];
            let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
            let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
            match sendmsg::<()>(self.socket.as_raw_fd(), &[IoSlice::new(packet)], control, flags, None) {
                Ok(_) => drop(self.queued.pop_front()),
                Err(nix::Error::EAGAIN) => return Ok(()),
                Err(nix::Error::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if self.queued.capacity() > 64 {
            self.queued = VecDeque::new();
        }
        Ok(())
    }

    pub(crate) fn has_queued_packets(&self) -> bool {
        !self.queued.is_empty()
    }
}

impl AsFd for Agent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Takes the descriptors in a received control message (`struct cmsghdr`). nix does not return them if there were more
/// than fit, or than this process may open. `control` was zeroed before, so that without a message its length is 0.
fn received_fds(control: &[u8]) -> Vec<OwnedFd> {
    const WORD: usize = size_of::<usize>();
    const HEADER: usize = WORD + 2 * size_of::<i32>();
    let number =
        |at: usize| control.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    let length = control.first_chunk::<WORD>().map_or(0, |length| usize::from_ne_bytes(*length));
    if (number(WORD), number(WORD + 4)) != (Some(libc::SOL_SOCKET), Some(libc::SCM_RIGHTS)) {
        return Vec::new();
    }
    let raw = control.get(HEADER..length).unwrap_or_default().chunks_exact(size_of::<RawFd>());
    kernel::adopt(raw.filter_map(|fd| fd.try_into().ok()).map(RawFd::from_ne_bytes).collect())
}

/// Fuzz target for arbitrary packets: an invalid packet ends the connection, every request is answered with its id, and
/// no other packet is sent.
#[cfg(any(test, feature = "fuzzing"))]
pub fn fuzz(data: &[u8]) {
    use nix::sys::socket::{recv, send, socketpair};
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let Ok((shim, agent)) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags) else { return };
    let mut connection = Agent { socket: shim, queued: VecDeque::new() };
    let (first, rest) = data.split_first().unwrap_or((&0, &[]));
    for packet in rest.chunks(usize::from(*first) + 1) {
        if send(agent.as_raw_fd(), packet, MsgFlags::MSG_DONTWAIT).is_err() {
            return;
        }
        let Received::Request { id, request, .. } = connection.receive() else {
            assert!(Packet::decode(packet).is_err());
            return;
        };
        assert!(Request::decode(request.encode_to_vec().as_slice()).as_ref() == Ok(&request));
        let replied = connection.reply(id, Err(CallError::no_container("fuzzed")));
        let mut answer = vec![0; MAX_PACKET];
        let length = recv(agent.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT).unwrap_or_default();
        let answer = Packet::decode(&answer[..length]).map(|answer| (answer.id, answer.body));
        assert!(replied.is_ok() && matches!(answer, Ok((of, Some(packet::Body::Reply(_)))) if of == id));
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{recv, socketpair};

    use super::*;

    fn pair() -> (Agent, OwnedFd) {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (shim, agent) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        (Agent { socket: shim, queued: VecDeque::new() }, agent)
    }

    #[test]
    fn the_corpus_is_replayed() {
        coracle_testing::replay_corpus("shim", super::fuzz);
    }

    #[test]
    fn an_answer_above_a_mebibyte_is_replaced_by_an_error() {
        let (mut connection, agent) = pair();
        connection.reply(7, Err(CallError::new(Kind::Internal, "x".repeat(MAX_PACKET)))).unwrap();
        let mut answer = vec![0; 4 << 10];
        let length = recv(agent.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT).unwrap();
        let answer = Packet::decode(&answer[..length]).unwrap();
        assert_eq!(answer.id, 7);
        assert!(format!("{answer:?}").contains("the maximum is 1048576"), "{answer:?}");
    }

    #[test]
    fn a_packet_with_more_descriptors_than_the_maximum_ends_the_connection() {
        let (connection, agent) = pair();
        let request = Packet { id: 1, body: Some(packet::Body::Request(Request { call: None })) };
        let request = request.encode_to_vec();
        let send = |count: usize| {
            let raw = vec![agent.as_raw_fd(); count];
            let rights = [ControlMessage::ScmRights(&raw)];
            let flags = MsgFlags::MSG_DONTWAIT;
            sendmsg::<()>(agent.as_raw_fd(), &[IoSlice::new(&request)], &rights, flags, None).unwrap();
        };
        send(MAX_FDS);
        assert!(matches!(connection.receive(), Received::Request { fds, .. } if fds.len() == MAX_FDS));
        send(MAX_FDS + 1);
        assert!(matches!(connection.receive(), Received::End));
    }

    #[test]
    fn the_descriptors_of_a_packet_with_too_many_are_closed() {
        use std::io::Read as _;
        let (connection, agent) = pair();
        let (mut end, other_end) = std::os::unix::net::UnixStream::pair().unwrap();
        end.set_nonblocking(true).unwrap();
        let raw = [other_end.as_raw_fd(); MAX_FDS + 1];
        let rights = [ControlMessage::ScmRights(&raw)];
        let packet = [IoSlice::new(b"packet")];
        sendmsg::<()>(agent.as_raw_fd(), &packet, &rights, MsgFlags::MSG_DONTWAIT, None).unwrap();
        drop(other_end);
        assert!(matches!(connection.receive(), Received::End));
        // Children that other tests start have a copy until they execute a program.
        coracle_testing::eventually("the end of the stream", 10, || end.read(&mut [0]).is_ok());
    }
}

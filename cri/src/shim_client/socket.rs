//! An asynchronous SEQPACKET socket: one datagram per packet, with file descriptors.
#![allow(unsafe_code, reason = "takes ownership of received descriptors")]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, getsockopt, recvmsg,
    sendmsg, setsockopt, socket, sockopt,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::error::{Error, ErrorKind};

/// Maximum descriptors of a packet. The protocol sends at most three.
const MAX_FDS: usize = 8;

/// Maximum size of a packet in both directions. Messages are far smaller: large data is passed as a file.
pub(super) const MAX_PACKET: usize = 1 << 20;

/// Delay before the next connection attempt to a shim whose backlog is full.
const RETRY_DELAY: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Socket {
    fd: AsyncFd<OwnedFd>,
}

// === impl Socket ===

impl Socket {
    /// Connects to a shim. The kernel connects at once, unless the backlog of a busy shim is full. Then the connection
    /// is retried until the caller stops waiting: the kernel has no notification for free backlog.
    pub(super) async fn connect(path: &Path) -> Result<Self, Error> {
        let failed = |doing: &str, errno: Errno| {
            let kind = if is_absence(errno) { ErrorKind::Gone } else { ErrorKind::Internal };
            Error::new(kind, format!("cannot {doing} the shim at {}: {errno}", path.display()))
        };
        let fd = socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )
        .map_err(|errno| failed("create a socket for", errno))?;
        // A long list of layers can exceed the default size, and the maximum for unprivileged processes. On failure the
        // default stays.
        let _ = setsockopt(&fd, sockopt::SndBufForce, &MAX_PACKET)
            .or_else(|_| setsockopt(&fd, sockopt::SndBuf, &MAX_PACKET));
        // The path goes through the directory's descriptor, because the path of a Unix socket has at most 108 bytes.
        let (parent, name) = (path.parent().unwrap_or(path), path.file_name().unwrap_or_default());
        let dir = std::fs::File::open(parent).map_err(|error| failed("find", errno_of(&error)))?;
        let short = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(name);
        let address = UnixAddr::new(&short).map_err(|errno| failed("name", errno))?;
        loop {
            match connect(fd.as_raw_fd(), &address) {
                Ok(()) => break,
                Err(Errno::EAGAIN) => tokio::time::sleep(RETRY_DELAY).await,
                Err(errno) => return Err(failed("connect to", errno)),
            }
        }
        // SAFETY: the `AsyncFd` owns the descriptor and nothing else closes it.
        let fd = unsafe { AsyncFd::register(fd) }
            .map_err(|error| Error::new(ErrorKind::Internal, format!("cannot register a socket: {error}")))?;
        Ok(Self { fd })
    }

    /// Both ends of a connection.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn pair() -> std::io::Result<(Self, Self)> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let kind = SockType::SeqPacket;
        let (one, other) = nix::sys::socket::socketpair(AddressFamily::Unix, kind, None, flags)?;
        // SAFETY: each `AsyncFd` owns its descriptor and nothing else closes it.
        let [one, other] = [one, other].map(|fd| unsafe { AsyncFd::register(fd) });
        Ok((Self { fd: one? }, Self { fd: other? }))
    }

    pub(super) fn peer_pid(&self) -> Result<i32, Error> {
        getsockopt(self.fd.get_ref(), sockopt::PeerCredentials)
            .map(|credentials| credentials.pid())
            .map_err(|errno| Error::new(ErrorKind::Internal, format!("cannot get the shim's pid: {errno}")))
    }

    pub(super) async fn send(&self, packet: &[u8], fds: &[OwnedFd]) -> std::io::Result<()> {
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
        self.fd
            .async_io(Interest::WRITABLE, |fd| {
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                sendmsg::<()>(fd.as_raw_fd(), &[IoSlice::new(packet)], control, flags, None)?;
                Ok(())
            })
            .await
    }

    /// The next packet; `None` after the shim closed the connection.
    pub(super) async fn receive(&self) -> std::io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        self.fd.async_io(Interest::READABLE, receive_now).await
    }
}

/// Whether the error means that no shim listens now or later. Other errors do not say whether the shim is alive.
fn is_absence(errno: Errno) -> bool {
    matches!(errno, Errno::ENOENT | Errno::ENOTDIR | Errno::ECONNREFUSED)
}

fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn receive_now(fd: &OwnedFd) -> std::io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let length = waiting(fd)?;
    let mut buffer = vec![0_u8; length.max(1)];
    let mut control = cmsg_space!([RawFd; MAX_FDS]);
    let mut slices = [IoSliceMut::new(&mut buffer)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(fd.as_raw_fd(), &mut slices, Some(&mut control), flags)?;
    let (bytes, is_cut) = (message.bytes, message.flags.contains(MsgFlags::MSG_CTRUNC));
    let fds = received_fds(&control);
    if is_cut {
        return Err(Errno::ENOBUFS.into());
    }
    if bytes == 0 {
        return Ok(None);
    }
    buffer.truncate(bytes);
    Ok(Some((buffer, fds)))
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
    let raw = raw.filter_map(|fd| fd.try_into().ok()).map(RawFd::from_ne_bytes);
    // SAFETY: the kernel has just created these descriptors for this process, so nothing else owns them.
    raw.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect()
}

/// The length of the first packet in the queue, 0 at the end of the stream.
fn waiting(fd: &OwnedFd) -> std::io::Result<usize> {
    let mut none = [];
    let mut slices = [IoSliceMut::new(&mut none)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC;
    let message = recvmsg::<()>(fd.as_raw_fd(), &mut slices, None, flags)?;
    Ok(message.bytes.min(MAX_PACKET))
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn a_packet_with_more_descriptors_than_the_maximum_is_an_error() {
        let (shim, runtime) = super::Socket::pair().unwrap();
        let files = |count: usize| -> Vec<std::os::fd::OwnedFd> {
            (0..count).map(|_| std::fs::File::open("/dev/null").unwrap().into()).collect()
        };
        shim.send(b"x", &files(super::MAX_FDS)).await.unwrap();
        assert_eq!(runtime.receive().await.unwrap().unwrap().1.len(), super::MAX_FDS);
        shim.send(b"x", &files(super::MAX_FDS + 1)).await.unwrap();
        assert!(runtime.receive().await.is_err());
    }

    #[tokio::test]
    async fn the_descriptors_of_a_packet_with_too_many_are_closed() {
        use std::io::Read as _;
        let (shim, runtime) = super::Socket::pair().unwrap();
        let (mut end, other_end) = std::os::unix::net::UnixStream::pair().unwrap();
        end.set_nonblocking(true).unwrap();
        let copy = |_| -> std::os::fd::OwnedFd { other_end.try_clone().unwrap().into() };
        let fds: Vec<_> = (0..=super::MAX_FDS).map(copy).collect();
        shim.send(b"x", &fds).await.unwrap();
        drop((fds, other_end));
        assert!(runtime.receive().await.is_err());
        // Children that other tests start have a copy until they execute a program.
        coracle_testing::until("the end of the stream", 10, || end.read(&mut [0]).is_ok()).await;
    }
}

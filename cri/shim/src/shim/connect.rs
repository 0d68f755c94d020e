//! Connect: makes a TCP connection inside the pod's network, for port-forward.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{Connected, reply};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, SockaddrIn6, connect, getsockopt, socket, sockopt,
};

use super::{CallId, CallResult, Shim};
use crate::call_error::CallError;

/// Maximum connections in progress. A connection to a server that does not accept may take minutes and holds
/// a descriptor.
const MAX_CONNECTING: usize = 256;

/// A connection in progress.
pub(super) struct Connecting {
    call_id: CallId,
    port: u16,
    socket: OwnedFd,
    /// The error over IPv4, after which IPv6 is tried. `None` during the attempt over IPv4.
    four: Option<Errno>,
}

impl AsFd for Connecting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Shim {
    pub(super) fn connect(&mut self, call_id: CallId, port: u32) -> Option<CallResult> {
        let Some(port) = u16::try_from(port).ok().filter(|port| *port > 0) else {
            return Some(Err(CallError::new(
                Kind::Invalid,
                format!("cannot connect to port {port} of the pod: the number is not a valid port"),
            )));
        };
        if self.connects.len() >= MAX_CONNECTING {
            let message = format!(
                "cannot connect to port {port} of the pod: {MAX_CONNECTING} connections are in progress already"
            );
            return Some(Err(CallError::new(Kind::Internal, message)));
        }
        self.try_connect(call_id, port, None)
    }

    fn try_connect(&mut self, call_id: CallId, port: u16, four: Option<Errno>) -> Option<CallResult> {
        match (begin(port, four.is_some()), four) {
            (Ok((socket, true)), _) => Some(connected(socket)),
            (Ok((socket, false)), four) => {
                let serial = self.next_serial();
                self.connects.insert(serial, Connecting { call_id, port, socket, four });
                None
            }
            (Err(errno), None) => self.try_connect(call_id, port, Some(errno)),
            (Err(errno), Some(four)) => Some(Err(refused(port, four, errno))),
        }
    }

    pub(super) fn finish_connect(&mut self, serial: u32) {
        let Some(Connecting { call_id, port, socket, four }) = self.connects.remove(&serial) else { return };
        let errno = getsockopt(&socket, sockopt::SocketError).map_or_else(|errno| errno, Errno::from_raw);
        let answer = match (errno, four) {
            (Errno::UnknownErrno, _) => Some(connected(socket)),
            (errno, None) => self.try_connect(call_id, port, Some(errno)),
            (errno, Some(four)) => Some(Err(refused(port, four, errno))),
        };
        if let Some(answer) = answer {
            self.reply(call_id, answer);
        }
    }
}

/// Starts a connection. Returns the socket, and whether it is connected already.
fn begin(port: u16, six: bool) -> nix::Result<(OwnedFd, bool)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let family = if six { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let fd = socket(family, SockType::Stream, flags, None)?;
    let result = if six {
        let address = std::net::SocketAddrV6::new(std::net::Ipv6Addr::LOCALHOST, port, 0, 0);
        connect(fd.as_raw_fd(), &SockaddrIn6::from(address))
    } else {
        connect(fd.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, port))
    };
    match result {
        Ok(()) => Ok((fd, true)),
        Err(Errno::EINPROGRESS) => Ok((fd, false)),
        Err(errno) => Err(errno),
    }
}

fn connected(socket: OwnedFd) -> CallResult {
    Ok((reply::Result::Connected(Connected {}), vec![socket]))
}

/// The error of a refused connection. In a pod without IPv6 the error over IPv4 is reported.
fn refused(port: u16, four: Errno, six: Errno) -> CallError {
    let lacks_six = matches!(six, Errno::EADDRNOTAVAIL | Errno::EAFNOSUPPORT | Errno::ENETUNREACH);
    let errno = if lacks_six { four } else { six };
    let kind = if errno == Errno::ECONNREFUSED { Kind::ConnectionRefused } else { Kind::Internal };
    CallError::new(kind, format!("cannot connect to port {port} of the pod: {}", errno.desc()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_that_of_the_address_family_that_the_pod_has() {
        let of = |four, six| refused(80, four, six).kind;
        assert_eq!(of(Errno::ECONNREFUSED, Errno::EADDRNOTAVAIL), Kind::ConnectionRefused);
        assert_eq!(of(Errno::ECONNREFUSED, Errno::EAFNOSUPPORT), Kind::ConnectionRefused);
        assert_eq!(of(Errno::ENETUNREACH, Errno::ECONNREFUSED), Kind::ConnectionRefused);
    }
}

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

/// Maximum connections in progress. A connection to a server that does not accept can take minutes, and holds a
/// descriptor.
const MAX_CONNECTING: usize = 256;

/// A connection in progress.
pub(super) struct Connecting {
    call_id: CallId,
    port: u16,
    socket: OwnedFd,
    /// The error over IPv4, after which IPv6 is tried. `None` during the attempt over IPv4.
    ipv4_error: Option<Errno>,
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

    fn try_connect(&mut self, call_id: CallId, port: u16, ipv4_error: Option<Errno>) -> Option<CallResult> {
        match (begin(port, ipv4_error.is_some()), ipv4_error) {
            (Ok((socket, true)), _) => Some(connected(socket)),
            (Ok((socket, false)), ipv4_error) => {
                let serial = self.next_serial();
                self.connects.insert(serial, Connecting { call_id, port, socket, ipv4_error });
                None
            }
            (Err(errno), None) => self.try_connect(call_id, port, Some(errno)),
            (Err(errno), Some(ipv4_error)) => Some(Err(refused(port, ipv4_error, errno))),
        }
    }

    pub(super) fn finish_connect(&mut self, serial: u32) {
        let Some(Connecting { call_id, port, socket, ipv4_error }) = self.connects.remove(&serial) else {
            return;
        };
        let errno = getsockopt(&socket, sockopt::SocketError).map_or_else(|errno| errno, Errno::from_raw);
        let answer = match (errno, ipv4_error) {
            (Errno::UnknownErrno, _) => Some(connected(socket)),
            (errno, None) => self.try_connect(call_id, port, Some(errno)),
            (errno, Some(ipv4_error)) => Some(Err(refused(port, ipv4_error, errno))),
        };
        if let Some(answer) = answer {
            self.reply(call_id, answer);
        }
    }
}

/// Starts a connection. Returns the socket, and whether it is connected already.
fn begin(port: u16, over_ipv6: bool) -> nix::Result<(OwnedFd, bool)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let family = if over_ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let fd = socket(family, SockType::Stream, flags, None)?;
    let result = if over_ipv6 {
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
fn refused(port: u16, ipv4_error: Errno, ipv6_error: Errno) -> CallError {
    let lacks_ipv6 = matches!(ipv6_error, Errno::EADDRNOTAVAIL | Errno::EAFNOSUPPORT | Errno::ENETUNREACH);
    let errno = if lacks_ipv6 { ipv4_error } else { ipv6_error };
    let kind = if errno == Errno::ECONNREFUSED { Kind::ConnectionRefused } else { Kind::Internal };
    CallError::new(kind, format!("cannot connect to port {port} of the pod: {}", errno.desc()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_from_an_address_family_that_the_pod_has() {
        let of = |ipv4_error, ipv6_error| refused(80, ipv4_error, ipv6_error).kind;
        assert_eq!(of(Errno::ECONNREFUSED, Errno::EADDRNOTAVAIL), Kind::ConnectionRefused);
        assert_eq!(of(Errno::ECONNREFUSED, Errno::EAFNOSUPPORT), Kind::ConnectionRefused);
        assert_eq!(of(Errno::ENETUNREACH, Errno::ECONNREFUSED), Kind::ConnectionRefused);
    }
}

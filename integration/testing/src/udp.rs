//! UDP sockets of tests.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};

use crate::eventually;

/// Binds a socket to this address. Waits while the address is in use: a child process of another test has copies of all
/// sockets between its fork and its exec.
///
/// # Panics
/// If the address cannot be used.
#[must_use]
pub fn bind_udp(address: SocketAddr) -> UdpSocket {
    eventually("the address to be free", 10, || match UdpSocket::bind(address) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => None,
        bound => Some(bound.unwrap_or_else(|error| panic!("cannot bind {address}: {error}"))),
    })
}

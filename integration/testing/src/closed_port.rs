//! Ports that refuse connections.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::TcpSocket;

/// A port of 127.0.0.1 without a listener. No other socket gets the port until the value is dropped. The port of a
/// listener that was dropped can belong to another test a moment later.
#[derive(Debug)]
pub struct ClosedPort {
    _socket: TcpSocket,
    address: SocketAddr,
}

impl ClosedPort {
    /// Reserves a port.
    ///
    /// # Panics
    /// If no port is free.
    #[must_use]
    pub fn reserve() -> Self {
        let reserved = TcpSocket::new_v4().and_then(|socket| {
            socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
            let address = socket.local_addr()?;
            Ok(Self { _socket: socket, address })
        });
        reserved.unwrap_or_else(|error| panic!("cannot reserve a port: {error}"))
    }

    /// The address of the port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_closed_port_refuses_connections_and_listeners() {
        let closed = ClosedPort::reserve();
        let refused = TcpStream::connect(closed.address()).map(drop).map_err(|error| error.kind());
        assert_eq!(refused, Err(ErrorKind::ConnectionRefused));
        let taken = TcpListener::bind(closed.address()).map(drop).map_err(|error| error.kind());
        assert_eq!(taken, Err(ErrorKind::AddrInUse));
    }
}

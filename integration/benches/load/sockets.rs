//! TCP connections and DNS queries over UDP.

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use clap::Args;
use nix::libc;
use nix::sys::socket::{Backlog, setsockopt, sockopt};

use crate::{Limits, run};

/// Timeout of an operation.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Length of the queue of connections that are not accepted yet. If it is full, the kernel drops the first packet of a
/// connection, and the client waits for a second.
const BACKLOG: i32 = 4096;

#[derive(Args)]
pub(crate) struct Listen {
    /// Address and port.
    address: SocketAddr,
}

#[derive(Args)]
pub(crate) struct Connect {
    /// Addresses and ports, used in round-robin order.
    #[arg(required = true)]
    to: Vec<SocketAddr>,
    #[command(flatten)]
    limits: Limits,
}

#[derive(Args)]
pub(crate) struct Dns {
    /// Address and port of the server.
    server: SocketAddr,
    /// Number of services whose names are queried.
    #[arg(long)]
    names: usize,
    /// Namespace of the services.
    #[arg(long)]
    namespace: String,
    #[command(flatten)]
    limits: Limits,
}

pub(crate) fn listen(arguments: &Listen) {
    let listener = TcpListener::bind(arguments.address).unwrap();
    nix::sys::socket::listen(&listener, Backlog::new(BACKLOG).unwrap()).unwrap();
    let accept = || loop {
        // The client resets the connection, possibly before it is accepted. Such connections stay in the queue.
        let _closed = listener.accept();
    };
    std::thread::scope(|scope| {
        scope.spawn(accept);
        accept();
    });
}

pub(crate) fn connect(arguments: &Connect) -> serde_json::Value {
    run(arguments.limits, |_| {
        |operation| {
            let to = &arguments.to[operation % arguments.to.len()];
            let Ok(stream) = TcpStream::connect_timeout(to, TIMEOUT) else { return false };
            // A reset keeps no state of the connection, so that ports do not run out.
            let reset = libc::linger { l_onoff: 1, l_linger: 0 };
            setsockopt(&stream, sockopt::Linger, &reset).is_ok()
        }
    })
}

pub(crate) fn dns(arguments: &Dns) -> serde_json::Value {
    run(arguments.limits, |client| {
        let socket =
            UdpSocket::bind(if arguments.server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
        socket.connect(arguments.server).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        move |operation| {
            // Spreads the queries over all names, in a different order for each client.
            let name = (operation * 7919 + client) % arguments.names;
            let id = u16::try_from(operation % 65536).unwrap();
            ask(&socket, id, &format!("s{name}.{}.svc.cluster.local", arguments.namespace))
        }
    })
}

/// Queries the A record of a name (RFC 1035, section 4). Returns whether the response has one.
fn ask(socket: &UdpSocket, id: u16, name: &str) -> bool {
    let mut query = id.to_be_bytes().to_vec();
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.') {
        query.push(u8::try_from(label.len()).unwrap());
        query.extend(label.as_bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    if socket.send(&query).is_err() {
        return false;
    }
    let mut response = [0; 1500];
    loop {
        let Ok(length) = socket.recv(&mut response) else { return false };
        // A late response to an earlier query has another id.
        if length >= 12 && response[..2] == id.to_be_bytes() {
            return response[3] & 15 == 0 && response[6..8] != [0, 0];
        }
    }
}

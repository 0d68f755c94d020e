//! No two networks of a network namespace have the same bridge or table, and no two overlays the same number of their
//! routes: each would sweep away what is the other's.
//!
//! The names of abstract unix sockets are just that wide, and go with the process that has them, however it ends. Plugin
//! executables need none: they change what is there, and sweep nothing.

use std::io;
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as Listener};
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt::PeerCredentials,
};
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::warn;

use crate::error::Error;

/// How long one that is just ending is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// Held for as long as the network or the overlay is.
#[derive(Debug)]
pub(crate) struct Alone {
    _names: JoinSet<()>,
}

// === impl Alone ===

impl Alone {
    /// Takes these names, each with what has it and the setting that gives another, or says which one somebody has.
    pub(crate) async fn take(wanted: &[(&'static str, &str, &'static str)]) -> Result<Self, Error> {
        let mut names = JoinSet::new();
        for (what, name, setting) in wanted.iter().copied() {
            let address = format!("coracle/{what}/{name}");
            let taken = take(&address).await;
            let taken = taken.map_err(|source| Error::Name { address: address.clone(), source })?;
            match taken {
                Some(listener) => drop(names.spawn(keep(listener))),
                None if is_ours(&address) => {
                    return Err(Error::NameInUse { what, name: name.to_owned(), setting });
                }
                // Anybody may have any such name: it must not keep the node from its work.
                None => {
                    warn!(address, "somebody without our rights has the name that tells of another network")
                }
            }
        }
        Ok(Self { _names: names })
    }
}

/// Lets everybody see whose the name is, for as long as the network is.
async fn keep(listener: UnixListener) {
    while listener.accept().await.is_ok() {}
    // Out of descriptors: the name is kept all the same.
    std::future::pending().await
}

/// The name, unless somebody keeps it.
async fn take(address: &str) -> io::Result<Option<UnixListener>> {
    let socket = SocketAddr::from_abstract_name(address)?;
    let end = Instant::now() + PATIENCE;
    loop {
        match Listener::bind_addr(&socket) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                return UnixListener::from_std(listener).map(Some);
            }
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => return Err(error),
            Err(_taken) if Instant::now() >= end => return Ok(None),
            Err(_taken) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Whether the name is that of a process of our own user. One of ours lets itself be asked at any time.
fn is_ours(address: &str) -> bool {
    let owner = || {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let asking = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        connect(asking.as_raw_fd(), &UnixAddr::new_abstract(address.as_bytes())?)?;
        getsockopt(&asking, PeerCredentials)
    };
    owner().is_ok_and(|owner| owner.uid() == nix::unistd::geteuid().as_raw())
}

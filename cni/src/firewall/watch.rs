//! Noticing that somebody else changed our table: the kernel tells every change of nftables, with its author.

use std::io;
use std::time::Duration;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use tracing::{debug, info, warn};

use crate::host::Host;
use crate::nft::{Channel, event};

/// `NFNLGRP_NFTABLES`.
const GROUP: u32 = 7;
/// What is kept for us: more than a table of some ten thousand ranges is told in, or making it again would be missed
/// again.
const KEPT: usize = 8 << 20;
/// How long after a failure it is tried again.
const PAUSE: Duration = Duration::from_secs(10);

impl super::Firewall {
    /// Listens for changes, to be called before the table is made first.
    pub(crate) fn listen() -> io::Result<TokioSocket> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        socket.socket_mut().add_membership(GROUP)?;
        if let Err(error) = setsockopt(socket.socket_ref(), RcvBufForce, &KEPT) {
            debug!(%error, "many changes of the firewall at once may be missed");
        }
        Ok(socket)
    }

    /// Repairs the table after every foreign change of it, until the host goes. The kernel's word wakes it, and while
    /// something does not work, a timer: then it is tried again.
    pub(crate) async fn keep(host: std::sync::Weak<Host>, mut socket: TokioSocket) {
        let mut buffer = Vec::with_capacity(65536);
        loop {
            buffer.clear();
            let heard = socket.recv(&mut buffer).await;
            match heard {
                Ok(_) => match host.upgrade() {
                    Some(host) if !host.firewall.is_foreign(&buffer) => continue,
                    Some(_) => {}
                    None => return,
                },
                // More happened than was kept for us: it may have been ours.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                Err(error) => {
                    warn!(%error, "changes of the firewall are not noticed until the kernel is listened to again");
                    tokio::time::sleep(PAUSE).await;
                    match Self::listen() {
                        Ok(anew) => socket = anew,
                        // The old one says so again.
                        Err(error) => {
                            warn!(%error, "the kernel cannot be listened to");
                            continue;
                        }
                    }
                }
            }
            info!("somebody changed the firewall table, or may have: it is made again");
            while !host.upgrade().is_none_or(|host| mend(&host)) {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    /// Whether somebody else changed our table.
    fn is_foreign(&self, events: &[u8]) -> bool {
        let state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let ours = state.channel.as_ref().map(Channel::port);
        event::changes(events).any(|change| change.table == self.table && Some(change.author) != ours)
    }
}

/// Makes the table again; whether it could be.
fn mend(host: &Host) -> bool {
    let mended = host.firewall.repair();
    if let Err(error) = &mended {
        warn!(error = error.chain(), "the firewall table cannot be made again; it is tried once more");
    }
    mended.is_ok()
}

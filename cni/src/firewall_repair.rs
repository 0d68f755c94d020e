//! Repair of the firewall table after foreign changes, of which the kernel notifies this process.

use std::io;
use std::time::Duration;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use tracing::{debug, info, warn};

use crate::host::Host;

/// `NFNLGRP_NFTABLES`.
const GROUP: u32 = 7;
/// Receive buffer in bytes: larger than the notifications for a table of some ten thousand ranges. The notifications of a
/// repair would overflow a smaller buffer and cause the next repair.
const RECEIVE_BUFFER: usize = 8 << 20;
/// Delay before a retry.
const PAUSE: Duration = Duration::from_secs(10);

/// Opens the socket. Must be called before the table is made.
pub(crate) fn listen() -> io::Result<TokioSocket> {
    let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
    socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
    socket.socket_mut().add_membership(GROUP)?;
    if let Err(error) = setsockopt(socket.socket_ref(), RcvBufForce, &RECEIVE_BUFFER) {
        debug!(%error, "cannot enlarge the receive buffer for firewall notifications");
    }
    Ok(socket)
}

/// Repairs the table after each foreign change, as long as the host exists. The task waits for notifications of the
/// kernel, and for a timer while a repair fails.
pub(crate) async fn keep(host: std::sync::Weak<Host>, mut socket: TokioSocket) {
    let mut buffer = Vec::with_capacity(65536);
    loop {
        buffer.clear();
        let received = socket.recv(&mut buffer).await;
        match received {
            Ok(_) => match host.upgrade() {
                Some(host) if !is_foreign(&host, &buffer) => continue,
                Some(_) => {}
                None => return,
            },
            // Notifications were lost: one of them may have been a foreign change.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
            Err(error) => {
                warn!(%error, "cannot receive firewall notifications, opening another socket");
                tokio::time::sleep(PAUSE).await;
                match listen() {
                    Ok(reopened) => socket = reopened,
                    // The old socket reports its error again.
                    Err(error) => {
                        warn!(%error, "cannot open a socket for firewall notifications");
                        continue;
                    }
                }
            }
        }
        info!("the firewall table was or may have been changed by another process, repairing it");
        while !host.upgrade().is_none_or(|host| repair(&host)) {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

fn is_foreign(host: &Host, events: &[u8]) -> bool {
    let guard = host.guard.as_ref().and_then(|guard| guard.author());
    let connections = host.connections.as_ref();
    let others = [guard, connections.and_then(|connections| connections.author())];
    host.firewall.is_foreign(events, connections.map(|connections| connections.table()), others)
}

/// Repairs the tables. Returns whether that succeeded.
fn repair(host: &Host) -> bool {
    let repaired = host.firewall.repair();
    let repaired = repaired.and(host.guard.as_ref().map_or(Ok(()), |guard| guard.repair()));
    if let Some(connections) = &host.connections {
        connections.repair();
    }
    if let Err(error) = &repaired {
        warn!(error = error.chain(), "cannot repair the firewall table, retrying");
    }
    repaired.is_ok()
}

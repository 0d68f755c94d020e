//! Waiting for changes of a table by other processes. The kernel sends a notification of each change of nftables, with
//! the author of the change.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};

use crate::event::changes;

/// `NFNLGRP_NFTABLES`.
const GROUP: u32 = 7;
/// Receive buffer in bytes: larger than the notifications for a table of some ten thousand elements. When the caller
/// repairs such a table, the notifications of the repair would overflow a smaller buffer. The overflow would cause the
/// next repair.
const RECEIVE_BUFFER: usize = 8 << 20;

/// The kernel's notifications of nftables changes.
pub struct Monitor {
    socket: TokioSocket,
    buffer: Vec<u8>,
}

// === impl Monitor ===

impl Monitor {
    /// Opens the socket. Must be called before the table is made.
    ///
    /// # Errors
    /// When the kernel has no netfilter netlink.
    pub fn open() -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        socket.socket_mut().add_membership(GROUP)?;
        if let Err(error) = setsockopt(socket.socket_ref(), RcvBufForce, &RECEIVE_BUFFER) {
            tracing::debug!(%error, "cannot enlarge the receive buffer for firewall notifications");
        }
        Ok(Self { socket, buffer: Vec::with_capacity(65536) })
    }

    /// The next notifications. `None` if notifications were lost. Cancel-safe.
    ///
    /// # Errors
    /// When the socket fails.
    pub async fn notifications(&mut self) -> io::Result<Option<&[u8]>> {
        self.buffer.clear();
        match self.socket.recv(&mut self.buffer).await {
            Ok(_) => Ok(Some(self.buffer.as_slice())),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns after a change of the table whose author is not `author`, or after lost notifications.
    ///
    /// # Errors
    /// When the socket fails.
    pub async fn foreign_change(&mut self, table: &str, author: u32) -> io::Result<()> {
        while let Some(received) = self.notifications().await? {
            if changes(received).any(|change| change.table == table && change.author != author) {
                break;
            }
        }
        // If notifications were lost, one of them may have been a foreign change.
        Ok(())
    }
}

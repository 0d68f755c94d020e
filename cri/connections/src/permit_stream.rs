//! A stream that keeps its connection's permit, even after an HTTP upgrade to another protocol.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::ConnectionPermit;
use crate::abandoned::SocketOwner;
use crate::observed::{Observe, Observed};

/// A byte stream that keeps its [`ConnectionPermit`], or another permit, until the stream ends.
pub type PermitStream<I, S = Arc<ConnectionPermit>> = Observed<I, HeldPermit<S>>;

/// The permit of a stream.
#[derive(Debug)]
pub struct HeldPermit<S> {
    _socket: Option<SocketOwner>,
    _permit: S,
}

impl<S: Unpin> Observe for HeldPermit<S> {}

// === impl PermitStream ===

impl<I, S: Unpin> Observed<I, HeldPermit<S>> {
    /// Ties a stream to its permit.
    pub fn new(io: I, permit: S) -> Self {
        Self::with_observer(io, HeldPermit { _socket: None, _permit: permit })
    }
}

impl<I: AsRawFd> Observed<I, HeldPermit<Arc<ConnectionPermit>>> {
    /// Ties a stream to its permit, and records the socket in the permit for [`watch_reads`](crate::watch_reads).
    pub fn of_socket(io: I, permit: Arc<ConnectionPermit>) -> Self {
        let socket = SocketOwner::new(permit.clone(), io.as_raw_fd());
        Self::with_observer(io, HeldPermit { _socket: Some(socket), _permit: permit })
    }
}

//! What can go wrong with the overlay, one variant per operation.

use std::io;

/// A failed operation of the overlay.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OverlayError {
    /// A netlink socket could not be used.
    #[error("cannot {action} over netlink")]
    Socket {
        /// What was tried.
        action: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a change of its tables.
    #[error("the kernel refused {what}")]
    Change {
        /// The change.
        what: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// An interface of the overlay's name exists and is something else.
    #[error("an interface named {name} exists and is not the overlay's")]
    ForeignInterface {
        /// The interface's name.
        name: String,
    },
    /// No interface has an address of the node.
    #[error("no interface has an address of this node ({addresses})")]
    NoUplink {
        /// The addresses.
        addresses: String,
    },
    /// A name from which those of the interfaces cannot be made.
    #[error("{name:?} is no name for the overlay's interface: 1 to 11 letters, digits, '.', '-' or '_'")]
    Name {
        /// The name.
        name: String,
    },
    /// The tun device or its socket could not be used.
    #[error("cannot {action} for packets in UDP")]
    Tunnel {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

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
    /// Another overlay of this network namespace has the same device, or routes of the same number.
    #[error("each overlay of a network namespace needs an interface and a number of its own")]
    NotAlone(#[source] Box<crate::error::Error>),
    /// A number by which nobody's routes can be told from others'.
    #[error(
        "{number} is no number for the overlay's routes: 5 to 255, and 0 to 4 are of the kernel and of its users"
    )]
    RouteProtocol {
        /// The number.
        number: u8,
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
    /// Another VXLAN device gets the packets that the overlay's should get; the kernel takes only one such.
    #[error(
        "{name} cannot be made: {rival} has VXLAN number {vni} on UDP port {port} already; remove it, or give all \
         nodes another --overlay-vni"
    )]
    NumberTaken {
        /// The interface that is not there.
        name: String,
        /// The one that is in its way.
        rival: Rival,
        /// The network's number.
        vni: u32,
        /// The UDP port.
        port: u16,
    },
    /// An interface of the overlay's was made, and is not there.
    #[error("the interface {name} was removed while it was made")]
    Missing {
        /// The interface's name.
        name: String,
    },
    /// A kernel parameter of an interface could not be set.
    #[error("cannot set the parameters of {name}")]
    Parameter {
        /// The interface's name.
        name: String,
        /// Which one, and the system's answer.
        #[source]
        source: Box<crate::error::Error>,
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

/// Another's VXLAN device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rival {
    /// The one of this name.
    Here(String),
    /// One that was made here, and lies in another network namespace now.
    Elsewhere,
}

impl From<Option<String>> for Rival {
    fn from(name: Option<String>) -> Self {
        name.map_or(Self::Elsewhere, Self::Here)
    }
}

impl std::fmt::Display for Rival {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Here(name) => write!(f, "the interface {name}"),
            Self::Elsewhere => f.write_str("an interface that was moved to another network namespace"),
        }
    }
}

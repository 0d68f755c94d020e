//! Errors of the overlay, one variant per operation.

use std::io;

/// A failed operation of the overlay.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OverlayError {
    /// A netlink socket could not be used.
    #[error("cannot {action} over netlink")]
    Socket {
        /// The failed operation.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Another overlay in this network namespace has the same interface name or route protocol number, or their lock
    /// cannot be taken.
    #[error(transparent)]
    NameLock(Box<crate::error::Error>),
    /// A route protocol number that is reserved by Linux.
    #[error(
        "{number} is not a valid route protocol number for the overlay: use 5 to 255, Linux reserves 0 to 4"
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
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// An interface with the overlay's name exists and is not a device of the overlay.
    #[error(
        "an interface named {name} exists and is not a device of the overlay; remove it or use --overlay-interface"
    )]
    ForeignInterface {
        /// The interface's name.
        name: String,
    },
    /// Another VXLAN device would receive the overlay's packets; the kernel accepts only one.
    #[error(
        "cannot make {name}: {other} has the VNI {vni} on UDP port {port}; remove it, or give all \
         nodes another --overlay-vni"
    )]
    VniInUse {
        /// The interface that cannot be made.
        name: String,
        /// The other device.
        other: ForeignDevice,
        /// The VNI.
        vni: u32,
        /// The UDP port.
        port: u16,
    },
    /// An interface of the overlay does not exist after it was made.
    #[error("the interface {name} was removed while it was made")]
    Missing {
        /// The interface's name.
        name: String,
    },
    /// A sysctl of an interface could not be set.
    #[error("cannot set the sysctls of {name}")]
    Parameter {
        /// The interface's name.
        name: String,
        /// The sysctl and the error.
        #[source]
        source: Box<crate::error::Error>,
    },
    /// No interface has an address of the node.
    #[error("no interface has an address of this node ({addresses})")]
    NoUplink {
        /// The addresses.
        addresses: String,
    },
    /// An interface name that cannot be the prefix of other interface names.
    #[error(
        "{name:?} is not a valid name of the overlay's interface: use 1 to 11 letters, digits, '.', '-' or '_'"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The tun device or its socket could not be used.
    #[error("cannot {action} for the UDP tunnel")]
    Tunnel {
        /// The failed operation.
        action: &'static str,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

/// A foreign VXLAN device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ForeignDevice {
    /// A device with this name.
    Here(String),
    /// A device that was made here and moved to another network namespace.
    Elsewhere,
}

impl From<Option<String>> for ForeignDevice {
    fn from(name: Option<String>) -> Self {
        name.map_or(Self::Elsewhere, Self::Here)
    }
}

impl std::fmt::Display for ForeignDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Here(name) => write!(f, "the interface {name}"),
            Self::Elsewhere => f.write_str("an interface that was moved to another network namespace"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_lock_is_not_reported_as_a_name_in_use() {
        let object = "overlay interface o".to_owned();
        let source = io::Error::other("denied");
        let lock = crate::error::Error::Name { object, path: "/locks".into(), source };
        let text = coracle_error_chain::chain(&OverlayError::NameLock(Box::new(lock)));
        assert_eq!(text, "cannot reserve overlay interface o: cannot lock /locks: denied");
    }
}

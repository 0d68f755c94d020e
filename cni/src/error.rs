//! What can go wrong, one variant per operation.

use std::io;
use std::path::PathBuf;

use ipnetwork::IpNetwork;

/// A failed network operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The network has no pod address range yet.
    #[error("the network is not ready: {reason}")]
    NotReady {
        /// What is missing.
        reason: String,
    },
    /// Every address of the range is taken.
    #[error("no address is free in {range}: all {size} are in use")]
    RangeFull {
        /// The full range.
        range: IpNetwork,
        /// Addresses that it could give to pods.
        size: u128,
    },
    /// A range too small to hold the gateway and one pod.
    #[error("the pod range {range} is too small: it needs room for a gateway and a pod")]
    RangeTooSmall {
        /// The range.
        range: IpNetwork,
    },
    /// An interface of the bridge's name exists and is not a bridge.
    #[error("an interface named {name} exists and is not a bridge")]
    ForeignInterface {
        /// The interface's name.
        name: String,
    },
    /// A host port that another sandbox holds.
    #[error("host port {port}/{protocol} is taken by sandbox {owner}")]
    HostPortTaken {
        /// The port.
        port: u16,
        /// tcp, udp or sctp.
        protocol: &'static str,
        /// The sandbox that has it.
        owner: String,
    },
    /// A network configuration list that cannot be used.
    #[error("{} cannot be used: {reason}", path.display())]
    Configuration {
        /// The list's file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of ours could not be read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A network namespace could not be opened or entered.
    #[error("cannot enter the network namespace {}", path.display())]
    Namespace {
        /// Its path.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A netlink socket could not be opened or used.
    #[error("cannot {action} over netlink")]
    Socket {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a link, address or route.
    #[error("cannot {action} {what}")]
    Link {
        /// What was tried, as a verb.
        action: &'static str,
        /// The interface, address or route.
        what: String,
        /// The kernel's answer.
        #[source]
        source: Box<rtnetlink::Error>,
    },
    /// The kernel refused a change of the firewall table.
    #[error("cannot {action} the nftables table {table}")]
    Firewall {
        /// What was tried, as a verb.
        action: &'static str,
        /// The table's name.
        table: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

//! Errors of network operations, one variant per operation.

use std::io;
use std::path::PathBuf;

use ipnetwork::IpNetwork;

/// A failed network operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The network cannot attach sandboxes now, for example because it has no pod address range yet.
    #[error("the network is not ready: {reason}")]
    NotReady {
        /// The reason.
        reason: String,
    },
    /// The network is not ready, and attached sandboxes may have lost their connection, too.
    #[error("the network is not ready, and existing sandboxes may have limited connectivity: {reason}")]
    CutOff {
        /// The reason.
        reason: String,
    },
    /// All addresses of a range set are in use.
    #[error("no address is free in {range}: all {size} are in use")]
    RangeFull {
        /// The full ranges.
        range: String,
        /// Number of their addresses.
        size: u128,
    },
    /// The requested address belongs to another sandbox.
    #[error("the address {address} is taken by {owner}")]
    AddressTaken {
        /// The address.
        address: std::net::IpAddr,
        /// The owner.
        owner: String,
    },
    /// The requested hardware address belongs to another sandbox of the network.
    #[error("the hardware address {mac} is taken by {owner}")]
    MacTaken {
        /// The address.
        mac: String,
        /// The owner.
        owner: String,
    },
    /// A sandbox requests a capability that no plugin of its network declares.
    #[error(
        "no plugin of the network {network} declares the capability {capability}, which the sandbox requests"
    )]
    Undeclared {
        /// The network.
        network: String,
        /// The capability.
        capability: &'static str,
    },
    /// The plugins declare a capability and ignore its value.
    #[error(
        "the network {network} did not assign {requested} although it declares the capability {capability}"
    )]
    NotGiven {
        /// The network.
        network: String,
        /// The capability.
        capability: &'static str,
        /// The requested value.
        requested: String,
    },
    /// A range without room for a gateway and a pod.
    #[error("the range {range} is too small: it needs room for a gateway and a pod")]
    RangeTooSmall {
        /// The range.
        range: IpNetwork,
    },
    /// An invalid value in a network configuration.
    #[error("{field}: {reason}")]
    InvalidField {
        /// The field, with the path to it.
        field: String,
        /// The reason.
        reason: String,
    },
    /// An unknown or unsupported field of a network configuration.
    #[error("the field {field} is not supported, its value is {value}")]
    UnsupportedField {
        /// The field, with the path to it.
        field: String,
        /// The value of the field as JSON.
        value: String,
    },
    /// An unknown version of the CNI specification.
    #[error("CNI version {version:?} is not supported, only 0.3.0, 0.3.1, 0.4.0, 1.0.0 and 1.1.0")]
    IncompatibleVersion {
        /// The version.
        version: String,
    },
    /// JSON that cannot be decoded.
    #[error("cannot read {what}: {reason}")]
    Decode {
        /// The kind of document.
        what: &'static str,
        /// The reason.
        reason: String,
    },
    /// A missing or invalid environment variable of a plugin.
    #[error("{variable} {reason}")]
    Environment {
        /// The variable's name.
        variable: &'static str,
        /// The reason.
        reason: String,
    },
    /// CHECK found a difference from the result of ADD.
    #[error("{what} differs from the result of ADD: {reason}")]
    Changed {
        /// The interface, address, route or rule.
        what: String,
        /// The difference.
        reason: String,
    },
    /// An address of a load balancer cannot be announced from this node.
    #[error("cannot announce the address {address}: {reason}")]
    NotAnnounced {
        /// The address.
        address: std::net::IpAddr,
        /// The reason.
        reason: &'static str,
    },
    /// The sandbox already has an interface with the name of the new one.
    #[error("an interface named {name} exists in the sandbox")]
    InterfaceExists {
        /// The interface's name.
        name: String,
    },
    /// Another host has the address: its owner answered duplicate address detection.
    #[error("the address {address} is in use by another host of the network")]
    DuplicateAddress {
        /// The address.
        address: std::net::IpAddr,
    },
    /// No executable exists for a plugin type.
    #[error("cannot find the plugin {kind} in {}", path.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(":"))]
    NoPlugin {
        /// The plugin's type.
        kind: String,
        /// The searched directories.
        path: Vec<PathBuf>,
    },
    /// A plugin returned an error.
    #[error("plugin {kind}: {message}{} (code {code})", if details.is_empty() { String::new() } else { format!("; {details}") })]
    Plugin {
        /// The plugin's type.
        kind: String,
        /// The error code of the CNI specification. Codes of plugins begin at 100.
        code: u32,
        /// The message.
        message: String,
        /// The details.
        details: String,
    },
    /// A plugin could not be run, or did not end.
    #[error("cannot run plugin {kind}")]
    Run {
        /// The plugin's type.
        kind: String,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// An interface with the bridge's name exists and is not a bridge.
    #[error("an interface named {name} exists and is not a bridge")]
    ForeignInterface {
        /// The interface's name.
        name: String,
    },
    /// A bridge with the configured name exists and has no mark of this program.
    #[error(
        "the bridge {name} exists and was not made by coracle: use another name (--bridge), or remove it if it is unused \
         (ip link delete {name})"
    )]
    ForeignBridge {
        /// The bridge's name.
        name: String,
    },
    /// Another network of the network namespace uses the bridge or the table, and would remove objects of this network.
    #[error(
        "the {what} {name} is in use by another runtime or agent in this network namespace: stop it, or use another name \
         ({setting})"
    )]
    NameInUse {
        /// The kind of object.
        what: &'static str,
        /// The object's name.
        name: String,
        /// The setting that chooses another name.
        setting: &'static str,
    },
    /// A name lock could not be taken.
    #[error("cannot reserve {object}: cannot lock {}", path.display())]
    Name {
        /// Kind and name of the object that the lock is for.
        object: String,
        /// The lock, or the directory of the locks.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// A host port belongs to another sandbox.
    #[error("host port {port}/{protocol} is taken by sandbox {owner}")]
    HostPortTaken {
        /// The port.
        port: u16,
        /// tcp, udp or sctp.
        protocol: &'static str,
        /// The sandbox that has the port.
        owner: String,
    },
    /// An unusable network configuration list.
    #[error("{} cannot be used as a network configuration: {reason}", path.display())]
    Configuration {
        /// The list's file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// The failed operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// A network namespace could not be opened or entered.
    #[error("cannot enter the network namespace {}", path.display())]
    Namespace {
        /// The namespace's path.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// The sandbox's namespace is the plugin's own.
    #[error("{} is the plugin's own network namespace, not that of a sandbox", path.display())]
    OwnNamespace {
        /// The namespace's path.
        path: PathBuf,
    },
    /// A netlink socket could not be opened or used.
    #[error("cannot {action} over netlink")]
    Socket {
        /// The failed operation.
        action: &'static str,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// The kernel refused an operation on a link, address or route.
    #[error("cannot {action} {what}")]
    Link {
        /// The failed operation.
        action: &'static str,
        /// The interface, address or route.
        what: String,
        /// The kernel's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The kernel refused a change of the firewall table.
    #[error("cannot {action} the nftables table {table}")]
    Firewall {
        /// The failed operation.
        action: &'static str,
        /// The table's name.
        table: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

// === impl Error ===

impl Error {
    /// The error of an unknown field with its value.
    pub(crate) fn unsupported(field: &str, value: &serde_json::Value) -> Self {
        Self::UnsupportedField { field: field.to_owned(), value: value.to_string() }
    }

    /// Converts this error to one that STATUS may return: an invalid request (codes 1 to 7), or code 50 or 51.
    pub(crate) fn of_status(self) -> Self {
        match self {
            // Another object has the name of the bridge.
            Self::ForeignInterface { .. } => Self::CutOff { reason: self.chain() },
            _ if matches!(self.code(), 1..=7 | 50 | 51) => self,
            _ => Self::NotReady { reason: self.chain() },
        }
    }

    /// An error of one field.
    pub(crate) fn invalid(field: &str, reason: impl Into<String>) -> Self {
        Self::InvalidField { field: field.to_owned(), reason: reason.into() }
    }

    /// The code of the CNI specification (section 5, "Error"). Coracle's own codes begin at 100.
    #[must_use]
    pub fn code(&self) -> u32 {
        match self {
            Self::IncompatibleVersion { .. } => 1,
            Self::UnsupportedField { .. } => 2,
            Self::Namespace { .. } => 3,
            Self::Environment { .. } => 4,
            Self::File { .. } | Self::Socket { .. } | Self::Name { .. } | Self::Run { .. } => 5,
            Self::Decode { .. } => 6,
            Self::InvalidField { .. }
            | Self::Undeclared { .. }
            | Self::RangeTooSmall { .. }
            | Self::Configuration { .. } => 7,
            Self::OwnNamespace { .. } => 8,
            Self::RangeFull { .. } => 11,
            Self::NotReady { .. } => 50,
            Self::CutOff { .. } => 51,
            Self::Plugin { code, .. } => *code,
            Self::NoPlugin { .. } => 100,
            Self::Changed { .. } | Self::NotGiven { .. } | Self::NotAnnounced { .. } => 101,
            Self::AddressTaken { .. }
            | Self::MacTaken { .. }
            | Self::HostPortTaken { .. }
            | Self::DuplicateAddress { .. } => 102,
            Self::ForeignInterface { .. }
            | Self::ForeignBridge { .. }
            | Self::NameInUse { .. }
            | Self::InterfaceExists { .. } => 103,
            Self::Link { .. } | Self::Firewall { .. } => 104,
        }
    }

    /// Whether the resource may become free when another sandbox is removed.
    pub(crate) fn is_taken(&self) -> bool {
        matches!(self, Self::RangeFull { .. } | Self::AddressTaken { .. } | Self::MacTaken { .. })
    }

    /// The error and its sources in one line.
    #[must_use]
    pub fn chain(&self) -> String {
        coracle_error_chain::chain(self)
    }
}

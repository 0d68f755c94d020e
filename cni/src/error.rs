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
    /// The network has nothing to attach sandboxes to, and those that were attached may have lost it, too.
    #[error("the network is not ready, and sandboxes may be cut off: {reason}")]
    CutOff {
        /// What is wrong.
        reason: String,
    },
    /// Every address of a range set is taken.
    #[error("no address is free in {range}: all {size} are in use")]
    RangeFull {
        /// The full ranges.
        range: String,
        /// Addresses that they could give.
        size: u128,
    },
    /// An address that a sandbox has already.
    #[error("the address {address} is taken by {owner}")]
    AddressTaken {
        /// The address.
        address: std::net::IpAddr,
        /// Who has it.
        owner: String,
    },
    /// A hardware address that a sandbox of the same network has already.
    #[error("the hardware address {mac} is taken by {owner}")]
    MacTaken {
        /// The address.
        mac: String,
        /// Who has it.
        owner: String,
    },
    /// A sandbox asks for something that no plugin of its network takes.
    #[error(
        "no plugin of the network {network} declares the capability {capability}, by which it is asked for"
    )]
    Undeclared {
        /// The network.
        network: String,
        /// The capability.
        capability: &'static str,
    },
    /// The plugins take what is asked for, and give something else.
    #[error("the network {network} did not give {asked}, though it declares the capability {capability}")]
    NotGiven {
        /// The network.
        network: String,
        /// The capability.
        capability: &'static str,
        /// What was asked for.
        asked: String,
    },
    /// A range too small to hold the gateway and one pod.
    #[error("the range {range} is too small: it needs room for a gateway and a pod")]
    RangeTooSmall {
        /// The range.
        range: IpNetwork,
    },
    /// A field of a network configuration whose value cannot be used.
    #[error("{field}: {reason}")]
    InvalidField {
        /// The field, with the path to it.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A field of a network configuration that is not known or not supported here.
    #[error("the field {field} is not supported, its value is {value}")]
    UnsupportedField {
        /// The field, with the path to it.
        field: String,
        /// What it says, as JSON.
        value: String,
    },
    /// A version of the CNI specification that is not known here.
    #[error("CNI version {version:?} is not supported, only 0.3.0, 0.3.1, 0.4.0, 1.0.0 and 1.1.0")]
    IncompatibleVersion {
        /// The version.
        version: String,
    },
    /// Something that should be JSON of a certain form is not.
    #[error("cannot read {what}: {reason}")]
    Decode {
        /// What was read.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A variable of a plugin's environment that is missing or wrong.
    #[error("{variable} {reason}")]
    Environment {
        /// Its name.
        variable: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// CHECK found something that is not as ADD left it.
    #[error("{what} is not as it was made: {reason}")]
    Changed {
        /// The interface, address, route or rule.
        what: String,
        /// In which way.
        reason: String,
    },
    /// An interface that should be made is there already.
    #[error("an interface named {name} is in the sandbox already")]
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
    /// A plugin that is nowhere on the path.
    #[error("there is no plugin {kind} in {}", path.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(":"))]
    NoPlugin {
        /// Its type.
        kind: String,
        /// Where it was looked for.
        path: Vec<PathBuf>,
    },
    /// A plugin that was run and refused.
    #[error("plugin {kind}: {message}{} (code {code})", if details.is_empty() { String::new() } else { format!("; {details}") })]
    Plugin {
        /// Its type.
        kind: String,
        /// The error's code by the CNI specification, or the plugin's own from 100.
        code: u32,
        /// What it said.
        message: String,
        /// What else it said.
        details: String,
    },
    /// A plugin that could not be run, or did not end.
    #[error("cannot run plugin {kind}")]
    Run {
        /// Its type.
        kind: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// An interface of the bridge's name exists and is not a bridge.
    #[error("an interface named {name} exists and is not a bridge")]
    ForeignInterface {
        /// The interface's name.
        name: String,
    },
    /// A bridge of the network's name exists and is somebody else's.
    #[error(
        "the bridge {name} is somebody else's and is left alone: name another one for the pods (--bridge), or remove it \
         if nobody needs it (ip link delete {name})"
    )]
    ForeignBridge {
        /// The bridge's name.
        name: String,
    },
    /// Another network of the network namespace has the bridge or the table, and would sweep away what is of this one.
    #[error(
        "the {what} {name} is that of another runtime or agent in this network namespace: end it, or give this one \
         another ({setting})"
    )]
    NameInUse {
        /// A bridge or a table.
        what: &'static str,
        /// Its name.
        name: String,
        /// The setting that gives another one.
        setting: &'static str,
    },
    /// The lock that keeps others from a name of this network could not be taken.
    #[error("cannot lock {}", path.display())]
    Name {
        /// The lock, or the directory of the locks.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
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
    /// The namespace of a sandbox is that of the plugin.
    #[error("{} is the plugin's own network namespace and no sandbox's", path.display())]
    OwnNamespace {
        /// Its path.
        path: PathBuf,
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
        source: Box<dyn std::error::Error + Send + Sync>,
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

// === impl Error ===

impl Error {
    /// A field that is not known, of the value that it is found in.
    pub(crate) fn unsupported(field: &str, value: &serde_json::Value) -> Self {
        Self::UnsupportedField { field: field.to_owned(), value: value.to_string() }
    }

    /// The answer to STATUS: an error of the request, or one of the two codes that the specification has for it.
    pub(crate) fn of_status(self) -> Self {
        match self {
            // Something else has the name of the bridge that pods hang on.
            Self::ForeignInterface { .. } => Self::CutOff { reason: self.chain() },
            _ if matches!(self.code(), 1..=7 | 50 | 51) => self,
            _ => Self::NotReady { reason: self.chain() },
        }
    }

    /// An error of one field.
    pub(crate) fn invalid(field: &str, reason: impl Into<String>) -> Self {
        Self::InvalidField { field: field.to_owned(), reason: reason.into() }
    }

    /// The code of the CNI specification (section 5, "Error"); ours begin at 100.
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
            Self::Changed { .. } | Self::NotGiven { .. } => 101,
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

    /// Whether it may be had when another sandbox is gone.
    pub(crate) fn is_taken(&self) -> bool {
        matches!(self, Self::RangeFull { .. } | Self::AddressTaken { .. } | Self::MacTaken { .. })
    }

    /// The error and its sources in one line.
    #[must_use]
    pub fn chain(&self) -> String {
        coracle_error_chain::chain(self)
    }
}

//! Host ports that are forwarded to sandboxes.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// One host port and its target port in a sandbox: an element of the capability `portMappings`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PortMapping {
    /// The node's address. `None`: all addresses.
    #[serde(default, rename = "hostIP", with = "lenient", skip_serializing_if = "Option::is_none")]
    pub host_ip: Option<IpAddr>,
    /// The node's port.
    pub host_port: u16,
    /// The sandbox's port.
    pub container_port: u16,
    /// The transport protocol.
    #[serde(default)]
    pub protocol: Protocol,
}

/// A transport protocol with ports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    #[default]
    #[serde(alias = "TCP")]
    Tcp,
    /// UDP.
    #[serde(alias = "UDP")]
    Udp,
    /// SCTP.
    #[serde(alias = "SCTP")]
    Sctp,
}

/// Runtimes write an empty text if there is no address.
mod lenient {
    use std::net::IpAddr;

    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(ip: &Option<IpAddr>, to: S) -> Result<S::Ok, S::Error> {
        ip.serialize(to)
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Option<IpAddr>, D::Error> {
        match Option::<String>::deserialize(from)?.as_deref() {
            None | Some("") => Ok(None),
            Some(text) => {
                text.parse().map(Some).map_err(|_not| D::Error::custom(format!("{text:?} is not an address")))
            }
        }
    }
}

// === impl PortMapping ===

impl PortMapping {
    /// Whether two mappings have the same port of a common address.
    pub(crate) fn conflicts_with(&self, other: &Self) -> bool {
        let wild = |ip: Option<IpAddr>| ip.is_none_or(|ip| ip.is_unspecified());
        self.host_port == other.host_port
            && self.protocol == other.protocol
            && (wild(self.host_ip) || wild(other.host_ip) || self.host_ip == other.host_ip)
    }
}

// === impl Protocol ===

impl Protocol {
    /// The name in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

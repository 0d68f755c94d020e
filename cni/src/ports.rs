//! Host ports that are forwarded to sandboxes.

use std::collections::HashMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// One host port and its target port in a sandbox: an element of the capability `portMappings`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PortMapping {
    /// The node's address. `None` means all addresses.
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

/// The host ports of one sandbox. A conflict is found in constant time: a pod can have very many ports.
#[derive(Debug)]
pub(crate) struct HostPorts<'a> {
    by_number: HashMap<(u16, Protocol), &'a PortMapping>,
    /// By number and address. `None` means all addresses.
    by_address: HashMap<(u16, Protocol, Option<IpAddr>), &'a PortMapping>,
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
    /// The node's address. `None` means all addresses.
    fn address(&self) -> Option<IpAddr> {
        self.host_ip.filter(|ip| !ip.is_unspecified())
    }
}

// === impl HostPorts ===

impl<'a> HostPorts<'a> {
    pub(crate) fn of(ports: &'a [PortMapping]) -> Self {
        let by_number = ports.iter().map(|port| ((port.host_port, port.protocol), port));
        let by_address = ports.iter().map(|port| ((port.host_port, port.protocol, port.address()), port));
        Self { by_number: by_number.collect(), by_address: by_address.collect() }
    }

    /// A port of this sandbox that has the number, the protocol and an address of the port `other`.
    pub(crate) fn conflicting(&self, other: &PortMapping) -> Option<&'a PortMapping> {
        let (number, protocol) = (other.host_port, other.protocol);
        let found = match other.address() {
            None => self.by_number.get(&(number, protocol)),
            address => {
                let everywhere = || self.by_address.get(&(number, protocol, None));
                self.by_address.get(&(number, protocol, address)).or_else(everywhere)
            }
        };
        found.copied()
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

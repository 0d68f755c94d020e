//! Firewall claims, and the table that is derived from them.

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::nft::{Mapping, Plan};
use crate::port_condition::Condition;
use crate::ports::{HostPorts, PortMapping};
use crate::spec::request::Request;
use crate::sysctl;

/// The rules and addresses that one plugin requires of the firewall for one attachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Claim {
    /// The plugin and its network.
    pub(crate) plugin: String,
    pub(crate) network: String,
    /// The attachment. Empty for a claim of the whole network.
    pub(crate) id: String,
    pub(crate) ifname: String,
    /// Host ports and their target addresses.
    pub(crate) ports: Vec<PortMapping>,
    pub(crate) to: Vec<IpNetwork>,
    /// Conditions on packets to the ports, for IPv4 and IPv6.
    pub(crate) conditions: [Vec<Condition>; 2],
    /// Whether the attachment's own network and 127.0.0.1 can use the ports, and whether all packets through the ports
    /// are masqueraded.
    pub(crate) hairpin: bool,
    pub(crate) masquerade_all: bool,
    /// Networks whose outgoing packets are masqueraded, and destinations that are excepted.
    pub(crate) masquerade: Vec<IpNetwork>,
    pub(crate) except: Vec<IpNetwork>,
    /// A bridge that is isolated from other isolated bridges.
    pub(crate) isolated: Option<String>,
    /// The interface that is open for packets of 127.0.0.0/8 as long as such a claim exists.
    pub(crate) opened: Option<String>,
}

// === impl Claim ===

impl Claim {
    /// An empty claim of the request's attachment.
    pub(crate) fn of(request: &Request) -> Self {
        Self {
            plugin: request.kind().to_owned(),
            network: request.network().to_owned(),
            id: request.container_id.clone(),
            ifname: request.ifname.clone(),
            ..Self::default()
        }
    }

    /// Parses a recorded claim. `None` if the record is damaged.
    pub(super) fn of_file(text: &[u8]) -> Option<Self> {
        let mut claim: Self = serde_json::from_slice(text).ok()?;
        if claim.hairpin && !claim.ports.is_empty() && claim.opened.is_none() && is_of_earlier_version(text) {
            let to = claim.to.iter().find_map(|to| match to.ip() {
                IpAddr::V4(v4) => Some(v4),
                IpAddr::V6(_) => None,
            });
            claim.opened = to.and_then(sysctl::interface_to);
        }
        Some(claim)
    }

    /// The name of the claim's file.
    pub(super) fn key(&self) -> String {
        [&self.plugin, &self.network, &self.id, &self.ifname].map(|part| part.replace('/', "%")).join("@")
    }

    /// Excepted destinations besides the network itself, sorted.
    fn excepted(&self, network: IpNetwork) -> Vec<IpNetwork> {
        let of_family = |other: &&IpNetwork| other.is_ipv4() == network.is_ipv4() && **other != network;
        let mut except: Vec<IpNetwork> = self.except.iter().filter(of_family).copied().collect();
        except.sort_unstable();
        except.dedup();
        except
    }

    fn mappings(&self) -> impl Iterator<Item = Mapping> {
        self.ports.iter().flat_map(|port| {
            let host_ip = port.host_ip.filter(|ip| !ip.is_unspecified());
            let family = port.host_ip.map(|ip| ip.is_ipv4());
            let to = self
                .to
                .iter()
                .map(IpNetwork::ip)
                .filter(move |to| family.is_none_or(|v4| v4 == to.is_ipv4()));
            to.map(move |to| Mapping {
                host_ip,
                host_port: port.host_port,
                protocol: port.protocol,
                to,
                to_port: port.container_port,
            })
        })
    }
}

/// Whether an earlier version wrote the claim. That version opened the same interface, but did not record it.
fn is_of_earlier_version(text: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Written {
        #[serde(default, deserialize_with = "any")]
        opened: bool,
    }
    fn any<'de, D: serde::Deserializer<'de>>(there: D) -> Result<bool, D::Error> {
        serde::de::IgnoredAny::deserialize(there).map(|_| true)
    }
    serde_json::from_slice::<Written>(text).is_ok_and(|written| !written.opened)
}

/// The table for these claims.
pub(super) fn plan<'a>(claims: impl Iterator<Item = &'a Claim>) -> Plan {
    let mut plan = Plan::default();
    for claim in claims {
        for mapping in claim.mappings() {
            match &claim.conditions[usize::from(mapping.to.is_ipv6())][..] {
                [] => drop(plan.mappings.insert(mapping)),
                conditions => drop(plan.conditional.insert((mapping, conditions.to_vec()))),
            }
        }
        for network in &claim.masquerade {
            // A destination is excepted if all claims except it.
            let except = claim.excepted(*network);
            let all = plan.masquerade.entry(*network);
            all.and_modify(|all| all.retain(|range| except.contains(range))).or_insert(except);
        }
        plan.isolated.extend(claim.isolated.clone());
        plan.opened.extend(claim.opened.clone());
        if claim.ports.is_empty() {
            continue;
        }
        let addresses = || claim.to.iter().map(|to| to.ip());
        if claim.hairpin {
            plan.loopback |= addresses().any(|to| to.is_ipv4());
            plan.hairpin
                .extend(claim.to.iter().filter_map(|to| IpNetwork::new(to.network(), to.prefix()).ok()));
        } else {
            plan.untouched.extend(addresses());
        }
        if claim.masquerade_all {
            plan.masquerade_all.extend(addresses());
        }
    }
    plan
}

/// Refuses a host port that another attachment holds on an overlapping address.
pub(super) fn check_ports<'a>(wanted: &Claim, others: impl Iterator<Item = &'a Claim>) -> Result<(), Error> {
    let ports = HostPorts::of(&wanted.ports);
    for other in others {
        if let Some(port) = other.ports.iter().find_map(|held| ports.conflicting(held)) {
            let (protocol, owner) = (port.protocol.name(), other.id.clone());
            return Err(Error::HostPortTaken { port: port.host_port, protocol, owner });
        }
    }
    Ok(())
}

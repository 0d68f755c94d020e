//! The `portmap` plugin: host ports that are forwarded to a sandbox, in the firewall's nftables table.

use ipnetwork::IpNetwork;
use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;
use crate::firewall::Claim;
use crate::host::Host;
use crate::port_condition::{self, Condition};
use crate::ports::PortMapping;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::Answer;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Conf {
    backend: Option<String>,
    #[serde(default = "enabled")]
    snat: bool,
    #[serde(default)]
    masq_all: bool,
    /// Ignored: the firewall's rules do not mark packets, because conntrack identifies packets to host ports.
    mark_masq_bit: Option<u8>,
    external_set_mark_chain: Option<Value>,
    #[serde(rename = "conditionsV4")]
    conditions_v4: Option<Vec<String>>,
    #[serde(rename = "conditionsV6")]
    conditions_v6: Option<Vec<String>>,
}

fn enabled() -> bool {
    true
}

/// Runs the request. ADD returns the previous result.
pub(crate) fn run(host: &Host, request: &Request) -> Result<Option<Answer>, Error> {
    let conf: Conf = request.own()?;
    conf.check()?;
    ports(request)?;
    match request.command {
        Command::Add => {
            let previous = request.chained()?;
            if let Some(claim) = claim(request)? {
                if claim.to.is_empty() {
                    return Err(Error::invalid(
                        "prevResult",
                        "has no address to which ports can be forwarded",
                    ));
                }
                host.firewall.put(&claim)?;
            }
            return Ok(Some(previous));
        }
        Command::Del => host.firewall.remove(&Claim::of(request))?,
        Command::Check => {
            if let Some(wanted) = claim(request)?
                && !host.firewall.is_applied(&wanted)?
            {
                let (what, reason) = ("the host ports".to_owned(), "they are gone".to_owned());
                return Err(Error::Changed { what, reason });
            }
        }
        Command::Gc => host.firewall.keep_valid(request)?,
        Command::Status | Command::Version => {}
    }
    Ok(None)
}

fn ports(request: &Request) -> Result<Vec<PortMapping>, Error> {
    let ports: Vec<PortMapping> = request.capability("portMappings")?.unwrap_or_default();
    match ports.iter().any(|port| port.host_port == 0 || port.container_port == 0) {
        true => Err(Error::invalid("runtimeConfig.portMappings", "0 is not a port")),
        false => Ok(ports),
    }
}

/// The firewall claim of an attachment: its ports are forwarded to the first address of each family.
pub(crate) fn claim(request: &Request) -> Result<Option<Claim>, Error> {
    let (conf, ports, previous): (Conf, _, _) = (request.own()?, ports(request)?, request.chained()?);
    if ports.is_empty() {
        return Ok(None);
    }
    let first = |v4: bool| {
        let mut of_family =
            previous.addresses_of(&request.ifname).filter(move |ip| ip.address.is_ipv4() == v4);
        of_family.next().map(|ip| ip.address)
    };
    let to: Vec<IpNetwork> = [first(true), first(false)].into_iter().flatten().collect();
    // Replies to 127.0.0.1 of the node come through this interface.
    let opened = previous.routed_by().filter(|_| conf.snat && to.iter().any(IpNetwork::is_ipv4));
    let opened = opened.map(|interface| interface.name.clone());
    let conditions = conf.conditions()?;
    let masquerade_all = conf.snat && conf.masq_all;
    let hairpin = conf.snat;
    Ok(Some(Claim { ports, to, hairpin, opened, masquerade_all, conditions, ..Claim::of(request) }))
}

// === impl Conf ===

impl Conf {
    fn check(&self) -> Result<(), Error> {
        // Both backends of the reference plugin are accepted. The rules are nftables rules with
        // either of them.
        if let Some(backend) = self.backend.as_deref().filter(|b| !["iptables", "nftables"].contains(b)) {
            return Err(Error::invalid("backend", format!("{backend:?} is neither iptables nor nftables")));
        }
        if let Some(bit) = self.mark_masq_bit.filter(|bit| *bit > 31) {
            return Err(Error::invalid("markMasqBit", format!("{bit} is not between 0 and 31")));
        }
        // A configuration with its own iptables chain expects rules that use this chain.
        if let Some(chain) = self.external_set_mark_chain.as_ref().filter(|chain| !chain.is_null()) {
            return Err(Error::unsupported("externalSetMarkChain", chain));
        }
        self.conditions().map(drop)
    }

    /// Conditions for IPv4 and for IPv6.
    fn conditions(&self) -> Result<[Vec<Condition>; 2], Error> {
        let words = |parts: &Option<Vec<String>>| parts.clone().unwrap_or_default();
        Ok([
            port_condition::parse("conditionsV4", &words(&self.conditions_v4), true)?,
            port_condition::parse("conditionsV6", &words(&self.conditions_v6), false)?,
        ])
    }
}

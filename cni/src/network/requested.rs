//! Addresses and hardware address that a sandbox requests (the capabilities `ips` and `mac`).
//!
//! The sandbox gets exactly the requested addresses, or ADD fails. As far as possible, the requests are checked before
//! the sandbox is made.

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use serde_json::Value;

use super::attachment::parameters;
use super::{Attachment, Network};
use crate::error::Error;
use crate::host_local;
use crate::invoke::{Call, Parameters};
use crate::link::derived::{DERIVED, hardware_address};
use crate::link::{format_mac, parse_mac};
use crate::plugin_kind::Kind;
use crate::spec::Command;
use crate::spec::list::{Capabilities, List};
use crate::spec::result::Answer;

const IPS: &str = "ips";
const MAC: &str = "mac";

impl Network {
    /// Checks the requests of a sandbox before the sandbox is made. Refuses addresses outside the network's ranges,
    /// addresses in use, and capabilities that no plugin declares. Asks only our own IPAM plugin: an executable reports
    /// a refused request in [`add`](Self::add).
    ///
    /// # Errors
    /// The request that cannot be fulfilled, and why.
    pub async fn check_requested(&self, at: &Attachment) -> Result<(), Error> {
        if !requests_any(&at.capabilities) {
            return Ok(());
        }
        let (at, list) = (parameters(at), self.inner.state.read().await.list.clone());
        // Without a list there is no network. ADD reports that.
        let Some(list) = list else { return Ok(()) };
        match self.check_available(&list, &at) {
            Err(error) if error.is_taken() && self.remove_released().await => {
                self.check_available(&list, &at)
            }
            checked => checked,
        }
    }

    fn check_available(&self, list: &List, at: &Parameters) -> Result<(), Error> {
        self.check_capabilities(list, at)?;
        let (host, invoker) = (&self.inner.host, self.invoker());
        for plugin in &list.plugins {
            let ipam = plugin.get("ipam").and_then(|ipam| ipam.get("type")).and_then(Value::as_str);
            // An executable may use another program with the name host-local.
            let ours = plugin.get("type").is_some_and(|kind| kind.as_str().and_then(Kind::parse).is_some());
            if ours && ipam == Some(Kind::HostLocal.name()) {
                let request = invoker.request(Command::Add, list, plugin, Call { at, previous: None });
                host_local::check_assignable(host, &request)?;
            }
        }
        Ok(())
    }

    /// Refuses capabilities that no plugin declares. Refuses a hardware address that is invalid, that another sandbox
    /// of the network has, or that the network may derive for another sandbox.
    pub(super) fn check_capabilities(&self, list: &List, at: &Parameters) -> Result<(), Error> {
        for capability in [IPS, MAC] {
            if at.capabilities.contains_key(capability) && !list.declares(capability) {
                return Err(Error::Undeclared { network: list.name.clone(), capability });
            }
        }
        let Some(text) = at.capabilities.get(MAC) else { return Ok(()) };
        // Plugins refuse an invalid address in DEL, too, so the attachment could never be removed.
        let mac = text.as_str().and_then(parse_mac).ok_or_else(|| {
            Error::invalid("runtimeConfig.mac", format!("{text} is not a unicast hardware address"))
        })?;
        // A derived hardware address is permitted only with its IPv4 address. Many IPv6 addresses have the same derived
        // address, so a sandbox could choose an IPv6 address to get the hardware address of another sandbox.
        if mac.starts_with(&DERIVED)
            && !requested_addresses(at).any(|ip| ip.is_ipv4() && hardware_address(ip) == mac)
        {
            let why = format!(
                "{text} has the prefix of addresses that the network derives, so another sandbox may get it"
            );
            return Err(Error::invalid("runtimeConfig.mac", why));
        }
        let owner = self.inner.cache.owner_of_mac(&list.name, mac);
        match owner.filter(|owner| *owner != at.container_id) {
            Some(owner) => Err(Error::MacTaken { mac: format_mac(&mac), owner }),
            None => Ok(()),
        }
    }
}

/// Whether a hardware address is requested. No other sandbox of the network may have it. The IPAM plugin ensures that
/// IP addresses are unique.
pub(super) fn needs_unique_mac(at: &Parameters) -> bool {
    at.capabilities.contains_key(MAC)
}

/// Whether an address or a hardware address is requested.
fn requests_any(capabilities: &Capabilities) -> bool {
    [IPS, MAC].iter().any(|name| capabilities.contains_key(*name))
}

fn requested_addresses(at: &Parameters) -> impl Iterator<Item = IpAddr> {
    let requested = at.capabilities.get(IPS).and_then(Value::as_array).into_iter().flatten();
    requested.filter_map(Value::as_str).filter_map(address)
}

/// Refuses an answer without the requested addresses: a plugin may declare a capability and ignore it.
pub(super) fn check_assigned(list: &List, at: &Parameters, answer: &Answer) -> Result<(), Error> {
    let missing = |capability, requested: &str| {
        Err(Error::NotGiven { network: list.name.clone(), capability, requested: requested.to_owned() })
    };
    let requested = at.capabilities.get(IPS).and_then(Value::as_array).into_iter().flatten();
    for text in requested.filter_map(Value::as_str) {
        let given = |address| answer.addresses_of(&at.ifname).any(|ip| ip.address.ip() == address);
        if !address(text).is_some_and(given) {
            return missing(IPS, text);
        }
    }
    let Some(requested) = at.capabilities.get(MAC).and_then(Value::as_str) else { return Ok(()) };
    // Not every plugin lists its interfaces.
    let reported = answer.inside(&at.ifname).map(|inside| inside.mac.as_str()).filter(|mac| !mac.is_empty());
    if reported.is_none_or(|mac| parse_mac(mac) == parse_mac(requested)) {
        Ok(())
    } else {
        missing(MAC, requested)
    }
}

fn address(text: &str) -> Option<IpAddr> {
    text.parse::<IpNetwork>().ok().map(|network| network.ip())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::spec::Version;

    fn given(requested: Value, answer: Value) -> Result<(), String> {
        let list = json!({"cniVersion": "1.0.0", "name": "n", "type": "x"});
        let requested = serde_json::from_value(requested).unwrap();
        let at = Attachment { ifname: "eth0".into(), capabilities: requested, ..Attachment::default() };
        let answer = Answer::parse(answer, Version::V1_0_0).unwrap();
        check_assigned(&List::parse(list).unwrap(), &parameters(&at), &answer).map_err(|e| e.to_string())
    }

    #[test]
    fn an_answer_without_a_requested_address_is_refused() {
        let answer = json!({"interfaces": [{"name": "eth0", "mac": "0A:00:00:00:00:01", "sandbox": "/n"}],
            "ips": [{"address": "10.0.0.2/24", "interface": 0}, {"address": "fd00::2/64", "interface": 0}]});
        for good in [
            json!({}),
            json!({"ips": ["10.0.0.2"], "mac": "0a:00:00:00:00:01"}),
            json!({"ips": ["fd00::2/64", "10.0.0.2/16"]}),
        ] {
            assert_eq!(given(good.clone(), answer.clone()), Ok(()), "{good}");
        }
        for (bad, message) in [
            (json!({"ips": ["10.0.0.3"]}), "10.0.0.3"),
            (json!({"ips": ["10.0.0.2", "fd00::3"]}), "fd00::3"),
            (json!({"mac": "0a:00:00:00:00:02"}), "0a:00:00:00:00:02"),
        ] {
            let error = given(bad, answer.clone()).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
        assert_eq!(
            given(json!({"mac": "0a:00:00:00:00:02"}), json!({})),
            Ok(()),
            "the plugin lists no interface"
        );
    }
}

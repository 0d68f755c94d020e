//! Addresses and the hardware address that a sandbox asks for (the capabilities `ips` and `mac`): it gets just these,
//! or nothing at all. What can be refused is refused before anything is made.

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use serde_json::Value;

use super::{Attachment, Network, parameters};
use crate::bridge::{DERIVED, hardware_address};
use crate::error::Error;
use crate::host_local;
use crate::invoke::Parameters;
use crate::link::{format_mac, parse_mac};
use crate::plugin::Kind;
use crate::spec::Command;
use crate::spec::list::{Capabilities, List};
use crate::spec::result::Answer;

const IPS: &str = "ips";
const MAC: &str = "mac";

impl Network {
    /// Refuses what a sandbox asks for and would not get now, before there is a sandbox: addresses that the network
    /// does not have or that are taken, and whatever its plugins do not declare. As far as plugins of our own give
    /// them; what others say is heard at [`add`](Self::add).
    ///
    /// # Errors
    /// Why it would not get it.
    pub async fn check_asked(&self, at: &Attachment) -> Result<(), Error> {
        if !asks(&at.capabilities) {
            return Ok(());
        }
        let (at, list) = (parameters(at), self.inner.state.read().await.list.clone());
        // That there is no network is told when it is needed.
        let Some(list) = list else { return Ok(()) };
        match self.would_give(&list, &at) {
            Err(error) if error.is_taken() && self.inner.leaving.sweep(self).await => {
                self.would_give(&list, &at)
            }
            would => would,
        }
    }

    fn would_give(&self, list: &List, at: &Parameters) -> Result<(), Error> {
        self.may_ask(list, at)?;
        let (host, invoker) = (&self.inner.host, self.invoker());
        for plugin in &list.plugins {
            let ipam = plugin.get("ipam").and_then(|ipam| ipam.get("type")).and_then(Value::as_str);
            // Those who are asked by a plugin of others need not be ours, whatever they are called.
            let ours = plugin.get("type").is_some_and(|kind| kind.as_str().and_then(Kind::parse).is_some());
            if ours && ipam == Some(Kind::HostLocal.name()) {
                let request = invoker.request(Command::Add, list, plugin, (at, None));
                host_local::would_give(host, &request)?;
            }
        }
        Ok(())
    }

    /// Refuses what no plugin declares, and a hardware address that another sandbox of the network has.
    pub(super) fn may_ask(&self, list: &List, at: &Parameters) -> Result<(), Error> {
        for capability in [IPS, MAC] {
            if at.capabilities.contains_key(capability) && !list.declares(capability) {
                return Err(Error::Undeclared { network: list.name.clone(), capability });
            }
        }
        let Some(text) = at.capabilities.get(MAC) else { return Ok(()) };
        // One that no plugin can read would be refused by its DEL, too.
        let mac = text.as_str().and_then(parse_mac).ok_or_else(|| {
            Error::invalid("runtimeConfig.mac", format!("{text} is no hardware address of one interface"))
        })?;
        if mac.starts_with(&DERIVED) && !asked_addresses(at).any(|address| hardware_address(address) == mac) {
            let why =
                format!("{text} may come to be another sandbox's: what begins so follows from addresses");
            return Err(Error::invalid("runtimeConfig.mac", why));
        }
        let owner = self.inner.cache.owner_of_mac(&list.name, mac);
        match owner.filter(|owner| *owner != at.container_id) {
            Some(owner) => Err(Error::MacTaken { mac: format_mac(&mac), owner }),
            None => Ok(()),
        }
    }
}

/// Whether it asks for what nobody else may have, beside the addresses, which their plugin sees to.
pub(super) fn claims(at: &Parameters) -> bool {
    at.capabilities.contains_key(MAC)
}

/// Whether anything is asked for.
fn asks(capabilities: &Capabilities) -> bool {
    [IPS, MAC].iter().any(|name| capabilities.contains_key(*name))
}

fn asked_addresses(at: &Parameters) -> impl Iterator<Item = IpAddr> {
    let asked = at.capabilities.get(IPS).and_then(Value::as_array).into_iter().flatten();
    asked.filter_map(Value::as_str).filter_map(address)
}

/// Refuses an answer that lacks what was asked for: a plugin may declare what it then does not do.
pub(super) fn must_be_given(list: &List, at: &Parameters, answer: &Answer) -> Result<(), Error> {
    let not = |capability, asked: &str| {
        Err(Error::NotGiven { network: list.name.clone(), capability, asked: asked.to_owned() })
    };
    let asked = at.capabilities.get(IPS).and_then(Value::as_array).into_iter().flatten();
    for text in asked.filter_map(Value::as_str) {
        let given = |address| answer.addresses_of(&at.ifname).any(|ip| ip.address.ip() == address);
        if !address(text).is_some_and(given) {
            return not(IPS, text);
        }
    }
    let Some(asked) = at.capabilities.get(MAC).and_then(Value::as_str) else { return Ok(()) };
    // Not every plugin tells which interfaces there are.
    let told = answer.inside(&at.ifname).map(|inside| inside.mac.as_str()).filter(|mac| !mac.is_empty());
    if told.is_none_or(|mac| parse_mac(mac) == parse_mac(asked)) { Ok(()) } else { not(MAC, asked) }
}

fn address(text: &str) -> Option<IpAddr> {
    text.parse::<IpNetwork>().ok().map(|network| network.ip())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::spec::Version;

    fn given(asked: Value, answer: Value) -> Result<(), String> {
        let list = json!({"cniVersion": "1.0.0", "name": "n", "type": "x"});
        let asked = serde_json::from_value(asked).unwrap();
        let at = Attachment { ifname: "eth0".into(), capabilities: asked, ..Attachment::default() };
        let answer = Answer::parse(answer, Version::V1_0_0).unwrap();
        must_be_given(&List::parse(list).unwrap(), &parameters(&at), &answer).map_err(|e| e.to_string())
    }

    #[test]
    fn an_answer_without_what_was_asked_for_is_refused_by_name() {
        let answer = json!({"interfaces": [{"name": "eth0", "mac": "0A:00:00:00:00:01", "sandbox": "/n"}],
            "ips": [{"address": "10.0.0.2/24", "interface": 0}, {"address": "fd00::2/64", "interface": 0}]});
        for good in [
            json!({}),
            json!({"ips": ["10.0.0.2"], "mac": "0a:00:00:00:00:01"}),
            json!({"ips": ["fd00::2/64", "10.0.0.2/16"]}),
        ] {
            assert_eq!(given(good.clone(), answer.clone()), Ok(()), "{good}");
        }
        for (bad, said) in [
            (json!({"ips": ["10.0.0.3"]}), "10.0.0.3"),
            (json!({"ips": ["10.0.0.2", "fd00::3"]}), "fd00::3"),
            (json!({"mac": "0a:00:00:00:00:02"}), "0a:00:00:00:00:02"),
        ] {
            let error = given(bad, answer.clone()).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
        assert_eq!(given(json!({"mac": "0a:00:00:00:00:02"}), json!({})), Ok(()), "nothing is told of it");
    }
}

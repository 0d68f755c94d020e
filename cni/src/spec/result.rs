//! Result of ADD in the newest version, and its conversion from and to older versions.

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Version;
use crate::error::Error;

/// The result of an ADD (section 5 of the specification).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    #[serde(default)]
    pub(crate) interfaces: Vec<Interface>,
    #[serde(default)]
    pub(crate) ips: Vec<Ip>,
    #[serde(default)]
    pub(crate) routes: Vec<Route>,
    #[serde(default)]
    pub(crate) dns: Dns,
}

/// An interface that was made or changed. Without a sandbox, it is an interface of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Interface {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) mac: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<u32>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) sandbox: String,
    #[serde(rename = "socketPath", skip_serializing_if = "String::is_empty")]
    pub(crate) socket_path: String,
    #[serde(rename = "pciID", skip_serializing_if = "String::is_empty")]
    pub(crate) pci_id: String,
}

/// An address, and the index of its interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ip {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) interface: Option<usize>,
    pub(crate) address: IpNetwork,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gateway: Option<IpAddr>,
}

/// A route. Without a gateway, it uses the gateway of the address. Results may contain further fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Route {
    pub(crate) dst: IpNetwork,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gw: Option<IpAddr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) advmss: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) priority: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) table: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) scope: Option<u8>,
}

/// Resolver settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Dns {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) nameservers: Vec<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) domain: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) search: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) options: Vec<String>,
}

// === impl Answer ===

impl Answer {
    /// Reads a result of any version. A result without a version has the version `expected`.
    pub(crate) fn parse(mut value: Value, expected: Version) -> Result<Self, Error> {
        let wrong = |reason: String| Error::Decode { what: "a plugin's result", reason };
        let declared = value.get("cniVersion").and_then(Value::as_str).filter(|text| !text.is_empty());
        let version = declared.unwrap_or(expected.name());
        if Version::parse(version).is_none() {
            return Err(Error::IncompatibleVersion { version: version.to_owned() });
        }
        // Go's encoders write null for an empty list.
        if let Some(map) = value.as_object_mut() {
            map.retain(|_, member| !member.is_null());
        }
        serde_json::from_value(value).map_err(|error| wrong(error.to_string()))
    }

    /// Removes the unused capacity of the lists: a decoded list of one item has room for four.
    pub(crate) fn shrink_to_fit(&mut self) {
        self.interfaces.shrink_to_fit();
        self.ips.shrink_to_fit();
        self.routes.shrink_to_fit();
    }

    /// The result in the format of `version`.
    pub(crate) fn to_value(&self, version: Version) -> Value {
        let mut map = Map::new();
        map.insert("cniVersion".into(), json!(version.name()));
        if !self.interfaces.is_empty() {
            map.insert("interfaces".into(), list(&self.interfaces, |i| i.older(version)));
        }
        if !self.ips.is_empty() {
            map.insert("ips".into(), list(&self.ips, |ip| ip.older(version)));
        }
        if !self.routes.is_empty() {
            map.insert("routes".into(), list(&self.routes, |route| route.older(version)));
        }
        map.insert("dns".into(), json!(self.dns));
        map.into()
    }

    /// Addresses that belong to the interface `ifname` inside the sandbox, or to no interface.
    pub(crate) fn addresses_of(&self, ifname: &str) -> impl Iterator<Item = &Ip> {
        self.ips.iter().filter(move |ip| {
            let of = ip.interface.and_then(|index| self.interfaces.get(index));
            of.is_none_or(|of| of.name == ifname && !of.sandbox.is_empty())
        })
    }

    /// The interface of the host that routes to the sandbox. In a VLAN it is the interface of the VLAN (`br0.100`).
    /// Otherwise it is the first interface of the host: the bridge or the host's end of the pair.
    pub(crate) fn routed_by(&self) -> Option<&Interface> {
        let mut of_host = self.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
        let first = of_host.next()?;
        let is_vlan = |interface: &&Interface| {
            let number = interface.name.strip_prefix(&first.name).and_then(|rest| rest.strip_prefix('.'));
            number.is_some_and(|number| number.parse::<u16>().is_ok())
        };
        Some(of_host.find(is_vlan).unwrap_or(first))
    }

    /// The interface inside the sandbox.
    pub(crate) fn inside(&self, ifname: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|i| i.name == ifname && !i.sandbox.is_empty())
    }
}

fn list<T>(members: &[T], older: impl Fn(&T) -> Value) -> Value {
    members.iter().map(older).collect::<Vec<_>>().into()
}

impl Interface {
    /// Versions before 1.1.0 have only name, hardware address and sandbox.
    fn older(&self, version: Version) -> Value {
        let mut of = self.clone();
        if version < Version::V1_1_0 {
            of = Self { name: of.name, mac: of.mac, sandbox: of.sandbox, ..Self::default() };
        }
        json!(of)
    }
}

impl Ip {
    /// Versions before 1.0.0 also have the family.
    fn older(&self, version: Version) -> Value {
        let mut value = json!(self);
        if version < Version::V1_0_0 {
            value["version"] = json!(if self.address.is_ipv4() { "4" } else { "6" });
        }
        value
    }
}

impl Route {
    /// Fields of a route in the newest version.
    pub(crate) const FIELDS: [&str; 7] = ["dst", "gw", "mtu", "advmss", "priority", "table", "scope"];

    /// Versions before 1.1.0 have only destination and gateway.
    fn older(&self, version: Version) -> Value {
        let plain =
            |dst, gw| Self { dst, gw, mtu: None, advmss: None, priority: None, table: None, scope: None };
        if version < Version::V1_1_0 { json!(plain(self.dst, self.gw)) } else { json!(self) }
    }

    /// The default route by a gateway.
    pub(crate) fn default_by(gateway: IpAddr) -> Self {
        let any = if gateway.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
        // Both constants are valid networks.
        let dst = any.parse().unwrap_or_else(|_| IpNetwork::from(gateway));
        Self { dst, gw: Some(gateway), mtu: None, advmss: None, priority: None, table: None, scope: None }
    }
}

/// Parses any bytes: a result of ADD, which can be written in each version and read again, or an error.
#[cfg(any(test, feature = "fuzzing"))]
pub fn fuzz_result(data: &[u8]) {
    let Ok(value) = serde_json::from_slice(data) else { return };
    let Ok(answer) = Answer::parse(value, Version::NEWEST) else { return };
    for version in Version::ALL {
        assert!(Answer::parse(answer.to_value(version), version).is_ok(), "version {version}");
    }
    let _found = (answer.addresses_of("eth0").count(), answer.routed_by(), answer.inside("eth0"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> Answer {
        let text = json!({"cniVersion": "1.1.0",
            "interfaces": [{"name": "b0", "mac": "00:11:22:33:44:55", "mtu": 1400},
                           {"name": "eth0", "sandbox": "/proc/1/ns/net", "socketPath": "/s", "pciID": "1:2"}],
            "ips": [{"interface": 1, "address": "10.1.0.5/16", "gateway": "10.1.0.1"},
                    {"address": "fd00::5/64"}],
            "routes": [{"dst": "0.0.0.0/0", "mtu": 1300, "table": 7, "priority": 3, "scope": 0, "advmss": 1}],
            "dns": {"nameservers": ["10.1.0.1"], "search": ["a.b"]}});
        Answer::parse(text, Version::V1_1_0).unwrap()
    }

    #[test]
    fn the_newest_version_has_all_fields() {
        assert_eq!(Answer::parse(full().to_value(Version::V1_1_0), Version::V1_1_0).unwrap(), full());
    }

    #[test]
    fn a_sandbox_is_routed_to_by_bridge_pair_or_vlan() {
        let interfaces = |names: &[&str]| {
            let of = |name: &&str| Interface { name: (*name).to_owned(), ..Interface::default() };
            Answer { interfaces: names.iter().map(of).collect(), ..Answer::default() }
        };
        let by = |names: &[&str]| interfaces(names).routed_by().map(|interface| interface.name.clone());
        assert_eq!(by(&["br0", "vetha"]).unwrap(), "br0");
        assert_eq!(by(&["br0", "vetha", "ifba"]).unwrap(), "br0", "of bandwidth");
        assert_eq!(by(&["br0", "vetha", "br0.100", "ifba"]).unwrap(), "br0.100");
        assert_eq!(by(&[]), None);
    }

    #[test]
    fn older_versions_have_fewer_fields() {
        let old = full().to_value(Version::V0_4_0);
        assert_eq!(old["ips"][0]["version"], "4");
        assert_eq!(old["ips"][1]["version"], "6");
        assert_eq!(old["routes"][0], json!({"dst": "0.0.0.0/0"}));
        assert_eq!(old["interfaces"][0], json!({"name": "b0", "mac": "00:11:22:33:44:55"}));
        let one = full().to_value(Version::V1_0_0);
        assert!(one["ips"][0].get("version").is_none());
        let back = Answer::parse(old, Version::V0_4_0).unwrap();
        assert_eq!(back.ips, full().ips);
    }

    #[test]
    fn unknown_fields_of_results_are_ignored() {
        let value = json!({"cniVersion": "1.1.0", "x": 1, "interfaces": [{"name": "b0", "x": 1}],
            "ips": [{"address": "10.1.0.5/16", "x": 1}], "routes": [{"dst": "0.0.0.0/0", "x": {}}], "dns": {"x": 1}});
        let answer = Answer::parse(value, Version::V1_1_0).unwrap();
        assert_eq!(answer.routes[0].dst.to_string(), "0.0.0.0/0");
        let all = json!(full().routes[0]);
        assert!(all.as_object().unwrap().keys().all(|key| Route::FIELDS.contains(&key.as_str())));
    }

    #[test]
    fn an_unknown_version_and_nonsense_are_refused() {
        let error = Answer::parse(json!({"cniVersion": "9.0.0"}), Version::V1_0_0).unwrap_err();
        assert_eq!(error.code(), 1);
        assert_eq!(Answer::parse(json!({"ips": [{"address": "x"}]}), Version::V1_0_0).unwrap_err().code(), 6);
        assert_eq!(Answer::parse(json!({"ips": null}), Version::V1_0_0).unwrap(), Answer::default());
    }
}

//! Configuration of the bridge plugin: each field is honoured, or refused by name.

use std::collections::BTreeSet;

use ipnetwork::IpNetwork;
use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;
use crate::firewall::Claim;
use crate::host_local;
use crate::link::derived::hardware_address;
use crate::link::vlan::{LAST, Vlans};
use crate::link::{format_mac, parse_mac, random_mac};
use crate::spec::is_interface_name;
use crate::spec::request::Request;
use crate::spec::result::{Answer, Dns};

/// The checked configuration.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the reference plugin's configuration")]
pub(crate) struct Conf {
    pub(crate) bridge: String,
    pub(crate) mtu: Option<u32>,
    pub(crate) is_gateway: bool,
    pub(crate) is_default_gateway: bool,
    pub(crate) force_address: bool,
    pub(crate) ip_masq: bool,
    pub(crate) hairpin: bool,
    pub(crate) promiscuous: bool,
    pub(crate) mac_spoof_check: bool,
    pub(crate) enable_dad: bool,
    pub(crate) disable_container_interface: bool,
    pub(crate) port_isolation: bool,
    pub(crate) vlans: Vlans,
    /// Whether the bridge must have no other users. True for the bridge of the default network. Other bridges are
    /// shared.
    pub(crate) ours: bool,
    /// Type of the IPAM plugin.
    pub(crate) ipam: Option<String>,
    pub(crate) dns: Dns,
    /// The requested hardware address.
    mac: Option<[u8; 6]>,
    /// Whether IP addresses are requested.
    requests_ips: bool,
}

/// The configuration as JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the reference plugin's configuration")]
struct JsonConf {
    bridge: String,
    is_gateway: bool,
    is_default_gateway: bool,
    force_address: bool,
    ip_masq: bool,
    ip_masq_backend: Option<String>,
    mtu: u32,
    hairpin_mode: bool,
    promisc_mode: bool,
    vlan: u16,
    vlan_trunk: Option<Vec<Trunk>>,
    preserve_default_vlan: bool,
    macspoofchk: bool,
    enabledad: bool,
    disable_container_interface: bool,
    port_isolation: bool,
    ipam: Option<Value>,
    dns: Dns,
}

/// A part of a trunk: one VLAN, a range, or both.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Trunk {
    id: Option<u16>,
    #[serde(rename = "minID")]
    min: Option<u16>,
    #[serde(rename = "maxID")]
    max: Option<u16>,
}

// === impl Conf ===

impl Conf {
    pub(crate) fn of(request: &Request) -> Result<Self, Error> {
        let written: JsonConf = request.own()?;
        written.check()?;
        let ipam = written.ipam.as_ref().and_then(|ipam| ipam.get("type")).and_then(Value::as_str);
        if ipam.is_some() && written.disable_container_interface {
            return Err(Error::invalid(
                "disableContainerInterface",
                "cannot be combined with ipam: the interface stays down",
            ));
        }
        if ipam.is_none() && (written.is_gateway || written.is_default_gateway) {
            return Err(Error::invalid("isGateway", "needs ipam"));
        }
        let vlans = written.vlans()?;
        let conf = Self {
            vlans,
            mac: requested_mac(request)?,
            // The IPAM plugin reports invalid requests.
            requests_ips: host_local::requested(request).map_or(true, |ips| !ips.is_empty()),
            mtu: Some(written.mtu).filter(|mtu| *mtu != 0),
            is_gateway: written.is_gateway || written.is_default_gateway,
            is_default_gateway: written.is_default_gateway,
            force_address: written.force_address,
            ip_masq: written.ip_masq,
            hairpin: written.hairpin_mode,
            promiscuous: written.promisc_mode,
            mac_spoof_check: written.macspoofchk,
            enable_dad: written.enabledad,
            disable_container_interface: written.disable_container_interface,
            port_isolation: written.port_isolation,
            ours: request.conf.get("coracle").and_then(|own| own.get("ours")) == Some(&Value::Bool(true)),
            ipam: ipam.map(str::to_owned),
            bridge: written.bridge,
            dns: written.dns,
        };
        let gateway = conf.vlans.native.filter(|_| conf.is_gateway).map(|vlan| conf.gateway_of(vlan));
        match gateway.filter(|name| !is_interface_name(name)) {
            Some(name) => Err(Error::invalid("bridge", format!("{name:?} is not a valid interface name"))),
            None => Ok(conf),
        }
    }

    /// The firewall claim of an attachment with these addresses.
    pub(crate) fn claim(&self, request: &Request, answer: &Answer) -> Option<Claim> {
        let networks =
            answer.ips.iter().filter_map(|ip| IpNetwork::new(ip.address.network(), ip.address.prefix()).ok());
        let masquerade: Vec<IpNetwork> = networks.collect();
        let wanted = self.ip_masq && !masquerade.is_empty();
        wanted.then(|| Claim { masquerade, ..Claim::of(request) })
    }

    /// The hardware address of the sandbox: the requested address, or an address that is derived from the sandbox's
    /// first IP address. The bridge's own address is refused.
    ///
    /// A requested IPv6 address gets no derived hardware address. Many IPv6 addresses have the same hash, so a pod
    /// could choose an address with the hash of another pod's address. The first pod would then get the other pod's
    /// frames.
    pub(crate) fn hardware_address(&self, bridge: &[u8], answer: &Answer) -> Result<[u8; 6], Error> {
        if let Some(mac) = self.mac.filter(|mac| mac[..] == *bridge) {
            let why = format!("{} is the address of the bridge", format_mac(&mac));
            return Err(Error::invalid("runtimeConfig.mac", why));
        }
        let first = answer.ips.first().map(|ip| ip.address.ip());
        let derived = first.filter(|ip| ip.is_ipv4() || !self.requests_ips).map(hardware_address);
        Ok(self.mac.or(derived).unwrap_or_else(random_mac))
    }

    /// Name of the host's gateway interface in a VLAN of the bridge.
    pub(crate) fn gateway_of(&self, vlan: u16) -> String {
        format!("{}.{vlan}", self.bridge)
    }
}

impl Default for JsonConf {
    fn default() -> Self {
        Self {
            bridge: "cni0".to_owned(),
            is_gateway: false,
            is_default_gateway: false,
            force_address: false,
            ip_masq: false,
            ip_masq_backend: None,
            mtu: 0,
            hairpin_mode: false,
            promisc_mode: false,
            vlan: 0,
            vlan_trunk: None,
            // As in the reference plugin since 1.8.0, only requested VLANs are set.
            preserve_default_vlan: false,
            macspoofchk: false,
            enabledad: false,
            disable_container_interface: false,
            port_isolation: false,
            ipam: None,
            dns: Dns::default(),
        }
    }
}

impl JsonConf {
    fn check(&self) -> Result<(), Error> {
        if !is_interface_name(&self.bridge) {
            return Err(Error::invalid("bridge", format!("{:?} is not a valid interface name", self.bridge)));
        }
        if self.mtu != 0 && !(68..=65535).contains(&self.mtu) {
            return Err(Error::invalid("mtu", format!("{} is not between 68 and 65535", self.mtu)));
        }
        if self.hairpin_mode && self.promisc_mode {
            return Err(Error::invalid("promiscMode", "cannot be combined with hairpinMode"));
        }
        // Both backends of the reference plugin are accepted. The rules are nftables rules with either
        // of them.
        if let Some(backend) =
            self.ip_masq_backend.as_deref().filter(|b| !["iptables", "nftables"].contains(b))
        {
            return Err(Error::invalid(
                "ipMasqBackend",
                format!("{backend:?} is neither iptables nor nftables"),
            ));
        }
        Ok(())
    }

    fn vlans(&self) -> Result<Vlans, Error> {
        let wrong = |field: &str, number: u16| {
            Error::invalid(field, format!("{number} is not a VLAN ID between 1 and {LAST}"))
        };
        let valid = |vlan: &u16| (1..=LAST).contains(vlan);
        if self.vlan > LAST {
            return Err(wrong("vlan", self.vlan));
        }
        let mut trunk = BTreeSet::new();
        for part in self.vlan_trunk.iter().flatten() {
            let [min, max] = match (part.min, part.max) {
                (Some(min), Some(max)) => [min, max],
                // An empty range.
                (None, None) => [1, 0],
                _ => return Err(Error::invalid("vlanTrunk", "needs both minID and maxID, or neither")),
            };
            let mut named = [part.id, part.min, part.max].into_iter().flatten();
            if let Some(number) = named.find(|vlan| !valid(vlan)) {
                return Err(wrong("vlanTrunk", number));
            }
            if part.min > part.max {
                return Err(Error::invalid("vlanTrunk", format!("its minID {min} is above its maxID {max}")));
            }
            trunk.extend((min..=max).chain(part.id));
        }
        Ok(Vlans {
            native: Some(self.vlan).filter(|vlan| *vlan != 0),
            trunk: trunk.into_iter().collect(),
            keep_default: self.preserve_default_vlan,
        })
    }
}

/// The requested hardware address: from the capability, else from `args`, else from `CNI_ARGS`.
fn requested_mac(request: &Request) -> Result<Option<[u8; 6]>, Error> {
    let by_env = request.env_arg("MAC").filter(|mac| !mac.is_empty()).map(str::to_owned);
    let requested: [(&str, Option<String>); 3] = [
        ("runtimeConfig.mac", request.capability("mac")?),
        ("args.cni.mac", request.conf_arg("mac")?),
        ("CNI_ARGS MAC", by_env),
    ];
    let Some((field, text)) = requested.into_iter().find_map(|(field, text)| Some((field, text?))) else {
        return Ok(None);
    };
    let wrong = || Error::invalid(field, format!("{text:?} is not a unicast hardware address"));
    parse_mac(&text).map(Some).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn conf(fields: Value, args: &str) -> Result<Conf, Error> {
        let mut conf = json!({"cniVersion": "1.0.0", "name": "n", "type": "bridge", "ipam": {"type": "x"}});
        conf.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        Conf::of(&Request::for_test(&conf, args))
    }

    #[test]
    fn defaults_are_those_of_the_reference() {
        let conf = conf(json!({}), "").unwrap();
        assert_eq!((conf.bridge.as_str(), conf.mtu, conf.is_gateway), ("cni0", None, false));
    }

    #[test]
    fn a_default_gateway_is_a_gateway_and_address_requests_have_precedences() {
        assert!(conf(json!({"isDefaultGateway": true}), "").unwrap().is_gateway);
        let given = json!({"runtimeConfig": {"mac": "0a:00:00:00:00:01"}, "args": {"cni": {"mac": "0a:00:00:00:00:02"}}});
        assert_eq!(conf(given, "MAC=0a:00:00:00:00:03").unwrap().mac.unwrap()[5], 1);
        assert_eq!(conf(json!({}), "MAC=0a:00:00:00:00:03").unwrap().mac.unwrap()[5], 3);
    }

    #[test]
    fn a_trunk_is_the_sum_of_its_parts() {
        let trunk = json!([{"minID": 7, "maxID": 9, "id": 3}, {"id": 8}, {}]);
        let vlans = conf(json!({"vlan": 5, "vlanTrunk": trunk}), "").unwrap().vlans;
        assert_eq!((vlans.native, vlans.trunk, vlans.keep_default), (Some(5), vec![3, 7, 8, 9], false));
        assert!(!conf(json!({"vlan": 0, "vlanTrunk": null}), "").unwrap().vlans.any());
    }

    #[test]
    fn every_wrong_field_is_named() {
        for (fields, code, message) in [
            (json!({"bridge": ""}), 7, "bridge"),
            (json!({"bridge": "a/b"}), 7, "bridge"),
            (json!({"bridge": "sixteenletters16"}), 7, "bridge"),
            (json!({"bridge": 1}), 7, "invalid type"),
            (json!({"isGateway": "yes"}), 7, "invalid type"),
            (json!({"mtu": -1}), 7, "invalid"),
            (json!({"mtu": 67}), 7, "mtu"),
            (json!({"mtu": 65536}), 7, "mtu"),
            (json!({"hairpinMode": true, "promiscMode": true}), 7, "promiscMode"),
            (json!({"ipMasqBackend": "ebpf"}), 7, "ipMasqBackend"),
            (json!({"vlan": 4095}), 7, "vlan"),
            (json!({"bridge": "twelveletter", "vlan": 100, "isGateway": true}), 7, "twelveletter.100"),
            (json!({"vlan": 70000}), 7, "invalid"),
            (json!({"vlan": -1}), 7, "invalid"),
            (json!({"vlanTrunk": 3}), 7, "invalid"),
            (json!({"vlanTrunk": [{"id": 0}]}), 7, "vlanTrunk"),
            (json!({"vlanTrunk": [{"id": 4095}]}), 7, "vlanTrunk"),
            (json!({"vlanTrunk": [{"minID": 3}]}), 7, "vlanTrunk"),
            (json!({"vlanTrunk": [{"maxID": 3}]}), 7, "vlanTrunk"),
            (json!({"vlanTrunk": [{"minID": 4, "maxID": 3}]}), 7, "vlanTrunk"),
            (json!({"vlanTrunk": [{"minID": 0, "maxID": 3}]}), 7, "vlanTrunk"),
            (json!({"vlanTrunk": [{"ID": 3}]}), 2, "ID"),
            (json!({"disableContainerInterface": true}), 7, "disableContainerInterface"),
            (json!({"isGateway": true, "ipam": {}}), 7, "isGateway"),
            (json!({"dns": {"nameservers": 1}}), 7, "invalid type"),
            (json!({"runtimeConfig": {"mac": "01:00:00:00:00:01"}}), 7, "runtimeConfig.mac"),
            (json!({"args": {"cni": {"mac": "x"}}}), 7, "args.cni.mac"),
            (json!({"isGatway": true}), 2, "isGatway"),
        ] {
            let error = conf(fields.clone(), "").unwrap_err();
            assert!(error.code() == code && error.to_string().contains(message), "{fields}: {error}");
        }
        assert_eq!(conf(json!({}), "MAC=x").unwrap_err().code(), 7);
    }
}

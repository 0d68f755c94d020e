//! VLANs of the bridge plugin. Without CONFIG_BRIDGE_VLAN_FILTERING, the plugin returns an error that names the option.

use std::process::Command;

use coracle_integration::{Machine, on_a_machine, skip, within};
use coracle_testing::{in_new_namespace, run};
use serde_json::{Value, json};

use crate::plugins::{Plugins, Sandbox, addresses, normalized};
use crate::{network, observe};

/// Whether the kernel has CONFIG_BRIDGE_VLAN_FILTERING.
fn has_vlan_filtering() -> bool {
    let created =
        Command::new("ip").args(["link", "add", "probe0", "type", "bridge", "vlan_filtering", "1"]).status();
    let supported = created.unwrap().success();
    if supported {
        run("ip", &["link", "del", "probe0"]);
    }
    assert!(
        supported || std::env::var_os("MUST_FILTER_VLANS").is_none(),
        "MUST_FILTER_VLANS is set, but the kernel has no CONFIG_BRIDGE_VLAN_FILTERING"
    );
    supported
}

/// A sandbox in a VLAN, with its own IPAM configuration. All members share one bridge.
struct Member {
    sandbox: Sandbox,
    conf: Value,
    id: String,
}

// === impl Member ===

impl Member {
    /// Creates a member with the address `192.0.2.<number>`.
    fn new(machine: &Machine, number: u8, fields: &Value) -> Self {
        let address = format!("192.0.2.{number}");
        let ipam =
            json!({"ranges": [[{"subnet": "192.0.2.0/24", "rangeStart": address, "rangeEnd": address}]]});
        let dir = machine.path(&format!("addresses-{number}"));
        let conf = network("1.0.0", &dir, fields, &ipam);
        Self { sandbox: Sandbox::new(), conf, id: format!("c{number}") }
    }

    fn call(&self, plugins: &Plugins, command: &str) -> Result<Value, Value> {
        plugins.plugin("bridge").call(
            command,
            &self.id,
            &self.sandbox,
            &plugins.with_settings(self.conf.clone()),
        )
    }

    fn added(mut self, plugins: &Plugins) -> Self {
        let result = self.call(plugins, "ADD").unwrap();
        self.conf["prevResult"] = result;
        self.call(plugins, "CHECK").unwrap();
        self
    }

    fn port(&self) -> &str {
        self.conf["prevResult"]["interfaces"][1]["name"].as_str().unwrap()
    }

    /// Whether an address responds to the sandbox within a minute.
    fn reaches(&self, number: u8) -> bool {
        within(10, || self.answered(number)).is_some()
    }

    /// Whether an address responds to one ping of the sandbox.
    fn answered(&self, number: u8) -> bool {
        let command = format!("ping -q -c 1 -W 1 192.0.2.{number} >/dev/null 2>&1 && echo yes || echo no");
        self.sandbox.run(&["sh", "-c", &command]).trim() == "yes"
    }
}

/// VLANs of a port: ids and flags.
fn vlans(port: &str) -> Vec<(u64, Vec<String>)> {
    let all: Value = serde_json::from_str(&run("bridge", &["-j", "vlan", "show", "dev", port])).unwrap();
    let entries = all[0]["vlans"].as_array().unwrap().clone();
    let flags = |entry: &Value| {
        let flags = entry["flags"].as_array().cloned().unwrap_or_default();
        flags.iter().map(|flag| flag.as_str().unwrap().to_owned()).collect()
    };
    entries.iter().map(|entry| (entry["vlan"].as_u64().unwrap(), flags(entry))).collect()
}

const OWN: [&str; 2] = ["PVID", "Egress Untagged"];

#[test]
fn vlans_of_a_bridge_are_isolated_and_a_trunk_reaches_both() {
    on_a_machine(|machine| {
        let plugins = Plugins::of("coracle", &machine.path(""));
        let member = |number: u8, fields: Value| Member::new(machine, number, &fields);
        if !has_vlan_filtering() {
            for (field, value) in [("vlan", json!(100)), ("vlanTrunk", json!([{"id": 100}]))] {
                let links = run("ip", &["-o", "link"]);
                let error = member(9, json!({field: value})).call(&plugins, "ADD").unwrap_err();
                assert!(error["msg"].as_str().unwrap().contains("CONFIG_BRIDGE_VLAN_FILTERING"), "{error}");
                assert_eq!(run("ip", &["-o", "link"]), links);
                assert_eq!(addresses(&machine.path("addresses-9/net")), [""; 0]);
            }
            skip!("the kernel has no CONFIG_BRIDGE_VLAN_FILTERING");
        }
        let one = member(11, json!({"vlan": 100})).added(&plugins);
        let two = member(12, json!({"vlan": 100})).added(&plugins);
        let other = member(13, json!({"vlan": 200})).added(&plugins);
        let plain = member(14, json!({})).added(&plugins);
        let kept = member(15, json!({"vlan": 200, "preserveDefaultVlan": true})).added(&plugins);
        let own = |vlan: u64| (vlan, OWN.map(str::to_owned).to_vec());
        assert_eq!(vlans(one.port()), [own(100)]);
        assert_eq!(vlans(kept.port()), [(1, vec![OWN[1].to_owned()]), own(200)]);
        assert_eq!(vlans(plain.port()), [own(1)]);
        for (from, to, wanted) in [
            (&one, 12, true),
            (&two, 11, true),
            (&one, 13, false),
            (&other, 11, false),
            (&other, 15, true),
            (&plain, 11, false),
            (&one, 14, false),
        ] {
            let reached = if wanted { from.reaches(to) } else { from.answered(to) };
            assert_eq!(reached, wanted, "{} to {to}", from.id);
        }

        // A trunk: tagged packets belong to their VLAN, untagged packets to VLAN 1.
        let trunk = json!([{"minID": 100, "maxID": 102}, {"id": 200}]);
        let trunk = member(16, json!({"vlanTrunk": trunk})).added(&plugins);
        let tagged = |vlan: u64| (vlan, Vec::new());
        assert_eq!(vlans(trunk.port()), [own(1), tagged(100), tagged(101), tagged(102), tagged(200)]);
        assert!(trunk.reaches(14) && !trunk.answered(11));
        for (vlan, inside, outside) in [("100", 11, 13), ("200", 13, 11)] {
            let name = format!("eth0.{vlan}");
            trunk
                .sandbox
                .run(&["ip", "link", "add", "link", "eth0", "name", &name, "type", "vlan", "id", vlan]);
            trunk.sandbox.run(&["ip", "addr", "flush", "dev", "eth0"]);
            trunk.sandbox.run(&["ip", "addr", "add", "192.0.2.16/24", "dev", &name]);
            trunk.sandbox.run(&["ip", "link", "set", &name, "up"]);
            assert!(trunk.reaches(inside) && !trunk.answered(outside), "{name}");
            trunk.sandbox.run(&["ip", "link", "del", &name]);
        }

        // CHECK detects a changed VLAN.
        run("bridge", &["vlan", "add", "dev", other.port(), "vid", "100"]);
        let error = other.call(&plugins, "CHECK").unwrap_err();
        assert!(error["msg"].as_str().unwrap().contains("other VLANs"), "{error}");
        for member in [one, two, other, plain, kept, trunk] {
            member.call(&plugins, "DEL").unwrap();
        }
        assert!(!run("ip", &["-o", "link"]).contains("master br0"));
    });
}

#[test]
fn a_bridge_without_vlan_filtering_is_unchanged() {
    on_a_machine(|machine| {
        if !has_vlan_filtering() {
            skip!("the kernel has no CONFIG_BRIDGE_VLAN_FILTERING");
        }
        let plugins = Plugins::of("coracle", &machine.path(""));
        run("ip", &["link", "add", "br0", "type", "bridge"]);
        let error = Member::new(machine, 11, &json!({"vlan": 100})).call(&plugins, "ADD").unwrap_err();
        assert!(error["msg"].as_str().unwrap().contains("br0 exists"), "{error}");
        assert!(!run("ip", &["-o", "link"]).contains("veth"));
        assert!(run("ip", &["-d", "link", "show", "br0"]).contains("vlan_filtering 0"));
    });
}

#[test]
fn a_vlan_gateway_equals_the_references_field_by_field() {
    if !in_new_namespace(has_vlan_filtering) {
        skip!("the kernel has no CONFIG_BRIDGE_VLAN_FILTERING");
    }
    // Debian's version of the reference always keeps the default VLAN, and does not know `preserveDefaultVlan`.
    for (plugin, ipam) in [
        (
            json!({"vlan": 100, "isGateway": true, "preserveDefaultVlan": true}),
            json!({"subnet": "10.1.2.0/24"}),
        ),
        (
            json!({"vlan": 7, "isDefaultGateway": true, "preserveDefaultVlan": true}),
            json!({"ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "fd01::/64"}]]}),
        ),
    ] {
        for version in ["0.3.1", "1.0.0"] {
            let of = |of| observe(of, version.to_owned(), plugin.clone(), ipam.clone());
            for (ours, theirs) in of("coracle").into_iter().zip(of("reference")) {
                assert_eq!(ours, theirs, "{version} {plugin} {ipam}");
            }
        }
    }
}

#[test]
fn a_gateway_is_only_in_its_vlan_and_implementations_are_interchangeable() {
    on_a_machine(|machine| {
        if !has_vlan_filtering() {
            skip!("the kernel has no CONFIG_BRIDGE_VLAN_FILTERING");
        }
        let [ours, theirs] = ["coracle", "reference"].map(|of| Plugins::of(of, &machine.path("")));
        for (first, second, vlan) in [(&ours, &theirs, 100), (&theirs, &ours, 200)] {
            let fields = json!({"vlan": vlan, "isGateway": true, "forceAddress": true});
            let one = Member::new(machine, 11, &fields).added(first);
            let two = Member::new(machine, 12, &fields).added(second);
            // The gateway has the first address of the range.
            assert!(one.reaches(1) && two.reaches(1) && one.reaches(12), "VLAN {vlan}");
            let result = normalized(&one.conf["prevResult"], &one.sandbox);
            assert_eq!(result["interfaces"][3], json!({"name": format!("br0.{vlan}"), "mac": "some"}));
            one.call(second, "DEL").unwrap();
            two.call(first, "DEL").unwrap();
            run("ip", &["addr", "flush", "dev", &format!("br0.{vlan}")]);
        }
    });
}

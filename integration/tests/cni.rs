//! Coracle's network plugins as executables, compared with the reference plugins (Debian's
//! containernetworking-plugins): same inputs, invalid fields, random kills. Also the reference plugins under Coracle's
//! runtime.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "a test panics, waits, and prints what is left"
)]

#[path = "cni/concurrent_gc.rs"]
mod concurrent_gc;
#[path = "cni/containerd.rs"]
mod containerd;
#[path = "cni/killed.rs"]
mod killed;
#[path = "cni/plugins.rs"]
mod plugins;
#[path = "cni/portmap.rs"]
mod portmap;
#[path = "cni/vlan.rs"]
mod vlan;

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coracle_integration::{Cri, Machine, eventually, on_a_machine};
use coracle_testing::{in_new_namespace, run};
use plugins::{Plugins, Sandbox, normalized};
use serde_json::{Value, json};

/// A network configuration of a CNI version. host-local keeps addresses below `dir`.
fn network(version: &str, dir: &Path, plugin: &Value, ipam: &Value) -> Value {
    let mut conf = json!({"cniVersion": version, "name": "net", "type": "bridge", "bridge": "br0"});
    conf.as_object_mut().unwrap().extend(plugin.as_object().unwrap().clone());
    conf["ipam"] = json!({"type": "host-local", "dataDir": dir});
    conf["ipam"].as_object_mut().unwrap().extend(ipam.as_object().unwrap().clone());
    conf
}

/// Behaviour of an implementation: the result of ADD, the state of sandbox and host, files, and the state after DEL.
fn observe(of: &'static str, version: String, plugin: Value, ipam: Value) -> Vec<(&'static str, Value)> {
    in_new_namespace(move || {
        run("ip", &["link", "set", "lo", "up"]);
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("resolv.conf"), "nameserver 10.0.0.53\nsearch a.b\noptions ndots:2\n")
            .unwrap();
        let mut ipam = ipam;
        if ipam.get("resolvConf").is_some() {
            ipam["resolvConf"] = json!(dir.path().join("resolv.conf"));
        }
        let plugins = Plugins::of(of, dir.path());
        let sandbox = Sandbox::new();
        let conf = plugins.with_settings(network(&version, &dir.path().join("addresses"), &plugin, &ipam));
        let mut observed = Vec::new();
        let result = plugins.plugin("bridge").call("ADD", "c1", &sandbox, &conf).unwrap();
        observed.push(("result", normalized(&result, &sandbox)));
        let json_of = |text: String| serde_json::from_str::<Value>(&text).unwrap();
        for (what, command) in [
            ("addresses", &["ip", "-j", "addr", "show", "eth0"][..]),
            ("routes", &["ip", "-j", "-4", "route"]),
            ("routes6", &["ip", "-j", "-6", "route", "show", "default"]),
        ] {
            observed.push((what, plugins::essence(&json_of(sandbox.run(command)))));
        }
        observed.push(("host", plugins::essence(&json_of(run("ip", &["-j", "addr", "show"])))));
        observed.push(("VLANs", plugins::vlans(&json_of(run("bridge", &["-j", "vlan", "show"])))));
        let port = json_of(run("ip", &["-j", "-d", "link", "show", "master", "br0"]));
        let data = &port[0]["linkinfo"]["info_slave_data"];
        observed.push(("port", json!([data["hairpin"], data["isolated"], port[0]["mtu"]])));
        observed.push(("files", plugins::files(&dir.path().join("addresses/net"))));
        let mut check = conf.clone();
        check["prevResult"] = result;
        if version != "0.3.1" {
            plugins.plugin("bridge").call("CHECK", "c1", &sandbox, &check).unwrap();
        }
        plugins.plugin("bridge").call("DEL", "c1", &sandbox, &check).unwrap();
        plugins.plugin("bridge").call("DEL", "c1", &sandbox, &check).unwrap();
        observed.push(("files after", plugins::files(&dir.path().join("addresses/net"))));
        observed.push(("links after", json!(run("ip", &["-o", "link"]).lines().count())));
        observed
    })
}

#[test]
fn results_and_kernel_state_equal_the_references_field_by_field() {
    let gateway = json!({"isGateway": true, "ipMasq": true});
    let default = json!({"isDefaultGateway": true, "hairpinMode": true, "mtu": 1400});
    let one = json!({"subnet": "10.1.2.0/24", "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.0.2.0/24", "gw": "10.1.2.9"}]});
    let other = json!({"subnet": "10.1.2.0/24", "routes": [{"dst": "192.0.2.0/24", "gw": "10.1.2.9"}]});
    let dual = json!({"ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "fd01::/64"}]]});
    let six = json!({"ranges": [[{"subnet": "fd01::/64", "rangeStart": "fd01::100", "gateway": "fd01::9"}]],
        "routes": [{"dst": "::/0"}]});
    let sets = json!({"ranges": [[{"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.20", "rangeEnd": "10.1.2.30",
        "gateway": "10.1.2.254"}, {"subnet": "10.1.3.0/24"}]]});
    for (plugin, ipam) in [
        (&gateway, &one),
        (&default, &other),
        (&default, &dual),
        (&gateway, &six),
        (&gateway, &sets),
        (&json!({}), &sets),
        (&json!({"dns": {"nameservers": ["192.0.2.53"], "domain": "x.y"}, "promiscMode": true}), &sets),
    ] {
        for version in ["0.3.1", "0.4.0", "1.0.0"] {
            let of = |of| observe(of, version.to_owned(), plugin.clone(), ipam.clone());
            for (ours, theirs) in of("coracle").into_iter().zip(of("reference")) {
                assert_eq!(ours, theirs, "{version} {plugin} {ipam}");
            }
        }
    }
}

#[test]
fn host_local_responds_as_the_reference_does() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("resolv.conf"), "nameserver 10.0.0.53\nsearch a.b\noptions ndots:2\n").unwrap();
    let sandbox = Sandbox::none();
    let of = |of| {
        let plugins = Plugins::of(of, dir.path());
        let addresses = dir.path().join(of).join("addresses");
        let ipam = json!({"ranges": [[{"subnet": "10.1.2.0/29"}], [{"subnet": "fd01::/126"}]]});
        let mut conf = network("1.0.0", &addresses, &json!({}), &ipam);
        conf["ipam"]["resolvConf"] = json!(dir.path().join("resolv.conf"));
        let mut observed = Vec::new();
        for (command, id) in [
            ("ADD", "a"),
            ("ADD", "b"),
            ("DEL", "a"),
            ("DEL", "absent"),
            ("ADD", "c"),
            ("ADD", "d"),
            ("ADD", "e"),
        ] {
            let answer = plugins.plugin("host-local").call(command, id, &sandbox, &conf);
            observed.push(answer.map_err(|_refusal| format!("{command} {id} is refused")));
            observed.push(Ok(plugins::files(&addresses.join("net"))));
        }
        conf["args"] = json!({"cni": {"ips": ["10.1.2.99"]}});
        observed.push(
            plugins
                .plugin("host-local")
                .call("ADD", "f", &sandbox, &conf)
                .map_err(|_refusal| "refused".to_owned()),
        );
        observed
    };
    assert_eq!(of("coracle"), of("reference"));
}

#[test]
fn each_implementation_checks_and_deletes_attachments_of_the_other() {
    on_a_machine(|machine| {
        let [ours, theirs] = ["coracle", "reference"].map(|of| Plugins::of(of, &machine.path("")));
        let ipam = json!({"subnet": "10.1.2.0/24"});
        let conf = network("1.0.0", &machine.path("addresses"), &json!({"isGateway": true}), &ipam);
        let links = || run("ip", &["-o", "link"]).lines().count();
        let before = links();
        for (first, second) in [(&ours, &theirs), (&theirs, &ours)] {
            let (a, b) = (Sandbox::new(), Sandbox::new());
            let created =
                first.plugin("bridge").call("ADD", "a", &a, &first.with_settings(conf.clone())).unwrap();
            let more =
                second.plugin("bridge").call("ADD", "b", &b, &second.with_settings(conf.clone())).unwrap();
            assert_ne!(created["ips"][0]["address"], more["ips"][0]["address"]);
            for (id, sandbox, result, other) in [("a", &a, created, second), ("b", &b, more, first)] {
                let mut conf = other.with_settings(conf.clone());
                conf["prevResult"] = result;
                other.plugin("bridge").call("CHECK", id, sandbox, &conf).unwrap();
                other.plugin("bridge").call("DEL", id, sandbox, &conf).unwrap();
            }
            assert_eq!(links(), before + 1, "the bridge");
        }
    });
}

/// A valid configuration. Each test of an invalid field changes one field.
fn working(machine: &Machine) -> Value {
    network(
        "1.0.0",
        &machine.path("addresses"),
        &json!({"isGateway": true, "ipMasq": true}),
        &json!({"subnet": "10.1.2.0/24"}),
    )
}

#[test]
fn every_invalid_field_is_rejected_and_leaves_nothing() {
    on_a_machine(|machine| {
        let plugins = Plugins::of("coracle", &machine.path(""));
        let sandbox = Sandbox::new();
        let links = run("ip", &["-o", "link"]);
        for (field, wrong, code) in [
            ("cniVersion", json!("0.2.0"), 1),
            ("cniVersion", json!(1), 1),
            ("name", json!("../n"), 7),
            ("bridge", json!("a/b"), 7),
            ("bridge", json!("much-too-long-a-name"), 7),
            ("isGateway", json!("yes"), 7),
            ("isDefaultGateway", json!(1), 7),
            ("forceAddress", json!("x"), 7),
            ("ipMasq", json!([]), 7),
            ("ipMasqBackend", json!("ebpf"), 7),
            ("mtu", json!(1), 7),
            ("hairpinMode", json!(3), 7),
            ("promiscMode", json!("x"), 7),
            ("vlan", json!(4095), 7),
            ("vlanTrunk", json!([{"id": 0}]), 7),
            ("macspoofchk", json!("x"), 7),
            ("enabledad", json!("x"), 7),
            ("preserveDefaultVlan", json!("x"), 7),
            ("disableContainerInterface", json!(true), 7),
            ("portIsolation", json!(7), 7),
            ("dns", json!(7), 7),
            ("isGatway", json!(true), 2),
            ("ipam", json!({"type": "absent"}), 100),
            ("ipam.subnet", json!("10.1.2.0/33"), 7),
            ("ipam.subnet", json!("10.1.2.3/24"), 7),
            ("ipam.subnet", json!("10.1.2.0/31"), 7),
            ("ipam.rangeStart", json!("10.9.9.9"), 7),
            ("ipam.rangeEnd", json!("::1"), 7),
            ("ipam.gateway", json!("::1"), 7),
            ("ipam.ranges", json!([[{"subnet": "10.1.0.0/16"}]]), 7),
            ("ipam.routes", json!([{"dst": "nowhere"}]), 7),
            ("ipam.resolvConf", json!("/absent"), 5),
            ("ipam.colour", json!(1), 2),
            ("args", json!({"cni": {"ips": ["10.1.2.1"]}}), 7),
            ("args", json!({"cni": {"mac": "ff:ff:ff:ff:ff:ff"}}), 7),
            ("runtimeConfig", json!({"ips": ["10.7.7.7"]}), 7),
            ("runtimeConfig", json!({"mac": 7}), 7),
            ("prevResult", json!({"cniVersion": "9.9.9"}), 1),
        ] {
            let mut conf = plugins.with_settings(working(machine));
            match field.split_once('.') {
                Some((outer, inner)) => conf[outer][inner] = wrong.clone(),
                None => conf[field] = wrong.clone(),
            }
            let command = if field == "prevResult" { "CHECK" } else { "ADD" };
            let error = plugins.plugin("bridge").call(command, "c1", &sandbox, &conf).unwrap_err();
            assert_eq!(error["code"], code, "{field}: {wrong}: {error}");
            assert!(!error["msg"].as_str().unwrap().is_empty());
            assert_eq!(run("ip", &["-o", "link"]), links, "{field}: {wrong}");
            assert_eq!(run("nft", &["list", "ruleset"]), "", "{field}: {wrong}");
            assert_eq!(plugins::addresses(&machine.path("addresses/net")), [""; 0], "{field}: {wrong}");
            assert!(!sandbox.run(&["ip", "link"]).contains("eth0"), "{field}: {wrong}");
        }
    });
}

#[test]
fn invalid_fields_of_the_other_plugins_are_named() {
    on_a_machine(|machine| {
        let plugins = Plugins::of("coracle", &machine.path(""));
        let sandbox = Sandbox::new();
        let previous = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.2.3/24"}]});
        for (kind, fields, code) in [
            ("portmap", json!({"backend": "x"}), 7),
            ("portmap", json!({"snat": "x"}), 7),
            ("portmap", json!({"markMasqBit": 32}), 7),
            ("portmap", json!({"externalSetMarkChain": "x"}), 2),
            ("portmap", json!({"conditionsV4": ["x"]}), 2),
            ("portmap", json!({"runtimeConfig": {"portMappings": [{"hostPort": 0, "containerPort": 1}]}}), 7),
            (
                "portmap",
                json!({"runtimeConfig": {"portMappings": [{"hostPort": 99999, "containerPort": 1}]}}),
                7,
            ),
            (
                "portmap",
                json!({"runtimeConfig": {"portMappings": [{"hostPort": 1, "containerPort": 1, "protocol": "icmp"}]}}),
                7,
            ),
            ("bandwidth", json!({"ingressRate": 1000}), 7),
            ("bandwidth", json!({"egressBurst": 1000}), 7),
            ("bandwidth", json!({"ingressRate": -1}), 7),
            ("bandwidth", json!({"rate": 1}), 2),
            ("tuning", json!({"sysctl": {"kernel.hostname": "x"}}), 7),
            ("tuning", json!({"mac": "x"}), 7),
            ("tuning", json!({"mtu": 3}), 7),
            ("tuning", json!({"colour": 3}), 2),
            ("firewall", json!({"backend": "firewalld"}), 7),
            ("firewall", json!({"firewalldZone": "x"}), 2),
            ("firewall", json!({"ingressPolicy": "isolated"}), 7),
            ("firewall", json!({"iptablesAdminChainName": "x"}), 2),
            ("loopback", json!({"colour": 1}), 2),
            ("portmap", json!({"prevResult": null}), 7),
        ] {
            let mut conf =
                json!({"cniVersion": "1.0.0", "name": "net", "type": kind, "prevResult": previous});
            conf.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            let error =
                plugins.plugin(kind).call("ADD", "c1", &sandbox, &plugins.with_settings(conf)).unwrap_err();
            assert_eq!(error["code"], code, "{kind} {fields}: {error}");
            assert_eq!(run("nft", &["list", "ruleset"]), "", "{kind} {fields}");
        }
    });
}

#[test]
fn a_foreign_interface_with_the_bridges_name_is_unchanged() {
    on_a_machine(|machine| {
        let plugins = Plugins::of("coracle", &machine.path(""));
        let sandbox = Sandbox::new();
        let conf = plugins.with_settings(working(machine));
        run("ip", &["link", "add", "br0", "type", "veth", "peer", "name", "br1"]);
        let error = plugins.plugin("bridge").call("ADD", "c1", &sandbox, &conf).unwrap_err();
        assert_eq!(error["msg"], "an interface named br0 exists and is not a bridge");
        run("ip", &["link", "del", "br0"]);
        // A foreign bridge with an address and a port.
        run("ip", &["link", "add", "br0", "type", "bridge"]);
        run("ip", &["addr", "add", "192.0.2.1/24", "dev", "br0"]);
        let before = run("ip", &["-o", "link"]).lines().count();
        let error = plugins.plugin("bridge").call("ADD", "c1", &sandbox, &conf).unwrap_err();
        assert_eq!(
            error["msg"],
            "bridge: br0 has the address 192.0.2.1/24, not 10.1.2.1/24; use forceAddress"
        );
        assert_eq!(run("ip", &["-o", "link"]).lines().count(), before);
        assert_eq!(plugins::addresses(&machine.path("addresses/net")), [""; 0]);
        assert!(run("ip", &["addr", "show", "br0"]).contains("192.0.2.1/24"));
        let mut forced = conf.clone();
        forced["forceAddress"] = json!(true);
        plugins.plugin("bridge").call("ADD", "c1", &sandbox, &forced).unwrap();
        let now = run("ip", &["addr", "show", "br0"]);
        assert!(now.contains("10.1.2.1/24") && !now.contains("192.0.2.1"), "{now}");
        plugins.plugin("bridge").call("DEL", "c1", &sandbox, &forced).unwrap();
    });
}

#[test]
fn a_chain_of_executables_serves_a_port_and_leaves_nothing() {
    on_a_machine(|machine| {
        let plugins = Plugins::of("coracle", &machine.path(""));
        let sandbox = Sandbox::new();
        let conf = plugins.with_settings(working(machine));
        let result = plugins.plugin("bridge").call("ADD", "c1", &sandbox, &conf).unwrap();
        let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "TCP", "hostIP": ""}]);
        let mut ported = plugins
            .with_settings(json!({"cniVersion": "1.0.0", "name": "net", "type": "portmap", "snat": true,
            "runtimeConfig": {"portMappings": ports}, "prevResult": result}));
        assert_eq!(plugins.plugin("portmap").call("ADD", "c1", &sandbox, &ported).unwrap(), result);
        plugins.plugin("portmap").call("CHECK", "c1", &sandbox, &ported).unwrap();
        let listing = run("nft", &["list", "ruleset"]);
        assert!(
            listing.contains("tcp . 8080 : 10.1.2.2 . 80") && listing.contains("masquerade"),
            "{listing}"
        );
        let error = plugins.plugin("portmap").call("ADD", "c2", &sandbox, &ported).unwrap_err();
        assert_eq!(error["msg"], "host port 8080/tcp is taken by sandbox c1");
        run("nft", &["flush", "ruleset"]);
        assert_eq!(
            plugins.plugin("portmap").call("CHECK", "c1", &sandbox, &ported).unwrap_err()["code"],
            101
        );
        // The next change restores all rules.
        ported["runtimeConfig"]["portMappings"][0]["hostPort"] = json!(8081);
        plugins.plugin("portmap").call("ADD", "c2", &sandbox, &ported).unwrap();
        let listing = run("nft", &["list", "ruleset"]);
        assert!(listing.contains("8080") && listing.contains("8081"), "{listing}");
        // GC removes attachments that are not valid.
        let mut gc = ported.clone();
        gc["cni.dev/valid-attachments"] = json!([{"containerID": "c1", "ifname": "eth0"}]);
        plugins.plugin("portmap").call("GC", "", &Sandbox::none(), &gc).unwrap();
        assert!(!run("nft", &["list", "ruleset"]).contains("8081"));
        let mut gc = conf.clone();
        gc["cni.dev/valid-attachments"] = json!([]);
        plugins.plugin("bridge").call("GC", "", &Sandbox::none(), &gc).unwrap();
        plugins.plugin("portmap").call("DEL", "c1", &sandbox, &ported).unwrap();
        assert_eq!(plugins::addresses(&machine.path("addresses/net")), [""; 0]);
        assert_eq!(run("nft", &["list", "ruleset"]), "");
        for kind in ["bridge", "host-local", "loopback", "portmap", "bandwidth", "tuning", "firewall"] {
            let answer = plugins
                .plugin(kind)
                .call("VERSION", "", &Sandbox::none(), &json!({"cniVersion": "1.1.0"}))
                .unwrap();
            assert!(answer["supportedVersions"].as_array().unwrap().contains(&json!("1.1.0")), "{kind}");
        }
        plugins.plugin("bridge").call("STATUS", "", &Sandbox::none(), &conf).unwrap();
    });
}

/// 10,000 operations in eight threads. Every tenth is killed at a random time.
#[test]
fn no_address_is_allocated_twice_or_leaked_when_plugins_are_killed() {
    const THREADS: u64 = 8;
    const OPERATIONS: usize = 10_000 / THREADS as usize;
    let dir = tempfile::tempdir().unwrap();
    let plugins = Arc::new(Plugins::of("coracle", dir.path()));
    let addresses = dir.path().join("addresses");
    let conf = Arc::new(network("1.0.0", &addresses, &json!({}), &json!({"subnet": "10.1.2.0/26"})));
    let allocated: Arc<Mutex<HashMap<String, String>>> = Arc::default();
    let threads = (0..THREADS).map(|thread| {
        let (plugins, conf, allocated) = (Arc::clone(&plugins), Arc::clone(&conf), Arc::clone(&allocated));
        std::thread::spawn(move || add_and_delete(thread, OPERATIONS, &plugins, &conf, &allocated))
    });
    let full: usize = threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).sum();
    assert!(full < 5_000, "the range was exhausted {full} times");
    assert!(allocated.lock().unwrap().is_empty());
    assert_eq!(plugins::addresses(&addresses.join("net")), [""; 0]);
}

/// One thread: random ADDs and DELs with up to eight attachments. Returns how often the range was exhausted.
fn add_and_delete(
    thread: u64,
    operations: usize,
    plugins: &Plugins,
    conf: &Value,
    allocated: &Mutex<HashMap<String, String>>,
) -> usize {
    let (none, plugin) = (Sandbox::none(), plugins.plugin("host-local"));
    let (mut random, mut mine, mut full) = (thread * 7919 + 1, Vec::<(String, Option<String>)>::new(), 0);
    let mut random_below = |limit: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % limit
    };
    for number in 0..operations {
        let kill = (random_below(10) == 0).then(|| Duration::from_micros(random_below(6_000)));
        if mine.len() < 8 && (mine.is_empty() || random_below(2) == 0) {
            let id = format!("t{thread}n{number}");
            match plugin.killed_after(kill).run("ADD", &id, &none, conf) {
                Some(Ok(answer)) => {
                    let address = answer["ips"][0]["address"].as_str().unwrap().to_owned();
                    let other = allocated.lock().unwrap().insert(address.clone(), id.clone());
                    assert_eq!(other, None, "{address} is allocated to {id}, too");
                    mine.push((id, Some(address)));
                }
                Some(Err(error)) => {
                    assert_eq!(error["code"], 11, "{error}");
                    full += 1;
                }
                // The plugin was killed, so the caller does not know the result and must call DEL.
                None => mine.push((id, None)),
            }
        } else {
            let (id, address) = mine.swap_remove(usize::try_from(random_below(mine.len() as u64)).unwrap());
            if let Some(address) = &address {
                allocated.lock().unwrap().remove(address);
            }
            // The caller repeats a DEL that was killed.
            if plugin.killed_after(kill).run("DEL", &id, &none, conf).is_none() {
                mine.push((id, None));
            }
        }
    }
    for (id, address) in mine {
        allocated.lock().unwrap().remove(&address.unwrap_or_default());
        plugin.call("DEL", &id, &none, conf).unwrap();
    }
    full
}

#[test]
fn installing_creates_links_and_keeps_foreign_files() {
    let dir = tempfile::tempdir().unwrap();
    let install = |more: &[&str]| {
        let mut command = std::process::Command::new(Machine::coracle());
        command.args(["cni", "install"]).arg(dir.path().join("bin")).args(more).output().unwrap()
    };
    assert!(install(&[]).status.success() && install(&[]).status.success());
    assert_eq!(fs::read_dir(dir.path().join("bin")).unwrap().count(), 7);
    fs::remove_file(dir.path().join("bin/portmap")).unwrap();
    fs::write(dir.path().join("bin/portmap"), "another's").unwrap();
    let refused = install(&[]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("portmap exists and is not a link"));
    assert!(install(&["--force"]).status.success());
    assert!(dir.path().join("bin/portmap").is_symlink());
}

/// Runs a pod with the reference's portmap plugin. The plugin's file gets another name, because Coracle's runtime
/// implements `portmap` itself.
fn reference_portmap_serves_a_pod(machine: &Machine, cri: &Cri, pod: &Value) {
    let bin = machine.path("bin");
    fs::create_dir_all(&bin).unwrap();
    std::os::unix::fs::symlink("/usr/lib/cni/portmap", bin.join("portmap-reference")).unwrap();
    let list = json!({"cniVersion": "1.0.0", "name": "theirs", "plugins": [
        {"type": "ptp", "ipam": {"type": "host-local", "dataDir": machine.path("addresses"),
            "subnet": "10.67.0.0/24"}},
        {"type": "portmap-reference", "capabilities": {"portMappings": true}}]});
    // The rename is atomic: an ADD with a partly written list would fail.
    fs::write(machine.path("net.d").join("10.new"), list.to_string()).unwrap();
    fs::rename(machine.path("net.d").join("10.new"), machine.path("net.d").join("10.conflist")).unwrap();
    let pod = pod.to_string().replace("\"1\"", "\"2\"").replace("web", "other");
    fs::write(machine.path("pod.json"), pod).unwrap();
    let id = eventually("a pod with the reference's list", 30, || {
        let id = cri.crictl(&["runp", machine.path("pod.json").to_str().unwrap()]);
        let has_address = cri.json(&["inspectp", &id])["status"]["network"]["ip"] == "10.67.0.2";
        if !has_address {
            cri.crictl(&["rmp", "--force", &id]);
        }
        has_address.then_some(id)
    });
    let rules = || run("iptables", &["-t", "nat", "-S"]);
    assert!(rules().contains("10.67.0.2:80"), "{}", rules());
    cri.crictl(&["stopp", &id]);
    assert!(!rules().contains("10.67.0.2:80"), "{}", rules());
    assert_eq!(plugins::addresses(&machine.path("addresses/theirs")), [""; 0]);
    cri.crictl(&["rmp", &id]);
}

#[test]
fn our_runtime_runs_a_third_party_list_and_reports_its_state() {
    on_a_machine(|machine| {
        let conf = machine.path("net.d");
        fs::create_dir_all(&conf).unwrap();
        let list = json!({"cniVersion": "1.0.0", "name": "third", "plugins": [
            {"type": "ptp", "ipam": {"type": "host-local", "dataDir": machine.path("addresses"),
                "subnet": "10.66.0.0/24"}},
            {"type": "portmap", "capabilities": {"portMappings": true}}]});
        let (conf, bin, theirs) = (conf.to_str().unwrap(), "/usr/lib/cni", machine.path("bin"));
        let cri = Cri::runtime_with(
            machine,
            &machine.path("none"),
            &["--cni-conf-dir", conf, "--cni-bin-dir", bin, "--cni-bin-dir", theirs.to_str().unwrap()],
        );
        let ready = || {
            let info = cri.json(&["info"]);
            let conditions = info["status"]["conditions"].as_array().unwrap().clone();
            let network = conditions.into_iter().find(|c| c["type"] == "NetworkReady").unwrap();
            (network["status"] == true, network["message"].as_str().unwrap_or_default().to_owned())
        };
        assert!(ready().0, "the default network is not ready");
        fs::write(format!("{conf}/10.conflist"), r#"{"cniVersion":"1.0.0","name":"n","type":"absent"}"#)
            .unwrap();
        eventually("the error of the invalid list", 5, || {
            Some(ready()).filter(|r| !r.0 && r.1.contains("cannot find the plugin absent"))
        });
        fs::write(format!("{conf}/10.conflist"), list.to_string()).unwrap();
        eventually("the valid list", 5, || Some(ready()).filter(|r| r.0));
        let pod = json!({"metadata": {"name": "web", "namespace": "default", "uid": "1"}, "linux": {},
            "port_mappings": [{"protocol": 0, "container_port": 80, "host_port": 8080}]});
        fs::write(machine.path("pod.json"), pod.to_string()).unwrap();
        let id = cri.crictl(&["runp", machine.path("pod.json").to_str().unwrap()]);
        assert_eq!(cri.json(&["inspectp", &id])["status"]["network"]["ip"], "10.66.0.2");
        assert!(run("nft", &["list", "ruleset"]).contains("tcp . 8080 : 10.66.0.2 . 80"));
        assert!(run("ip", &["route"]).contains("10.66.0.2 dev veth"));
        cri.crictl(&["stopp", &id]);
        assert_eq!(plugins::addresses(&machine.path("addresses/third")), [""; 0]);
        assert!(!run("nft", &["list", "ruleset"]).contains("8080"));
        cri.crictl(&["rmp", &id]);
        reference_portmap_serves_a_pod(machine, &cri, &pod);
        cri.down();
    });
}

/// Arguments that the runtime passes to a plugin: the pod's name in `CNI_ARGS`, annotations and ports as capabilities.
#[test]
fn a_plugin_receives_the_pods_name_and_bandwidth() {
    on_a_machine(|machine| {
        let [conf, bin, log] = ["net.d", "bin", "log"].map(|name| machine.path(name));
        for dir in [&conf, &bin] {
            fs::create_dir_all(dir).unwrap();
        }
        let script = format!(
            "#!/bin/sh\nc=$(cat)\necho \"$CNI_COMMAND|$CNI_IFNAME|$CNI_ARGS|$c\" >>{}\n\
             [ $CNI_COMMAND != ADD ] || echo '{{\"cniVersion\":\"1.0.0\",\"ips\":[{{\"address\":\"10.1.1.1/32\"}}]}}'\n",
            log.display()
        );
        fs::write(bin.join("recorder"), script).unwrap();
        fs::set_permissions(bin.join("recorder"), fs::Permissions::from_mode(0o755)).unwrap();
        let list = json!({"cniVersion": "1.0.0", "name": "n", "plugins": [
            {"type": "recorder", "capabilities": {"bandwidth": true, "portMappings": true}}]});
        fs::write(conf.join("10.conflist"), list.to_string()).unwrap();
        let flags = ["--cni-conf-dir", conf.to_str().unwrap(), "--cni-bin-dir", bin.to_str().unwrap()];
        let cri = Cri::runtime_with(machine, &machine.path("none"), &flags);
        let pod = json!({"metadata": {"name": "web", "namespace": "shop", "uid": "u-1"}, "linux": {},
            "annotations": {"kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "20M"},
            "port_mappings": [{"protocol": 0, "container_port": 80, "host_port": 8080}]});
        fs::write(machine.path("pod.json"), pod.to_string()).unwrap();
        let id = cri.crictl(&["runp", machine.path("pod.json").to_str().unwrap()]);
        assert_eq!(cri.json(&["inspectp", &id])["status"]["network"]["ip"], "10.1.1.1");
        cri.crictl(&["stopp", &id]);
        let calls = fs::read_to_string(&log).unwrap();
        for command in ["ADD", "DEL"] {
            let line = calls.lines().find(|line| line.starts_with(command)).unwrap();
            let [_, interface, arguments, received] = line.splitn(4, '|').collect::<Vec<_>>()[..] else {
                panic!("{line}")
            };
            assert_eq!(interface, "eth0");
            for argument in [
                "IgnoreUnknown=1".to_owned(),
                "K8S_POD_NAMESPACE=shop".to_owned(),
                "K8S_POD_NAME=web".to_owned(),
                "K8S_POD_UID=u-1".to_owned(),
                format!("K8S_POD_INFRA_CONTAINER_ID={id}"),
            ] {
                assert!(arguments.split(';').any(|one| one == argument), "{argument}: {arguments}");
            }
            let received: Value = serde_json::from_str(received).unwrap();
            let bandwidth = &received["runtimeConfig"]["bandwidth"];
            let rates = (&bandwidth["ingressRate"], &bandwidth["egressRate"]);
            assert_eq!(rates, (&json!(10_000_000), &json!(20_000_000)), "{command}");
            let ports = &received["runtimeConfig"]["portMappings"][0];
            assert_eq!(
                (&ports["hostPort"], &ports["containerPort"]),
                (&json!(8080), &json!(80)),
                "{command}"
            );
        }
        cri.crictl(&["rmp", &id]);
        cri.down();
    });
}

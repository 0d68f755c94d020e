//! Our plugins as executables, killed at every fault point of ADD, DEL and GC. The next DEL and GC remove everything.
//! The test finds the points in the sources. A point that no plugin reaches fails the test.

use std::collections::BTreeSet;
use std::fs;
use std::net::UdpSocket;
use std::path::Path;

use coracle_integration::{Machine, eventually, on_a_machine, repository};
use coracle_testing::run;
use serde_json::{Value, json};

use super::plugins::{Plugins, Sandbox, files};

/// A host port for UDP.
const UDP_PORT: u16 = 8081;

/// A network with several plugins.
struct Chain {
    plugins: Plugins,
    confs: Vec<Value>,
}

/// Fault points of the plugins. `recovery.rs` covers the fault points of the runtime.
fn points(dir: &Path, found: &mut BTreeSet<String>) {
    for path in fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            points(&path, found);
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let named = text.split("coracle_fault::point(\"").skip(1).filter_map(|rest| rest.split('"').next());
        let of_plugins = named.filter(|point| {
            !["network.", "recover.", "virtual-host."].iter().any(|of| point.starts_with(of))
        });
        found.extend(of_plugins.map(str::to_owned));
    }
}

// === impl Chain ===

impl Chain {
    fn of(machine: &Machine) -> Self {
        let plugins = Plugins::of("coracle", &machine.path(""));
        let port = |port, protocol| json!({"hostPort": port, "containerPort": 80, "protocol": protocol});
        let ports = json!({"portMappings": [port(8080, "tcp"), port(UDP_PORT, "udp")]});
        let rates = json!({"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 8_000_000, "egressBurst": 800_000});
        let confs = [
            (
                "bridge",
                json!({"bridge": "br0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
                "ipam": {"type": "host-local", "dataDir": machine.path("addresses"), "subnet": "10.1.2.0/24"}}),
            ),
            (
                "tuning",
                json!({"dataDir": machine.path("tuning"), "mtu": 1400,
                "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}}),
            ),
            ("firewall", json!({"ingressPolicy": "same-bridge"})),
            ("portmap", json!({"snat": true, "runtimeConfig": ports})),
            ("bandwidth", rates),
            ("loopback", json!({})),
        ];
        Self { confs: plugins.configurations(confs), plugins }
    }

    /// Runs one plugin, optionally with an armed point. None if it was killed.
    fn run_one(&self, command: &str, conf: &Value, sandbox: &Sandbox, armed: Option<&str>) -> Option<Value> {
        let kind = conf["type"].as_str().unwrap();
        let id = if command == "GC" { "" } else { "c1" };
        let answer = self.plugins.plugin(kind).armed(armed).run(command, id, sandbox, conf)?;
        Some(answer.unwrap_or_else(|refusal| panic!("{kind} {command} {armed:?}: {refusal}")))
    }

    /// ADD with all plugins; the point is armed from plugin `from` on. Returns the result, or the index of the killed
    /// plugin.
    fn add(&self, sandbox: &Sandbox, armed: &str, from: usize) -> Result<Value, usize> {
        let mut previous = Value::Null;
        for (number, conf) in self.confs.iter().enumerate() {
            let mut conf = conf.clone();
            if !previous.is_null() {
                conf["prevResult"] = previous;
            }
            let armed = Some(armed).filter(|_| number >= from);
            previous = self.run_one("ADD", &conf, sandbox, armed).ok_or(number)?;
        }
        Ok(previous)
    }

    /// DEL in reverse order, repeated for killed plugins. Returns how many were killed.
    fn del(&self, sandbox: &Sandbox, result: Option<&Value>, armed: Option<&str>) -> usize {
        let mut killed = 0;
        for conf in self.confs.iter().rev() {
            let mut conf = conf.clone();
            if let Some(result) = result {
                conf["prevResult"] = result.clone();
            }
            if self.run_one("DEL", &conf, sandbox, armed).is_none() {
                killed += 1;
                self.run_one("DEL", &conf, sandbox, None).unwrap();
            }
        }
        killed
    }

    /// GC without valid attachments, repeated for killed plugins.
    fn gc(&self, armed: &str) {
        for conf in &self.confs {
            let mut conf = conf.clone();
            conf["cni.dev/valid-attachments"] = json!([]);
            if self.run_one("GC", &conf, &Sandbox::none(), Some(armed)).is_none() {
                self.run_one("GC", &conf, &Sandbox::none(), None).unwrap();
            }
        }
    }
}

/// State in the kernel and on disk.
fn resources(machine: &Machine, sandbox: &Sandbox) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (of, links) in [("host", run("ip", &["-o", "link"])), ("pod", sandbox.run(&["ip", "-o", "link"]))] {
        let names = links.lines().filter_map(|line| line.split(": ").nth(1)?.split('@').next());
        found.extend(names.map(|name| format!("{of}: link {name}")));
    }
    for dir in ["addresses/net", "tuning", "plugins/firewall"] {
        let files = files(&machine.path(dir));
        found.extend(files.as_object().unwrap().keys().map(|name| format!("{dir}/{name}")));
    }
    found.extend(run("nft", &["list", "ruleset"]).lines().map(str::to_owned));
    for interface in fs::read_dir("/proc/sys/net/ipv4/conf").unwrap().flatten() {
        // The interface may disappear meanwhile.
        let setting = fs::read_to_string(interface.path().join("route_localnet"));
        if setting.is_ok_and(|value| value.trim() != "0") {
            found.insert(format!("{:?}: route_localnet is set", interface.file_name()));
        }
    }
    found
}

/// Whether conntrack has an entry for the port.
fn conntrack_has_port() -> bool {
    let port = format!("dport={UDP_PORT} ");
    fs::read_to_string("/proc/thread-self/net/nf_conntrack").is_ok_and(|flows| flows.contains(&port))
}

/// Sends a datagram to the port, so that conntrack creates an entry.
fn send_datagram() {
    let socket = UdpSocket::bind("198.51.100.10:0").unwrap();
    socket.send_to(b"x", ("198.51.100.10", UDP_PORT)).unwrap();
}

#[test]
fn a_plugin_killed_at_any_fault_point_leaks_nothing() {
    on_a_machine(|machine| {
        let (chain, sandbox) = (Chain::of(machine), Sandbox::new());
        let result = chain.add(&sandbox, "", 0).unwrap();
        chain.del(&sandbox, Some(&result), None);
        let clean = resources(machine, &sandbox);
        let is_clean = |after: &str| {
            let now = resources(machine, &sandbox);
            let more: Vec<_> = now.difference(&clean).collect();
            assert!(more.is_empty(), "left after {after}: {more:?}");
            assert!(!conntrack_has_port(), "conntrack still has an entry of the host port after {after}");
        };
        let mut found = BTreeSet::new();
        points(&repository().join("cni/src"), &mut found);
        assert!(found.len() > 25, "{found:?}");
        for point in found {
            let (mut from, mut killed) = (0, 0);
            // The first attachment creates the bridge, which stays.
            run("ip", &["link", "del", "br0"]);
            let result = loop {
                match chain.add(&sandbox, &point, from) {
                    Ok(result) => break result,
                    Err(number) => {
                        chain.del(&sandbox, None, None);
                        is_clean(&format!("an ADD that was killed at {point}"));
                        (from, killed) = (number + 1, killed + 1);
                    }
                }
            };
            send_datagram();
            let freed = chain.del(&sandbox, Some(&result), Some(&point));
            is_clean(&format!("a DEL that was killed at {point}"));
            killed += freed;
            // GC has the same steps as DEL, so it does not reach a point that DEL does not reach.
            if freed == 0 {
                assert!(killed > 0, "no plugin reaches {point}");
                continue;
            }
            let result = chain.add(&sandbox, "", 0).unwrap();
            send_datagram();
            chain.gc(&point);
            assert!(
                !conntrack_has_port(),
                "conntrack still has an entry of the host port after a GC that was killed at {point}"
            );
            chain.del(&sandbox, Some(&result), None);
            is_clean(&format!("a GC that was killed at {point}"));
        }
        drop(sandbox);
        eventually("the sandbox's interfaces to be removed", 20, || {
            !run("ip", &["-o", "link"]).contains("veth")
        });
    });
}

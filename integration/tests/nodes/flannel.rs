//! Nodes with flannel and nodes with our agent in one cluster: the published flanneld uses our control plane.

use std::collections::BTreeSet;

use coracle_integration::{Flannel, Host, Machine, Nodes, eventually, on_a_machine, within};
use serde_json::{Value, json};

use super::pods::{Pod, hosts_and_pods_reach_pods, source_address, with_nginx};
use super::{CIDRS, MTU, condition};

/// MTU of flannel's pods with an uplink of 1500 bytes, for both families.
const FLANNELS_MTU: usize = 1450;

/// Properties of a node that determine the entries for it in its peers' kernel tables.
#[derive(Debug)]
struct PeerProperties {
    name: String,
    /// Addresses, IPv4 first, each with its VXLAN device.
    ends: Vec<(String, &'static str)>,
    /// Pod ranges, IPv4 first.
    ranges: Vec<String>,
    pid: u32,
}

/// An entry per peer and family: address, hardware address, next hop, range.
type Entries = BTreeSet<[String; 4]>;

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

impl PeerProperties {
    fn of(nodes: &Nodes, host: &Host, name: &str, devices: [&'static str; 2]) -> Self {
        let ranges: Vec<String> =
            nodes.get(&["node", name])["spec"]["podCIDRs"].as_array().unwrap().iter().map(text).collect();
        let end = |range: &String| {
            let (family, device) = if range.contains(':') { ("-6", devices[1]) } else { ("-4", devices[0]) };
            let links = host.ip(&[family, "addr", "show", "dev", "eth0", "scope", "global"]);
            (text(&links[0]["addr_info"][0]["local"]), device)
        };
        let ends = ranges.iter().map(end).collect();
        Self { name: name.to_owned(), ends, ranges, pid: host.pid() }
    }
}

/// Entries that peers need to reach this node, from its own devices. None if a device does not exist.
fn needed(host: &Host, peer: &PeerProperties) -> Option<Entries> {
    let entry = |((address, device), range): (&(String, &str), &String)| {
        let mac = text(&host.try_json("ip", &["-j", "link", "show", device])?[0]["address"]);
        Some([address.clone(), mac, range.split('/').next().unwrap().to_owned(), range.clone()])
    };
    peer.ends.iter().zip(&peer.ranges).map(entry).collect()
}

/// Entries for peers in a node's kernel. None if the three tables disagree, or a device does not exist.
fn known(host: &Host, peer: &PeerProperties) -> Option<Entries> {
    let mut known = Entries::new();
    for (_, device) in &peer.ends {
        let family = if device.contains("v6") { "-6" } else { "-4" };
        let list = |value: Value| value.as_array().unwrap().clone();
        let fdb = list(host.try_json("bridge", &["-j", "fdb", "show", "dev", device])?);
        let ip = |of: &[&str]| host.try_json("ip", &[&["-j", family], of].concat()).map(list);
        let neighbours = ip(&["neigh", "show", "dev", device, "nud", "permanent"])?;
        let routes = ip(&["route", "show", "dev", device])?;
        let routes: Vec<_> = routes.iter().filter(|route| route["gateway"].is_string()).collect();
        if (fdb.len(), neighbours.len()) != (routes.len(), routes.len()) {
            return None;
        }
        for route in routes {
            let neighbour = neighbours.iter().find(|entry| entry["dst"] == route["gateway"])?;
            let forward = fdb.iter().find(|entry| entry["mac"] == neighbour["lladdr"])?;
            let entry = [&forward["dst"], &neighbour["lladdr"], &route["gateway"], &route["dst"]];
            known.insert(entry.map(text));
        }
    }
    Some(known)
}

/// Routes through the uplink of a node: range and next hop.
fn routed(host: &Host) -> BTreeSet<[String; 2]> {
    let families = ["-4", "-6"].map(|family| host.ip(&[family, "route", "show", "dev", "eth0"]));
    let routes = families.iter().flat_map(|routes| routes.as_array().unwrap());
    let routes = routes.filter(|route| route["gateway"].is_string());
    routes.map(|route| [text(&route["dst"]), text(&route["gateway"])]).collect()
}

/// Forwarding entries of a node's VXLAN devices. None if a device disappears meanwhile.
fn tunnelled(host: &Host) -> Option<Vec<Value>> {
    let links = host.ip(&["link", "show", "type", "vxlan"]);
    let names = links.as_array().unwrap().iter().filter_map(|link| link["ifname"].as_str());
    let entries = names.map(|name| host.try_json("bridge", &["-j", "fdb", "show", "dev", name]));
    let entries: Option<Vec<Value>> = entries.collect();
    Some(entries?.iter().flat_map(|entries| entries.as_array().unwrap().clone()).collect())
}

/// Counters of a host's kernel per family: echo replies, and "port unreachable" messages.
fn answered(host: &Host) -> [[u64; 2]; 2] {
    let (v4, v6) = (host.run("cat", &["/proc/net/snmp"]), host.run("cat", &["/proc/net/snmp6"]));
    let of_v4 = |protocol: &str, name: &str| {
        let mut lines = v4.lines().filter(|line| line.starts_with(protocol));
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let place = names.split_whitespace().position(|each| each == name).unwrap();
        values.split_whitespace().nth(place).unwrap().parse().unwrap()
    };
    let of_v6 = |name: &str| {
        let value = v6.lines().find_map(|line| line.strip_prefix(name).map(str::trim)).unwrap();
        value.parse().unwrap()
    };
    [
        [of_v4("Icmp:", "OutEchoReps"), of_v4("Udp:", "NoPorts")],
        [of_v6("Icmp6OutEchoReplies"), of_v6("Udp6NoPorts")],
    ]
}

/// Asserts that our agents probe a node with flannel that has no pods, and therefore no bridge, and report no fault.
fn assert_healthy_without_pods(nodes: &Nodes, flannel: &Flannel, cidrs: &str) {
    let bridges = flannel.host().ip(&["link", "show", "type", "bridge"]);
    assert_eq!(bridges, json!([]));
    // Each node sends a small and a full-size echo request, and two datagrams, which the kernel may count as one.
    let each = u64::try_from(nodes.agents().len()).unwrap();
    eventually("our agents to probe flannel's node", 30, || {
        let answered = answered(flannel.host());
        let well = |v6: bool| {
            let [echoes, datagrams] = answered[usize::from(v6)];
            echoes >= 2 * each && datagrams >= each
        };
        cidrs.split(',').all(|cidr| well(cidr.contains(':')))
    });
    // A fault is reported if a second probe, one second later, confirms it.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while std::time::Instant::now() < end {
        for agent in nodes.agents() {
            assert_eq!(condition(nodes, agent.name(), "PodNetworkImpaired"), "False");
        }
    }
}

/// Nodes with flannel and with our agent, and a pod on each.
struct MixedCluster {
    nodes: Nodes,
    flannel: Flannel,
    pods: Vec<Pod>,
}

impl MixedCluster {
    fn up(machine: &mut Machine, cidrs: &str) -> Self {
        Self::of(machine, cidrs, &[], &json!({"Type": "vxlan"}))
    }

    /// Creates the cluster, with more flags for our agents and with this backend in flannel's configuration.
    fn of(machine: &mut Machine, cidrs: &str, flags: &[&str], backend: &Value) -> Self {
        let mut nodes = Nodes::control_plane_only(machine, cidrs, &[]);
        (1..=2).for_each(|number| nodes.add(number, flags));
        nodes.wait_ready();
        let mut pods = with_nginx(&nodes, 2);
        let mut flannel = Flannel::join(&nodes, 3, cidrs, backend);
        assert_healthy_without_pods(&nodes, &flannel, cidrs);
        let (process, ips) = flannel.attach();
        pods.push(Pod { node: flannel.name().to_owned(), ips, process });
        Self { nodes, flannel, pods }
    }

    /// The current state of all nodes.
    fn peers(&self) -> Vec<(&Host, PeerProperties)> {
        let ours = self.nodes.agents().iter().map(|agent| {
            let peer =
                PeerProperties::of(&self.nodes, agent.host(), agent.name(), ["coracle.1", "coracle.1-v6"]);
            (agent.host(), peer)
        });
        let host = self.flannel.host();
        let theirs =
            PeerProperties::of(&self.nodes, host, self.flannel.name(), ["flannel.1", "flannel-v6.1"]);
        ours.chain([(host, theirs)]).collect()
    }

    /// Asserts that every node's kernel has exactly the entries for all other nodes.
    fn all_have_entries_for_all(&self) {
        let peers = self.peers();
        for (host, peer) in &peers {
            let others = || peers.iter().filter(|(_, other)| other.name != peer.name);
            let mut last = None;
            let knows_all = within(30, || {
                // A device that is recreated for another address may have another hardware address.
                let needed: Option<Vec<Entries>> =
                    others().map(|(host, other)| needed(host, other)).collect();
                let needed: Option<Entries> = needed.map(|needed| needed.into_iter().flatten().collect());
                let found = known(host, peer);
                let knows_all = found.is_some() && found == needed;
                last = Some((found, needed));
                knows_all
            });
            assert!(knows_all.is_some(), "{}, found and needed entries: {last:#?}", peer.name);
        }
    }

    /// Asserts that every node has exactly the routes to all other nodes' pods, and no tunnel.
    fn all_route_to_all(&self) {
        let peers = self.peers();
        for (host, peer) in &peers {
            let others = peers.iter().filter(|(_, other)| other.name != peer.name);
            let needed: BTreeSet<[String; 2]> = others
                .flat_map(|(_, other)| other.ranges.iter().zip(&other.ends))
                .map(|(range, (address, _))| [range.clone(), address.clone()])
                .collect();
            let mut last = None;
            let routes_to_all = within(30, || {
                let (routes, tunnels) = (routed(host), tunnelled(host));
                let routes_to_all = routes == needed && tunnels.as_ref().is_some_and(Vec::is_empty);
                last = Some((routes, tunnels));
                routes_to_all
            });
            assert!(routes_to_all.is_some(), "{}: {last:#?}, not {needed:#?}", peer.name);
        }
    }

    /// Asserts that packets between pods are not masqueraded.
    fn nothing_is_masqueraded(&self) {
        let (ours, theirs) = (&self.pods[0], &self.pods[2]);
        for (from, to) in [(ours, theirs), (theirs, ours)] {
            for (ip, own) in to.ips.iter().zip(&from.ips) {
                assert_eq!(&source_address(from, to, ip), own);
            }
        }
    }

    fn all_reach_all(&self, mtu: usize) {
        let peers = self.peers();
        let hosts: Vec<_> = peers.into_iter().map(|(_, peer)| (peer.name, peer.pid)).collect();
        hosts_and_pods_reach_pods(&hosts, &self.pods, mtu);
    }
}

#[test]
fn flannel_nodes_and_ours_form_one_network_after_changes() {
    on_a_machine(|machine| {
        let mut mixed = MixedCluster::up(machine, CIDRS);
        let name = mixed.flannel.name().to_owned();
        mixed.all_have_entries_for_all();
        mixed.all_reach_all(MTU);
        // Flannel's pods have a larger MTU than ours. They get "packet too big" and fragment.
        mixed.all_reach_all(FLANNELS_MTU);
        mixed.nothing_is_masqueraded();
        // The kernel of the node with flannel answers our probes, and flanneld may update the Node's status.
        for agent in mixed.nodes.agents() {
            assert_eq!(condition(&mixed.nodes, agent.name(), "PodNetworkImpaired"), "False");
        }
        eventually("flannel's condition", 10, || {
            condition(&mixed.nodes, &name, "NetworkUnavailable") == "False"
        });

        // The node with flannel gets other addresses. The restarted flanneld publishes them, and our agents follow.
        mixed.flannel.stop();
        mixed.flannel.host().set_address(77);
        mixed.flannel.start();
        mixed.all_have_entries_for_all();
        mixed.all_reach_all(MTU);
        // The devices and annotations of that node are deleted. No route leads to it until flanneld creates new ones.
        mixed.flannel.stop();
        for device in ["flannel.1", "flannel-v6.1"] {
            mixed.flannel.host().run("ip", &["link", "del", device]);
        }
        let data = ["backend-data-", "backend-v6-data-"].map(|key| format!("flannel.alpha.coreos.com/{key}"));
        mixed.nodes.kubectl(&["annotate", "node", &name, &data[0], &data[1]]);
        let (host, peer) = mixed.peers().swap_remove(0);
        eventually("our agents to remove the entries of the deleted devices", 20, || {
            (known(host, &peer)?.len() == 2).then_some(())
        });
        mixed.flannel.start();
        mixed.all_have_entries_for_all();
        mixed.all_reach_all(MTU);
    });
}

#[test]
fn flannel_nodes_and_ours_form_one_ipv6_only_network() {
    on_a_machine(|machine| {
        let mixed = MixedCluster::up(machine, "fd42::/48");
        mixed.all_have_entries_for_all();
        mixed.all_reach_all(MTU);
        mixed.nothing_is_masqueraded();
    });
}

#[test]
fn a_flannel_node_that_does_not_respond_is_reported() {
    on_a_machine(|machine| {
        let cidrs = "10.42.0.0/16";
        let nodes = Nodes::up(machine, cidrs, 1);
        let flannel = Flannel::join(&nodes, 3, cidrs, &json!({"Type": "vxlan"}));
        assert_healthy_without_pods(&nodes, &flannel, cidrs);
        let device = &flannel.host().ip(&["addr", "show", "dev", "flannel.1"])[0];
        let address = text(&device["addr_info"][0]["local"]);
        flannel.host().disconnect();
        // A netlink event triggers the probes.
        nodes.agents()[0].host().run("ip", &["link", "set", "eth0", "txqueuelen", "999"]);
        eventually("the unreachable node to be reported", 60, || {
            let conditions = nodes.get(&["node", "node-1"])["status"]["conditions"].to_string();
            conditions.contains(&format!("flannel-3: no packets reach {address}"))
        });
        flannel.host().reconnect();
        eventually("PodNetworkImpaired=False", 60, || {
            condition(&nodes, "node-1", "PodNetworkImpaired") == "False"
        });
    });
}

#[test]
fn flannel_nodes_and_ours_remove_entries_of_deleted_nodes() {
    on_a_machine(|machine| {
        let mut mixed = MixedCluster::up(machine, "10.42.0.0/16");
        mixed.all_have_entries_for_all();
        mixed.all_reach_all(MTU);
        // A node with our agent gets another address.
        mixed.nodes.agent("node-1").host().set_address(88);
        mixed.all_have_entries_for_all();
        mixed.all_reach_all(MTU);
        // A node with our agent is removed.
        mixed.nodes.remove("node-2");
        mixed.nodes.kubectl(&["delete", "node", "node-2"]);
        mixed.pods.retain(|pod| pod.node != "node-2");
        mixed.all_have_entries_for_all();
        mixed.all_reach_all(MTU);
        // The node with flannel is removed.
        mixed.flannel.stop();
        mixed.nodes.kubectl(&["delete", "node", mixed.flannel.name()]);
        let agent = &mixed.nodes.agents()[0];
        eventually("our node to remove the state of flannel's node", 20, || {
            let routes = agent.host().ip(&["route", "show", "proto", "67"]);
            let links = agent.host().ip(&["link", "show", "type", "vxlan"]);
            // A single node has no VXLAN device.
            (routes.as_array()?.is_empty() && links.as_array()?.is_empty()).then_some(())
        });
    });
}

/// Nodes in one subnet, without a tunnel.
fn without_a_tunnel(flags: &'static [&str], backend: Value, mtu: usize) {
    on_a_machine(move |machine| {
        let mut mixed = MixedCluster::of(machine, CIDRS, flags, &backend);
        mixed.all_route_to_all();
        mixed.all_reach_all(mtu);
        mixed.nothing_is_masqueraded();
        // The bridge of a node exists only after its first pod: probes do not use the bridge's address.
        for agent in mixed.nodes.agents() {
            eventually("PodNetworkImpaired=False", 30, || {
                condition(&mixed.nodes, agent.name(), "PodNetworkImpaired") == "False"
            });
        }
        // Both nodes get other addresses.
        mixed.flannel.stop();
        mixed.flannel.host().set_address(77);
        mixed.flannel.start();
        mixed.nodes.agent("node-1").host().set_address(88);
        mixed.all_route_to_all();
        mixed.all_reach_all(mtu);
        // A node with our agent is removed.
        mixed.nodes.remove("node-2");
        mixed.nodes.kubectl(&["delete", "node", "node-2"]);
        mixed.pods.retain(|pod| pod.node != "node-2");
        mixed.all_route_to_all();
        mixed.all_reach_all(mtu);
    });
}

#[test]
fn flannel_nodes_and_ours_route_with_host_gw() {
    without_a_tunnel(&["--overlay", "host-gw"], json!({"Type": "host-gw"}), 1500);
}

#[test]
fn flannel_nodes_and_ours_route_with_direct_routing() {
    without_a_tunnel(
        &["--overlay-direct-routing", "true"],
        json!({"Type": "vxlan", "DirectRouting": true}),
        MTU,
    );
}

//! Pod networking of three nodes and a control plane while nodes, links and addresses change. The tests check the
//! kernel's tables and send packets themselves.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test panics and waits"
)]

mod nodes {
    pub(crate) mod capture;
    mod flannel;
    mod ipv6;
    pub(crate) mod pods;
    mod wire;

    use super::{CIDRS, MTU, condition};
}

use coracle_integration::{Nodes, eventually, on_a_machine};
use nix::sys::signal::Signal;
use nodes::pods::{Pod, all_reach_all, reaches, reaches_within, with_nginx};
use serde_json::Value;

const CIDRS: &str = "10.42.0.0/16,fd42::/48";
/// MTU of pods: 1500 bytes of the uplink minus the outer headers (IPv6, UDP and VXLAN) and the inner Ethernet header.
const MTU: usize = 1430;

/// Forwarding entries, neighbours and routes to other nodes in a node's kernel. None if the VXLAN device does not exist.
fn tables(nodes: &Nodes, name: &str) -> Option<(Vec<String>, Vec<String>, Vec<String>)> {
    let host = nodes.agents().iter().find(|agent| agent.name() == name).unwrap().host();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let sorted = |mut all: Vec<String>| {
        all.sort();
        all
    };
    let fdb = host.try_json("bridge", &["-j", "fdb", "show", "dev", "coracle.1"])?;
    let forwards = fdb.as_array().unwrap().iter().map(|e| text(&e["dst"])).collect();
    let neighbours = ["-j", "neigh", "show", "dev", "coracle.1", "nud", "permanent"];
    let neighbours = host.try_json("ip", &neighbours)?;
    let neighbours = neighbours.as_array().unwrap().iter().map(|e| text(&e["dst"])).collect();
    let routes = host.ip(&["route", "show", "proto", "67"]);
    let routes = routes.as_array().unwrap().iter().map(|e| text(&e["dst"])).collect();
    Some((sorted(forwards), sorted(neighbours), sorted(routes)))
}

fn condition(nodes: &Nodes, node: &str, kind: &str) -> String {
    let path = format!("jsonpath={{.status.conditions[?(@.type==\"{kind}\")].status}}");
    nodes.kubectl(&["get", "node", node, "-o", &path])
}

/// Waits until every node's kernel has entries for `peers` peers.
fn wait_for_peers(nodes: &Nodes, peers: usize) {
    for agent in nodes.agents() {
        eventually(&format!("{} to know {peers} peers", agent.name()), 20, || {
            let (forwards, neighbours, routes) = tables(nodes, agent.name())?;
            ((forwards.len(), neighbours.len(), routes.len()) == (peers, peers, peers)).then_some(())
        });
    }
}

#[test]
fn pods_of_three_nodes_reach_each_other_through_vxlan() {
    on_a_machine(|machine| {
        let nodes = Nodes::up(machine, CIDRS, 3);
        let pods = with_nginx(&nodes, 3);
        wait_for_peers(&nodes, 2);
        all_reach_all(&nodes, &pods, MTU);
        for agent in nodes.agents() {
            assert_eq!(condition(&nodes, agent.name(), "NetworkUnavailable"), "False");
            let others: Vec<_> = nodes.agents().iter().filter(|other| other.name() != agent.name()).collect();
            let (forwards, ..) = tables(&nodes, agent.name()).unwrap();
            let mut expected: Vec<String> = others.iter().map(|other| other.host().address()).collect();
            expected.sort();
            assert_eq!(forwards, expected);
            let link = &agent.host().ip(&["link", "show", "coracle.1"])[0];
            let data = &link["linkinfo"]["info_data"];
            assert_eq!(
                (&data["id"], &data["port"], &data["learning"]),
                (&1.into(), &8472.into(), &false.into())
            );
            assert_eq!(data["local"], Value::String(agent.host().address()));
            let node = nodes.get(&["node", agent.name()]);
            let annotation = |name: &str| {
                node["metadata"]["annotations"][format!("flannel.alpha.coreos.com/{name}")].clone()
            };
            assert_eq!(annotation("public-ip"), Value::String(agent.host().address()));
            assert_eq!(annotation("backend-type"), "vxlan");
            let data: Value = serde_json::from_str(annotation("backend-data").as_str().unwrap()).unwrap();
            assert_eq!((&data["VNI"], &data["VtepMAC"]), (&1.into(), &link["address"]));
        }
        // A pod on another node sees the source address of the pod, without masquerading.
        let (from, to) = (&pods[0], &pods[1]);
        for (ip, own) in to.ips.iter().zip(&from.ips) {
            assert_eq!(&nodes::pods::source_address(from, to, ip), own);
        }
        a_dual_stack_service_is_reached_by_both_addresses(&nodes, &pods);
    });
}

fn a_dual_stack_service_is_reached_by_both_addresses(nodes: &Nodes, pods: &[nodes::pods::Pod]) {
    for pod in pods {
        nodes::pods::accept_on_port_8088(pod);
    }
    nodes.apply(
        r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "dual"}, "spec": {
        "ipFamilyPolicy": "RequireDualStack", "selector": {"app": "nginx"}, "ports": [{"port": 80, "targetPort": 8088}]}}"#,
    );
    let spec = nodes.get(&["service", "dual"])["spec"].clone();
    assert_eq!(spec["ipFamilies"], serde_json::json!(["IPv4", "IPv6"]), "{spec}");
    for ip in spec["clusterIPs"].as_array().unwrap() {
        let ip: std::net::IpAddr = ip.as_str().unwrap().parse().unwrap();
        eventually(&format!("a connection to {ip}"), 30, || {
            let connected = coracle_integration::inside(pods[0].process, || {
                std::net::TcpStream::connect_timeout(&(ip, 80).into(), std::time::Duration::from_secs(2))
                    .is_ok()
            });
            connected.then_some(())
        });
    }
}

/// The node that announces the addresses of the service `pool`, and one of the addresses for each family.
fn announced(nodes: &Nodes) -> Option<(String, Vec<std::net::IpAddr>)> {
    let status = nodes.get(&["service", "pool"])["status"].clone();
    let conditions = status["conditions"].as_array()?;
    let chosen = conditions.iter().find(|one| one["reason"] == "NodeChosen")?["message"].as_str()?;
    let entries = status["loadBalancer"]["ingress"].as_array()?.iter();
    Some((chosen.to_owned(), entries.filter_map(|entry| entry["ip"].as_str()?.parse().ok()).collect()))
}

#[test]
fn the_addresses_of_a_pool_move_to_another_node() {
    const POOL: &str = "192.0.2.240/28,2001:db8:1::f0/124";
    on_a_machine(|machine| {
        let flags = ["--load-balancer-pool", POOL, "--node-monitor-grace-seconds", "10"];
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &flags);
        (1..=2).for_each(|number| nodes.add(number, &["--node-lease-seconds", "8"]));
        nodes.wait_ready();
        for pod in with_nginx(&nodes, 2) {
            nodes::pods::accept_on_port_8088(&pod);
        }
        nodes.apply(
            r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "pool"}, "spec": {"type": "LoadBalancer",
            "loadBalancerClass": "coracle.dev/address-pool", "ipFamilyPolicy": "RequireDualStack",
            "selector": {"app": "nginx"}, "ports": [{"port": 80, "targetPort": 8088}]}}"#,
        );
        // The test acts as a machine in the nodes' network. It finds the addresses by ARP and by neighbour discovery.
        let accepts = |ip: &std::net::IpAddr| {
            let limit = std::time::Duration::from_secs(2);
            std::net::TcpStream::connect_timeout(&(*ip, 80).into(), limit).is_ok()
        };
        let (first, addresses) = eventually("an announcing node", 30, || announced(&nodes));
        assert_eq!(addresses.len(), 2, "an address of each family: {addresses:?}");
        eventually("connections to the first node", 30, || addresses.iter().all(accepts));
        nodes.agent(&first).host().disconnect();
        let second = eventually("another node", 60, || {
            announced(&nodes).map(|(node, _)| node).filter(|node| *node != first)
        });
        assert_eq!(
            announced(&nodes),
            Some((second.clone(), addresses.clone())),
            "the service has other addresses"
        );
        // Half of the connections lead to the pod of the lost node until its endpoint has ended.
        eventually("connections to the second node", 60, || addresses.iter().all(accepts));
        nodes.agent(&first).host().reconnect();
        eventually("the first node to be Ready", 120, || condition(&nodes, &first, "Ready") == "True");

        // The second node loses only the API server. It receives the announcements of the first one.
        let host = nodes.agents().iter().find(|agent| agent.name() == second).unwrap().host();
        let plane = nodes.plane_address();
        host.run("ip", &["route", "add", "prohibit", &plane]);
        eventually("the first node", 60, || announced(&nodes).filter(|(node, _)| *node == first));
        eventually("the second node without the addresses", 60, || {
            let own = host.run("ip", &["address", "show"]);
            addresses.iter().all(|address| !own.contains(&format!("{address}/")))
        });
        host.run("ip", &["route", "del", "prohibit", &plane]);
    });
}

#[test]
fn pods_reach_each_other_while_nodes_and_control_plane_restart() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 3);
        let pods = with_nginx(&nodes, 3);
        wait_for_peers(&nodes, 2);
        all_reach_all(&nodes, &pods, MTU);

        // Agents are stopped, killed and started: the kernel forwards packets meanwhile.
        nodes.agent("node-1").pause();
        all_reach_all(&nodes, &pods, MTU);
        nodes.agent("node-1").resume();
        nodes.agent("node-2").end(Signal::SIGKILL);
        all_reach_all(&nodes, &pods, MTU);
        let before = tables(&nodes, "node-2").unwrap();
        nodes.agent("node-2").start();
        nodes.wait_ready();
        assert_eq!(tables(&nodes, "node-2"), Some(before));

        // Without a control plane, the agent still repairs its routes, and an agent that starts keeps entries of peers that
        // it does not know yet.
        nodes.stop_plane();
        nodes.agent("node-3").host().run("ip", &["route", "flush", "proto", "67"]);
        eventually("the routes to be repaired", 10, || {
            (tables(&nodes, "node-3")?.2.len() == 2).then_some(())
        });
        nodes.agent("node-1").end(Signal::SIGTERM);
        nodes.agent("node-1").start();
        // The kubelet API listens after the agent has recovered its pods.
        let address = nodes.agent("node-1").host().address();
        eventually("the agent", 20, || std::net::TcpStream::connect((address.as_str(), 10250)).is_ok());
        all_reach_all(&nodes, &pods, MTU);
        nodes.start_plane();
        nodes.wait_ready();

        // A node is disconnected and connected again.
        nodes.agent("node-3").host().disconnect();
        let at = |pods: &[Pod], node: &str| pods.iter().find(|pod| pod.node == node).unwrap().clone();
        assert!(!reaches_within(1, &nodes, &at(&pods, "node-1"), &at(&pods, "node-3").ips[0], 100));
        assert!(reaches(&nodes, &at(&pods, "node-1"), &at(&pods, "node-2").ips[0], 100));
        nodes.agent("node-3").host().reconnect();
        all_reach_all(&nodes, &pods, MTU);

        // A node is added and removed.
        nodes.add(4, &[]);
        nodes.wait_ready();
        wait_for_peers(&nodes, 3);
        nodes.remove("node-4");
        nodes.kubectl(&["delete", "node", "node-4"]);
        wait_for_peers(&nodes, 2);
        all_reach_all(&nodes, &pods, MTU);
    });
}

#[test]
fn packets_keep_their_source_while_an_agent_does_not_know_its_peers() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 2);
        let pods = with_nginx(&nodes, 2);
        wait_for_peers(&nodes, 1);
        all_reach_all(&nodes, &pods, MTU);
        let at = |node: &str| pods.iter().find(|pod| pod.node == node).unwrap();
        let (from, to) = (at("node-1"), at("node-2"));
        let sources =
            || -> Vec<String> { to.ips.iter().map(|ip| nodes::pods::source_address(from, to, ip)).collect() };
        assert_eq!(sources(), from.ips);
        nodes.stop_plane();
        nodes.agent("node-1").end(Signal::SIGTERM);
        nodes.agent("node-1").start();
        // The kubelet API listens after the agent has recovered its pods and their network.
        let address = nodes.agent("node-1").host().address();
        eventually("the agent", 20, || std::net::TcpStream::connect((address.as_str(), 10250)).is_ok());
        for _ in 0..20 {
            assert_eq!(sources(), from.ips);
        }
        nodes.start_plane();
        nodes.wait_ready();
        assert_eq!(sources(), from.ips);
    });
}

#[test]
fn pods_reach_a_node_that_has_changed_its_address() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 2);
        let pods = with_nginx(&nodes, 2);
        wait_for_peers(&nodes, 1);
        all_reach_all(&nodes, &pods, MTU);
        nodes.agent("node-2").host().set_address(77);
        // Connections from the old address must time out first.
        eventually("the new address to be known", 60, || {
            let (forwards, ..) = tables(&nodes, "node-1")?;
            (forwards == ["192.0.2.77"]).then_some(())
        });
        let link = &nodes.agent("node-2").host().ip(&["link", "show", "coracle.1"])[0];
        assert_eq!(link["linkinfo"]["info_data"]["local"], "192.0.2.77");
        all_reach_all(&nodes, &pods, MTU);
        // The annotations for peers and the node status are updated separately.
        eventually("the status to have the new address", 20, || {
            let node = nodes.get(&["node", "node-2"]);
            node["status"]["addresses"][0]["address"] == "192.0.2.77"
        });
    });
}

#[test]
fn running_pods_get_the_new_mtu_of_the_uplink() {
    on_a_machine(|machine| {
        let nodes = Nodes::up(machine, CIDRS, 2);
        let pods = with_nginx(&nodes, 2);
        wait_for_peers(&nodes, 1);
        all_reach_all(&nodes, &pods, MTU);
        for less in [100, 0] {
            for agent in nodes.agents() {
                let mtu = (1500 - less).to_string();
                agent.host().run("ip", &["link", "set", "eth0", "mtu", &mtu]);
            }
            for pod in &pods {
                eventually("the pod's interface to have the new MTU", 20, || pod.mtu() == MTU - less);
            }
            all_reach_all(&nodes, &pods, MTU - less);
        }
    });
}

#[test]
fn the_periodic_probe_finds_a_link_whose_mtu_shrinks_without_an_event() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        // The agent probes every peer once in 30 renewal intervals of its lease. An interval is one second here,
        // and ten seconds by default.
        (1..=2).for_each(|number| nodes.add(number, &["--node-lease-seconds", "4"]));
        nodes.wait_ready();
        for agent in nodes.agents() {
            eventually("PodNetworkImpaired=False", 30, || {
                condition(&nodes, agent.name(), "PodNetworkImpaired") == "False"
            });
        }
        nodes.agent("node-2").host().set_link_mtu(1400);
        for agent in nodes.agents() {
            let mtu = eventually("the probe to find the smaller MTU", 60, || {
                agent.host().ip(&["route", "show", "proto", "67"])[0]["metrics"][0]["mtu"].as_u64()
            });
            assert!((1320..=1334).contains(&mtu), "{mtu}");
        }
        // The status update of node-2 may be too large for the link.
        eventually("PodNetworkImpaired=True", 30, || {
            condition(&nodes, "node-1", "PodNetworkImpaired") == "True"
        });
    });
}

#[test]
fn a_smaller_path_mtu_is_found_reported_and_used() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 2);
        for agent in nodes.agents() {
            eventually("PodNetworkImpaired=False", 20, || {
                condition(&nodes, agent.name(), "PodNetworkImpaired") == "False"
            });
        }
        // The pods are created before the link gets a smaller MTU: large requests to the API server do not pass such a
        // link.
        let pods = with_nginx(&nodes, 2);
        all_reach_all(&nodes, &pods, MTU);
        // The path MTU is smaller than the MTU of the interfaces. A netlink event triggers the probe that finds it.
        nodes.agent("node-2").host().set_link_mtu(1400);
        for agent in nodes.agents() {
            agent.host().run("ip", &["link", "set", "eth0", "txqueuelen", "999"]);
        }
        for agent in nodes.agents() {
            // The MTU with an outer IPv6 header is 1330. The probe is exact to eight bytes. A bridge forwards four more
            // bytes, for a VLAN tag. If a probe loses responses, it finds a smaller MTU, and is repeated.
            eventually("the probe to find the smaller MTU", 30, || {
                let routes = agent.host().ip(&["route", "show", "proto", "67"]);
                (1320..=1334).contains(&routes[0]["metrics"][0]["mtu"].as_u64()?).then_some(())
            });
        }
        eventually("PodNetworkImpaired=True", 30, || {
            let conditions = nodes.get(&["node", "node-1"])["status"]["conditions"].to_string();
            let is_impaired = condition(&nodes, "node-1", "PodNetworkImpaired") == "True";
            is_impaired && conditions.contains("node-2: packets") && conditions.contains("not with 1430")
        });
        // The node sends "packet too big" for full-size packets of pods, which the pods then fragment.
        all_reach_all(&nodes, &pods, MTU);
        nodes.agent("node-2").host().set_link_mtu(1500);
        for agent in nodes.agents() {
            // The bridge with netfilter has sent IPv6 "packet too big" messages, and the kernel caches the path MTU for
            // ten minutes.
            agent.host().run("ip", &["-6", "route", "flush", "cache"]);
            agent.host().run("ip", &["link", "set", "eth0", "txqueuelen", "1000"]);
        }
        for agent in nodes.agents() {
            eventually("PodNetworkImpaired=False", 60, || {
                condition(&nodes, agent.name(), "PodNetworkImpaired") == "False"
            });
        }
    });
}

//! Three machines and a control plane on a fourth: pods of all reach each other, whatever happens to nodes, links
//! and addresses. Judged by the kernel's tables and by packets of the test's own.
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
/// What an uplink of 1500 bytes leaves behind outer IPv6, UDP, VXLAN and Ethernet headers.
const MTU: usize = 1430;

/// The forwarding entries, neighbours and routes that lead to other nodes, as the kernel of that node has them; none
/// while there is no device for them.
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

/// How many peers every node's kernel knows.
fn all_know(nodes: &Nodes, peers: usize) {
    for agent in nodes.agents() {
        eventually(&format!("{} to know {peers} peers", agent.name()), 20, || {
            let (forwards, neighbours, routes) = tables(nodes, agent.name())?;
            ((forwards.len(), neighbours.len(), routes.len()) == (peers, peers, peers)).then_some(())
        });
    }
}

#[test]
fn pods_of_three_nodes_reach_each_other_and_the_kernel_knows_what_it_must() {
    on_a_machine(|machine| {
        let nodes = Nodes::up(machine, CIDRS, 3);
        let pods = with_nginx(&nodes, 3);
        all_know(&nodes, 2);
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
            let told: Value = serde_json::from_str(annotation("backend-data").as_str().unwrap()).unwrap();
            assert_eq!((&told["VNI"], &told["VtepMAC"]), (&1.into(), &link["address"]));
        }
        // A pod of another node sees the pod's own address, and so does one behind the host's port of nobody.
        let (from, to) = (&pods[0], &pods[1]);
        for (ip, own) in to.ips.iter().zip(&from.ips) {
            assert_eq!(&nodes::pods::seen_from(from, to, ip), own);
        }
    });
}

#[test]
fn nodes_and_the_control_plane_come_and_go_and_pods_do_not_notice() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 3);
        let pods = with_nginx(&nodes, 3);
        all_know(&nodes, 2);
        all_reach_all(&nodes, &pods, MTU);

        // Frozen, killed, and back: the kernel carries the packets.
        nodes.agent("node-1").freeze();
        all_reach_all(&nodes, &pods, MTU);
        nodes.agent("node-1").thaw();
        nodes.agent("node-2").end(Signal::SIGKILL);
        all_reach_all(&nodes, &pods, MTU);
        let before = tables(&nodes, "node-2").unwrap();
        nodes.agent("node-2").start();
        nodes.wait_ready();
        assert_eq!(tables(&nodes, "node-2"), Some(before));

        // The control plane away: what somebody breaks is repaired all the same, and an agent that starts knows
        // nobody and cuts nobody off.
        nodes.stop_plane();
        nodes.agent("node-3").host().run("ip", &["route", "flush", "proto", "67"]);
        eventually("the routes to be repaired", 10, || {
            (tables(&nodes, "node-3")?.2.len() == 2).then_some(())
        });
        nodes.agent("node-1").end(Signal::SIGTERM);
        nodes.agent("node-1").start();
        // It is at work again, as the kubelet's API tells of the pods that it found.
        let address = nodes.agent("node-1").host().address();
        eventually("the agent", 20, || {
            std::net::TcpStream::connect((address.as_str(), 10250)).is_ok().then_some(())
        });
        all_reach_all(&nodes, &pods, MTU);
        nodes.start_plane();
        nodes.wait_ready();

        // Cut off and back.
        nodes.agent("node-3").host().cut();
        let at = |pods: &[Pod], node: &str| pods.iter().find(|pod| pod.node == node).unwrap().clone();
        let (cut, patience) = (at(&pods, "node-3"), std::time::Duration::from_millis(1500));
        assert!(!reaches_within(patience, &nodes, (&at(&pods, "node-1"), &cut.ips[0]), 100));
        assert!(reaches(&nodes, &at(&pods, "node-1"), &at(&pods, "node-2").ips[0], 100));
        nodes.agent("node-3").host().join();
        all_reach_all(&nodes, &pods, MTU);

        // One more, and one less.
        nodes.add(4, &[]);
        nodes.wait_ready();
        all_know(&nodes, 3);
        nodes.remove("node-4");
        nodes.kubectl(&["delete", "node", "node-4"]);
        all_know(&nodes, 2);
        all_reach_all(&nodes, &pods, MTU);
    });
}

#[test]
fn packets_between_pods_keep_their_source_while_an_agent_knows_no_other_node() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 2);
        let pods = with_nginx(&nodes, 2);
        all_know(&nodes, 1);
        all_reach_all(&nodes, &pods, MTU);
        let at = |node: &str| pods.iter().find(|pod| pod.node == node).unwrap();
        let (from, to) = (at("node-1"), at("node-2"));
        let sources =
            || -> Vec<String> { to.ips.iter().map(|ip| nodes::pods::seen_from(from, to, ip)).collect() };
        assert_eq!(sources(), from.ips);
        nodes.stop_plane();
        nodes.agent("node-1").end(Signal::SIGTERM);
        nodes.agent("node-1").start();
        // Its network is there again, as the kubelet's API tells of the pods that it found.
        let address = nodes.agent("node-1").host().address();
        eventually("the agent", 20, || {
            std::net::TcpStream::connect((address.as_str(), 10250)).is_ok().then_some(())
        });
        for _ in 0..20 {
            assert_eq!(sources(), from.ips);
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        nodes.start_plane();
        nodes.wait_ready();
        assert_eq!(sources(), from.ips);
    });
}

#[test]
fn a_nodes_address_may_change() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 2);
        let pods = with_nginx(&nodes, 2);
        all_know(&nodes, 1);
        all_reach_all(&nodes, &pods, MTU);
        nodes.agent("node-2").host().set_address(77);
        // The connections from the old address have to be given up first.
        eventually("the new address to be known", 60, || {
            let (forwards, ..) = tables(&nodes, "node-1")?;
            (forwards == ["192.0.2.77"]).then_some(())
        });
        let link = &nodes.agent("node-2").host().ip(&["link", "show", "coracle.1"])[0];
        assert_eq!(link["linkinfo"]["info_data"]["local"], "192.0.2.77");
        all_reach_all(&nodes, &pods, MTU);
        // Others are told of it for their tables' sake by another way than for its status.
        eventually("the status to have the new address", 20, || {
            let node = nodes.get(&["node", "node-2"]);
            (node["status"]["addresses"][0]["address"] == "192.0.2.77").then_some(())
        });
    });
}

#[test]
fn pods_that_live_follow_the_uplinks_mtu() {
    on_a_machine(|machine| {
        let nodes = Nodes::up(machine, CIDRS, 2);
        let pods = with_nginx(&nodes, 2);
        all_know(&nodes, 1);
        all_reach_all(&nodes, &pods, MTU);
        for less in [100, 0] {
            for agent in nodes.agents() {
                let mtu = (1500 - less).to_string();
                agent.host().run("ip", &["link", "set", "eth0", "mtu", &mtu]);
            }
            for pod in &pods {
                eventually("the pod's interface to follow", 20, || (pod.mtu() == MTU - less).then_some(()));
            }
            all_reach_all(&nodes, &pods, MTU - less);
        }
    });
}

#[test]
fn a_link_that_narrows_later_is_found_without_any_event() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 2);
        for agent in nodes.agents() {
            eventually("a sound network", 30, || {
                (condition(&nodes, agent.name(), "PodNetworkImpaired") == "False").then_some(())
            });
        }
        nodes.agent("node-2").host().narrow(1400);
        for agent in nodes.agents() {
            let mtu = eventually("the narrow link to be found", 200, || {
                agent.host().ip(&["route", "show", "proto", "67"])[0]["metrics"][0]["mtu"].as_u64()
            });
            assert!((1320..=1334).contains(&mtu), "{mtu}");
        }
        // The other node may not get so long a word through.
        eventually("the narrow link to be told", 30, || {
            (condition(&nodes, "node-1", "PodNetworkImpaired") == "True").then_some(())
        });
    });
}

#[test]
fn a_narrow_link_is_found_told_and_what_passes_is_used() {
    on_a_machine(|machine| {
        let mut nodes = Nodes::up(machine, CIDRS, 2);
        for agent in nodes.agents() {
            eventually("a sound network", 20, || {
                (condition(&nodes, agent.name(), "PodNetworkImpaired") == "False").then_some(())
            });
        }
        // Before: through such a link no long request to the API server passes either.
        let pods = with_nginx(&nodes, 2);
        all_reach_all(&nodes, &pods, MTU);
        // A link that lets less pass than its ends know of, found at the next event of theirs.
        nodes.agent("node-2").host().narrow(1400);
        for agent in nodes.agents() {
            agent.host().run("ip", &["link", "set", "eth0", "txqueuelen", "999"]);
        }
        for agent in nodes.agents() {
            // The narrower family's; a bridge lets four bytes more pass, for a VLAN's tag. A test of which answers were
            // lost finds less, and is made again.
            eventually("the narrow link to be found", 30, || {
                let routes = agent.host().ip(&["route", "show", "proto", "67"]);
                (1320..=1334).contains(&routes[0]["metrics"][0]["mtu"].as_u64()?).then_some(())
            });
        }
        eventually("the narrow link to be told", 30, || {
            let said = nodes.get(&["node", "node-1"])["status"]["conditions"].to_string();
            let is_told = condition(&nodes, "node-1", "PodNetworkImpaired") == "True";
            (is_told && said.contains("node-2: of packets of 1430 bytes")).then_some(())
        });
        // Full packets of pods are told so by the node, and then pass in pieces.
        all_reach_all(&nodes, &pods, MTU);
        nodes.agent("node-2").host().narrow(1500);
        for agent in nodes.agents() {
            // A bridge with netfilter told IPv6 of what was too long, and that is remembered for ten minutes.
            agent.host().run("ip", &["-6", "route", "flush", "cache"]);
            agent.host().run("ip", &["link", "set", "eth0", "txqueuelen", "1000"]);
        }
        for agent in nodes.agents() {
            eventually("a sound network again", 60, || {
                (condition(&nodes, agent.name(), "PodNetworkImpaired") == "False").then_some(())
            });
        }
    });
}

//! Tests of the table with real packets between namespaces on one bridge, in both families.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test panics and waits"
)]

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::process::Command;
use std::time::Duration;

use coracle_network_policy::{
    ClusterKind, ClusterPolicy, ConnectionCounts, Effect, Enforcer, Model, OwnNode, PodFacts,
    mark_connections,
};
use coracle_nft::{Attributes, Channel, Verb, kind_of};
use coracle_testing::{NamespaceThread, bind_udp, eventually, ip, is_to_be_killed, run_until_killed};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use serde_json::{Value, json};

/// A network namespace with one address of each family.
struct Pod {
    ips: [IpAddr; 2],
    thread: NamespaceThread,
}

/// Time in which a packet arrives at another pod of a busy machine.
const ARRIVAL: Duration = Duration::from_secs(1);

// === impl Pod ===

impl Pod {
    fn on_the_bridge(number: u8) -> Self {
        let thread = NamespaceThread::start();
        ip(&format!("link add pod{number} type veth peer name eth0 netns {}", thread.netns().display()));
        ip(&format!("link set pod{number} master bridge0 up"));
        let pod = Self { ips: ips(number), thread };
        let [v4, v6] = pod.ips;
        pod.thread.within(move || {
            ip("link set lo up");
            ip("link set eth0 up");
            ip(&format!("addr add {v4}/24 dev eth0"));
            ip(&format!("addr add {v6}/64 dev eth0 nodad"));
        });
        // A new port of the bridge forwards nothing until the kernel has noticed that its link is up.
        eventually("the port to forward", 20, || {
            let shown =
                Command::new("ip").args(["-d", "-o", "link", "show", &format!("pod{number}")]).output();
            String::from_utf8_lossy(&shown.unwrap().stdout).contains("state forwarding")
        });
        pod
    }

    /// Whether a datagram to the port of another pod arrives there, in each family.
    fn reaches(&self, other: &Self, port: u16) -> [bool; 2] {
        [0, 1].map(|family| {
            let to = SocketAddr::new(other.ips[family], port);
            let socket = other.thread.within(move || {
                let socket = bind_udp(to);
                socket.set_read_timeout(Some(ARRIVAL)).unwrap();
                socket
            });
            let own = SocketAddr::new(self.ips[family], 0);
            self.thread.within(move || UdpSocket::bind(own).unwrap().send_to(b"packet", to).is_ok());
            socket.recv(&mut [0; 8]).is_ok()
        })
    }

    /// Whether a message with the type of a neighbour solicitation and with data arrives at another pod, in each
    /// family. The message has a hop limit below 255, like packets that a router has forwarded.
    fn reaches_by_solicitation(&self, other: &Self) -> [bool; 2] {
        const MESSAGE: &[u8] = b"\x87\0\0\0hidden";
        [(0, AddressFamily::Inet), (1, AddressFamily::Inet6)].map(|(number, family)| {
            let raw = move || {
                let flags = SockFlag::SOCK_CLOEXEC;
                let socket = socket(family, SockType::Raw, flags, SockProtocol::IcmpV6).unwrap();
                UdpSocket::from(socket)
            };
            let receiver = other.thread.within(move || {
                let socket = raw();
                socket.set_read_timeout(Some(ARRIVAL)).unwrap();
                socket
            });
            let to = SocketAddr::new(other.ips[number], 0);
            self.thread.within(move || raw().send_to(MESSAGE, to).is_ok());
            let mut buffer = [0; 256];
            // The socket also receives the real solicitations.
            loop {
                let Ok(size) = receiver.recv(&mut buffer) else { return false };
                if buffer[..size].ends_with(b"hidden") {
                    return true;
                }
            }
        })
    }

    /// Whether a datagram to a multicast or broadcast address arrives at another pod.
    fn reaches_by_group(&self, other: &Self, group: IpAddr) -> bool {
        let any = if group.is_ipv4() { "0.0.0.0:7000" } else { "[::]:7000" };
        let socket = other.thread.within(move || {
            let socket = bind_udp(any.parse().unwrap());
            socket.set_read_timeout(Some(ARRIVAL)).unwrap();
            socket
        });
        let own = SocketAddr::new(self.ips[usize::from(group.is_ipv6())], 0);
        self.thread.within(move || {
            let index = nix::net::if_::if_nametoindex("eth0").unwrap();
            let to = match group {
                IpAddr::V4(_) => SocketAddr::new(group, 7000),
                IpAddr::V6(group) => SocketAddrV6::new(group, 7000, 0, index).into(),
            };
            let socket = UdpSocket::bind(own).unwrap();
            socket.set_broadcast(true).unwrap();
            socket.send_to(b"packet", to).unwrap();
        });
        socket.recv(&mut [0; 8]).is_ok()
    }

    fn facts(&self, namespace: &str, app: &str) -> PodFacts {
        facts(self.ips, namespace, app)
    }
}

/// The addresses of a pod.
fn ips(number: u8) -> [IpAddr; 2] {
    [IpAddr::from([10, 42, 0, number]), format!("fd42::{number:x}").parse().unwrap()]
}

fn facts(ips: [IpAddr; 2], namespace: &str, app: &str) -> PodFacts {
    let uid = ips[0].to_string();
    let ips: Vec<_> = ips.iter().map(|ip| json!({"ip": ip.to_string()})).collect();
    let ports = json!([{"name": "web", "containerPort": 7000, "protocol": "UDP"}]);
    let pod = json!({"metadata": {"uid": uid, "namespace": namespace, "labels": {"app": app}},
        "spec": {"nodeName": "here", "containers": [{"name": "c", "ports": ports}]}, "status": {"podIPs": ips}});
    PodFacts::of(&serde_json::from_value(pod).unwrap(), "here").unwrap()
}

fn policy(name: &str, spec: Value) -> NetworkPolicy {
    serde_json::from_value(json!({"metadata": {"namespace": "n", "name": name}, "spec": spec})).unwrap()
}

/// Runs the test in a new network namespace with a bridge, whose packets pass the filters of the IP layer.
fn on_a_bridge(test: impl FnOnce() + Send + 'static) {
    coracle_testing::in_new_namespace(move || {
        ip("link set lo up");
        // The sysctls of the namespace are off, as in many distributions. The option of the bridge enables the filters.
        let _ = std::fs::write("/proc/sys/net/bridge/bridge-nf-call-iptables", "0");
        let _ = std::fs::write("/proc/sys/net/bridge/bridge-nf-call-ip6tables", "0");
        ip("link add bridge0 type bridge nf_call_iptables 1 nf_call_ip6tables 1");
        ip("link set bridge0 up");
        test();
    });
}

#[test]
fn packets_between_ports_of_a_bridge_are_filtered_in_both_families() {
    on_a_bridge(|| {
        let (web, friend, other) = (Pod::on_the_bridge(2), Pod::on_the_bridge(3), Pod::on_the_bridge(4));
        let mut model = Model::default();
        let mut enforcer = Enforcer::open("test-policies").unwrap();
        model.put_policy(&policy("deny", json!({"podSelector": {"matchLabels": {"app": "web"}}})));
        model.put_pod(web.facts("n", "web"));
        model.put_pod(friend.facts("n", "friend"));
        assert_eq!(friend.reaches(&web, 7000), [true, true], "without the table");
        enforcer.replace(&mut model).unwrap();
        assert!(enforcer.is_intact().unwrap());
        assert_eq!(friend.reaches(&web, 7000), [false, false]);
        assert_eq!(web.reaches(&friend, 7000), [true, true], "egress is not restricted");
        let from = json!([{"podSelector": {"matchLabels": {"app": "friend"}}}, {"ipBlock": {"cidr": "10.42.0.0/24",
            "except": ["10.42.0.0/30", "10.42.0.128/25"]}}]);
        let ports =
            json!([{"protocol": "UDP", "port": "web"}, {"protocol": "UDP", "port": 7002, "endPort": 7004}]);
        let both = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [{"from": from, "ports": ports}],
            "egress": [{"ports": [{"protocol": "UDP", "port": 7000}], "to": [{"ipBlock": {"cidr": "fd42::/64"}}]}]});
        model.put_policy(&policy("both", both));
        enforcer.change(&mut model).unwrap();
        assert_eq!(friend.reaches(&web, 7000), [false, true], "its egress allows IPv6 only");
        assert_eq!(
            other.reaches(&web, 7003),
            [true, false],
            "the address is in the block, and the port in the range"
        );
        assert_eq!(other.reaches(&web, 7005), [false, false]);
        assert_eq!(web.reaches(&other, 7000), [false, true]);
        model.put_pod(friend.facts("n", "stranger"));
        enforcer.change(&mut model).unwrap();
        assert_eq!(friend.reaches(&web, 7000), [false, false], "its label is gone");
        for name in ["deny", "both"] {
            model.remove_policy(&coracle_values::object::Key::new("n", name));
        }
        enforcer.change(&mut model).unwrap();
        assert_eq!(friend.reaches(&web, 7000), [true, true]);
        enforcer.remove().unwrap();
    });
}

#[test]
fn neighbour_discovery_carries_no_data_past_a_policy() {
    on_a_bridge(|| {
        let (web, other) = (Pod::on_the_bridge(2), Pod::on_the_bridge(3));
        let mut model = Model::default();
        let mut enforcer = Enforcer::open("test-policies").unwrap();
        let all =
            json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress", "Egress"]});
        model.put_policy(&policy("deny", all));
        model.put_pod(web.facts("n", "web"));
        model.put_pod(other.facts("n", "other"));
        assert_eq!(web.reaches_by_solicitation(&other), [true, true], "without the table");
        enforcer.replace(&mut model).unwrap();
        assert_eq!(web.reaches_by_solicitation(&other), [false, false]);
        let udp = json!([{"ports": [{"protocol": "UDP", "port": 7000}]}]);
        let all = json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": udp});
        model.put_policy(&policy("allow", all));
        enforcer.change(&mut model).unwrap();
        assert_eq!(web.reaches(&other, 7000), [true, true], "neighbours are found");
        enforcer.remove().unwrap();
    });
}

/// Every pod of a bridge receives multicast and broadcast, but the policies of a pod are found by its own address.
#[test]
fn multicast_and_broadcast_do_not_pass_a_policy() {
    on_a_bridge(|| {
        // From the address of the node, the kernel knows the broadcast address of the network.
        ip("addr add 10.42.0.1/24 dev bridge0");
        let (web, other) = (Pod::on_the_bridge(2), Pod::on_the_bridge(3));
        let mut model = Model::default();
        let mut enforcer = Enforcer::open("test-policies").unwrap();
        model.put_policy(&policy("deny", json!({"podSelector": {"matchLabels": {"app": "web"}}})));
        model.put_pod(web.facts("n", "web"));
        model.put_pod(other.facts("n", "other"));
        let groups = ["255.255.255.255", "10.42.0.255", "224.0.0.1", "ff02::1"];
        let reached = || groups.map(|group| other.reaches_by_group(&web, group.parse().unwrap()));
        assert_eq!(reached(), [true; 4], "without the table");
        enforcer.replace(&mut model).unwrap();
        assert_eq!(reached(), [false; 4]);
        assert_eq!(web.reaches(&other, 7000), [true, true], "other packets pass");
        enforcer.remove().unwrap();
    });
}

/// Upstream's documentation: traffic to and from the node of a pod is always allowed.
#[test]
fn a_pod_and_its_own_node_reach_each_other_whatever_the_policies() {
    on_a_bridge(|| {
        let node = ips(1);
        ip("addr add 10.42.0.1/24 dev bridge0");
        ip("addr add fd42::1/64 dev bridge0 nodad");
        let (web, other) = (Pod::on_the_bridge(2), Pod::on_the_bridge(3));
        let mut model = Model::default();
        let mut enforcer = Enforcer::open("test-policies").unwrap();
        let all = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]});
        model.put_policy(&policy("deny", all));
        model.put_pod(web.facts("n", "web"));
        model.put_pod(other.facts("n", "other"));
        enforcer.replace(&mut model).unwrap();
        assert_eq!(other.reaches(&web, 7000), [false, false]);
        for family in [0, 1] {
            let bound = |address: IpAddr| {
                let socket = bind_udp(SocketAddr::new(address, 7000));
                socket.set_read_timeout(Some(ARRIVAL)).unwrap();
                socket
            };
            let (at_node, pod) = (bound(node[family]), web.ips[family]);
            let in_pod = web.thread.within(move || bound(pod));
            at_node.send_to(b"probe", in_pod.local_addr().unwrap()).unwrap();
            assert!(in_pod.recv(&mut [0; 8]).is_ok(), "from the node, family {family}");
            in_pod.send_to(b"query", at_node.local_addr().unwrap()).unwrap();
            assert!(at_node.recv(&mut [0; 8]).is_ok(), "to the node, family {family}");
        }
        enforcer.remove().unwrap();
    });
}

#[test]
fn policies_of_the_whole_cluster_precede_and_follow_network_policies() {
    on_a_bridge(|| {
        let (web, friend) = (Pod::on_the_bridge(2), Pod::on_the_bridge(3));
        let (mut model, mut enforcer) = (Model::default(), Enforcer::open("test-policies").unwrap());
        model.put_namespace("n", [("team".to_owned(), "x".to_owned())].into());
        model.put_pod(web.facts("n", "web"));
        model.put_pod(friend.facts("n", "friend"));
        model.put_policy(&policy("deny", json!({"podSelector": {"matchLabels": {"app": "web"}}})));
        enforcer.replace(&mut model).unwrap();
        let put = |model: &mut Model, tier: &str, priority: u16, action: &str| {
            let from =
                json!([{"pods": {"namespaceSelector": {"matchLabels": {"team": "x"}}, "podSelector": {}}}]);
            let spec = json!({"tier": tier, "priority": priority, "subject": {"namespaces": {}}, "ingress": [
                {"action": action, "from": from, "protocols": [{"udp": {"destinationPort": {"number": 7000}}}]}]});
            let kind = ClusterKind::ClusterNetworkPolicy;
            model
                .put_cluster_policy(ClusterPolicy::parse(kind, &format!("{tier}{priority}"), &spec).unwrap());
        };
        put(&mut model, "Admin", 5, "Accept");
        assert!(enforcer.must_replace(&model), "its base chains are absent");
        enforcer.replace(&mut model).unwrap();
        assert!(!enforcer.must_replace(&model));
        assert_eq!(friend.reaches(&web, 7000), [true, true], "an accepted packet skips NetworkPolicies");
        assert_eq!(friend.reaches(&web, 7001), [false, false], "a packet to another port is not accepted");
        put(&mut model, "Admin", 4, "Pass");
        enforcer.change(&mut model).unwrap();
        assert_eq!(friend.reaches(&web, 7000), [false, false], "a NetworkPolicy decides on a passed packet");
        put(&mut model, "Baseline", 0, "Deny");
        enforcer.change(&mut model).unwrap();
        assert_eq!(web.reaches(&friend, 7000), [false, false], "no NetworkPolicy selects the pod");
        assert_eq!(web.reaches(&friend, 7001), [true, true]);
        put(&mut model, "Admin", 3, "Deny");
        let Effect::MayForbid(of) = enforcer.change(&mut model).unwrap() else { panic!() };
        assert!(of.is_superset(&web.ips.into()));
        for name in ["Admin3", "Admin4", "Admin5", "Baseline0"] {
            model.remove_cluster_policy(ClusterKind::ClusterNetworkPolicy, name);
        }
        assert!(enforcer.must_replace(&model));
        enforcer.replace(&mut model).unwrap();
        assert_eq!(web.reaches(&friend, 7000), [true, true]);
        enforcer.remove().unwrap();
    });
}

/// The socket address in this namespace. A link-local address belongs to the link.
fn on_link(ip: IpAddr, port: u16, link: &str) -> SocketAddr {
    match ip {
        IpAddr::V6(ip) if ip.is_unicast_link_local() => {
            SocketAddrV6::new(ip, port, 0, nix::net::if_::if_nametoindex(link).unwrap()).into()
        }
        ip => SocketAddr::new(ip, port),
    }
}

/// Whether a datagram of a pod arrives at this port of the node.
fn reaches_node(pod: &Pod, ip: IpAddr, port: u16) -> bool {
    let at_node = bind_udp(on_link(ip, port, "bridge0"));
    at_node.set_read_timeout(Some(ARRIVAL)).unwrap();
    pod.thread.within(move || {
        let any = if ip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        UdpSocket::bind(any).unwrap().send_to(b"packet", on_link(ip, port, "eth0")).is_ok()
    });
    at_node.recv(&mut [0; 8]).is_ok()
}

/// Adds a policy of the whole cluster for packets of all pods to all nodes.
fn put_for_nodes(model: &mut Model, tier: &str, priority: u16, action: &str) {
    let spec = json!({"tier": tier, "priority": priority, "subject": {"namespaces": {}},
        "egress": [{"action": action, "to": [{"nodes": {}}]}]});
    let (kind, name) = (ClusterKind::ClusterNetworkPolicy, format!("{tier}{priority}"));
    model.put_cluster_policy(ClusterPolicy::parse(kind, &name, &spec).unwrap());
}

#[test]
fn policies_of_the_whole_cluster_apply_to_packets_of_a_pod_to_its_own_node() {
    on_a_bridge(|| {
        for address in ["10.42.0.1/24 dev bridge0", "10.43.0.10/32 dev lo", "fd42::1/64 dev bridge0 nodad"] {
            ip(&format!("addr add {address}"));
        }
        ip("addr add fe80::1/64 dev bridge0 nodad");
        let web = Pod::on_the_bridge(2);
        web.thread.within(|| {
            ip("addr add fe80::2/64 dev eth0 nodad");
            ip("route add default via 10.42.0.1");
        });
        let addresses: [IpAddr; 4] =
            ["10.42.0.1", "fd42::1", "10.43.0.10", "fe80::1"].map(|ip| ip.parse().unwrap());
        let reached = || addresses.map(|ip| reaches_node(&web, ip, 7000));
        assert_eq!(reached(), [true; 4], "without the table");

        let (mut model, own_node) =
            (Model::default(), OwnNode { dns: vec![addresses[2]], bridge: Some("bridge0".to_owned()) });
        let mut enforcer = Enforcer::open("test-policies").unwrap().at(own_node);
        model.put_namespace("n", [].into());
        model.put_pod(web.facts("n", "web"));
        let node = json!({"metadata": {"name": "here"}, "spec": {"podCIDRs": ["10.42.0.0/24", "fd42::/64"]}});
        model.put_node(&serde_json::from_value(node).unwrap());
        put_for_nodes(&mut model, "Admin", 5, "Deny");
        enforcer.replace(&mut model).unwrap();
        assert_eq!(reached(), [false; 4]);
        assert_eq!([0, 2].map(|at| reaches_node(&web, addresses[at], 53)), [false, true], "only DNS queries");

        let (at_node, pod) = (bind_udp(SocketAddr::new(addresses[0], 7001)), web.ips[0]);
        at_node.set_read_timeout(Some(ARRIVAL)).unwrap();
        let in_pod = web.thread.within(move || bind_udp(SocketAddr::new(pod, 7001)));
        in_pod.set_read_timeout(Some(ARRIVAL)).unwrap();
        at_node.send_to(b"probe", in_pod.local_addr().unwrap()).unwrap();
        assert!(in_pod.recv(&mut [0; 8]).is_ok(), "the node probes its pod");
        in_pod.send_to(b"answer", at_node.local_addr().unwrap()).unwrap();
        assert!(at_node.recv(&mut [0; 8]).is_ok(), "the pod answers");

        put_for_nodes(&mut model, "Admin", 4, "Accept");
        put_for_nodes(&mut model, "Baseline", 0, "Deny");
        enforcer.change(&mut model).unwrap();
        assert_eq!(reached(), [true, true, false, false], "an accepted packet skips baseline policies");
        put_for_nodes(&mut model, "Admin", 3, "Pass");
        enforcer.change(&mut model).unwrap();
        assert_eq!(reached(), [false; 4], "a baseline policy decides on a passed packet");
        let none = json!({"podSelector": {}, "policyTypes": ["Egress"]});
        model.put_policy(&policy("deny", none));
        enforcer.change(&mut model).unwrap();
        assert_eq!(reached(), [true, true, false, false], "NetworkPolicies do not apply to the node");
        enforcer.remove().unwrap();
    });
}

/// Marks the connections that the model forbids. Opens a socket for this.
fn mark(model: &Model, of: Option<&BTreeSet<IpAddr>>) -> std::io::Result<ConnectionCounts> {
    mark_connections(&mut Channel::open().unwrap(), of, |flow| model.allows(flow))
}

/// A client and a server of one family, with a connection that stays open.
struct Connection {
    client: UdpSocket,
    server: UdpSocket,
}

// === impl Connection ===

impl Connection {
    fn open(client: &Pod, server: &Pod, family: usize) -> Self {
        let [from, to] = [client, server].map(|pod| SocketAddr::new(pod.ips[family], 0));
        let bound = move |address: SocketAddr| {
            let socket = bind_udp(address);
            socket.set_read_timeout(Some(ARRIVAL)).unwrap();
            socket
        };
        let server = server.thread.within(move || bound(to));
        let client = client.thread.within(move || bound(from));
        client.connect(server.local_addr().unwrap()).unwrap();
        server.connect(client.local_addr().unwrap()).unwrap();
        let connection = Self { client, server };
        assert_eq!(connection.works(), [true, true], "a new connection");
        connection
    }

    /// Whether packets of the client and of the server arrive.
    fn works(&self) -> [bool; 2] {
        [(&self.client, &self.server), (&self.server, &self.client)].map(|(from, to)| {
            from.send(b"packet").unwrap();
            to.recv(&mut [0; 8]).is_ok()
        })
    }
}

#[test]
fn open_connections_end_when_they_are_no_longer_allowed_and_others_stay() {
    on_a_bridge(|| {
        let (web, friend, other) = (Pod::on_the_bridge(2), Pod::on_the_bridge(3), Pod::on_the_bridge(4));
        let (mut model, mut enforcer) = (Model::default(), Enforcer::open("test-policies").unwrap());
        let friends = json!([{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}]);
        let unrelated = json!({"podSelector": {"matchLabels": {"app": "nothing"}}});
        model.put_policy(&policy("unrelated", unrelated));
        [(&web, "web"), (&friend, "friend"), (&other, "other")]
            .iter()
            .for_each(|(pod, app)| model.put_pod(pod.facts("n", app)));
        enforcer.replace(&mut model).unwrap();
        for (family, count) in [(0, 1), (1, 2)] {
            let kept = Connection::open(&friend, &web, family);
            let forbidden = Connection::open(&other, &web, family);
            let allow = json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": friends});
            model.put_policy(&policy("allow", allow));
            let Effect::MayForbid(of) = enforcer.change(&mut model).unwrap() else { panic!() };
            assert_eq!(of, web.ips.into());
            let counts = mark(&model, Some(&of)).unwrap();
            assert_eq!(counts.forbidden, count, "also those of the other family");
            assert_eq!(
                forbidden.works(),
                [false, false],
                "packets of the server do not allow the connection again"
            );
            assert_eq!(kept.works(), [true, true]);
            model.put_pod(friend.facts("n", "stranger"));
            let Effect::MayForbid(of) = enforcer.change(&mut model).unwrap() else { panic!() };
            assert_eq!(of, friend.ips.into());
            let counts = mark(&model, Some(&of)).unwrap();
            assert_eq!(counts.forbidden, count, "only connections of the friend");
            assert_eq!(mark(&model, None).unwrap().forbidden, 2 * count);
            assert_eq!(kept.works(), [false, false]);
            model.remove_policy(&coracle_values::object::Key::new("n", "allow"));
            model.put_pod(friend.facts("n", "friend"));
            enforcer.change(&mut model).unwrap();
            assert_eq!(mark(&model, None).unwrap().forbidden, 0);
            assert_eq!((kept.works(), forbidden.works()), ([true, true], [true, true]));
        }
        enforcer.remove().unwrap();
    });
}

#[test]
fn open_connections_end_when_a_policy_gets_other_rules() {
    on_a_bridge(|| {
        let (web, friend, other) = (Pod::on_the_bridge(2), Pod::on_the_bridge(3), Pod::on_the_bridge(4));
        let (mut model, mut enforcer) = (Model::default(), Enforcer::open("test-policies").unwrap());
        let allow = |apps: &[&str]| {
            let from: Vec<_> =
                apps.iter().map(|app| json!({"podSelector": {"matchLabels": {"app": app}}})).collect();
            let web = json!({"matchLabels": {"app": "web"}});
            policy("allow", json!({"podSelector": web, "ingress": [{"from": from}]}))
        };
        [(&web, "web"), (&friend, "friend"), (&other, "other")]
            .iter()
            .for_each(|(pod, app)| model.put_pod(pod.facts("n", app)));
        model.put_policy(&allow(&["friend", "other"]));
        enforcer.replace(&mut model).unwrap();
        let kept = Connection::open(&friend, &web, 0);
        let forbidden = Connection::open(&other, &web, 0);
        model.put_policy(&allow(&["friend"]));
        let Effect::MayForbid(of) = enforcer.change(&mut model).unwrap() else { panic!() };
        assert_eq!(of, web.ips.into(), "connections of pods that the policy selects");
        assert_eq!(mark(&model, Some(&of)).unwrap().forbidden, 1);
        assert_eq!((kept.works(), forbidden.works()), ([true, true], [false, false]));
        assert_eq!((friend.reaches(&web, 7000), other.reaches(&web, 7000)), ([true, true], [false, false]));
        model.put_policy(&allow(&["other", "friend"]));
        let Effect::MayForbid(of) = enforcer.change(&mut model).unwrap() else { panic!() };
        assert_eq!(mark(&model, Some(&of)).unwrap().forbidden, 0);
        assert_eq!((kept.works(), forbidden.works()), ([true, true], [true, true]));
        enforcer.remove().unwrap();
    });
}

/// Acts as an agent that starts with a policy that selects no pod. Then the agent adds a policy that allows only
/// connections of friends to `web`.
fn restrict_web() {
    let (mut model, mut enforcer) = start(&unrelated());
    model.put_policy(&for_friends());
    let Effect::MayForbid(of) = enforcer.change(&mut model).unwrap() else { panic!() };
    mark(&model, Some(&of)).unwrap();
}

fn unrelated() -> NetworkPolicy {
    policy("unrelated", json!({"podSelector": {"matchLabels": {"app": "nothing"}}}))
}

fn for_friends() -> NetworkPolicy {
    let from = json!([{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}]);
    policy("allow", json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": from}))
}

/// The start of an agent: the table is replaced and all connections are checked.
fn start(policy: &NetworkPolicy) -> (Model, Enforcer) {
    let (mut model, mut enforcer) = (Model::default(), Enforcer::open("test-policies").unwrap());
    for (number, app) in [(2, "web"), (3, "friend"), (4, "other")] {
        model.put_pod(facts(ips(number), "n", app));
    }
    model.put_policy(policy);
    enforcer.replace(&mut model).unwrap();
    mark(&model, None).unwrap();
    (model, enforcer)
}

#[test]
fn the_next_agent_completes_the_changes_of_a_killed_one() {
    if is_to_be_killed() {
        return restrict_web();
    }
    on_a_bridge(|| {
        let (web, friend, other) = (Pod::on_the_bridge(2), Pod::on_the_bridge(3), Pod::on_the_bridge(4));
        // The agent passes each point first at its start, when it replaces the table and checks the connections. The
        // agent passes each point again at the change.
        for (point, is_restricted) in [
            ("policies.committed:1", false),
            ("policies.marked:1", false),
            ("policies.committed:2", true),
            ("policies.marked:2", true),
        ] {
            // This table makes the kernel track connections.
            start(&unrelated());
            let kept = Connection::open(&friend, &web, 0);
            let forbidden = Connection::open(&other, &web, 0);
            run_until_killed("the_next_agent_completes_the_changes_of_a_killed_one", point);
            assert_eq!(other.reaches(&web, 7000), [!is_restricted; 2], "a new connection after {point}");
            assert_eq!(friend.reaches(&web, 7000), [true, true], "{point}");
            start(&for_friends());
            assert_eq!(forbidden.works(), [false, false], "an open connection after {point}");
            assert_eq!(kept.works(), [true, true], "{point}");
            assert_eq!(other.reaches(&web, 7000), [false, false], "{point}");
        }
        Enforcer::open("test-policies").unwrap().remove().unwrap();
    });
}

#[test]
fn the_next_agent_reads_which_pods_have_their_policies_in_the_table() {
    const UID: &str = "0b5c1f2e-6d3a-4c1b-9a77-1f0e6c5d4b3a";
    const OTHER: &str = "0b5c1f2e-6d3a-4c1b-9a77-1f0e6c5d4b3b";
    on_a_bridge(|| {
        let (mut model, mut enforcer) = (Model::default(), Enforcer::open("test-policies").unwrap());
        let pod = |uid: &str, number: u8| {
            let mut facts = facts(ips(number), "n", "web");
            facts.uid = uid.to_owned();
            facts
        };
        let enforces = |uid: &str, number: u8| {
            Enforcer::open("test-policies").unwrap().enforces(uid, &ips(number)).unwrap()
        };
        assert!(!enforces(UID, 2), "there is no table");
        model.put_policy(&for_friends());
        model.put_pod(pod(UID, 2));
        enforcer.replace(&mut model).unwrap();
        assert!(enforces(UID, 2) && !enforces(UID, 3) && !enforces(OTHER, 2));
        model.put_pod(pod(UID, 3));
        assert!(!enforces(UID, 3), "before the transaction");
        enforcer.change(&mut model).unwrap();
        assert!(enforces(UID, 3) && !enforces(UID, 2));
        let mut next = pod(OTHER, 3);
        next.sandbox = 1;
        model.put_pod(next);
        enforcer.change(&mut model).unwrap();
        assert!(enforces(OTHER, 3) && !enforces(UID, 3), "the addresses belong to the other pod");
        model.remove_pod(OTHER);
        enforcer.change(&mut model).unwrap();
        assert!(enforces(UID, 3) && !enforces(OTHER, 3));
        let mut unknown = pod(UID, 3);
        unknown.are_policies_known = false;
        model.put_pod(unknown);
        enforcer.change(&mut model).unwrap();
        assert!(!enforces(UID, 3), "policies may be missing");
        model.put_pod(pod(UID, 3));
        assert_eq!(enforcer.change(&mut model).unwrap(), Effect::None);
        assert!(enforces(UID, 3));
        enforcer.remove().unwrap();
        assert!(!enforces(UID, 3));
    });
}

#[test]
fn rules_of_one_address_and_one_port_work_without_a_set() {
    on_a_bridge(|| {
        let (web, near, far) = (Pod::on_the_bridge(2), Pod::on_the_bridge(3), Pod::on_the_bridge(4));
        let (mut model, mut enforcer) = (Model::default(), Enforcer::open("test-policies").unwrap());
        [(&web, "web"), (&near, "near"), (&far, "far")]
            .iter()
            .for_each(|(pod, app)| model.put_pod(pod.facts("n", app)));
        let from = json!([{"ipBlock": {"cidr": "10.42.0.3/32"}}, {"ipBlock": {"cidr": "fd42::3/128"}}]);
        let rules = json!([{"from": from, "ports": [{"protocol": "UDP", "port": 7000}]}]);
        let spec = json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": rules});
        model.put_policy(&policy("one", spec));
        enforcer.replace(&mut model).unwrap();
        assert_eq!(near.reaches(&web, 7000), [true, true]);
        assert_eq!(near.reaches(&web, 7001), [false, false], "another port");
        assert_eq!(far.reaches(&web, 7000), [false, false], "another address");
        let table = Attributes::default().text(1, "test-policies");
        let (mut sets, mut channel) = (0, Channel::open().unwrap());
        channel
            .dump(Verb::GetSet, &table, |message| sets += usize::from(kind_of(message) >> 8 == 10))
            .unwrap();
        assert_eq!(sets, 10, "the fixed sets: two of each direction and family, and one of each family");
        enforcer.remove().unwrap();
    });
}

#[test]
fn blocks_of_any_number_and_size_are_exact_at_their_ends() {
    const EXCEPTIONS: u32 = 20_000;
    on_a_bridge(|| {
        let (web, near, far) = (Pod::on_the_bridge(2), Pod::on_the_bridge(3), Pod::on_the_bridge(254));
        let (mut model, mut enforcer) = (Model::default(), Enforcer::open("test-policies").unwrap());
        [(&web, "web"), (&near, "near"), (&far, "far")]
            .iter()
            .for_each(|(pod, app)| model.put_pod(pod.facts("n", app)));
        // The exceptions are the addresses of a pod, and every second address of a range, so that no two join to a
        // larger block.
        let every_second = (0..EXCEPTIONS).map(|number| std::net::Ipv4Addr::from(0x0b00_0000 + 2 * number));
        let mut v4: Vec<String> = every_second.map(|address| format!("{address}/32")).collect();
        v4.push(format!("{}/32", near.ips[0]));
        let v6 = [format!("{}/128", near.ips[1])];
        let all = json!([{"ipBlock": {"cidr": "0.0.0.0/0", "except": v4}}, {"ipBlock": {"cidr": "::/0", "except": v6}}]);
        let spec = json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{"from": all}]});
        model.put_policy(&policy("blocks", spec));
        enforcer.replace(&mut model).unwrap();
        assert_eq!(near.reaches(&web, 7000), [false, false], "an exception");
        assert_eq!(far.reaches(&web, 7000), [true, true]);
        // Blocks that overlap and repeat each other allow as much as their union.
        let blocks =
            ["10.42.0.3/32", "10.42.0.2/31", "10.42.0.3/32", "10.42.0.0/25", "fd42::3/128", "fd42::/127"];
        let blocks: Vec<_> = blocks.iter().map(|cidr| json!({"ipBlock": {"cidr": cidr}})).collect();
        let spec = json!({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{"from": blocks}]});
        model.put_policy(&policy("blocks", spec));
        enforcer.change(&mut model).unwrap();
        assert_eq!(near.reaches(&web, 7000), [true, true]);
        assert_eq!(far.reaches(&web, 7000), [false, false]);
        enforcer.remove().unwrap();
    });
}

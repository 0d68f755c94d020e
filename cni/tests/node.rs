//! The default network of a node, in its own network namespace. The tests check the state of the kernel (`ip`, `nft`,
//! connections) and need root.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test may wait and panic"
)]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use coracle_cni::{Attachment, NamespaceProcess, Network, NetworkConfig, PortMapping, Protocol};
use coracle_testing::{NamespaceThread, eventually, eventually_async, in_new_namespace_async, ip, run};
use ipnetwork::IpNetwork;

/// Hardware address of foreign bridges. A random address of the kernel can begin with our prefix. The network takes an
/// empty bridge with our prefix for a bridge that another of our processes has just created.
const FOREIGN_MAC: &str = "02:00:00:00:00:01";

/// Runs the test in a new network namespace.
fn on_a_node(test: impl AsyncFnOnce(Node) + Send + 'static) {
    in_new_namespace_async(async move || {
        ip("link set lo up");
        let dir = tempfile::tempdir().unwrap();
        let network = open(dir.path()).await;
        network.set_pod_cidrs(vec!["10.99.0.0/24".parse().unwrap()]).await.unwrap();
        test(Node { network, dir }).await;
    });
}

struct Node {
    network: Network,
    dir: tempfile::TempDir,
}

async fn open(dir: &Path) -> Network {
    open_with(dir, "coracle0").await
}

async fn open_with(dir: &Path, bridge: &str) -> Network {
    Network::open(config(dir, bridge, &bridge.replace('0', ""))).await.unwrap()
}

fn config(dir: &Path, bridge: &str, table: &str) -> NetworkConfig {
    NetworkConfig::of_default_network(dir.to_owned(), dir.join("root"), bridge, table)
}

/// A network namespace that represents a sandbox.
struct Sandbox(NamespaceThread);

impl Sandbox {
    fn new() -> Self {
        Self(NamespaceThread::start())
    }

    /// Listens on the port, and answers each connection with the address of the caller.
    fn serve(&self, port: u16) {
        let listener = self.0.within(move || TcpListener::bind(("0.0.0.0", port)).unwrap());
        std::thread::spawn(move || {
            for mut peer in listener.incoming().flatten() {
                let from = peer.peer_addr().unwrap().ip().to_string();
                peer.write_all(from.as_bytes()).ok();
            }
        });
    }
}

fn attachment(id: &str, sandbox: &Sandbox, ports: Vec<PortMapping>) -> Attachment {
    Attachment {
        id: id.into(),
        netns: sandbox.0.netns().to_owned(),
        ifname: "eth0".into(),
        ports,
        ..Attachment::default()
    }
}

fn port(host_port: u16, container_port: u16) -> PortMapping {
    PortMapping { host_ip: None, host_port, container_port, protocol: Protocol::Tcp }
}

/// The allocated addresses of the default network.
fn allocated(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir.join("networks/coracle")).unwrap();
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut allocated: Vec<_> = names.filter(|name| name.parse::<IpAddr>().is_ok()).collect();
    allocated.sort();
    allocated
}

/// The caller's address, as the server at `to` reports it.
fn caller_seen_by(to: SocketAddr) -> String {
    let connect = || TcpStream::connect_timeout(&to, Duration::from_secs(1)).ok();
    let (mut stream, mut text) = (eventually("a server", 10, connect), String::new());
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_pod_is_reached_from_the_node_and_by_its_host_port() {
    on_a_node(async |node| {
        let (a, b) = (Sandbox::new(), Sandbox::new());
        let got = node.network.add(&attachment("aaaa", &a, vec![port(8080, 80)])).await.unwrap();
        assert_eq!(got.addresses[0].to_string(), "10.99.0.2/24");
        assert_eq!(got.gateways, ["10.99.0.1".parse::<IpAddr>().unwrap()]);
        node.network.add(&attachment("bbbb", &b, vec![])).await.unwrap();
        a.serve(80);
        assert_eq!(caller_seen_by("10.99.0.2:80".parse().unwrap()), "10.99.0.1");
        assert_eq!(caller_seen_by("127.0.0.1:8080".parse().unwrap()), "10.99.0.1");
        assert_eq!(caller_seen_by("10.99.0.1:8080".parse().unwrap()), "10.99.0.1");
        let listing = run("nft", &["list", "table", "inet", "coracle"]);
        assert!(listing.contains("tcp . 8080 : 10.99.0.2 . 80"), "{listing}");
    });
}

#[test]
fn del_removes_everything_and_frees_the_address() {
    on_a_node(async |node| {
        let a = Sandbox::new();
        let before = run("ip", &["-o", "link"]).lines().count();
        node.network.add(&attachment("aaaa", &a, vec![port(8080, 80)])).await.unwrap();
        node.network.del("aaaa").await.unwrap();
        node.network.del("aaaa").await.unwrap();
        assert_eq!(run("ip", &["-o", "link"]).lines().count(), before);
        assert!(!run("nft", &["list", "ruleset"]).contains("8080"));
        assert_eq!(allocated(node.dir.path()), Vec::<String>::new());
    });
}

#[test]
fn the_interface_can_be_created_again_when_del_returns() {
    on_a_node(async |node| {
        let sandbox = Sandbox::new();
        let before = links_and_addresses();
        for round in 0..30 {
            node.network.add(&attachment("aaaa", &sandbox, vec![])).await.unwrap();
            assert!(run_in(&sandbox, &["ip", "-o", "link"]).contains("eth0"));
            node.network.del("aaaa").await.unwrap();
            assert!(!run_in(&sandbox, &["ip", "-o", "link"]).contains("eth0"), "round {round}");
            let ports = run("ip", &["-o", "link", "show", "master", "coracle0"]);
            assert_eq!(ports, "", "round {round}");
            assert!(run("ip", &["route", "get", "10.99.0.2"]).contains("coracle0"));
        }
        assert_eq!(names(&before), names(&links_and_addresses()));
    });
}

#[test]
fn concurrent_adds_and_dels_do_not_interfere() {
    on_a_node(async |node| {
        let sandboxes: Vec<Sandbox> = (0..12).map(|_| Sandbox::new()).collect();
        for round in 0..10 {
            let ids: Vec<String> =
                (0..sandboxes.len()).map(|number| format!("{number:02}-{round}")).collect();
            let pods: Vec<Attachment> =
                ids.iter().zip(&sandboxes).map(|(id, sandbox)| attachment(id, sandbox, vec![])).collect();
            let added = futures::future::join_all(pods.iter().map(|pod| node.network.add(pod))).await;
            let mut addresses: Vec<_> = added.into_iter().map(|got| got.unwrap().addresses[0]).collect();
            addresses.sort();
            addresses.dedup();
            assert_eq!(addresses.len(), sandboxes.len());
            for gone in futures::future::join_all(ids.iter().map(|id| node.network.del(id))).await {
                gone.unwrap();
            }
        }
        assert_eq!(allocated(node.dir.path()), Vec::<String>::new());
    });
}

/// An attachment that requests addresses and a hardware address.
fn requesting(id: &str, sandbox: &Sandbox, ips: &[&str], mac: Option<&str>) -> Attachment {
    let mut at = attachment(id, sandbox, vec![]);
    at.capabilities.extend((!ips.is_empty()).then(|| ("ips".to_owned(), serde_json::json!(ips))));
    at.capabilities.extend(mac.map(|mac| ("mac".to_owned(), serde_json::json!(mac))));
    at
}

#[test]
fn the_result_describes_the_end_on_the_host_as_the_kernel_shows_it() {
    on_a_node(async |node| {
        let a = Sandbox::new();
        node.network.add(&requesting("aaaa", &a, &[], None)).await.unwrap();
        let answer = node.network.answer("aaaa").unwrap();
        let mut interfaces = answer["interfaces"].as_array().unwrap().iter();
        let end = interfaces.find(|found| found["name"].as_str().unwrap().starts_with("veth")).unwrap();
        let shown = run("ip", &["-o", "link", "show", end["name"].as_str().unwrap()]);
        assert!(shown.contains(&format!("link/ether {} ", end["mac"].as_str().unwrap())), "{shown}");
        assert!(shown.contains(&format!(" mtu {} ", end["mtu"])), "{shown}");
    });
}

#[test]
fn a_sandbox_gets_the_requested_addresses_or_nothing_is_left() {
    on_a_node(async |node| {
        let (a, b) = (Sandbox::new(), Sandbox::new());
        let mac = "0a:00:00:00:00:77";
        let first = requesting("aaaa", &a, &["10.99.0.77"], Some(mac));
        node.network.check_requested(&first).await.unwrap();
        let got = node.network.add(&first).await.unwrap();
        assert_eq!((got.addresses[0].to_string(), got.mac.as_str()), ("10.99.0.77/24".into(), mac));
        let inside = run_in(&a, &["ip", "addr", "show", "eth0"]);
        assert!(inside.contains(mac) && inside.contains("10.99.0.77/24"), "{inside}");
        let records = || std::fs::read_dir(node.dir.path().join("results")).unwrap().count();
        let before = (links_and_addresses(), allocated(node.dir.path()), records());
        for (ips, mac, message) in [
            (vec!["10.99.0.77"], None, "the address 10.99.0.77 is taken by aaaa"),
            (vec!["10.98.0.7"], None, "ips: 10.98.0.7 is in no range of the network: 10.99.0.0/24"),
            (vec!["fd99::7"], None, "ips: fd99::7 is in no range of the network: 10.99.0.0/24"),
            (vec!["10.99.0.1"], None, "ips: 10.99.0.1 is the gateway of 10.99.0.0/24"),
            (vec!["10.99.0.255"], None, "ips: 10.99.0.255 is in no range of the network: 10.99.0.0/24"),
            (vec!["10.99.0.78", "10.99.0.79"], None, "which assigns one address"),
            (vec![], Some(mac), "the hardware address 0a:00:00:00:00:77 is taken by aaaa"),
        ] {
            let second = requesting("bbbb", &b, &ips, mac);
            for refused in
                [node.network.check_requested(&second).await, node.network.add(&second).await.map(drop)]
            {
                let error = refused.unwrap_err().to_string();
                assert!(error.ends_with(message), "{error}");
            }
        }
        for wrong in ["01:00:00:00:00:77", "00:00:00:00:00:00", "0a:00", ""] {
            let error = node.network.add(&requesting("bbbb", &b, &[], Some(wrong))).await.unwrap_err();
            assert!(error.to_string().starts_with("runtimeConfig.mac"), "{error}");
        }
        let shown = run("ip", &["-o", "link", "show", "coracle0"]);
        let of_bridge = shown.split_once("link/ether ").unwrap().1.split(' ').next().unwrap();
        let error = node.network.add(&requesting("bbbb", &b, &[], Some(of_bridge))).await.unwrap_err();
        assert!(error.to_string().starts_with("runtimeConfig.mac"), "{error}");
        assert_eq!((links_and_addresses(), allocated(node.dir.path()), records()), before);
        // A released sandbox still exists for a moment, and delays no other call.
        node.network.release("aaaa").await.unwrap();
        let second = requesting("bbbb", &b, &["10.99.0.77/24"], Some(mac));
        node.network.check_requested(&second).await.unwrap();
        assert_eq!(node.network.add(&second).await.unwrap().addresses, got.addresses);
    });
}

/// Many IPv6 addresses have the same derived hardware address. A pod that could choose this address would receive the
/// frames for another pod.
#[test]
fn a_sandbox_chooses_no_derived_hardware_address_by_its_ipv6_address() {
    on_a_node(async |node| {
        node.network.set_pod_cidrs(vec!["fd99::/64".parse().unwrap()]).await.unwrap();
        let a = Sandbox::new();
        let derived = node.network.add(&requesting("aaaa", &a, &[], None)).await.unwrap();
        node.network.del("aaaa").await.unwrap();
        let ip = derived.addresses[0].ip().to_string();
        let with = requesting("aaaa", &a, &[ip.as_str()], Some(derived.mac.as_str()));
        let error = node.network.add(&with).await.unwrap_err();
        assert!(error.to_string().starts_with("runtimeConfig.mac"), "{error}");
        let chosen = node.network.add(&requesting("aaaa", &a, &[ip.as_str()], None)).await.unwrap();
        assert_eq!(chosen.addresses, derived.addresses);
        assert_ne!(chosen.mac, derived.mac);
        drop(a);
    });
}

#[test]
fn a_crash_leaks_nothing_after_reconciling() {
    on_a_node(async |node| {
        let (a, b) = (Sandbox::new(), Sandbox::new());
        let ours = node.network.add(&attachment("aaaa", &a, vec![])).await.unwrap().host_interfaces;
        let theirs =
            node.network.add(&attachment("bbbb", &b, vec![port(81, 81)])).await.unwrap().host_interfaces;
        std::fs::remove_file(node.dir.path().join("networks/coracle/10.99.0.2")).unwrap();
        std::fs::write(node.dir.path().join("networks/coracle/10.99.0.77"), "stranger\neth0").unwrap();
        drop(node.network);
        run("nft", &["flush", "ruleset"]);

        let again = open(node.dir.path()).await;
        again.set_pod_cidrs(vec!["10.99.0.0/24".parse().unwrap()]).await.unwrap();
        again.reconcile(&[attachment("aaaa", &a, vec![])]).await.unwrap();
        assert_eq!(allocated(node.dir.path()), ["10.99.0.2"]);
        eventually("the interface is removed", 10, || !run("ip", &["-o", "link"]).contains(&theirs[1]));
        assert!(run("ip", &["-o", "link"]).contains(&ours[1]));
        a.serve(80);
        assert_eq!(caller_seen_by("10.99.0.2:80".parse().unwrap()), "10.99.0.1");
    });
}

/// After the end of a sandbox's process, the kernel may reuse the pid. Then the path leads to the namespace of another
/// process.
#[test]
fn a_sandbox_without_a_record_is_adopted_only_while_its_process_is_alive() {
    on_a_node(async |node| {
        let a = Sandbox::new();
        node.network.add(&attachment("aaaa", &a, vec![])).await.unwrap();
        let mut network = node.network;
        for is_alive in [true, false] {
            drop(network);
            std::fs::remove_file(node.dir.path().join("results/aaaa.json")).unwrap();
            network = open(node.dir.path()).await;
            let process = Some(NamespaceProcess::new(move || is_alive));
            let live = Attachment { process, ..attachment("aaaa", &a, vec![]) };
            // The ranges are set after the first reconcile, as on a node.
            network.reconcile(&[live]).await.unwrap();
            network.set_pod_cidrs(vec!["10.99.0.0/24".parse().unwrap()]).await.unwrap();
            assert_eq!(network.answer("aaaa").is_some(), is_alive);
        }
        assert_eq!(allocated(node.dir.path()), Vec::<String>::new());
    });
}

#[test]
fn a_host_port_is_unique_and_a_foreign_interface_is_not_changed() {
    on_a_node(async |node| {
        let (a, b) = (Sandbox::new(), Sandbox::new());
        node.network.add(&attachment("aaaa", &a, vec![port(8080, 80)])).await.unwrap();
        let error = node.network.add(&attachment("bbbb", &b, vec![port(8080, 81)])).await.unwrap_err();
        assert_eq!(error.to_string(), "host port 8080/tcp is taken by sandbox aaaa");
        assert_eq!(run("ip", &["-o", "link"]).matches("veth").count(), 1);

        run("ip", &["link", "add", "foreign0", "type", "veth", "peer", "name", "foreign1"]);
        let second = open_with(&node.dir.path().join("second"), "foreign0").await;
        let error = second.set_pod_cidrs(vec!["10.98.0.0/24".parse().unwrap()]).await.unwrap_err();
        assert_eq!(error.to_string(), "an interface named foreign0 exists and is not a bridge");
        assert!(second.ready().is_err());
    });
}

#[test]
fn removing_the_network_leaves_the_machine_as_it_was() {
    on_a_node(async |node| {
        let a = Sandbox::new();
        node.network.add(&attachment("aaaa", &a, vec![port(8080, 80)])).await.unwrap();
        node.network.remove().await.unwrap();
        assert_eq!(run("ip", &["-o", "link"]).lines().count(), 1);
        assert_eq!(run("nft", &["list", "ruleset"]), "");
    });
}

/// Runs a program in the sandbox's network namespace.
fn run_in(sandbox: &Sandbox, arguments: &[&str]) -> String {
    let netns = format!("--net={}", sandbox.0.netns().display());
    run("nsenter", &[&[netns.as_str()], arguments].concat())
}

#[test]
fn running_pods_get_the_networks_new_mtu() {
    on_a_node(async |node| {
        let (a, b) = (Sandbox::new(), Sandbox::new());
        node.network.set_mtu(Some(1400)).await.unwrap();
        let host_a = node.network.add(&attachment("aaaa", &a, vec![])).await.unwrap().host_interfaces;
        let host_b = node.network.add(&attachment("bbbb", &b, vec![])).await.unwrap().host_interfaces;
        let mtus = || {
            let mtu_of = |text: String| {
                let words: Vec<&str> = text.split_whitespace().collect();
                words[words.iter().position(|word| *word == "mtu").unwrap() + 1].parse::<u32>().unwrap()
            };
            let outside = |name: &str| mtu_of(run("ip", &["link", "show", name]));
            let inside = |sandbox: &Sandbox| mtu_of(run_in(sandbox, &["ip", "link", "show", "eth0"]));
            [outside("coracle0"), outside(&host_a[1]), inside(&a), outside(&host_b[1]), inside(&b)]
        };
        assert_eq!(mtus(), [1400; 5]);
        // A smaller MTU that was set in a pod is kept.
        run_in(&b, &["ip", "link", "set", "eth0", "mtu", "1350"]);
        node.network.set_mtu(Some(1380)).await.unwrap();
        assert_eq!(mtus(), [1380, 1380, 1380, 1380, 1350]);
        node.network.set_mtu(Some(1300)).await.unwrap();
        assert_eq!(mtus(), [1300; 5]);
        node.network.check("aaaa").await.unwrap();
        // After a restart the network finds the pods unchanged.
        drop(node.network);
        let again = open(node.dir.path()).await;
        again.set_mtu(Some(1450)).await.unwrap();
        again.set_pod_cidrs(vec!["10.99.0.0/24".parse().unwrap()]).await.unwrap();
        assert_eq!(mtus(), [1450; 5]);
        again.check("aaaa").await.unwrap();
        again.del("aaaa").await.unwrap();
    });
}

/// The links and their addresses.
fn links_and_addresses() -> String {
    run("ip", &["addr"])
}

/// The names of the links.
fn names(links_and_addresses: &str) -> Vec<&str> {
    links_and_addresses
        .lines()
        .filter(|line| !line.starts_with(' '))
        .filter_map(|line| line.split(": ").nth(1))
        .collect()
}

#[test]
fn a_foreign_bridge_with_the_configured_name_is_refused_and_not_changed() {
    on_a_node(async |node| {
        // A foreign bridge with a gateway address and a container.
        run("ip", &["link", "add", "foreign0", "type", "bridge"]);
        run("ip", &["addr", "add", "10.98.0.1/24", "dev", "foreign0"]);
        run("ip", &["link", "add", "veththeirs", "type", "veth", "peer", "name", "theirs"]);
        run("ip", &["link", "set", "veththeirs", "master", "foreign0", "up"]);
        run("ip", &["link", "set", "foreign0", "address", "0a:00:00:00:00:01", "up"]);
        run("ip", &["addr", "add", "192.0.2.1/24", "dev", "foreign0"]);
        eventually("no address is tentative", 10, || !links_and_addresses().contains("tentative"));
        let before = links_and_addresses();
        let second = async || open_with(&node.dir.path().join("second"), "foreign0").await;
        let network = second().await;
        let error = network.set_pod_cidrs(vec!["10.98.0.0/24".parse().unwrap()]).await.unwrap_err();
        let expected = "the bridge foreign0 exists and was not made by coracle: use another name (--bridge), or remove it if it \
                    is unused (ip link delete foreign0)";
        assert_eq!(error.to_string(), expected);
        assert_eq!(network.ready().unwrap_err(), expected);
        let sandbox = Sandbox::new();
        assert!(network.add(&attachment("aaaa", &sandbox, vec![])).await.is_err());
        network.reconcile(&[]).await.unwrap();
        assert_eq!(links_and_addresses(), before);
        network.remove().await.unwrap();
        assert_eq!(links_and_addresses(), before);

        // The bridge is deleted and another program takes its name: the next ADD fails.
        run("ip", &["link", "delete", "coracle0"]);
        run("ip", &["link", "add", "coracle0", "address", FOREIGN_MAC, "type", "bridge"]);
        let before = links_and_addresses();
        let error = node.network.add(&attachment("bbbb", &sandbox, vec![])).await.unwrap_err();
        assert!(error.to_string().contains("coracle0 exists and was not made by coracle"), "{error}");
        assert_eq!(node.network.status().await.unwrap_err(), error.to_string());
        assert_eq!(links_and_addresses(), before);
        // After the foreign bridge is deleted, the next ADD creates the bridge again.
        run("ip", &["link", "delete", "coracle0"]);
        node.network.add(&attachment("bbbb", &sandbox, vec![])).await.unwrap();
        assert!(run("ip", &["link", "show", "coracle0"]).contains("alias coracle"));
    });
}

#[test]
fn a_second_network_with_the_same_bridge_or_table_is_refused() {
    on_a_node(async |node| {
        let second = node.dir.path().join("second");
        let refused = async |bridge: &str, table: &str, expected: &str| {
            let refused = Network::open(config(&second, bridge, table)).await.err().unwrap();
            assert_eq!(refused.to_string(), expected);
            assert!(!second.exists(), "the refused network created its directory");
        };
        // Each call waits some seconds for the end of the other process, so the calls run at the same time.
        tokio::join!(
            refused(
                "coracle0",
                "second",
                "the bridge coracle0 is in use by another runtime or agent in this network namespace: \
                stop it, or use another name (--bridge)",
            ),
            refused(
                "second0",
                "coracle",
                "the nftables table coracle is in use by another runtime or agent in this network \
                namespace: stop it, or use another name (--nft-table)",
            ),
        );
        open_with(&second, "second0").await;
        // In another network namespace the names are free.
        let elsewhere = second.clone();
        on_a_node(async move |other| drop((other, open_with(&elsewhere, "second0").await)));
        // The new network waits for the end of the previous one, as after a restart of the agent.
        let mut again = Box::pin(open(node.dir.path()));
        assert!(futures::poll!(&mut again).is_pending(), "the names are in use");
        drop(node.network);
        let again = again.await;
        again.set_pod_cidrs(vec!["10.99.0.0/24".parse().unwrap()]).await.unwrap();
    });
}

/// With snooping, each new port makes the kernel set the timers of all ports.
#[test]
fn the_bridge_does_not_snoop_on_multicast() {
    on_a_node(async |node| {
        let snoops = || run("ip", &["-d", "link", "show", "coracle0"]).contains("mcast_snooping 1");
        assert!(!snoops());
        run("ip", &["link", "set", "coracle0", "type", "bridge", "mcast_snooping", "1"]);
        assert!(snoops(), "a bridge of an earlier version snoops");
        let sandbox = Sandbox::new();
        node.network.add(&attachment("aaaa", &sandbox, vec![])).await.unwrap();
        assert!(!snoops());
        node.network.remove().await.unwrap();
    });
}

#[test]
fn an_unmarked_bridge_of_an_earlier_version_is_adopted() {
    on_a_node(async |node| {
        let unmark = || drop(run("ip", &["link", "set", "coracle0", "alias", ""]));
        let is_marked = || run("ip", &["link", "show", "coracle0"]).contains("alias coracle");
        assert!(is_marked());
        let sandbox = Sandbox::new();
        node.network.add(&attachment("aaaa", &sandbox, vec![])).await.unwrap();
        unmark();
        drop(node.network);
        // The bridge is marked even if the ranges differ, because its addresses are those of the last configuration.
        let again = open(node.dir.path()).await;
        again.set_pod_cidrs(vec!["10.97.0.0/24".parse().unwrap()]).await.unwrap();
        assert!(is_marked() && run("ip", &["addr", "show", "coracle0"]).contains("10.97.0.1/24"));
        // The state after a crash between creation and marking.
        let link = run("ip", &["-o", "link", "show", "coracle0"]);
        let mac = link.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).unwrap();
        run("ip", &["link", "delete", "coracle0"]);
        run("ip", &["link", "add", "coracle0", "address", mac, "type", "bridge"]);
        again.set_pod_cidrs(vec!["10.97.0.0/24".parse().unwrap()]).await.unwrap();
        assert!(is_marked());
        unmark();
        drop(again);
        open(node.dir.path()).await.remove().await.unwrap();
        assert!(!run("ip", &["link"]).contains("coracle0"));
    });
}

#[test]
fn deleting_the_directory_of_addresses_causes_no_duplicate() {
    on_a_node(async |node| {
        let sandboxes: Vec<Sandbox> = (0..4).map(|_| Sandbox::new()).collect();
        let add = async |number: usize| {
            let at =
                attachment(&format!("pod{number}"), &sandboxes[number], vec![port(8080 + number as u16, 80)]);
            node.network.add(&at).await.unwrap().addresses[0].ip().to_string()
        };
        assert_eq!(add(0).await, "10.99.0.2");
        std::fs::remove_dir_all(node.dir.path().join("networks/coracle")).unwrap();
        assert_eq!(add(1).await, "10.99.0.3");
        assert_eq!(allocated(node.dir.path()), ["10.99.0.2", "10.99.0.3"]);
        for dir in ["networks", "results", "firewall"] {
            std::fs::remove_dir_all(node.dir.path().join(dir)).unwrap();
        }
        assert_eq!(add(2).await, "10.99.0.4");
        // DEL removes the pod's address only.
        node.network.del("pod1").await.unwrap();
        std::fs::remove_file(node.dir.path().join("networks/coracle/10.99.0.2")).unwrap();
        assert_eq!(add(3).await, "10.99.0.5");
        assert_eq!(allocated(node.dir.path()), ["10.99.0.2", "10.99.0.4", "10.99.0.5"]);
        for id in ["pod0", "pod2", "pod3"] {
            node.network.del(id).await.unwrap();
        }
        assert_eq!(allocated(node.dir.path()), Vec::<String>::new());
    });
}

/// The ranges in a set of the node's table: first and last address of each.
fn elements(set: &str) -> Vec<(u128, u128)> {
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    let address = |text: &serde_json::Value| bits(text.as_str().unwrap().parse().unwrap());
    let listing = run("nft", &["-j", "list", "set", "inet", "coracle", set]);
    let listing: serde_json::Value = serde_json::from_str(&listing).unwrap();
    let elements = listing["nftables"][1]["set"]["elem"].as_array().unwrap();
    let mut ranges: Vec<_> = elements
        .iter()
        .map(|element| match (element.get("prefix"), element.get("range")) {
            (Some(prefix), _) => {
                let first = prefix["addr"].as_str().unwrap().parse().unwrap();
                let network =
                    IpNetwork::new(first, u8::try_from(prefix["len"].as_u64().unwrap()).unwrap()).unwrap();
                (bits(first), bits(network.broadcast()))
            }
            (_, Some(range)) => (address(&range[0]), address(&range[1])),
            _ => (address(element), address(element)),
        })
        .collect();
    ranges.sort_unstable();
    ranges
}

/// The ranges that a list of networks covers, computed independently of the kernel.
fn covered(networks: &[IpNetwork], v4: bool) -> Vec<(u128, u128)> {
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    let mut all: Vec<_> = networks
        .iter()
        .filter(|network| network.is_ipv4() == v4)
        .map(|network| (bits(network.network()), bits(network.broadcast())))
        .collect();
    all.sort_unstable();
    let mut ranges: Vec<(u128, u128)> = Vec::new();
    for (first, last) in all {
        match ranges.last_mut() {
            Some(before) if first <= before.1 + 1 => before.1 = before.1.max(last),
            _ => ranges.push((first, last)),
        }
    }
    ranges
}

/// The table's handle. It changes when the table is recreated.
fn handle() -> u64 {
    let tables: serde_json::Value = serde_json::from_str(&run("nft", &["-j", "list", "tables"])).unwrap();
    let mut tables = tables["nftables"].as_array().unwrap().iter().map(|table| &table["table"]);
    tables.find(|table| table["name"] == "coracle").unwrap()["handle"].as_u64().unwrap()
}

/// The pod ranges of another node.
fn ranges_of(number: u32) -> [IpNetwork; 2] {
    let [_, _, high, low] = (number * 2).to_be_bytes();
    let v6 = std::net::Ipv6Addr::new(0xfd42, 0, u16::from_be_bytes([high, low]), 0, 0, 0, 0, 0);
    [IpNetwork::new([10, 100 + high, low, 0].into(), 24).unwrap(), IpNetwork::new(v6.into(), 48).unwrap()]
}

/// Changes the ranges at random: each step removes a range, or adds an unrelated, an adjoining or a containing range.
fn changed(mut ranges: Vec<IpNetwork>, random: &mut u32) -> Vec<IpNetwork> {
    for _ in 0..5 {
        *random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let at = (*random >> 8) as usize % ranges.len();
        let range = ranges[at];
        let next = match range.broadcast() {
            IpAddr::V4(last) => IpAddr::V4((last.to_bits() + 1).into()),
            IpAddr::V6(last) => IpAddr::V6((last.to_bits() + 1).into()),
        };
        match *random >> 30 {
            0 => drop(ranges.swap_remove(at)),
            1 => ranges.extend(ranges_of(1000 + (*random >> 20) % 2000)),
            2 => ranges.push(IpNetwork::new(next, range.prefix()).unwrap()),
            _ => {
                let wider = IpNetwork::new(range.network(), range.prefix() - 2).unwrap();
                ranges.push(IpNetwork::new(wider.network(), wider.prefix()).unwrap());
            }
        }
    }
    ranges
}

/// Asserts that the kernel has exactly these ranges.
fn check_ranges(wanted: &[IpNetwork]) {
    for (set, v4) in [("not_beyond_10.99.0.0_24", true), ("not_beyond_fd99___64", false)] {
        assert_eq!(elements(set), covered(wanted, v4));
    }
}

#[test]
fn packets_to_a_thousand_nodes_are_not_masqueraded() {
    on_a_node(async |node| {
        let network = &node.network;
        network.set_pod_cidrs(own_ranges()).await.unwrap();
        let mut wanted: Vec<IpNetwork> = Vec::new();
        for count in [1, 45, 1000] {
            wanted = (0..count).flat_map(ranges_of).collect();
            network.set_unmasqueraded(wanted.clone()).await.unwrap();
            check_ranges(&wanted);
        }
        // The rest of the table is unchanged.
        let rules = || run("nft", &["list", "chain", "inet", "coracle", "postrouting"]);
        let (table, before, mut random) = (handle(), rules(), 7);
        for _ in 0..40 {
            wanted = changed(wanted, &mut random);
            network.set_unmasqueraded(wanted.clone()).await.unwrap();
            check_ranges(&wanted);
        }
        assert_eq!((handle(), rules()), (table, before));
        // Host ports still work, and a flushed table is repaired.
        let sandbox = Sandbox::new();
        network.add(&attachment("aaaa", &sandbox, vec![port(8080, 80)])).await.unwrap();
        let has_port = || {
            let table = Command::new("nft").args(["list", "table", "inet", "coracle"]).output().unwrap();
            String::from_utf8_lossy(&table.stdout).contains("tcp . 8080 : 10.99.0.2 . 80")
        };
        assert!(has_port());
        run("nft", &["flush", "ruleset"]);
        eventually_async("the host port is back", 10, async || has_port()).await;
        check_ranges(&wanted);
        // The repair ends: the handle of the table no longer changes.
        let mut last = 0;
        eventually_async("the repair ends", 10, async || {
            let now = handle();
            std::mem::replace(&mut last, now) == now
        })
        .await;
        network.del("aaaa").await.unwrap();
        assert!(!has_port());
        check_ranges(&wanted);
        network.set_unmasqueraded(Vec::new()).await.unwrap();
        assert!(!rules().contains("not_beyond"));
    });
}

/// The pod ranges of a dual-stack node.
fn own_ranges() -> Vec<IpNetwork> {
    vec!["10.99.0.0/24".parse().unwrap(), "fd99::/64".parse().unwrap()]
}

#[test]
fn a_pod_may_have_thousands_of_host_ports() {
    on_a_node(async |node| {
        node.network.set_pod_cidrs(own_ranges()).await.unwrap();
        let (a, b) = (Sandbox::new(), Sandbox::new());
        let ports = |from: u16| (from..from + 2000).map(|number| port(number, number)).collect();
        let count = || {
            let table = run("nft", &["list", "table", "inet", "coracle"]);
            [table.matches(" : 10.99.0.").count(), table.matches(" : fd99::").count()]
        };
        node.network.add(&attachment("aaaa", &a, ports(10000))).await.unwrap();
        assert_eq!(count(), [2000, 2000]);
        node.network.add(&attachment("bbbb", &b, ports(20000))).await.unwrap();
        assert_eq!(count(), [4000, 4000]);
        run("nft", &["flush", "ruleset"]);
        eventually_async("the rules of 4000 ports", 10, async || {
            run("nft", &["list", "ruleset"]).contains("11999") && count() == [4000, 4000]
        })
        .await;
        node.network.del("aaaa").await.unwrap();
        assert_eq!(count(), [2000, 2000]);
        node.network.del("bbbb").await.unwrap();
        assert_eq!(count(), [0, 0]);
    });
}

#[test]
fn ranges_without_masquerading_survive_a_restart() {
    on_a_node(async |node| {
        let ranges: Vec<IpNetwork> = (0..3).flat_map(ranges_of).collect();
        node.network.set_unmasqueraded(ranges.clone()).await.unwrap();
        drop(node.network);
        let again = open(node.dir.path()).await;
        again.set_pod_cidrs(vec!["10.99.0.0/24".parse().unwrap()]).await.unwrap();
        assert_eq!(elements("not_beyond_10.99.0.0_24"), covered(&ranges, true));
        // The stored ranges are used until new ones are set.
        again.set_unmasqueraded(ranges[..2].to_vec()).await.unwrap();
        assert_eq!(elements("not_beyond_10.99.0.0_24"), covered(&ranges[..2], true));
        again.set_unmasqueraded(Vec::new()).await.unwrap();
        drop(again);
        let again = open(node.dir.path()).await;
        again.set_pod_cidrs(vec!["10.98.0.0/24".parse().unwrap()]).await.unwrap();
        assert!(
            !run("nft", &["list", "table", "inet", "coracle"]).contains("not_beyond"),
            "the former pod range of the node"
        );
    });
}

#[test]
fn an_mtu_that_could_not_be_set_is_retried() {
    on_a_node(async |node| {
        run("ip", &["link", "delete", "coracle0"]);
        run("ip", &["link", "add", "coracle0", "address", FOREIGN_MAC, "type", "bridge"]);
        let error = node.network.set_mtu(Some(1400)).await.unwrap_err();
        assert!(error.to_string().contains("was not made by coracle"), "{error}");
        run("ip", &["link", "delete", "coracle0"]);
        node.network.set_mtu(Some(1400)).await.unwrap();
        assert!(run("ip", &["link", "show", "coracle0"]).contains("mtu 1400"));
    });
}

#[test]
fn a_table_of_another_owner_fails_every_attempt() {
    on_a_node(async |node| {
        let sandbox = Sandbox::new();
        node.network.add(&attachment("aaaa", &sandbox, vec![port(8080, 80)])).await.unwrap();
        // Another program becomes the exclusive owner of the table.
        let mut owner = Command::new("nft").arg("-i").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let script = "delete table inet coracle; add table inet coracle { flags owner; }\n";
        owner.stdin.as_mut().unwrap().write_all(script.as_bytes()).unwrap();
        eventually_async("the owned table", 10, async || {
            run("nft", &["list", "tables"]).contains("coracle")
                && run("nft", &["list", "table", "inet", "coracle"]).contains("flags owner")
        })
        .await;
        for _ in 0..3 {
            let error = node.network.del("aaaa").await.unwrap_err();
            assert!(error.to_string().contains("nftables table coracle"), "{error}");
        }
        drop(owner.stdin.take());
        owner.wait().unwrap();
        node.network.del("aaaa").await.unwrap();
        let table = run("nft", &["list", "table", "inet", "coracle"]);
        assert!(table.contains("masquerade") && !table.contains("8080"), "{table}");
    });
}

#[test]
fn a_failed_removal_of_a_released_network_is_retried() {
    on_a_node(async |node| {
        let sandbox = Sandbox::new();
        let host = node.network.add(&attachment("aaaa", &sandbox, vec![])).await.unwrap().host_interfaces;
        // The file of the address cannot be read.
        let file = node.dir.path().join("networks/coracle/10.99.0.2");
        std::fs::rename(&file, file.with_extension("away")).unwrap();
        std::fs::create_dir(&file).unwrap();
        node.network.release("aaaa").await.unwrap();
        eventually_async("the interface is removed", 10, async || {
            !run("ip", &["-o", "link"]).contains(&host[1])
        })
        .await;
        // This attempt waits for the running removal, which fails. The attempt also fails, and the record stays.
        node.network.del("aaaa").await.unwrap_err();
        assert!(node.dir.path().join("results/aaaa.json").exists());
        std::fs::remove_dir(&file).unwrap();
        std::fs::rename(file.with_extension("away"), &file).unwrap();
        eventually_async("the record is removed", 10, async || {
            !node.dir.path().join("results/aaaa.json").exists()
        })
        .await;
        assert_eq!(allocated(node.dir.path()), Vec::<String>::new());
    });
}

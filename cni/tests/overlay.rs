//! Overlays between network namespaces. The tests check the tables of the kernel (`ip`, `bridge`) and send packets.
//! They need root.
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test may wait and panic"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::mpsc;
use std::time::Duration;

use coracle_cni::{
    Announcement, Backend, End, Local, Offload, Overlay, OverlayConfig, Peer, PeerKind, ProbeResult, examine,
};
use coracle_testing::{NamespaceThread, in_new_namespace_async, ip, run, until};
use nix::sched::{CloneFlags, unshare};

/// A timeout that even a slow machine does not reach.
const LONG: Duration = Duration::from_secs(60);
const VXLAN: Backend = Backend::Vxlan { vni: 1, port: 8472, direct_routing: false };

/// Runs the test in a new network namespace.
fn in_a_namespace(test: impl AsyncFnOnce() + Send + 'static) {
    in_new_namespace_async(async move || {
        ip("link set lo up");
        test().await;
    });
}

/// An overlay of node 1, with the interface eth0 as its uplink.
fn with_uplink() -> Overlay {
    ip("link add eth0 type veth peer name eth1");
    uplink(1);
    Overlay::open(config(1, VXLAN)).unwrap()
}

/// Waits until the overlay notices a foreign change. After the timeout the panic names the change `what`.
async fn wait_for_foreign_change(overlay: &mut Overlay, what: &impl std::fmt::Debug) {
    let change = tokio::time::timeout(LONG, overlay.foreign_change());
    change.await.unwrap_or_else(|_| panic!("not noticed: {what:?}"));
}

/// Bytes of notifications that no netlink socket of this namespace has read yet.
fn unread_notifications() -> u64 {
    let sockets = std::fs::read_to_string("/proc/thread-self/net/netlink").unwrap();
    let rows = sockets.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    // The columns are address, protocol, port, groups, bytes in the receive queue, and others.
    rows.filter(|row| row[3] != "00000000").map(|row| row[4].parse::<u64>().unwrap()).sum()
}

/// Waits until the overlay has read all notifications. Returns whether one of them was a foreign change.
async fn has_foreign_change(overlay: &mut Overlay) -> bool {
    assert!(unread_notifications() > 0, "the overlay's socket is not found");
    let read = async {
        until("the overlay to read its notifications", 20, || unread_notifications() == 0).await;
        // After a foreign change, the overlay waits 5 ms for related ones. Its timer starts before this one and is
        // polled first, so the result does not depend on the speed of the machine.
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    tokio::select! {
        biased;
        () = overlay.foreign_change() => true,
        () = read => false,
    }
}

fn config(number: u8, backend: Backend) -> OverlayConfig {
    OverlayConfig {
        backend,
        interface: "coracle.1".into(),
        identity: format!("node-{number}"),
        mtu: None,
        udp_port: 8285,
        route_protocol: OverlayConfig::ROUTE_PROTOCOL,
    }
}

fn local(number: u8) -> Local {
    Local {
        cidrs: vec![
            format!("10.42.{number}.0/24").parse().unwrap(),
            format!("fd42:0:0:{number}::/64").parse().unwrap(),
        ],
        addresses: addresses(number),
    }
}

fn addresses(number: u8) -> Vec<IpAddr> {
    vec![format!("192.0.2.{number}").parse().unwrap(), format!("2001:db8::{number:x}").parse().unwrap()]
}

/// The node with this number, as a peer of another node.
fn peer(number: u8, backend: Backend) -> (String, Peer) {
    let overlay = Overlay::open(config(number, backend)).unwrap();
    let Announcement { kind, ends } = overlay.announced(&addresses(number));
    (format!("node-{number}"), Peer { cidrs: local(number).cidrs, kind, ends, bridged: true })
}

fn uplink(number: u8) {
    ip(&format!("addr add 192.0.2.{number}/24 dev eth0"));
    ip(&format!("addr add 2001:db8::{number:x}/64 dev eth0 nodad"));
    ip("link set eth0 up");
    // Address of a pod.
    ip(&format!("addr add 10.42.{number}.7/24 dev lo"));
    ip(&format!("addr add fd42:0:0:{number}::7/64 dev lo nodad"));
    // Address of the bridge.
    ip(&format!("addr add 10.42.{number}.1/24 dev lo"));
    ip(&format!("addr add fd42:0:0:{number}::1/64 dev lo nodad"));
}

/// Another node, on a thread in its own namespace. Its pod echoes datagrams to port 7.
struct Other {
    tid: i32,
    commands: mpsc::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

impl Other {
    fn new(number: u8, backend: Backend, peers: BTreeMap<String, Peer>) -> Self {
        let (send, received) = mpsc::channel();
        let (commands, wait) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            ip("link set lo up");
            send.send(nix::unistd::gettid().as_raw()).unwrap();
            wait.recv().unwrap();
            uplink(number);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut overlay = Overlay::open(config(number, backend)).unwrap();
                let applied = overlay.apply(&local(number), &peers, &BTreeMap::new()).unwrap();
                assert_eq!(applied.refused, []);
                for ip in [format!("10.42.{number}.7"), format!("fd42:0:0:{number}::7")] {
                    let socket = tokio::net::UdpSocket::bind((ip.as_str(), 7)).await.unwrap();
                    tokio::spawn(async move {
                        let mut buffer = vec![0; 65536];
                        while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
                            socket.send_to(&buffer[..length], from).await.ok();
                        }
                    });
                }
                send.send(0).unwrap();
                let ended = tokio::task::spawn_blocking(move || wait.recv());
                drop(ended.await);
            });
        });
        let tid = received.recv().unwrap();
        ip(&format!("link add eth0 type veth peer name eth0 netns {tid}"));
        commands.send(()).unwrap();
        received.recv().unwrap();
        Self { tid, commands, thread }
    }

    fn end(self) {
        drop(self.commands);
        self.thread.join().unwrap();
    }
}

/// Whether a datagram of that length returns from the other node's pod.
fn echoes(from: &str, to: &str, length: usize) -> bool {
    let socket = UdpSocket::bind((from, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let (to, mut buffer) = (SocketAddr::new(to.parse().unwrap(), 7), vec![0; 65536]);
    // The first packet may be lost: the underlay's neighbour is unknown, or the path MTU is smaller.
    let answered = coracle_testing::within(10, || {
        socket.send_to(&vec![7; length], to).is_ok()
            && socket.recv(&mut buffer).is_ok_and(|answered| answered == length)
    });
    answered.is_some()
}

fn reaches_everything(mtu: usize) {
    for length in [8, mtu - 48, 8 * mtu] {
        assert!(echoes("10.42.1.7", "10.42.2.7", length), "IPv4, {length} bytes\n{}", ip("route"));
        assert!(echoes("fd42:0:0:1::7", "fd42:0:0:2::7", length), "IPv6, {length} bytes\n{}", ip("-6 route"));
    }
    // The node itself sends with its default source address.
    assert!(echoes("0.0.0.0", "10.42.2.7", 100) && echoes("::", "fd42:0:0:2::7", 100));
}

fn between_two_nodes(backend: Backend, mtu: u32, test: impl FnOnce(&mut Overlay, &Other) + Send + 'static) {
    in_a_namespace(async move || {
        let (one, two) = (peer(1, backend), peer(2, backend));
        let other = Other::new(2, backend, BTreeMap::from([one]));
        uplink(1);
        let mut overlay = Overlay::open(config(1, backend)).unwrap();
        let applied = overlay.apply(&local(1), &BTreeMap::from([two]), &BTreeMap::new()).unwrap();
        assert_eq!((applied.mtu, &applied.refused[..]), (Some(mtu), &[][..]));
        let length = mtu as usize;
        // Tasks of this async runtime carry the packets of the tunnel.
        let thread = std::thread::spawn({
            let namespace = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
            move || {
                nix::sched::setns(namespace, CloneFlags::CLONE_NEWNET).unwrap();
                reaches_everything(length);
            }
        });
        coracle_testing::until("the answers to all packets", 60, || thread.is_finished()).await;
        thread.join().unwrap();
        test(&mut overlay, &other);
        overlay.remove().unwrap();
        assert!(!ip("link").contains("coracle"), "{}", ip("link"));
        assert!(
            !ip("route").contains("10.42.2.0") && !ip("-6 route").contains("fd42:0:0:2"),
            "{}",
            ip("route")
        );
        other.end();
    });
}

#[test]
fn pods_reach_pods_by_vxlan_in_both_families() {
    between_two_nodes(VXLAN, 1430, |_, _| {
        let link = ip("-d link show coracle.1");
        assert!(
            link.contains("vxlan id 1 local 192.0.2.1 dev eth0") && link.contains("nolearning"),
            "{link}"
        );
        assert!(link.contains("dstport 8472") && link.contains("mtu 1450"), "{link}");
        let link = ip("-d link show coracle.1-v6");
        assert!(link.contains("local 2001:db8::1 dev eth0") && link.contains("mtu 1430"), "{link}");
        let route = ip("route show 10.42.2.0/24");
        assert!(route.starts_with("10.42.2.0/24 via 10.42.2.0 dev coracle.1"), "{route}");
        assert!(
            ip("neigh show dev coracle.1").contains("10.42.2.0 lladdr") && ip("neigh").contains("PERMANENT")
        );
        assert!(run("bridge", &["fdb", "show", "dev", "coracle.1"]).contains("dst 192.0.2.2"));
    });
}

#[test]
fn pods_reach_pods_with_another_vni_and_port() {
    let other = Backend::Vxlan { vni: 77_777, port: 4790, direct_routing: false };
    between_two_nodes(other, 1430, |overlay, _| {
        let link = ip("-d link show coracle.1");
        assert!(link.contains("vxlan id 77777") && link.contains("dstport 4790"), "{link}");
        assert_eq!(probe_results(overlay), [(1450, true), (1430, true)]);
        // A peer with another VNI is refused.
        let peers = BTreeMap::from([peer(2, VXLAN)]);
        let refused = overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap().refused;
        assert!(refused[0].1.contains("its VNI is 1, this node's is 77777"), "{refused:?}");
    });
}

#[test]
fn pods_reach_pods_by_routes_alone() {
    between_two_nodes(Backend::HostGw, 1500, |overlay, _| {
        assert_eq!(probe_results(overlay), [(1500, true); 2]);
        assert!(ip("route show 10.42.2.0/24").starts_with("10.42.2.0/24 via 192.0.2.2 dev eth0"));
    });
}

#[test]
fn pods_reach_pods_in_udp_where_the_kernel_has_no_vxlan() {
    between_two_nodes(Backend::Udp, 1452, |overlay, _| {
        assert!(ip("-d link show coracle.1-udp").contains("tun type tun"));
        // A tun device never computes checksums, so that the setting stays as it is.
        overlay.set_offload(false).unwrap();
        assert!(!ip("link show coracle.1-udp").contains("checksum offload is off"));
        assert_eq!(overlay.offload().unwrap(), Offload::On);
    });
}

/// Processor time of this thread.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    // utime and stime, in ticks of 10 ms.
    Duration::from_millis(fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap() * 10).sum())
}

#[test]
fn a_deleted_tun_device_keeps_no_processor_busy() {
    in_a_namespace(async || {
        ip("link add eth0 type veth peer name eth1");
        uplink(1);
        let mut overlay = Overlay::open(config(1, Backend::Udp)).unwrap();
        let peers = BTreeMap::from([peer(2, Backend::Udp)]);
        overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap();
        ip("link del coracle.1-udp");
        let before = processor_time();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let busy = processor_time() - before;
        assert!(busy < Duration::from_millis(300), "{busy:?} in a second");
        tokio::time::timeout(LONG, overlay.foreign_change()).await.unwrap();
        overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap();
        assert!(ip("-d link show coracle.1-udp").contains("tun type tun"));
    });
}

/// The path MTU to the other node, and whether packets with offloaded checksums arrive there. For IPv4 and IPv6.
fn probe_results(overlay: &Overlay) -> Vec<(u32, bool)> {
    let found = examine(&overlay.paths(&BTreeSet::from(["node-2".to_owned()]))).unwrap();
    found.into_iter().map(|ProbeResult { bytes, offloaded }| (bytes, offloaded)).collect()
}

#[test]
fn path_mtus_and_offload_faults_are_found() {
    between_two_nodes(VXLAN, 1430, |overlay, other| {
        let run_on_other_node = |line: &str| {
            let namespace = format!("--net=/proc/{}/ns/net", other.tid);
            run("nsenter", &[&[namespace.as_str()], &line.split(' ').collect::<Vec<_>>()[..]].concat());
        };
        assert_eq!(probe_results(overlay), [(1450, true), (1430, true)]);
        // A link with a smaller MTU, which drops larger packets without a message.
        run_on_other_node("ip link set eth0 mtu 1400");
        for (bytes, offloaded) in probe_results(overlay) {
            assert!(offloaded && (1320..=1354).contains(&bytes), "{bytes}");
        }
        run_on_other_node("ip link set eth0 mtu 1500");
        // Packets with offloaded checksums are lost.
        run_on_other_node("nft add table inet lossy");
        run_on_other_node("nft add chain inet lossy in { type filter hook input priority 0 ; }");
        run_on_other_node("nft add rule inet lossy in udp dport 9 drop");
        assert_eq!(probe_results(overlay), [(1450, false), (1430, false)]);
        // After a restart, the overlay knows whether its own test or another program has disabled the offload.
        let offload = || overlay.offload().unwrap();
        assert_eq!(offload(), Offload::On);
        overlay.set_offload(false).unwrap();
        assert_eq!(offload(), Offload::OffByTest);
        assert!(ip("link show coracle.1").contains("checksum offload is off"));
        run("ip", &["link", "set", "coracle.1", "alias", ""]);
        assert_eq!(offload(), Offload::OffByOthers, "as `ethtool -K` leaves it");
        overlay.set_offload(true).unwrap();
        assert_eq!(offload(), Offload::On);
        run_on_other_node("nft delete table inet lossy");
        overlay.set_offload(false).unwrap();
        assert_eq!(probe_results(overlay), [(1450, true), (1430, true)]);
        run_on_other_node("ip link set eth0 down");
        assert_eq!(probe_results(overlay), [(0, false); 2]);
    });
}

/// The answers of one round exceed the socket's buffer.
#[test]
fn a_thousand_faultless_paths_have_no_false_positive() {
    in_a_namespace(async || {
        let path = |number: u32| {
            let to = std::net::Ipv4Addr::from_bits(0x7f01_0000 + number).into();
            coracle_cni::ProbePath { peer: format!("peer-{number}"), to, mtu: 1450 }
        };
        let paths: Vec<_> = (0..1000).map(path).collect();
        let found = examine(&paths).unwrap();
        let faultless =
            found.iter().filter(|passes| **passes == ProbeResult { bytes: 1450, offloaded: true }).count();
        assert_eq!(faultless, paths.len());
    });
}

/// Our entries in the kernel's tables, as `ip` and `bridge` print them.
fn tables() -> String {
    if !ip("-br link").contains("coracle.1 ") {
        return "no device".to_owned();
    }
    let links = ip("-o link");
    // The comparison leaves out the interface index, which differs after a device is recreated.
    let name_of = |line: &str| Some(line.split(" qdisc").next()?.split_once(": ")?.1.to_owned());
    let devices: Vec<String> = links.lines().filter(|l| l.contains("coracle")).filter_map(name_of).collect();
    let mut all: Vec<String> = [
        devices.join("\n"),
        ip("-br addr show dev coracle.1"),
        run("bridge", &["fdb", "show", "dev", "coracle.1"]),
        ip("neigh show nud permanent dev coracle.1"),
        ip("route show proto 67"),
        ip("-6 route show proto 67"),
    ]
    .iter()
    .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
    .collect();
    all.sort();
    all.join("\n")
}

fn peers(count: u32) -> BTreeMap<String, Peer> {
    let (_, like) = peer(2, VXLAN);
    let one = |number: u32| {
        let (high, low) = (number / 250, number % 250);
        let mut ends = like.ends.clone();
        for end in &mut ends {
            end.ip = match end.ip {
                IpAddr::V4(_) => format!("198.18.{high}.{low}").parse().unwrap(),
                IpAddr::V6(_) => format!("2001:db8:1::{number:x}").parse().unwrap(),
            };
            let [.., a, b] = number.to_be_bytes();
            end.vtep = Some((1, [2, 0, u8::from(end.ip.is_ipv6()), 0, a, b]));
        }
        let cidrs = vec![
            format!("10.{}.{low}.0/24", 100 + high).parse().unwrap(),
            format!("fd42:0:1:{number:x}::/64").parse().unwrap(),
        ];
        (format!("peer-{number}"), Peer { cidrs, kind: like.kind, ends, bridged: true })
    };
    (0..count).map(one).collect()
}

#[test]
fn foreign_changes_are_notified_and_repaired() {
    in_a_namespace(async || {
        let mut overlay = with_uplink();
        let peers = peers(50);
        overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap();
        let expected = tables();
        assert_eq!(expected.lines().filter(|l| l.starts_with("10.")).count(), 2 * 50, "{expected}");
        for damage in [
            "link del coracle.1",
            "link set coracle.1 down",
            "link set coracle.1 mtu 1300",
            "addr del 10.42.1.0/32 dev coracle.1",
            "route flush proto 67",
            "-6 route del fd42:0:1:7::/64",
            "route replace 10.100.7.0/24 via 192.0.2.9",
            "neigh flush dev coracle.1 nud permanent",
            "neigh add 10.77.0.0 lladdr 02:00:00:00:00:77 dev coracle.1 nud permanent",
            "neigh replace 10.100.9.0 lladdr 02:00:00:00:00:77 dev coracle.1 nud permanent",
        ] {
            ip(damage);
            assert!(tables() != expected, "no damage: {damage}");
            wait_for_foreign_change(&mut overlay, &damage).await;
            overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap();
            assert!(tables() == expected, "after {damage}\n{}", tables());
        }
        for arguments in [
            &["fdb", "del", "02:00:00:00:00:05", "dev", "coracle.1"][..],
            &["fdb", "append", "02:00:00:00:00:77", "dev", "coracle.1", "dst", "192.0.2.77"],
        ] {
            run("bridge", arguments);
            wait_for_foreign_change(&mut overlay, &arguments).await;
            overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap();
            assert!(tables() == expected, "after {arguments:?}\n{}", tables());
        }
        // The overlay's MTU follows the uplink's.
        ip("link set eth0 mtu 1400");
        tokio::time::timeout(LONG, overlay.foreign_change()).await.unwrap();
        assert_eq!(overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap().mtu, Some(1330));
        assert!(ip("link show coracle.1").contains("mtu 1350"));
    });
}

#[test]
fn similar_foreign_objects_are_not_taken_for_ours() {
    in_a_namespace(async || {
        let mut overlay = with_uplink();
        let peers = peers(50);
        overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap();
        let fdb = || run("bridge", &["fdb", "show", "dev", "coracle.1"]);
        let entry = fdb().lines().find(|line| line.starts_with("02:00:00:00:00:05")).unwrap().to_owned();
        let to = entry.split("dst ").nth(1).unwrap().split(' ').next().unwrap().to_owned();
        for (what, value) in [("port", "9999"), ("vni", "77")] {
            let of = ["fdb", "replace", "02:00:00:00:00:05", "dev", "coracle.1", "dst", &to, what, value];
            run("bridge", &of);
            assert!(fdb().contains(&format!("{what} {value}")), "{}", fdb());
            wait_for_foreign_change(&mut overlay, &of).await;
            overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap();
            assert!(fdb().contains(&entry) && !fdb().contains(value), "after {of:?}\n{}", fdb());
        }
        // A route with another metric is not ours.
        let shown =
            || ip("route show 10.100.7.0/24").split('\n').map(|l| l.trim().to_owned()).collect::<Vec<_>>();
        let ours = shown()[0].clone();
        ip(&format!("route add {ours} metric 5"));
        ip("route del 10.100.7.0/24");
        assert!(!shown().contains(&ours), "{:?}", shown());
        tokio::time::timeout(LONG, overlay.foreign_change()).await.unwrap();
        overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap();
        assert!(shown().contains(&ours), "{:?}", shown());
        ip("route del 10.100.7.0/24 metric 5");
    });
}

#[test]
fn own_changes_and_those_of_pods_are_not_notified() {
    in_a_namespace(async || {
        let mut overlay = with_uplink();
        // The kernel reports an interface without a carrier up to a second later. This would be a change of the uplink.
        ip("link set eth1 up");
        until("the carrier of the uplink", 20, || ip("link show eth0").contains("state UP")).await;
        let mut peers = peers(1000);
        assert!(overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap().changes > 6000);
        assert_eq!(tables().lines().filter(|line| line.contains("via fd42")).count(), 1000);
        // These notifications exceed the buffer of the socket. The overlay discards them after a foreign change.
        let foreign = "neigh add 10.77.0.0 lladdr 02:00:00:00:00:77 dev coracle.1 nud permanent";
        ip(foreign);
        wait_for_foreign_change(&mut overlay, &foreign).await;
        assert_eq!(overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap().changes, 1);
        peers.remove("peer-7");
        peers.get_mut("peer-8").unwrap().ends[0].ip = "198.19.0.1".parse().unwrap();
        assert_eq!(overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap().changes, 6 + 2);
        assert_eq!(overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap().changes, 0);
        ip("link add vethpod type veth peer name pod0");
        ip("link set vethpod up");
        ip("neigh add 10.42.1.9 lladdr 02:00:00:00:00:09 dev vethpod nud reachable");
        ip("link del vethpod");
        assert!(!has_foreign_change(&mut overlay).await);
        // A foreign change among the same notifications is noticed.
        assert_eq!(overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap().changes, 0);
        ip(foreign);
        assert!(has_foreign_change(&mut overlay).await);
        assert_eq!(overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap().changes, 1);
        // A second process finds nothing to change.
        let mut again = Overlay::open(config(1, VXLAN)).unwrap();
        assert_eq!(again.apply(&local(1), &peers, &BTreeMap::new()).unwrap().changes, 0);
    });
}

#[test]
fn an_address_may_change_and_a_foreign_interface_is_not_changed() {
    in_a_namespace(async || {
        let mut overlay = with_uplink();
        let peers = peers(3);
        overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap();
        ip("addr add 192.0.2.99/24 dev eth0");
        let moved = Local { addresses: vec!["192.0.2.99".parse().unwrap(), addresses(1)[1]], ..local(1) };
        overlay.apply(&moved, &peers, &BTreeMap::new()).unwrap();
        assert!(ip("-d link show coracle.1").contains("local 192.0.2.99 dev eth0"));
        let gone = Local { addresses: vec!["192.0.2.200".parse().unwrap()], ..local(1) };
        let error = overlay.apply(&gone, &peers, &BTreeMap::new()).unwrap_err();
        assert_eq!(error.to_string(), "no interface has an address of this node (192.0.2.200)");
        overlay.remove().unwrap();
        ip("link add coracle.1 type bridge");
        let error = overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "an interface named coracle.1 exists and is not a device of the overlay; remove it or use --overlay-interface"
        );
        assert!(ip("-d link show coracle.1").contains("bridge"));
    });
}

#[test]
fn two_overlays_in_a_network_namespace_keep_their_own_routes() {
    in_a_namespace(async || {
        let mut one = with_uplink();
        one.lock_names().await.unwrap();
        let same = |interface: &str| OverlayConfig { interface: interface.into(), ..config(1, VXLAN) };
        let refused = async |interface: &str, taken: &str, setting: &str| {
            let refused = Overlay::open(same(interface)).unwrap().lock_names().await.unwrap_err();
            let why = refused.to_string();
            assert!(why.contains(taken) && why.contains(setting), "{why}");
        };
        // Each call waits some seconds for the end of the other process, so the calls run at the same time.
        tokio::join!(
            refused("coracle.1", "overlay interface coracle.1", "--overlay-interface"),
            refused("coracle.3", "route protocol number 67", "--overlay-route-protocol"),
        );
        let backend = Backend::Vxlan { vni: 2, port: 8472, direct_routing: true };
        let other = OverlayConfig { interface: "coracle.2".into(), route_protocol: 68, ..config(1, backend) };
        let mut other = Overlay::open(other).unwrap();
        other.lock_names().await.unwrap();
        one.apply(&local(1), &peers(3), &BTreeMap::new()).unwrap();
        let near = Peer {
            cidrs: vec!["10.77.2.0/24".parse().unwrap()],
            kind: PeerKind::Vxlan,
            ends: vec![End { ip: "192.0.2.2".parse().unwrap(), vtep: Some((2, [2, 0, 0, 0, 0, 2])) }],
            bridged: true,
        };
        let far = Peer {
            cidrs: vec!["10.77.3.0/24".parse().unwrap()],
            ends: vec![End { ip: "198.18.9.3".parse().unwrap(), vtep: Some((2, [2, 0, 0, 0, 0, 3])) }],
            ..near.clone()
        };
        let theirs = BTreeMap::from([("near".to_owned(), near), ("far".to_owned(), far)]);
        let of_other = Local { cidrs: vec!["10.77.1.0/24".parse().unwrap()], ..local(1) };
        other.apply(&of_other, &theirs, &BTreeMap::new()).unwrap();
        let routes = |number: u8| ip(&format!("route show proto {number}")).lines().count();
        assert_eq!((routes(67), routes(68)), (3, 2));
        // Each overlay reads all tables, as after a start, and finds nothing to remove.
        let mut again = Overlay::open(config(1, VXLAN)).unwrap();
        assert_eq!(again.apply(&local(1), &peers(3), &BTreeMap::new()).unwrap().changes, 0);
        one.remove().unwrap();
        assert_eq!((routes(67), routes(68)), (0, 2));
        drop(one);
        Overlay::open(same("coracle.1")).unwrap().lock_names().await.unwrap();
    });
}

#[test]
fn a_foreign_device_with_the_same_vni_is_reported_and_its_removal_is_noticed() {
    in_a_namespace(async || {
        let mut overlay = with_uplink();
        let peers = peers(3);
        ip("link add flannel.1 type vxlan id 1 dstport 8472 local 192.0.2.1 dev eth0 nolearning");
        // The next two devices do not conflict.
        ip("link add vxlan.2 type vxlan id 2 dstport 8472 local 192.0.2.1 dev eth0 nolearning");
        ip("link add vxlan.3 type vxlan id 1 dstport 4789 local 192.0.2.1 dev eth0 nolearning");
        for _ in 0..2 {
            let error = overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap_err();
            let expected = "cannot make coracle.1: the interface flannel.1 has the VNI 1 on UDP port 8472; remove it, or \
                        give all nodes another --overlay-vni";
            assert_eq!(error.to_string(), expected);
            assert!(ip("-d link show flannel.1").contains("vxlan id 1"), "a foreign device is not changed");
        }
        ip("link del flannel.1");
        tokio::time::timeout(LONG, overlay.foreign_change()).await.unwrap();
        overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap();
        assert_eq!(ip("route show proto 67").lines().count(), 3);
        // A device on another link still receives packets for its VNI.
        overlay.remove().unwrap();
        ip("link add flannel.1 type vxlan id 1 dstport 8472 local 192.0.2.1 dev eth0 nolearning");
        let other = NamespaceThread::start();
        ip(&format!("link set flannel.1 netns {}", other.netns().display()));
        let error = overlay.apply(&local(1), &peers, &BTreeMap::new()).unwrap_err().to_string();
        assert!(error.contains("moved to another network namespace has the VNI 1"), "{error}");
    });
}

//! Attacks on a node by a pod that may send any frame (CAP_NET_RAW). The tests need root.

#![allow(
    unsafe_code,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test may wait and panic, and AF_PACKET sockets have no safe address type"
)]

use std::net::{Ipv6Addr, UdpSocket};
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use coracle_cni::{Attachment, Network, NetworkConfig, PortMapping, Protocol};
use coracle_testing::{NamespaceThread, eventually, in_new_namespace_async, ip};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

const BRIDGE: &str = "coracle0";
/// Addresses of the entries that forged frames would change.
const VICTIMS: [&str; 2] = ["10.99.0.77", "fd99::77"];
const ALL_NODES: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
/// Destination of a link-local protocol. A bridge does not forward such frames: the host receives them at the port.
const OF_THE_PORT: [u8; 6] = [0x01, 0x80, 0xc2, 0, 0, 2];

/// A pod whose programs may send any frame.
struct Pod(NamespaceThread);

impl Pod {
    fn new() -> Self {
        Self(NamespaceThread::start())
    }

    fn send(&self, frame: Vec<u8>) {
        self.within(move || send(&frame));
    }

    fn mac(&self) -> [u8; 6] {
        self.within(|| mac_of("eth0"))
    }
}

impl Deref for Pod {
    type Target = NamespaceThread;

    fn deref(&self) -> &NamespaceThread {
        &self.0
    }
}

/// `check_sources` enables the source filter. Tests of another defence disable it, because it drops forged frames
/// first.
fn on_a_node(check_sources: bool, test: impl AsyncFnOnce(Network, Pod) + Send + 'static) {
    in_new_namespace_async(async move || {
        ip("link set lo up");
        let dir = tempfile::tempdir().unwrap();
        let (state, root) = (dir.path().to_owned(), dir.path().join("root"));
        let config = NetworkConfig::of_default_network(state, root, BRIDGE, "coracle");
        let config = NetworkConfig { check_sources, ..config };
        let network = Network::open(config).await.unwrap();
        network.set_pod_cidrs(vec!["10.99.0.0/24".parse().unwrap()]).await.unwrap();
        test(network, Pod::new()).await;
    });
}

async fn add(network: &Network, pod: &Pod, ports: Vec<PortMapping>) {
    add_as("aaaa", network, pod, ports).await;
}

async fn add_as(id: &str, network: &Network, pod: &Pod, ports: Vec<PortMapping>) {
    let (id, netns, ifname) = (id.to_owned(), pod.netns().to_owned(), "eth0".into());
    network.add(&Attachment { id, netns, ifname, ports, ..Attachment::default() }).await.unwrap();
}

/// Adds the pod and a second pod. Returns the second pod.
async fn add_with_another(network: &Network, pod: &Pod) -> Pod {
    add(network, pod, Vec::new()).await;
    let another = Pod::new();
    add_as("bbbb", network, &another, Vec::new()).await;
    until_received(pod);
    another
}

/// Sends a raw frame.
fn send(frame: &[u8]) {
    send_times(frame, 1);
}

/// Sends a raw frame as often as given.
fn send_times(frame: &[u8], times: u64) {
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None).unwrap();
    // SAFETY: all-zero bytes are a valid sockaddr_ll.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = u16::try_from(libc::AF_PACKET).unwrap();
    to.sll_ifindex = nix::net::if_::if_nametoindex("eth0").unwrap().cast_signed();
    let length = u32::try_from(size_of_val(&to)).unwrap();
    for _ in 0..times {
        // SAFETY: frame and address outlive the call, and the lengths are those of frame and address.
        let sent = unsafe {
            libc::sendto(
                socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const to).cast(),
                length,
            )
        };
        assert_eq!(sent, isize::try_from(frame.len()).unwrap(), "{}", std::io::Error::last_os_error());
    }
}

fn mac_of(interface: &str) -> [u8; 6] {
    let shown = ip(&format!("-o link show {interface}"));
    let text = shown.split_once("link/ether ").unwrap().1.split(' ').next().unwrap();
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let sum: u32 = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    (!u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap()).to_be_bytes()
}

/// A router advertisement of 2001:db8:bad::/64 and a default route (RFC 4861 §4.2).
fn router_advertisement(from: [u8; 6], to: [u8; 6]) -> Vec<u8> {
    let (router, all): (Ipv6Addr, Ipv6Addr) = ("fe80::bad".parse().unwrap(), "ff02::1".parse().unwrap());
    let prefix: Ipv6Addr = "2001:db8:bad::".parse().unwrap();
    let hour = 3600u32.to_be_bytes();
    let mut body = vec![134, 0, 0, 0, 64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0];
    body.extend([&[3, 4, 64, 0xc0][..], &hour, &hour, &[0; 4], &prefix.octets()].concat());
    let length = u16::try_from(body.len()).unwrap().to_be_bytes();
    let addresses = [router.octets(), all.octets()].concat();
    let sum = checksum(&[&addresses[..], &[0, 0], &length, &[0, 0, 0, 58], &body].concat());
    body[2..4].copy_from_slice(&sum);
    let header = [&[0x60, 0, 0, 0][..], &length, &[58, 255], &addresses].concat();
    [&to[..], &from, &[0x86, 0xdd], &header, &body].concat()
}

/// A UDP datagram from the pod to a port of `to`, in a frame to the bridge.
fn datagram(from: [u8; 6], to: [u8; 4], port: u16) -> Vec<u8> {
    let mut header = [0x45, 0, 0, 32, 0, 1, 0, 0, 64, 17, 0, 0, 10, 99, 0, 2, 0, 0, 0, 0];
    header[16..].copy_from_slice(&to);
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum);
    let port = port.to_be_bytes();
    let udp = [&[0x1b, 0x58][..], &port, &[0, 12, 0, 0], b"evil"].concat();
    [&mac_of(BRIDGE)[..], &from, &[8, 0], &header, &udp].concat()
}

/// The datagram with a source address that is not the pod's.
fn forged_datagram(from: [u8; 6], port: u16) -> Vec<u8> {
    let mut frame = datagram(from, [10, 99, 0, 1], port);
    frame[29] = 9;
    let sum = checksum(&[&frame[14..24], &[0, 0], &frame[26..34]].concat());
    frame[24..26].copy_from_slice(&sum);
    frame
}

/// The header of an IPv4 packet with this length in bytes.
fn ipv4(protocol: u8, length: u16, from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
    let length = length.to_be_bytes();
    let mut header = [&[0x45, 0][..], &length, &[0, 1, 0, 0, 64, protocol, 0, 0], &from, &to].concat();
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum);
    header
}

/// The pod's message "port unreachable" about a datagram from a port of the node to port 9 of `to` (RFC 792).
fn unreachable_port(from: [u8; 6], port: u16, to: [u8; 4]) -> Vec<u8> {
    let node = [10, 99, 0, 1];
    let about = [&ipv4(17, 28, node, to)[..], &port.to_be_bytes(), &[0, 9, 0, 8, 0, 0]].concat();
    let mut message = [&[3, 3, 0, 0, 0, 0, 0, 0][..], &about].concat();
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum);
    let header = ipv4(1, 56, [10, 99, 0, 2], node);
    [&mac_of(BRIDGE)[..], &from, &[8, 0], &header, &message].concat()
}

/// A UDP datagram over IPv6, in a frame to the bridge.
fn datagram6(from: [u8; 6], source: Ipv6Addr, to: Ipv6Addr, port: u16) -> Vec<u8> {
    let mut udp = [&[0x1b, 0x58][..], &port.to_be_bytes(), &[0, 12, 0, 0], b"evil"].concat();
    let addresses = [source.octets(), to.octets()].concat();
    let sum = checksum(&[&addresses[..], &[0, 0, 0, 12], &[0, 0, 0, 17], &udp].concat());
    udp[6..8].copy_from_slice(&sum);
    let header = [&[0x60, 0, 0, 0, 0, 12, 17, 64][..], &addresses].concat();
    [&mac_of(BRIDGE)[..], &from, &[0x86, 0xdd], &header, &udp].concat()
}

/// An ICMPv6 error of this type to the node, about a datagram of the node to `about` (RFC 4443, section 2.1).
fn error6(from: [u8; 6], kind: u8, source: Ipv6Addr, about: Ipv6Addr) -> Vec<u8> {
    let node: Ipv6Addr = "fd99::1".parse().unwrap();
    let datagram = [0x1b, 0x58, 0, 9, 0, 8, 0, 0];
    let inner = [&[0x60, 0, 0, 0, 0, 8, 17, 64][..], &node.octets(), &about.octets(), &datagram].concat();
    let mut message = [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &inner].concat();
    let addresses = [source.octets(), node.octets()].concat();
    let sum = checksum(&[&addresses[..], &[0, 0, 0, 56], &[0, 0, 0, 58], &message].concat());
    message[2..4].copy_from_slice(&sum);
    let header = [&[0x60, 0, 0, 0, 0, 56, 58, 64][..], &addresses].concat();
    [&mac_of(BRIDGE)[..], &from, &[0x86, 0xdd], &header, &message].concat()
}

/// Binds a socket, and retries while the address is in use. A process that another test starts inherits the sockets of
/// this process until its execve. So the address of a closed socket may still be in use.
fn bound(at: &str) -> UdpSocket {
    eventually("the address is free", 20, || UdpSocket::bind(at).ok())
}

/// Waits until the node has received all previous frames of the pod. The node receives them in order.
fn until_received(pod: &Pod) {
    let socket = bound("10.99.0.1:7000");
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let frame = datagram(pod.mac(), [10, 99, 0, 1], 7000);
    eventually("the pod's datagrams arrive", 20, || {
        pod.send(frame.clone());
        socket.recv(&mut [0; 64]).is_ok()
    });
}

/// Whether the node has accepted the advertisement. Removes the accepted routes and addresses.
fn accepted_advertisement() -> bool {
    let accepted = ip("-6 addr").contains("2001:db8:bad:") || ip("-6 route show").contains("fe80::bad");
    ip("-6 route flush proto ra");
    ip("-6 addr flush to 2001:db8:bad::/48");
    accepted
}

#[test]
fn a_pod_is_not_the_nodes_router() {
    on_a_node(false, async |network, pod| {
        add(&network, &pod, Vec::new()).await;
        let (bridge, port) = (BRIDGE.to_owned(), ip("-o link show master coracle0"));
        let port = port.split(": ").nth(1).unwrap().split('@').next().unwrap().to_owned();
        for (interface, to) in [(bridge, ALL_NODES), (port, OF_THE_PORT)] {
            let setting = |name: &str| format!("/proc/sys/net/ipv6/conf/{interface}/{name}");
            // An interface accepts no advertisement before it has an address of its own.
            let has_address = || {
                let own = ip(&format!("-6 addr show dev {interface} scope link"));
                own.contains("fe80::") && !own.contains("tentative")
            };
            // The port of a pod has no IPv6.
            let is_port = to == OF_THE_PORT;
            if is_port {
                assert_eq!(std::fs::read_to_string(setting("disable_ipv6")).unwrap().trim(), "1");
            } else {
                eventually("the bridge has its own address", 20, has_address);
            }
            let frame = router_advertisement(pod.mac(), to);
            pod.send(frame.clone());
            until_received(&pod);
            assert!(!accepted_advertisement(), "{interface}: {}", ip("-6 addr"));
            // The advertisement is valid: with other settings the interface accepts it.
            let set_accept_ra = |word: &str| std::fs::write(setting("accept_ra"), word).unwrap();
            if is_port {
                std::fs::write(setting("disable_ipv6"), "0").unwrap();
                eventually("the port has its own address", 20, has_address);
            }
            set_accept_ra("1");
            eventually("the advertisement is accepted with accept_ra=1", 20, || {
                pod.send(frame.clone());
                until_received(&pod);
                accepted_advertisement()
            });
            set_accept_ra("0");
            accepted_advertisement();
        }
    });
}

#[test]
fn a_pod_does_not_reach_ports_of_the_nodes_loopback() {
    on_a_node(false, async |network, pod| {
        let secret = UdpSocket::bind("127.0.0.1:7777").unwrap();
        secret.set_nonblocking(true).unwrap();
        let opened = || {
            let path = format!("/proc/sys/net/ipv4/conf/{BRIDGE}/route_localnet");
            std::fs::read_to_string(path).unwrap().trim() == "1"
        };
        let port =
            PortMapping { host_ip: None, host_port: 8080, container_port: 80, protocol: Protocol::Udp };
        // Without a host port the kernel drops such packets. With a host port the firewall's rules must drop them.
        for ports in [Vec::new(), vec![port]] {
            let has_port = !ports.is_empty();
            add(&network, &pod, ports).await;
            assert_eq!(opened(), has_port);
            until_received(&pod);
            pod.send(datagram(pod.mac(), [127, 0, 0, 1], 7777));
            until_received(&pod);
            assert!(secret.recv(&mut [0; 64]).is_err(), "host port: {has_port}");
            if has_port {
                // Without the rules the packet arrives. Nothing restores the rules before the end of this check.
                let flushed =
                    Command::new("nft").args(["flush", "chain", "inet", "coracle", "input"]).status();
                assert!(flushed.unwrap().success());
                eventually("the datagram arrives without the rules", 20, || {
                    pod.send(datagram(pod.mac(), [127, 0, 0, 1], 7777));
                    until_received(&pod);
                    secret.recv(&mut [0; 64]).is_ok()
                });
            }
            let echo = pod.within(|| bound("0.0.0.0:80"));
            let client = UdpSocket::bind("127.0.0.1:0").unwrap();
            client.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            if has_port {
                eventually("the host port answers the node", 20, || {
                    echo.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
                    client.send_to(b"who", "127.0.0.1:8080").unwrap();
                    if let Ok((_, from)) = echo.recv_from(&mut [0; 64]) {
                        echo.send_to(b"pod", from).unwrap();
                    }
                    client.recv(&mut [0; 64]).is_ok()
                });
            }
            network.del("aaaa").await.unwrap();
            assert!(!opened());
        }
    });
}

/// A gratuitous ARP reply that claims an address (RFC 826).
fn gratuitous_arp(from: [u8; 6], address: [u8; 4]) -> Vec<u8> {
    let header = [0, 1, 8, 0, 6, 4, 0, 2];
    [&[0xff; 6][..], &from, &[8, 6], &header, &from, &address, &[0xff; 6], &address].concat()
}

/// A neighbour advertisement that overrides the entry of an address (RFC 4861 §4.4).
fn neighbour_advertisement(from: [u8; 6], source: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let all: Ipv6Addr = "ff02::1".parse().unwrap();
    let mut body = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
    body.extend([&target.octets()[..], &[2, 1], &from].concat());
    let length = u16::try_from(body.len()).unwrap().to_be_bytes();
    let addresses = [source.octets(), all.octets()].concat();
    let sum = checksum(&[&addresses[..], &[0, 0], &length, &[0, 0, 0, 58], &body].concat());
    body[2..4].copy_from_slice(&sum);
    let header = [&[0x60, 0, 0, 0][..], &length, &[58, 255], &addresses].concat();
    [&ALL_NODES[..], &from, &[0x86, 0xdd], &header, &body].concat()
}

/// A router solicitation (RFC 4861 §4.1), to all nodes, so that a node that is not a router receives it as well.
fn router_solicitation(from: [u8; 6], source: Ipv6Addr) -> Vec<u8> {
    let all: Ipv6Addr = "ff02::1".parse().unwrap();
    let mut body = [133, 0, 0, 0, 0, 0, 0, 0];
    let addresses = [source.octets(), all.octets()].concat();
    let sum = checksum(&[&addresses[..], &[0, 0, 0, 8], &[0, 0, 0, 58], &body].concat());
    body[2..4].copy_from_slice(&sum);
    let header = [&[0x60, 0, 0, 0, 0, 8, 58, 255][..], &addresses].concat();
    [&ALL_NODES[..], &from, &[0x86, 0xdd], &header, &body].concat()
}

/// A neighbour solicitation for the address `target` (RFC 4861 §4.3), to all nodes.
fn neighbour_solicitation(from: [u8; 6], source: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let all: Ipv6Addr = "ff02::1".parse().unwrap();
    let mut body = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target.octets()].concat();
    let addresses = [source.octets(), all.octets()].concat();
    let sum = checksum(&[&addresses[..], &[0, 0, 0, 24], &[0, 0, 0, 58], &body].concat());
    body[2..4].copy_from_slice(&sum);
    let header = [&[0x60, 0, 0, 0, 0, 24, 58, 255][..], &addresses].concat();
    [&ALL_NODES[..], &from, &[0x86, 0xdd], &header, &body].concat()
}

/// A counter of ICMPv6 messages of the node.
fn counter(name: &str) -> u64 {
    let counters = std::fs::read_to_string("/proc/thread-self/net/snmp6").unwrap();
    let found = counters.lines().find_map(|line| line.strip_prefix(name));
    found.map_or(0, |count| count.trim().parse().unwrap())
}

/// Number of router solicitations that the node received.
fn solicited() -> u64 {
    counter("Icmp6InRouterSolicits")
}

/// Entries of the node's neighbour table with this hardware address.
fn neighbours(mac: [u8; 6]) -> String {
    let text = mac.map(|byte| format!("{byte:02x}")).join(":");
    ip("neigh show").lines().filter(|line| line.contains(&text)).collect::<Vec<_>>().join("\n")
}

/// Number of addresses of this hardware address in the node's neighbour tables, except the pod's own addresses.
fn claimed_by(mac: [u8; 6]) -> usize {
    neighbours(mac).lines().filter(|line| !line.starts_with("10.99.0.2 ")).count()
}

/// Adds entries to the node's neighbour tables. A forged frame that is accepted changes these entries.
fn add_victims() {
    ip("addr add fd99::1/64 dev coracle0 nodad");
    for address in VICTIMS {
        ip(&format!("neigh replace {address} lladdr 02:00:00:00:00:01 dev coracle0 nud stale"));
    }
    // The kernel ignores a claim within a second (neigh/locktime) of the entry's last change.
    let age = |address: &str| {
        let entries = ip(&format!("-s -j neigh show {address} dev coracle0"));
        serde_json::from_str::<serde_json::Value>(&entries).unwrap()[0]["updated"].as_u64()
    };
    for address in VICTIMS {
        eventually("an older entry", 10, || age(address).is_some_and(|seconds| seconds >= 2));
    }
}

/// Removes the rules that check sources.
fn disable_guard() {
    let flushed = Command::new("nft").args(["flush", "chain", "bridge", "coracle", "ports"]).status();
    assert!(flushed.unwrap().success());
}

#[test]
fn a_pod_sends_only_from_its_own_addresses() {
    on_a_node(true, async |network, pod| {
        add(&network, &pod, Vec::new()).await;
        until_received(&pod);
        let own = pod.mac();
        add_victims();
        let link_local = Ipv6Addr::new(0xfe80, 0, 0, 0, 0x858, 0x0aff, 0xfe63, 2);
        let claimed: Ipv6Addr = "fd99::77".parse().unwrap();
        let inner = bound("10.99.0.1:7001");
        inner.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let attacks = [
            gratuitous_arp(own, [10, 99, 0, 77]),
            neighbour_advertisement(own, claimed, claimed),
            neighbour_advertisement(own, link_local, claimed),
            forged_datagram(own, 7001),
            datagram([2, 0, 0, 0, 0, 9], [10, 99, 0, 1], 7001),
            router_solicitation(own, link_local),
        ];
        attacks.iter().for_each(|frame| pod.send(frame.clone()));
        until_received(&pod);
        assert_eq!(claimed_by(own), 0);
        assert!(inner.recv(&mut [0; 64]).is_err(), "a forged source arrived");
        assert_eq!(solicited(), 0);
        // The frames are valid: without the rules each has its effect.
        disable_guard();
        eventually("the forged frames have their effect without the rules", 20, || {
            attacks.iter().for_each(|frame| pod.send(frame.clone()));
            until_received(&pod);
            neighbours(own).contains("10.99.0.77") && neighbours(own).contains("fd99::77") && solicited() > 0
        });
        assert!(inner.recv(&mut [0; 64]).is_ok());
        network.del("aaaa").await.unwrap();
        let left =
            Command::new("nft").args(["list", "set", "bridge", "coracle", "guarded"]).output().unwrap();
        assert!(
            !String::from_utf8_lossy(&left.stdout).contains("elements"),
            "the port is removed from the set"
        );
        network.remove().await.unwrap();
        assert!(
            !String::from_utf8_lossy(&Command::new("nft").args(["list", "tables"]).output().unwrap().stdout)
                .contains("coracle")
        );
    });
}

#[test]
fn a_pod_does_not_flood_the_bridge_with_multicast() {
    const FRAMES: u64 = 10_000;
    on_a_node(true, async |network, pod| {
        let ranges = vec!["10.99.0.0/24".parse().unwrap(), "fd99::/64".parse().unwrap()];
        network.set_pod_cidrs(ranges).await.unwrap();
        add(&network, &pod, Vec::new()).await;
        until_received(&pod);
        let link_local = Ipv6Addr::new(0xfe80, 0, 0, 0, 0x858, 0x0aff, 0xfe63, 2);
        let frame = neighbour_solicitation(pod.mac(), link_local, "fd99::99".parse().unwrap());
        let flood = || {
            let before = counter("Icmp6InNeighborSolicits");
            let frame = frame.clone();
            pod.within(move || send_times(&frame, FRAMES));
            // Datagrams to one destination still arrive.
            until_received(&pod);
            counter("Icmp6InNeighborSolicits") - before
        };
        let received = flood();
        assert!((1..FRAMES / 2).contains(&received), "{received} of {FRAMES}");
        disable_guard();
        eventually("the flood arrives without the rules", 20, || flood() > FRAMES / 2);
        network.remove().await.unwrap();
    });
}

/// Number of frames that `eth0` of this thread's namespace received.
fn received() -> u64 {
    let devices = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let counts = devices.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
    counts.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Names of the bridge's ports.
fn ports() -> Vec<String> {
    let links = ip("-o link show master coracle0");
    let names = links.lines().map(|line| line.split(": ").nth(1).unwrap().split('@').next().unwrap());
    names.map(str::to_owned).collect()
}

/// The entries of the bridge's table for its ports, sorted.
fn entries() -> Vec<String> {
    let shown = Command::new("bridge").args(["fdb", "show", "br", BRIDGE]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let of_table = shown.lines().filter(|line| line.contains("master") && line.contains("dev veth"));
    let mut entries: Vec<String> = of_table.map(str::to_owned).collect();
    entries.sort();
    entries
}

/// Without the setting `group_fwd_mask`, the host receives frames to link-local protocols at the port. Such frames
/// bypass the source filter and all rules for the bridge.
#[test]
fn a_pod_sends_no_packets_past_the_rules_of_sources() {
    on_a_node(true, async |network, pod| {
        add(&network, &pod, Vec::new()).await;
        until_received(&pod);
        let inner = bound("10.99.0.1:7001");
        inner.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut frame = forged_datagram(pod.mac(), 7001);
        for last in 0..16 {
            frame[..6].copy_from_slice(&[0x01, 0x80, 0xc2, 0, 0, last]);
            pod.send(frame.clone());
        }
        until_received(&pod);
        assert!(inner.recv(&mut [0; 64]).is_err(), "a forged source arrived");
        // The frames are valid: at a port without the setting, the host accepts them.
        let ports = ports();
        for port in &ports {
            ip(&format!("link set dev {port} type bridge_slave group_fwd_mask 0"));
        }
        for interface in ports.iter().map(String::as_str).chain(["all"]) {
            std::fs::write(format!("/proc/sys/net/ipv4/conf/{interface}/rp_filter"), "0").unwrap();
        }
        frame[..6].copy_from_slice(&OF_THE_PORT);
        let arrives = || {
            pod.send(frame.clone());
            until_received(&pod);
            inner.recv(&mut [0; 64]).is_ok()
        };
        eventually("the forged source arrives at the port", 20, arrives);
        // A port of an earlier process gets the setting.
        network.set_pod_cidrs(vec!["10.99.0.0/24".parse().unwrap()]).await.unwrap();
        while inner.recv(&mut [0; 64]).is_ok() {}
        assert!(!arrives(), "existing ports are set again");
        network.remove().await.unwrap();
    });
}

/// Rules for the addresses of pods do not match packets without a source address. A probe for an address (duplicate
/// address detection) prevents another interface from using this address.
#[test]
fn a_pod_sends_only_probes_for_its_own_addresses_without_a_source_address() {
    const FRAMES: u64 = 100;
    on_a_node(true, async |network, pod| {
        let ranges = vec!["10.99.0.0/24".parse().unwrap(), "fd99::/64".parse().unwrap()];
        network.set_pod_cidrs(ranges).await.unwrap();
        add(&network, &pod, Vec::new()).await;
        until_received(&pod);
        let inner = bound("[fd99::1]:7001");
        inner.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let to_node = datagram6(pod.mac(), Ipv6Addr::UNSPECIFIED, "fd99::1".parse().unwrap(), 7001);
        let received_probes = |target: &str| {
            let probe = neighbour_solicitation(pod.mac(), Ipv6Addr::UNSPECIFIED, target.parse().unwrap());
            let before = counter("Icmp6InNeighborSolicits");
            pod.within(move || send_times(&probe, FRAMES));
            until_received(&pod);
            counter("Icmp6InNeighborSolicits") - before
        };
        pod.send(to_node.clone());
        until_received(&pod);
        assert!(inner.recv(&mut [0; 64]).is_err(), "a datagram without a source arrived");
        assert!(received_probes("fd99::77") < FRAMES / 2);
        assert!(received_probes("fd99::2") >= FRAMES, "the pod's own address");
        // The frames are valid: without the rules they arrive.
        disable_guard();
        eventually("the datagram arrives without the rules", 20, || {
            pod.send(to_node.clone());
            until_received(&pod);
            inner.recv(&mut [0; 64]).is_ok()
        });
        assert!(received_probes("fd99::77") >= FRAMES);
        network.remove().await.unwrap();
    });
}

/// If `br_netfilter` is loaded, packets between pods pass the rules for masquerading.
#[test]
fn a_broadcast_of_a_pod_does_not_get_the_nodes_address() {
    on_a_node(true, async |network, pod| {
        add(&network, &pod, Vec::new()).await;
        let other = Pod::new();
        let (id, netns, ifname) = ("bbbb".into(), other.netns().to_owned(), "eth0".into());
        network.add(&Attachment { id, netns, ifname, ..Attachment::default() }).await.unwrap();
        until_received(&pod);
        let receiver = other.within(|| bound("0.0.0.0:7002"));
        receiver.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let (_, from) = eventually("the broadcast arrives", 20, || {
            pod.within(|| {
                let socket = UdpSocket::bind("10.99.0.2:0").unwrap();
                socket.set_broadcast(true).unwrap();
                socket.send_to(b"evil", "255.255.255.255:7002").unwrap();
            });
            receiver.recv_from(&mut [0; 64]).ok()
        });
        assert_eq!(from.ip().to_string(), "10.99.0.2");
        network.remove().await.unwrap();
    });
}

/// The kernel finds the connection of an ICMP error by the packet that the error quotes. The kernel does not check who
/// sent the error.
#[test]
fn a_pod_reports_errors_of_its_own_packets_only() {
    on_a_node(true, async |network, pod| {
        add(&network, &pod, Vec::new()).await;
        until_received(&pod);
        let open = |at: &str, to: &str| {
            let socket = bound(at);
            socket.connect(to).unwrap();
            socket
        };
        let other = open("10.99.0.1:7100", "10.99.0.50:9");
        let frame = unreachable_port(pod.mac(), 7100, [10, 99, 0, 50]);
        pod.send(frame.clone());
        until_received(&pod);
        assert!(other.take_error().unwrap().is_none(), "a forged error arrived");
        let own = open("10.99.0.1:7101", "10.99.0.2:9");
        eventually("the pod's own error arrives", 20, || {
            own.send(b"x").is_err() || own.take_error().unwrap().is_some()
        });
        // The forged error is valid: without the rules it has its effect.
        disable_guard();
        eventually("the forged error arrives without the rules", 20, || {
            pod.send(frame.clone());
            until_received(&pod);
            other.take_error().unwrap().is_some()
        });
        network.remove().await.unwrap();
    });
}

/// The kernel looks up the connection also for errors of types that no standard defines.
#[test]
fn a_pod_reports_icmpv6_errors_of_its_own_packets_only() {
    on_a_node(true, async |network, pod| {
        let ranges = vec!["10.99.0.0/24".parse().unwrap(), "fd99::/64".parse().unwrap()];
        network.set_pod_cidrs(ranges).await.unwrap();
        add(&network, &pod, Vec::new()).await;
        until_received(&pod);
        let (own, other): (Ipv6Addr, Ipv6Addr) = ("fd99::2".parse().unwrap(), "fd99::50".parse().unwrap());
        for (kind, name) in [(1, "Icmp6InDestUnreachs"), (100, "Icmp6InType100"), (127, "Icmp6InType127")] {
            let arrives = |about: Ipv6Addr| {
                let before = counter(name);
                pod.send(error6(pod.mac(), kind, own, about));
                until_received(&pod);
                counter(name) > before
            };
            eventually("the pod's own error arrives", 20, || arrives(own));
            assert!(!arrives(other), "a forged error of type {kind} arrived");
        }
        network.remove().await.unwrap();
    });
}

/// The host receives frames to link-local protocols at the port, before the hook of the source filter. With learning,
/// the bridge would learn the source addresses of these frames.
#[test]
fn a_pod_does_not_take_over_the_entry_of_another_pod() {
    on_a_node(true, async |network, pod| {
        let victim = add_with_another(&network, &pod).await;
        let before = entries();
        assert_eq!(before.len(), 2, "{before:?}");
        let frame = [&OF_THE_PORT[..], &victim.mac(), &[0x88, 0x09], &[0; 46]].concat();
        let attack = || {
            pod.send(frame.clone());
            until_received(&pod);
            entries()
        };
        assert_eq!(attack(), before);
        for port in ports() {
            ip(&format!("link set dev {port} type bridge_slave learning on group_fwd_mask 0"));
        }
        eventually("the entry moves with learning", 20, || attack() != before);
        network.remove().await.unwrap();
    });
}

/// The kernel visits all ports when a static entry is added, and all static entries when a port is added.
#[test]
fn a_pod_adds_one_entry_to_the_table_of_the_bridge_and_no_static_one() {
    on_a_node(true, async |network, pod| {
        add(&network, &pod, Vec::new()).await;
        let own = pod.mac().map(|byte| format!("{byte:02x}")).join(":");
        let check = |found: Vec<String>| {
            let [entry] = &found[..] else { panic!("{found:?}") };
            assert!(entry.starts_with(&own) && entry.contains("extern_learn"), "{entry}");
            assert!(!entry.contains("static") && !entry.contains("permanent"), "{entry}");
        };
        check(entries());
        let port = ports().remove(0);
        assert_eq!(mac_of(&port), mac_of(BRIDGE));
        ip(&format!("link set {port} down"));
        ip(&format!("link set {port} up"));
        check(entries());
        network.remove().await.unwrap();
    });
}

#[test]
fn a_pod_does_not_flood_the_bridge_with_unknown_destinations() {
    const FRAMES: u64 = 100;
    on_a_node(true, async |network, pod| {
        let silent = add_with_another(&network, &pod).await;
        let frame_to = |mac: [u8; 6]| {
            let mut frame = datagram(pod.mac(), [10, 99, 0, 3], 7000);
            frame[..6].copy_from_slice(&mac);
            frame
        };
        let arrived = |mac| {
            let (frame, before) = (frame_to(mac), silent.within(received));
            pod.within(move || send_times(&frame, FRAMES));
            until_received(&pod);
            silent.within(received) - before
        };
        let unknown = [2, 0, 0, 0, 0, 0x77];
        let own = silent.mac();
        // The bridge knows the address of a pod that has not sent a frame.
        eventually("frames to the pod arrive", 20, || arrived(own) >= FRAMES);
        assert!(arrived(unknown) < FRAMES / 2);
        for port in ports() {
            ip(&format!("link set dev {port} type bridge_slave flood on"));
        }
        eventually("frames to unknown addresses arrive with flooding", 20, || arrived(unknown) >= FRAMES);
        network.set_pod_cidrs(vec!["10.99.0.0/24".parse().unwrap()]).await.unwrap();
        assert!(arrived(unknown) < FRAMES / 2, "existing ports are set again");
        network.remove().await.unwrap();
    });
}

/// A program for scapy that claims addresses by ARP and neighbour discovery, and sends from a foreign IP address.
const SPOOF: &str = r#"
import sys
from scapy.all import ARP, Ether, ICMPv6ND_NA, ICMPv6NDOptDstLLAddr, IP, IPv6, UDP, get_if_hwaddr, sendp
own, everyone = get_if_hwaddr("eth0"), "ff:ff:ff:ff:ff:ff"
claim = ICMPv6ND_NA(tgt="fd99::77", R=0, S=0, O=1) / ICMPv6NDOptDstLLAddr(lladdr=own)
sendp([
    Ether(src=own, dst=everyone) / ARP(op=2, hwsrc=own, psrc="10.99.0.77", hwdst=everyone, pdst="10.99.0.77"),
    Ether(src=own, dst="33:33:00:00:00:01") / IPv6(src="fd99::77", dst="ff02::1") / claim,
    Ether(src=own, dst=sys.argv[1]) / IP(src="10.99.0.9", dst="10.99.0.1") / UDP(sport=1, dport=7001) / b"forged",
], iface="eth0", verbose=False)
"#;

/// ARP, NDP and IP spoofing with scapy.
#[test]
fn spoofing_with_a_real_tool_has_no_effect() {
    on_a_node(true, async |network, pod| {
        add(&network, &pod, Vec::new()).await;
        until_received(&pod);
        let (own, bridge) = (pod.mac(), mac_of(BRIDGE).map(|byte| format!("{byte:02x}")).join(":"));
        add_victims();
        let inner = bound("10.99.0.1:7001");
        inner.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let spoof = || {
            let bridge = bridge.clone();
            let run = move || Command::new("/usr/bin/python3").args(["-c", SPOOF, &bridge]).output().unwrap();
            let done = pod.within(run);
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        };
        spoof();
        until_received(&pod);
        assert_eq!(claimed_by(own), 0);
        assert!(inner.recv(&mut [0; 64]).is_err(), "a forged source arrived");
        disable_guard();
        eventually("the forged frames have their effect without the rules", 20, || {
            spoof();
            until_received(&pod);
            neighbours(own).contains("10.99.0.77") && neighbours(own).contains("fd99::77")
        });
        assert!(inner.recv(&mut [0; 64]).is_ok());
        network.remove().await.unwrap();
    });
}

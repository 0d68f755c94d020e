//! Packets between pods, a node and a machine at the node's uplink: reachability and source addresses. The tests need
//! root.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test may wait and panic"
)]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream, UdpSocket};
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use coracle_cni::{Attachment, Network, NetworkConfig, PortMapping, Protocol};
use coracle_testing::{NamespaceThread, eventually, in_new_namespace_async, ip};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn6, sendto, setsockopt, socket,
    sockopt,
};

/// A network namespace with sockets of the test.
struct Space(NamespaceThread);

impl Space {
    fn new() -> Self {
        let thread = NamespaceThread::start();
        thread.within(|| drop(ip("link set lo up")));
        Self(thread)
    }

    fn udp(&self, at: &'static str) -> UdpSocket {
        self.within(move || {
            let socket = UdpSocket::bind(at).unwrap();
            socket.set_read_timeout(Some(LONG)).unwrap();
            socket
        })
    }

    /// Echoes every datagram with a name.
    fn answer(&self, at: &'static str, name: &'static str) {
        let socket = self.within(move || UdpSocket::bind(at).unwrap());
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                socket.send_to(&[name.as_bytes(), b" ", &buffer[..length]].concat(), from).ok();
            }
        });
    }
}

impl Deref for Space {
    type Target = NamespaceThread;

    fn deref(&self) -> &NamespaceThread {
        &self.0
    }
}

/// A node with a pod network and an uplink, and a machine at the other end of the uplink.
struct TestNetwork {
    network: Network,
    beyond: Space,
    dir: tempfile::TempDir,
}

/// Timeout for expected packets.
const LONG: Duration = Duration::from_secs(120);
/// Timeout for packets that may be lost. Such packets are repeated.
const SHORT: Duration = Duration::from_millis(300);
/// Maximum attempts with the timeout `SHORT`.
const OFTEN: usize = 400;

fn on_a_node(cidrs: &'static [&'static str], test: impl AsyncFnOnce(TestNetwork) + Send + 'static) {
    in_new_namespace_async(async move || {
        let beyond = Space::new();
        ip("link set lo up");
        ip(&format!("link add up0 type veth peer name up1 netns {}", beyond.netns().display()));
        for line in
            ["addr add 192.0.2.1/24 dev up0", "addr add 2001:db8::1/64 dev up0 nodad", "link set up0 up"]
        {
            ip(line);
        }
        beyond.within(|| {
            for line in [
                "addr add 192.0.2.9/24 dev up1",
                "addr add 198.51.100.7/32 dev up1",
                "addr add 2001:db8::9/64 dev up1 nodad",
                "link set up1 up",
                "route add 10.99.0.0/16 via 192.0.2.1",
            ] {
                ip(line);
            }
        });
        ip("route add 198.51.100.0/24 via 192.0.2.9");
        let dir = tempfile::tempdir().unwrap();
        let (state, root) = (dir.path().to_owned(), dir.path().join("root"));
        let config = NetworkConfig::of_default_network(state, root, "coracle0", "coracle");
        let network = Network::open(config).await.unwrap();
        network.set_pod_cidrs(cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect()).await.unwrap();
        test(TestNetwork { network, beyond, dir }).await;
    });
}

impl TestNetwork {
    async fn add(&self, id: &str, space: &Space, ports: Vec<PortMapping>) -> IpAddr {
        let at = Attachment {
            id: id.into(),
            netns: space.netns().to_owned(),
            ifname: "eth0".into(),
            ports,
            ..Attachment::default()
        };
        self.network.add(&at).await.unwrap().addresses[0].ip()
    }
}

fn port(protocol: Protocol, host_port: u16, container_port: u16) -> PortMapping {
    PortMapping { host_ip: None, host_port, container_port, protocol }
}

/// The name of the server that answers at `to`, with at most `times` attempts. Each call has a unique question, so
/// that a late answer to another call is ignored.
fn ask(socket: &UdpSocket, to: &str, times: usize) -> Option<String> {
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let question = format!("who {}", ASKED.fetch_add(1, Ordering::Relaxed));
    let mut buffer = [0; 64];
    socket.set_read_timeout(Some(SHORT)).unwrap();
    for _ in 0..times {
        socket.send_to(question.as_bytes(), to).unwrap();
        while let Ok((length, _)) = socket.recv_from(&mut buffer) {
            let text = String::from_utf8_lossy(&buffer[..length]);
            if let Some((name, asked)) = text.split_once(' ')
                && asked == question
            {
                return Some(name.to_owned());
            }
        }
    }
    None
}

#[test]
fn datagrams_follow_their_port_from_pod_to_pod() {
    on_a_node(&["10.99.0.0/29"], async |test_network| {
        let client = test_network.beyond.udp("192.0.2.9:5555");
        let to = "192.0.2.1:5353";
        // The client sends before the pod exists.
        client.set_read_timeout(Some(SHORT)).unwrap();
        client.send_to(b"who", to).unwrap();
        assert!(client.recv_from(&mut [0; 64]).is_err());
        let [a, b] = [Space::new(), Space::new()];
        a.answer("0.0.0.0:53", "a");
        b.answer("0.0.0.0:53", "b");
        let udp = || vec![port(Protocol::Udp, 5353, 53)];
        let first = test_network.add("aaaa", &a, udp()).await;
        assert_eq!(ask(&client, to, OFTEN).as_deref(), Some("a"));
        test_network.network.del("aaaa").await.unwrap();
        assert_ne!(test_network.add("bbbb", &b, udp()).await, first);
        assert_eq!(ask(&client, to, OFTEN).as_deref(), Some("b"));
        // The port is unused, although another pod may have the address.
        let second = test_network.add("cccc", &a, Vec::new()).await;
        assert_ne!(second, first);
        test_network.network.release("bbbb").await.unwrap();
        test_network.network.del("bbbb").await.unwrap();
        let mut others = Vec::new();
        loop {
            let other = Space::new();
            other.answer("0.0.0.0:53", "other");
            let address = test_network.add(&format!("other{}", others.len()), &other, Vec::new()).await;
            others.push(other);
            if address.to_string() == "10.99.0.3" {
                break;
            }
        }
        assert_eq!(ask(&client, to, 20), None);
    });
}

#[test]
fn forwarded_datagrams_are_not_affected_by_a_host_port_with_their_number() {
    on_a_node(&["10.99.0.0/24"], async |test_network| {
        let (pod, server) = (Space::new(), Space::new());
        let beyond = test_network.beyond.udp("192.0.2.9:5353");
        test_network.add("aaaa", &pod, Vec::new()).await;
        let inside = pod.udp("0.0.0.0:6000");
        inside.send_to(b"hello", "192.0.2.9:5353").unwrap();
        let (_, source) = beyond.recv_from(&mut [0; 64]).unwrap();
        assert_eq!(source.ip().to_string(), "192.0.2.1");
        for one in [None, Some("192.0.2.1".parse().unwrap())] {
            let port = PortMapping { host_ip: one, ..port(Protocol::Udp, 5353, 53) };
            test_network.add("bbbb", &server, vec![port]).await;
            beyond.send_to(b"with it", source).unwrap();
            inside.recv_from(&mut [0; 64]).expect("while the host port exists");
            test_network.network.del("bbbb").await.unwrap();
            beyond.send_to(b"without", source).unwrap();
            inside.recv_from(&mut [0; 64]).expect("after the host port is removed");
        }
    });
}

#[test]
fn masquerading_follows_the_configuration() {
    on_a_node(&["10.99.0.0/24"], async |test_network| {
        let pod = Space::new();
        let address = test_network.add("aaaa", &pod, Vec::new()).await.to_string();
        let (near, far) =
            (test_network.beyond.udp("192.0.2.9:7000"), test_network.beyond.udp("198.51.100.7:7000"));
        let source_at = |at: &UdpSocket| {
            let to = at.local_addr().unwrap();
            pod.udp("0.0.0.0:0").send_to(b"hello", to).unwrap();
            at.recv_from(&mut [0; 64]).unwrap().1.ip().to_string()
        };
        assert_eq!([source_at(&near), source_at(&far)], ["192.0.2.1", "192.0.2.1"]);
        let except = |text: &str| vec![text.parse().unwrap(), "203.0.113.0/24".parse().unwrap()];
        test_network.network.set_unmasqueraded(except("198.51.100.0/24")).await.unwrap();
        assert_eq!([source_at(&near), source_at(&far)], ["192.0.2.1", address.as_str()]);
        test_network.network.set_unmasqueraded(except("192.0.2.0/24")).await.unwrap();
        assert_eq!([source_at(&near), source_at(&far)], [address.as_str(), "192.0.2.1"]);
        test_network.network.set_unmasqueraded(Vec::new()).await.unwrap();
        assert_eq!([source_at(&near), source_at(&far)], ["192.0.2.1", "192.0.2.1"]);
        drop(test_network.dir);
    });
}

#[test]
fn a_host_port_works_over_ipv6() {
    on_a_node(&["10.99.0.0/24", "fd99::/64"], async |test_network| {
        let pod = Space::new();
        test_network.add("aaaa", &pod, vec![port(Protocol::Tcp, 8080, 80)]).await;
        let listener = pod.within(|| TcpListener::bind("[::]:80").unwrap());
        std::thread::spawn(move || {
            for mut peer in listener.incoming().flatten() {
                let from = peer.peer_addr().unwrap().ip().to_canonical().to_string();
                peer.write_all(from.as_bytes()).ok();
            }
        });
        for (to, from) in [("[2001:db8::1]:8080", "2001:db8::9"), ("192.0.2.1:8080", "192.0.2.9")] {
            let to: SocketAddr = to.parse().unwrap();
            let reply = test_network.beyond.within(move || {
                // On a busy machine the kernel notices a new link's carrier late. Neighbours do not answer before that.
                let mut stream =
                    eventually("a connection", 20, || TcpStream::connect_timeout(&to, LONG).ok());
                let mut text = String::new();
                stream.read_to_string(&mut text).unwrap();
                text
            });
            assert_eq!(reply, from);
        }
    });
}

/// Sends a router advertisement with this lifetime in seconds to the node (RFC 4861, 4.2).
fn advertise(router: &Space, to: Ipv6Addr, seconds: u16) {
    router.within(move || {
        let socket =
            socket(AddressFamily::Inet6, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::IcmpV6);
        let socket = socket.unwrap();
        // The kernel ignores advertisements with another hop limit.
        setsockopt(&socket, sockopt::Ipv6Ttl, &255).unwrap();
        let mut message = [0; 16];
        message[0] = 134;
        message[6..8].copy_from_slice(&seconds.to_be_bytes());
        let link = nix::net::if_::if_nametoindex("up1").unwrap();
        let to = SockaddrIn6::from(SocketAddrV6::new(to, 0, 0, link));
        // Sending fails until duplicate address detection has finished.
        sendto(socket.as_raw_fd(), &message, &to, MsgFlags::empty()).ok();
    });
}

#[test]
fn a_forwarding_node_still_accepts_router_advertisements() {
    on_a_node(&["10.42.0.0/24"], async |test_network: TestNetwork| {
        let by_router = || ip("-6 route show default dev up0 proto ra").contains("via fe80:");
        // The kernel assigns the address after both ends are up.
        let own: Ipv6Addr = eventually("the link-local address of the uplink", 20, || {
            let own = ip("-6 -o addr show dev up0 scope link");
            Some(own.split(" inet6 ").nth(1)?.split('/').next()?.parse().unwrap())
        });
        let advertise_until = |lifetime: u16, has_route: bool| {
            eventually("the default route to follow the router's lifetime", 20, || {
                advertise(&test_network.beyond, own, lifetime);
                by_router() == has_route
            });
        };
        advertise_until(1800, true);
        let ranges = ["10.42.0.0/24", "fd42::/64"].map(|range| range.parse().unwrap());
        test_network.network.set_pod_cidrs(ranges.to_vec()).await.unwrap();
        assert_eq!(std::fs::read_to_string("/proc/sys/net/ipv6/conf/all/forwarding").unwrap().trim(), "1");
        assert!(by_router(), "{}", ip("-6 route"));
        advertise_until(0, false);
        let bridge = std::fs::read_to_string("/proc/sys/net/ipv6/conf/coracle0/accept_ra").unwrap();
        assert_eq!(bridge.trim(), "0", "pods are not routers");
    });
}

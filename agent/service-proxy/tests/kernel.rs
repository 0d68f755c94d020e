//! Tests of the proxy with real connections. Each test has its own network namespace.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test panics and waits"
)]

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use coracle_nft::{Attributes, Channel, NLMSG_ERROR, delete_flows, errno_of, kind_of, messages};
use coracle_service_proxy::{NodeView, Proxy, State};
use coracle_services::{EndpointSlice, ServiceState};
use coracle_testing::{bind_udp, ip, is_to_be_killed, run, run_until_killed};
use coracle_values::object::Key;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt};
use serde_json::{Value, json};

const TABLE: &str = "test-services";

/// Runs the test in a new network namespace. The addresses of 10.42.0.0/24 are local there. Packets to the addresses of
/// services, 10.43.0.0/16, are routed to a veth device.
fn on_a_node(test: impl FnOnce() + Send + 'static) {
    coracle_testing::in_new_namespace(move || {
        ip("link set lo up");
        ip("addr add 10.42.0.1/24 dev lo");
        ip("addr add 192.0.2.1/32 dev lo");
        ip("link add name uplink0 type veth peer name uplink1");
        ip("link set uplink1 up");
        ip("link set uplink0 up");
        ip("route add 10.43.0.0/16 dev uplink0 src 10.42.0.1");
        test();
    });
}

fn node() -> NodeView {
    NodeView {
        name: "here".to_owned(),
        pod_networks: vec!["10.42.0.0/24".parse().unwrap()],
        ..NodeView::default()
    }
}

/// A service with these endpoints.
fn state(name: &str, spec: Value, endpoints: &[&str], port: u16) -> State {
    let mut spec = spec;
    spec["clusterIPs"] = json!([spec["clusterIP"]]);
    let protocol = spec["ports"][0]["protocol"].clone();
    let service = json!({"metadata": {"namespace": "n", "name": name}, "spec": spec});
    let endpoints: Vec<_> =
        endpoints.iter().map(|ip| json!({"addresses": [ip], "nodeName": "here"})).collect();
    let labels = json!({"kubernetes.io/service-name": name});
    let slice = json!({"metadata": {"namespace": "n", "name": name, "labels": labels}, "addressType": "IPv4",
        "endpoints": endpoints, "ports": [{"port": port, "protocol": protocol}]});
    let slice: EndpointSlice = serde_json::from_value(slice).unwrap();
    let service = Arc::new(serde_json::from_value(service).unwrap());
    (Key::new("n", name), Some(ServiceState { service, slices: vec![Arc::new(slice)] }))
}

fn tcp(ip: &str) -> Value {
    json!({"clusterIP": ip, "ports": [{"port": 80, "protocol": "TCP"}]})
}

/// Listens on the address, and answers each received byte with the name.
fn serve(address: &str, port: u16, name: &'static str) {
    ip(&format!("addr replace {address}/32 dev lo"));
    let listener = TcpListener::bind((address.parse::<IpAddr>().unwrap(), port)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut byte = [0];
                while stream.read(&mut byte).is_ok_and(|count| count == 1) {
                    stream.write_all(name.as_bytes()).unwrap();
                }
            });
        }
    });
}

fn connect(to: &str) -> std::io::Result<TcpStream> {
    let address: SocketAddr = to.parse().unwrap();
    let stream = TcpStream::connect_timeout(&address, Duration::from_secs(2))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}

fn ask(stream: &mut TcpStream) -> String {
    stream.write_all(b"?").unwrap();
    let mut answer = [0];
    stream.read_exact(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

fn answers(to: &str, times: usize) -> Vec<String> {
    let mut all: Vec<String> = (0..times).map(|_| ask(&mut connect(to).unwrap())).collect();
    all.sort();
    all.dedup();
    all
}

#[test]
fn connections_reach_all_endpoints_and_survive_changes_of_others() {
    on_a_node(|| {
        serve("10.42.0.2", 8080, "a");
        serve("10.42.0.3", 8080, "b");
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        let both = state("s", tcp("10.43.0.5"), &["10.42.0.2", "10.42.0.3"], 8080);
        proxy.replace(node(), [both.clone()]).unwrap();
        assert_eq!(answers("10.43.0.5:80", 40), ["a", "b"]);
        let mut kept = connect("10.43.0.5:80").unwrap();
        let owner = ask(&mut kept);
        let other = if owner == "a" { "10.42.0.2" } else { "10.42.0.3" };
        proxy.change([state("s", tcp("10.43.0.5"), &[other], 8080)]).unwrap();
        assert_eq!(ask(&mut kept), owner);
        assert_eq!(answers("10.43.0.5:80", 10), [owner.as_str()]);
        proxy.replace(node(), [both]).unwrap();
        assert_eq!(ask(&mut kept), owner, "a restart replaces the table");
        proxy.change([(Key::new("n", "s"), None)]).unwrap();
        assert_eq!(ask(&mut kept), owner, "connections survive the removal of their service");
        let listing = run("nft", &["list", "table", "inet", TABLE]);
        assert!(!listing.contains("10.42.0.2") && !listing.contains("n/s"), "{listing}");
    });
}

#[test]
fn services_without_endpoints_and_unused_ports_reject() {
    on_a_node(|| {
        serve("10.42.0.2", 8080, "a");
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        let empty = state("s", tcp("10.43.0.5"), &[], 8080);
        proxy.replace(node(), [empty, state("t", tcp("10.43.0.6"), &["10.42.0.2"], 8080)]).unwrap();
        for refused in ["10.43.0.5:80", "10.43.0.6:81"] {
            assert_eq!(connect(refused).unwrap_err().kind(), ErrorKind::ConnectionRefused, "{refused}");
        }
        proxy.change([state("s", tcp("10.43.0.5"), &["10.42.0.2"], 8080)]).unwrap();
        assert_eq!(answers("10.43.0.5:80", 3), ["a"]);
    });
}

#[test]
fn packets_to_unused_addresses_of_service_ranges_are_dropped() {
    on_a_node(|| {
        serve("10.42.0.2", 8080, "a");
        serve("10.43.0.10", 80, "d");
        let send = |to: &str| {
            let socket = UdpSocket::bind("10.42.0.1:0").unwrap();
            socket.send_to(b"?", to).map_err(|error| error.kind())
        };
        let service = || [state("s", tcp("10.43.0.5"), &["10.42.0.2"], 8080)];
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        proxy.replace(node(), service()).unwrap();
        assert_eq!(send("10.43.0.6:80"), Ok(1), "the ranges are unknown");
        let view = NodeView {
            service_ranges: vec!["10.43.0.0/16".parse().unwrap()],
            served_here: vec!["10.43.0.10".parse().unwrap()],
            ..node()
        };
        proxy.replace(view, service()).unwrap();
        assert_eq!(send("10.43.0.6:80"), Err(ErrorKind::PermissionDenied));
        assert_eq!(answers("10.43.0.5:80", 3), ["a"]);
        assert_eq!(answers("10.43.0.10:80", 3), ["d"], "the node serves this address itself");
    });
}

#[test]
fn pods_cannot_send_to_the_overlay_while_the_proxy_is_off() {
    const MARKER: u16 = 8474;
    on_a_node(|| {
        ip("addr replace 10.42.0.2/32 dev lo");
        let receives = |port: u16| {
            let [server, marker] = [port, MARKER].map(|port| bind_udp(([10, 42, 0, 2], port).into()));
            let client = UdpSocket::bind("10.42.0.1:0").unwrap();
            for port in [port, MARKER] {
                client.send_to(b"?", ("10.42.0.2", port)).unwrap();
            }
            // The loopback device delivers in order: when the second datagram has arrived, the first has arrived or
            // was dropped.
            marker.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            marker.recv(&mut [0; 8]).expect("no rule drops datagrams to the port of the marker");
            server.set_nonblocking(true).unwrap();
            server.recv(&mut [0; 8]).is_ok()
        };
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        proxy.replace(node(), [state("s", tcp("10.43.0.5"), &["10.42.0.2"], 8080)]).unwrap();
        let view = NodeView { overlay_port: Some(8472), ..node() };
        Proxy::replace_by_guard(TABLE, &view).unwrap();
        assert_eq!([8472, 8473].map(receives), [false, true]);
        let listing = run("nft", &["list", "table", "inet", TABLE]);
        assert!(!listing.contains("10.43.0.5"), "the table still has services of an earlier run");
        Proxy::replace_by_guard(TABLE, &node()).unwrap();
        assert!(receives(8472), "without an overlay there is no table");
    });
}

/// The reply belongs to an established connection, so the rule for the overlay's port must precede the rule for
/// established connections.
#[test]
fn pods_cannot_reply_to_the_overlay_port() {
    const MARKER: u16 = 8474;
    on_a_node(|| {
        ip("addr replace 10.42.0.2/32 dev lo");
        let receives_reply = |port: u16| {
            let [node, marker] = [port, MARKER].map(|port| bind_udp(([192, 0, 2, 1], port).into()));
            let pod = bind_udp(([10, 42, 0, 2], 9000).into());
            node.send_to(b"?", "10.42.0.2:9000").unwrap();
            pod.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            pod.recv(&mut [0; 8]).expect("a pod receives datagrams from the port");
            for port in [port, MARKER] {
                pod.send_to(b"!", ("192.0.2.1", port)).unwrap();
            }
            marker.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            marker.recv(&mut [0; 8]).expect("no rule drops datagrams to the port of the marker");
            node.set_nonblocking(true).unwrap();
            node.recv(&mut [0; 8]).is_ok()
        };
        let view = NodeView { overlay_port: Some(8472), ..node() };
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        proxy.replace(view.clone(), Vec::new()).unwrap();
        assert_eq!([8472, 8473].map(receives_reply), [false, true]);
        Proxy::replace_by_guard(TABLE, &view).unwrap();
        assert_eq!([8472, 8473].map(receives_reply), [false, true], "while the proxy is off");
    });
}

#[test]
fn node_ports_and_affinity() {
    on_a_node(|| {
        serve("10.42.0.2", 8080, "a");
        serve("10.42.0.3", 8080, "b");
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        let spec = |affinity: &str| {
            json!({"clusterIP": "10.43.0.5", "type": "NodePort", "sessionAffinity": affinity,
                "ports": [{"port": 80, "protocol": "TCP", "nodePort": 30080}]})
        };
        let both = ["10.42.0.2", "10.42.0.3"];
        proxy.replace(node(), [state("s", spec("ClientIP"), &both, 8080)]).unwrap();
        let first = answers("192.0.2.1:30080", 20);
        assert_eq!(first.len(), 1);
        proxy.replace(node(), [state("s", spec("ClientIP"), &both, 8080)]).unwrap();
        assert_eq!(answers("192.0.2.1:30080", 20), first, "clients keep their endpoint after a restart");
        proxy.change([state("s", spec("None"), &both, 8080)]).unwrap();
        assert_eq!(answers("192.0.2.1:30080", 40), ["a", "b"]);
        assert_eq!(answers("10.43.0.5:80", 40), ["a", "b"]);
        assert!(connect("127.0.0.1:30080").is_err());
    });
}

#[test]
fn source_ranges_of_a_load_balancer_apply_to_processes_of_the_node() {
    on_a_node(|| {
        serve("10.42.0.2", 8080, "a");
        let with = |range: &str| {
            let spec = json!({"clusterIP": "10.43.0.5", "type": "LoadBalancer",
                "loadBalancerSourceRanges": [range], "ports": [{"port": 80, "protocol": "TCP"}]});
            let (key, state) = state("s", spec, &["10.42.0.2"], 8080);
            let ServiceState { service, slices } = state.unwrap();
            let mut service = Arc::unwrap_or_clone(service);
            let status = json!({"loadBalancer": {"ingress": [{"ip": "10.43.0.9"}]}});
            service.status = serde_json::from_value(status).unwrap();
            (key, Some(ServiceState { service: Arc::new(service), slices }))
        };
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        proxy.replace(node(), [with("10.42.0.0/24")]).unwrap();
        assert_eq!(answers("10.43.0.9:80", 3), ["a"]);
        proxy.change([with("203.0.113.0/24")]).unwrap();
        assert!(connect("10.43.0.9:80").is_err());
        assert_eq!(answers("10.43.0.5:80", 3), ["a"], "the cluster IP has no ranges");
    });
}

/// A packet that starts an SCTP association (RFC 9260, section 3.3.2). The kernel fills the empty fields of the IPv4
/// header.
fn sctp_init(to: [u8; 4], port: u16) -> Vec<u8> {
    let ip = [&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 132, 0, 0, 0, 0, 0, 0][..], &to].concat();
    // An INIT has no verification tag. The checksum is zero, because nothing on the way of the packet checks it.
    let header = [&7000_u16.to_be_bytes()[..], &port.to_be_bytes(), &[0; 8]].concat();
    let chunk = vec![1, 0, 0, 20, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1];
    [ip, header, chunk].concat()
}

/// The kernel of a node may have no SCTP sockets. So the test sends the packet itself, and captures it.
#[test]
fn a_packet_of_sctp_reaches_the_port_of_an_endpoint() {
    const SCTP: u8 = 132;
    on_a_node(|| {
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        let spec = json!({"clusterIP": "10.43.0.7", "ports": [{"port": 80, "protocol": "SCTP"}]});
        proxy.replace(node(), [state("sctp", spec, &["10.42.0.2"], 8080)]).unwrap();
        let open = |family, kind, protocol| {
            UdpSocket::from(socket(family, kind, SockFlag::SOCK_CLOEXEC, protocol).unwrap())
        };
        let capture = open(AddressFamily::Packet, SockType::Datagram, SockProtocol::EthAll);
        capture.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let sender = open(AddressFamily::Inet, SockType::Raw, SockProtocol::Raw);
        let to = [10, 43, 0, 7];
        sender.send_to(&sctp_init(to, 80), SocketAddr::from((to, 0))).unwrap();
        let mut packet = [0; 256];
        loop {
            let size = capture.recv(&mut packet).expect("the packet to the endpoint");
            let is_sctp = size >= 24 && packet[9] == SCTP;
            if is_sctp && packet[16..20] == [10, 42, 0, 2] && packet[22..24] == 8080_u16.to_be_bytes() {
                break;
            }
        }
    });
}

#[test]
fn datagrams_of_an_open_socket_reach_the_endpoint_that_replaces_a_removed_one() {
    on_a_node(|| {
        let server = |address: &str| {
            ip(&format!("addr replace {address}/32 dev lo"));
            let socket = UdpSocket::bind((address, 53)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            socket
        };
        let (one, two) = (server("10.42.0.2"), server("10.42.0.3"));
        let spec = || json!({"clusterIP": "10.43.0.5", "ports": [{"port": 53, "protocol": "UDP"}]});
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        proxy.replace(node(), [state("s", spec(), &["10.42.0.2"], 53)]).unwrap();
        let client = UdpSocket::bind("10.42.0.1:0").unwrap();
        client.connect("10.43.0.5:53").unwrap();
        let mut buffer = [0; 8];
        client.send(b"1").unwrap();
        one.recv(&mut buffer).unwrap();
        proxy.change([state("s", spec(), &["10.42.0.3"], 53)]).unwrap();
        client.send(b"2").unwrap();
        assert_eq!(two.recv(&mut buffer).unwrap(), 1);
        assert_eq!(buffer[0], b'2');
    });
}

#[test]
fn datagrams_of_an_open_socket_reach_the_changed_port_of_an_endpoint() {
    on_a_node(|| {
        ip("addr replace 10.42.0.2/32 dev lo");
        let server = |port| {
            let socket = UdpSocket::bind(("10.42.0.2", port)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            socket
        };
        let (former, current) = (server(8080), server(9090));
        let spec = || json!({"clusterIP": "10.43.0.5", "ports": [{"port": 53, "protocol": "UDP"}]});
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        proxy.replace(node(), [state("s", spec(), &["10.42.0.2"], 8080)]).unwrap();
        let client = UdpSocket::bind("10.42.0.1:0").unwrap();
        client.connect("10.43.0.5:53").unwrap();
        let mut buffer = [0; 8];
        client.send(b"1").unwrap();
        former.recv(&mut buffer).unwrap();
        proxy.change([state("s", spec(), &["10.42.0.2"], 9090)]).unwrap();
        client.send(b"2").unwrap();
        assert_eq!(current.recv(&mut buffer).unwrap(), 1);
        assert_eq!(buffer[0], b'2');
    });
}

#[test]
fn the_oldest_service_keeps_an_address_that_another_claims() {
    on_a_node(|| {
        serve("10.42.0.2", 8080, "a");
        serve("10.42.0.3", 8080, "b");
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        let (one, two) = (tcp("10.43.0.5"), tcp("10.43.0.5"));
        proxy.replace(node(), [state("b", two, &["10.42.0.3"], 8080)]).unwrap();
        proxy.change([state("a", one, &["10.42.0.2"], 8080)]).unwrap();
        assert_eq!(answers("10.43.0.5:80", 10), ["a"]);
        proxy.change([(Key::new("n", "a"), None)]).unwrap();
        assert_eq!(answers("10.43.0.5:80", 10), ["b"]);
    });
}

/// Two addresses of this machine on which servers listen at port 8080. Each server is a thread.
fn listening_endpoints(serve: fn(&'static str, &TcpListener)) -> [&'static str; 2] {
    let endpoints = ["10.42.0.2", "10.42.0.3"];
    for address in endpoints {
        ip(&format!("addr replace {address}/32 dev lo"));
        let listener = TcpListener::bind((address, 8080)).unwrap();
        std::thread::spawn(move || serve(address, &listener));
    }
    endpoints
}

/// Number of connections that the test opens and closes. `CORACLE_SHORT_CONNECTIONS` sets the number, for example to a
/// million.
fn short_connections() -> usize {
    std::env::var("CORACLE_SHORT_CONNECTIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(20_000)
}

#[test]
fn short_connections_succeed_while_endpoints_change() {
    on_a_node(|| {
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        let endpoints = listening_endpoints(|_address, listener| listener.incoming().for_each(drop));
        let with = |endpoints: &[&str]| [state("s", tcp("10.43.0.5"), endpoints, 8080)];
        proxy.replace(node(), with(&endpoints)).unwrap();
        // Entries of ended connections expire soon, so that their number depends on the rate, and not on the duration.
        std::fs::write("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close", "1").unwrap();
        for number in 0..short_connections() {
            if number % 500 == 0 {
                proxy.change(with(&endpoints[number / 500 % 2..])).unwrap();
            }
            let stream = connect("10.43.0.5:80").unwrap_or_else(|error| panic!("{number}: {error}"));
            // A reset keeps no state in the client, so that its ports do not run out.
            let reset = nix::libc::linger { l_onoff: 1, l_linger: 0 };
            setsockopt(&stream, sockopt::Linger, &reset).unwrap();
        }
    });
}

/// The client has few ports. So it uses each port again while the kernel still tracks the last connection of the port.
/// That connection may have led to a former endpoint.
#[test]
fn clients_that_use_up_their_ports_reach_the_current_endpoint() {
    const CONNECTIONS: usize = 4000;
    on_a_node(|| {
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        let endpoints = listening_endpoints(|address, listener| {
            // The server closes first, so that the waiting time of the connection (TIME_WAIT) is on its side. The
            // client may have closed the connection.
            for mut stream in listener.incoming().flatten() {
                stream.write_all(address.as_bytes()).ok();
            }
        });
        let with = |endpoint: &str| [state("s", tcp("10.43.0.5"), &[endpoint], 8080)];
        proxy.replace(node(), with(endpoints[0])).unwrap();
        std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40063").unwrap();
        for number in 0..CONNECTIONS {
            let current = endpoints[number / 200 % 2];
            if number % 200 == 0 {
                proxy.change(with(current)).unwrap();
            }
            let mut stream = connect("10.43.0.5:80").unwrap_or_else(|error| panic!("{number}: {error}"));
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert_eq!(answer, current, "connection {number}");
        }
        // Open connections use up all ports. The next connection fails until they end.
        let mut open = Vec::new();
        let failed = loop {
            match connect("10.43.0.5:80") {
                Ok(stream) => open.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(failed.kind(), ErrorKind::AddrNotAvailable, "after {} connections", open.len());
        proxy.change(with(endpoints[0])).unwrap();
        drop(open);
        let mut answer = String::new();
        connect("10.43.0.5:80").unwrap().read_to_string(&mut answer).unwrap();
        assert_eq!(answer, endpoints[0]);
    });
}

/// Adds the conntrack entry of a UDP flow that has been answered. The kernel does not evict such an entry for a new
/// entry. Returns whether the table had room for the entry.
fn track(channel: &mut Channel, number: u32, port: u16) -> bool {
    const NEW: u16 = 0x100;
    const FLAGS: u16 = 0x4 | 0x600; // NLM_F_ACK, NLM_F_CREATE | NLM_F_EXCL
    const STATUS: u32 = 0x2 | 0x4 | 0x8; // IPS_SEEN_REPLY, IPS_ASSURED, IPS_CONFIRMED
    let client = std::net::Ipv4Addr::from(0xc612_0000 + (number & 0x1_ffff)).octets();
    let client_port = 1000 + u16::try_from(number >> 17).unwrap();
    let server = [203, 0, 113, 1];
    let tuple = |(from, from_port): ([u8; 4], u16), (to, to_port): ([u8; 4], u16)| {
        let ends = Attributes::default().bytes(1, &from).bytes(2, &to);
        let ports = Attributes::default().bytes(1, &[17]).bytes(2, &from_port.to_be_bytes());
        let ports = ports.bytes(3, &to_port.to_be_bytes());
        Attributes::default().nest(1, ends).nest(2, ports)
    };
    let (client, server) = ((client, client_port), (server, port));
    let entry = Attributes::default().nest(1, tuple(client, server)).nest(2, tuple(server, client));
    let entry = entry.number(3, STATUS).number(7, 600);
    match channel.request(NEW, FLAGS, 2, &entry) {
        Ok(answer) => {
            !messages(&answer).any(|message| kind_of(message) == NLMSG_ERROR && errno_of(message) > 0)
        }
        Err(_) => false,
    }
}

#[test]
fn a_full_connection_table_stops_new_connections_only_until_it_has_room() {
    const ROOM: u32 = 1000;
    const MOST: u32 = 1 << 20;
    on_a_node(|| {
        serve("10.42.0.2", 8080, "a");
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        let dns = || json!({"clusterIP": "10.43.0.6", "ports": [{"port": 53, "protocol": "UDP"}]});
        let all = [state("s", tcp("10.43.0.5"), &["10.42.0.2"], 8080), state("u", dns(), &["10.42.0.2"], 53)];
        proxy.replace(node(), all).unwrap();
        let mut kept = connect("10.43.0.5:80").unwrap();
        assert_eq!(ask(&mut kept), "a");
        // The limit holds for each network namespace, and only the initial namespace can change it.
        let max = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max").unwrap();
        let max: u32 = max.trim().parse().unwrap();
        if max == 0 || max > MOST {
            coracle_testing::skip!(
                "the kernel tracks so many connections that its table takes too much memory to fill"
            );
        }
        let mut channel = Channel::open().unwrap();
        let room = |number| if number < ROOM { 5000 } else { 4000 };
        let filled = (0..=max).position(|number| !track(&mut channel, number, room(number)));
        assert!(
            filled.is_some_and(|count| count > max as usize / 2),
            "the table is full: {filled:?} of {max}"
        );
        assert!(connect("10.43.0.5:80").is_err());
        assert_eq!(ask(&mut kept), "a", "an open connection stays");
        proxy.change([state("u", dns(), &["10.42.0.3"], 53)]).unwrap();
        proxy.change([state("t", tcp("10.43.0.7"), &["10.42.0.2"], 8080)]).unwrap();
        assert!(proxy.is_intact().unwrap());
        let removed = delete_flows(&mut channel, true, 17, &BTreeSet::from([5000]), |_| true).unwrap();
        assert_eq!(removed, ROOM as usize);
        assert_eq!(answers("10.43.0.5:80", 3), ["a"]);
        assert_eq!(
            answers("10.43.0.7:80", 3),
            ["a"],
            "the change that was made while the table was full applies"
        );
        assert_eq!(ask(&mut kept), "a");
    });
}

#[test]
fn the_next_agent_completes_the_changes_of_a_killed_one() {
    let udp = || json!({"clusterIP": "10.43.0.5", "ports": [{"port": 53, "protocol": "UDP"}]});
    let with = move |endpoint: &str| {
        [state("u", udp(), &[endpoint], 53), state("t", tcp("10.43.0.6"), &[endpoint], 8080)]
    };
    if is_to_be_killed() {
        let mut proxy = Proxy::open(TABLE, node()).unwrap();
        proxy.replace(node(), with("10.42.0.2")).unwrap();
        proxy.change(with("10.42.0.3")).unwrap();
        return;
    }
    on_a_node(move || {
        let server = |address: &'static str, name| {
            serve(address, 8080, name);
            let socket = UdpSocket::bind((address, 53)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            socket
        };
        let (one, two) = (server("10.42.0.2", "a"), server("10.42.0.3", "b"));
        let start = |endpoint| {
            let mut proxy = Proxy::open(TABLE, node()).unwrap();
            proxy.replace(node(), with(endpoint)).unwrap();
        };
        // An agent passes each fault point twice: when it replaces the table, and when it changes the table.
        for (point, left) in [
            ("services.committed:1", "a"),
            ("services.flows-deleted:1", "a"),
            ("services.committed:2", "b"),
            ("services.flows-deleted:2", "b"),
        ] {
            start("10.42.0.2");
            let client = UdpSocket::bind("10.42.0.1:0").unwrap();
            client.connect("10.43.0.5:53").unwrap();
            client.send(b"1").unwrap();
            let mut buffer = [0; 8];
            one.recv(&mut buffer).unwrap();
            run_until_killed("the_next_agent_completes_the_changes_of_a_killed_one", point);
            assert_eq!(answers("10.43.0.6:80", 3), [left], "the table after {point}");
            start("10.42.0.3");
            assert_eq!(answers("10.43.0.6:80", 3), ["b"], "{point}");
            client.send(b"2").unwrap();
            two.recv(&mut buffer).unwrap_or_else(|error| panic!("a stale flow after {point}: {error}"));
            assert_eq!(buffer[0], b'2');
        }
    });
}

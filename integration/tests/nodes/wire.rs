//! The format of packets between nodes, captured on the bridge between them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use coracle_integration::{Host, Nodes, on_a_machine};

use super::CIDRS;
use super::capture::{Capture, Frame, Packet};
use super::pods::{Pod, reaches, stream, with_nginx};

/// Two nodes, a pod on each, and all captured frames of their traffic: small packets, full-size packets and a stream in
/// both directions.
struct CapturedTraffic {
    nodes: Nodes,
    pods: Vec<Pod>,
    frames: Vec<Vec<u8>>,
}

/// Captured packets between pods: addresses and length.
type PodPackets = BTreeSet<(IpAddr, IpAddr, usize)>;

// === impl CapturedTraffic ===

impl CapturedTraffic {
    fn by(machine: &mut coracle_integration::Machine, overlay: &str) -> Self {
        let mut nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        for number in [1, 2] {
            nodes.add(number, &["--overlay", overlay]);
        }
        nodes.wait_ready();
        let pods = with_nginx(&nodes, 2);
        let mtu = mtu(&nodes);
        for agent in nodes.agents() {
            // Without segmentation offload, captured frames have the same size as on the wire.
            agent.host().run("ip", &["link", "set", "eth0", "gso_max_segs", "1"]);
        }
        let capture = Capture::on(&nodes.agents()[0].host().port());
        let frames = capture.during(|| {
            for (from, to) in [(&pods[0], &pods[1]), (&pods[1], &pods[0])] {
                for ip in &to.ips {
                    assert!(reaches(&nodes, from, ip, 64), "{} to {ip}", from.node);
                    assert!(reaches(&nodes, from, ip, mtu), "{} to {ip}: {mtu} bytes", from.node);
                    stream(from, to, ip);
                }
            }
        });
        Self { nodes, pods, frames }
    }

    fn hosts(&self) -> [&Host; 2] {
        [0, 1].map(|at| self.nodes.agents()[at].host())
    }

    fn is_of_pods(&self, packet: &Packet<'_>) -> bool {
        let own = |ip: IpAddr| self.pods.iter().any(|pod| pod.ips.contains(&ip.to_string()));
        own(packet.from) && own(packet.to)
    }

    /// Asserts that the outer packet goes from the sender's host to the receiver's host, in the same address family.
    fn assert_outer_addresses(&self, outer: &Packet<'_>, inner: &Packet<'_>) {
        let hosts = self.hosts().map(|host| match inner.from {
            IpAddr::V4(_) => host.address().parse::<IpAddr>().unwrap(),
            IpAddr::V6(_) => host.address_v6().parse::<IpAddr>().unwrap(),
        });
        let first_sends = self.nodes.agents()[0].name() == self.pod_of(inner.from).node;
        let wanted = if first_sends { (hosts[0], hosts[1]) } else { (hosts[1], hosts[0]) };
        assert_eq!((outer.from, outer.to), wanted, "{inner:?}");
    }

    fn pod_of(&self, ip: IpAddr) -> &Pod {
        self.pods.iter().find(|pod| pod.ips.contains(&ip.to_string())).unwrap()
    }

    /// Asserts that no frame exceeds the link's MTU, and that `captured` contains all packets of pods. These must include
    /// small and full-size packets in both directions.
    fn check(&self, is_unencapsulated: bool, captured: &PodPackets) {
        let hosts = self.hosts().map(|host| [host.address(), host.address_v6()]).concat();
        // Frames of the control plane are left out, because its uplink has segmentation offload.
        let between = |packet: &Packet<'_>| {
            self.is_of_pods(packet)
                || [packet.from, packet.to].iter().all(|ip| hosts.contains(&ip.to_string()))
        };
        let is_between = |frame: &&Vec<u8>| Frame::of(frame).packet().is_some_and(|packet| between(&packet));
        let longest = self.frames.iter().filter(is_between).map(|frame| frame.len() - 14).max();
        assert_eq!(longest, Some(1500), "the longest frame has the MTU of the link");
        let mut packets = self.frames.iter().filter_map(|frame| Frame::of(frame).packet());
        assert_eq!(packets.any(|packet| self.is_of_pods(&packet)), is_unencapsulated);
        for (from, to) in [(0, 1), (1, 0)] {
            for (from, to) in self.pods[from].ips.iter().zip(&self.pods[to].ips) {
                for length in [64, mtu(&self.nodes)] {
                    let packet = (from.parse().unwrap(), to.parse().unwrap(), length);
                    assert!(captured.contains(&packet), "{packet:?}");
                }
            }
        }
    }
}

/// MTU of the pods' interfaces.
fn mtu(nodes: &Nodes) -> usize {
    let link = &nodes.agents()[0].host().ip(&["link", "show", "coracle0"])[0];
    usize::try_from(link["mtu"].as_u64().unwrap()).unwrap()
}

fn key(packet: &Packet<'_>) -> (IpAddr, IpAddr, usize) {
    (packet.from, packet.to, packet.length)
}

fn hardware_address(host: &Host, link: &str) -> String {
    host.ip(&["link", "show", link])[0]["address"].as_str().unwrap().to_owned()
}

/// Name of the VXLAN device for an outer address family.
fn device(host: &Host, v4: bool) -> String {
    let devices = host.ip(&["link", "show", "type", "vxlan"]).as_array().unwrap().clone();
    let local = if v4 { "local" } else { "local6" };
    let found = devices.iter().find(|device| !device["linkinfo"]["info_data"][local].is_null());
    found.unwrap()["ifname"].as_str().unwrap().to_owned()
}

#[test]
fn packets_of_pods_are_sent_in_vxlan_and_fit_the_link() {
    on_a_machine(|machine| {
        let traffic = CapturedTraffic::by(machine, "vxlan");
        let devices = |v4| traffic.hosts().map(|host| hardware_address(host, &device(host, v4)));
        let (of_v4, of_v6) = (devices(true), devices(false));
        let mut captured = PodPackets::new();
        for frame in &traffic.frames {
            let Some(outer) = Frame::of(frame).packet() else { continue };
            let Some(datagram) = outer.datagram().filter(|datagram| datagram.to_port == 8472) else {
                continue;
            };
            let (vni, inside) = datagram.vxlan();
            assert_eq!(vni, 1);
            let Some(inner) = inside.packet().filter(|inner| traffic.is_of_pods(inner)) else { continue };
            traffic.assert_outer_addresses(&outer, &inner);
            let mut ends = [inside.from.clone(), inside.to.clone()];
            if traffic.pod_of(inner.from).node != traffic.nodes.agents()[0].name() {
                ends.reverse();
            }
            assert_eq!(ends, if inner.from.is_ipv4() { of_v4.clone() } else { of_v6.clone() }, "{inner:?}");
            captured.insert(key(&inner));
        }
        traffic.check(false, &captured);
    });
}

#[test]
fn packets_of_pods_are_routed_without_encapsulation() {
    on_a_machine(|machine| {
        let traffic = CapturedTraffic::by(machine, "host-gw");
        let uplinks = traffic.hosts().map(|host| hardware_address(host, "eth0"));
        let mut captured = PodPackets::new();
        for frame in &traffic.frames {
            let frame = Frame::of(frame);
            let Some(packet) = frame.packet() else { continue };
            let wrapped = packet.datagram().is_some_and(|datagram| [8472, 8285].contains(&datagram.to_port));
            assert!(!wrapped, "{packet:?}");
            if traffic.is_of_pods(&packet) {
                let mut ends = [frame.from.clone(), frame.to.clone()];
                if traffic.pod_of(packet.from).node != traffic.nodes.agents()[0].name() {
                    ends.reverse();
                }
                assert_eq!(ends, uplinks, "{packet:?}");
                captured.insert(key(&packet));
            }
        }
        traffic.check(true, &captured);
    });
}

#[test]
fn packets_of_pods_are_sent_in_udp_and_fit_the_link() {
    on_a_machine(|machine| {
        let traffic = CapturedTraffic::by(machine, "udp");
        let mut captured = PodPackets::new();
        for frame in &traffic.frames {
            let Some(outer) = Frame::of(frame).packet() else { continue };
            let Some(datagram) = outer.datagram().filter(|datagram| datagram.to_port == 8285) else {
                continue;
            };
            let inner = Packet::of(datagram.payload);
            if traffic.is_of_pods(&inner) {
                traffic.assert_outer_addresses(&outer, &inner);
                captured.insert(key(&inner));
            }
        }
        traffic.check(false, &captured);
    });
}

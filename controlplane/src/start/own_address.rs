//! The address at which other machines reach this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::Path;

use ipnetwork::IpNetwork;
use nix::net::if_::InterfaceFlags;

/// The address of the API server. This is `listen`, unless `listen` is unspecified. Then it is the source address that
/// this machine would use to reach other machines. No packet is sent. If `v6_first`, IPv6 is preferred.
///
/// Without a default route, the first usable address of an interface is returned. If no interface has a usable address,
/// the loopback address is returned.
pub(super) fn own_address(listen: IpAddr, reserved: &[IpNetwork], v6_first: bool) -> IpAddr {
    if !listen.is_unspecified() {
        return listen;
    }
    let routed = |any: IpAddr, far: IpAddr| {
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((far, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    // Documentation addresses (RFC 5737, RFC 3849): they are routed like any remote address.
    let v4 = || routed(Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into());
    let v6 = || routed(Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into());
    let found = if v6_first { v6().or_else(v4) } else { v4().or_else(v6) };
    if let Some(found) = found.filter(|found| !found.is_loopback()) {
        return found;
    }
    interface_address(&interface_addresses(), reserved, v6_first).unwrap_or_else(|| {
        tracing::warn!("this machine has only loopback addresses: pods cannot reach the API server");
        IpAddr::V4(Ipv4Addr::LOCALHOST)
    })
}

/// The first address that other machines can reach. Addresses of pods and services are skipped. `choose` in the agent
/// selects the same address if there is no default route.
fn interface_address(all: &[IpAddr], reserved: &[IpNetwork], v6_first: bool) -> Option<IpAddr> {
    let is_usable = |ip: &IpAddr| {
        let is_local = match ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        !is_local
            && !ip.is_loopback()
            && !ip.is_unspecified()
            && !reserved.iter().any(|network| network.contains(*ip))
    };
    all.iter().copied().filter(is_usable).min_by_key(|ip| ip.is_ipv6() != v6_first)
}

/// The addresses of all interfaces that are up, except bridges and tunnels, which usually belong to a pod network.
fn interface_addresses() -> Vec<IpAddr> {
    let all = match nix::ifaddrs::getifaddrs() {
        Ok(all) => all,
        Err(error) => {
            tracing::warn!(%error, "cannot list the machine's addresses");
            return Vec::new();
        }
    };
    all.filter(|one| one.flags.contains(InterfaceFlags::IFF_UP))
        .filter(|one| !is_virtual(Path::new("/sys/class/net"), &one.interface_name))
        .filter_map(|one| {
            let address = one.address?;
            let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
        })
        .collect()
}

/// Whether an interface is a bridge or a tunnel. `sys` is `/sys/class/net`.
fn is_virtual(sys: &Path, interface: &str) -> bool {
    let directory = sys.join(interface);
    let uevent = std::fs::read_to_string(directory.join("uevent")).unwrap_or_default();
    let kind = uevent.lines().find_map(|line| line.strip_prefix("DEVTYPE="));
    matches!(kind, Some("bridge" | "vxlan" | "wireguard")) || directory.join("tun_flags").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_default_route_an_interface_has_the_address() {
        let all = |list: &[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
        let reserved = ["10.42.0.0/16".parse().unwrap(), "10.43.0.0/16".parse().unwrap()];
        let chosen = |list: &[&str], v6_first: bool| {
            interface_address(&all(list), &reserved, v6_first).map(|ip| ip.to_string()).unwrap_or_default()
        };
        let machine = [
            "127.0.0.1",
            "::1",
            "169.254.1.1",
            "fe80::1",
            "10.42.0.1",
            "10.43.0.1",
            "2001:db8::1",
            "192.0.2.7",
        ];
        assert_eq!(chosen(&machine, false), "192.0.2.7");
        assert_eq!(chosen(&machine, true), "2001:db8::1");
        assert_eq!(chosen(&machine[..7], false), "2001:db8::1");
        assert_eq!(chosen(&machine[..6], false), "");
    }

    #[test]
    fn bridges_and_tunnels_are_virtual() {
        let sys = tempfile::tempdir().unwrap();
        let device = |name: &str, uevent: &str| {
            std::fs::create_dir(sys.path().join(name)).unwrap();
            std::fs::write(sys.path().join(name).join("uevent"), uevent).unwrap();
            is_virtual(sys.path(), name)
        };
        assert!(device("br0", "DEVTYPE=bridge\nINTERFACE=br0\nIFINDEX=4\n"));
        assert!(device("vx0", "DEVTYPE=vxlan\nINTERFACE=vx0\n"));
        assert!(!device("eth0", "INTERFACE=eth0\nIFINDEX=2\n"));
    }
}

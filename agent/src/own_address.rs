//! The node's own addresses. A machine without a default route is supported.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};

use coracle_cni::{AddressMonitor, LocalAddress};
use tokio::sync::watch;

/// The node's addresses by the machine's routes and interfaces: the primary address, and an address of the other family
/// if the same interface has such an address.
pub(crate) fn find() -> Vec<IpAddr> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let routes =
        default_interfaces(&read("/proc/thread-self/net/route"), &read("/proc/thread-self/net/ipv6_route"));
    let locals = coracle_cni::local_addresses();
    let locals = locals.inspect_err(|error| {
        tracing::warn!(error = coracle_error_chain::chain(error), "cannot list the machine's addresses")
    });
    choose(&routes, &locals.unwrap_or_default())
}

/// Reads the addresses again, and notifies if they changed.
pub(crate) fn find_again(ips: &watch::Sender<Vec<IpAddr>>) {
    let found = find();
    ips.send_if_modified(|ips| {
        let changed = *ips != found;
        if changed {
            tracing::info!(?found, "the node's addresses changed");
            *ips = found;
        }
        changed
    });
}

/// Keeps the addresses up to date. Does not return.
pub(crate) async fn follow(ips: &watch::Sender<Vec<IpAddr>>) {
    let mut changes = match AddressMonitor::open() {
        Ok(changes) => changes,
        Err(error) => {
            tracing::warn!(
                error = coracle_error_chain::chain(&error),
                "cannot watch the machine's addresses: changes are not noticed"
            );
            return std::future::pending().await;
        }
    };
    loop {
        find_again(ips);
        changes.next().await;
    }
}

/// Interfaces of default routes: IPv4 before IPv6, lower metrics first.
fn default_interfaces(v4: &str, v6: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    for line in v4.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if let [interface, "00000000", _, _, _, _, metric, "00000000", ..] = fields[..] {
            found.insert((4, metric.parse::<u32>().unwrap_or(u32::MAX), interface.to_owned()));
        }
    }
    for line in v6.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [destination, "00", _, _, _, metric, _, _, _, interface] = fields[..] else { continue };
        // The kernel has an unreachable default route on lo.
        if destination.bytes().all(|b| b == b'0') && interface != "lo" {
            found.insert((6, u32::from_str_radix(metric, 16).unwrap_or(u32::MAX), interface.to_owned()));
        }
    }
    found.into_iter().map(|(_, _, interface)| interface).collect()
}

/// Addresses of the default route's interface; else the first reachable addresses; else loopback.
fn choose(routes: &[String], locals: &[LocalAddress]) -> Vec<IpAddr> {
    let usable: Vec<&LocalAddress> = locals.iter().filter(|local| is_usable(local.ip)).collect();
    let on = |interface: &String| {
        usable.iter().filter(move |l| l.interface == *interface).min_by_key(|l| l.ip.is_ipv6())
    };
    let routed = routes.iter().find_map(on);
    // A bridge is usually a container network, not the uplink. The loopback interface has the IPv6 address of cluster
    // DNS, whose scope the kernel does not keep.
    let rank = |local: &&&LocalAddress| (local.interface == "lo", local.ip.is_ipv6());
    let other = || usable.iter().filter(|local| !local.is_virtual).min_by_key(rank);
    let Some(first) = routed.or_else(other) else { return vec![IpAddr::V4(Ipv4Addr::LOCALHOST)] };
    let beside = |l: &&&LocalAddress| l.interface == first.interface && l.ip.is_ipv4() != first.ip.is_ipv4();
    std::iter::once(first).chain(usable.iter().find(beside)).map(|local| local.ip).collect()
}

fn is_usable(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local() && !ip.is_unspecified(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local() && !ip.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(interface: &str, ip: &str) -> LocalAddress {
        LocalAddress {
            interface: interface.to_owned(),
            ip: ip.parse().expect("address"),
            is_virtual: interface.starts_with("br"),
        }
    }

    #[test]
    fn the_default_route_decides_then_reachability() {
        let all = [
            local("lo", "127.0.0.1"),
            local("br0", "10.42.0.1"),
            local("eth0", "fe80::1"),
            local("eth0", "2001:db8::1"),
            local("eth0", "192.0.2.1"),
            local("eth1", "192.0.2.2"),
        ];
        let chosen = |routes: &[&str], locals: &[LocalAddress]| {
            choose(&routes.iter().map(|r| (*r).to_owned()).collect::<Vec<_>>(), locals)
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(chosen(&["eth1"], &all), "192.0.2.2");
        assert_eq!(chosen(&["br0"], &all), "10.42.0.1");
        assert_eq!(chosen(&["gone"], &all), "192.0.2.1 2001:db8::1");
        assert_eq!(chosen(&[], &all), "192.0.2.1 2001:db8::1");
        assert_eq!(chosen(&[], &all[..2]), "127.0.0.1");
        let dns = [local("lo", "fd43::a"), local("eth0", "2001:db8::1")];
        assert_eq!(
            (chosen(&[], &dns), chosen(&[], &dns[..1])),
            ("2001:db8::1".to_owned(), "fd43::a".to_owned())
        );
        assert_eq!(chosen(&[], &[]), "127.0.0.1");
    }

    #[test]
    fn default_routes_are_read_in_the_order_of_their_metrics() {
        let v4 = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                  eth1\t00000000\t010200C0\t0003\t0\t0\t200\t00000000\t0\t0\t0\n\
                  eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
                  eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        let v6 = "00000000000000000000000000000000 00 00000000000000000000000000000000 00 20010db8000000000000000000000001 00000400 00000001 00000000 00000003 eth2\n\
                  00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo\n";
        assert_eq!(default_interfaces(v4, v6), ["eth0", "eth1", "eth2"]);
    }
}

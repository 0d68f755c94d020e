//! Sysctls that a pod network needs. Most are written only if they differ, because writing some of them has side
//! effects (`ip_forward` resets per-interface settings).

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::Path;

use ipnetwork::IpNetwork;

use crate::error::Error;

/// Enables forwarding for each address family in use.
pub(crate) fn forwarding(cidrs: &[IpNetwork]) -> Result<(), Error> {
    if cidrs.iter().any(IpNetwork::is_ipv4) {
        ensure("/proc/sys/net/ipv4/ip_forward", "1")?;
    }
    if cidrs.iter().any(IpNetwork::is_ipv6) {
        forward_v6()?;
    }
    Ok(())
}

/// Minimum sizes of the kernel's neighbour tables in entries: the limit (`gc_thresh3`), and the size above which the
/// kernel soon removes unused entries (`gc_thresh2`).
const NEIGHBOURS: [(&str, u32); 2] = [("gc_thresh3", 32768), ("gc_thresh2", 16384)];

/// Raises the size of the neighbour tables. All network namespaces share these tables, which have 1,024 entries by
/// default. A few pods that send to absent addresses of their network would fill the tables. Then no pod could reach a
/// new neighbour. A failure is logged: these settings may be read-only.
pub(crate) fn room_for_neighbours() {
    for family in ["ipv4", "ipv6"] {
        let dir = Path::new("/proc/sys/net").join(family).join("neigh/default");
        if let Err(error) = raise(&dir, &NEIGHBOURS) {
            tracing::warn!(error = error.chain(), "cannot enlarge the kernel's neighbour table");
        }
    }
}

/// Minimum number of connections that the kernel must be able to track. This number and the next are kube-proxy's
/// defaults.
const MIN_CONNECTIONS: u32 = 131_072;
/// Number of connections for each processor that the kernel must be able to track.
const CONNECTIONS_PER_PROCESSOR: u32 = 32_768;
/// Maximum number of connections that is set.
const MAX_CONNECTIONS: u32 = 1 << 20;
/// Seconds after which the kernel stops tracking an open TCP connection without packets: a day, kube-proxy's default.
/// The kernel's default is five days.
const CONNECTION_IDLE: u32 = 86_400;
/// Maximum timeouts in seconds of TCP connections that are open, closed, or being closed. The limit on the connections
/// of a pod does not count closed connections, but they stay in the table until the timeout.
const CONNECTION_ENDS: [(&str, u32); 3] = [
    ("nf_conntrack_tcp_timeout_established", CONNECTION_IDLE),
    ("nf_conntrack_tcp_timeout_time_wait", 30),
    ("nf_conntrack_tcp_timeout_fin_wait", 60),
];
/// Minimum timeout in seconds of TCP connections that one end has closed: an hour, kube-proxy's default. The other end
/// may still send. With the kernel's default, a minute, later packets of that end through a service would be lost.
const HALF_CLOSED: [(&str, u32); 1] = [("nf_conntrack_tcp_timeout_close_wait", 3600)];

/// Raises the number of connections that the kernel tracks, and lets idle and closed connections expire earlier. Must
/// be called after the kernel has begun to track connections. A failure is logged: these settings may be read-only.
pub(crate) fn room_for_connections() {
    if let Err(error) = prepare_tracking(Path::new("/proc/sys/net/netfilter")) {
        tracing::warn!(error = error.chain(), "cannot prepare the kernel's connection tracking table");
    }
}

/// Writes the settings of connection tracking in the directory. Tries all settings, and returns the first error.
fn prepare_tracking(dir: &Path) -> Result<(), Error> {
    let most = connections(std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    // Only the initial network namespace can change these numbers. Other namespaces only show them.
    let is_first = std::fs::metadata(dir.join("nf_conntrack_max"))
        .is_ok_and(|metadata| !metadata.permissions().readonly());
    // The maximum is the limit. The buckets only make look-ups faster.
    let least = [("nf_conntrack_max", most), ("nf_conntrack_buckets", most / 4)];
    let room = if is_first { raise(dir, &least) } else { Ok(()) };
    let raised = room.and(raise(dir, &HALF_CLOSED));
    let lowered = CONNECTION_ENDS.iter().map(|(name, most)| lower(&dir.join(name), *most));
    lowered.fold(raised, Result::and)
}

/// The number of connections for a number of processors.
fn connections(processors: usize) -> u32 {
    let all = u32::try_from(processors).unwrap_or(u32::MAX).saturating_mul(CONNECTIONS_PER_PROCESSOR);
    all.clamp(MIN_CONNECTIONS, MAX_CONNECTIONS)
}

/// Lowers the number in a file, if it exists and the number is higher.
fn lower(path: &Path, most: u32) -> Result<(), Error> {
    match std::fs::read_to_string(path).map(|now| now.trim().parse::<u32>()) {
        Ok(Ok(now)) if now > most => write(path, &most.to_string()),
        _ => Ok(()),
    }
}

/// Raises the number in each file to this minimum. Absent files are left out: only the first network namespace has
/// them. Tries all files, and returns the first error.
fn raise(dir: &Path, least: &[(&str, u32)]) -> Result<(), Error> {
    let mut raised = Ok(());
    for (name, least) in least {
        let path = dir.join(name);
        let Ok(now) = std::fs::read_to_string(&path) else { continue };
        if now.trim().parse().is_ok_and(|now: u32| now < *least) {
            raised = raised.and(write(&path, &least.to_string()));
        }
    }
    raised
}

/// Whether the module `br_netfilter` is loaded or built in. Then the kernel can pass packets between ports of a bridge
/// through the filters of the IP layer.
#[must_use]
pub fn filters_bridges() -> bool {
    Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables").exists()
}

/// Enables IPv6 forwarding, and keeps the node's default route. With forwarding the kernel ignores router
/// advertisements unless `accept_ra` is 2, and drops the default routes that it learned from them. So interfaces that
/// have or may get such a route are set to `accept_ra` = 2. Other interfaces are not changed: a pod must not be a
/// router.
fn forward_v6() -> Result<(), Error> {
    let all = Path::new("/proc/sys/net/ipv6/conf");
    let forwarding = all.join("all/forwarding");
    if read(&forwarding)?.trim() == "1" {
        return Ok(());
    }
    let routes = read(Path::new("/proc/thread-self/net/ipv6_route"))?;
    let advertised = advertised_interfaces(&routes);
    let interfaces = std::fs::read_dir(all).map_err(|source| Error::File {
        action: "read",
        path: all.to_owned(),
        source,
    })?;
    for name in interfaces.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let is_hardware = || Path::new("/sys/class/net").join(&name).join("device").exists();
        let accept_ra = all.join(&name).join("accept_ra");
        // The interface may be gone in the meantime.
        let accepts = || std::fs::read_to_string(&accept_ra).is_ok_and(|now| now.trim() == "1");
        if (advertised.contains(name.as_str()) || is_hardware()) && accepts() {
            unless_absent(write(&accept_ra, "2"))?;
        }
    }
    write(&forwarding, "1")
}

/// Interfaces with a default route of a router advertisement, from `/proc/net/ipv6_route`.
fn advertised_interfaces(routes: &str) -> BTreeSet<&str> {
    /// `RTF_DEFAULT` and `RTF_ADDRCONF` of linux/ipv6_route.h.
    const ADVERTISED: u32 = 0x0001_0000 | 0x0004_0000;
    routes
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [.., flags, interface] = fields[..] else { return None };
            let flags = u32::from_str_radix(flags, 16).ok()?;
            (flags & ADVERTISED == ADVERTISED).then_some(interface)
        })
        .collect()
}

/// Sets whether processes of the node can reach host ports at 127.0.0.1. Such packets leave through the interface with
/// a loopback source, which is masqueraded later. With this sysctl the kernel also accepts packets that arrive for
/// 127.0.0.1. So the rules that drop these packets must exist before. An absent interface is not an error.
pub(crate) fn route_localnet(interface: &str, on: bool) -> Result<(), Error> {
    let path = format!("/proc/sys/net/ipv4/conf/{interface}/route_localnet");
    unless_absent(ensure(&path, if on { "1" } else { "0" }))
}

/// The interface whose network contains the address: packets to this address need no router.
pub(crate) fn interface_to(address: Ipv4Addr) -> Option<String> {
    on_link(&std::fs::read_to_string("/proc/thread-self/net/route").ok()?, address).map(str::to_owned)
}

/// Finds the interface in the text of `/proc/net/route`. Its numbers are the bytes of the addresses in memory order.
fn on_link(routes: &str, address: Ipv4Addr) -> Option<&str> {
    let found = routes.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |place: usize| u32::from_str_radix(fields.get(place)?, 16).ok();
        let (to, gateway, mask) = (number(1)?, number(2)?, number(7)?);
        let covers = u32::from_ne_bytes(address.octets()) & mask == to;
        (covers && gateway == 0).then_some((mask.count_ones(), *fields.first()?))
    });
    found.max_by_key(|(length, _)| *length).filter(|(length, _)| *length > 0).map(|(_, interface)| interface)
}

/// Disables router advertisements on an interface: a pod may send them and become the node's router (CVE-2020-10749).
/// Must be called before packets can arrive. A kernel without IPv6 is not an error.
pub(crate) fn no_router_advertisements(interface: &str) -> Result<(), Error> {
    unless_absent(ensure(&format!("/proc/sys/net/ipv6/conf/{interface}/accept_ra"), "0"))
}

/// Disables IPv6 on a port of a bridge. Only the bridge has addresses. With IPv6 each port adds routes and addresses to
/// the kernel's tables. The kernel walks these tables whenever a port goes down, so the cost of a pod grows with the
/// number of pods. Without IPv6 the port also accepts no router advertisements. Must be called before packets can
/// arrive. A kernel without IPv6 is not an error.
pub(crate) fn no_ipv6(port: &str) -> Result<(), Error> {
    let path = format!("/proc/sys/net/ipv6/conf/{port}/disable_ipv6");
    // A new port usually has IPv6, so the setting is not read first. A write of the same value has no effect.
    unless_absent(write(Path::new(&path), "1").or_else(|_| ensure(&path, "1")))
}

fn unless_absent(done: Result<(), Error>) -> Result<(), Error> {
    match done {
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn ensure(path: &str, value: &str) -> Result<(), Error> {
    let path = Path::new(path);
    if read(path)?.trim() == value { Ok(()) } else { write(path, value) }
}

fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::File {
        action: "read",
        path: path.to_owned(),
        source,
    })
}

fn write(path: &Path, value: &str) -> Result<(), Error> {
    std::fs::write(path, value).map_err(|source| Error::File {
        action: "write",
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_narrowest_network_without_a_router_decides_the_interface() {
        let number = |ip: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(ip));
        let route = |interface: &str, to, gateway, mask| {
            format!(
                "{interface}\t{}\t{}\t0001\t0\t0\t0\t{}\t0\t0\t0\n",
                number(to),
                number(gateway),
                number(mask)
            )
        };
        let routes = [
            "Iface\tDestination\tGateway\n".to_owned(),
            route("eth0", [0; 4], [192, 0, 2, 1], [0; 4]),
            route("br0", [10, 1, 0, 0], [0; 4], [255, 255, 0, 0]),
            route("br1", [10, 1, 2, 0], [0; 4], [255, 255, 255, 0]),
            route("eth0", [10, 1, 2, 4], [192, 0, 2, 1], [255; 4]),
        ]
        .concat();
        let interfaces = ["10.1.0.5", "10.1.2.4", "10.9.0.5"].map(|ip| on_link(&routes, ip.parse().unwrap()));
        assert_eq!(interfaces, [Some("br0"), Some("br1"), None]);
    }

    #[test]
    fn numbers_are_raised_and_never_lowered() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("low"), "1024\n").unwrap();
        std::fs::write(path("high"), "99999\n").unwrap();
        raise(dir.path(), &[("low", 4096), ("high", 4096), ("absent", 4096)]).unwrap();
        assert_eq!(std::fs::read_to_string(path("low")).unwrap(), "4096");
        assert_eq!(std::fs::read_to_string(path("high")).unwrap(), "99999\n");
        assert!(!path("absent").exists());
    }

    #[test]
    fn a_number_that_cannot_be_raised_does_not_prevent_others() {
        let dir = tempfile::tempdir().unwrap();
        // The kernel refuses a write to this sysctl, even by root.
        std::os::unix::fs::symlink("/proc/sys/kernel/ngroups_max", dir.path().join("fixed")).unwrap();
        std::fs::write(dir.path().join("low"), "1024\n").unwrap();
        let done = raise(dir.path(), &[("fixed", u32::MAX), ("low", 4096)]);
        assert_eq!(std::fs::read_to_string(dir.path().join("low")).unwrap(), "4096");
        assert!(done.is_err());
    }

    #[test]
    fn the_kernel_tracks_as_many_connections_as_with_kube_proxy() {
        assert_eq!([1, 4, 8, 100].map(connections), [131_072, 131_072, 262_144, 1_048_576]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("timeout");
        lower(&path, 10).unwrap();
        for (before, after) in [("432000\n", "86400"), ("3600\n", "3600\n")] {
            std::fs::write(&path, before).unwrap();
            lower(&path, CONNECTION_IDLE).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), after);
        }
    }

    #[test]
    fn timeouts_of_connections_are_those_of_kube_proxy() {
        let dir = tempfile::tempdir().unwrap();
        let kernel =
            [("established", "432000"), ("close_wait", "60"), ("time_wait", "120"), ("fin_wait", "120")];
        let path = |name: &str| dir.path().join(format!("nf_conntrack_tcp_timeout_{name}"));
        kernel.iter().for_each(|(name, seconds)| std::fs::write(path(name), seconds).unwrap());
        prepare_tracking(dir.path()).unwrap();
        let now = kernel.map(|(name, _)| std::fs::read_to_string(path(name)).unwrap());
        assert_eq!(now, ["86400", "3600", "30", "60"]);
        std::fs::write(path("close_wait"), "7200").unwrap();
        prepare_tracking(dir.path()).unwrap();
        assert_eq!(
            std::fs::read_to_string(path("close_wait")).unwrap(),
            "7200",
            "the administrator's value stays"
        );
    }

    #[test]
    fn advertised_default_routes_are_distinguished_from_static_routes() {
        let route = |flags: &str, interface: &str| {
            let (any, hop) = ("0".repeat(32), "fe800000000000000000000000000001");
            format!("{any} 00 {any} 00 {hop} 00000400 00000001 00000000 {flags} {interface:>8}\n")
        };
        let advertised = route("00450003", "eth0");
        let set = route("00000003", "eth1");
        let prefix = route("00040001", "eth2");
        let none = route("00200200", "lo");
        let all = [advertised, set, prefix, none].concat();
        assert_eq!(advertised_interfaces(&all), BTreeSet::from(["eth0"]));
    }
}

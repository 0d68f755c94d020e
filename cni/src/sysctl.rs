//! The kernel parameters that a pod network needs. Written only when they differ, because writing
//! some of them has side effects (`ip_forward` resets per-interface settings).

use std::path::Path;

use ipnetwork::IpNetwork;

use crate::error::Error;

/// Lets the node route between pods and the world, for each family in use.
pub(crate) fn forwarding(cidrs: &[IpNetwork]) -> Result<(), Error> {
    if cidrs.iter().any(IpNetwork::is_ipv4) {
        ensure("/proc/sys/net/ipv4/ip_forward", "1")?;
    }
    if cidrs.iter().any(IpNetwork::is_ipv6) {
        ensure("/proc/sys/net/ipv6/conf/all/forwarding", "1")?;
    }
    Ok(())
}

/// Whether 127.0.0.1 of the node may reach host ports: such packets leave by the interface with a loopback source until
/// they are masqueraded. It also lets packets in that are sent to 127.0.0.1: see to them first. An interface that is not
/// there needs nothing.
pub(crate) fn route_localnet(interface: &str, on: bool) -> Result<(), Error> {
    let path = format!("/proc/sys/net/ipv4/conf/{interface}/route_localnet");
    unless_absent(ensure(&path, if on { "1" } else { "0" }))
}

/// Keeps an interface from taking router advertisements: a pod may send them, too, and would be the node's router
/// (CVE-2020-10749). To be called before anything can come by it. A kernel without IPv6 takes none.
pub(crate) fn no_router_advertisements(interface: &str) -> Result<(), Error> {
    unless_absent(ensure(&format!("/proc/sys/net/ipv6/conf/{interface}/accept_ra"), "0"))
}

fn unless_absent(done: Result<(), Error>) -> Result<(), Error> {
    match done {
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn ensure(path: &str, value: &str) -> Result<(), Error> {
    let path = Path::new(path);
    let failed = |action| move |source| Error::File { action, path: path.to_owned(), source };
    let now = std::fs::read_to_string(path).map_err(failed("read"))?;
    if now.trim() == value {
        return Ok(());
    }
    std::fs::write(path, value).map_err(failed("write"))
}

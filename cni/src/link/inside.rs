//! Setup of an interface inside a sandbox: a thread enters the namespace, makes one query, and sends the changes in one
//! or two messages. Ten separate messages would cost more context switches.

use std::io;

use ipnetwork::IpNetwork;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkMessage};
use rtnetlink::LinkUnspec;
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};

use super::address::{address_message, route_message};
use super::{Link, failed};
use crate::error::Error;
use crate::netns::Netns;
use crate::route_socket::{RefusedRequest, Request, RouteSocket};
use crate::spec::result::Route;

/// `LOOPBACK_IFINDEX`: the loopback of every namespace.
const LOOPBACK: u32 = 1;

/// Settings of an existing interface, in the order of their application.
#[derive(Debug, Clone, Default)]
pub(crate) struct Setup {
    pub(crate) addresses: Vec<IpNetwork>,
    /// Whether the kernel runs duplicate address detection before the addresses are used.
    pub(crate) detect: bool,
    /// Whether the kernel gives the interface no link-local IPv6 address when it is set up. An interface with such an
    /// address sends solicitations and reports, and a bridge copies each of them to all other ports.
    pub(crate) no_link_local: bool,
    /// Index of the other end of the pair: a port of a bridge on the host, which is still down. The port is set up
    /// immediately before this interface. If the port were up earlier, the kernel would notice that it has no carrier,
    /// and disable it again. Each of these changes takes time in proportion to the number of ports.
    pub(crate) host_end: Option<u32>,
    pub(crate) up: bool,
    /// If two routes have the same destination, the first one is used.
    pub(crate) routes: Vec<Route>,
}

/// The host's end of the pair.
struct HostEnd {
    /// A socket of the host's namespace.
    socket: RouteSocket,
    /// Index of the interface.
    index: u32,
}

/// A change of a link, with its description for errors.
struct Step {
    request: Request,
    description: Description,
}

/// Description of a change, for errors.
struct Description {
    action: &'static str,
    what: String,
    /// Error number that counts as success, because the desired state already exists.
    ignored: Option<i32>,
}

/// Sets the loopback up.
pub(crate) async fn loopback_up(netns: &Netns) -> Result<(), Error> {
    netns.visit(|| send_all(&mut open()?, vec![Step::new("set up", "lo", up(LOOPBACK))])).await?
}

// === impl Setup ===

impl Setup {
    /// Applies the settings. Returns the previous state of the link.
    pub(crate) async fn apply(self, netns: &Netns, ifname: &str) -> Result<Link, Error> {
        let ifname = ifname.to_owned();
        // The socket is opened before the thread enters the sandbox's namespace, so it belongs to the host's namespace.
        let host_end =
            self.host_end.map(|index| open().map(|socket| HostEnd { socket, index })).transpose()?;
        netns.visit(move || self.assign(&ifname, host_end)).await?
    }

    fn assign(&self, ifname: &str, host_end: Option<HostEnd>) -> Result<Link, Error> {
        let mut socket = open()?;
        let mut request = LinkMessage::default();
        request.attributes.push(LinkAttribute::IfName(ifname.to_owned()));
        let link =
            match socket.get(RouteNetlinkMessage::GetLink(request)).map_err(failed("look up", ifname))? {
                RouteNetlinkMessage::NewLink(link) => Link::of(&link),
                _ => return Err(failed("look up", ifname)(io::Error::from(io::ErrorKind::InvalidData))),
            };
        let mut steps = self.preparation(&link);
        if let Some(mut host) = host_end {
            send_all(&mut socket, std::mem::take(&mut steps))?;
            let step = Step::new("set up the other end of", ifname, up(host.index));
            send_all(&mut host.socket, vec![step])?;
        }
        steps.extend(self.activation(&link));
        send_all(&mut socket, steps)?;
        Ok(link)
    }

    /// The steps before the interface is up.
    fn preparation(&self, link: &Link) -> Vec<Step> {
        let addresses = self.addresses.iter().map(|address| {
            let message = RouteNetlinkMessage::NewAddress(address_message(link, *address, self.detect));
            let request = Request::new(message, NLM_F_CREATE | NLM_F_REPLACE);
            Step::new("add address", &address.to_string(), request)
        });
        let no_link_local = self.no_link_local.then(|| {
            let step = Step::new("disable the link-local address of", &link.name, no_link_local(link.index));
            // A kernel without IPv6 assigns no link-local address.
            step.ignoring(libc::EAFNOSUPPORT)
        });
        addresses.chain(no_link_local).collect()
    }

    /// The steps that set the interface up, and the steps that need an interface that is up.
    fn activation(&self, link: &Link) -> Vec<Step> {
        let routes = self.routes.iter().map(|route| {
            let message = RouteNetlinkMessage::NewRoute(route_message(link, route));
            let what = match route.gw {
                Some(gateway) => format!("{} via {gateway}", route.dst),
                None => route.dst.to_string(),
            };
            let request = Request::new(message, NLM_F_CREATE | NLM_F_EXCL);
            Step::new("add the route", &what, request).ignoring(libc::EEXIST)
        });
        let up = self.up.then(|| Step::new("set up", &link.name, up(link.index)));
        up.into_iter().chain(routes).collect()
    }
}

// === impl Step ===

impl Step {
    fn new(action: &'static str, what: &str, request: Request) -> Self {
        let description = Description { action, what: what.to_owned(), ignored: None };
        Self { request, description }
    }

    /// Lets this error number count as success.
    fn ignoring(mut self, errno: i32) -> Self {
        self.description.ignored = Some(errno);
        self
    }
}

fn open() -> Result<RouteSocket, Error> {
    RouteSocket::open().map_err(|source| Error::Socket { action: "open a route socket", source })
}

fn up(index: u32) -> Request {
    Request::new(RouteNetlinkMessage::SetLink(LinkUnspec::new_with_index(index).up().build()), 0)
}

fn no_link_local(index: u32) -> Request {
    let mut message = LinkUnspec::new_with_index(index).build();
    let none = vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)];
    message.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(none)]));
    Request::new(RouteNetlinkMessage::SetLink(message), 0)
}

/// Sends all changes. Returns the first error.
fn send_all(socket: &mut RouteSocket, steps: Vec<Step>) -> Result<(), Error> {
    let (descriptions, requests): (Vec<Description>, Vec<Request>) =
        steps.into_iter().map(|step| (step.description, step.request)).unzip();
    let refused =
        socket.batch(requests).map_err(|source| Error::Socket { action: "set up an interface", source })?;
    for RefusedRequest { index, error } in refused {
        match descriptions.get(index) {
            Some(step) if step.ignored.is_some() && step.ignored == error.raw_os_error() => {}
            Some(step) => return Err(failed(step.action, &step.what)(error)),
            None => return Err(Error::Socket { action: "set up an interface", source: error }),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use coracle_testing::{eventually, in_new_namespace, ip, skip};

    use super::*;

    fn has_ipv6(interface: &str) -> bool {
        let listed = std::fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap_or_default();
        listed.lines().any(|line| line.ends_with(&format!(" {interface}")))
    }

    fn find(name: &str) -> Link {
        let mut request = LinkMessage::default();
        request.attributes.push(LinkAttribute::IfName(name.to_owned()));
        match open().unwrap().get(RouteNetlinkMessage::GetLink(request)).unwrap() {
            RouteNetlinkMessage::NewLink(link) => Link::of(&link),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_end_on_the_host_is_set_up_even_if_the_interface_stays_down() {
        in_new_namespace(|| {
            ip("link add host0 type veth peer name eth0");
            let host_end = || Some(HostEnd { socket: open().unwrap(), index: find("host0").index });
            let are_up = || ["host0", "eth0"].map(|name| find(name).up);
            assert_eq!(are_up(), [false, false]);
            Setup::default().assign("eth0", host_end()).unwrap();
            assert_eq!(are_up(), [true, false]);
            ip("link set host0 down");
            Setup { up: true, ..Setup::default() }.assign("eth0", host_end()).unwrap();
            assert_eq!(are_up(), [true, true]);
        });
    }

    #[test]
    fn an_interface_without_a_link_local_address_comes_up_without_ipv6_addresses() {
        if !std::path::Path::new("/proc/net/if_inet6").exists() {
            skip!("the kernel has no IPv6");
        }
        in_new_namespace(|| {
            ip("link add eth0 type veth peer name eth1");
            let addresses = vec!["10.99.0.2/24".parse().unwrap()];
            let setup = Setup { addresses, up: true, no_link_local: true, ..Setup::default() };
            setup.clone().assign("eth0", None).unwrap();
            // Both ends get their carrier at the same time.
            Setup { no_link_local: false, addresses: Vec::new(), ..setup }.assign("eth1", None).unwrap();
            eventually("the other end has a link-local address", 20, || has_ipv6("eth1"));
            assert!(!has_ipv6("eth0"));
        });
    }
}

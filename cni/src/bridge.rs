//! The plugin `bridge`: a bridge of the host, and a veth pair from the bridge into each sandbox.
//!
//! Order of ADD: configuration, addresses, then the kernel. A failed ADD is undone at once. If the failed ADD made the
//! bridge, the bridge is removed, unless another attachment uses it.

mod config;

use std::net::IpAddr;

use ipnetwork::IpNetwork;

use crate::announce::announce;
use crate::error::Error;
use crate::firewall::Claim;
use crate::host::Host;
use crate::ipam;
use crate::link::derived::{hardware_address, host_interface};
use crate::link::inside::Setup;
use crate::link::port::Port;
use crate::link::vlan::{self, Vlans};
use crate::link::{self, Link, Links, Pair, format_mac, parse_mac};
use crate::netns::Netns;
use crate::plugin_executables::Executables;
use crate::source_guard::Source;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::{Answer, Interface, Route};
use crate::sysctl;
use config::Conf;

/// Runs the request. ADD returns the interfaces, addresses and routes that were made.
pub(crate) async fn run(
    host: &Host,
    executables: &Executables,
    request: &Request,
) -> Result<Option<Answer>, Error> {
    let bridge = Bridge { host, executables, request, conf: Conf::of(request)? };
    match request.command {
        Command::Add => return bridge.add().await.map(Some),
        Command::Del => bridge.del().await?,
        Command::Check => bridge.check().await?,
        Command::Status => {
            if let Some(link) = host.links.find(&bridge.conf.bridge).await? {
                link.must_be_bridge()?;
                if bridge.conf.ours {
                    link.require_own_mark()?;
                }
            }
            bridge.run_ipam_without_attachment().await?;
        }
        Command::Gc => {
            let collected = bridge.run_ipam_without_attachment().await;
            // The GC of firewall claims runs even if the GC of the IPAM plugin fails.
            host.firewall.keep_valid(request).and(collected)?;
        }
        Command::Version => {}
    }
    Ok(None)
}

/// The firewall claim of a completed attachment.
pub(crate) fn claim(request: &Request) -> Result<Option<Claim>, Error> {
    Ok(Conf::of(request)?.claim(request, &request.chained()?))
}

/// The port of an attachment to the default network, with its permitted source.
pub(crate) fn source(request: &Request) -> Result<Option<(String, Source)>, Error> {
    if !Conf::of(request)?.ours {
        return Ok(None);
    }
    let answer = request.chained()?;
    let inside = answer.interfaces.iter().find(|i| !i.sandbox.is_empty() && i.name == request.ifname);
    let Some(mac) = inside.and_then(|inside| parse_mac(&inside.mac)) else { return Ok(None) };
    let addresses = answer.addresses_of(&request.ifname).map(|ip| ip.address.ip()).collect();
    let port = host_interface(&request.container_id, &request.ifname);
    Ok(Some((port, Source { mac, addresses })))
}

struct Bridge<'a> {
    host: &'a Host,
    executables: &'a Executables,
    request: &'a Request,
    conf: Conf,
}

// === impl Bridge ===

impl Bridge<'_> {
    async fn add(&self) -> Result<Answer, Error> {
        let netns = Netns::open(self.request.netns()?)?;
        let mut answer = match self.run_ipam().await {
            Ok(answer) => answer.unwrap_or_default(),
            // Our own IPAM plugin leaves nothing after a failure. An executable may leave addresses.
            Err(error) if self.conf.ipam.as_ref().is_none_or(|kind| self.is_in_process(kind)) => {
                return Err(error);
            }
            Err(error) => return self.fail(error, self.run_ipam_with(&self.undoing()).await.map(drop)),
        };
        if self.conf.ipam.is_some() && answer.ips.is_empty() {
            let error = Error::invalid("ipam", "the plugin returned no address");
            return self.fail(error, self.run_ipam_with(&self.undoing()).await.map(drop));
        }
        coracle_fault::point("bridge.given");
        answer.interfaces.clear();
        match self.attach_to_bridge(&netns, &mut answer).await {
            Ok(()) => Ok(answer),
            Err(error) => self.fail(error, self.undo().await),
        }
    }

    /// Returns the error, and logs a failed undo. The DEL that follows a failed ADD repeats the undo.
    fn fail<T>(&self, error: Error, undone: Result<(), Error>) -> Result<T, Error> {
        if let Err(undo) = undone {
            let id = &self.request.container_id;
            tracing::warn!(id, error = undo.chain(), "cannot undo a failed attachment, its DEL tries again");
        }
        Err(error)
    }

    async fn attach_to_bridge(&self, netns: &Netns, answer: &mut Answer) -> Result<(), Error> {
        let (conf, links) = (&self.conf, &self.host.links);
        self.complete(answer);
        let wanted = link::Bridge {
            mtu: conf.mtu,
            promiscuous: conf.promiscuous,
            vlan_filtering: conf.vlans.any(),
            ours: conf.ours,
        };
        let (bridge, is_new) = links.ensure_bridge(&conf.bridge, wanted).await?;
        let made = self.connect(netns, &bridge, answer).await;
        if made.is_err() && is_new {
            links.delete_unshared_bridge(&bridge, &self.own_ports()).await?;
        }
        made
    }

    /// Names of the ports that this attachment makes: its own and that of the VLAN's gateway.
    fn own_ports(&self) -> Vec<String> {
        let (conf, request) = (&self.conf, self.request);
        let gateway = conf.vlans.native.map(|vlan| host_interface(&conf.bridge, &conf.gateway_of(vlan)));
        let own = host_interface(&request.container_id, &request.ifname);
        gateway.into_iter().chain([own]).collect()
    }

    /// Adds gateways and default routes that the IPAM plugin did not return.
    fn complete(&self, answer: &mut Answer) {
        let conf = &self.conf;
        for ip in &mut answer.ips {
            ip.interface = Some(2);
            if ip.gateway.is_none() && conf.is_gateway {
                ip.gateway = first_of(ip.address);
            }
            let Some(gateway) = ip.gateway.filter(|_| conf.is_default_gateway) else { continue };
            let default = Route::default_by(gateway);
            if !answer.routes.iter().any(|route| route.dst == default.dst && route.gw.is_some()) {
                answer.routes.push(default);
            }
        }
        if conf.dns != crate::spec::result::Dns::default() {
            answer.dns = conf.dns.clone();
        }
    }

    /// Connects the sandbox to the bridge, and completes the answer with the interfaces.
    async fn connect(&self, netns: &Netns, bridge: &Link, answer: &mut Answer) -> Result<(), Error> {
        self.must_filter(bridge)?;
        let mut host_end = self.attach_pair(netns, bridge, answer).await?;
        let inside = self.configure(netns, &host_end, answer).await?;
        coracle_fault::point("bridge.configured");
        if let Some(guard) = self.host.guard.as_ref().filter(|_| self.conf.ours)
            && let Ok(mac) = <[u8; 6]>::try_from(&inside.mac[..])
        {
            let addresses = answer.ips.iter().map(|ip| ip.address.ip()).collect();
            guard.put(&host_end.name, Source { mac, addresses })?;
        }
        // Both ends have the same MTU.
        host_end.mtu = inside.mtu;
        let gateway = self.set_up_gateway(bridge, answer).await?;
        if let Some(claim) = self.conf.claim(self.request, answer) {
            self.host.firewall.put(&claim)?;
        }
        coracle_fault::point("bridge.wired");
        let sandbox = self.request.netns()?.to_string_lossy().into_owned();
        let of_sandbox = Interface { sandbox, ..listed(&inside) };
        answer.interfaces = vec![listed(bridge), listed(&host_end), of_sandbox];
        answer.interfaces.extend(gateway.as_ref().map(listed));
        self.announce(&host_end, &inside, answer).await
    }

    /// Makes the veth pair between bridge and sandbox, and sets up its port of the bridge.
    async fn attach_pair(&self, netns: &Netns, bridge: &Link, answer: &Answer) -> Result<Link, Error> {
        let (conf, links, request) = (&self.conf, &self.host.links, self.request);
        let host_name = host_interface(&request.container_id, &request.ifname);
        let mac = conf.hardware_address(&bridge.mac, answer)?;
        let pair = Pair {
            host: &host_name,
            inside: &request.ifname,
            bridge: bridge.index,
            mtu: conf.mtu,
            mac,
            // The port gets the address of our own bridge. A bridge of another owner can change its address when ports
            // are added or removed, so its ports get random addresses.
            host_mac: <[u8; 6]>::try_from(&bridge.mac[..]).ok().filter(|_| conf.ours),
            is_up: false,
        };
        let host_end = links.add_pair(&pair, netns).await?;
        coracle_fault::point("bridge.paired");
        // The VLANs are set before the interface inside is up, so that no packet enters the wrong VLAN.
        if conf.vlans.any() {
            links.set_vlans(bridge, &host_end, &conf.vlans).await?;
        }
        // If sources are checked, a pod has only one hardware address, which the bridge knows. So the bridge need not
        // flood frames for unknown addresses to the pod's port.
        let is_checked = conf.ours && self.host.guard.is_some();
        if conf.hairpin || conf.port_isolation || conf.mac_spoof_check || is_checked {
            let port = Port {
                hairpin: conf.hairpin,
                isolated: conf.port_isolation,
                locked: conf.mac_spoof_check,
                floods: is_checked.then_some(false),
            };
            links.set_port(&host_end, port).await?;
            coracle_fault::point("bridge.port-set");
        }
        if conf.mac_spoof_check || is_checked {
            links.add_forwarding(&host_end, mac).await?;
        }
        Ok(host_end)
    }

    /// Sets the gateway addresses of the bridge, or of the host's interface in the attachment's VLAN. Returns the
    /// interface of the VLAN.
    async fn set_up_gateway(&self, bridge: &Link, answer: &Answer) -> Result<Option<Link>, Error> {
        if !self.conf.is_gateway {
            return Ok(None);
        }
        let gateway = match self.conf.vlans.native {
            Some(vlan) => Some(self.ensure_gateway(bridge, vlan).await?),
            None => None,
        };
        self.set_gateway_addresses(gateway.as_ref().unwrap_or(bridge), answer).await?;
        coracle_fault::point("bridge.routed");
        Ok(gateway)
    }

    /// Announces each address from which the hardware address is not derived, because neighbours may have cached an
    /// earlier hardware address for it. An executable waits for the end of the announcement.
    async fn announce(&self, host_end: &Link, inside: &Link, answer: &Answer) -> Result<(), Error> {
        let addresses = answer.ips.iter().map(|ip| ip.address.ip());
        let announced: Vec<_> =
            addresses.filter(|address| hardware_address(*address)[..] != inside.mac[..]).collect();
        if !announced.is_empty() && !self.conf.disable_container_interface {
            self.host.links.wait_until_forwarding(&host_end.name).await?;
        }
        let announcing = announce(Netns::open(self.request.netns()?)?, inside, &announced);
        if let Some(announcing) = announcing.filter(|_| !self.host.in_process()) {
            drop(announcing.join());
        }
        Ok(())
    }

    /// Sets addresses and routes of the interface inside the sandbox, and sets both ends up.
    async fn configure(&self, netns: &Netns, host_end: &Link, answer: &Answer) -> Result<Link, Error> {
        let ifname = &self.request.ifname;
        let host_end = Some(host_end.index);
        if self.conf.disable_container_interface {
            return Setup { host_end, ..Setup::default() }.apply(netns, ifname).await;
        }
        let routes = answer.routes.iter().map(|route| {
            let same_family = |ip: &&crate::spec::result::Ip| ip.address.is_ipv4() == route.dst.is_ipv4();
            let default = answer.ips.iter().filter(same_family).find_map(|ip| ip.gateway);
            Route { gw: route.gw.or(default), ..route.clone() }
        });
        let routes: Vec<Route> = routes.collect();
        let addresses: Vec<IpNetwork> = answer.ips.iter().map(|ip| ip.address).collect();
        // Other networks keep the link-local address: programs in their pods may use it.
        let no_link_local = self.conf.ours && is_ipv4_alone(&addresses);
        if !self.conf.enable_dad {
            let setup = Setup { addresses, detect: false, no_link_local, host_end, up: true, routes };
            return setup.apply(netns, ifname).await;
        }
        let v6: Vec<IpNetwork> = addresses.iter().copied().filter(IpNetwork::is_ipv6).collect();
        let inside = Setup { addresses, detect: true, no_link_local, host_end, up: true, routes: Vec::new() };
        let inside = inside.apply(netns, ifname).await?;
        Links::inside(netns)?.wait_for_duplicate_detection(netns, &inside, &v6).await?;
        Setup { routes, ..Setup::default() }.apply(netns, ifname).await?;
        Ok(inside)
    }

    /// Refuses a bridge without VLAN filtering if VLANs are requested. An existing bridge is not changed: it may have
    /// other users.
    fn must_filter(&self, bridge: &Link) -> Result<(), Error> {
        match bridge.vlan_filtering {
            None if self.conf.vlans.any() => Err(vlan::unsupported()),
            Some(false) if self.conf.vlans.any() => {
                let reason = format!(
                    "{} exists and does not filter VLANs; enable vlan_filtering on it or name another bridge",
                    self.conf.bridge
                );
                Err(Error::invalid("vlan", reason))
            }
            _ => Ok(()),
        }
    }

    /// Finds or makes the host's interface in a VLAN of the bridge. The reference plugin makes the same veth pair, so
    /// each plugin can use a pair of the other plugin. Like the bridge, the pair is not removed with the last
    /// attachment.
    async fn ensure_gateway(&self, bridge: &Link, vlan: u16) -> Result<Link, Error> {
        let (links, name) = (&self.host.links, self.conf.gateway_of(vlan));
        let gateway = match links.find(&name).await? {
            Some(gateway) => gateway,
            None => {
                let port = host_interface(&self.conf.bridge, &name);
                let (mac, host_mac) = (link::random_mac(), None);
                let (mtu, inside) = (Some(bridge.mtu), name.as_str());
                let pair =
                    Pair { host: &port, inside, bridge: bridge.index, mtu, mac, host_mac, is_up: true };
                links.add_pair(&pair, &Netns::open("/proc/thread-self/ns/net".as_ref())?).await?;
                links.get(&name).await?
            }
        };
        // The process that made the pair may have ended before it connected the pair to the bridge.
        let port = match gateway.peer {
            Some(index) => links.find_index(index).await?,
            None => None,
        };
        let port = port.filter(|port| port.controller == Some(bridge.index));
        let port = port.ok_or_else(|| {
            Error::invalid("vlan", format!("{name} exists and is not connected to {}", bridge.name))
        })?;
        let vlans = Vlans { native: Some(vlan), trunk: Vec::new(), ..self.conf.vlans };
        links.set_vlans(bridge, &port, &vlans).await?;
        sysctl::no_router_advertisements(&gateway.name)?;
        links.up(&gateway).await?;
        Ok(gateway)
    }

    /// Sets the gateway addresses of the bridge or VLAN interface, and enables forwarding.
    async fn set_gateway_addresses(&self, bridge: &Link, answer: &Answer) -> Result<(), Error> {
        let gateways =
            answer.ips.iter().filter_map(|ip| IpNetwork::new(ip.gateway?, ip.address.prefix()).ok());
        let gateways: Vec<IpNetwork> = gateways.collect();
        let mut present = self.host.links.addresses(bridge).await?;
        for gateway in &gateways {
            if present.iter().any(|p| p.network == *gateway) {
                continue;
            }
            let overlaps = |other: &IpNetwork| {
                other.is_ipv4() == gateway.is_ipv4()
                    && (gateway.is_ipv4() || other.contains(gateway.ip()) || gateway.contains(other.ip()))
                    && !gateways.contains(other)
            };
            while let Some(at) = present.iter().position(|p| overlaps(&p.network)) {
                if !self.conf.force_address {
                    let reason =
                        format!("has the address {}, not {gateway}; use forceAddress", present[at].network);
                    return Err(Error::invalid("bridge", format!("{} {reason}", bridge.name)));
                }
                self.host.links.remove_address(present.swap_remove(at)).await?;
            }
            self.host.links.add_address(bridge, *gateway, false).await?;
        }
        sysctl::forwarding(&gateways)
    }

    /// The DEL request of the same attachment.
    fn undoing(&self) -> Request {
        let mut request = Request { command: Command::Del, ..self.request.clone() };
        request.conf.remove("prevResult");
        request
    }

    async fn undo(&self) -> Result<(), Error> {
        let request = self.undoing();
        let links = &self.host.links;
        let port = host_interface(&request.container_id, &request.ifname);
        let link = links.delete(&port).await.and(self.remove_guard(&port));
        let claim = self.host.firewall.remove(&Claim::of(&request));
        let ipam = self.run_ipam_with(&request).await;
        link.and(claim).and(ipam.map(drop))
    }

    /// Removes the permitted addresses of a port that no longer exists from the source filter.
    fn remove_guard(&self, port: &str) -> Result<(), Error> {
        self.host.guard.as_ref().map_or(Ok(()), |guard| guard.remove(port))
    }

    async fn del(&self) -> Result<(), Error> {
        let (request, links) = (self.request, &self.host.links);
        let ours = host_interface(&request.container_id, &request.ifname);
        let previous = request.previous()?;
        let known = previous.is_some_and(|answer| answer.interfaces.iter().any(|i| i.name == ours));
        links.delete(&ours).await?;
        coracle_fault::point("bridge.unplugged");
        self.remove_guard(&ours)?;
        // A pair made by another implementation has another name on the host, but the same name inside the sandbox.
        if !known && let Some(netns) = request.netns.as_deref().and_then(|path| Netns::open(path).ok()) {
            Links::inside(&netns)?.delete(&request.ifname).await?;
        }
        self.host.firewall.remove(&Claim::of(request))?;
        coracle_fault::point("bridge.unclaimed");
        self.run_ipam().await?;
        Ok(())
    }

    async fn check(&self) -> Result<(), Error> {
        let (request, links) = (self.request, &self.host.links);
        let previous = request.chained()?;
        self.run_ipam().await?;
        let changed =
            |what: &str, reason: &str| Error::Changed { what: what.to_owned(), reason: reason.to_owned() };
        let gone = "it is gone";
        let name = &self.conf.bridge;
        let bridge = links.find(name).await?.ok_or_else(|| changed(name, gone))?;
        bridge.must_be_bridge()?;
        let host_end = previous.interfaces.iter().find(|i| i.sandbox.is_empty() && i.name != *name);
        if let Some(Interface { name, .. }) = host_end {
            let link = links.find(name).await?.ok_or_else(|| changed(name, gone))?;
            if link.controller != Some(bridge.index) {
                return Err(changed(name, "it is not a port of the bridge"));
            }
            if self.conf.vlans.any() && !self.conf.vlans.match_exactly(&links.vlans(&link).await?) {
                return Err(changed(name, "it is in other VLANs"));
            }
        }
        self.must_filter(&bridge)?;
        if let Some(gateway) = previous.routed_by().filter(|_| self.conf.is_gateway) {
            links.find(&gateway.name).await?.ok_or_else(|| changed(&gateway.name, gone))?;
        }
        let inside = Links::inside(&Netns::open(request.netns()?)?)?;
        inside.check(&request.ifname, &previous, !self.conf.disable_container_interface).await?;
        match self.conf.claim(request, &previous) {
            Some(claim) if !self.host.firewall.is_applied(&claim)? => Err(changed("the masquerading", gone)),
            _ => Ok(()),
        }
    }

    /// Runs the IPAM plugin with the same request.
    async fn run_ipam(&self) -> Result<Option<Answer>, Error> {
        self.run_ipam_with(self.request).await
    }

    /// Runs the IPAM plugin with STATUS or GC. Executables know these commands since version 1.1.0.
    async fn run_ipam_without_attachment(&self) -> Result<(), Error> {
        let own = self.conf.ipam.as_ref().is_some_and(|kind| self.is_in_process(kind));
        match self.request.version()?.has_status_and_gc() || own {
            true => self.run_ipam().await.map(drop),
            false => Ok(()),
        }
    }

    fn is_in_process(&self, kind: &str) -> bool {
        ipam::is_in_process(self.host, self.executables, kind)
    }

    async fn run_ipam_with(&self, request: &Request) -> Result<Option<Answer>, Error> {
        match &self.conf.ipam {
            Some(kind) => ipam::run(self.host, self.executables, kind, request).await,
            None => Ok(None),
        }
    }
}

/// An interface of the host in the answer.
fn listed(link: &Link) -> Interface {
    Interface {
        name: link.name.clone(),
        mac: format_mac(&link.mac),
        mtu: Some(link.mtu).filter(|mtu| *mtu != 0),
        ..Interface::default()
    }
}

/// Whether the interface has addresses, all of them IPv4.
fn is_ipv4_alone(addresses: &[IpNetwork]) -> bool {
    !addresses.is_empty() && addresses.iter().all(IpNetwork::is_ipv4)
}

/// The first address of a network that a host can have.
fn first_of(network: IpNetwork) -> Option<IpAddr> {
    match network.network() {
        IpAddr::V4(v4) => v4.to_bits().checked_add(1).map(|bits| std::net::Ipv4Addr::from_bits(bits).into()),
        IpAddr::V6(v6) => v6.to_bits().checked_add(1).map(|bits| std::net::Ipv6Addr::from_bits(bits).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_interface_whose_addresses_are_all_ipv4_needs_no_link_local_address() {
        let alone = |texts: &[&str]| {
            is_ipv4_alone(&texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>())
        };
        assert!(alone(&["10.42.0.2/24", "10.43.0.2/24"]));
        assert!(!alone(&["10.42.0.2/24", "fd42::2/64"]) && !alone(&["fd42::2/64"]) && !alone(&[]));
    }
}

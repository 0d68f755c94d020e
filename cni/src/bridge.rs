//! A bridge of the host, and a veth pair from it into each sandbox (`bridge`).
//!
//! Order of ADD: configuration, addresses, then the kernel. What a failure leaves half-made is undone at
//! once, and a bridge made for nobody goes again.

mod config;

use std::net::IpAddr;

use ipnetwork::IpNetwork;

use crate::announce::announce;
use crate::error::Error;
use crate::firewall::Claim;
use crate::host::Host;
use crate::invoke::{self, Executables};
use crate::link::inside::Setup;
use crate::link::vlan::{self, Vlans};
use crate::link::{self, Link, Links, Pair, Port, format_mac};
use crate::netns::Netns;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::{Answer, Interface, Route};
use crate::sysctl;
use config::Conf;

/// Does what the request asks; for ADD, the interfaces, addresses and routes that were made.
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
                    link.must_be_ours()?;
                }
            }
            bridge.ask_ipam_in_general().await?;
        }
        Command::Gc => {
            let asked = bridge.ask_ipam_in_general().await;
            // Whatever the addresses' plugin can do.
            host.firewall.keep_valid(request).and(asked)?;
        }
        Command::Version => {}
    }
    Ok(None)
}

/// What an attachment that was made wants of the firewall.
pub(crate) fn claim(request: &Request) -> Result<Option<Claim>, Error> {
    Ok(Conf::of(request)?.claim(request, &request.chained()?))
}

/// The host's end of an attachment's pair: `veth` and eleven letters that follow from whose it is, within the
/// kernel's 15 bytes.
pub(crate) fn host_interface(id: &str, ifname: &str) -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let hash = hash(id.bytes().chain([b'/']).chain(ifname.bytes()));
    let letters = (0..11).map(|place| char::from(LETTERS[(hash >> (place * 5) & 31) as usize]));
    format!("veth{}", letters.collect::<String>())
}

/// FNV-1a, 64 bits.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// How hardware addresses begin that follow from addresses.
pub(crate) const DERIVED: [u8; 2] = [0x0a, 0x58];

/// A locally administered hardware address that follows from the IP address, so that a neighbour's
/// cached entry stays true when an address is given again. Of IPv6 from all of it: ranges of one bridge may differ in
/// their prefixes alone.
pub(crate) fn hardware_address(address: IpAddr) -> [u8; 6] {
    let tail = match address {
        IpAddr::V4(ip) => ip.octets(),
        IpAddr::V6(ip) => {
            let [a, b, c, d, e, f, g, h] = hash(ip.octets().into_iter()).to_be_bytes();
            [a ^ e, b ^ f, c ^ g, d ^ h]
        }
    };
    let [a, b] = DERIVED;
    [a, b, tail[0], tail[1], tail[2], tail[3]]
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
        let mut answer = match self.ask_ipam().await {
            Ok(answer) => answer.unwrap_or_default(),
            // Ours leaves nothing. Another one may have come half the way.
            Err(error) if self.conf.ipam.as_ref().is_none_or(|kind| self.is_own(kind)) => return Err(error),
            Err(error) => return self.fail(error, self.ask(&self.undoing()).await.map(drop)),
        };
        if self.conf.ipam.is_some() && answer.ips.is_empty() {
            let error = Error::invalid("ipam", "its plugin gave no address");
            return self.fail(error, self.ask(&self.undoing()).await.map(drop));
        }
        coracle_fault::point("bridge.given");
        answer.interfaces.clear();
        match self.wire(&netns, &mut answer).await {
            Ok(()) => Ok(answer),
            Err(error) => self.fail(error, self.undo().await),
        }
    }

    /// The error, after what was half-made is undone. What cannot be undone now is by the DEL that follows a failed ADD.
    fn fail<T>(&self, error: Error, undone: Result<(), Error>) -> Result<T, Error> {
        if let Err(undo) = undone {
            let id = &self.request.container_id;
            tracing::warn!(id, error = undo.chain(), "a half-made attachment is left to its DEL");
        }
        Err(error)
    }

    async fn wire(&self, netns: &Netns, answer: &mut Answer) -> Result<(), Error> {
        let (conf, links) = (&self.conf, &self.host.links);
        self.complete(answer);
        let wanted = link::Bridge {
            mtu: conf.mtu,
            promiscuous: conf.promiscuous,
            vlan_filtering: conf.vlans.any(),
            ours: conf.ours,
        };
        let (bridge, is_new) = links.ensure_bridge(&conf.bridge, wanted).await?;
        let made = self.plug(netns, &bridge, answer).await;
        if made.is_err() && is_new {
            if let Some(vlan) = conf.vlans.native {
                links.delete(&conf.gateway_of(vlan)).await?;
            }
            links.delete_bridge(&conf.bridge).await?;
        }
        made
    }

    /// Gateways and default routes that the addresses need and their plugin did not name.
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

    async fn plug(&self, netns: &Netns, bridge: &Link, answer: &mut Answer) -> Result<(), Error> {
        let (conf, links, request) = (&self.conf, &self.host.links, self.request);
        let host_name = host_interface(&request.container_id, &request.ifname);
        let first = answer.ips.first().map(|ip| ip.address.ip());
        let mac = conf.mac.or_else(|| first.map(hardware_address)).unwrap_or_else(link::random_mac);
        let pair =
            Pair { host: &host_name, inside: &request.ifname, bridge: bridge.index, mtu: conf.mtu, mac };
        self.must_filter(bridge)?;
        let host_end = links.add_pair(&pair, netns).await?;
        coracle_fault::point("bridge.paired");
        // Before the interface inside is up, so that no packet comes from the wrong VLAN.
        if conf.vlans.any() {
            links.set_vlans(bridge, &host_end, &conf.vlans).await?;
        }
        if conf.hairpin || conf.port_isolation || conf.mac_spoof_check {
            let port =
                Port { hairpin: conf.hairpin, isolated: conf.port_isolation, locked: conf.mac_spoof_check };
            links.set_port(&host_end, port).await?;
            coracle_fault::point("bridge.port-set");
        }
        if conf.mac_spoof_check {
            links.add_forwarding(&host_end, mac).await?;
        }
        let inside = self.configure(netns, answer).await?;
        coracle_fault::point("bridge.configured");
        let host_end = links.get(&host_name).await?;
        let gateway = match (conf.is_gateway, conf.vlans.native) {
            (true, Some(vlan)) => Some(self.ensure_gateway(bridge, vlan).await?),
            _ => None,
        };
        if conf.is_gateway {
            self.be_gateway(gateway.as_ref().unwrap_or(bridge), answer).await?;
            coracle_fault::point("bridge.routed");
        }
        if let Some(claim) = self.conf.claim(request, answer) {
            self.host.firewall.put(&claim)?;
        }
        coracle_fault::point("bridge.wired");
        let mtu = |link: &Link| Some(link.mtu).filter(|mtu| *mtu != 0);
        let of_host = |link: &Link| Interface {
            name: link.name.clone(),
            mac: format_mac(&link.mac),
            mtu: mtu(link),
            ..Interface::default()
        };
        let sandbox = request.netns()?.to_string_lossy().into_owned();
        let of_sandbox = Interface { sandbox, ..of_host(&inside) };
        answer.interfaces = vec![of_host(bridge), of_host(&host_end), of_sandbox];
        answer.interfaces.extend(gateway.as_ref().map(of_host));
        self.announce(&host_end, &inside, answer).await
    }

    /// Tells the neighbours of the addresses that the hardware address does not follow from: an earlier owner
    /// had another one. An executable must not end before that is done.
    async fn announce(&self, host_end: &Link, inside: &Link, answer: &Answer) -> Result<(), Error> {
        let addresses = answer.ips.iter().map(|ip| ip.address.ip());
        let news: Vec<_> =
            addresses.filter(|address| hardware_address(*address)[..] != inside.mac[..]).collect();
        if !news.is_empty() && !self.conf.disable_container_interface {
            self.host.links.passes_on(&host_end.name).await?;
        }
        let announcing = announce(Netns::open(self.request.netns()?)?, inside, &news);
        if let Some(announcing) = announcing.filter(|_| !self.host.in_process()) {
            drop(announcing.join());
        }
        Ok(())
    }

    /// Inside the sandbox: the interface's addresses, up, and the routes.
    async fn configure(&self, netns: &Netns, answer: &Answer) -> Result<Link, Error> {
        let ifname = &self.request.ifname;
        if self.conf.disable_container_interface {
            return Setup::default().apply(netns, ifname).await;
        }
        let routes = answer.routes.iter().map(|route| {
            let same_family = |ip: &&crate::spec::result::Ip| ip.address.is_ipv4() == route.dst.is_ipv4();
            let default = answer.ips.iter().filter(same_family).find_map(|ip| ip.gateway);
            Route { gw: route.gw.or(default), ..route.clone() }
        });
        let routes: Vec<Route> = routes.collect();
        let addresses: Vec<IpNetwork> = answer.ips.iter().map(|ip| ip.address).collect();
        if !self.conf.enable_dad {
            return Setup { addresses, detect: false, up: true, routes }.apply(netns, ifname).await;
        }
        let v6: Vec<IpNetwork> = addresses.iter().copied().filter(IpNetwork::is_ipv6).collect();
        let inside = Setup { addresses, detect: true, up: true, routes: Vec::new() };
        let inside = inside.apply(netns, ifname).await?;
        Links::inside(netns)?.settle(netns, &inside, &v6).await?;
        Setup { routes, ..Setup::default() }.apply(netns, ifname).await?;
        Ok(inside)
    }

    /// Refuses a bridge that would mix the VLANs that were asked for. One that somebody uses as it is stays so.
    fn must_filter(&self, bridge: &Link) -> Result<(), Error> {
        match bridge.vlan_filtering {
            None if self.conf.vlans.any() => Err(vlan::unsupported()),
            Some(false) if self.conf.vlans.any() => {
                let reason = format!("{} is there already and does not filter VLANs", self.conf.bridge);
                Err(Error::invalid("vlan", reason))
            }
            _ => Ok(()),
        }
    }

    /// The host's own interface in a VLAN of the bridge, made or found: a pair, as the reference makes it, so that
    /// each takes over what the other made. It stays, as the bridge does.
    async fn ensure_gateway(&self, bridge: &Link, vlan: u16) -> Result<Link, Error> {
        let (links, name) = (&self.host.links, self.conf.gateway_of(vlan));
        let gateway = match links.find(&name).await? {
            Some(gateway) => gateway,
            None => {
                let port = host_interface(&self.conf.bridge, &name);
                let mac = link::random_mac();
                let (mtu, inside) = (Some(bridge.mtu), name.as_str());
                let pair = Pair { host: &port, inside, bridge: bridge.index, mtu, mac };
                links.add_pair(&pair, &Netns::open("/proc/thread-self/ns/net".as_ref())?).await?;
                links.get(&name).await?
            }
        };
        // Whoever made it may have ended before it was a member.
        let port = match gateway.peer {
            Some(index) => links.find_index(index).await?,
            None => None,
        };
        let port = port.filter(|port| port.controller == Some(bridge.index));
        let port = port.ok_or_else(|| {
            Error::invalid("vlan", format!("{name} is there already and does not lead to {}", bridge.name))
        })?;
        let vlans = Vlans { native: Some(vlan), trunk: Vec::new(), ..self.conf.vlans };
        links.set_vlans(bridge, &port, &vlans).await?;
        sysctl::no_router_advertisements(&gateway.name)?;
        links.up(&gateway).await?;
        Ok(gateway)
    }

    /// The addresses of bridge or VLAN, and the way from it to the world.
    async fn be_gateway(&self, bridge: &Link, answer: &Answer) -> Result<(), Error> {
        let gateways =
            answer.ips.iter().filter_map(|ip| IpNetwork::new(ip.gateway?, ip.address.prefix()).ok());
        let gateways: Vec<IpNetwork> = gateways.collect();
        let mut present = self.host.links.addresses(bridge).await?;
        for gateway in &gateways {
            if present.iter().any(|p| p.network == *gateway) {
                continue;
            }
            let clashes = |other: &IpNetwork| {
                other.is_ipv4() == gateway.is_ipv4()
                    && (gateway.is_ipv4() || other.contains(gateway.ip()) || gateway.contains(other.ip()))
                    && !gateways.contains(other)
            };
            while let Some(at) = present.iter().position(|p| clashes(&p.network)) {
                if !self.conf.force_address {
                    let reason = format!("has the address {}, not {gateway}", present[at].network);
                    return Err(Error::invalid("bridge", format!("{} {reason}", bridge.name)));
                }
                self.host.links.remove_address(present.swap_remove(at)).await?;
            }
            self.host.links.add_address(bridge, *gateway, false).await?;
        }
        sysctl::forwarding(&gateways)
    }

    /// The DEL of the same attachment.
    fn undoing(&self) -> Request {
        let mut request = Request { command: Command::Del, ..self.request.clone() };
        request.conf.remove("prevResult");
        request
    }

    async fn undo(&self) -> Result<(), Error> {
        let request = self.undoing();
        let links = &self.host.links;
        let link = links.delete(&host_interface(&request.container_id, &request.ifname)).await;
        let claim = self.host.firewall.remove(&Claim::of(&request));
        let ipam = self.ask(&request).await;
        link.and(claim).and(ipam.map(drop))
    }

    async fn del(&self) -> Result<(), Error> {
        let (request, links) = (self.request, &self.host.links);
        let ours = host_interface(&request.container_id, &request.ifname);
        let previous = request.previous()?;
        let known = previous.is_some_and(|answer| answer.interfaces.iter().any(|i| i.name == ours));
        links.delete(&ours).await?;
        coracle_fault::point("bridge.unplugged");
        // A pair that another implementation made has another name outside, but not inside.
        if !known && let Some(netns) = request.netns.as_deref().and_then(|path| Netns::open(path).ok()) {
            Links::inside(&netns)?.delete(&request.ifname).await?;
        }
        self.host.firewall.remove(&Claim::of(request))?;
        coracle_fault::point("bridge.unclaimed");
        self.ask_ipam().await?;
        Ok(())
    }

    async fn check(&self) -> Result<(), Error> {
        let (request, links) = (self.request, &self.host.links);
        let previous = request.chained()?;
        self.ask_ipam().await?;
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
                return Err(changed(name, "it is no port of the bridge"));
            }
            if self.conf.vlans.any() && !self.conf.vlans.are(&links.vlans(&link).await?) {
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
            Some(claim) if !self.host.firewall.holds(&claim)? => Err(changed("the masquerading", gone)),
            _ => Ok(()),
        }
    }

    /// Runs the plugin that gives addresses, with the same request.
    async fn ask_ipam(&self) -> Result<Option<Answer>, Error> {
        self.ask(self.request).await
    }

    /// The same for what is of no attachment: plugins of others know nothing of it before 1.1.0.
    async fn ask_ipam_in_general(&self) -> Result<(), Error> {
        let own = self.conf.ipam.as_ref().is_some_and(|kind| self.is_own(kind));
        match self.request.version()?.has_status_and_gc() || own {
            true => self.ask_ipam().await.map(drop),
            false => Ok(()),
        }
    }

    fn is_own(&self, kind: &str) -> bool {
        invoke::is_own_here(self.host, self.executables, kind)
    }

    async fn ask(&self, request: &Request) -> Result<Option<Answer>, Error> {
        match &self.conf.ipam {
            Some(kind) => invoke::run(self.host, self.executables, kind, request).await,
            None => Ok(None),
        }
    }
}

/// The first address of a network that can be a host's.
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
    fn interface_names_fit_the_kernel_and_follow_from_the_attachment() {
        let name = host_interface("0123456789abcdef", "eth0");
        assert_eq!(name.len(), 15);
        assert_eq!(name, host_interface("0123456789abcdef", "eth0"));
        assert_ne!(name, host_interface("0123456789abcdef", "eth1"));
        assert_ne!(name, host_interface("0123456789abcdee", "eth0"));
    }

    #[test]
    fn the_hardware_address_follows_from_the_ip() {
        assert_eq!(format_mac(&hardware_address("10.42.0.7".parse().unwrap())), "0a:58:0a:2a:00:07");
        let of = |text: &str| hardware_address(text.parse().unwrap());
        assert_eq!(of("fd00::7"), of("fd00::7"));
        assert_ne!(of("fd00::7"), of("fd01::7"), "two ranges on one bridge");
        assert_ne!(of("fd00::7"), of("fd00::8"));
    }
}

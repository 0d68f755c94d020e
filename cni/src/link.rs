//! Links, addresses and routes: the verbs that a pod network needs of rtnetlink.

use std::net::IpAddr;

use futures::TryStreamExt;
use ipnetwork::IpNetwork;
use netlink_packet_route::link::{
    InfoBridgePort, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage,
};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST};
use rtnetlink::{
    Handle, LinkBridge, LinkBridgePort, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder,
    new_connection,
};

use crate::error::Error;
use crate::netns::Netns;

/// The links of one network namespace.
pub(crate) struct Links {
    handle: Handle,
    task: tokio::task::JoinHandle<()>,
}

/// A veth pair: one end on the bridge, the other inside the sandbox.
pub(crate) struct Pair<'a> {
    pub(crate) host: &'a str,
    pub(crate) inside: &'a str,
    pub(crate) bridge: u32,
    pub(crate) mtu: Option<u32>,
    pub(crate) mac: [u8; 6],
}

/// The host's end of a sandbox's pair: `veth` and the head of its id, within the kernel's 15 bytes.
pub(crate) fn host_interface(id: &str) -> String {
    let head: String = id.chars().filter(char::is_ascii_alphanumeric).take(11).collect();
    format!("veth{head}")
}

/// A locally administered hardware address that follows from the IP address, so that a neighbour's
/// cached entry stays true when an address is given again.
pub(crate) fn hardware_address(addresses: &[IpNetwork]) -> [u8; 6] {
    let tail = match addresses.first().map(IpNetwork::ip) {
        Some(IpAddr::V4(ip)) => ip.octets(),
        Some(IpAddr::V6(ip)) => {
            let o = ip.octets();
            [o[12], o[13], o[14], o[15]]
        }
        None => [0; 4],
    };
    [0x0a, 0x58, tail[0], tail[1], tail[2], tail[3]]
}

pub(crate) fn format_mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

// === impl Links ===

impl Links {
    /// The links of the caller's own namespace.
    pub(crate) fn here() -> Result<Self, Error> {
        Self::connect().map_err(|source| Error::Socket { action: "open a route socket", source })
    }

    /// The links inside `netns`: a socket belongs for life to the namespace it was opened in.
    pub(crate) fn inside(netns: &Netns) -> Result<Self, Error> {
        let runtime = tokio::runtime::Handle::current();
        netns.run(|| {
            let _entered = runtime.enter();
            Self::connect()
        })
    }

    fn connect() -> std::io::Result<Self> {
        let (connection, handle, _messages) = new_connection()?;
        Ok(Self { handle, task: tokio::spawn(connection) })
    }

    /// Makes the bridge or takes the one that is there, and sets it up. Its index.
    pub(crate) async fn ensure_bridge(&self, name: &str, mtu: Option<u32>) -> Result<u32, Error> {
        if let Some(link) = self.find(name).await? {
            if !is_kind(&link, &InfoKind::Bridge) {
                return Err(Error::ForeignInterface { name: name.to_owned() });
            }
        } else {
            let message = LinkBridge::new(name).build();
            self.handle.link().add(message).execute().await.map_err(failed("create bridge", name))?;
        }
        let link = self.find(name).await?;
        let index = link.map_or(0, |l| l.header.index);
        let mut up = LinkUnspec::new_with_index(index).up();
        if let Some(mtu) = mtu {
            up = up.mtu(mtu);
        }
        self.handle.link().set(up.build()).execute().await.map_err(failed("set up", name))?;
        Ok(index)
    }

    /// Gives the link these addresses and takes away others that it has of the same families (an earlier
    /// range's gateway).
    pub(crate) async fn ensure_addresses(&self, index: u32, wanted: &[IpNetwork]) -> Result<(), Error> {
        for address in wanted {
            let add = self.handle.address().add(index, address.ip(), address.prefix()).replace();
            add.execute().await.map_err(failed("add address", &address.to_string()))?;
        }
        let request = self.handle.address().get().set_link_index_filter(index);
        let present: Vec<_> =
            request.execute().try_collect().await.map_err(failed("list addresses of", "the bridge"))?;
        for message in present {
            use netlink_packet_route::address::AddressAttribute;
            let ip = message.attributes.iter().find_map(|a| match a {
                AddressAttribute::Address(ip) => Some(*ip),
                _ => None,
            });
            let Some(ip) = ip else { continue };
            let link_local = matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
            if !link_local && wanted.iter().all(|w| w.ip() != ip) {
                let gone = self.handle.address().del(message).execute().await;
                gone.map_err(failed("remove address", &ip.to_string()))?;
            }
        }
        Ok(())
    }

    /// Makes the pair with the far end born inside the sandbox, so that no name can clash on the host.
    pub(crate) async fn add_pair(&self, pair: &Pair<'_>, netns: &Netns) -> Result<(), Error> {
        let mut far = LinkMessageBuilder::<LinkUnspec>::default()
            .name(pair.inside)
            .address(pair.mac.to_vec())
            .setns_by_fd(netns.fd());
        let mut near = LinkMessageBuilder::<LinkVeth>::new_with_info_kind(InfoKind::Veth)
            .name(pair.host)
            .controller(pair.bridge)
            .up();
        if let Some(mtu) = pair.mtu {
            far = far.mtu(mtu);
            near = near.mtu(mtu);
        }
        let message = near.set_info_data(InfoData::Veth(InfoVeth::Peer(far.build()))).build();
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_EXCL | NLM_F_CREATE;
        let add = self.handle.link().add(message).set_flags(flags).execute().await;
        if let Err(error) = add {
            // Left by a crash between the kernel's work and ours: one more try on clean ground.
            if !is_errno(&error, libc::EEXIST) {
                return Err(failed("create veth", pair.host)(error));
            }
            self.delete(pair.host).await?;
            return Box::pin(self.add_pair(pair, netns)).await;
        }
        self.hairpin(pair.host).await
    }

    /// Lets a pod reach itself through its own host port.
    async fn hairpin(&self, host: &str) -> Result<(), Error> {
        let Some(link) = self.find(host).await? else { return Ok(()) };
        let port = LinkBridgePort::new(link.header.index)
            .append_info_data(InfoBridgePort::HairpinMode(true))
            .build();
        self.handle.link().set(port).execute().await.map_err(failed("set hairpin mode of", host))
    }

    /// Inside the sandbox: loopback up, the interface's addresses, up, and the ways out.
    pub(crate) async fn configure(
        &self,
        ifname: &str,
        addresses: &[IpNetwork],
        gateways: &[IpAddr],
    ) -> Result<(), Error> {
        self.handle
            .link()
            .set(LinkUnspec::new_with_index(1).up().build())
            .execute()
            .await
            .map_err(failed("set up", "lo"))?;
        let index = self.find(ifname).await?.map_or(0, |l| l.header.index);
        for address in addresses {
            let add = self.handle.address().add(index, address.ip(), address.prefix());
            add.execute().await.map_err(failed("add address", &address.to_string()))?;
        }
        let up = LinkUnspec::new_with_index(index).up().build();
        self.handle.link().set(up).execute().await.map_err(failed("set up", ifname))?;
        for gateway in gateways {
            let message = match gateway {
                IpAddr::V4(ip) => RouteMessageBuilder::<std::net::Ipv4Addr>::new().gateway(*ip).build(),
                IpAddr::V6(ip) => RouteMessageBuilder::<std::net::Ipv6Addr>::new().gateway(*ip).build(),
            };
            let add = self.handle.route().add(message).execute().await;
            add.map_err(failed("add the default route by", &gateway.to_string()))?;
        }
        Ok(())
    }

    /// Removes a link; an absent one is no error.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), Error> {
        let Some(link) = self.find(name).await? else { return Ok(()) };
        match self.handle.link().del(link.header.index).execute().await {
            Err(error) if !is_errno(&error, libc::ENODEV) => Err(failed("remove", name)(error)),
            _ => Ok(()),
        }
    }

    /// Removes the bridge, if it is one.
    pub(crate) async fn delete_bridge(&self, name: &str) -> Result<(), Error> {
        match self.find(name).await? {
            Some(link) if is_kind(&link, &InfoKind::Bridge) => self.delete(name).await,
            _ => Ok(()),
        }
    }

    /// Removes the bridge's ports that are not wanted.
    pub(crate) async fn delete_ports_except(&self, bridge: u32, wanted: &[&str]) -> Result<(), Error> {
        let links: Vec<LinkMessage> =
            self.handle.link().get().execute().try_collect().await.map_err(failed("list", "links"))?;
        for link in links {
            let on_bridge = link.attributes.contains(&LinkAttribute::Controller(bridge));
            let name = name(&link);
            if on_bridge && is_kind(&link, &InfoKind::Veth) && !wanted.contains(&name) {
                self.delete(name).await?;
            }
        }
        Ok(())
    }

    async fn find(&self, name: &str) -> Result<Option<LinkMessage>, Error> {
        let found = self.handle.link().get().match_name(name).execute().try_next().await;
        match found {
            Err(error) if is_errno(&error, libc::ENODEV) => Ok(None),
            other => other.map_err(failed("look up", name)),
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn name(link: &LinkMessage) -> &str {
    link.attributes
        .iter()
        .find_map(|a| match a {
            LinkAttribute::IfName(name) => Some(name.as_str()),
            _ => None,
        })
        .unwrap_or_default()
}

fn is_kind(link: &LinkMessage, kind: &InfoKind) -> bool {
    link.attributes.iter().any(|a| match a {
        LinkAttribute::LinkInfo(infos) => infos.iter().any(|i| matches!(i, LinkInfo::Kind(k) if k == kind)),
        _ => false,
    })
}

fn is_errno(error: &rtnetlink::Error, errno: i32) -> bool {
    matches!(error, rtnetlink::Error::NetlinkError(message) if message.raw_code() == -errno)
}

fn failed(action: &'static str, what: &str) -> impl Fn(rtnetlink::Error) -> Error + use<> {
    let what = what.to_owned();
    move |source| Error::Link { action, what: what.clone(), source: Box::new(source) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_names_fit_the_kernel() {
        assert_eq!(host_interface("0123456789abcdef"), "veth0123456789a");
        assert_eq!(host_interface("a/b"), "vethab");
    }

    #[test]
    fn the_hardware_address_follows_from_the_ip() {
        let mac = hardware_address(&["10.42.0.7/24".parse().unwrap()]);
        assert_eq!(format_mac(mac), "0a:58:0a:2a:00:07");
    }
}

//! Links: the operations of rtnetlink that pod networks need.

pub(crate) mod address;
pub(crate) mod derived;
pub(crate) mod inside;
pub(crate) mod mac;
mod pair;
pub(crate) mod port;
mod removal;
pub(crate) mod traffic;
pub(crate) mod vlan;

use std::io;

use futures::TryStreamExt;
use ipnetwork::IpNetwork;
use netlink_packet_route::link::{
    BridgePortState, InfoBridge, InfoBridgePort, InfoData, InfoKind, InfoPortData, LinkAttribute, LinkFlags,
    LinkInfo, LinkMessage,
};
use rtnetlink::{Handle, LinkBridge, LinkMessageBuilder, LinkUnspec, new_connection};

pub(crate) use self::mac::{format_mac, parse_mac, random_mac};
pub(crate) use self::pair::Pair;
use crate::error::Error;
use crate::kernel_module;
use crate::netns::Netns;
use crate::sysctl;

/// Alias of a bridge that this program made and that has no other users; `ip link` shows it.
const OURS: &str = "coracle: pod network";
/// The links of one network namespace.
pub(crate) struct Links {
    handle: Handle,
    /// Held during a dump: the kernel refuses a second dump on the same socket (EBUSY).
    dump_lock: tokio::sync::Mutex<()>,
    task: tokio::task::JoinHandle<()>,
    /// Whether the links belong to the caller's own namespace.
    is_here: bool,
    /// Held while a bridge is looked up, made and marked: until then a concurrent call would treat it as a foreign
    /// bridge.
    bridge_lock: tokio::sync::Mutex<()>,
}

/// A link as the kernel shows it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) mac: Vec<u8>,
    pub(crate) mtu: u32,
    pub(crate) queue_length: u32,
    pub(crate) up: bool,
    pub(crate) promiscuous: bool,
    pub(crate) all_multicast: bool,
    /// Index of the bridge of which the link is a port.
    pub(crate) controller: Option<u32>,
    /// Settings of the bridge's port.
    pub(crate) port_state: Option<BridgePortState>,
    /// Index of the veth peer in the peer's namespace.
    pub(crate) peer: Option<u32>,
    /// Whether the bridge filters VLANs. `None` if the kernel has no VLAN filtering.
    pub(crate) vlan_filtering: Option<bool>,
    /// Default VLAN of the bridge's new ports.
    pub(crate) default_vlan: Option<u16>,
    /// Whether the bridge records which ports listen to which multicast groups. `None` if the kernel has no snooping.
    multicast_snooping: Option<bool>,
    alias: String,
    kind: Option<InfoKind>,
}

/// Desired state of a bridge.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bridge {
    pub(crate) mtu: Option<u32>,
    pub(crate) promiscuous: bool,
    /// Whether a new bridge filters VLANs. An existing bridge is not changed.
    pub(crate) vlan_filtering: bool,
    /// Whether the bridge must be ours: an existing bridge needs our mark, a new bridge gets it.
    pub(crate) ours: bool,
}

/// A change of a link's property.
pub(crate) type Change = LinkMessageBuilder<LinkUnspec>;

fn no_socket(source: io::Error) -> Error {
    Error::Socket { action: "open a route socket", source }
}

// === impl Links ===

impl Links {
    /// The links of the caller's own namespace.
    pub(crate) fn in_own_namespace() -> Result<Self, Error> {
        Self::connect(true).map_err(no_socket)
    }

    /// The links inside `netns`: a socket belongs to the namespace in which it was opened.
    pub(crate) fn inside(netns: &Netns) -> Result<Self, Error> {
        let runtime = tokio::runtime::Handle::current();
        netns
            .run(|| {
                let _entered = runtime.enter();
                Self::connect(false)
            })?
            .map_err(no_socket)
    }

    fn connect(is_here: bool) -> io::Result<Self> {
        let (connection, handle, _messages) = new_connection()?;
        let (dump_lock, bridge_lock) = Default::default();
        Ok(Self { handle, dump_lock, task: tokio::spawn(connection), is_here, bridge_lock })
    }

    /// Makes the bridge unless it exists, sets its properties, and sets it up. Returns whether the bridge is new.
    pub(crate) async fn ensure_bridge(&self, name: &str, wanted: Bridge) -> Result<(Link, bool), Error> {
        let Bridge { mtu, promiscuous, .. } = wanted;
        let _guard = self.bridge_lock.lock().await;
        let (link, is_new) = match self.find(name).await? {
            Some(link) => (link, false),
            None => self.make_bridge(name, wanted).await?,
        };
        if is_new {
            coracle_fault::point("bridge.made");
        }
        link.must_be_bridge()?;
        if wanted.ours && !is_new {
            link.require_own_mark()?;
        }
        if wanted.ours && link.multicast_snooping == Some(true) {
            // An earlier version made the bridge.
            let message =
                LinkBridge::new(name).append_info_data(InfoBridge::MulticastSnooping(false)).build();
            let changed = self.handle.link().change(message).execute().await;
            changed.map_err(failed("disable the multicast snooping of", name))?;
        }
        sysctl::no_router_advertisements(name)?;
        let mut change = LinkUnspec::new_with_index(link.index);
        if wanted.ours && is_new {
            // The alias is in the same message as `up`: a bridge that is down and not marked is still being made.
            change = change.alias(OURS);
        }
        if let Some(mtu) = mtu {
            change = change.mtu(mtu);
        }
        if promiscuous {
            change = change.promiscuous(true);
        }
        let as_wanted = mtu.is_none_or(|mtu| mtu == link.mtu) && (link.promiscuous || !promiscuous);
        if !link.up || !as_wanted {
            self.change(change.up(), "set up", name).await?;
        }
        Ok((link, is_new))
    }

    /// Makes packets between ports of the bridge pass the filters of the IP layer. Loads the module `br_netfilter`,
    /// which the kernel needs. Returns false if the module is not available.
    pub(crate) async fn filter_bridge(&self, name: &str) -> Result<bool, Error> {
        let message = LinkBridge::new(name).append_info_data(InfoBridge::NfCallIpTables(true));
        let message = message.append_info_data(InfoBridge::NfCallIp6Tables(true)).build();
        let changed = self.handle.link().change(message).execute().await;
        changed.map_err(failed("filter the packets of", name))?;
        if !sysctl::filters_bridges()
            && let Err(reason) = kernel_module::load("br_netfilter").await
        {
            tracing::debug!(reason, "the module br_netfilter is not loaded");
        }
        Ok(sysctl::filters_bridges())
    }

    /// Makes the bridge. Returns the bridge, and whether this call made it: another process may have been first.
    async fn make_bridge(&self, name: &str, wanted: Bridge) -> Result<(Link, bool), Error> {
        // The address is fixed. Otherwise the bridge would have the lowest address of its ports, and the address would
        // change with the ports.
        let mut message = LinkBridge::new(name).address(random_mac().to_vec()).down();
        if let Some(mtu) = wanted.mtu {
            message = message.mtu(mtu);
        }
        if wanted.vlan_filtering {
            message = message.append_info_data(InfoBridge::VlanFiltering(true));
        }
        if wanted.ours {
            // Without a querier the bridge sends multicast to all ports, with snooping or without it. With snooping,
            // each port that is set up makes the kernel set the query timers of all ports again.
            message = message.append_info_data(InfoBridge::MulticastSnooping(false));
        }
        let is_new = match self.handle.link().add(message.build()).execute().await {
            Ok(()) => true,
            Err(error) if is_errno(&error, libc::EEXIST) => false,
            Err(error) if wanted.vlan_filtering && is_errno(&error, libc::EOPNOTSUPP) => {
                return Err(vlan::unsupported());
            }
            Err(error) => return Err(failed("create bridge", name)(error)),
        };
        Ok((self.get(name).await?, is_new))
    }

    /// Makes a veth pair with one end on the host and the other end inside the sandbox. The inner end is made there, so
    /// its name cannot collide with a name of the host. Returns only name, index and hardware address of the host's
    /// end, without a query of the kernel. If a link is up and its peer is down, a query makes the kernel stop the
    /// link's queues. This takes an RCU grace period under the kernel's lock of links (RTNL).
    pub(crate) async fn add_pair(&self, pair: &Pair<'_>, netns: &Netns) -> Result<Link, Error> {
        let host_mac = pair.host_mac.unwrap_or_else(random_mac);
        if !pair.make(host_mac, netns).await? {
            if self.find(pair.host).await?.is_none() {
                return Err(Error::InterfaceExists { name: pair.inside.to_owned() });
            }
            // A pair of this name is left from a crash. Remove that pair and try once more.
            self.delete(pair.host).await?;
            if !pair.make(host_mac, netns).await? {
                return Err(Error::InterfaceExists { name: pair.inside.to_owned() });
            }
        }
        let index = nix::net::if_::if_nametoindex(pair.host).map_err(failed("look up", pair.host))?;
        Ok(Link { index, name: pair.host.to_owned(), mac: host_mac.to_vec(), ..Link::default() })
    }

    /// Changes a link's properties.
    pub(crate) async fn change(&self, change: Change, verb: &'static str, name: &str) -> Result<(), Error> {
        self.handle.link().set(change.build()).execute().await.map_err(failed(verb, name))
    }

    /// Sets a link up.
    pub(crate) async fn up(&self, link: &Link) -> Result<(), Error> {
        self.change(LinkUnspec::new_with_index(link.index).up(), "set up", &link.name).await
    }

    /// Sets a link down.
    pub(crate) async fn down(&self, link: &Link) -> Result<(), Error> {
        self.change(LinkUnspec::new_with_index(link.index).down(), "set down", &link.name).await
    }

    /// Removes a link. An absent link is not an error.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), Error> {
        let Some(link) = self.find(name).await? else { return Ok(()) };
        if self.is_here {
            return removal::remove(link.index).await.map_err(failed("remove", name));
        }
        match self.handle.link().del(link.index).execute().await {
            Err(error) if !is_errno(&error, libc::ENODEV) => Err(failed("remove", name)(error)),
            _ => Ok(()),
        }
    }

    /// Removes the link if it is a bridge.
    pub(crate) async fn delete_bridge(&self, name: &str) -> Result<(), Error> {
        match self.find(name).await? {
            Some(link) if link.kind == Some(InfoKind::Bridge) => self.delete(name).await,
            _ => Ok(()),
        }
    }

    /// Removes the bridge with these ports, unless it has other ports. Calls of [`ensure_bridge`](Self::ensure_bridge)
    /// wait meanwhile.
    pub(crate) async fn delete_unshared_bridge(&self, bridge: &Link, own: &[String]) -> Result<(), Error> {
        let _guard = self.bridge_lock.lock().await;
        // Another bridge may have the name meanwhile.
        let Some(bridge) = self.find_index(bridge.index).await? else { return Ok(()) };
        let ports = self.ports(&bridge).await?;
        if ports.iter().any(|port| !own.contains(&port.name)) {
            return Ok(());
        }
        for port in ports {
            self.delete(&port.name).await?;
        }
        self.delete(&bridge.name).await
    }

    /// Marks an unmarked bridge as ours if an earlier version or an interrupted process made it. Such a bridge has a
    /// hardware address with our prefix. Either it has addresses, all of which are ours, or it is not in use.
    pub(crate) async fn claim_bridge(&self, name: &str, ours: &[IpNetwork]) -> Result<(), Error> {
        let Some(link) = self.find(name).await? else { return Ok(()) };
        if link.is_ours() || link.must_be_bridge().is_err() || link.mac.first() != Some(&mac::OUR_PREFIX) {
            return Ok(());
        }
        let present = self.addresses(&link).await?;
        let is_known = match present.is_empty() {
            true => !link.up && self.ports(&link).await?.is_empty(),
            false => present.iter().all(|present| ours.contains(&present.network)),
        };
        if !is_known {
            return Ok(());
        }
        self.change(LinkUnspec::new_with_index(link.index).alias(OURS), "mark", name).await
    }

    /// The bridge, if it has our mark.
    pub(crate) async fn find_ours(&self, name: &str) -> Result<Option<Link>, Error> {
        Ok(self.find(name).await?.filter(|link| link.kind == Some(InfoKind::Bridge) && link.is_ours()))
    }

    /// Removes the bridge's veth ports whose names are not wanted.
    pub(crate) async fn delete_ports_except(&self, bridge: &Link, wanted: &[String]) -> Result<(), Error> {
        for port in self.ports(bridge).await? {
            if port.kind == Some(InfoKind::Veth) && !wanted.contains(&port.name) {
                self.delete(&port.name).await?;
            }
        }
        Ok(())
    }

    async fn ports(&self, bridge: &Link) -> Result<Vec<Link>, Error> {
        let all = self.all().await?.into_iter();
        Ok(all.filter(|link| link.controller == Some(bridge.index)).collect())
    }

    async fn all(&self) -> Result<Vec<Link>, Error> {
        let _guard = self.dump_lock.lock().await;
        let messages: Result<Vec<LinkMessage>, _> = self.handle.link().get().execute().try_collect().await;
        Ok(messages.map_err(failed("list", "links"))?.iter().map(Link::of).collect())
    }

    pub(crate) async fn find(&self, name: &str) -> Result<Option<Link>, Error> {
        self.find_message(self.handle.link().get().match_name(name), name).await
    }

    /// A link that must exist.
    pub(crate) async fn get(&self, name: &str) -> Result<Link, Error> {
        let absent = || io::Error::from_raw_os_error(libc::ENODEV);
        let wrap = |source| Error::Socket { action: "find a link", source };
        self.find(name).await?.ok_or_else(|| wrap(io::Error::other(format!("{name}: {}", absent()))))
    }

    pub(crate) async fn find_index(&self, index: u32) -> Result<Option<Link>, Error> {
        self.find_message(self.handle.link().get().match_index(index), &index.to_string()).await
    }

    async fn find_message(
        &self,
        request: rtnetlink::LinkGetRequest,
        what: &str,
    ) -> Result<Option<Link>, Error> {
        match request.execute().try_next().await {
            Err(error) if is_errno(&error, libc::ENODEV) => Ok(None),
            found => Ok(found.map_err(failed("look up", what))?.as_ref().map(Link::of)),
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.task.abort();
    }
}

// === impl Link ===

impl Link {
    /// Refuses a link that is not a bridge.
    pub(crate) fn must_be_bridge(&self) -> Result<(), Error> {
        match self.kind {
            Some(InfoKind::Bridge) => Ok(()),
            _ => Err(Error::ForeignInterface { name: self.name.clone() }),
        }
    }

    /// Refuses a bridge without our mark.
    pub(crate) fn require_own_mark(&self) -> Result<(), Error> {
        match self.is_ours() {
            true => Ok(()),
            false => Err(Error::ForeignBridge { name: self.name.clone() }),
        }
    }

    /// Whether the link has our mark.
    fn is_ours(&self) -> bool {
        self.alias == OURS
    }

    fn of(message: &LinkMessage) -> Self {
        let flags = message.header.flags;
        let mut link = Self {
            index: message.header.index,
            up: flags.contains(LinkFlags::Up),
            promiscuous: flags.contains(LinkFlags::Promisc),
            all_multicast: flags.contains(LinkFlags::Allmulti),
            ..Self::default()
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::IfAlias(alias) => link.alias.clone_from(alias),
                LinkAttribute::Address(mac) => link.mac.clone_from(mac),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::TxQueueLen(length) => link.queue_length = *length,
                LinkAttribute::Controller(index) => link.controller = Some(*index),
                LinkAttribute::Link(index) => link.peer = Some(*index),
                LinkAttribute::LinkInfo(infos) => infos.iter().for_each(|info| link.read_info(info)),
                _ => {}
            }
        }
        link
    }

    fn read_info(&mut self, info: &LinkInfo) {
        match info {
            LinkInfo::Kind(kind) => self.kind = Some(kind.clone()),
            LinkInfo::Data(InfoData::Bridge(properties)) => {
                for property in properties {
                    match property {
                        InfoBridge::VlanFiltering(filters) => self.vlan_filtering = Some(*filters),
                        InfoBridge::VlanDefaultPvid(vlan) => self.default_vlan = Some(*vlan),
                        InfoBridge::MulticastSnooping(snoops) => self.multicast_snooping = Some(*snoops),
                        _ => {}
                    }
                }
            }
            LinkInfo::PortData(InfoPortData::BridgePort(properties)) => {
                self.port_state = properties.iter().find_map(|property| match property {
                    InfoBridgePort::State(state) => Some(*state),
                    _ => None,
                });
            }
            _ => {}
        }
    }
}

fn is_errno(error: &rtnetlink::Error, errno: i32) -> bool {
    matches!(error, rtnetlink::Error::NetlinkError(message) if message.raw_code() == -errno)
}

fn failed<E>(action: &'static str, what: &str) -> impl Fn(E) -> Error + use<E>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let what = what.to_owned();
    move |source| Error::Link { action, what: what.clone(), source: Box::new(source) }
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace_async, ip};

    use super::*;

    #[test]
    fn a_bridge_with_a_port_of_another_attachment_is_not_removed() {
        in_new_namespace_async(|| async {
            let links = Links::in_own_namespace().unwrap();
            let (bridge, is_new) = links.ensure_bridge("br0", Bridge::default()).await.unwrap();
            assert!(is_new);
            for port in ["own", "other"] {
                ip(&format!("link add {port} type veth peer name {port}-in"));
                ip(&format!("link set {port} master br0"));
            }
            let own = ["own", "not-made"].map(str::to_owned);
            links.delete_unshared_bridge(&bridge, &own).await.unwrap();
            assert_eq!(links.ports(&bridge).await.unwrap().len(), 2, "another attachment uses the bridge");
            ip("link del other");
            links.delete_unshared_bridge(&bridge, &own).await.unwrap();
            for name in ["br0", "own"] {
                assert!(links.find(name).await.unwrap().is_none(), "{name}");
            }
            links.ensure_bridge("br0", Bridge::default()).await.unwrap();
            links.delete_unshared_bridge(&bridge, &own).await.unwrap();
            assert!(links.find("br0").await.unwrap().is_some(), "a new bridge of this name");
        });
    }

    #[test]
    fn hardware_addresses_are_read_and_written() {
        assert_eq!(parse_mac("0a:58:0A:2a:00:07"), Some([0x0a, 0x58, 0x0a, 0x2a, 0, 7]));
        assert_eq!(format_mac(&[0x0a, 0x58, 0x0a, 0x2a, 0, 7]), "0a:58:0a:2a:00:07");
        for wrong in [
            "",
            "01:00:00:00:00:01",
            "00:00:00:00:00:00",
            "a:b:c:d:e:f",
            "0a:58:0a:2a:00:+7",
            "0a:58:0a:2a:00:07:08",
        ] {
            assert_eq!(parse_mac(wrong), None, "{wrong}");
        }
    }
}

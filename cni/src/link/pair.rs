//! Veth pairs that connect a sandbox with a bridge.

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkMessage};
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVeth};
use tokio::sync::Mutex;

use super::{failed, no_socket};
use crate::error::Error;
use crate::netns::Netns;
use crate::route_socket::{Request, RouteSocket};
use crate::sysctl;

/// Held while a pair is made and IPv6 is disabled on its end on the host. A write to `disable_ipv6` does not wait for
/// the kernel's lock of links (RTNL): the kernel restarts the system call until the lock is free (`restart_syscall`).
/// While another pair was made, each write took a millisecond of processor time. Tasks wait for this lock without
/// blocking their threads, so a process that holds RTNL for long blocks at most one thread of the runtime here.
static PAIR_LOCK: Mutex<()> = Mutex::const_new(());

/// A veth pair: one end on the bridge, the other inside the sandbox.
pub(crate) struct Pair<'a> {
    pub(crate) host: &'a str,
    pub(crate) inside: &'a str,
    pub(crate) bridge: u32,
    pub(crate) mtu: Option<u32>,
    pub(crate) mac: [u8; 6],
    /// Hardware address of the end on the host. `None` selects a random address. With the bridge's own address, the
    /// bridge needs no entry for the port. With other addresses, the kernel visits the entries of all ports for each
    /// new port.
    pub(crate) host_mac: Option<[u8; 6]>,
    /// Whether the end on the host is set up at once. Otherwise [`super::inside::Setup`] does it.
    pub(crate) is_up: bool,
}

// === impl Pair ===

impl Pair<'_> {
    /// Makes the pair in the caller's namespace, and disables IPv6 on its end there. Returns false if a link has the
    /// name of one of the ends. Blocks for about a millisecond.
    pub(super) async fn make(&self, host_mac: [u8; 6], netns: &Netns) -> Result<bool, Error> {
        let _one_at_a_time = PAIR_LOCK.lock().await;
        let message = RouteNetlinkMessage::NewLink(self.message(host_mac, netns));
        let mut socket = RouteSocket::open().map_err(no_socket)?;
        let refused = socket
            .batch(vec![Request::new(message, NLM_F_EXCL | NLM_F_CREATE)])
            .map_err(|source| Error::Socket { action: "create a veth pair", source })?;
        match refused.into_iter().next() {
            Some(refused) if refused.error.raw_os_error() == Some(libc::EEXIST) => return Ok(false),
            Some(refused) => return Err(failed("create veth", self.host)(refused.error)),
            None => {}
        }
        // The host must not process IPv6 packets at the port: it receives frames to the addresses 01:80:c2:00:00:0X at
        // the port, not at the bridge. No frame can arrive before the peer is up.
        sysctl::no_ipv6(self.host)?;
        Ok(true)
    }

    fn message(&self, host_mac: [u8; 6], netns: &Netns) -> LinkMessage {
        let mut container_end = LinkMessageBuilder::<LinkUnspec>::default()
            .name(self.inside)
            .address(self.mac.to_vec())
            .setns_by_fd(netns.fd());
        let mut host_end = LinkMessageBuilder::<LinkVeth>::new_with_info_kind(InfoKind::Veth)
            .name(self.host)
            .address(host_mac.to_vec())
            .controller(self.bridge);
        if self.is_up {
            host_end = host_end.up();
        }
        // A pair uses one queue. By default it gets one queue for each processor, and the removal of several queues
        // takes a grace period.
        for queues in [LinkAttribute::NumTxQueues(1), LinkAttribute::NumRxQueues(1)] {
            container_end = container_end.append_extra_attribute(queues.clone());
            host_end = host_end.append_extra_attribute(queues);
        }
        if let Some(mtu) = self.mtu {
            container_end = container_end.mtu(mtu);
            host_end = host_end.mtu(mtu);
        }
        host_end.set_info_data(InfoData::Veth(InfoVeth::Peer(container_end.build()))).build()
    }
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace_async, ip};

    use super::*;

    #[test]
    fn a_pair_is_made_without_ipv6_on_the_host_and_not_twice() {
        in_new_namespace_async(|| async {
            ip("link add br0 type bridge");
            let bridge = nix::net::if_::if_nametoindex("br0").unwrap();
            let own = Netns::open("/proc/thread-self/ns/net".as_ref()).unwrap();
            let mut made = Vec::new();
            for (host, inside) in [("host0", "eth0"), ("host0", "eth1"), ("host1", "eth0")] {
                let (mac, host_mac) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
                let pair = Pair { host, inside, bridge, mtu: None, mac, host_mac: None, is_up: false };
                made.push(pair.make(host_mac, &own).await.unwrap());
            }
            assert_eq!(made, [true, false, false]);
            // A kernel without IPv6 has no such file.
            if let Ok(setting) = std::fs::read_to_string("/proc/sys/net/ipv6/conf/host0/disable_ipv6") {
                assert_eq!(setting.trim(), "1");
            }
        });
    }
}

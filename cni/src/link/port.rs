//! Ports of a bridge: their settings, their entries in the bridge's forwarding table, and their state.

use std::time::Duration;

use futures::StreamExt;
use netlink_packet_route::link::{BridgePortState, InfoBridgePort};
use netlink_packet_route::neighbour::{NeighbourFlags, NeighbourState};
use rtnetlink::LinkBridgePort;

use super::{Link, Links, failed};
use crate::error::Error;

/// Maximum wait until the kernel forwards a port's packets.
const FORWARDING_TIMEOUT: Duration = Duration::from_secs(2);

/// Bits of the addresses 01:80:c2:00:00:00 to 01:80:c2:00:00:0f of link-local protocols. The kernel does not accept the
/// bit of 01:80:c2:00:00:01 (MAC pause): a bridge drops frames to that address.
const LINK_LOCAL_PROTOCOLS: u16 = 0xfffd;

/// Settings of a bridge's port.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Port {
    /// Hairpin mode: a pod can reach itself through its own host port.
    pub(crate) hairpin: bool,
    /// Port isolation: no packets to and from other isolated ports.
    pub(crate) isolated: bool,
    /// Locked port: the bridge accepts only packets from the hardware address that it has recorded for the port.
    pub(crate) locked: bool,
    /// Three settings with one value. The port gets frames to hardware addresses that the bridge does not know. The
    /// bridge learns addresses from the port's frames. The host receives frames to link-local protocols at the port.
    /// `None` leaves the three settings unchanged. But the bridge never learns from a locked port.
    pub(crate) floods: Option<bool>,
}

// === impl Links ===

impl Links {
    /// Changes the settings of a bridge's port.
    pub(crate) async fn set_port(&self, link: &Link, port: Port) -> Result<(), Error> {
        let mut change = LinkBridgePort::new(link.index);
        if port.hairpin {
            change = change.append_info_data(InfoBridgePort::HairpinMode(true));
        }
        if port.isolated {
            change = change.append_info_data(InfoBridgePort::Isolated(true));
        }
        if port.locked {
            change = change.append_info_data(InfoBridgePort::Locked(true));
        }
        if let Some(floods) = port.floods {
            change = change.append_info_data(InfoBridgePort::UnicastFlood(floods));
            // Without this mask, the host receives frames to link-local protocols at the port. They may contain IP
            // packets. Such frames bypass the source filter and all rules for the bridge. With the mask, the bridge
            // handles them like all other frames.
            let mask = if floods { 0 } else { LINK_LOCAL_PROTOCOLS };
            change = change.append_info_data(InfoBridgePort::GroupFwdMask(mask));
        }
        // A port without flooding has a recorded address and sends from no other address, so the bridge need not learn.
        // With learning, the bridge could also learn from frames to link-local protocols, which may bypass the source
        // filter. Such a frame with the source address of another pod would move that pod's entry to this port.
        if let Some(learns) = if port.locked { Some(false) } else { port.floods } {
            change = change.append_info_data(InfoBridgePort::Learning(learns));
        }
        let set = self.handle.link().set_port(change.build()).execute().await;
        set.map_err(failed("set bridge port", &link.name))
    }

    /// Records a hardware address for a port of a bridge. The entry does not age, and stays while the port is down.
    pub(crate) async fn add_forwarding(&self, link: &Link, mac: [u8; 6]) -> Result<(), Error> {
        let add = self.handle.neighbours().add_bridge(link.index, &mac).replace();
        // The entry is in the table of the bridge, not of the port. For a static entry, the kernel updates the hardware
        // filters of ports: it visits all ports for each new entry, and all entries for each new port. The kernel
        // does not do this for external entries.
        add.flags(NeighbourFlags::Controller | NeighbourFlags::ExtLearned)
            .state(NeighbourState::Noarp)
            .execute()
            .await
            .map_err(failed("add a forwarding entry to", &link.name))
    }

    /// Sets whether an existing port gets frames to unknown hardware addresses, and whether the bridge learns from its
    /// frames. Without learning, records the pod's own address in the bridge. An absent port is not an error.
    pub(crate) async fn set_flooding(&self, port: &str, mac: [u8; 6], floods: bool) -> Result<(), Error> {
        let found = self.find(port).await?.filter(|link| link.controller.is_some());
        let Some(link) = found else { return Ok(()) };
        if !floods {
            self.add_forwarding(&link, mac).await?;
        }
        self.set_port(&link, Port { floods: Some(floods), ..Port::default() }).await
    }

    /// Waits until the bridge forwards packets of a port. The kernel enables forwarding shortly after both ends of the
    /// pair are up. The wait has a timeout, because a bridge with spanning tree takes half a minute.
    pub(crate) async fn wait_until_forwarding(&self, port: &str) -> Result<(), Error> {
        let connected = rtnetlink::new_multicast_connection(&[rtnetlink::MulticastGroup::Link]);
        let (connection, _handle, mut changes) =
            connected.map_err(|source| Error::Socket { action: "listen to links", source })?;
        let listening = tokio::spawn(connection);
        let passes = async {
            while self.get(port).await?.port_state != Some(BridgePortState::Forwarding) {
                if changes.next().await.is_none() {
                    // The notifications ended: only the timeout is left.
                    std::future::pending::<()>().await;
                }
            }
            Ok(())
        };
        let passes = tokio::time::timeout(FORWARDING_TIMEOUT, passes).await;
        listening.abort();
        passes.unwrap_or(Ok(()))
    }
}

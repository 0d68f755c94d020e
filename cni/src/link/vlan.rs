//! VLANs of a bridge's ports (IEEE 802.1Q): memberships, and the VLAN of untagged packets.

use futures::TryStreamExt;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::link::{
    AfSpecBridge, BridgeVlanInfo, BridgeVlanInfoFlags as Flags, LinkAttribute, LinkExtentMask, LinkMessage,
};
use rtnetlink::LinkBridgeVlan;

use super::{Link, Links, failed, is_errno};
use crate::error::Error;

/// Maximum VLAN ID.
pub(crate) const LAST: u16 = 4094;

/// One VLAN of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Member {
    pub(crate) vlan: u16,
    /// Untagged incoming packets belong to this VLAN (PVID). A port has one such VLAN.
    pub(crate) native: bool,
    /// Packets of this VLAN leave untagged.
    pub(crate) untagged: bool,
}

/// Desired VLANs of a port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Vlans {
    /// VLAN of untagged packets.
    pub(crate) native: Option<u16>,
    /// Tagged VLANs, sorted.
    pub(crate) trunk: Vec<u16>,
    /// Whether the bridge's default VLAN is kept.
    pub(crate) keep_default: bool,
}

/// The error for kernels without VLAN filtering.
pub(crate) fn unsupported() -> Error {
    Error::invalid("vlan", "the kernel's bridges do not filter VLANs (CONFIG_BRIDGE_VLAN_FILTERING)")
}

// === impl Vlans ===

impl Vlans {
    /// Whether the bridge must filter VLANs.
    pub(crate) fn any(&self) -> bool {
        self.native.is_some() || !self.trunk.is_empty()
    }

    /// The memberships, sorted. A trunk without a native VLAN has native VLAN 1.
    fn members(&self) -> Vec<Member> {
        let native = self.native.unwrap_or(1);
        let tagged = |vlan: &u16| Member { vlan: *vlan, native: false, untagged: false };
        let mut members: Vec<Member> =
            self.trunk.iter().filter(|vlan| **vlan != native).map(tagged).collect();
        members.push(Member { vlan: native, native: true, untagged: true });
        members.sort_unstable();
        members
    }

    /// Whether a port has exactly the desired memberships.
    pub(crate) fn match_exactly(&self, present: &[Member]) -> bool {
        let wanted = self.members();
        wanted.iter().all(|member| present.contains(member))
            && (self.keep_default || present.len() == wanted.len())
    }

    /// The memberships in the kernel's form: adjacent VLANs as one range, except the native VLAN.
    fn infos(&self) -> Vec<AfSpecBridge> {
        let info = |vid, flags| AfSpecBridge::VlanInfo(BridgeVlanInfo { vid, flags });
        let members = self.members();
        let mut infos = Vec::new();
        for run in members.chunk_by(|a, b| a.vlan + 1 == b.vlan && !a.native && !b.native) {
            match run {
                [member] if member.native => infos.push(info(member.vlan, Flags::Pvid | Flags::Untagged)),
                [first, .., last] => {
                    infos.push(info(first.vlan, Flags::RangeBegin));
                    infos.push(info(last.vlan, Flags::RangeEnd));
                }
                single => infos.extend(single.iter().map(|member| info(member.vlan, Flags::empty()))),
            }
        }
        infos
    }
}

// === impl Links ===

impl Links {
    /// Sets the VLANs of the bridge's port. The default VLAN is removed unless it is kept.
    pub(crate) async fn set_vlans(&self, bridge: &Link, port: &Link, vlans: &Vlans) -> Result<(), Error> {
        let wrong = failed("set the VLANs of", &port.name);
        let default = bridge.default_vlan.filter(|vlan| *vlan != 0);
        let unwanted = default
            .filter(|vlan| !vlans.keep_default && vlans.members().iter().all(|member| member.vlan != *vlan));
        if let Some(vlan) = unwanted {
            let mut request = self.handle.link().del(port.index);
            *request.message_mut() = LinkBridgeVlan::new(port.index).vlan(vlan, Flags::empty()).build();
            match request.execute().await {
                // ENOENT: the port was not a member of the VLAN.
                Err(error) if !is_errno(&error, libc::ENOENT) => return Err(wrong(error)),
                _ => {}
            }
        }
        let add = vlans
            .infos()
            .into_iter()
            .fold(LinkBridgeVlan::new(port.index), |message, info| message.append_af_spec(info));
        self.handle.link().set(add.build()).execute().await.map_err(wrong)
    }

    /// The VLANs of a port.
    pub(crate) async fn vlans(&self, port: &Link) -> Result<Vec<Member>, Error> {
        let ports: Vec<LinkMessage> = {
            let _guard = self.dump_lock.lock().await;
            let list =
                self.handle.link().get().set_filter_mask(AddressFamily::Bridge, vec![LinkExtentMask::Brvlan]);
            list.execute().try_collect().await.map_err(failed("list the VLANs of", &port.name))?
        };
        Ok(ports.iter().filter(|message| message.header.index == port.index).flat_map(members_in).collect())
    }
}

fn members_in(message: &LinkMessage) -> Vec<Member> {
    let specs = message.attributes.iter().filter_map(|attribute| match attribute {
        LinkAttribute::AfSpecBridge(specs) => Some(specs),
        _ => None,
    });
    let infos = specs.flatten().filter_map(|spec| match spec {
        AfSpecBridge::VlanInfo(info) => Some(info),
        _ => None,
    });
    let member = |info: &BridgeVlanInfo| Member {
        vlan: info.vid,
        native: info.flags.contains(Flags::Pvid),
        untagged: info.flags.contains(Flags::Untagged),
    };
    infos.map(member).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vlans(native: Option<u16>, trunk: &[u16]) -> Vlans {
        Vlans { native, trunk: trunk.to_vec(), keep_default: false }
    }

    fn messages_of(vlans: &Vlans) -> Vec<(u16, Flags)> {
        let infos = vlans.infos().into_iter().map(|spec| match spec {
            AfSpecBridge::VlanInfo(info) => (info.vid, info.flags),
            other => panic!("{other:?}"),
        });
        infos.collect()
    }

    #[test]
    fn a_port_has_one_native_vlan_and_ranges_of_tagged_vlans() {
        let own = Flags::Pvid | Flags::Untagged;
        assert_eq!(messages_of(&vlans(Some(100), &[])), [(100, own)]);
        let (begin, end) = (Flags::RangeBegin, Flags::RangeEnd);
        let trunk = [2, 3, 4, 5, 6, 9];
        let expected = [(1, own), (2, begin), (6, end), (9, Flags::empty())];
        assert_eq!(messages_of(&vlans(None, &trunk)), expected, "1 is the native VLAN");
        let expected = [(2, begin), (3, end), (4, own), (5, begin), (6, end), (9, Flags::empty())];
        assert_eq!(messages_of(&vlans(Some(4), &trunk)), expected, "the native VLAN is not tagged");
    }

    #[test]
    fn a_ports_vlans_are_compared_with_the_desired_vlans() {
        let own = Member { vlan: 100, native: true, untagged: true };
        let default = Member { vlan: 1, native: false, untagged: true };
        let mut wanted = vlans(Some(100), &[]);
        assert!(
            wanted.match_exactly(&[own])
                && !wanted.match_exactly(&[own, default])
                && !wanted.match_exactly(&[default])
        );
        wanted.keep_default = true;
        assert!(
            wanted.match_exactly(&[default, own])
                && !wanted.match_exactly(&[Member { native: false, ..own }])
        );
    }
}

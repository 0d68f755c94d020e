//! Parts of rules that match packets.

use coracle_nft::{R0, Rule};
use ipnetwork::IpNetwork;

use super::family::family;

/// Network and mask of multicast and of the reserved addresses up to 255.255.255.255. If a pod's broadcast were
/// masqueraded, the other pods of its bridge would receive it with the node's address as its source.
pub(super) const MULTICAST_V4: fn() -> (Vec<u8>, Vec<u8>) = || (vec![224, 0, 0, 0], vec![224, 0, 0, 0]);
pub(super) const MULTICAST_V6: fn() -> (Vec<u8>, Vec<u8>) = || {
    let first = |byte| [vec![byte], vec![0; 15]].concat();
    (first(0xff), first(0xff))
};

pub(super) fn of_family(network: IpNetwork) -> Rule {
    Rule::default().family(family(network).number)
}

/// Matches packets from the network.
pub(super) fn from(network: IpNetwork) -> Rule {
    of_family(network).from(network, false)
}

pub(super) fn compared(rule: Rule, value: &[u8], negated: bool) -> Rule {
    if negated { rule.unequal(R0, value) } else { rule.equal(R0, value) }
}

/// An interface name in the kernel's form for comparison.
pub(super) fn interface(name: &str) -> [u8; 16] {
    let mut padded = [0u8; 16];
    for (to, from) in padded.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    padded
}

//! The address families in which rules are written. A packet enters the chains of policies only by the address of a pod
//! of this node. So on a node without IPv6 pods, lines for IPv6 match no packet. The kernel would still read these
//! lines for each new connection and, to validate the chains, at each transaction.

use std::net::IpAddr;

use super::Model;
use crate::facts::PodFacts;

/// Address families of the pods that this node has had. A family stays after the end of its last pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Families {
    has_ipv4: bool,
    has_ipv6: bool,
}

// === impl Families ===

impl Families {
    fn with(self, ips: &[IpAddr]) -> Self {
        Self {
            has_ipv4: self.has_ipv4 || ips.iter().any(IpAddr::is_ipv4),
            has_ipv6: self.has_ipv6 || ips.iter().any(IpAddr::is_ipv6),
        }
    }

    /// The families in the form of the flag in names of sets: true for IPv4.
    pub(super) fn flags(self) -> impl Iterator<Item = bool> {
        let all = [(true, self.has_ipv4), (false, self.has_ipv6)];
        all.into_iter().filter_map(|(is_ipv4, is_used)| is_used.then_some(is_ipv4))
    }
}

// === impl Model ===

impl Model {
    /// Adds the families of a pod. The policies in the table get lines for a new family.
    pub(super) fn add_families(&mut self, facts: &PodFacts) {
        let families = self.families.with(&facts.ips);
        if !facts.is_local || families == self.families {
            return;
        }
        self.families = families;
        let numbers: Vec<u64> = self.versions.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.write_rules_again(number));
    }
}

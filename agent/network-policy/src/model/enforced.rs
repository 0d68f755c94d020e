//! The set elements of the pods whose policies are in the table. After a restart, the agent reads them while the API
//! server does not answer, so that containers of these pods start. The elements change in the same transactions as the
//! policies of the pods.

use std::net::{IpAddr, Ipv6Addr};

use coracle_nft::Key as ElementKey;

use super::{Model, PodEntry};
use crate::program::Set;

/// The key of a pod's address: the address and the uid. `None` unless the uid has 32 hexadecimal digits, as a UUID.
pub(crate) fn enforced_key(uid: &str, ip: IpAddr) -> Option<ElementKey> {
    let digits = uid.replace('-', "");
    let is_number = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| is_number)?;
    Some(ElementKey::default().address(ip).address(IpAddr::V6(Ipv6Addr::from(number))))
}

/// The elements of a pod. An address that now belongs to another pod has no element.
fn elements(entry: &PodEntry) -> Vec<(Set, ElementKey)> {
    let facts = &entry.facts;
    let is_named = facts.is_local && facts.are_policies_known;
    let ips = facts.ips.iter().filter(|ip| is_named && !entry.lost.contains(ip));
    ips.filter_map(|ip| Some((Set::Enforced(ip.is_ipv4()), enforced_key(&facts.uid, *ip)?))).collect()
}

// === impl Model ===

impl Model {
    /// Adds the elements of a pod.
    pub(super) fn claim_enforced(&mut self, uid: &str) {
        let Some(entry) = self.pods.get(uid) else { return };
        for (set, key) in elements(entry) {
            self.program.claim(set, &key, entry.number, None);
        }
    }

    /// Removes the elements of an entry that is replaced or deleted.
    pub(super) fn remove_enforced(&mut self, old: &PodEntry, uid: &str) {
        let kept = self.pods.get(uid).map(elements).unwrap_or_default();
        for (set, key) in elements(old).into_iter().filter(|element| !kept.contains(element)) {
            self.program.remove_claim(set, &key, old.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_all_digits_of_the_uid() {
        let key = |uid: &str| enforced_key(uid, IpAddr::from([10, 42, 0, 2]));
        let some = key("0b5c1f2e-6d3a-4c1b-9a77-1f0e6c5d4b3a");
        assert_eq!(some.as_ref().unwrap().as_bytes().len(), 20);
        assert_eq!(some, key("0b5c1f2e6d3a4c1b9a771f0e6c5d4b3a"));
        assert_ne!(some, key("0b5c1f2e6d3a4c1b9a771f0e6c5d4b3b"));
        for other in ["", "u1", "0b5c1f2e6d3a4c1b9a771f0e6c5d4b3", "+b5c1f2e6d3a4c1b9a771f0e6c5d4b3a"] {
            assert_eq!(key(other), None, "{other}");
        }
    }
}

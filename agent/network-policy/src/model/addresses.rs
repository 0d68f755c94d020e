//! The pod that has each address, if the objects of several pods list it.
//!
//! An address passes to a new pod when the former pod's sandbox ends. The former pod's object may exist for longer,
//! for example if the pod's node is lost. Until the object is removed, policies that name the former pod as a peer
//! must not allow packets of the new pod.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use super::Model;
use crate::facts::{NODES, PodFacts};

/// The pods of addresses.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    /// The number of the pod that has each address.
    holders: HashMap<IpAddr, u64>,
    /// The unique ids of the other pods that list an address.
    others: HashMap<IpAddr, BTreeSet<String>>,
}

// === impl Addresses ===

impl Addresses {
    fn remove_other(&mut self, ip: IpAddr, uid: &str) {
        if let Some(others) = self.others.get_mut(&ip) {
            others.remove(uid);
            if others.is_empty() {
                self.others.remove(&ip);
            }
        }
    }
}

/// Sort key of the pods that list one address: the pod with the largest key has the address. Pods of this node precede
/// other pods, because the node knows their sandboxes. Among the pods of this node, the pod with the latest sandbox has
/// the address: an older pod can get the address of a younger pod, for example after a reboot. Among other pods, the
/// youngest pod has the address.
fn precedence(facts: &PodFacts) -> (bool, u64, i64, &str) {
    (facts.is_local, facts.sandbox, facts.created, &facts.uid)
}

// === impl Model ===

impl Model {
    /// Takes the addresses that a pod lists, except those that a pod of higher precedence has. Returns these
    /// exceptions.
    pub(super) fn take_addresses(&mut self, facts: &PodFacts, number: u64) -> Vec<IpAddr> {
        let mut lost = Vec::new();
        // Nodes are skipped: no pod has an address of a node.
        for ip in facts.ips.iter().filter(|_| facts.namespace != NODES) {
            let holder = self.addresses.holders.get(ip).copied().filter(|holder| *holder != number);
            // Two pods rarely list one address, so there is no index from numbers to pods.
            let entry = holder.and_then(|holder| self.pods.values().find(|entry| entry.number == holder));
            let other = entry.map(|entry| entry.facts.clone());
            if other.as_ref().is_some_and(|other| precedence(other) > precedence(facts)) {
                self.addresses.others.entry(*ip).or_default().insert(facts.uid.clone());
                lost.push(*ip);
                continue;
            }
            self.addresses.holders.insert(*ip, number);
            self.addresses.remove_other(*ip, &facts.uid);
            if let Some(other) = other {
                self.addresses.others.entry(*ip).or_default().insert(other.uid.clone());
                self.change_lost(&other.uid, |lost| lost.push(*ip));
            }
        }
        lost
    }

    /// Passes addresses that a pod no longer lists to the other pods that list them.
    pub(super) fn free_addresses(&mut self, uid: &str, number: u64, freed: Vec<IpAddr>) {
        for ip in freed {
            self.addresses.remove_other(ip, uid);
            if self.addresses.holders.get(&ip) != Some(&number) {
                continue;
            }
            self.addresses.holders.remove(&ip);
            let others = self.addresses.others.get(&ip).into_iter().flatten();
            let others = others.filter_map(|uid| self.pods.get(uid));
            let next = others.max_by(|one, other| precedence(&one.facts).cmp(&precedence(&other.facts)));
            let Some((uid, number)) = next.map(|entry| (entry.facts.uid.clone(), entry.number)) else {
                continue;
            };
            self.addresses.holders.insert(ip, number);
            self.addresses.remove_other(ip, &uid);
            self.change_lost(&uid, |lost| lost.retain(|other| *other != ip));
        }
    }

    fn change_lost(&mut self, uid: &str, change: impl FnOnce(&mut Vec<IpAddr>)) {
        let Some(entry) = self.pods.get(uid) else { return };
        let (facts, mut lost, number) = (entry.facts.clone(), entry.lost.clone(), entry.number);
        change(&mut lost);
        self.put_entry(facts, lost, number);
    }
}

//! Claims by file name, sandbox and host port, with the table's content that follows from them. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::claim::{Claim, check_ports, plan};
use super::ledger::Ledger;
use crate::error::Error;
use crate::nft::Plan;

/// The claims. The work for a change is proportional to the changed claim, not to all claims.
#[derive(Debug, Default)]
pub(super) struct Index {
    claims: BTreeMap<String, Claim>,
    of_sandbox: HashMap<String, BTreeSet<String>>,
    of_port: HashMap<u16, BTreeSet<String>>,
    pub(super) ledger: Ledger,
}

// === impl Index ===

impl Index {
    /// The index of claims whose content is already in the table.
    pub(super) fn committed(claims: BTreeMap<String, Claim>) -> Self {
        let mut index = Self::default();
        claims.into_iter().for_each(|(key, claim)| drop(index.put(key, claim)));
        index.ledger.mark_committed();
        index
    }

    /// Adds or replaces a claim. Returns the replaced claim.
    pub(super) fn put(&mut self, key: String, claim: Claim) -> Option<Claim> {
        // The new claim is added before the old claim is removed. So the count of an object that both claims need does
        // not become 0.
        self.ledger.add(&content(&claim));
        let before = self.remove(&key);
        self.of_sandbox.entry(claim.id.clone()).or_default().insert(key.clone());
        for port in &claim.ports {
            self.of_port.entry(port.host_port).or_default().insert(key.clone());
        }
        self.claims.insert(key, claim);
        before
    }

    /// Removes a claim and returns it.
    pub(super) fn remove(&mut self, key: &str) -> Option<Claim> {
        let claim = self.claims.remove(key)?;
        self.ledger.remove(&content(&claim));
        remove_key(&mut self.of_sandbox, &claim.id, key);
        claim.ports.iter().for_each(|port| remove_key(&mut self.of_port, &port.host_port, key));
        Some(claim)
    }

    pub(super) fn get(&self, key: &str) -> Option<&Claim> {
        self.claims.get(key)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (&String, &Claim)> {
        self.claims.iter()
    }

    /// The keys of a sandbox's claims.
    pub(super) fn of_sandbox(&self, id: &str) -> Vec<String> {
        self.of_sandbox.get(id).into_iter().flatten().cloned().collect()
    }

    /// Refuses a claim if another claim has one of its host ports. Only claims with equal port numbers are compared.
    pub(super) fn check_ports(&self, key: &str, wanted: &Claim) -> Result<(), Error> {
        let ports = wanted.ports.iter().filter_map(|port| self.of_port.get(&port.host_port));
        let others: BTreeSet<&String> = ports.flatten().filter(|other| *other != key).collect();
        check_ports(wanted, others.into_iter().filter_map(|other| self.claims.get(other)))
    }
}

/// The part of the table that one claim needs.
pub(super) fn content(claim: &Claim) -> Plan {
    plan(std::iter::once(claim))
}

/// Removes the key of a claim from the set of one sandbox or port.
fn remove_key<K: std::hash::Hash + Eq>(all: &mut HashMap<K, BTreeSet<String>>, of: &K, key: &str) {
    if let Some(keys) = all.get_mut(of) {
        keys.remove(key);
        if keys.is_empty() {
            all.remove(of);
        }
    }
}

//! Policies of the whole cluster, and the nodes that they name.

use k8s_openapi::api::core::v1::Node;

use super::{Model, Version};
use crate::cluster_policy::{ClusterKind, ClusterPolicy, Rank};
use crate::facts::{NODES, PodFacts, node_uid};
use crate::model::build::Built;
use crate::rules::{Rules, Tier};

impl Model {
    /// Whether there are policies of the whole cluster, so that the table has chains for their tiers.
    #[must_use]
    pub fn is_tiered(&self) -> bool {
        !self.cluster_policies.is_empty()
    }

    /// Whether policies of the whole cluster have nodes as peers.
    #[must_use]
    pub fn needs_nodes(&self) -> bool {
        self.policies_on_nodes > 0
    }

    /// Whether all policies of a pod in the namespace are known: policies of the whole cluster depend on the labels of
    /// the namespace.
    #[must_use]
    pub fn has_all_policies_of(&self, namespace: &str) -> bool {
        !self.is_tiered() || self.namespaces.contains_key(namespace)
    }

    /// The names of the policies of a kind.
    pub fn cluster_policies(&self, kind: ClusterKind) -> impl Iterator<Item = &String> {
        self.cluster_policies.keys().filter(move |(other, _)| *other == kind).map(|(_, name)| name)
    }

    /// Adds or replaces a policy of the whole cluster.
    pub fn put_cluster_policy(&mut self, policy: ClusterPolicy) {
        let ClusterPolicy { kind, name, rank, rules, .. } = policy;
        let key = (kind, name);
        let old = self.cluster_policies.get(&key).copied();
        let known = old.and_then(|old| self.versions.get(&old));
        if known.is_some_and(|version| version.rules == rules && version.rank.as_ref() == Some(&rank)) {
            return;
        }
        let has_rank = known.is_some_and(|version| version.rank.as_ref() == Some(&rank));
        if let Some(old) = old.filter(|old| has_rank && self.restricts_as(*old, &rules)) {
            return self.change_cluster_rules(old, rules);
        }
        let tier = rank.tier;
        // All versions of a policy have one tier, so a policy that changes its tier is removed and added.
        let old = match known.is_some_and(|version| version.tier() != tier) {
            true => {
                self.remove_cluster_policy(key.0, &key.1);
                None
            }
            false => old,
        };
        let number = self.next_number();
        self.policies_on_nodes += usize::from(rules.names_nodes());
        self.versions.insert(number, Version::of_cluster(rank, rules));
        self.cluster_policies.insert(key, number);
        self.replace_policy(tier, old, Some(number));
    }

    /// Removes a policy of the whole cluster.
    pub fn remove_cluster_policy(&mut self, kind: ClusterKind, name: &str) {
        let Some(old) = self.cluster_policies.remove(&(kind, name.to_owned())) else { return };
        let Some(tier) = self.versions.get(&old).map(Version::tier) else { return };
        self.replace_policy(tier, Some(old), None);
    }

    /// Replaces the rules of a policy that restricts the same pods as before.
    fn change_cluster_rules(&mut self, number: u64, rules: Rules) {
        let named_nodes = self.versions.get(&number).is_some_and(|version| version.rules.names_nodes());
        self.policies_on_nodes += usize::from(rules.names_nodes());
        self.policies_on_nodes -= usize::from(named_nodes);
        let local: Vec<String> = self.local.iter().cloned().collect();
        self.change_rules(number, rules, &local);
    }

    /// Replaces a policy's old version by the new one for all pods of this node.
    fn replace_policy(&mut self, tier: Tier, old: Option<u64>, new: Option<u64>) {
        let names_nodes = old.and_then(|old| self.versions.get(&old)).map(|old| old.rules.names_nodes());
        self.policies_on_nodes -= usize::from(names_nodes == Some(true));
        let local: Vec<String> = self.local.iter().cloned().collect();
        self.replace_version(&local, tier, old, new);
    }

    /// The policies of the whole cluster in a tier.
    pub(super) fn cluster_policies_of(&self, tier: Tier) -> Vec<u64> {
        let in_tier = |number: &&u64| self.versions.get(number).is_some_and(|version| version.tier() == tier);
        self.cluster_policies.values().filter(in_tier).copied().collect()
    }

    /// The names of the nodes.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        let uids = self.pods_in.get(NODES).into_iter().flatten();
        uids.filter_map(|uid| uid.split_once('/').map(|(_, name)| name))
    }

    /// Adds a node or replaces its facts.
    pub fn put_node(&mut self, node: &Node) {
        if let Some(facts) = PodFacts::of_node(node) {
            self.put_pod(facts);
        }
    }

    /// Removes a node.
    pub fn remove_node(&mut self, name: &str) {
        self.remove_pod(&node_uid(name));
    }
}

// === impl Version ===

impl Version {
    fn of_cluster(rank: Rank, rules: Rules) -> Self {
        Self { namespace: String::new(), rank: Some(rank), rules, refcount: 0, built: Built::default() }
    }

    pub(super) fn tier(&self) -> Tier {
        self.rank.as_ref().map_or(Tier::Namespaced, |rank| rank.tier)
    }
}

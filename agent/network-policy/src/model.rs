//! Computes the table's content from policies, namespaces and pods. Pure.
//!
//! In each tier, a pod belongs to the group of all policies that select it. The pod's packets pass the chain of this
//! group. The chains and sets of a policy exist while a pod of this node needs them. Equal selectors share one set.

mod addresses;
mod build;
mod cluster;
mod enforced;
mod families;
mod selection;
#[cfg(test)]
mod tests;
mod versions;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use coracle_nft::Key as ElementKey;
use coracle_values::label_selector::Labels;
use coracle_values::object::Key;
use k8s_openapi::api::networking::v1::NetworkPolicy;

use crate::cluster_policy::{ClusterKind, Rank};
use crate::facts::{NODES, PodFacts};
use crate::program::{Chain, Line, Lines, Program, RuleAction, Set};
use crate::rules::{Direction, Rules, Tier};
use addresses::Addresses;
use build::Built;
pub(crate) use enforced::enforced_key;
use families::Families;
use selection::Selections;

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];
const TIERS: [Tier; 3] = [Tier::Admin, Tier::Namespaced, Tier::Baseline];

/// Policies, namespaces and pods of the cluster, and the table that enforces the policies on this node.
#[derive(Debug, Default)]
pub struct Model {
    namespaces: HashMap<String, Labels>,
    pods: HashMap<String, PodEntry>,
    pods_in: HashMap<String, BTreeSet<String>>,
    /// Pods of this node.
    local: BTreeSet<String>,
    addresses: Addresses,
    policies: HashMap<Key, u64>,
    policies_in: HashMap<String, BTreeSet<u64>>,
    cluster_policies: HashMap<(ClusterKind, String), u64>,
    /// Number of cluster policies with nodes as peers.
    policies_on_nodes: usize,
    versions: HashMap<u64, Version>,
    groups: HashMap<GroupKey, Group>,
    selections: Selections,
    families: Families,
    pub(crate) program: Program,
    /// The last number that a pod, policy, group or selection got.
    last_number: u64,
}

/// Tier and direction of policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Stage {
    tier: Tier,
    direction: Direction,
}

/// Policies of one tier and direction that select the same pods.
#[derive(Debug, PartialEq, Eq, Hash)]
struct GroupKey {
    stage: Stage,
    /// In the order of their evaluation.
    policies: Vec<u64>,
}

#[derive(Debug)]
struct PodEntry {
    facts: PodFacts,
    /// Addresses that the pod lists, but that belong to another pod. Rules that name the pod as a peer do not include
    /// these addresses, and the pod's policies do not restrict them.
    lost: Vec<IpAddr>,
    /// Numbers follow the order in which pods are added. If several pods claim one element, the highest number decides.
    number: u64,
    /// Selections that contain the pod.
    selections: BTreeSet<u64>,
    /// Policies that select the pod, if it runs on this node.
    policies: BTreeMap<Stage, Vec<u64>>,
}

/// One version of a policy. A policy that selects other pods than before, or restricts other directions, gets a new
/// number. After any other change of its rules, the policy keeps its number.
#[derive(Debug)]
struct Version {
    /// Empty for a policy of the whole cluster.
    namespace: String,
    /// `None` for a NetworkPolicy.
    rank: Option<Rank>,
    rules: Rules,
    /// Number of groups with this policy.
    refcount: usize,
    built: Built,
}

#[derive(Debug)]
struct Group {
    number: u64,
    /// Number of pods in this group.
    refcount: usize,
}

// === impl PodEntry ===

impl PodEntry {
    /// The addresses that the pod lists, without those that belong to another pod.
    fn own_ips(&self) -> Vec<IpAddr> {
        self.facts.ips.iter().filter(|ip| !self.lost.contains(ip)).copied().collect()
    }

    /// Whether a policy restricts the pod.
    fn has_policy(&self, number: u64) -> bool {
        self.policies.values().any(|policies| policies.contains(&number))
    }
}

// === impl Model ===

impl Model {
    /// Whether there is no policy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.policies.is_empty() && self.cluster_policies.is_empty()
    }

    /// The namespaces with policies.
    #[must_use]
    pub fn restricted_namespaces(&self) -> BTreeSet<String> {
        self.policies_in.keys().cloned().collect()
    }

    /// Whether a namespace has policies.
    #[must_use]
    pub fn is_restricted(&self, namespace: &str) -> bool {
        self.policies_in.contains_key(namespace)
    }

    /// The unique ids of the pods.
    pub fn pods(&self) -> impl Iterator<Item = &String> {
        self.pods.iter().filter(|(_, entry)| entry.facts.namespace != NODES).map(|(uid, _)| uid)
    }

    /// The names of the namespaces.
    pub fn namespaces(&self) -> impl Iterator<Item = &String> {
        self.namespaces.keys()
    }

    /// The namespaces of this node's pods with their labels. Namespaces whose labels are not known are left out.
    #[must_use]
    pub fn local_namespaces(&self) -> BTreeMap<&str, &Labels> {
        let names = self.local.iter().filter_map(|uid| Some(self.pods.get(uid)?.facts.namespace.as_str()));
        names.filter_map(|name| Some((name, self.namespaces.get(name)?))).collect()
    }

    /// The keys of the NetworkPolicies.
    pub fn policies(&self) -> impl Iterator<Item = &Key> {
        self.policies.keys()
    }

    /// Adds a namespace or replaces its labels.
    pub fn put_namespace(&mut self, name: &str, labels: Labels) {
        if self.namespaces.get(name) == Some(&labels) {
            return;
        }
        self.namespaces.insert(name.to_owned(), labels);
        self.update_pods_of_namespace(name);
    }

    /// Removes a namespace.
    pub fn remove_namespace(&mut self, name: &str) {
        if self.namespaces.remove(name).is_some() {
            self.update_pods_of_namespace(name);
        }
    }

    /// Adds a pod or replaces its facts.
    pub fn put_pod(&mut self, facts: PodFacts) {
        let known = self.pods.get(&facts.uid);
        let freed = known.into_iter().flat_map(|entry| &entry.facts.ips);
        let freed: Vec<IpAddr> = freed.filter(|ip| !facts.ips.contains(ip)).copied().collect();
        let number = match known.map(|entry| entry.number) {
            Some(number) => number,
            None => self.next_number(),
        };
        let uid = facts.uid.clone();
        let lost = self.take_addresses(&facts, number);
        self.put_entry(facts, lost, number);
        self.free_addresses(&uid, number, freed);
    }

    /// Adds the entry of a pod or replaces it.
    fn put_entry(&mut self, facts: PodFacts, lost: Vec<IpAddr>, number: u64) {
        if let Some(entry) = self.pods.get_mut(&facts.uid).filter(|entry| entry.lost == lost) {
            // The sandbox only decides which pod has an address, and `lost` is unchanged. So a new sandbox alone
            // changes nothing.
            let sandbox = std::mem::replace(&mut entry.facts.sandbox, facts.sandbox);
            if entry.facts == facts {
                return;
            }
            entry.facts.sandbox = sandbox;
        }
        self.add_families(&facts);
        let old = self.pods.remove(&facts.uid);
        let (uid, namespace) = (facts.uid.clone(), facts.namespace.clone());
        self.pods_in.entry(namespace).or_default().insert(uid.clone());
        match facts.is_local {
            true => drop(self.local.insert(uid.clone())),
            false => drop(self.local.remove(&uid)),
        }
        let entry = PodEntry { facts, lost, number, selections: BTreeSet::new(), policies: BTreeMap::new() };
        self.pods.insert(uid.clone(), entry);
        // The new entry is added before the old one is removed, so chains and sets that both entries need are kept.
        self.select(&uid);
        self.restrict_by_all(&uid);
        self.claim_enforced(&uid);
        if let Some(old) = old {
            self.remove_claims(&old, &uid);
        }
    }

    /// Removes a pod.
    pub fn remove_pod(&mut self, uid: &str) {
        let Some(entry) = self.pods.remove(uid) else { return };
        self.local.remove(uid);
        if let Some(pods) = self.pods_in.get_mut(&entry.facts.namespace) {
            pods.remove(uid);
            if pods.is_empty() {
                self.pods_in.remove(&entry.facts.namespace);
            }
        }
        self.remove_claims(&entry, uid);
        self.free_addresses(uid, entry.number, entry.facts.ips);
    }

    /// Adds or replaces a NetworkPolicy. A policy that cannot be parsed is ignored: it selects no pod.
    pub fn put_policy(&mut self, policy: &NetworkPolicy) {
        let key = Key::of(&policy.metadata);
        let Some(rules) = Rules::of(policy) else { return self.remove_policy(&key) };
        let old = self.policies.get(&key).copied();
        if old.and_then(|old| self.versions.get(&old)).is_some_and(|version| version.rules == rules) {
            return;
        }
        if let Some(old) = old.filter(|old| self.restricts_as(*old, &rules)) {
            let pods = self.local_pods_in(&key.namespace);
            return self.change_rules(old, rules, &pods);
        }
        let number = self.next_number();
        let namespace = key.namespace.clone();
        self.policies_in.entry(namespace.clone()).or_default().insert(number);
        self.policies.insert(key, number);
        let version =
            Version { namespace: namespace.clone(), rank: None, rules, refcount: 0, built: Built::default() };
        self.versions.insert(number, version);
        self.exchange(&namespace, old, Some(number));
    }

    /// Removes a NetworkPolicy.
    pub fn remove_policy(&mut self, key: &Key) {
        if let Some(old) = self.policies.remove(key) {
            self.exchange(&key.namespace, Some(old), None);
        }
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Replaces a NetworkPolicy's old version by the new one for all pods of its namespace.
    fn exchange(&mut self, namespace: &str, old: Option<u64>, new: Option<u64>) {
        if let (Some(old), Some(numbers)) = (old, self.policies_in.get_mut(namespace)) {
            numbers.remove(&old);
            if numbers.is_empty() {
                self.policies_in.remove(namespace);
            }
        }
        self.replace_version(&self.local_pods_in(namespace), Tier::Namespaced, old, new);
    }

    /// The pods of this node in a namespace.
    fn local_pods_in(&self, namespace: &str) -> Vec<String> {
        let pods = self.pods_in.get(namespace).into_iter().flatten();
        pods.filter(|uid| self.local.contains(*uid)).cloned().collect()
    }

    /// Replaces the old version of a policy by the new one for these pods of this node.
    fn replace_version(&mut self, pods: &[String], tier: Tier, old: Option<u64>, new: Option<u64>) {
        for (uid, direction) in pods.iter().flat_map(|uid| DIRECTIONS.map(|direction| (uid, direction))) {
            let stage = Stage { tier, direction };
            let mut policies = entry_policies(self.pods.get(uid), stage);
            policies.retain(|number| Some(*number) != old);
            policies.extend(new.filter(|new| self.restricts(*new, uid, direction)));
            let policies = self.in_order(policies);
            self.restrict(uid, stage, policies);
        }
        if let Some(old) = old {
            self.versions.remove(&old);
        }
    }

    /// Whether a policy restricts a pod. The pod must be in the policy's namespace, if the policy has one.
    fn restricts(&self, policy: u64, uid: &str, direction: Direction) -> bool {
        let (Some(entry), Some(version)) = (self.pods.get(uid), self.versions.get(&policy)) else {
            return false;
        };
        version.rules.restricts(direction, &entry.facts, self.namespaces.get(&entry.facts.namespace))
    }

    /// The policies in the order of their evaluation.
    fn in_order(&self, mut policies: Vec<u64>) -> Vec<u64> {
        let rank = |number: &u64| self.versions.get(number).and_then(|version| version.rank.as_ref());
        policies.sort_unstable_by_key(|number| (rank(number), *number));
        policies
    }

    /// Puts a pod of this node into the groups of all policies that select it.
    fn restrict_by_all(&mut self, uid: &str) {
        for stage in TIERS.into_iter().flat_map(|tier| DIRECTIONS.map(|direction| Stage { tier, direction }))
        {
            let Some(entry) = self.pods.get(uid).filter(|entry| entry.facts.is_local) else { return };
            let candidates: Vec<u64> = match stage.tier {
                Tier::Namespaced => {
                    self.policies_in.get(&entry.facts.namespace).into_iter().flatten().copied().collect()
                }
                tier => self.cluster_policies_of(tier),
            };
            let policies =
                candidates.into_iter().filter(|number| self.restricts(*number, uid, stage.direction));
            let policies = self.in_order(policies.collect());
            self.restrict(uid, stage, policies);
        }
    }

    /// Updates the selections and policies of the pods of a namespace after a change of the namespace's labels.
    fn update_pods_of_namespace(&mut self, namespace: &str) {
        self.select_again(namespace);
        if self.is_tiered() {
            self.local_pods_in(namespace).iter().for_each(|uid| self.restrict_by_all(uid));
        }
    }

    /// Changes the policies of a pod in one tier and direction.
    fn restrict(&mut self, uid: &str, stage: Stage, policies: Vec<u64>) {
        let before = entry_policies(self.pods.get(uid), stage);
        if before == policies {
            return;
        }
        let group =
            (!policies.is_empty()).then(|| self.use_group(GroupKey { stage, policies: policies.clone() }));
        let Some(entry) = self.pods.get_mut(uid) else { return };
        match group {
            Some(_) => drop(entry.policies.insert(stage, policies)),
            None => drop(entry.policies.remove(&stage)),
        }
        let (ips, number) = (entry.own_ips(), entry.number);
        for (set, key, value) in ips.into_iter().flat_map(|ip| claims(stage, ip, group)) {
            match group {
                Some(_) => self.program.claim(set, &key, number, value),
                None => self.program.remove_claim(set, &key, number),
            }
        }
        if !before.is_empty() {
            self.release_group(&GroupKey { stage, policies: before });
        }
    }

    /// Removes the claims and references of an entry that is replaced or deleted.
    fn remove_claims(&mut self, old: &PodEntry, uid: &str) {
        // This comes before groups are released: a selection is removed with the last group that needs it.
        let none = BTreeSet::new();
        for number in &old.selections {
            let Some(selection) = self.selections.get(*number) else { continue };
            let now = self.pods.get(uid);
            let is_in = now.map_or(&none, |entry| &entry.selections).contains(number);
            let kept = now.filter(|_| is_in).map(|entry| selection.elements(entry));
            let kept: BTreeSet<_> = kept.into_iter().flatten().collect();
            for (set, key) in selection.elements(old).filter(|slot| !kept.contains(slot)) {
                self.program.remove_claim(set, &key, old.number);
            }
        }
        self.remove_enforced(old, uid);
        let now = self.pods.get(uid);
        let ips_now = now.map(PodEntry::own_ips).unwrap_or_default();
        for (stage, policies) in &old.policies {
            let still = !entry_policies(self.pods.get(uid), *stage).is_empty();
            let ended = old.own_ips().into_iter().filter(|ip| !still || !ips_now.contains(ip));
            for (set, key, _) in ended.flat_map(|ip| claims(*stage, ip, None)) {
                self.program.remove_claim(set, &key, old.number);
            }
            self.release_group(&GroupKey { stage: *stage, policies: policies.clone() });
        }
    }

    fn use_group(&mut self, key: GroupKey) -> u64 {
        if let Some(group) = self.groups.get_mut(&key) {
            group.refcount += 1;
            return group.number;
        }
        let number = self.next_number();
        let Stage { tier, direction } = key.stage;
        let line = |then| Line { peer: None, ports: None, then };
        let mut lines = Vec::new();
        for policy in &key.policies {
            let built = self.use_version(*policy, tier);
            lines.push(line(RuleAction::Jump(Chain::Policy(built, direction))));
        }
        lines.extend((tier == Tier::Namespaced).then(|| line(RuleAction::Drop)));
        self.program.put_chain(Chain::Group(number), Lines { tier, direction, lines });
        self.groups.insert(key, Group { number, refcount: 1 });
        number
    }

    fn release_group(&mut self, key: &GroupKey) {
        let Some(group) = self.groups.get_mut(key) else { return };
        group.refcount -= 1;
        if group.refcount > 0 {
            return;
        }
        self.program.remove_chain(Chain::Group(group.number));
        self.groups.remove(key);
        for policy in &key.policies {
            self.release_version(*policy);
        }
    }
}

fn entry_policies(entry: Option<&PodEntry>, stage: Stage) -> Vec<u64> {
    entry.and_then(|entry| entry.policies.get(&stage)).cloned().unwrap_or_default()
}

/// The elements of a pod's address in a tier and direction in which policies select the pod. NetworkPolicies never
/// forbid packets of a pod to itself. Such packets reach the table only through a service; policies of administrators
/// apply to them.
fn claims(stage: Stage, ip: IpAddr, group: Option<u64>) -> Vec<(Set, ElementKey, Option<u64>)> {
    let Stage { tier, direction } = stage;
    let mut claims = vec![(Set::Isolated(tier, direction, ip.is_ipv4()), element(ip), group)];
    if tier == Tier::Namespaced {
        claims.push((Set::Itself(direction, ip.is_ipv4()), element(ip).address(ip), None));
    }
    claims
}

fn element(ip: IpAddr) -> ElementKey {
    ElementKey::default().address(ip)
}

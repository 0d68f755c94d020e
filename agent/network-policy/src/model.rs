//! The table's content from policies, namespaces and pods. Pure.
//!
//! Packets of a pod pass the chain of its group: all policies that select it. The chains and sets of a policy exist while
//! a pod of this node needs them. Equal selectors share one set.

mod build;
mod selection;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use coracle_nft::Key as ElementKey;
use coracle_values::label_selector::Labels;
use coracle_values::object::Key;
use k8s_openapi::api::networking::v1::NetworkPolicy;

use crate::facts::PodFacts;
use crate::program::{Chain, Line, Lines, Program, RuleAction, Set};
use crate::rules::{Direction, Rules};
use build::Built;
use selection::Selections;

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];

/// Policies, namespaces and pods of the cluster, and the table that enforces the policies on this node.
#[derive(Debug, Default)]
pub struct Model {
    namespaces: HashMap<String, Labels>,
    pods: HashMap<String, PodEntry>,
    pods_in: HashMap<String, BTreeSet<String>>,
    policies: HashMap<Key, u64>,
    policies_in: HashMap<String, BTreeSet<u64>>,
    versions: HashMap<u64, Version>,
    groups: HashMap<GroupKey, Group>,
    selections: Selections,
    pub(crate) program: Program,
    /// The last number of a pod, policy, group or selection.
    last_number: u64,
}

/// Policies of one direction that select the same pods.
type GroupKey = (Direction, BTreeSet<u64>);

#[derive(Debug)]
struct PodEntry {
    facts: PodFacts,
    /// Order of pods that claim one address: the pod with the highest number has it.
    number: u64,
    /// Selections that contain the pod.
    selections: BTreeSet<u64>,
    /// Policies that select the pod, if it runs on this node.
    policies: BTreeMap<Direction, BTreeSet<u64>>,
}

/// A policy as of one change. A changed policy gets another number, so its chains and sets are never changed.
#[derive(Debug)]
struct Version {
    namespace: String,
    rules: Rules,
    /// Number of groups with this policy.
    users: usize,
    built: Built,
}

#[derive(Debug)]
struct Group {
    number: u64,
    /// Number of pods in this group.
    users: usize,
}

// === impl Model ===

impl Model {
    /// Whether there is no policy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.policies.is_empty()
    }

    /// The namespaces with policies.
    #[must_use]
    pub fn restricted_namespaces(&self) -> BTreeSet<String> {
        self.policies_in.keys().cloned().collect()
    }

    /// The unique ids of the pods.
    pub fn pods(&self) -> impl Iterator<Item = &String> {
        self.pods.keys()
    }

    /// The names of the namespaces.
    pub fn namespaces(&self) -> impl Iterator<Item = &String> {
        self.namespaces.keys()
    }

    /// The keys of the policies.
    pub fn policies(&self) -> impl Iterator<Item = &Key> {
        self.policies.keys()
    }

    /// Adds a namespace or replaces its labels.
    pub fn put_namespace(&mut self, name: &str, labels: Labels) {
        if self.namespaces.get(name) == Some(&labels) {
            return;
        }
        self.namespaces.insert(name.to_owned(), labels);
        self.select_again(name);
    }

    /// Removes a namespace.
    pub fn take_namespace(&mut self, name: &str) {
        if self.namespaces.remove(name).is_some() {
            self.select_again(name);
        }
    }

    /// Adds a pod or replaces its facts.
    pub fn put_pod(&mut self, facts: PodFacts) {
        let known = self.pods.get(&facts.uid);
        if known.is_some_and(|entry| entry.facts == facts) {
            return;
        }
        let number = match known.map(|entry| entry.number) {
            Some(number) => number,
            None => self.next_number(),
        };
        let old = self.pods.remove(&facts.uid);
        let (uid, namespace) = (facts.uid.clone(), facts.namespace.clone());
        self.pods_in.entry(namespace).or_default().insert(uid.clone());
        let entry = PodEntry { facts, number, selections: BTreeSet::new(), policies: BTreeMap::new() };
        self.pods.insert(uid.clone(), entry);
        // The new entry is added before the old one is removed: chains and sets of both are then neither removed nor
        // made again.
        self.select(&uid);
        self.restrict_by_all(&uid);
        if let Some(old) = old {
            self.remove_claims(&old, &uid);
        }
    }

    /// Removes a pod.
    pub fn take_pod(&mut self, uid: &str) {
        let Some(entry) = self.pods.remove(uid) else { return };
        if let Some(pods) = self.pods_in.get_mut(&entry.facts.namespace) {
            pods.remove(uid);
            if pods.is_empty() {
                self.pods_in.remove(&entry.facts.namespace);
            }
        }
        self.remove_claims(&entry, uid);
    }

    /// Adds or replaces a policy. A policy that cannot be parsed is ignored: it selects no pod.
    pub fn put_policy(&mut self, policy: &NetworkPolicy) {
        let key = Key::of(&policy.metadata);
        let Some(rules) = Rules::of(policy) else { return self.take_policy(&key) };
        let old = self.policies.get(&key).copied();
        if old.and_then(|old| self.versions.get(&old)).is_some_and(|version| version.rules == rules) {
            return;
        }
        let number = self.next_number();
        let namespace = key.namespace.clone();
        self.policies_in.entry(namespace.clone()).or_default().insert(number);
        self.policies.insert(key, number);
        let version = Version { namespace: namespace.clone(), rules, users: 0, built: Built::default() };
        self.versions.insert(number, version);
        self.exchange(&namespace, old, Some(number));
    }

    /// Removes a policy.
    pub fn take_policy(&mut self, key: &Key) {
        if let Some(old) = self.policies.remove(key) {
            self.exchange(&key.namespace, Some(old), None);
        }
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Replaces a policy's old version by the new one for all pods of its namespace.
    fn exchange(&mut self, namespace: &str, old: Option<u64>, new: Option<u64>) {
        if let (Some(old), Some(numbers)) = (old, self.policies_in.get_mut(namespace)) {
            numbers.remove(&old);
            if numbers.is_empty() {
                self.policies_in.remove(namespace);
            }
        }
        for uid in self.pods_in.get(namespace).cloned().unwrap_or_default() {
            for direction in DIRECTIONS {
                let Some(entry) = self.pods.get(&uid).filter(|entry| entry.facts.is_local) else { break };
                let mut policies = entry_policies(Some(entry), direction);
                policies.retain(|number| Some(*number) != old);
                if let Some(version) = new.and_then(|new| self.versions.get(&new))
                    && version.rules.restricts(direction, &entry.facts.labels)
                {
                    policies.extend(new);
                }
                self.restrict(&uid, direction, policies);
            }
        }
        if let Some(old) = old {
            self.versions.remove(&old);
        }
    }

    /// Puts a pod of this node into the groups of all policies that select it.
    fn restrict_by_all(&mut self, uid: &str) {
        for direction in DIRECTIONS {
            let Some(entry) = self.pods.get(uid).filter(|entry| entry.facts.is_local) else { return };
            let numbers = self.policies_in.get(&entry.facts.namespace).into_iter().flatten();
            let restricts = |number: &&u64| {
                let version = self.versions.get(number);
                version.is_some_and(|version| version.rules.restricts(direction, &entry.facts.labels))
            };
            let policies = numbers.filter(restricts).copied().collect();
            self.restrict(uid, direction, policies);
        }
    }

    /// Changes the policies of a pod in one direction.
    fn restrict(&mut self, uid: &str, direction: Direction, policies: BTreeSet<u64>) {
        let before = entry_policies(self.pods.get(uid), direction);
        if before == policies {
            return;
        }
        let group = (!policies.is_empty()).then(|| self.use_group((direction, policies.clone())));
        let Some(entry) = self.pods.get_mut(uid) else { return };
        match group {
            Some(_) => drop(entry.policies.insert(direction, policies)),
            None => drop(entry.policies.remove(&direction)),
        }
        let is_isolated = !entry.policies.is_empty();
        let (ips, number) = (entry.facts.ips.clone(), entry.number);
        for ip in ips {
            let (key, itself) = (element(ip), element(ip).address(ip));
            let isolated = Set::Isolated(direction, ip.is_ipv4());
            match group {
                Some(group) => self.program.claim(isolated, &key, number, Some(group)),
                None => self.program.unclaim(isolated, &key, number),
            }
            match is_isolated {
                true => self.program.claim(Set::Itself(ip.is_ipv4()), &itself, number, None),
                false => self.program.unclaim(Set::Itself(ip.is_ipv4()), &itself, number),
            }
        }
        if !before.is_empty() {
            self.release_group(&(direction, before));
        }
    }

    /// Removes the claims and references of an entry that is replaced or deleted.
    fn remove_claims(&mut self, old: &PodEntry, uid: &str) {
        // Before groups are released: a selection may end with them.
        let none = BTreeSet::new();
        for number in &old.selections {
            let Some(selection) = self.selections.get(*number) else { continue };
            let now = self.pods.get(uid);
            let is_in = now.map_or(&none, |entry| &entry.selections).contains(number);
            let kept = now.filter(|_| is_in).map(|entry| selection.elements(&entry.facts));
            let kept: BTreeSet<_> = kept.into_iter().flatten().collect();
            for (set, key) in selection.elements(&old.facts).filter(|slot| !kept.contains(slot)) {
                self.program.unclaim(set, &key, old.number);
            }
        }
        let now = self.pods.get(uid);
        let ips_now = now.map(|entry| entry.facts.ips.clone()).unwrap_or_default();
        for (direction, policies) in &old.policies {
            let still = !entry_policies(self.pods.get(uid), *direction).is_empty();
            for ip in old.facts.ips.iter().filter(|ip| !still || !ips_now.contains(ip)) {
                self.program.unclaim(Set::Isolated(*direction, ip.is_ipv4()), &element(*ip), old.number);
            }
            let is_isolated = self.pods.get(uid).is_some_and(|entry| !entry.policies.is_empty());
            for ip in old.facts.ips.iter().filter(|ip| !is_isolated || !ips_now.contains(ip)) {
                let itself = element(*ip).address(*ip);
                self.program.unclaim(Set::Itself(ip.is_ipv4()), &itself, old.number);
            }
            self.release_group(&(*direction, policies.clone()));
        }
    }

    fn use_group(&mut self, key: GroupKey) -> u64 {
        if let Some(group) = self.groups.get_mut(&key) {
            group.users += 1;
            return group.number;
        }
        let number = self.next_number();
        let (direction, policies) = &key;
        let mut lines = Vec::new();
        for policy in policies {
            self.use_version(*policy);
            lines.push(Line {
                peer: None,
                ports: None,
                then: RuleAction::Jump(Chain::Policy(*policy, *direction)),
            });
        }
        lines.push(Line { peer: None, ports: None, then: RuleAction::Drop });
        self.program.add_chain(Chain::Group(number), Lines { direction: *direction, lines });
        self.groups.insert(key, Group { number, users: 1 });
        number
    }

    fn release_group(&mut self, key: &GroupKey) {
        let Some(group) = self.groups.get_mut(key) else { return };
        group.users -= 1;
        if group.users > 0 {
            return;
        }
        self.program.remove_chain(Chain::Group(group.number));
        self.groups.remove(key);
        for policy in &key.1 {
            self.release_version(*policy);
        }
    }

    fn use_version(&mut self, number: u64) {
        let Some(version) = self.versions.get_mut(&number) else { return };
        version.users += 1;
        if version.users == 1 {
            let (namespace, rules) = (version.namespace.clone(), version.rules.clone());
            let built = self.build(number, &namespace, &rules);
            if let Some(version) = self.versions.get_mut(&number) {
                version.built = built;
            }
        }
    }

    fn release_version(&mut self, number: u64) {
        let Some(version) = self.versions.get_mut(&number) else { return };
        version.users -= 1;
        if version.users == 0 {
            let built = std::mem::take(&mut version.built);
            self.dismantle(built);
        }
    }
}

fn entry_policies(entry: Option<&PodEntry>, direction: Direction) -> BTreeSet<u64> {
    entry.and_then(|entry| entry.policies.get(&direction)).cloned().unwrap_or_default()
}

fn element(ip: IpAddr) -> ElementKey {
    ElementKey::default().address(ip)
}

//! Versions of policies: their chains while a pod of this node needs them, and changes of their rules.

use std::net::IpAddr;

use super::{DIRECTIONS, Model, PodEntry};
use crate::rules::{Rules, Tier};

impl Model {
    /// Builds a policy for its first group. Returns the number in the names of its chains.
    pub(super) fn use_version(&mut self, number: u64, tier: Tier) -> u64 {
        let Some(version) = self.versions.get_mut(&number) else { return number };
        version.refcount += 1;
        if version.refcount == 1 {
            let (namespace, rules) = (version.namespace.clone(), version.rules.clone());
            let built = self.build(tier, &namespace, &rules);
            if let Some(version) = self.versions.get_mut(&number) {
                version.built = built;
            }
        }
        self.versions.get(&number).map_or(number, |version| version.built.number)
    }

    pub(super) fn release_version(&mut self, number: u64) {
        let Some(version) = self.versions.get_mut(&number) else { return };
        version.refcount -= 1;
        if version.refcount == 0 {
            let built = std::mem::take(&mut version.built);
            self.dismantle(built);
        }
    }

    /// Whether a policy with these rules would restrict the same pods in the same directions as this version.
    pub(super) fn restricts_as(&self, number: u64, rules: &Rules) -> bool {
        let Some(version) = self.versions.get(&number) else { return false };
        let restricts = |rules: &Rules| DIRECTIONS.map(|direction| rules.of_direction(direction).is_some());
        version.rules.subject == rules.subject && restricts(&version.rules) == restricts(rules)
    }

    /// Replaces the rules of a policy that [restricts the same pods](Self::restricts_as) as before. Its groups, their
    /// chains and the elements of the pods stay as they are. `pods` has the pods of this node that the policy may
    /// select.
    pub(super) fn change_rules(&mut self, number: u64, rules: Rules, pods: &[String]) {
        let Some(version) = self.versions.get_mut(&number) else { return };
        version.rules = rules;
        self.write_rules_again(number);
        let entries = pods.iter().filter_map(|uid| self.pods.get(uid));
        let addresses: Vec<IpAddr> =
            entries.filter(|entry| entry.has_policy(number)).flat_map(PodEntry::own_ips).collect();
        self.program.concern(addresses);
    }

    /// Writes the rules of a policy again, if its chains exist.
    pub(super) fn write_rules_again(&mut self, number: u64) {
        let Some(version) = self.versions.get_mut(&number).filter(|version| version.refcount > 0) else {
            return;
        };
        let (tier, namespace, rules) = (version.tier(), version.namespace.clone(), version.rules.clone());
        let old = std::mem::take(&mut version.built);
        let built = self.rebuild(old, tier, &namespace, &rules);
        if let Some(version) = self.versions.get_mut(&number) {
            version.built = built;
        }
    }
}

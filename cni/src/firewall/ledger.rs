//! The objects of the table, each with its number of claims, and the changes since the last transaction. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnetwork::IpNetwork;

use crate::nft::{Mapping, Plan};
use crate::port_condition::Condition;

/// Number of claims on each object of one kind.
#[derive(Debug)]
struct Counted<T> {
    counts: BTreeMap<T, usize>,
    /// Objects that changed, and whether they existed at the last transaction.
    touched: BTreeMap<T, bool>,
}

/// The content of the table. The work for a claim is proportional to the claim.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    mappings: Counted<Mapping>,
    conditional: Counted<(Mapping, Vec<Condition>)>,
    masquerade: Counted<(IpNetwork, Vec<IpNetwork>)>,
    hairpin: Counted<IpNetwork>,
    loopback: Counted<()>,
    untouched: Counted<IpAddr>,
    masquerade_all: Counted<IpAddr>,
    isolated: Counted<String>,
    opened: Counted<String>,
    /// Whether the table had content at the last call of [`mark_committed`](Self::mark_committed).
    had_content: bool,
}

// === impl Counted ===

impl<T> Default for Counted<T> {
    fn default() -> Self {
        Self { counts: BTreeMap::new(), touched: BTreeMap::new() }
    }
}

impl<T: Ord + Clone> Counted<T> {
    fn add(&mut self, item: &T) {
        let count = self.counts.entry(item.clone()).or_default();
        *count += 1;
        if *count == 1 {
            self.touched.entry(item.clone()).or_insert(false);
        }
    }

    fn remove(&mut self, item: &T) {
        let Some(count) = self.counts.get_mut(item) else { return };
        *count -= 1;
        if *count == 0 {
            self.counts.remove(item);
            self.touched.entry(item.clone()).or_insert(true);
        }
    }

    /// Added and removed objects. The flag is true if the object exists now.
    fn changed(&self) -> impl Iterator<Item = (&T, bool)> {
        self.touched.iter().filter_map(|(item, before)| {
            let now = self.counts.contains_key(item);
            (now != *before).then_some((item, now))
        })
    }

    /// The added objects if `is_now`, otherwise the removed objects.
    fn changed_in(&self, is_now: bool) -> BTreeSet<T> {
        let changed = self.changed().filter(|(_, now)| *now == is_now);
        changed.map(|(item, _)| item.clone()).collect()
    }

    fn now(&self) -> BTreeSet<T> {
        self.counts.keys().cloned().collect()
    }

    fn before(&self) -> BTreeSet<T> {
        let unchanged = self.counts.keys().filter(|item| self.touched.get(*item) != Some(&false));
        let ended = self.changed().filter(|(_, now)| !*now).map(|(item, _)| item);
        unchanged.chain(ended).cloned().collect()
    }

    fn is_changed(&self) -> bool {
        self.changed().next().is_some()
    }

    /// Whether objects existed at the last transaction, and whether some exist now.
    fn exist(&self) -> [bool; 2] {
        let before = self.changed().any(|(_, now)| !now);
        let added = self.changed().filter(|(_, now)| *now).count();
        [before || self.counts.len() > added, !self.counts.is_empty()]
    }
}

// === impl Ledger ===

impl Ledger {
    /// Adds the content of one claim.
    pub(super) fn add(&mut self, claim: &Plan) {
        self.apply(claim, Step::Add);
    }

    /// Removes the content of one claim.
    pub(super) fn remove(&mut self, claim: &Plan) {
        self.apply(claim, Step::Remove);
    }

    fn apply(&mut self, claim: &Plan, step: Step) {
        step.all(&mut self.mappings, &claim.mappings);
        step.all(&mut self.conditional, &claim.conditional);
        let masquerade = claim.masquerade.iter().map(|(network, except)| (*network, except.clone()));
        step.all(&mut self.masquerade, &masquerade.collect::<BTreeSet<_>>());
        step.all(&mut self.hairpin, &claim.hairpin);
        step.all(&mut self.loopback, claim.loopback.then_some(&()));
        step.all(&mut self.untouched, &claim.untouched);
        step.all(&mut self.masquerade_all, &claim.masquerade_all);
        step.all(&mut self.isolated, &claim.isolated);
        step.all(&mut self.opened, &claim.opened);
    }

    /// Whether a claim opens the interface for packets of 127.0.0.0/8.
    pub(super) fn opens(&self, interface: &str) -> bool {
        self.opened.counts.contains_key(interface)
    }

    /// The interfaces that are open.
    pub(super) fn opened(&self) -> impl Iterator<Item = &String> {
        self.opened.counts.keys()
    }

    /// The interfaces that were open at the last transaction and are not open now.
    pub(super) fn closed(&self) -> BTreeSet<String> {
        self.opened.changed_in(false)
    }

    /// Whether the table has no content.
    pub(super) fn is_empty(&self) -> bool {
        self.mappings.counts.is_empty()
            && self.conditional.counts.is_empty()
            && self.masquerade.counts.is_empty()
            && self.hairpin.counts.is_empty()
            && self.loopback.counts.is_empty()
            && self.untouched.counts.is_empty()
            && self.masquerade_all.counts.is_empty()
            && self.isolated.counts.is_empty()
            && self.opened.counts.is_empty()
    }

    /// Whether the table had content at the last transaction.
    pub(super) fn had_rules(&self) -> bool {
        self.had_content
    }

    /// Whether the content differs from the content at the last transaction.
    pub(super) fn is_changed(&self) -> bool {
        let elements =
            self.mappings.is_changed() || self.untouched.is_changed() || self.masquerade_all.is_changed();
        elements || self.are_rules_changed()
    }

    /// Whether a network, a bridge or a port with conditions has changed. These objects are rules of the table.
    fn are_rules_changed(&self) -> bool {
        self.conditional.is_changed()
            || self.masquerade.is_changed()
            || self.hairpin.is_changed()
            || self.loopback.is_changed()
            || self.isolated.is_changed()
            || self.opened.is_changed()
    }

    /// Whether host ports existed at the last transaction, and whether some exist now.
    pub(super) fn have_ports(&self) -> [bool; 2] {
        let ([was, is], [was_conditional, is_conditional]) =
            (self.mappings.exist(), self.conditional.exist());
        [was || was_conditional, is || is_conditional]
    }

    /// The previous and the present content, without the unchanged elements. If no rule changed, both are without
    /// rules.
    pub(super) fn change(&self) -> [Plan; 2] {
        let (mut before, mut now) = (Plan::default(), Plan::default());
        if self.are_rules_changed() {
            before.conditional = self.conditional.before();
            before.masquerade = common(&self.masquerade.before());
            before.hairpin = self.hairpin.before();
            before.loopback = self.loopback.before().contains(&());
            before.isolated = self.isolated.before();
            before.opened = self.opened.before();
            self.rules(&mut now);
        }
        for (plan, is_now) in [(&mut before, false), (&mut now, true)] {
            plan.mappings = self.mappings.changed_in(is_now);
            plan.untouched = self.untouched.changed_in(is_now);
            plan.masquerade_all = self.masquerade_all.changed_in(is_now);
        }
        [before, now]
    }

    /// The whole content.
    pub(super) fn full_plan(&self) -> Plan {
        let mut plan = Plan {
            mappings: self.mappings.now(),
            untouched: self.untouched.now(),
            masquerade_all: self.masquerade_all.now(),
            ..Plan::default()
        };
        self.rules(&mut plan);
        plan
    }

    fn rules(&self, plan: &mut Plan) {
        plan.conditional = self.conditional.now();
        plan.masquerade = common(&self.masquerade.now());
        plan.hairpin = self.hairpin.now();
        plan.loopback = self.loopback.now().contains(&());
        plan.isolated = self.isolated.now();
        plan.opened = self.opened.now();
    }

    /// Records that the table has the present content.
    pub(super) fn mark_committed(&mut self) {
        self.had_content = !self.is_empty();
        self.mappings.touched.clear();
        self.conditional.touched.clear();
        self.masquerade.touched.clear();
        self.hairpin.touched.clear();
        self.loopback.touched.clear();
        self.untouched.touched.clear();
        self.masquerade_all.touched.clear();
        self.isolated.touched.clear();
        self.opened.touched.clear();
    }

    /// Added and removed host ports. The flag is true if the host port exists now.
    pub(super) fn changed_ports(&self) -> Vec<(Mapping, bool)> {
        let plain = self.mappings.changed().map(|(mapping, now)| (mapping.clone(), now));
        let conditional = self.conditional.changed().map(|((mapping, _), now)| (mapping.clone(), now));
        plain.chain(conditional).collect()
    }
}

/// The networks, each with the destinations that are exceptions in all claims on the network.
fn common(claimed: &BTreeSet<(IpNetwork, Vec<IpNetwork>)>) -> BTreeMap<IpNetwork, Vec<IpNetwork>> {
    let mut all: BTreeMap<IpNetwork, Vec<IpNetwork>> = BTreeMap::new();
    for (network, except) in claimed {
        let entry = all.entry(*network);
        // Both lists are sorted.
        let both = entry.and_modify(|all| all.retain(|range| except.binary_search(range).is_ok()));
        both.or_insert_with(|| except.clone());
    }
    all
}

/// Whether the content of a claim is added or removed.
#[derive(Clone, Copy)]
enum Step {
    Add,
    Remove,
}

// === impl Step ===

impl Step {
    fn all<'a, T: Ord + Clone + 'a>(self, kind: &mut Counted<T>, items: impl IntoIterator<Item = &'a T>) {
        for item in items {
            match self {
                Self::Add => kind.add(item),
                Self::Remove => kind.remove(item),
            }
        }
    }
}

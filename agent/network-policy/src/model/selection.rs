//! Selections: the addresses, or one named port, of the pods that a selector matches. Equal selections are shared.

use std::collections::{BTreeSet, HashMap};

use coracle_nft::Key as ElementKey;
use coracle_values::label_selector::{LabelSelector, Labels};

use super::{Model, PodEntry, element};
use crate::facts::{NODES, PodFacts};
use crate::program::Set;
use crate::rules::{NamedPort, selects_namespace};

/// Pods, or one named port of these pods.
#[derive(Clone, Debug)]
pub(super) struct Selection {
    pub(super) scope: Scope,
    pub(super) pods: LabelSelector,
    pub(super) port: Option<NamedPort>,
}

/// Namespaces of a selection. Nodes are in the namespace [`NODES`].
#[derive(Clone, Debug)]
pub(super) enum Scope {
    Namespace(String),
    Namespaces(LabelSelector),
}

/// A selection in use.
#[derive(Debug)]
pub(super) struct Selected {
    number: u64,
    selection: Selection,
    /// Key of the selection: equal selections have equal text.
    text: String,
    refcount: usize,
}

/// All selections in use.
#[derive(Debug, Default)]
pub(super) struct Selections {
    all: HashMap<u64, Selected>,
    numbers: HashMap<String, u64>,
    in_namespace: HashMap<String, BTreeSet<u64>>,
    /// Selections with a selector of namespaces.
    in_namespaces: BTreeSet<u64>,
}

// === impl Selected ===

impl Selected {
    fn sets(&self) -> [Set; 2] {
        [true, false].map(|is_ipv4| match self.selection.port {
            None => Set::Addresses(self.number, is_ipv4),
            Some(_) => Set::NamedPorts(self.number, is_ipv4),
        })
    }

    /// Whether the selection contains a pod, or a node.
    fn contains(&self, facts: &PodFacts, labels: Option<&Labels>) -> bool {
        let is_in = match &self.selection.scope {
            Scope::Namespace(namespace) => *namespace == facts.namespace,
            Scope::Namespaces(selector) => facts.namespace != NODES && selects_namespace(selector, labels),
        };
        is_in && self.selection.pods.matches(Some(&facts.labels))
    }

    /// The set elements of a pod in this selection: its addresses, each with the named ports if the selection names a
    /// port.
    pub(super) fn elements<'a>(&'a self, pod: &'a PodEntry) -> impl Iterator<Item = (Set, ElementKey)> + 'a {
        let ([v4, v6], facts) = (self.sets(), &pod.facts);
        facts.ips.iter().filter(move |ip| !pod.lost.contains(ip)).flat_map(move |ip| {
            let set = if ip.is_ipv4() { v4 } else { v6 };
            let port = self.selection.port.as_ref();
            let whole = port.is_none().then(|| (set, element(*ip)));
            let is_wanted = move |name: &str, protocol| {
                port.is_some_and(|port| {
                    port.name == name && port.protocol.is_none_or(|wanted| wanted == protocol)
                })
            };
            let named = facts.ports.iter().filter(move |port| is_wanted(&port.name, port.protocol));
            let named = named.map(move |port| (set, element(*ip).protocol(port.protocol).port(port.number)));
            whole.into_iter().chain(named)
        })
    }
}

// === impl Selections ===

impl Selections {
    pub(super) fn get(&self, number: u64) -> Option<&Selected> {
        self.all.get(&number)
    }

    /// Selections that may contain pods of the namespace.
    fn of_namespace(&self, namespace: &str) -> Vec<u64> {
        let own = self.in_namespace.get(namespace).into_iter().flatten();
        own.chain(&self.in_namespaces).copied().collect()
    }
}

// === impl Model ===

impl Model {
    /// Adds a reference to the selection. The first reference creates the sets of the selection.
    pub(super) fn use_selection(&mut self, selection: Selection) -> u64 {
        let text = format!("{selection:?}");
        if let Some(number) = self.selections.numbers.get(&text).copied() {
            if let Some(selected) = self.selections.all.get_mut(&number) {
                selected.refcount += 1;
            }
            return number;
        }
        let number = self.next_number();
        let pods: Vec<String> = match &selection.scope {
            Scope::Namespace(namespace) => {
                self.selections.in_namespace.entry(namespace.clone()).or_default().insert(number);
                self.pods_in.get(namespace).into_iter().flatten().cloned().collect()
            }
            Scope::Namespaces(_) => {
                self.selections.in_namespaces.insert(number);
                self.pods.keys().cloned().collect()
            }
        };
        self.selections.numbers.insert(text.clone(), number);
        let selected = Selected { number, selection, text, refcount: 1 };
        selected.sets().into_iter().for_each(|set| self.program.add_set(set, Vec::new()));
        self.selections.all.insert(number, selected);
        pods.iter().for_each(|uid| self.select_by(uid, number));
        number
    }

    /// Removes a reference to the selection. The removal of the last reference removes the sets of the selection.
    pub(super) fn release_selection(&mut self, number: u64) {
        let Some(selected) = self.selections.all.get_mut(&number) else { return };
        selected.refcount -= 1;
        if selected.refcount > 0 {
            return;
        }
        let Some(selected) = self.selections.all.remove(&number) else { return };
        self.selections.numbers.remove(&selected.text);
        let pods: Vec<String> = match &selected.selection.scope {
            Scope::Namespace(namespace) => {
                if let Some(numbers) = self.selections.in_namespace.get_mut(namespace) {
                    numbers.remove(&number);
                    if numbers.is_empty() {
                        self.selections.in_namespace.remove(namespace);
                    }
                }
                self.pods_in.get(namespace).into_iter().flatten().cloned().collect()
            }
            Scope::Namespaces(_) => {
                self.selections.in_namespaces.remove(&number);
                self.pods.keys().cloned().collect()
            }
        };
        for uid in pods {
            let Some(entry) = self.pods.get_mut(&uid) else { continue };
            if !entry.selections.remove(&number) {
                continue;
            }
            for (set, key) in selected.elements(entry) {
                self.program.remove_claim(set, &key, entry.number);
            }
        }
        selected.sets().into_iter().for_each(|set| self.program.remove_set(set));
    }

    /// Updates the selections that contain a pod.
    pub(super) fn select(&mut self, uid: &str) {
        let Some(namespace) = self.pods.get(uid).map(|entry| entry.facts.namespace.clone()) else { return };
        for number in self.selections.of_namespace(&namespace) {
            self.select_by(uid, number);
        }
    }

    /// Updates the selections with a namespace selector, after the labels of this namespace have changed.
    pub(super) fn select_again(&mut self, namespace: &str) {
        let numbers: Vec<u64> = self.selections.in_namespaces.iter().copied().collect();
        for uid in self.pods_in.get(namespace).cloned().unwrap_or_default() {
            numbers.iter().for_each(|number| self.select_by(&uid, *number));
        }
    }

    /// Updates whether one selection contains a pod.
    fn select_by(&mut self, uid: &str, number: u64) {
        let (Some(entry), Some(selected)) = (self.pods.get_mut(uid), self.selections.all.get(&number)) else {
            return;
        };
        let labels = self.namespaces.get(&entry.facts.namespace);
        let (was_in, is_in) = (entry.selections.contains(&number), selected.contains(&entry.facts, labels));
        if was_in == is_in {
            return;
        }
        if is_in {
            entry.selections.insert(number);
        } else {
            entry.selections.remove(&number);
        }
        for (set, key) in selected.elements(entry) {
            match is_in {
                true => self.program.claim(set, &key, entry.number, None),
                false => self.program.remove_claim(set, &key, entry.number),
            }
        }
    }
}

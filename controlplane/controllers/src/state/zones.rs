//! The processors of the cluster's zones, and the services whose topology hints depend on them. The caches of nodes and
//! services update them with each change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use coracle_values::CollectMap;

use crate::object::Key;

/// The zone of a node, and its processors in thousandths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ZoneNode {
    pub(crate) zone: Option<String>,
    pub(crate) processors: i64,
}

/// The processors of each zone, and the services with automatic topology hints.
#[derive(Debug, Default)]
pub(crate) struct ZoneIndex {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    zones: BTreeMap<String, Zone>,
    /// Number of nodes without zone or processors.
    unusable: usize,
    services: BTreeSet<Key>,
}

#[derive(Debug, Default)]
struct Zone {
    nodes: usize,
    processors: i128,
}

// === impl ZoneNode ===

impl ZoneNode {
    fn usable(&self) -> Option<(&String, i128)> {
        Some((self.zone.as_ref()?, i128::from(self.processors))).filter(|(_, processors)| *processors > 0)
    }
}

// === impl ZoneIndex ===

impl ZoneIndex {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a change of a node. `None` means that the node is absent, not ready or excluded. Returns the services to
    /// reconcile.
    pub(crate) fn follow_node(&self, old: Option<&ZoneNode>, new: Option<&ZoneNode>) -> Vec<Key> {
        if old == new {
            return Vec::new();
        }
        let mut state = self.lock();
        if let Some(old) = old {
            state.remove(old);
        }
        if let Some(new) = new {
            state.add(new);
        }
        state.services.iter().cloned().collect()
    }

    /// Records whether a service has automatic topology hints.
    pub(crate) fn follow_service(&self, key: Key, is_automatic: bool) {
        let services = &mut self.lock().services;
        let _is_changed = if is_automatic { services.insert(key) } else { services.remove(&key) };
    }

    /// The processors of each zone, in thousandths. `None` if one of the counted nodes has no zone or no processors.
    pub(crate) fn processors(&self) -> Option<BTreeMap<String, i128>> {
        let state = self.lock();
        let zones = || state.zones.iter().map(|(name, zone)| (name.clone(), zone.processors)).collect_map();
        (state.unusable == 0).then(zones)
    }
}

// === impl State ===

impl State {
    fn add(&mut self, node: &ZoneNode) {
        let Some((name, processors)) = node.usable() else {
            self.unusable += 1;
            return;
        };
        let zone = self.zones.entry(name.clone()).or_default();
        zone.nodes += 1;
        zone.processors += processors;
    }

    fn remove(&mut self, node: &ZoneNode) {
        let Some((name, processors)) = node.usable() else {
            self.unusable = self.unusable.saturating_sub(1);
            return;
        };
        let Some(zone) = self.zones.get_mut(name) else { return };
        zone.nodes = zone.nodes.saturating_sub(1);
        zone.processors -= processors;
        if zone.nodes == 0 {
            self.zones.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(zone: &str, processors: i64) -> ZoneNode {
        ZoneNode { zone: Some(zone.to_owned()).filter(|zone| !zone.is_empty()), processors }
    }

    #[test]
    fn sums_follow_the_nodes() {
        let index = ZoneIndex::default();
        let sums = || index.processors().map(|all| all.into_iter().collect::<Vec<_>>());
        let named = |zones: &[(&str, i128)]| {
            Some(zones.iter().map(|(name, sum)| ((*name).to_owned(), *sum)).collect())
        };
        index.follow_node(None, Some(&node("a", 2000)));
        index.follow_node(None, Some(&node("a", 500)));
        index.follow_node(None, Some(&node("b", 1000)));
        assert_eq!(sums(), named(&[("a", 2500), ("b", 1000)]));
        for unusable in [node("", 1000), node("c", 0)] {
            index.follow_node(None, Some(&unusable));
            assert_eq!(sums(), None);
            index.follow_node(Some(&unusable), None);
        }
        index.follow_node(Some(&node("a", 2000)), Some(&node("b", 2000)));
        index.follow_node(Some(&node("a", 500)), None);
        assert_eq!(sums(), named(&[("b", 3000)]), "the last node of a zone");
    }

    #[test]
    fn a_changed_node_concerns_the_services_with_automatic_hints() {
        let (index, key) = (ZoneIndex::default(), Key::new("n", "s"));
        index.follow_service(key.clone(), true);
        assert_eq!(index.follow_node(None, Some(&node("a", 1))), std::slice::from_ref(&key));
        assert_eq!(index.follow_node(Some(&node("a", 1)), Some(&node("a", 1))), []);
        index.follow_service(key, false);
        assert_eq!(index.follow_node(Some(&node("a", 1)), None), []);
    }
}

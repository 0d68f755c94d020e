//! Resource slices by node, so that the filter of a node does not read the slices of all other nodes.

use std::collections::{BTreeMap, HashMap, HashSet};

use coracle_values::object::ObjectExt;

use super::object::Slice;

/// All slices.
#[derive(Debug, Default)]
pub(super) struct Slices {
    /// The node of each slice by the slice's name. `None` for slices of several nodes.
    places: HashMap<String, Option<String>>,
    /// Slices of several nodes by name.
    shared: BTreeMap<String, Slice>,
    /// Slices of one node: by node, then by name.
    of_nodes: HashMap<String, BTreeMap<String, Slice>>,
}

/// The slices of a pool. The key is driver and pool.
pub(super) type Pools<'a> = BTreeMap<(&'a str, &'a str), Vec<&'a Slice>>;

/// The node of a slice. `None` for slices of several nodes.
pub(super) fn node_of(slice: &Slice) -> Option<&str> {
    slice.spec.node_name.as_deref().filter(|name| !name.is_empty())
}

// === impl Slices ===

impl Slices {
    /// The slice with this name.
    pub(super) fn get(&self, name: &str) -> Option<&Slice> {
        match self.places.get(name)? {
            Some(node) => self.of_nodes.get(node)?.get(name),
            None => self.shared.get(name),
        }
    }

    /// Adds or replaces a slice.
    pub(super) fn insert(&mut self, slice: Slice) {
        let name = slice.name().to_owned();
        self.remove(&name);
        let node = node_of(&slice).map(str::to_owned);
        match &node {
            Some(node) => self.of_nodes.entry(node.clone()).or_default().insert(name.clone(), slice),
            None => self.shared.insert(name.clone(), slice),
        };
        self.places.insert(name, node);
    }

    /// Removes a slice. Returns whether it existed.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        let Some(node) = self.places.remove(name) else { return false };
        let Some(node) = node else { return self.shared.remove(name).is_some() };
        if let Some(slices) = self.of_nodes.get_mut(&node) {
            slices.remove(name);
            if slices.is_empty() {
                self.of_nodes.remove(&node);
            }
        }
        true
    }

    /// Removes all slices that a complete list does not have.
    pub(super) fn retain(&mut self, listed: &HashSet<String>) {
        let removed: Vec<String> =
            self.places.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        for name in removed {
            self.remove(&name);
        }
    }

    /// The slices that count for a node, by pool.
    ///
    /// The slices of a node are separate pools, whatever names they have: a generation or a number of slices that
    /// another node publishes does not count. A pool of several nodes has precedence over a node's pool with the same
    /// name. Otherwise a node could use up the devices of the shared pool, which it cannot publish.
    pub(super) fn pools_of(&self, node: &str) -> Pools<'_> {
        let mut pools = grouped(self.shared.values());
        for (id, slices) in grouped(self.of_nodes.get(node).into_iter().flat_map(BTreeMap::values)) {
            pools.entry(id).or_insert(slices);
        }
        pools
    }
}

fn grouped<'a>(slices: impl Iterator<Item = &'a Slice>) -> Pools<'a> {
    let mut pools = Pools::new();
    for slice in slices {
        let id = (slice.spec.driver.as_str(), slice.spec.pool.name.as_str());
        pools.entry(id).or_default().push(slice);
    }
    pools
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn slice(name: &str, node: Option<&str>) -> Slice {
        let slice = json!({"metadata": {"name": name}, "spec": {"driver": "d", "nodeName": node,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1}}});
        serde_json::from_value(slice).unwrap()
    }

    #[test]
    fn a_slice_is_in_the_index_of_its_current_node_only() {
        let mut slices = Slices::default();
        for name in ["a", "b", "c"] {
            slices.insert(slice(name, Some(name)));
        }
        slices.insert(slice("all", None));
        let pools = |slices: &Slices, node: &str| {
            slices.pools_of(node).keys().map(|(_, pool)| (*pool).to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(pools(&slices, "a"), ["a", "all"]);
        assert_eq!(slices.of_nodes["a"].len(), 1, "no slice of another node is read");
        slices.insert(slice("a", Some("b")));
        assert_eq!(pools(&slices, "a"), ["all"]);
        assert_eq!(pools(&slices, "b"), ["a", "all", "b"]);
        slices.insert(slice("a", None));
        assert_eq!(pools(&slices, "c"), ["a", "all", "c"]);
        assert!(slices.get("a").is_some_and(|slice| node_of(slice).is_none()));
        slices.retain(&HashSet::from(["c".to_owned()]));
        assert_eq!(pools(&slices, "c"), ["c"]);
        assert!(slices.remove("c") && !slices.remove("c") && slices.get("c").is_none());
        assert!(slices.places.is_empty() && slices.of_nodes.is_empty());
    }
}

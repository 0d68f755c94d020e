//! Resource slices by node, so that the filter of a node does not read the slices of all other nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

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
    /// Names of the slices of one node: by driver, then by pool.
    by_pool: HashMap<String, HashMap<String, BTreeSet<String>>>,
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
            Some(node) => {
                let of_driver = self.by_pool.entry(slice.spec.driver.clone()).or_default();
                of_driver.entry(slice.spec.pool.name.clone()).or_default().insert(name.clone());
                self.of_nodes.entry(node.clone()).or_default().insert(name.clone(), slice);
            }
            None => drop(self.shared.insert(name.clone(), slice)),
        }
        self.places.insert(name, node);
    }

    /// Removes a slice. Returns whether it existed.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        let Some(node) = self.places.remove(name) else { return false };
        let Some(node) = node else { return self.shared.remove(name).is_some() };
        let Some(slices) = self.of_nodes.get_mut(&node) else { return true };
        let removed = slices.remove(name);
        if slices.is_empty() {
            self.of_nodes.remove(&node);
        }
        if let Some(slice) = removed {
            self.remove_from_pool(&slice);
        }
        true
    }

    fn remove_from_pool(&mut self, slice: &Slice) {
        let Some(pools) = self.by_pool.get_mut(&slice.spec.driver) else { return };
        if let Some(names) = pools.get_mut(&slice.spec.pool.name) {
            names.remove(slice.name());
            if names.is_empty() {
                pools.remove(&slice.spec.pool.name);
            }
        }
        if pools.is_empty() {
            self.by_pool.remove(&slice.spec.driver);
        }
    }

    /// Removes all slices that a complete list does not have.
    pub(super) fn retain(&mut self, listed: &HashSet<String>) {
        let removed: Vec<String> =
            self.places.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        for name in removed {
            self.remove(&name);
        }
    }

    /// Maximum number of devices that a search on this number of nodes visits.
    pub(super) fn visits(&self, nodes: usize) -> usize {
        let devices = |slice: &Slice| slice.spec.devices.len();
        let of_nodes: usize = self.of_nodes.values().flat_map(BTreeMap::values).map(devices).sum();
        let shared: usize = self.shared.values().map(devices).sum();
        shared.saturating_mul(nodes).saturating_add(of_nodes)
    }

    /// The slices that count for a node, by pool.
    ///
    /// The generation and the number of slices that another node publishes are ignored. Slices of several nodes have
    /// precedence over a node's slices of a pool with the same name. Otherwise a node could publish a pool with the
    /// name of a shared pool, and use up the devices of the shared pool. If the shared slices have no devices, but only
    /// counters, the pool has the devices of the node.
    pub(super) fn pools_of(&self, node: &str) -> Pools<'_> {
        let mut pools = grouped(self.shared.values());
        for (id, slices) in grouped(self.of_nodes.get(node).into_iter().flat_map(BTreeMap::values)) {
            let known = pools.entry(id).or_default();
            if known.iter().all(|slice| slice.spec.devices.is_empty()) {
                known.extend(slices);
            }
        }
        pools
    }

    /// The slices of a pool that belong to other nodes. `own` are the slices of the pool's newest generation that count
    /// for the node. Empty if `own` is already the complete pool. So other nodes cannot influence a complete pool.
    pub(super) fn of_other_nodes(&self, driver: &str, pool: &str, own: &[&Slice], node: &str) -> Vec<&Slice> {
        let Some(first) = own.first() else { return Vec::new() };
        let (count, generation) = (first.spec.pool.resource_slice_count, first.spec.pool.generation);
        let is_shared = own.iter().any(|slice| node_of(slice).is_none() && !slice.spec.devices.is_empty());
        if is_shared || i64::try_from(own.len()).is_ok_and(|len| len >= count) {
            return Vec::new();
        }
        let names = self.by_pool.get(driver).and_then(|pools| pools.get(pool)).into_iter().flatten();
        let slices = names.filter_map(|name| self.get(name));
        slices
            .filter(|slice| node_of(slice) != Some(node) && slice.spec.pool.generation == generation)
            .collect()
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
        assert!(slices.places.is_empty() && slices.of_nodes.is_empty() && slices.by_pool.is_empty());
    }

    #[test]
    fn a_pool_spreads_over_nodes_only_if_the_slices_of_one_node_are_incomplete() {
        let of = |name: &str, node: Option<&str>, (generation, count): (i64, i64)| -> Slice {
            let devices = if node.is_some() { json!([{"name": name}]) } else { json!([]) };
            let pool = json!({"name": "p", "generation": generation, "resourceSliceCount": count});
            let spec = json!({"driver": "d", "nodeName": node, "pool": pool, "devices": devices});
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
        };
        let mut slices = Slices::default();
        let others = |slices: &Slices, node: &str| -> Vec<String> {
            let pools = slices.pools_of(node);
            let found = slices.of_other_nodes("d", "p", &pools[&("d", "p")], node);
            found.into_iter().map(|slice| slice.name().to_owned()).collect()
        };
        slices.insert(of("a", Some("a"), (1, 2)));
        slices.insert(of("b", Some("b"), (1, 2)));
        slices.insert(of("c", Some("c"), (2, 1)));
        assert_eq!(others(&slices, "a"), ["b"], "slices of another generation do not count");
        assert!(others(&slices, "c").is_empty(), "the pool is complete");
        slices.insert(of("counters", None, (1, 3)));
        assert_eq!(slices.pools_of("a")[&("d", "p")].len(), 2);
        assert_eq!(others(&slices, "a"), ["b"]);
    }

    #[test]
    fn each_node_visits_its_own_devices_and_the_shared_ones() {
        let of = |name: &str, node: Option<&str>, devices: usize| -> Slice {
            let devices = vec![json!({"name": "d"}); devices];
            let pool = json!({"name": name, "generation": 1, "resourceSliceCount": 1});
            let spec = json!({"driver": "d", "nodeName": node, "pool": pool, "devices": devices});
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
        };
        let mut slices = Slices::default();
        assert_eq!(slices.visits(10), 0);
        slices.insert(of("a", Some("a"), 3));
        slices.insert(of("b", Some("b"), 4));
        slices.insert(of("shared", None, 2));
        assert_eq!(slices.visits(10), 3 + 4 + 20);
    }
}

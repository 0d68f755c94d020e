//! Results for equal pods. A result that depends only on the pod and one node is computed again only after the node
//! changed. So the cost for all pods of one workload is little higher than the cost for one pod.
//!
//! The decisions are the same as without these results. Upstream's opportunistic batching reuses the order of the nodes
//! instead, and only while one pod fills its node.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{NodeAffinity, Toleration};

use crate::config::Profile;
use crate::node_score::NodeScores;
use crate::object::Pod;
use crate::refusal::Refused;
use crate::request::PodRequirements;
use coracle_values::label_selector::LabelSelector;

/// Maximum number of keys with results. Each result needs about 50 bytes.
const KEYS_MAX: usize = 4;

/// Results by key and node. The least recently used key is replaced.
#[derive(Debug)]
pub(crate) struct Memo<K, V> {
    /// The tables, the most recently used first.
    tables: Vec<(K, Table<V>)>,
}

/// Results by node. A result is valid for one generation of its node.
#[derive(Debug)]
pub(crate) struct Table<V> {
    by_slot: Vec<Option<(u64, V)>>,
}

/// Version of a node's state. The node has not changed if the versions are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeVersion {
    /// Index into tables of results. Two nodes never have the same slot at the same time.
    pub(crate) slot: usize,
    /// Increases with each change. No two states of any nodes have the same generation.
    pub(crate) generation: u64,
}

/// The fields of a pod and its profile that the filters and scores of [`NodeOutcome`] read.
#[derive(Debug)]
pub(crate) struct NodeInput {
    profile: Profile,
    needs: PodRequirements,
    node: Option<String>,
    tolerations: Vec<Toleration>,
    selector: Option<std::collections::BTreeMap<String, String>>,
    affinity: Option<NodeAffinity>,
}

/// A selection of pods of a namespace. The result is the number of these pods on each node.
#[derive(Debug)]
pub(crate) struct PodSelection {
    pub(crate) namespace: String,
    pub(crate) selector: LabelSelector,
}

/// The scores of a node, or the refusal by a filter. It includes only the scores and filters that depend on the pod and
/// the node alone.
pub(crate) type NodeOutcome = Result<NodeScores, Arc<Refused>>;

// === impl Memo ===

impl<K, V> Default for Memo<K, V> {
    fn default() -> Self {
        Self { tables: Vec::new() }
    }
}

impl<K, V> Memo<K, V> {
    /// The results of the key that `is_equal` accepts. If there is no such key, `key` creates it.
    pub(crate) fn table(&mut self, is_equal: impl Fn(&K) -> bool, key: impl FnOnce() -> K) -> &mut Table<V> {
        let found = self.tables.iter().position(|(known, _)| is_equal(known));
        let newest = match found {
            Some(place) => self.tables.remove(place),
            None => (key(), Table { by_slot: Vec::new() }),
        };
        self.tables.truncate(KEYS_MAX - 1);
        self.tables.insert(0, newest);
        &mut self.tables[0].1
    }
}

// === impl Table ===

impl<V> Table<V> {
    /// The result for this version of a node. It is computed if the node has changed since the last call.
    pub(crate) fn get(&mut self, version: NodeVersion, compute: impl FnOnce() -> V) -> &V {
        let NodeVersion { slot, generation } = version;
        if self.by_slot.len() <= slot {
            self.by_slot.resize_with(slot + 1, || None);
        }
        let entry = &mut self.by_slot[slot];
        if entry.as_ref().is_some_and(|(of, _)| *of != generation) {
            *entry = None;
        }
        let (_, value) = entry.get_or_insert_with(|| (generation, compute()));
        value
    }
}

// === impl NodeInput ===

impl NodeInput {
    pub(crate) fn of(pod: &Pod, profile: &Profile, needs: &PodRequirements) -> Self {
        Self {
            profile: profile.clone(),
            needs: needs.clone(),
            node: pod.node().map(str::to_owned),
            tolerations: pod.tolerations().to_vec(),
            selector: pod.spec.node_selector.clone(),
            affinity: node_affinity(pod).cloned(),
        }
    }

    /// Whether this is the input of the pod.
    pub(crate) fn is_of(&self, pod: &Pod, profile: &Profile, needs: &PodRequirements) -> bool {
        self.needs == *needs
            && self.node.as_deref() == pod.node()
            && self.tolerations == pod.tolerations()
            && self.selector == pod.spec.node_selector
            && self.affinity.as_ref() == node_affinity(pod)
            && self.profile == *profile
    }
}

fn node_affinity(pod: &Pod) -> Option<&NodeAffinity> {
    pod.spec.affinity.as_ref()?.node_affinity.as_ref()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashMap;

    use serde_json::{Value, json};

    use super::*;
    use crate::decide::{Unschedulable, filter};
    use crate::fixture;
    use crate::score;
    use crate::snapshot::Snapshot;

    #[test]
    fn a_result_is_computed_again_only_after_a_change_of_its_node() {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        let mut memo: Memo<u8, usize> = Memo::default();
        let mut computed = 0;
        let mut read = |snapshot: &Snapshot, key: u8| -> Vec<usize> {
            let table = memo.table(|known| *known == key, || key);
            let nodes = snapshot.candidates();
            let results = nodes.map(|node| {
                *table.get(node.info.version(), || {
                    computed += 1;
                    computed
                })
            });
            results.collect()
        };
        assert_eq!(read(&snapshot, 0), [1, 2]);
        assert_eq!(read(&snapshot, 0), [1, 2]);
        snapshot.place(&fixture::pod("p", json!({})), "a");
        assert_eq!(read(&snapshot, 0), [3, 2]);
        snapshot.remove("p");
        assert_eq!(read(&snapshot, 0), [4, 2]);
        snapshot.set_node(&fixture::node("b", json!({})));
        assert_eq!(read(&snapshot, 0), [4, 2], "the node has not changed");
        snapshot.set_node(&fixture::node("b", json!({"/spec/unschedulable": true})));
        assert_eq!(read(&snapshot, 0), [4, 5]);
        snapshot.remove_node("a");
        snapshot.set_node(&fixture::node("c", json!({})));
        assert_eq!(read(&snapshot, 0), [5, 6], "another node has the slot of the first one");
        for key in 1..=4 {
            read(&snapshot, key);
        }
        assert_eq!(read(&snapshot, 0), [15, 16], "the key was replaced");
        assert_eq!(read(&snapshot, 4), [13, 14]);
    }

    /// Xorshift (Marsaglia, 2003).
    struct Chance(u64);

    impl Chance {
        fn below(&mut self, limit: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 11) % limit
        }

        fn one_of(&mut self, values: &[Value]) -> Value {
            let at = self.below(values.len() as u64);
            values[usize::try_from(at).unwrap()].clone()
        }
    }

    fn random_pod(chance: &mut Chance, name: &str) -> Pod {
        let requests =
            [json!({}), json!({"cpu": "500m"}), json!({"cpu": "1", "memory": "1Gi"}), json!({"x.io/y": "1"})];
        let ports = [json!([]), json!([{"containerPort": 80, "hostPort": 80}])];
        let tolerations = [json!([]), json!([{"key": "k", "operator": "Exists"}])];
        let selectors = [json!({}), json!({"disk": "ssd"})];
        let term = json!({"matchExpressions": [{"key": "disk", "operator": "Exists"}]});
        let preferred = json!([{"weight": 7, "preference": term}]);
        let affinity =
            json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}});
        let affinity = [json!({}), affinity];
        let spread = |way: &str| {
            json!([{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": way,
                "labelSelector": {"matchLabels": {"app": "web"}}}])
        };
        let spreads = [json!([]), spread("DoNotSchedule"), spread("ScheduleAnyway")];
        let container =
            json!({"resources": {"requests": chance.one_of(&requests)}, "ports": chance.one_of(&ports)});
        let spec = json!({
            "containers": [container],
            "tolerations": chance.one_of(&tolerations),
            "nodeSelector": chance.one_of(&selectors),
            "affinity": chance.one_of(&affinity),
            "topologySpreadConstraints": chance.one_of(&spreads),
        });
        let mut pod = fixture::pod(name, spec);
        let app = ["web", "other"][usize::from(chance.below(2) == 0)];
        pod.metadata.labels = Some([("app".to_owned(), app.to_owned())].into());
        pod
    }

    fn random_node(chance: &mut Chance, name: &str) -> crate::object::Node {
        let taint = |effect: &str| json!([{"key": "k", "effect": effect}]);
        let taints = [json!([]), json!([]), taint("NoSchedule"), taint("PreferNoSchedule")];
        let labels =
            [json!({"kubernetes.io/hostname": name}), json!({"kubernetes.io/hostname": name, "disk": "ssd"})];
        let fields = json!({
            "/spec/taints": chance.one_of(&taints),
            "/spec/unschedulable": chance.below(8) == 0,
            "/metadata/labels": chance.one_of(&labels),
        });
        fixture::node(name, fields)
    }

    /// The nodes with their total scores, or the reason why no node can run the pod.
    fn outcome(
        pod: &Pod,
        profile: &Profile,
        snapshot: &Snapshot,
    ) -> Result<Vec<(String, i64)>, Unschedulable> {
        let found = filter(pod, profile, snapshot, HashMap::new())?;
        if found.fitting.is_empty() {
            return Err(found.unschedulable());
        }
        let totals = score::totals(pod, profile, found.score_inputs(snapshot));
        let names = found.fitting.iter().map(|node| node.properties.name.clone());
        Ok(names.zip(totals).collect())
    }

    #[test]
    fn random_histories_have_the_same_decisions_without_results() {
        let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
        let mut snapshot = Snapshot::default();
        let packer = Profile {
            weights: crate::config::Weights { fit: 5, ..Default::default() },
            without_filters: ["NodePorts"].into(),
            ..Profile::default()
        };
        let profiles = [Profile::default(), packer];
        let mut decisions = 0;
        for number in 0..2000 {
            let name = format!("n{}", chance.below(6));
            match chance.below(8) {
                0 => snapshot.remove_node(&name),
                1 => {
                    snapshot.set_node(&random_node(&mut chance, &name));
                }
                2 => {
                    snapshot.remove(&format!("p{}", chance.below(40)));
                }
                _ => {
                    let uid = format!("p{}", chance.below(40));
                    let pod = random_pod(&mut chance, &uid);
                    let profile = &profiles[usize::from(chance.below(4) == 0)];
                    let found = outcome(&pod, profile, &snapshot);
                    let known = (
                        snapshot.outcomes.replace(Memo::default()),
                        snapshot.selected.replace(Memo::default()),
                    );
                    assert_eq!(found, outcome(&pod, profile, &snapshot), "step {number}");
                    (snapshot.outcomes, snapshot.selected) = (RefCell::new(known.0), RefCell::new(known.1));
                    if let Ok(nodes) = found {
                        decisions += 1;
                        let best = nodes.into_iter().max_by_key(|(_, total)| *total);
                        snapshot.place(&pod, &best.unwrap().0);
                    }
                }
            }
        }
        assert!(decisions > 100, "{decisions} pods were placed");
    }
}

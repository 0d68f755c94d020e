//! PodTopologySpread: pods are spread evenly over domains of nodes. Source: upstream's plugin of that name.

use std::collections::HashMap;

use coracle_values::label_selector::LabelSelector;
use coracle_values::object::ObjectExt;
use coracle_values::toleration::{forbids_scheduling, is_tolerated};
use k8s_openapi::api::core::v1::TopologySpreadConstraint;

use super::term::Labels;
use crate::filter::node_affinity;
use crate::object::Pod;
use crate::score::BEST;
use crate::snapshot::{Candidate, Snapshot};

const UNEVEN: &str = "node(s) didn't match pod topology spread constraints";
const NO_LABEL: &str = "node(s) didn't match pod topology spread constraints (missing required label)";

/// The constraints of a pod with the number of selected pods in each domain.
#[derive(Debug, Default)]
pub(super) struct Spread {
    required: Vec<Constraint>,
    preferred: Vec<Constraint>,
}

#[derive(Debug)]
struct Constraint {
    key: String,
    max_skew: i64,
    /// Pods by value of the node label, for every domain that an eligible node is in.
    counts: HashMap<String, i64>,
    /// The lowest count; 0 if there are fewer domains than `minDomains`.
    least: i64,
    /// 1 if the constraint selects its own pod.
    own: i64,
}

impl Spread {
    pub(super) fn of(pod: &Pod, snapshot: &Snapshot) -> Self {
        let all: Vec<&TopologySpreadConstraint> =
            pod.spec.topology_spread_constraints.iter().flatten().collect();
        if all.is_empty() {
            return Self::default();
        }
        let of = |way: &str| {
            let list: Vec<_> = all.iter().copied().filter(|one| one.when_unsatisfiable == way).collect();
            list.iter().map(|one| Constraint::of(pod, one, &list, snapshot)).collect()
        };
        Self { required: of("DoNotSchedule"), preferred: of("ScheduleAnyway") }
    }

    pub(super) fn refuse(&self, node: Candidate<'_>) -> Option<&'static str> {
        for constraint in &self.required {
            let Some(value) = node.facts.labels.get(&constraint.key) else { return Some(NO_LABEL) };
            let count = constraint.counts.get(value).copied().unwrap_or_default();
            if count + constraint.own - constraint.least > constraint.max_skew {
                return Some(UNEVEN);
            }
        }
        None
    }

    /// Scores: nodes in domains with fewer pods are better. A node without the label gets 0.
    pub(super) fn scores(&self, nodes: &[Candidate<'_>]) -> Vec<i64> {
        if self.preferred.is_empty() {
            return vec![0; nodes.len()];
        }
        let sum = |node: &Candidate<'_>| -> Option<i64> {
            self.preferred.iter().map(|constraint| constraint.weigh(node)).sum()
        };
        let sums: Vec<Option<i64>> = nodes.iter().map(sum).collect();
        let most = sums.iter().flatten().copied().max().unwrap_or_default();
        let least = sums.iter().flatten().copied().min().unwrap_or_default();
        let score = |sum: Option<i64>| match sum {
            None => 0,
            Some(_) if most == 0 => BEST,
            Some(sum) => BEST * (most + least - sum) / most,
        };
        sums.into_iter().map(score).collect()
    }
}

impl Constraint {
    fn of(
        pod: &Pod,
        constraint: &TopologySpreadConstraint,
        all: &[&TopologySpreadConstraint],
        snapshot: &Snapshot,
    ) -> Self {
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let selector = constraint.label_selector.as_ref().and_then(|one| LabelSelector::try_from(one).ok());
        let keys = || constraint.match_label_keys.iter().flatten();
        let selects = |other: &Labels| {
            let same = keys().all(|key| labels.get(key).is_none_or(|value| other.get(key) == Some(value)));
            same && selector.as_ref().is_some_and(|selector| selector.matches(Some(other)))
        };
        let mut counts: HashMap<String, i64> = HashMap::new();
        for node in snapshot.candidates().filter(|node| is_eligible(pod, constraint, all, *node)) {
            let Some(value) = node.facts.labels.get(&constraint.topology_key) else { continue };
            let others = node.info.neighbours();
            let count = others
                .filter(|other| {
                    other.namespace == pod.namespace() && !other.terminating && selects(&other.labels)
                })
                .count();
            *counts.entry(value.clone()).or_default() += i64::try_from(count).unwrap_or(i64::MAX);
        }
        let few =
            i64::try_from(counts.len()).unwrap_or(i64::MAX) < constraint.min_domains.unwrap_or(1).into();
        let least = if few { 0 } else { counts.values().copied().min().unwrap_or_default() };
        let own = i64::from(selects(&labels));
        let max_skew = constraint.max_skew.into();
        Self { key: constraint.topology_key.clone(), max_skew, counts, least, own }
    }

    /// The weighted number of pods in the node's domain. More domains weigh more, as in upstream.
    fn weigh(&self, node: &Candidate<'_>) -> Option<i64> {
        let value = node.facts.labels.get(&self.key)?;
        let count = self.counts.get(value).copied().unwrap_or_default();
        #[expect(clippy::cast_precision_loss, reason = "counts of pods and domains are small")]
        let weighed = count as f64 * ((self.counts.len() + 2) as f64).ln() + (self.max_skew - 1) as f64;
        #[expect(clippy::cast_possible_truncation, reason = "counts of pods and domains are small")]
        let rounded = weighed.round() as i64;
        Some(rounded)
    }
}

/// Whether the pods of a node count: it has the labels of all constraints, and the pod could run there.
fn is_eligible(
    pod: &Pod,
    constraint: &TopologySpreadConstraint,
    all: &[&TopologySpreadConstraint],
    node: Candidate<'_>,
) -> bool {
    let labelled = all.iter().all(|one| node.facts.labels.contains_key(&one.topology_key));
    let affinity = constraint.node_affinity_policy.as_deref() == Some("Ignore")
        || node_affinity::refuse(pod, node).is_empty();
    let tolerated = || {
        let mut taints = node.facts.taints.iter().filter(|taint| forbids_scheduling(taint));
        taints.all(|taint| is_tolerated(taint, pod.tolerations()))
    };
    let taints = constraint.node_taints_policy.as_deref() != Some("Honor") || tolerated();
    labelled && affinity && taints
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::Topology;
    use super::*;
    use crate::fixture;

    fn pod(name: &str, constraint: Value) -> Pod {
        let mut whole = json!({"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "web"}}});
        whole.as_object_mut().unwrap().extend(constraint.as_object().unwrap().clone());
        let mut pod = fixture::pod(name, json!({"topologySpreadConstraints": [whole]}));
        pod.metadata.labels = Some([("app".to_owned(), "web".to_owned())].into());
        pod
    }

    /// Two nodes in zone x, one in zone y, and one without zone. Two pods are in x.
    fn snapshot() -> Snapshot {
        let node = |name: &str, labels: Value| fixture::node(name, json!({"/metadata/labels": labels}));
        let mut snapshot = fixture::snapshot(&[
            node("a", json!({"zone": "x"})),
            node("b", json!({"zone": "x"})),
            node("c", json!({"zone": "y"})),
            node("d", json!({})),
        ]);
        snapshot.place(&pod("1", json!({})), "a");
        snapshot
    }

    fn fitting(pod: &Pod, snapshot: &Snapshot) -> String {
        let topology = Topology::of(pod, snapshot);
        let nodes = snapshot.candidates().filter(|node| topology.refusals(*node).is_empty());
        nodes.map(|node| node.facts.name.as_str()).collect()
    }

    #[test]
    fn pods_go_where_the_skew_allows_it() {
        let snapshot = snapshot();
        assert_eq!(fitting(&pod("2", json!({})), &snapshot), "c");
        assert_eq!(fitting(&pod("2", json!({"maxSkew": 2})), &snapshot), "abc");
        assert_eq!(fitting(&pod("2", json!({"minDomains": 3})), &snapshot), "c");
        let other = json!({"labelSelector": {"matchLabels": {"app": "other"}}});
        assert_eq!(fitting(&pod("2", other), &snapshot), "abc");
        let topology = Topology::of(&pod("2", json!({})), &snapshot);
        let refusals = |place: usize| topology.refusals(snapshot.candidates().nth(place).unwrap());
        assert_eq!((refusals(0), refusals(3)), (vec![UNEVEN.to_owned()], vec![NO_LABEL.to_owned()]));
    }

    #[test]
    fn a_preferred_constraint_only_scores() {
        let snapshot = snapshot();
        let soft = pod("2", json!({"whenUnsatisfiable": "ScheduleAnyway"}));
        assert_eq!(fitting(&soft, &snapshot), "abcd");
        let nodes: Vec<_> = snapshot.candidates().collect();
        assert_eq!(Topology::of(&soft, &snapshot).spread.scores(&nodes), [0, 0, 100, 0]);
    }
}

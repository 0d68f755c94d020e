//! PodTopologySpread: pods are distributed evenly over domains of nodes. Source: upstream's plugin of that name.

use std::collections::{BTreeMap, HashMap};

use coracle_values::label_selector::{LabelSelector, Requirement};
use coracle_values::object::ObjectExt;
use coracle_values::toleration::{forbids_scheduling, is_tolerated};
use k8s_openapi::api::core::v1::TopologySpreadConstraint;

use crate::config::SpreadDefaults;
use crate::filter::node_affinity;
use crate::memo::PodSelection;
use crate::node_score::MAX_NODE_SCORE;
use crate::object::Pod;
use crate::placed::Placed;
use crate::snapshot::{Candidate, Snapshot};

const UNEVEN: &str = "node(s) didn't match pod topology spread constraints";
const NO_LABEL: &str = "node(s) didn't match pod topology spread constraints (missing required label)";

/// The label whose domains have one node each.
const HOSTNAME: &str = "kubernetes.io/hostname";
/// Upstream's default constraints: node label and maximum skew. They affect only scores.
const DEFAULTS: [(&str, i32); 2] = [(HOSTNAME, 3), ("topology.kubernetes.io/zone", 5)];

/// The constraints of a pod.
#[derive(Debug, Default)]
pub(super) struct Spread {
    required: Vec<Required>,
    preferred: Vec<Constraint>,
    /// Whether nodes without the label of a preferred constraint are ignored. False for upstream's default constraints.
    needs_all_labels: bool,
}

/// A constraint with the number of selected pods in each domain.
#[derive(Debug)]
struct Required {
    constraint: Constraint,
    /// Numbers of pods by value of the node label, for every domain that has an eligible node.
    counts: HashMap<String, i64>,
    /// Number of domains by their count of pods.
    domains: BTreeMap<i64, usize>,
    /// Count of the pod itself: 1 if the constraint selects the pod that has the constraint, otherwise 0.
    own: i64,
}

#[derive(Debug)]
struct Constraint {
    key: String,
    max_skew: i64,
    min_domains: i64,
    /// The selector of pods. `None` selects no pod.
    selector: Option<LabelSelector>,
    namespace: String,
    honors_affinity: bool,
    honors_taints: bool,
}

/// The numbers of pods for the score by one preferred constraint.
struct DomainCounts {
    /// The number of pods in the domain of each fitting node.
    pods: Vec<i64>,
    /// The weight of a pod. It increases with the number of domains.
    weight: f64,
}

// === impl Spread ===

impl Spread {
    pub(super) fn of(pod: &Pod, defaults: &SpreadDefaults, snapshot: &Snapshot) -> Self {
        let all = pod.spec.topology_spread_constraints.as_deref().unwrap_or_default();
        let (all, selector) = match defaults {
            _ if !all.is_empty() => (all, None),
            defaults => match (defaults, snapshot.selectors.of_pod(pod)) {
                (_, None) => return Self::default(),
                (SpreadDefaults::System, Some(selector)) => {
                    let preferred = system_constraints(pod, &selector);
                    return Self { preferred, ..Self::default() };
                }
                (SpreadDefaults::List(list), selector) => (list.as_slice(), selector),
            },
        };
        let of = |action: &str| -> Vec<Constraint> {
            let wanted = all.iter().filter(|one| one.when_unsatisfiable == action);
            wanted.map(|one| Constraint::of(pod, one, selector.as_ref())).collect()
        };
        let required = Required::count(pod, of("DoNotSchedule"), snapshot);
        Self { required, preferred: of("ScheduleAnyway"), needs_all_labels: true }
    }

    /// Whether the pod has no required constraint.
    pub(super) fn has_no_filter(&self) -> bool {
        self.required.is_empty()
    }

    /// Whether the constraints prefer some nodes.
    pub(super) fn has_score(&self) -> bool {
        !self.preferred.is_empty()
    }

    /// The reason why the node is refused, and whether the removal of pods can change this result.
    pub(super) fn refuse(&self, node: Candidate<'_>) -> Option<(&'static str, bool)> {
        for required in &self.required {
            let Some(value) = node.properties.labels.get(&required.constraint.key) else {
                return Some((NO_LABEL, false));
            };
            let count = required.counts.get(value).copied().unwrap_or_default();
            if count + required.own - required.least() > required.constraint.max_skew {
                return Some((UNEVEN, true));
            }
        }
        None
    }

    #[cfg(test)]
    pub(super) fn filters_as(&self, other: &Self) -> bool {
        let pairs = self.required.iter().zip(&other.required);
        self.required.len() == other.required.len()
            && pairs
                .into_iter()
                .all(|(one, other)| one.counts == other.counts && one.domains == other.domains)
    }

    /// Counts a pod that is added to a node (`change` 1) or removed from it (-1), for the filter. Scores do not change.
    pub(super) fn update(&mut self, pod: &Pod, node: Candidate<'_>, other: &Placed, change: i64) {
        let labels = &node.properties.labels;
        if !self.required.iter().all(|required| labels.contains_key(&required.constraint.key)) {
            return;
        }
        for required in &mut self.required {
            let constraint = &required.constraint;
            if let Some(value) = labels.get(&constraint.key)
                && constraint.selects(other)
                && constraint.includes(pod, node)
            {
                required.add(value, change);
            }
        }
    }

    /// Scores: nodes in domains with fewer pods get higher scores. A node without a needed label gets 0.
    pub(super) fn scores(&self, pod: &Pod, nodes: &[Candidate<'_>], snapshot: &Snapshot) -> Vec<i64> {
        if self.preferred.is_empty() {
            return vec![0; nodes.len()];
        }
        let counts = self.counts(pod, nodes, snapshot);
        let sum = |(place, node): (usize, &Candidate<'_>)| -> Option<i64> {
            if !self.is_labelled(*node) {
                return None;
            }
            let pairs = self.preferred.iter().zip(&counts);
            Some(rounded(pairs.map(|(constraint, counts)| constraint.weigh(*node, counts, place)).sum()))
        };
        let sums: Vec<Option<i64>> = nodes.iter().enumerate().map(sum).collect();
        let most = sums.iter().flatten().copied().max().unwrap_or_default();
        let least = sums.iter().flatten().copied().min().unwrap_or_default();
        let score = |sum: Option<i64>| match sum {
            None => 0,
            Some(_) if most == 0 => MAX_NODE_SCORE,
            Some(sum) => MAX_NODE_SCORE * (most + least - sum) / most,
        };
        sums.into_iter().map(score).collect()
    }

    /// Whether the node has the labels of all preferred constraints, or need not have them.
    fn is_labelled(&self, node: Candidate<'_>) -> bool {
        !self.needs_all_labels
            || self.preferred.iter().all(|one| node.properties.labels.contains_key(&one.key))
    }

    /// Numbers of pods in the domains of the fitting nodes, by preferred constraint. As in upstream, a node without the
    /// label is in the domain of the empty value. The domains of `kubernetes.io/hostname` have one node each.
    fn counts<'a>(&self, pod: &Pod, nodes: &[Candidate<'a>], snapshot: &'a Snapshot) -> Vec<DomainCounts> {
        let count = |constraint: &Constraint| {
            if constraint.key == HOSTNAME {
                let mut pods = Vec::with_capacity(nodes.len());
                constraint.count(nodes.iter().copied(), snapshot, |_node, count| pods.push(count));
                let domains = nodes.iter().filter(|node| self.is_labelled(**node)).count();
                return DomainCounts::new(pods, domains);
            }
            let mut counts: HashMap<&str, i64> = HashMap::new();
            let value =
                |node: Candidate<'a>| node.properties.labels.get(&constraint.key).map_or("", String::as_str);
            counts.extend(nodes.iter().filter(|node| self.is_labelled(**node)).map(|node| (value(*node), 0)));
            let counted = |node: &Candidate<'_>| self.is_labelled(*node) && constraint.includes(pod, *node);
            constraint.count(snapshot.candidates().filter(counted), snapshot, |node, pods| {
                if let Some(count) = counts.get_mut(value(node)) {
                    *count += pods;
                }
            });
            let pods = nodes.iter().map(|node| counts.get(value(*node)).copied().unwrap_or_default());
            DomainCounts::new(pods.collect(), counts.len())
        };
        self.preferred.iter().map(count).collect()
    }
}

/// Upstream's default constraints, for the pods that the services and the workload of the pod select.
fn system_constraints(pod: &Pod, selector: &LabelSelector) -> Vec<Constraint> {
    let constraint = |(key, max_skew): (&str, i32)| Constraint {
        key: key.to_owned(),
        max_skew: max_skew.into(),
        min_domains: 1,
        selector: Some(selector.clone()),
        namespace: pod.namespace().to_owned(),
        honors_affinity: true,
        honors_taints: false,
    };
    DEFAULTS.into_iter().map(constraint).collect()
}

// === impl Required ===

impl Required {
    fn count(pod: &Pod, constraints: Vec<Constraint>, snapshot: &Snapshot) -> Vec<Self> {
        let mut counts: Vec<HashMap<String, i64>> = vec![HashMap::new(); constraints.len()];
        let labelled = |node: Candidate<'_>| {
            constraints.iter().all(|constraint| node.properties.labels.contains_key(&constraint.key))
        };
        for (constraint, counts) in constraints.iter().zip(&mut counts) {
            let counted = |node: &Candidate<'_>| labelled(*node) && constraint.includes(pod, *node);
            constraint.count(snapshot.candidates().filter(counted), snapshot, |node, pods| {
                if let Some(value) = node.properties.labels.get(&constraint.key) {
                    *counts.entry(value.clone()).or_default() += pods;
                }
            });
        }
        let labels = pod.metadata.labels.as_ref();
        let required = |(constraint, counts): (Constraint, HashMap<String, i64>)| {
            let mut domains: BTreeMap<i64, usize> = BTreeMap::new();
            for count in counts.values() {
                *domains.entry(*count).or_default() += 1;
            }
            let own =
                i64::from(constraint.selector.as_ref().is_some_and(|selector| selector.matches(labels)));
            Self { constraint, counts, domains, own }
        };
        constraints.into_iter().zip(counts).map(required).collect()
    }

    /// The lowest count. 0 if there are fewer domains than `minDomains`.
    fn least(&self) -> i64 {
        let few = i64::try_from(self.counts.len()).is_ok_and(|domains| domains < self.constraint.min_domains);
        if few { 0 } else { self.domains.keys().next().copied().unwrap_or_default() }
    }

    fn add(&mut self, domain: &str, change: i64) {
        let Some(count) = self.counts.get_mut(domain) else { return };
        if let Some(domains) = self.domains.get_mut(count) {
            *domains -= 1;
            if *domains == 0 {
                self.domains.remove(count);
            }
        }
        *count += change;
        *self.domains.entry(*count).or_default() += 1;
    }
}

// === impl Constraint ===

impl Constraint {
    /// A constraint of a pod, or a default constraint with this selector.
    fn of(pod: &Pod, constraint: &TopologySpreadConstraint, default: Option<&LabelSelector>) -> Self {
        let mut selector =
            constraint.label_selector.as_ref().and_then(|one| LabelSelector::try_from(one).ok());
        if let Some(selector) = &mut selector {
            let labels = pod.metadata.labels.as_ref();
            let keys = constraint.match_label_keys.iter().flatten();
            let own = keys.filter_map(|key| Some(Requirement::Equal(key.clone(), labels?.get(key)?.clone())));
            selector.requirements.extend(own);
        }
        Self {
            selector: default.cloned().or(selector),
            key: constraint.topology_key.clone(),
            max_skew: constraint.max_skew.into(),
            min_domains: constraint.min_domains.unwrap_or(1).into(),
            namespace: pod.namespace().to_owned(),
            honors_affinity: constraint.node_affinity_policy.as_deref() != Some("Ignore"),
            honors_taints: constraint.node_taints_policy.as_deref() == Some("Honor"),
        }
    }

    /// Whether the pods of a node count. The policies `nodeAffinityPolicy` and `nodeTaintsPolicy` can exclude nodes on
    /// which this pod cannot run.
    fn includes(&self, pod: &Pod, node: Candidate<'_>) -> bool {
        let tolerated = || {
            let mut taints = node.properties.taints.iter().filter(|taint| forbids_scheduling(taint));
            taints.all(|taint| is_tolerated(taint, pod.tolerations()))
        };
        (!self.honors_affinity || node_affinity::refuse(pod, node).is_empty())
            && (!self.honors_taints || tolerated())
    }

    /// Calls `add` with the number of selected pods on each node. As in upstream, a selector without requirements
    /// selects no pod. For equal constraints only the pods of changed nodes are counted again.
    fn count<'a>(
        &self,
        nodes: impl Iterator<Item = Candidate<'a>>,
        snapshot: &Snapshot,
        mut add: impl FnMut(Candidate<'a>, i64),
    ) {
        let Some(selector) = self.selector.as_ref().filter(|selector| !selector.is_empty()) else {
            return nodes.for_each(|node| add(node, 0));
        };
        let mut selected = snapshot.selected.borrow_mut();
        let is_equal =
            |known: &PodSelection| known.namespace == self.namespace && known.selector == *selector;
        let key = || PodSelection { namespace: self.namespace.clone(), selector: selector.clone() };
        let table = selected.table(is_equal, key);
        for node in nodes {
            add(node, *table.get(node.info.version(), || self.pods_on(node)));
        }
    }

    /// Number of selected pods on a node.
    fn pods_on(&self, node: Candidate<'_>) -> i64 {
        let selected = node.info.pods().filter(|other| self.selects(other));
        i64::try_from(selected.count()).unwrap_or(i64::MAX)
    }

    fn selects(&self, other: &Placed) -> bool {
        let selector = self.selector.as_ref().filter(|selector| !selector.is_empty());
        other.namespace == self.namespace
            && !other.terminating
            && selector.is_some_and(|selector| selector.matches(Some(&other.labels)))
    }

    /// The weighted number of pods in the domain of the fitting node. `place` is the index of the node.
    fn weigh(&self, node: Candidate<'_>, counts: &DomainCounts, place: usize) -> f64 {
        if !node.properties.labels.contains_key(&self.key) {
            return 0.0;
        }
        let pods = counts.pods.get(place).copied().unwrap_or_default();
        #[expect(clippy::cast_precision_loss, reason = "counts of pods are small")]
        let weighed = pods as f64 * counts.weight + (self.max_skew - 1) as f64;
        weighed
    }
}

// === impl DomainCounts ===

impl DomainCounts {
    fn new(pods: Vec<i64>, domains: usize) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "the number of domains is small")]
        let weight = ((domains + 2) as f64).ln();
        Self { pods, weight }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "counts of pods and domains are small")]
fn rounded(score: f64) -> i64 {
    score.round() as i64
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use coracle_values::object::Key;

    use super::super::Topology;
    use super::*;
    use crate::config::Profile;
    use crate::fixture;

    fn pod(name: &str, constraint: Value) -> Pod {
        let mut whole = json!({"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "web"}}});
        whole.as_object_mut().unwrap().extend(constraint.as_object().unwrap().clone());
        let mut pod = fixture::pod(name, json!({"topologySpreadConstraints": [whole]}));
        pod.metadata.labels = Some([("app".to_owned(), "web".to_owned())].into());
        pod
    }

    /// Two nodes in zone x, one in zone y, and one without zone. A pod runs in zone x.
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
        let topology = Topology::of(pod, &Profile::default(), snapshot);
        let nodes = snapshot.candidates().filter(|node| topology.refusals(*node).is_empty());
        nodes.map(|node| node.properties.name.as_str()).collect()
    }

    #[test]
    fn pods_go_where_the_skew_allows_it() {
        let snapshot = snapshot();
        assert_eq!(fitting(&pod("2", json!({})), &snapshot), "c");
        assert_eq!(fitting(&pod("2", json!({"maxSkew": 2})), &snapshot), "abc");
        assert_eq!(fitting(&pod("2", json!({"minDomains": 3})), &snapshot), "c");
        let other = json!({"labelSelector": {"matchLabels": {"app": "other"}}});
        assert_eq!(fitting(&pod("2", other), &snapshot), "abc");
        let topology = Topology::of(&pod("2", json!({})), &Profile::default(), &snapshot);
        let refusals = |place: usize| topology.refusals(snapshot.candidates().nth(place).unwrap());
        assert_eq!((refusals(0), refusals(3)), (vec![UNEVEN.to_owned()], vec![NO_LABEL.to_owned()]));
    }

    #[test]
    fn fewer_domains_than_the_minimum_count_as_an_empty_domain() {
        let mut snapshot = snapshot();
        snapshot.place(&pod("3", json!({})), "c");
        for (constraint, nodes) in
            [(json!({}), "abc"), (json!({"minDomains": 2}), "abc"), (json!({"minDomains": 3}), "")]
        {
            assert_eq!(fitting(&pod("2", constraint), &snapshot), nodes);
        }
    }

    #[test]
    fn nodes_that_the_pod_cannot_use_count_by_the_policies_of_the_constraint() {
        let node = |name: &str, fields: Value| {
            let mut all = json!({"/metadata/labels": {"zone": name}});
            all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            fixture::node(name, all)
        };
        let taints = json!([{"key": "k", "effect": "NoSchedule"}]);
        let labels = json!({"zone": "c", "disk": "hdd"});
        let mut snapshot = fixture::snapshot(&[
            node("a", json!({})),
            node("b", json!({"/spec/taints": taints})),
            node("c", json!({"/metadata/labels": labels})),
        ]);
        snapshot.place(&pod("1", json!({})), "a");
        // The empty nodes b and c have the lowest number of pods, unless a policy excludes them.
        let on_a = |policies: Value, selector: Value| {
            let mut pod = pod("2", policies);
            pod.spec.node_selector = serde_json::from_value(selector).unwrap();
            fitting(&pod, &snapshot).contains('a')
        };
        let (none, zone_a) = (json!(null), json!({"zone": "a"}));
        assert!(!on_a(json!({}), none.clone()));
        assert!(on_a(json!({}), zone_a.clone()), "by default, the node selector counts");
        assert!(!on_a(json!({"nodeAffinityPolicy": "Ignore"}), zone_a));
        let honor = json!({"nodeTaintsPolicy": "Honor"});
        assert!(!on_a(honor.clone(), none), "c has no taint");
        snapshot.remove_node("c");
        let fits = |policies: Value| fitting(&pod("2", policies), &snapshot).contains('a');
        assert!(!fits(json!({})), "by default, taints do not count");
        assert!(fits(honor));
    }

    #[test]
    fn a_preferred_constraint_only_scores() {
        let snapshot = snapshot();
        let soft = pod("2", json!({"whenUnsatisfiable": "ScheduleAnyway"}));
        assert_eq!(fitting(&soft, &snapshot), "abcd");
        let nodes: Vec<_> = snapshot.candidates().collect();
        assert_eq!(
            Topology::of(&soft, &Profile::default(), &snapshot).spread.scores(&soft, &nodes, &snapshot),
            [0, 0, 100, 0]
        );
    }

    #[test]
    fn pods_of_a_workload_and_of_a_service_spread_without_constraints() {
        let node = |name: &str| fixture::node(name, json!({}));
        let mut snapshot = fixture::snapshot(&[node("a"), node("b"), node("c")]);
        let labelled = |name: &str| {
            let mut pod = fixture::owned(name, "set");
            pod.metadata.namespace = Some("d".to_owned());
            pod.metadata.labels = Some([("app".to_owned(), "web".to_owned())].into());
            pod
        };
        let scores = |snapshot: &Snapshot| {
            let (pod, nodes) = (labelled("new"), snapshot.candidates().collect::<Vec<_>>());
            Topology::of(&pod, &Profile::default(), snapshot).spread.scores(&pod, &nodes, snapshot)
        };
        snapshot.place(&labelled("1"), "a");
        snapshot.place(&labelled("2"), "a");
        assert_eq!(scores(&snapshot), [0; 3], "no workload and no service is known");
        let selector = json!({"matchLabels": {"app": "web"}});
        snapshot.selectors.set_workload(
            "ReplicaSet",
            Key::new("d", "set"),
            &serde_json::from_value(selector).unwrap(),
        );
        assert_eq!(scores(&snapshot), [40, 100, 100]);
        snapshot.selectors.remove_workload("ReplicaSet", &Key::new("d", "set"));
        assert_eq!(scores(&snapshot), [0; 3]);
        snapshot.selectors.set_service(Key::new("d", "web"), [("app".to_owned(), "web".to_owned())].into());
        assert_ne!(scores(&snapshot), [0; 3]);
    }
}

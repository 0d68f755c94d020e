//! InterPodAffinity: required and preferred affinity and anti-affinity. Source: upstream's plugin of that name.

use std::collections::HashMap;

use coracle_values::object::ObjectExt;

use crate::affinity_term::{Labels, PodTerms, Term};
use crate::config::AffinityArgs;
use crate::node_score::MAX_NODE_SCORE;
use crate::object::Pod;
use crate::placed::Placed;
use crate::snapshot::{Candidate, PodWithAffinity, Snapshot};

const AFFINITY: &str = "node(s) didn't match pod affinity rules";
const ANTI_AFFINITY: &str = "node(s) didn't match pod anti-affinity rules";
const EXISTING: &str = "node(s) didn't satisfy existing pods anti-affinity rules";

/// A node label with its value.
type Domain = (String, String);

/// The affinity of a pod, with the domains of the pods that it selects.
#[derive(Debug, Default)]
pub(super) struct Affinity {
    /// The node label of each required affinity term.
    keys: Vec<String>,
    /// The affinity terms of the pod.
    own: PodTerms,
    namespace: String,
    labels: Labels,
    /// The number of pods that all affinity terms select, by domain. A pod counts once for each term.
    near: HashMap<Domain, usize>,
    /// Whether the pod selects itself, so that the first pod of a group can be placed.
    selects_itself: bool,
    /// The number of pods that anti-affinity terms select, by domain.
    far: HashMap<Domain, usize>,
    /// The number of anti-affinity terms of other pods that exclude this pod, by domain.
    excluded: HashMap<Domain, usize>,
    /// Sums of the weights of preferred terms by domain.
    weights: HashMap<Domain, i64>,
    /// Whether the filter accepts every node: the pod has no required term, and no other pod excludes this pod.
    /// Upstream then skips the plugin for this pod, and does not read the terms of pods that are added later.
    is_skipped: bool,
}

impl Affinity {
    pub(super) fn of(pod: &Pod, args: &AffinityArgs, snapshot: &Snapshot) -> Self {
        let own = PodTerms::of(pod).unwrap_or_default();
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let namespaces = &snapshot.namespaces;
        let selects =
            |term: &Term, namespace: &str, labels: &Labels| term.selects(namespace, labels, namespaces);
        let selects_pod = |term: &Term| selects(term, pod.namespace(), &labels);
        let mut found = Self {
            keys: own.near.iter().map(|term| term.key.clone()).collect(),
            selects_itself: own.near.iter().all(selects_pod),
            ..Self::default()
        };
        for other in snapshot.with_affinity().filter(|other| other.uid != pod.uid()) {
            let PodWithAffinity { terms, node, .. } = other;
            let excluding = terms.far.iter().filter(|term| selects_pod(term));
            count(&mut found.excluded, node, excluding, 1);
            if args.ignores_others && own.preferred.is_empty() {
                continue;
            }
            // Preferred terms of other pods count. Their required affinity terms count too, with HardPodAffinityWeight.
            let required = terms.near.iter().map(|term| (term, args.required_weight));
            let preferred = terms.preferred.iter().map(|(term, weight)| (term, *weight));
            for (term, weight) in
                required.chain(preferred).filter(|(term, weight)| *weight != 0 && selects_pod(term))
            {
                found.weigh(node, &term.key, weight);
            }
        }
        found.namespace = pod.namespace().to_owned();
        found.is_skipped = found.excluded.is_empty() && own.near.is_empty() && own.far.is_empty();
        if own.near.is_empty() && own.far.is_empty() && own.preferred.is_empty() {
            found.labels = labels;
            return found;
        }
        for node in snapshot.candidates() {
            for other in node.info.pods() {
                let is = |term: &Term| selects(term, &other.namespace, &other.labels);
                if !own.near.is_empty() && own.near.iter().all(is) {
                    count(&mut found.near, node, own.near.iter(), 1);
                }
                count(&mut found.far, node, own.far.iter().filter(|term| is(term)), 1);
                for (term, weight) in own.preferred.iter().filter(|(term, _)| is(term)) {
                    found.weigh(node, &term.key, *weight);
                }
            }
        }
        (found.own, found.labels) = (own, labels);
        found
    }

    /// Counts a pod that is added to a node (`change` 1) or removed from it (-1), for the filter. Scores do not change.
    pub(super) fn update(&mut self, node: Candidate<'_>, other: &Placed, snapshot: &Snapshot, change: isize) {
        if self.is_skipped {
            return;
        }
        let Self { own, namespace, labels, near, far, excluded, .. } = self;
        let is = |term: &Term| term.selects(&other.namespace, &other.labels, &snapshot.namespaces);
        if !own.near.is_empty() && own.near.iter().all(is) {
            count(near, node, own.near.iter(), change);
        }
        count(far, node, own.far.iter().filter(|term| is(term)), change);
        let others = other.terms().into_iter().flat_map(|terms| &terms.far);
        let excluding = others.filter(|term| term.selects(namespace, labels, &snapshot.namespaces));
        count(excluded, node, excluding, change);
    }

    pub(super) fn is_skipped(&self) -> bool {
        self.is_skipped
    }

    /// Whether the affinity prefers some nodes.
    pub(super) fn has_score(&self) -> bool {
        !self.weights.is_empty()
    }

    /// Makes the filter accept every node. The pod must not have required terms.
    pub(super) fn skip(&mut self) {
        self.excluded.clear();
        self.is_skipped = true;
    }

    fn weigh(&mut self, node: Candidate<'_>, key: &str, weight: i64) {
        if let Some(domain) = domain(node, key) {
            *self.weights.entry(domain).or_default() += weight;
        }
    }

    #[cfg(test)]
    pub(super) fn filters_as(&self, other: &Self) -> bool {
        self.near == other.near && self.far == other.far && self.excluded == other.excluded
    }

    /// The reason why the node is refused, and whether the removal of pods can change this result.
    pub(super) fn refuse(&self, node: Candidate<'_>) -> Option<(&'static str, bool)> {
        let near = |key: &String| match domain(node, key) {
            // The terms select no existing pod. A pod that its own terms select may then be placed on any node with the
            // label.
            Some(_) if self.near.is_empty() => self.selects_itself,
            Some(domain) => self.near.contains_key(&domain),
            None => false,
        };
        if !self.keys.iter().all(near) {
            return Some((AFFINITY, false));
        }
        if !of_node(&self.far, node).is_empty() {
            return Some((ANTI_AFFINITY, true));
        }
        (!of_node(&self.excluded, node).is_empty()).then_some((EXISTING, true))
    }

    /// The score of each node: its sum of weights, scaled so that the lowest sum gets 0 and the highest
    /// [`MAX_NODE_SCORE`].
    pub(super) fn scores(&self, nodes: &[Candidate<'_>]) -> Vec<i64> {
        if self.weights.is_empty() {
            return vec![0; nodes.len()];
        }
        let sum = |node: &Candidate<'_>| -> i64 { of_node(&self.weights, *node).into_iter().sum() };
        let sums: Vec<i64> = nodes.iter().map(sum).collect();
        let least = sums.iter().copied().min().unwrap_or_default();
        let range = sums.iter().copied().max().unwrap_or_default() - least;
        sums.into_iter().map(|sum| if range > 0 { scaled(sum - least, range) } else { 0 }).collect()
    }
}

/// `part` of `whole` from 0 to [`MAX_NODE_SCORE`], rounded down after upstream's division of floating-point numbers.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "weights and counts are small"
)]
fn scaled(part: i64, whole: i64) -> i64 {
    (MAX_NODE_SCORE as f64 * (part as f64 / whole as f64)) as i64
}

/// Adds or removes one pod in the node's domain of each term.
fn count<'a>(
    counts: &mut HashMap<Domain, usize>,
    node: Candidate<'_>,
    terms: impl Iterator<Item = &'a Term>,
    change: isize,
) {
    for domain in terms.filter_map(|term| domain(node, &term.key)) {
        let count = counts.entry(domain.clone()).or_default();
        *count = count.saturating_add_signed(change);
        if *count == 0 {
            counts.remove(&domain);
        }
    }
}

/// The values of the domains that the node is in. Only these domains are read. With a label such as
/// `kubernetes.io/hostname`, each node has its own domain. The cost of all domains for each node would be quadratic.
fn of_node<'a, V>(domains: &'a HashMap<Domain, V>, node: Candidate<'_>) -> Vec<&'a V> {
    if domains.is_empty() {
        return Vec::new();
    }
    let labels = &node.properties.labels;
    if domains.len() > labels.len() {
        let own = labels.iter().map(|(key, value)| (key.clone(), value.clone()));
        return own.filter_map(|domain| domains.get(&domain)).collect();
    }
    let own = domains.iter().filter(|((key, value), _)| labels.get(key) == Some(value));
    own.map(|(_, value)| value).collect()
}

fn domain(node: Candidate<'_>, key: &str) -> Option<Domain> {
    node.properties.labels.get(key).map(|value| (key.to_owned(), value.clone()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{PodChange, Topology};
    use crate::config::Profile;
    use crate::fixture;
    use crate::object::Pod;
    use crate::snapshot::Snapshot;

    fn pod(name: &str, app: &str, affinity: Value) -> Pod {
        let mut pod = fixture::pod(name, json!({"affinity": affinity}));
        pod.metadata.labels = Some([("app".to_owned(), app.to_owned())].into());
        pod
    }

    fn term(app: &str, key: &str) -> Value {
        json!({"labelSelector": {"matchLabels": {"app": app}}, "topologyKey": key})
    }

    fn required(side: &str, app: &str, key: &str) -> Value {
        json!({(side): {"requiredDuringSchedulingIgnoredDuringExecution": [term(app, key)]}})
    }

    /// Nodes a and b in zone x, node c in zone y.
    fn snapshot() -> Snapshot {
        let node = |name: &str, zone: &str| {
            fixture::node(name, json!({"/metadata/labels": {"kubernetes.io/hostname": name, "zone": zone}}))
        };
        fixture::snapshot(&[node("a", "x"), node("b", "x"), node("c", "y")])
    }

    /// The nodes that can run the pod.
    fn fitting(pod: &Pod, snapshot: &Snapshot) -> String {
        let topology = Topology::of(pod, &Profile::default(), snapshot);
        let nodes = snapshot.candidates().filter(|node| topology.refusals(*node).is_empty());
        nodes.map(|node| node.properties.name.as_str()).collect()
    }

    #[test]
    fn anti_affinity_works_in_both_directions() {
        let mut snapshot = snapshot();
        let alone = |name: &str| pod(name, "db", required("podAntiAffinity", "db", "zone"));
        assert_eq!(fitting(&alone("1"), &snapshot), "abc");
        snapshot.place(&alone("1"), "a");
        assert_eq!(fitting(&alone("2"), &snapshot), "c");
        // The existing pod also excludes pods without anti-affinity of their own.
        assert_eq!(fitting(&pod("3", "db", Value::Null), &snapshot), "c");
        assert_eq!(fitting(&pod("4", "web", Value::Null), &snapshot), "abc");
        let topology = Topology::of(&pod("3", "db", Value::Null), &Profile::default(), &snapshot);
        let first = snapshot.candidates().next().unwrap();
        assert_eq!(topology.refusals(first), ["node(s) didn't satisfy existing pods anti-affinity rules"]);
        snapshot.remove("1");
        assert_eq!(fitting(&pod("3", "db", Value::Null), &snapshot), "abc");
    }

    #[test]
    fn the_domains_of_a_node_are_found_among_few_and_many() {
        for count in [1, 2, 3, 20] {
            let names: Vec<String> = (0..=count).map(|number| format!("n{number:02}")).collect();
            let nodes = names.iter().map(|name| {
                fixture::node(
                    name,
                    json!({"/metadata/labels": {"kubernetes.io/hostname": name, "zone": "x"}}),
                )
            });
            let mut snapshot = fixture::snapshot(&nodes.collect::<Vec<_>>());
            let own = required("podAntiAffinity", "db", "kubernetes.io/hostname");
            for name in &names[..count] {
                snapshot.place(&pod(name, "db", own.clone()), name);
            }
            for own in [own, Value::Null] {
                assert_eq!(fitting(&pod("new", "db", own), &snapshot), names[count], "{count} domains");
            }
        }
    }

    #[test]
    fn an_added_pod_excludes_only_pods_whose_affinity_is_not_skipped() {
        let mut snapshot = snapshot();
        let alone = pod("alone", "db", required("podAntiAffinity", "db", "zone"));
        let of = |pod: &Pod, snapshot: &Snapshot| Topology::of(pod, &Profile::default(), snapshot);
        let incoming =
            [Value::Null, required("podAntiAffinity", "web", "zone")].map(|own| pod("new", "db", own));
        let counted = incoming.each_ref().map(|pod| of(pod, &snapshot));
        snapshot.place(&alone, "a");
        let node = snapshot.candidate("a").unwrap();
        let added = snapshot.placed_pod("a", "alone").unwrap();
        for ((pod, mut topology), refused) in incoming.iter().zip(counted).zip([false, true]) {
            topology.update(pod, PodChange { node, other: added, is_added: true }, &snapshot);
            assert_eq!(!topology.refusals(node).is_empty(), refused);
        }
    }

    #[test]
    fn affinity_joins_a_group_and_the_first_pod_begins_it() {
        let mut snapshot = snapshot();
        assert_eq!(fitting(&pod("1", "web", required("podAffinity", "db", "zone")), &snapshot), "");
        assert_eq!(fitting(&pod("1", "db", required("podAffinity", "db", "zone")), &snapshot), "abc");
        assert_eq!(fitting(&pod("1", "db", required("podAffinity", "db", "rack")), &snapshot), "");
        snapshot.place(&pod("1", "db", Value::Null), "b");
        assert_eq!(fitting(&pod("2", "web", required("podAffinity", "db", "zone")), &snapshot), "ab");
        assert_eq!(
            fitting(&pod("2", "web", required("podAffinity", "db", "kubernetes.io/hostname")), &snapshot),
            "b"
        );
    }

    #[test]
    fn contradictory_terms_fit_no_node_beside_a_selected_pod() {
        let mut snapshot = snapshot();
        let contradictory = |name: &str| {
            let mut affinity = required("podAffinity", "db", "zone");
            affinity["podAntiAffinity"] =
                required("podAntiAffinity", "db", "zone")["podAntiAffinity"].clone();
            pod(name, "db", affinity)
        };
        assert_eq!(fitting(&contradictory("1"), &snapshot), "abc", "the first pod selects itself");
        snapshot.place(&contradictory("1"), "a");
        assert_eq!(fitting(&contradictory("2"), &snapshot), "");
        assert_eq!(fitting(&pod("3", "web", Value::Null), &snapshot), "abc");
    }

    #[test]
    fn namespaces_are_selected_by_name_or_by_label() {
        let mut snapshot = snapshot();
        let mut other = pod("1", "db", Value::Null);
        other.metadata.namespace = Some("other".into());
        snapshot.place(&other, "a");
        let with = |field: &str, value: Value| {
            let mut term = term("db", "zone");
            term[field] = value;
            pod(
                "2",
                "web",
                json!({"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}),
            )
        };
        assert_eq!(fitting(&pod("2", "web", required("podAffinity", "db", "zone")), &snapshot), "");
        assert_eq!(fitting(&with("namespaces", json!(["other"])), &snapshot), "ab");
        assert_eq!(fitting(&with("namespaceSelector", json!({})), &snapshot), "ab");
        let labelled = with("namespaceSelector", json!({"matchLabels": {"team": "t"}}));
        assert_eq!(fitting(&labelled, &snapshot), "");
        snapshot.namespaces.insert("other".into(), [("team".to_owned(), "t".to_owned())].into());
        assert_eq!(fitting(&labelled, &snapshot), "ab");
    }

    #[test]
    fn preferred_terms_score_the_nodes() {
        let mut snapshot = snapshot();
        snapshot.place(&pod("1", "db", Value::Null), "a");
        let weighted = |side: &str| {
            let term = json!([{"weight": 10, "podAffinityTerm": term("db", "zone")}]);
            pod("2", "web", json!({(side): {"preferredDuringSchedulingIgnoredDuringExecution": term}}))
        };
        let nodes: Vec<_> = snapshot.candidates().collect();
        let scores = |pod: &Pod| Topology::of(pod, &Profile::default(), &snapshot).affinity.scores(&nodes);
        assert_eq!(scores(&weighted("podAffinity")), [100, 100, 0]);
        assert_eq!(scores(&weighted("podAntiAffinity")), [0, 0, 100]);
    }
}

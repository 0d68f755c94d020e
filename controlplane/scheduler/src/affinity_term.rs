//! Terms of pod affinity and anti-affinity.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use coracle_values::label_selector::LabelSelector;
use coracle_values::object::ObjectExt;
use k8s_openapi::api::core::v1::{PodAffinityTerm, WeightedPodAffinityTerm};

use crate::object::Pod;

/// Labels of an object.
pub(crate) type Labels = BTreeMap<String, String>;

/// A term: the pods that it selects, and the node label that groups nodes into domains.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Term {
    pub(crate) key: String,
    selector: Option<LabelSelector>,
    namespaces: BTreeSet<String>,
    namespace_selector: Option<LabelSelector>,
    own_labels: Vec<OwnLabel>,
}

/// A label of the term's own pod that restricts the selected pods, from `matchLabelKeys` or `mismatchLabelKeys`.
#[derive(Clone, Debug, PartialEq)]
struct OwnLabel {
    key: String,
    value: String,
    /// Whether a selected pod must have the label with this value. If false, a selected pod must not have the label
    /// with this value.
    is_equal: bool,
}

impl Term {
    /// A term of this pod. A term without namespaces selects pods in the pod's namespace.
    pub(crate) fn of(pod: &Pod, term: &PodAffinityTerm) -> Self {
        let parse = |selector: &Option<_>| {
            selector.as_ref().and_then(|selector| LabelSelector::try_from(selector).ok())
        };
        let mut namespaces: BTreeSet<String> = term.namespaces.iter().flatten().cloned().collect();
        if namespaces.is_empty() && term.namespace_selector.is_none() {
            namespaces.insert(pod.namespace().to_owned());
        }
        let own = |key: &String, is_equal: bool| {
            let value = pod.metadata.labels.as_ref()?.get(key)?;
            Some(OwnLabel { key: key.clone(), value: value.clone(), is_equal })
        };
        let equal = term.match_label_keys.iter().flatten().filter_map(|key| own(key, true));
        let other = term.mismatch_label_keys.iter().flatten().filter_map(|key| own(key, false));
        Self {
            key: term.topology_key.clone(),
            selector: parse(&term.label_selector),
            namespaces,
            namespace_selector: parse(&term.namespace_selector),
            own_labels: equal.chain(other).collect(),
        }
    }

    /// Whether the term selects a pod with this namespace and these labels. `all` has the labels of each namespace. A
    /// term without selector selects no pod.
    pub(crate) fn selects(&self, namespace: &str, labels: &Labels, all: &HashMap<String, Labels>) -> bool {
        let named = self.namespaces.contains(namespace);
        let selected = || {
            self.namespace_selector
                .as_ref()
                .is_some_and(|selector| selector.is_empty() || selector.matches(all.get(namespace)))
        };
        let fits = |own: &OwnLabel| (labels.get(&own.key) == Some(&own.value)) == own.is_equal;
        (named || selected())
            && self.selector.as_ref().is_some_and(|selector| selector.matches(Some(labels)))
            && self.own_labels.iter().all(fits)
    }
}

/// The affinity and anti-affinity of a pod to other pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PodTerms {
    /// Required affinity.
    pub(crate) near: Vec<Term>,
    /// Required anti-affinity.
    pub(crate) far: Vec<Term>,
    /// Preferred terms with their weights. The weights of anti-affinity terms are negative.
    pub(crate) preferred: Vec<(Term, i64)>,
}

impl PodTerms {
    /// The terms of a pod. `None` if the pod has no terms.
    pub(crate) fn of(pod: &Pod) -> Option<Self> {
        let affinity = pod.spec.affinity.as_ref()?;
        let (near, far) = (affinity.pod_affinity.as_ref(), affinity.pod_anti_affinity.as_ref());
        let required = |terms: Option<&Vec<PodAffinityTerm>>| -> Vec<Term> {
            terms.into_iter().flatten().map(|term| Term::of(pod, term)).collect()
        };
        let preferred = |terms: Option<&Vec<WeightedPodAffinityTerm>>, sign: i64| -> Vec<(Term, i64)> {
            let terms = terms.into_iter().flatten();
            terms
                .map(|term| (Term::of(pod, &term.pod_affinity_term), sign * i64::from(term.weight)))
                .collect()
        };
        let mut weighted = preferred(
            near.and_then(|near| near.preferred_during_scheduling_ignored_during_execution.as_ref()),
            1,
        );
        weighted.extend(preferred(
            far.and_then(|far| far.preferred_during_scheduling_ignored_during_execution.as_ref()),
            -1,
        ));
        let terms = Self {
            near: required(
                near.and_then(|near| near.required_during_scheduling_ignored_during_execution.as_ref()),
            ),
            far: required(
                far.and_then(|far| far.required_during_scheduling_ignored_during_execution.as_ref()),
            ),
            preferred: weighted,
        };
        let is_empty = terms.near.is_empty() && terms.far.is_empty() && terms.preferred.is_empty();
        (!is_empty).then_some(terms)
    }
}

//! Terms of pod affinity and anti-affinity.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use coracle_values::label_selector::LabelSelector;
use coracle_values::object::ObjectExt;
use k8s_openapi::api::core::v1::PodAffinityTerm;

use crate::object::Pod;

/// Labels of an object.
pub(crate) type Labels = BTreeMap<String, String>;

/// A term: which pods it selects, and the node label by which nodes are grouped.
#[derive(Clone, Debug)]
pub(crate) struct Term {
    pub(crate) key: String,
    selector: Option<LabelSelector>,
    namespaces: BTreeSet<String>,
    namespace_selector: Option<LabelSelector>,
    /// Labels that the selected pod must have with this value (true), or must not have with it (false).
    own_labels: Vec<(String, String, bool)>,
}

impl Term {
    /// A term of this pod. Without namespaces it selects in the pod's own namespace.
    pub(crate) fn of(pod: &Pod, term: &PodAffinityTerm) -> Self {
        let parse = |selector: &Option<_>| {
            selector.as_ref().and_then(|selector| LabelSelector::try_from(selector).ok())
        };
        let mut namespaces: BTreeSet<String> = term.namespaces.iter().flatten().cloned().collect();
        if namespaces.is_empty() && term.namespace_selector.is_none() {
            namespaces.insert(pod.namespace().to_owned());
        }
        let own = |key: &String, equal: bool| {
            let value = pod.metadata.labels.as_ref()?.get(key)?;
            Some((key.clone(), value.clone(), equal))
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

    /// Whether the term selects a pod with this namespace and these labels. A term without selector selects none.
    pub(crate) fn selects(&self, namespace: &str, labels: &Labels, all: &HashMap<String, Labels>) -> bool {
        let named = self.namespaces.contains(namespace);
        let selected = || {
            self.namespace_selector
                .as_ref()
                .is_some_and(|selector| selector.is_empty() || selector.matches(all.get(namespace)))
        };
        let fits = |(key, value, equal): &(String, String, bool)| (labels.get(key) == Some(value)) == *equal;
        (named || selected())
            && self.selector.as_ref().is_some_and(|selector| selector.matches(Some(labels)))
            && self.own_labels.iter().all(fits)
    }
}

/// The terms of a pod's required anti-affinity.
pub(crate) fn anti_affinity(pod: &Pod) -> Vec<Term> {
    let anti = pod.spec.affinity.as_ref().and_then(|affinity| affinity.pod_anti_affinity.as_ref());
    let terms = anti.and_then(|anti| anti.required_during_scheduling_ignored_during_execution.as_ref());
    terms.into_iter().flatten().map(|term| Term::of(pod, term)).collect()
}

//! Selectors of services and workloads, for upstream's default spread constraints.
//!
//! Source: `DefaultSelector` of upstream's plugin helpers.

pub(crate) mod feed;

use std::collections::{BTreeMap, HashMap, HashSet};

use coracle_values::label_selector::{LabelSelector, Requirement, has_all};
use coracle_values::object::{Key, ObjectExt, controller_of};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector as ApiLabelSelector;

use crate::affinity_term::Labels;
use crate::object::Pod;

/// The selectors of the cluster.
#[derive(Debug, Default)]
pub(crate) struct Selectors {
    /// Services with a selector, by namespace and name.
    services: HashMap<String, BTreeMap<String, Labels>>,
    /// Workloads of each kind.
    workloads: HashMap<&'static str, HashMap<Key, LabelSelector>>,
    /// The objects in the current list of a kind, until it is complete.
    listing: HashMap<&'static str, HashSet<Key>>,
    /// Kinds that were listed once.
    listed: HashSet<&'static str>,
}

impl Selectors {
    /// Adds a service or its newer version.
    pub(crate) fn set_service(&mut self, key: Key, selector: Labels) {
        self.services.entry(key.namespace).or_default().insert(key.name, selector);
    }

    /// Removes a service.
    pub(crate) fn remove_service(&mut self, key: &Key) {
        if let Some(services) = self.services.get_mut(&key.namespace) {
            services.remove(&key.name);
            if services.is_empty() {
                self.services.remove(&key.namespace);
            }
        }
    }

    /// Adds a workload or its newer version. An invalid selector counts as absent.
    pub(crate) fn set_workload(&mut self, kind: &'static str, key: Key, selector: &ApiLabelSelector) {
        match LabelSelector::try_from(selector) {
            Ok(selector) => drop(self.workloads.entry(kind).or_default().insert(key, selector)),
            Err(_) => self.remove_workload(kind, &key),
        }
    }

    /// Removes a workload.
    pub(crate) fn remove_workload(&mut self, kind: &'static str, key: &Key) {
        if let Some(workloads) = self.workloads.get_mut(kind) {
            workloads.remove(key);
        }
    }

    /// Removes the objects of a kind that a complete list does not have.
    fn retain(&mut self, kind: &'static str, listed: &HashSet<Key>) {
        if kind == feed::SERVICE {
            for (namespace, services) in &mut self.services {
                services.retain(|name, _| listed.contains(&Key::new(namespace, name)));
            }
            self.services.retain(|_, services| !services.is_empty());
        } else if let Some(workloads) = self.workloads.get_mut(kind) {
            workloads.retain(|key, _| listed.contains(key));
        }
    }

    /// The combined selector of the pod's workload and of all services that select the pod. `None` if it has no
    /// requirement.
    pub(crate) fn of_pod(&self, pod: &Pod) -> Option<LabelSelector> {
        let services = self.services.get(pod.namespace()).into_iter().flat_map(BTreeMap::values);
        let labels = pod.metadata.labels.as_ref();
        let mut merged = Labels::new();
        for selector in services.filter(|selector| has_all(labels, Some(*selector))) {
            merged.extend(selector.iter().map(|(key, value)| (key.clone(), value.clone())));
        }
        let equal = merged.into_iter().map(|(key, value)| Requirement::Equal(key, value));
        let mut requirements: Vec<Requirement> = equal.collect();
        if let Some(owner) = controller_of(&pod.metadata) {
            let key = Key::new(pod.namespace(), &owner.name);
            let workloads = match (owner.api_version.as_str(), owner.kind.as_str()) {
                ("apps/v1", kind @ ("ReplicaSet" | "StatefulSet"))
                | ("v1", kind @ "ReplicationController") => self.workloads.get(kind),
                _ => None,
            };
            let workload = workloads.and_then(|workloads| workloads.get(&key));
            requirements.extend(workload.into_iter().flat_map(|selector| selector.requirements.clone()));
        }
        (!requirements.is_empty()).then_some(LabelSelector { requirements })
    }
}

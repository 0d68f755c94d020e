//! The watches of services and workloads.

use std::collections::HashSet;

use coracle_values::object::Key;
use coracle_values::resource;
use coracle_watch::{Config, Event};
use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::Client;
use serde::Deserialize;

use super::Selectors;
use crate::affinity_term::Labels;
use crate::watch::stream;

/// Number of watched kinds.
const KINDS: usize = 4;
pub(super) const SERVICE: &str = "Service";

/// A change of the selectors of one kind.
pub(crate) enum Change {
    /// A list of the kind begins.
    Begin(&'static str),
    Set(&'static str, Key, LabelSelector),
    Remove(&'static str, Key),
    /// The list of a kind is complete: objects that are not in the list were deleted.
    Listed(&'static str),
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Service {
    metadata: ObjectMeta,
    spec: Plain,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ReplicationController {
    metadata: ObjectMeta,
    spec: Plain,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ReplicaSet {
    metadata: ObjectMeta,
    spec: Structured,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct StatefulSet {
    metadata: ObjectMeta,
    spec: Structured,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Plain {
    selector: Option<Labels>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Structured {
    selector: Option<LabelSelector>,
}

resource!(Service, "", "services", NamespaceResourceScope);
resource!(ReplicationController, "", "replicationcontrollers", NamespaceResourceScope);
resource!(ReplicaSet, "apps", "replicasets", NamespaceResourceScope);
resource!(StatefulSet, "apps", "statefulsets", NamespaceResourceScope);

impl Plain {
    fn selector(&self) -> Option<LabelSelector> {
        Some(LabelSelector { match_labels: Some(self.selector.clone()?), match_expressions: None })
    }
}

/// The changes of all kinds.
pub(crate) fn changes(client: &Client) -> BoxStream<'static, Change> {
    let kinds = [
        of(client, SERVICE, |service: &Service| service.spec.selector()),
        of(client, "ReplicationController", |one: &ReplicationController| one.spec.selector()),
        of(client, "ReplicaSet", |set: &ReplicaSet| set.spec.selector.clone()),
        of(client, "StatefulSet", |set: &StatefulSet| set.spec.selector.clone()),
    ];
    futures::stream::select_all(kinds).boxed()
}

fn of<K>(
    client: &Client,
    kind: &'static str,
    selector: fn(&K) -> Option<LabelSelector>,
) -> BoxStream<'static, Change>
where
    K: kube::Resource<DynamicType = ()> + serde::de::DeserializeOwned + Send + 'static,
{
    let key = |object: &K| Key::of(object.meta());
    let set = move |object: &K| match selector(object) {
        Some(selector) => Change::Set(kind, key(object), selector),
        None => Change::Remove(kind, key(object)),
    };
    let change = move |event| match event {
        Event::Init => Change::Begin(kind),
        Event::InitApply(object) | Event::Apply(object) => set(&object),
        Event::Delete(object) => Change::Remove(kind, key(&object)),
        Event::InitDone => Change::Listed(kind),
    };
    stream::<K>(client, Config::control_plane()).map(change).boxed()
}

impl Selectors {
    /// Applies a change. While a kind is listed again, pods are scheduled with the former selectors: without them, the
    /// pods of a workload would not be spread.
    pub(crate) fn apply(&mut self, change: Change) {
        match change {
            Change::Begin(kind) => drop(self.listing.insert(kind, HashSet::new())),
            Change::Set(kind, key, selector) => {
                if let Some(listed) = self.listing.get_mut(kind) {
                    listed.insert(key.clone());
                }
                match kind {
                    SERVICE => self.set_service(key, selector.match_labels.unwrap_or_default()),
                    _ => self.set_workload(kind, key, &selector),
                }
            }
            Change::Remove(SERVICE, key) => self.remove_service(&key),
            Change::Remove(kind, key) => self.remove_workload(kind, &key),
            Change::Listed(kind) => {
                let listed = self.listing.remove(kind).unwrap_or_default();
                self.retain(kind, &listed);
                self.listed.insert(kind);
            }
        }
    }

    /// Whether each kind was listed once.
    pub(crate) fn is_complete(&self) -> bool {
        self.listed.len() >= KINDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(kind: &'static str, name: &str) -> Change {
        let labels = [("app".to_owned(), name.to_owned())].into();
        let selector = LabelSelector { match_labels: Some(labels), match_expressions: None };
        Change::Set(kind, Key::new("d", name), selector)
    }

    fn names(selectors: &Selectors, kind: &str) -> Vec<String> {
        let services = selectors.services.values().flat_map(|services| services.keys().cloned());
        let workloads = selectors.workloads.get(kind).into_iter().flat_map(|workloads| workloads.keys());
        let mut names: Vec<String> = match kind {
            SERVICE => services.collect(),
            _ => workloads.map(|key| key.name.clone()).collect(),
        };
        names.sort();
        names
    }

    #[test]
    fn the_former_selectors_are_used_until_a_new_list_is_complete() {
        for kind in [SERVICE, "ReplicaSet"] {
            let mut selectors = Selectors::default();
            for change in [Change::Begin(kind), set(kind, "a"), set(kind, "b"), Change::Listed(kind)] {
                selectors.apply(change);
            }
            selectors.apply(set(kind, "c"));
            assert_eq!(names(&selectors, kind), ["a", "b", "c"]);
            selectors.apply(Change::Begin(kind));
            selectors.apply(set(kind, "d"));
            assert_eq!(names(&selectors, kind), ["a", "b", "c", "d"], "while the list is incomplete");
            // An interrupted list starts again from the beginning.
            for change in [Change::Begin(kind), set(kind, "b"), set(kind, "c"), Change::Listed(kind)] {
                selectors.apply(change);
            }
            assert_eq!(names(&selectors, kind), ["b", "c"]);
            assert!(!selectors.is_complete(), "one kind was listed twice");
        }
    }
}

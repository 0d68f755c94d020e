//! The watches of services and workloads.

use coracle_values::object::Key;
use coracle_values::resource;
use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::Client;
use kube::runtime::watcher::Event;
use serde::Deserialize;

use super::Selectors;
use crate::affinity_term::Labels;
use crate::watch::{stream, watch_config};

/// Number of watched kinds.
const KINDS: usize = 4;
const SERVICE: &str = "Service";

/// A change of the selectors of one kind.
pub(crate) enum Change {
    /// A new list of the kind begins.
    Clear(&'static str),
    Set(&'static str, Key, LabelSelector),
    Remove(&'static str, Key),
    /// The list of the kind is complete.
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
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    let key = |object: &K| Key::of(object.meta());
    let set = move |object: &K| match selector(object) {
        Some(selector) => Change::Set(kind, key(object), selector),
        None => Change::Remove(kind, key(object)),
    };
    let change = move |event| match event {
        Event::Init => Change::Clear(kind),
        Event::InitApply(object) | Event::Apply(object) => set(&object),
        Event::Delete(object) => Change::Remove(kind, key(&object)),
        Event::InitDone => Change::Listed(kind),
    };
    stream::<K>(client, watch_config()).map(change).boxed()
}

impl Selectors {
    /// Applies a change.
    pub(crate) fn apply(&mut self, change: Change) {
        match change {
            Change::Clear(SERVICE) => self.clear_services(),
            Change::Clear(kind) => self.clear_workloads(kind),
            Change::Set(SERVICE, key, selector) => {
                self.set_service(key, selector.match_labels.unwrap_or_default());
            }
            Change::Set(kind, key, selector) => self.set_workload(kind, key, &selector),
            Change::Remove(SERVICE, key) => self.remove_service(&key),
            Change::Remove(kind, key) => self.remove_workload(kind, &key),
            Change::Listed(kind) => {
                self.listed.insert(kind);
            }
        }
    }

    /// Whether each kind was listed at least once.
    pub(crate) fn is_complete(&self) -> bool {
        self.listed.len() >= KINDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_lists_of_one_kind_do_not_replace_those_of_the_others() {
        let mut selectors = Selectors::default();
        for _ in 0..KINDS {
            selectors.apply(Change::Clear(SERVICE));
            selectors.apply(Change::Listed(SERVICE));
        }
        assert!(!selectors.is_complete());
        for kind in ["ReplicationController", "ReplicaSet", "StatefulSet"] {
            selectors.apply(Change::Listed(kind));
        }
        assert!(selectors.is_complete());
    }
}

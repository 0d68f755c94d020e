//! Counts of pods by controller and labels, updated with each change of a pod.
//!
//! With these counts, a reconcile of a replica set does not read all pods of the set. Otherwise the work of a rollout
//! would be quadratic in the number of pods. The pods of one set usually have the same labels and form one group.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_values::label_selector::Labels;

use crate::cache::Cache;
use crate::object::{ObjectExt, Pod, controller_of};

/// Pods with the same labels and controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Group {
    /// Pods that are neither finished nor being deleted.
    pub(crate) active: usize,
    /// Active pods that are ready.
    pub(crate) ready: usize,
    /// Pods that are being deleted and are not finished.
    pub(crate) terminating: usize,
}

/// Groups by labels.
pub(crate) type Groups = HashMap<Labels, Group>;

/// Groups by namespace and by the uid of the controller. The uid is empty for orphaned pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct PodCounts(Arc<Mutex<HashMap<String, HashMap<String, Groups>>>>);

impl PodCounts {
    /// Starts to count the pods of a cache. Must be called before handlers that read the counts are registered.
    pub(crate) fn follow(&self, pods: &Cache<Pod>) {
        let counts = self.clone();
        pods.on_change_and_now(move |change| {
            let mut all = counts.lock();
            if let Some(old) = change.old {
                count(&mut all, old, |number| *number = number.saturating_sub(1));
            }
            if let Some(new) = change.new {
                count(&mut all, new, |number| *number += 1);
            }
        });
    }

    /// Reads the groups of one controller. An empty uid selects the orphaned pods.
    pub(crate) fn read<R>(&self, namespace: &str, uid: &str, read: impl FnOnce(&Groups) -> R) -> R {
        let all = self.lock();
        match all.get(namespace).and_then(|owners| owners.get(uid)) {
            Some(groups) => read(groups),
            None => read(&Groups::new()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, HashMap<String, Groups>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Changes the counts of the pod's group. Pods of other workloads are not counted: their counts are not used, and each
/// pod may have its own labels.
fn count(all: &mut HashMap<String, HashMap<String, Groups>>, pod: &Pod, change: impl Fn(&mut usize)) {
    let owner = controller_of(&pod.metadata);
    let is_counted =
        owner.is_none_or(|owner| matches!(owner.kind.as_str(), "ReplicaSet" | "ReplicationController"));
    if !is_counted || pod.finished() {
        return;
    }
    let uid = owner.map(|owner| owner.uid.as_str()).unwrap_or_default();
    let owners = all.entry(pod.namespace().to_owned()).or_default();
    let groups = owners.entry(uid.to_owned()).or_default();
    let labels = pod.metadata.labels.clone().unwrap_or_default();
    let group = groups.entry(labels.clone()).or_default();
    if pod.is_being_deleted() {
        change(&mut group.terminating);
    } else {
        change(&mut group.active);
        if pod.ready_since().is_some() {
            change(&mut group.ready);
        }
    }
    if group.active == 0 && group.terminating == 0 {
        groups.remove(&labels);
    }
    if groups.is_empty() {
        owners.remove(uid);
    }
    if owners.is_empty() {
        all.remove(pod.namespace());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use coracle_watch::Event;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::json;

    fn pod(name: &str, app: &str, ready: &str, version: u64) -> Pod {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs", "controller": true});
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "d", "uid": name, "labels": {"app": app},
                "resourceVersion": version.to_string(), "ownerReferences": [owner]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]},
        }))
        .unwrap()
    }

    #[test]
    fn counts_follow_the_changes_of_pods() {
        let (cache, counts) = (Cache::new(), PodCounts::default());
        cache.apply(Event::Apply(pod("a", "x", "True", 1)));
        counts.follow(&cache);
        let read = |uid: &str| {
            counts.read("d", uid, |groups| {
                let mut all: Vec<_> =
                    groups.iter().map(|(labels, one)| (labels["app"].clone(), *one)).collect();
                all.sort_by(|one, other| one.0.cmp(&other.0));
                all
            })
        };
        cache.apply(Event::Apply(pod("b", "x", "False", 2)));
        assert_eq!(read("rs"), [("x".to_owned(), Group { active: 2, ready: 1, terminating: 0 })]);
        cache.apply(Event::Apply(pod("b", "y", "True", 3)));
        let one = Group { active: 1, ready: 1, terminating: 0 };
        assert_eq!(read("rs"), [("x".to_owned(), one), ("y".to_owned(), one)]);
        let mut ending = pod("a", "x", "True", 4);
        ending.metadata.deletion_timestamp = Some(Time("2026-01-01T12:00:00Z".parse().unwrap()));
        cache.apply(Event::Apply(ending.clone()));
        assert_eq!(read("rs")[0].1, Group { active: 0, ready: 0, terminating: 1 });
        cache.apply(Event::Delete(ending));
        let mut done = pod("b", "y", "False", 5);
        done.status.phase = Some("Failed".to_owned());
        cache.apply(Event::Apply(done));
        assert!(read("rs").is_empty() && read("").is_empty());
        assert!(counts.lock().is_empty());
    }
}

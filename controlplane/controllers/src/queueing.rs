//! Functions of several controllers that queue the objects affected by a change.

mod selecting;

use std::sync::Arc;

use coracle_values::label_selector::LabelSelector;

use crate::cache::{Cache, Change};
use crate::context::Context;
use crate::object::{Key, Object, Pod, controller_of};
use crate::queue::Queue;

pub(crate) use self::selecting::Selecting;

/// Queues each changed object of a kind.
pub(crate) fn queue_changed<K: Object>(cache: &Cache<K>, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    cache.on_change(move |change| {
        if let Some(object) = change.latest() {
            own.add(object.key());
        }
    });
}

/// Queues each object of a kind that was added or modified. Deleted objects are not queued.
pub(crate) fn queue_stored<K: Object>(cache: &Cache<K>, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    cache.on_change(move |change| {
        if let Some(object) = change.new {
            own.add(object.key());
        }
    });
}

/// Queues the controlling pod of each deleted object: the pod's reconcile creates the object again.
pub(crate) fn queue_pod_of_deleted<K: Object>(cache: &Cache<K>, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    cache.on_change(move |change| {
        if let Some(pod) = pod_of_deleted(change) {
            own.add(pod);
        }
    });
}

/// The pod that controls an object, if the object was deleted.
fn pod_of_deleted<K: Object>(change: &Change<'_, K>) -> Option<Key> {
    let (Some(old), None) = (change.old, change.new) else { return None };
    let owner = controller_of(old.meta()).filter(|owner| owner.kind == "Pod")?;
    Some(Key::new(old.namespace(), &owner.name))
}

/// The pods that a workload controls and its selector matches. Reads only the workload's pods.
pub(crate) fn own_pods<K: Object>(context: &Context, owner: &K, selector: &LabelSelector) -> Vec<Arc<Pod>> {
    let pods = context.caches.pods.owned_by(owner.namespace(), owner.uid());
    pods.into_iter().filter(|pod| selector.matches(pod.metadata.labels.as_ref())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_pod_of_a_deleted_object_is_queued() {
        let owned = |kind: &str| -> Arc<Pod> {
            let owners =
                json!([{"apiVersion": "v1", "kind": kind, "name": "p", "uid": "u", "controller": true}]);
            let object =
                json!({"metadata": {"name": "o", "namespace": "d", "uid": "o", "ownerReferences": owners}});
            Arc::new(serde_json::from_value(object).unwrap())
        };
        let (of_pod, of_set) = (owned("Pod"), owned("StatefulSet"));
        let pod = Some(Key::new("d", "p"));
        assert_eq!(pod_of_deleted(&Change { old: Some(&of_pod), new: None }), pod);
        assert_eq!(pod_of_deleted(&Change { old: Some(&of_pod), new: Some(&of_pod) }), None);
        assert_eq!(pod_of_deleted(&Change { old: Some(&of_set), new: None }), None);
    }
}

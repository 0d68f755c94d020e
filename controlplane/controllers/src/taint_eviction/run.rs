//! Evicts pods that do not tolerate a NoExecute taint of their node, or whose toleration has expired.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Taint;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::plan::{self, Due};
use crate::context::Context;
use crate::error::{Error, is_not_found};
use crate::object::{Key, Node, ObjectExt, Pod};
use crate::pod_control::disruption_target;
use crate::queue::{Next, Queue, until};
use coracle_events::Event;
use coracle_values::toleration::evicts;

const COMPONENT: &str = "taint-eviction-controller";
const REASON: &str = "TaintManagerEviction";

/// Pods by key, with their uids.
type Pods = HashMap<Key, String>;

/// The evictions of each node. A node without evictions has no entry.
#[derive(Debug, Default)]
pub(crate) struct Pending(Mutex<HashMap<Key, Evictions>>);

/// The evictions of one node.
#[derive(Debug, Default)]
struct Evictions {
    /// The pods that must be evicted now or at a known time.
    pods: Pods,
    /// The NoExecute taints, each with a time.
    taints: Vec<Taint>,
}

// === impl Pending ===

impl Pending {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Evictions>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the evictions of a node. Returns the pods that are not evicted any more.
    fn replace(&self, node: &Key, evictions: Evictions) -> Pods {
        let mut all = self.lock();
        let mut left = all.remove(node).unwrap_or_default().pods;
        left.retain(|key, uid| evictions.pods.get(key) != Some(uid));
        if !evictions.pods.is_empty() {
            all.insert(node.clone(), evictions);
        }
        left
    }

    /// The NoExecute taints of a node, from all its `taints`. Each returned taint has a time. kube-apiserver does not
    /// set `timeAdded` of a taint that a user adds. Such a taint gets the time at which it was read first.
    fn dated(&self, node: &Key, taints: &[Taint], now: Timestamp) -> Vec<Taint> {
        let all = self.lock();
        let known = all.get(node).map(|known| known.taints.as_slice()).unwrap_or_default();
        let date = |taint: &Taint| {
            let known = known.iter().find(|known| known.key == taint.key && known.value == taint.value);
            let known = known.and_then(|known| known.time_added.clone());
            let time = taint.time_added.clone().or(known).unwrap_or(Time(now));
            Taint { time_added: Some(time), ..taint.clone() }
        };
        taints.iter().filter(|taint| evicts(taint)).map(date).collect()
    }
}

/// Queues nodes with changed NoExecute taints, including deleted nodes that had such taints. Queues nodes with such
/// taints when a pod on them is added, or its eviction may change.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, _pending: &Arc<Pending>) {
    let own = queue.clone();
    context.caches.nodes.on_change(move |change| {
        let Some(node) = change.latest() else { return };
        let taints = |node: &Arc<Node>| {
            node.taints().iter().filter(|taint| evicts(taint)).cloned().collect::<Vec<_>>()
        };
        if change.new.map(taints).unwrap_or_default() != change.old.map(taints).unwrap_or_default() {
            own.add(node.key());
        }
    });
    let (own, nodes) = (queue.clone(), context.caches.nodes.clone());
    context.caches.pods.on_change(move |change| {
        // A reconcile reads all pods, and most changes of a pod are changes of its status.
        if change.old.zip(change.new).is_some_and(|(old, new)| is_evicted_alike(old, new)) {
            return;
        }
        let node = change.new.and_then(|pod| pod.spec.node_name.as_deref());
        let node = node.and_then(|node| nodes.get(&Key::new("", node)));
        if let Some(node) = node.filter(|node| node.taints().iter().any(evicts)) {
            own.add(node.key());
        }
    });
}

/// Whether two states of a pod have the same eviction.
fn is_evicted_alike(old: &Pod, new: &Pod) -> bool {
    old.uid() == new.uid()
        && old.spec.node_name == new.spec.node_name
        && old.spec.tolerations == new.spec.tolerations
        && old.bound_since() == new.bound_since()
        && old.is_being_deleted() == new.is_being_deleted()
}

/// Evicts the pods of one node whose toleration has expired. Returns the time of the next expiry.
pub(crate) async fn reconcile(context: &Context, pending: &Pending, key: Key) -> Result<Next, Error> {
    let Some(node) = context.caches.nodes.get(&key) else {
        // The pods of a deleted node are deleted too, so no eviction is reported as cancelled.
        drop(pending.replace(&key, Evictions::default()));
        return Ok(Next::Wait);
    };
    if !node.taints().iter().any(evicts) {
        report_cancelled(context, pending.replace(&key, Evictions::default()));
        return Ok(Next::Wait);
    }
    let pods = context.caches.pods.all().into_iter();
    let pods =
        pods.filter(|pod| pod.spec.node_name.as_deref() == Some(node.name()) && !pod.is_being_deleted());
    let (mut next, mut failed, mut due) = (None, None, Pods::new());
    let taints = pending.dated(&key, node.taints(), Timestamp::now());
    for pod in pods {
        let now = Timestamp::now();
        let Due::At(end) = plan::due(&taints, &pod.spec.tolerations, pod.bound_since(), now) else {
            continue;
        };
        due.insert(pod.key(), pod.uid().to_owned());
        match until(end, now) {
            Some(wait) => next = Some(next.map_or(wait, |next: std::time::Duration| next.min(wait))),
            // A failed eviction does not prevent the other evictions.
            None => {
                let message = format!("Marking for deletion Pod {}", pod.key());
                let eviction = Eviction {
                    component: COMPONENT,
                    event: Event::normal(REASON, message),
                    reason: "DeletionByTaintManager",
                    message: "Taint manager: deleting due to NoExecute taint",
                };
                failed = evict(context, &pod, eviction).await.err().or(failed);
            }
        }
    }
    report_cancelled(context, pending.replace(&key, Evictions { pods: due, taints }));
    match failed {
        Some(error) => Err(error),
        None => Ok(next.map_or(Next::Wait, Next::After)),
    }
}

/// Records an event about each of these pods that still runs: the taint is gone, or the pod tolerates it now.
fn report_cancelled(context: &Context, pods: Pods) {
    for (key, uid) in pods {
        let pod = context.caches.pods.get(&key);
        if let Some(pod) = pod.filter(|pod| pod.uid() == uid && pod.is_active()) {
            let message = format!("Cancelling deletion of Pod {key}");
            context.record(&*pod, COMPONENT, Event::normal(REASON, message));
        }
    }
}

/// The event and the condition of an evicted pod.
pub(crate) struct Eviction {
    /// The component that records the event.
    pub(crate) component: &'static str,
    pub(crate) event: Event,
    /// Reason of the condition `DisruptionTarget`.
    pub(crate) reason: &'static str,
    /// Message of the condition.
    pub(crate) message: &'static str,
}

/// Deletes a pod, with an event and the condition `DisruptionTarget`.
pub(crate) async fn evict(context: &Context, pod: &Pod, eviction: Eviction) -> Result<(), Error> {
    let Eviction { component, event, reason, message } = eviction;
    let failed = |verb| {
        let object = format!("Pod {}", pod.key());
        move |source| Error::Request { verb, object, source }
    };
    context.record(pod, component, event);
    let condition = disruption_target(pod, reason, message, Timestamp::now());
    let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"conditions": [condition]}});
    let pods: Api<Pod> = Api::namespaced(context.client.clone(), pod.namespace());
    match pods.patch_status(pod.name(), &PatchParams::default(), &Patch::Strategic(patch)).await {
        Err(error) if !is_not_found(&error) => return Err(failed("patch")(error)),
        Ok(_) | Err(_) => {}
    }
    context.pods().delete(pod, DeleteParams::default()).await.map_err(failed("delete"))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn an_eviction_is_pending_until_the_pod_tolerates_the_taint_or_the_taint_is_gone() {
        let api = TestApi::new(&[]);
        let (caches, pending, node) = (&api.context.caches, Pending::default(), Key::new("", "a"));
        let put_node = |version: &str, taints: Value| {
            let node = json!({"metadata": {"name": "a", "uid": "a", "resourceVersion": version},
                "spec": {"taints": taints}});
            caches.nodes.written(serde_json::from_value(node).unwrap());
        };
        let put_pod = |name: &str, version: &str, seconds: Value| {
            let tolerations = json!([{"operator": "Exists", "tolerationSeconds": seconds}]);
            let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name, "resourceVersion": version},
                "spec": {"nodeName": "a", "tolerations": tolerations}});
            caches.pods.written(serde_json::from_value(pod).unwrap());
        };
        let names = || {
            let pending = pending.0.lock().unwrap();
            let mut names: Vec<_> =
                pending.values().flat_map(|node| node.pods.keys()).map(|key| key.name.clone()).collect();
            names.sort();
            names.concat()
        };
        let taint = json!([{"key": "k", "effect": "NoExecute"}]);
        put_node("1", taint.clone());
        put_pod("p", "2", json!(300));
        put_pod("q", "3", json!(300));
        put_pod("r", "4", Value::Null);
        assert!(matches!(reconcile(&api.context, &pending, node.clone()).await, Ok(Next::After(_))));
        assert_eq!(names(), "pq");
        put_pod("q", "5", Value::Null);
        assert!(matches!(reconcile(&api.context, &pending, node.clone()).await, Ok(Next::After(_))));
        assert_eq!(names(), "p", "q tolerates the taint now");
        put_node("6", json!([]));
        assert!(matches!(reconcile(&api.context, &pending, node.clone()).await, Ok(Next::Wait)));
        assert_eq!(names(), "");
    }

    /// Reconciles the queued nodes for a time that is shorter than the tolerations.
    async fn work(api: &TestApi, queue: &Queue<Key>, pending: &Pending) {
        let work = queue.work("test", |key| reconcile(&api.context, pending, key));
        assert!(tokio::time::timeout(std::time::Duration::from_secs(1), work).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_deleted_node_has_no_pending_evictions() {
        let api = TestApi::new(&[]);
        let (caches, queue, pending) = (&api.context.caches, Arc::new(Queue::new()), Arc::default());
        listen(&api.context, &queue, &pending);
        let node = json!({"metadata": {"name": "a", "uid": "a", "resourceVersion": "1"},
            "spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}});
        caches.nodes.written(serde_json::from_value(node).unwrap());
        let tolerations = json!([{"operator": "Exists", "tolerationSeconds": 300}]);
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "p", "resourceVersion": "2"},
            "spec": {"nodeName": "a", "tolerations": tolerations}});
        caches.pods.written(serde_json::from_value(pod).unwrap());
        work(&api, &queue, &pending).await;
        assert_eq!(pending.0.lock().unwrap().len(), 1);
        caches.nodes.removed(&Key::new("", "a"), "a");
        work(&api, &queue, &pending).await;
        assert!(pending.0.lock().unwrap().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_queues_its_node_only_if_its_eviction_may_change() {
        let api = TestApi::new(&[]);
        let (caches, queue) = (&api.context.caches, Arc::new(Queue::new()));
        let node = json!({"metadata": {"name": "a", "uid": "a", "resourceVersion": "1"},
            "spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}});
        caches.nodes.written(serde_json::from_value(node).unwrap());
        listen(&api.context, &queue, &Arc::default());
        for (version, phase, seconds, expected) in
            [("2", "Pending", 300, 1), ("3", "Running", 300, 0), ("4", "Running", 200, 1)]
        {
            let tolerations = json!([{"operator": "Exists", "tolerationSeconds": seconds}]);
            let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "p", "resourceVersion": version},
                "spec": {"nodeName": "a", "tolerations": tolerations}, "status": {"phase": phase}});
            caches.pods.written(serde_json::from_value(pod).unwrap());
            let queued = Mutex::new(0);
            let work = queue.work("test", |_node: Key| {
                *queued.lock().unwrap() += 1;
                async { Ok(Next::Wait) }
            });
            assert!(tokio::time::timeout(std::time::Duration::from_secs(1), work).await.is_err());
            assert_eq!(queued.into_inner().unwrap(), expected, "version {version}");
        }
    }

    #[test]
    fn a_pod_that_left_the_list_of_its_node_is_returned() {
        let (pending, node) = (Pending::default(), Key::new("", "a"));
        let pods = |pods: &[(&str, &str)]| -> Pods {
            pods.iter().map(|(name, uid)| (Key::new("n", name), (*uid).to_owned())).collect()
        };
        let of = |pods: Pods| Evictions { pods, taints: Vec::new() };
        assert!(pending.replace(&node, of(pods(&[("p", "1"), ("q", "2"), ("r", "3")]))).is_empty());
        let left = pending.replace(&node, of(pods(&[("p", "1"), ("q", "new")])));
        assert_eq!(left, pods(&[("q", "2"), ("r", "3")]));
        assert_eq!(pending.replace(&node, Evictions::default()).len(), 2);
        assert!(pending.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_taint_without_a_time_has_that_of_its_first_reading() {
        let (pending, node) = (Pending::default(), Key::new("", "a"));
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let taint = |key: &str, effect: &str, time: Option<i64>| Taint {
            key: key.to_owned(),
            effect: effect.to_owned(),
            time_added: time.map(|time| Time(at(time))),
            ..Taint::default()
        };
        let times = |taints: &[Taint], now: i64| -> Vec<i64> {
            let dated = pending.dated(&node, taints, at(now));
            let times = dated.iter().map(|taint| taint.time_added.as_ref().unwrap().0.as_second()).collect();
            let pods = Pods::from([(Key::new("n", "p"), "uid".to_owned())]);
            assert_eq!(pending.replace(&node, Evictions { pods, taints: dated }).len(), 0);
            times
        };
        let [first, second] = ["a", "b"].map(|key| taint(key, "NoExecute", None));
        assert_eq!(times(&[first.clone(), taint("c", "NoSchedule", None)], 100), [100]);
        assert_eq!(times(&[first.clone(), second], 200), [100, 200]);
        assert_eq!(times(&[taint("a", "NoExecute", Some(50))], 300), [50]);
        assert_eq!(pending.replace(&node, Evictions::default()).len(), 1);
        assert_eq!(times(&[first], 400), [400], "it was away");
    }
}

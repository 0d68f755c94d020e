//! Evicts pods that do not tolerate a NoExecute taint of their node, or whose toleration has expired.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

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

/// The pending evictions, and the queue of the controller.
#[derive(Default)]
pub(crate) struct Pending {
    evictions: Mutex<Evictions>,
    /// The queue of nodes and pods. [`listen`] sets it.
    queue: OnceLock<Arc<Queue<Key>>>,
}

#[derive(Default)]
struct Evictions {
    /// The pods that must be evicted now or at a known time.
    pods: HashMap<Key, PendingPod>,
    /// The NoExecute taints of each node, each with a time. A node without such taints has no entry.
    taints: HashMap<Key, Vec<Taint>>,
}

struct PendingPod {
    node: Key,
    /// The uid of the pod.
    uid: String,
}

// === impl Pending ===

impl Pending {
    fn lock(&self) -> MutexGuard<'_, Evictions> {
        self.evictions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, pod: &Pod, node: Key) {
        self.lock().pods.insert(pod.key(), PendingPod { node, uid: pod.uid().to_owned() });
    }

    /// Removes the eviction of a pod. Returns the pod if its eviction was pending.
    fn remove(&self, pod: &Key) -> Pods {
        let removed = self.lock().pods.remove(pod);
        removed.map(|pending| (pod.clone(), pending.uid)).into_iter().collect()
    }

    /// Removes the evictions of the pods of a node, and the taints of the node. Returns these pods.
    fn remove_node(&self, node: &Key) -> Pods {
        let mut evictions = self.lock();
        evictions.taints.remove(node);
        let removed = evictions.pods.extract_if(|_, pending| pending.node == *node);
        removed.map(|(pod, pending)| (pod, pending.uid)).collect()
    }

    /// Replaces the taints of a node.
    fn set_taints(&self, node: &Key, taints: Vec<Taint>) {
        self.lock().taints.insert(node.clone(), taints);
    }

    /// The NoExecute taints of a node, from all its `taints`. Each returned taint has a time. kube-apiserver does not
    /// set `timeAdded` of a taint that a user adds. Such a taint gets the time at which it was read first.
    fn dated(&self, node: &Key, taints: &[Taint], now: Timestamp) -> Vec<Taint> {
        let evictions = self.lock();
        let known = evictions.taints.get(node).map(Vec::as_slice).unwrap_or_default();
        let date = |taint: &Taint| {
            let known = known.iter().find(|known| known.key == taint.key && known.value == taint.value);
            let known = known.and_then(|known| known.time_added.clone());
            let time = taint.time_added.clone().or(known).unwrap_or(Time(now));
            Taint { time_added: Some(time), ..taint.clone() }
        };
        taints.iter().filter(|taint| evicts(taint)).map(date).collect()
    }
}

/// Queues nodes with changed NoExecute taints, including deleted nodes that had such taints. Queues pods on nodes with
/// such taints when they are added, or when their eviction may change.
///
/// The reconcile of a node reads all pods, and a user can create very many pods on a node with taints. So a changed pod
/// queues its own key, not the key of its node.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, pending: &Arc<Pending>) {
    // The value is not set yet, because this function is called only once.
    let _is_first = pending.queue.set(queue.clone());
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
    let (own, pending, nodes) = (queue.clone(), pending.clone(), context.caches.nodes.clone());
    context.caches.pods.on_change(move |change| {
        // Most changes of a pod are changes of its status.
        if change.old.zip(change.new).is_some_and(|(old, new)| is_evicted_alike(old, new)) {
            return;
        }
        if let Some(old) = change.old.filter(|old| change.new.is_none_or(|new| new.uid() != old.uid())) {
            drop(pending.remove(&old.key()));
        }
        let Some(pod) = change.new else { return };
        if node_of(pod).and_then(|node| nodes.get(&node)).is_some_and(|node| is_tainted(&node)) {
            own.add(pod.key());
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

/// Whether a node has a NoExecute taint.
fn is_tainted(node: &Node) -> bool {
    node.taints().iter().any(evicts)
}

/// The key of the pod's node. `None` if the pod has no node.
fn node_of(pod: &Pod) -> Option<Key> {
    pod.spec.node_name.as_deref().map(|node| Key::new("", node))
}

/// Reconciles a node or a pod. The key of a node has no namespace.
pub(crate) async fn reconcile(context: &Context, pending: &Pending, key: Key) -> Result<Next, Error> {
    if !key.namespace.is_empty() {
        return reconcile_pod(context, pending, key).await;
    }
    let Some(node) = context.caches.nodes.get(&key) else {
        // The pods of a deleted node are deleted too, so no eviction is reported as cancelled.
        drop(pending.remove_node(&key));
        return Ok(Next::Wait);
    };
    if !is_tainted(&node) {
        report_cancelled(context, pending.remove_node(&key));
        return Ok(Next::Wait);
    }
    pending.set_taints(&key, pending.dated(&key, node.taints(), Timestamp::now()));
    let pods = context.caches.pods.all().into_iter();
    for pod in pods.filter(|pod| pod.spec.node_name.as_deref() == Some(node.name())) {
        if let Some(queue) = pending.queue.get() {
            queue.add(pod.key());
        }
    }
    Ok(Next::Wait)
}

/// Evicts one pod if its toleration has expired. Otherwise returns the time of the expiry.
async fn reconcile_pod(context: &Context, pending: &Pending, key: Key) -> Result<Next, Error> {
    let pod = context.caches.pods.get(&key).filter(|pod| !pod.is_being_deleted());
    let node = pod.as_deref().and_then(node_of).and_then(|node| context.caches.nodes.get(&node));
    let (Some(pod), Some(node)) = (pod, node) else {
        drop(pending.remove(&key));
        return Ok(Next::Wait);
    };
    let now = Timestamp::now();
    let taints = pending.dated(&node.key(), node.taints(), now);
    let Due::At(end) = plan::due(&taints, &pod.spec.tolerations, pod.bound_since(), now) else {
        report_cancelled(context, pending.remove(&key));
        return Ok(Next::Wait);
    };
    if !add(context, pending, &pod, &node.key()) {
        return Ok(Next::Wait);
    }
    if let Some(wait) = until(end, now) {
        return Ok(Next::After(wait));
    }
    let eviction = Eviction {
        component: COMPONENT,
        event: Event::normal(REASON, format!("Marking for deletion Pod {key}")),
        reason: "DeletionByTaintManager",
        message: "Taint manager: deleting due to NoExecute taint",
    };
    evict(context, &pod, eviction).await?;
    Ok(Next::Wait)
}

/// Adds a pod to the pending evictions. Returns false if the pod or its node has changed since they were read, so that
/// no eviction is pending. The handler of the cache may have removed the pod before this call. Another worker may have
/// removed the pods of the node.
fn add(context: &Context, pending: &Pending, pod: &Pod, node: &Key) -> bool {
    let key = pod.key();
    pending.add(pod, node.clone());
    let Some(node) = context.caches.pods.get(&key).and_then(|_pod| context.caches.nodes.get(node)) else {
        drop(pending.remove(&key));
        return false;
    };
    if !is_tainted(&node) {
        report_cancelled(context, pending.remove(&key));
        return false;
    }
    true
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

    /// The names of the pods whose eviction is pending.
    fn names(pending: &Pending) -> String {
        let evictions = pending.lock();
        let mut names: Vec<_> = evictions.pods.keys().map(|key| key.name.as_str()).collect();
        names.sort_unstable();
        names.concat()
    }

    #[tokio::test(start_paused = true)]
    async fn an_eviction_is_pending_until_the_pod_tolerates_the_taint_or_the_taint_is_gone() {
        let api = TestApi::new(&[("/api/v1/namespaces/n/pods/s", json!({"metadata": {"name": "s"}}))]);
        let (caches, queue, pending) = (&api.context.caches, Arc::new(Queue::new()), Arc::default());
        listen(&api.context, &queue, &pending);
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
        let taint = json!([{"key": "k", "effect": "NoExecute"}]);
        put_pod("p", "1", json!(300));
        put_node("2", taint.clone());
        put_pod("q", "3", json!(300));
        put_pod("r", "4", Value::Null);
        work(&api, &queue, &pending).await;
        assert_eq!(names(&pending), "pq");
        put_pod("q", "5", Value::Null);
        work(&api, &queue, &pending).await;
        assert_eq!(names(&pending), "p", "q tolerates the taint now");
        put_pod("q", "6", json!(300));
        caches.pods.removed(&Key::new("n", "q"), "q");
        assert_eq!(names(&pending), "p");
        put_pod("s", "7", json!(0));
        work(&api, &queue, &pending).await;
        let deleted = |write: &crate::test_api::Write| write.method == "DELETE";
        let deletions: Vec<String> =
            api.writes().into_iter().filter(deleted).map(|write| write.path).collect();
        assert_eq!(deletions, ["/api/v1/namespaces/n/pods/s"]);
        put_node("8", json!([]));
        work(&api, &queue, &pending).await;
        assert_eq!(names(&pending), "");
    }

    /// Reconciles the queued nodes and pods for a time that is shorter than the tolerations.
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
        assert_eq!((names(&pending).as_str(), pending.lock().taints.len()), ("p", 1));
        caches.nodes.removed(&Key::new("", "a"), "a");
        work(&api, &queue, &pending).await;
        assert_eq!((names(&pending).as_str(), pending.lock().taints.len()), ("", 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_is_queued_itself_and_only_if_its_eviction_may_change() {
        let api = TestApi::new(&[]);
        let (caches, queue) = (&api.context.caches, Arc::new(Queue::new()));
        let node = json!({"metadata": {"name": "a", "uid": "a", "resourceVersion": "1"},
            "spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}});
        caches.nodes.written(serde_json::from_value(node).unwrap());
        listen(&api.context, &queue, &Arc::default());
        for (version, phase, seconds, expected) in
            [("2", "Pending", 300, "n/p"), ("3", "Running", 300, ""), ("4", "Running", 200, "n/p")]
        {
            let tolerations = json!([{"operator": "Exists", "tolerationSeconds": seconds}]);
            let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "p", "resourceVersion": version},
                "spec": {"nodeName": "a", "tolerations": tolerations}, "status": {"phase": phase}});
            caches.pods.written(serde_json::from_value(pod).unwrap());
            let queued = Mutex::new(String::new());
            let work = queue.work("test", |key: Key| {
                queued.lock().unwrap().push_str(&key.to_string());
                async { Ok(Next::Wait) }
            });
            assert!(tokio::time::timeout(std::time::Duration::from_secs(1), work).await.is_err());
            assert_eq!(queued.into_inner().unwrap(), expected, "version {version}");
        }
    }

    #[tokio::test]
    async fn a_node_that_loses_its_taint_during_the_reconcile_of_a_pod_has_no_pending_evictions() {
        let (api, pending, node) = (TestApi::new(&[]), Pending::default(), Key::new("", "a"));
        let caches = &api.context.caches;
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "p", "resourceVersion": "1"},
            "spec": {"nodeName": "a"}});
        let pod = caches.pods.written(serde_json::from_value(pod).unwrap());
        let put_node = |version: &str, taints: Value| {
            let node = json!({"metadata": {"name": "a", "uid": "a", "resourceVersion": version},
                "spec": {"taints": taints}});
            caches.nodes.written(serde_json::from_value(node).unwrap());
        };
        put_node("2", json!([{"key": "k", "effect": "NoExecute"}]));
        assert!(add(&api.context, &pending, &pod, &node));
        assert_eq!(names(&pending), "p");
        // The reconcile of the node removes its pods before the reconcile of a pod adds this pod.
        put_node("3", json!([]));
        reconcile(&api.context, &pending, node.clone()).await.unwrap();
        assert!(!add(&api.context, &pending, &pod, &node));
        assert_eq!(names(&pending), "");
        caches.nodes.removed(&node, "a");
        assert!(!add(&api.context, &pending, &pod, &node));
        assert_eq!(names(&pending), "");
    }

    #[test]
    fn the_pods_of_a_node_are_removed_with_it() {
        let pending = Pending::default();
        let add = |name: &str, node: &str| {
            let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name}});
            pending.add(&serde_json::from_value(pod).unwrap(), Key::new("", node));
        };
        for (name, node) in [("p", "a"), ("q", "a"), ("r", "b"), ("s", "b")] {
            add(name, node);
        }
        let pods = |names: &[&str]| -> Pods {
            names.iter().map(|name| (Key::new("n", name), (*name).to_owned())).collect()
        };
        assert_eq!(pending.remove(&Key::new("n", "r")), pods(&["r"]));
        assert_eq!(pending.remove(&Key::new("n", "r")), pods(&[]));
        assert_eq!(pending.remove_node(&Key::new("", "a")), pods(&["p", "q"]));
        assert_eq!(names(&pending), "s");
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
            pending.set_taints(&node, dated);
            times
        };
        let [first, second] = ["a", "b"].map(|key| taint(key, "NoExecute", None));
        assert_eq!(times(&[first.clone(), taint("c", "NoSchedule", None)], 100), [100]);
        assert_eq!(times(&[first.clone(), second], 200), [100, 200]);
        assert_eq!(times(&[taint("a", "NoExecute", Some(50))], 300), [50]);
        assert!(pending.remove_node(&node).is_empty());
        assert_eq!(times(&[first], 400), [400], "it was away");
    }
}

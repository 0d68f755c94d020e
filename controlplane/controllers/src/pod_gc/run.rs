//! Deletes the pods of deleted nodes, and the oldest finished pods if there are too many. Also deletes terminating pods
//! without a node, or on a node that is out of service.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use super::plan;
use crate::context::Context;
use crate::error::Error;
use crate::live;
use crate::object::{Key, ObjectExt, Pod};
use crate::pod_control::disruption_target;
use crate::queue::{Next, OwnQueue, Queue, pause_after};

/// Delay before the pods and volumes of a deleted node are released. In this time the node may be registered again.
pub(crate) const QUARANTINE: Duration = Duration::from_secs(40);

/// First character of the name in the queue key of a pod whose node may not exist. No name of an object contains this
/// character.
const OF_ABSENT_NODE: char = '/';

/// The queue key for all pods whose node may not exist.
fn key_of_all_lost() -> Key {
    Key::new("", &OF_ABSENT_NODE.to_string())
}

/// Queues deleted nodes, nodes that are out of service, and pods whose node does not exist. Also queues terminating
/// pods without a node, and finished pods above the limit. The key of a node has no namespace.
///
/// A user can create very many pods on different nodes that do not exist. A reconcile of a node reads all pods. So the
/// queue has the keys of such pods, not of their nodes, and the namespaces take turns.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, own_queue: &Arc<OwnQueue>) {
    // The value is not set yet, because this function is called only once.
    let _is_first = own_queue.set(queue.clone());
    let own = queue.clone();
    context.caches.nodes.on_change(move |change| {
        if let (Some(node), None) = (change.old, change.new) {
            own.add_after(node.key(), QUARANTINE);
        }
        if let Some(node) = change.new.filter(|node| plan::is_out_of_service(node)) {
            own.add(node.key());
        }
    });
    let (own, finished) = (queue.clone(), Mutex::new(plan::Finished::new(context.config.max_finished_pods)));
    context.caches.pods.on_change(move |change| {
        let mut finished = finished.lock().unwrap_or_else(PoisonError::into_inner);
        let surplus = finished.observe(change.old.map(|old| &**old), change.new.map(|new| &**new));
        surplus.into_iter().for_each(|pod| own.add(pod));
        if let Some(pod) = change.new.filter(|pod| plan::is_unscheduled(pod)) {
            own.add(pod.key());
        }
    });
    let (own, nodes) = (queue.clone(), context.caches.nodes.clone());
    context.caches.pods.on_change(move |change| {
        let Some(pod) = change.new else { return };
        let Some(node) = node_of(pod) else { return };
        match nodes.get(&node) {
            None if nodes.is_synced() => own.add_after(key_of_lost(pod), QUARANTINE),
            // Before the first list of the nodes, no node is known. One reconcile after the list queues the pods of
            // absent nodes. The handler of the nodes queues the nodes that are out of service.
            None => own.add_after(key_of_all_lost(), QUARANTINE),
            Some(known) if pod.is_being_deleted() && plan::is_out_of_service(&known) => own.add(node),
            Some(_) => {}
        }
    });
}

/// The key of the pod's node. `None` if the pod has no node.
fn node_of(pod: &Pod) -> Option<Key> {
    let node = pod.spec.node_name.as_deref().filter(|node| !node.is_empty());
    node.map(|node| Key::new("", node))
}

/// The queue key of a pod whose node may not exist.
fn key_of_lost(pod: &Pod) -> Key {
    Key { namespace: pod.namespace().to_owned(), name: format!("{OF_ABSENT_NODE}{}", pod.name()) }
}

/// Reconciles one node, or deletes one pod: a finished or terminating pod, or a pod whose node does not exist.
pub(crate) async fn reconcile(context: &Context, own_queue: &OwnQueue, key: Key) -> Result<Next, Error> {
    if key == key_of_all_lost() {
        queue_all_lost(context, own_queue);
        return Ok(Next::Wait);
    }
    if let Some(name) = key.name.strip_prefix(OF_ABSENT_NODE) {
        return remove_lost(context, &Key::new(&key.namespace, name)).await;
    }
    if !key.namespace.is_empty() {
        let is_due = |pod: &Arc<Pod>| plan::is_finished(pod) || plan::is_unscheduled(pod);
        if let Some(pod) = context.caches.pods.get(&key).filter(is_due) {
            remove(context, &pod, None).await?;
        }
        return Ok(Next::Wait);
    }
    if let Some(node) = context.caches.nodes.get(&key) {
        let pods = context.caches.pods.all();
        let count = pods.len();
        for pod in plan::abandoned(&node, pods) {
            remove(context, &pod, None).await?;
        }
        // If the node is out of service, each deletion of one of its pods queues the node again.
        return Ok(pause_after(count));
    }
    if live::has_node(&context.client, &key.name).await? {
        return Ok(Next::Wait);
    }
    for pod in plan::pods_of_absent_node(&key.name, context.caches.pods.all()) {
        remove(context, &pod, Some(node_is_absent(&pod))).await?;
    }
    Ok(Next::Wait)
}

/// Queues all pods whose node does not exist.
fn queue_all_lost(context: &Context, own_queue: &OwnQueue) {
    let Some(queue) = own_queue.get() else { return };
    for pod in context.caches.pods.all() {
        if node_of(&pod).is_some_and(|node| context.caches.nodes.get(&node).is_none()) {
            queue.add(key_of_lost(&pod));
        }
    }
}

/// Deletes a pod if its node does not exist.
async fn remove_lost(context: &Context, key: &Key) -> Result<Next, Error> {
    let Some(pod) = context.caches.pods.get(key) else { return Ok(Next::Wait) };
    let Some(node) = node_of(&pod) else { return Ok(Next::Wait) };
    let is_known = context.caches.nodes.get(&node).is_some();
    if !is_known && !live::has_node(&context.client, &node.name).await? {
        remove(context, &pod, Some(node_is_absent(&pod))).await?;
    }
    Ok(Next::Wait)
}

/// The condition of a pod whose node does not exist.
fn node_is_absent(pod: &Pod) -> Value {
    disruption_target(pod, "DeletionByPodGC", "PodGC: node no longer exists", Timestamp::now())
}

/// Marks a pod as failed unless it has finished, and deletes it without a grace period, because no kubelet can stop it.
async fn remove(context: &Context, pod: &Pod, condition: Option<Value>) -> Result<(), Error> {
    let failed = |verb| {
        let object = format!("Pod {}", pod.key());
        move |source| Error::Request { verb, object, source }
    };
    if !pod.finished() {
        let mut status = json!({"phase": "Failed", "observedGeneration": pod.metadata.generation});
        if let Some(condition) = condition {
            status["conditions"] = json!([condition]);
        }
        let patch = json!({"metadata": {"uid": pod.uid()}, "status": status});
        let pods: Api<Pod> = Api::namespaced(context.client.clone(), pod.namespace());
        let patched = pods.patch_status(pod.name(), &PatchParams::default(), &Patch::Strategic(patch)).await;
        match patched {
            Err(error) if !crate::error::is_not_found(&error) => return Err(failed("patch")(error)),
            Ok(_) | Err(_) => {}
        }
    }
    let params = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    context.pods().delete(pod, params).await.map_err(failed("delete"))
}

#[cfg(test)]
mod tests {
    use coracle_watch::Event;

    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_terminating_pod_without_a_node_is_marked_as_failed() {
        for (node, writes) in [(json!(null), vec!["PATCH", "DELETE"]), (json!("a"), vec![])] {
            let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7",
                    "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["example.com/x"]},
                "spec": {"nodeName": node}, "status": {"phase": "Pending"}});
            let api = TestApi::new(&[("/api/v1/namespaces/n/pods/p", pod.clone())]);
            api.context.caches.pods.written(serde_json::from_value(pod).unwrap());
            reconcile(&api.context, &OwnQueue::new(), Key::new("n", "p")).await.unwrap();
            let found = api.writes();
            assert_eq!(found.iter().map(|write| write.method.as_str()).collect::<Vec<_>>(), writes, "{node}");
            assert!(found.first().is_none_or(|write| write.body["status"]["phase"] == "Failed"));
        }
    }

    fn pod_on(node: &str, name: &str, phase: &str) -> Pod {
        let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name, "resourceVersion": "7"},
            "spec": {"nodeName": node}, "status": {"phase": phase}});
        serde_json::from_value(pod).unwrap()
    }

    #[tokio::test]
    async fn a_pod_is_deleted_if_its_node_does_not_exist() {
        let node = json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": "late"}});
        let api = TestApi::new(&[
            ("/api/v1/nodes/late", node.clone()),
            ("/api/v1/namespaces/n/pods/lost", json!({"metadata": {"name": "lost"}})),
        ]);
        let mut known = node;
        known["metadata"] = json!({"name": "known", "uid": "known", "resourceVersion": "1"});
        api.context.caches.nodes.written(serde_json::from_value(known).unwrap());
        for (name, node) in [("kept", "known"), ("waits", "late"), ("lost", "absent")] {
            // The number of finished pods is below the limit. So a pod is deleted only because of its node.
            let pod = pod_on(node, name, "Succeeded");
            let key = key_of_lost(&pod);
            api.context.caches.pods.written(pod);
            reconcile(&api.context, &OwnQueue::new(), key).await.unwrap();
        }
        let writes: Vec<_> = api.writes().into_iter().map(|write| (write.method, write.path)).collect();
        assert_eq!(writes, [("DELETE".to_owned(), "/api/v1/namespaces/n/pods/lost".to_owned())]);
    }

    #[tokio::test]
    async fn a_node_rests_after_a_reconcile_that_reads_many_pods() {
        let api = TestApi::new(&[]);
        let node = json!({"metadata": {"name": "known", "uid": "known", "resourceVersion": "1"}});
        api.context.caches.nodes.written(serde_json::from_value(node).unwrap());
        let (own_queue, key) = (OwnQueue::new(), Key::new("", "known"));
        assert!(matches!(reconcile(&api.context, &own_queue, key.clone()).await, Ok(Next::Wait)));
        for number in 0..1000 {
            api.context.caches.pods.written(pod_on("known", &format!("p{number}"), "Running"));
        }
        assert!(matches!(reconcile(&api.context, &own_queue, key).await, Ok(Next::Pause(_))));
    }

    /// The keys that the queue has now or after the delay.
    async fn queued(queue: &Queue<Key>) -> Vec<Key> {
        let keys = Mutex::new(Vec::new());
        let work = queue.work("test", |key: Key| {
            keys.lock().unwrap().push(key);
            async { Ok(Next::Wait) }
        });
        assert!(tokio::time::timeout(2 * QUARANTINE, work).await.is_err());
        keys.into_inner().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn pods_with_the_names_of_absent_nodes_are_queued_themselves() {
        let api = TestApi::new(&[]);
        let (queue, own_queue, caches) = (Arc::new(Queue::new()), Arc::default(), &api.context.caches);
        listen(&api.context, &queue, &own_queue);
        // Pods are queued instead of nodes: a reconcile of a node would read the pods of all namespaces.
        for (node, pod) in [("v", "a"), ("w", "b"), ("known", "c")] {
            caches.pods.written(pod_on(node, pod, "Running"));
        }
        caches.nodes.apply(Event::Init);
        let node = json!({"metadata": {"name": "known", "uid": "known", "resourceVersion": "1"}});
        caches.nodes.apply(Event::InitApply(serde_json::from_value(node).unwrap()));
        caches.nodes.apply(Event::InitDone);
        caches.pods.written(pod_on("x", "d", "Running"));
        caches.pods.written(pod_on("y", "e", "Running"));
        let lost = |name: &str| Key::new("n", name);
        assert_eq!(queued(&queue).await, [key_of_all_lost(), lost("/d"), lost("/e")]);
        reconcile(&api.context, &own_queue, key_of_all_lost()).await.unwrap();
        assert_eq!(queued(&queue).await, ["/a", "/b", "/d", "/e"].map(lost));
    }
}

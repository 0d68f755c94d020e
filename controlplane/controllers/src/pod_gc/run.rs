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
use crate::queue::{Next, Queue};

/// Delay before the pods and volumes of a deleted node are released. In this time the node may be registered again.
pub(crate) const QUARANTINE: Duration = Duration::from_secs(40);

/// Queues nodes that have pods but do not exist, and nodes that are out of service. Also queues terminating pods
/// without a node, and finished pods above the limit. The key of a node has no namespace.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
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
        let node = change.new.and_then(|pod| pod.spec.node_name.as_deref()).filter(|node| !node.is_empty());
        let Some(node) = node.map(|node| Key::new("", node)) else { return };
        let deleting = change.new.is_some_and(|pod| pod.is_being_deleted());
        match nodes.get(&node) {
            None => own.add_after(node, QUARANTINE),
            Some(known) if deleting && plan::is_out_of_service(&known) => own.add(node),
            Some(_) => {}
        }
    });
}

/// Reconciles one node, or deletes one finished or terminating pod.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    if !key.namespace.is_empty() {
        let is_due = |pod: &Arc<Pod>| plan::is_finished(pod) || plan::is_unscheduled(pod);
        if let Some(pod) = context.caches.pods.get(&key).filter(is_due) {
            remove(context, &pod, None).await?;
        }
        return Ok(Next::Wait);
    }
    if let Some(node) = context.caches.nodes.get(&key) {
        for pod in plan::abandoned(&node, context.caches.pods.all()) {
            remove(context, &pod, None).await?;
        }
        return Ok(Next::Wait);
    }
    if live::has_node(&context.client, &key.name).await? {
        return Ok(Next::Wait);
    }
    for pod in plan::pods_of_absent_node(&key.name, context.caches.pods.all()) {
        let message = "PodGC: node no longer exists";
        let condition = disruption_target(&pod, "DeletionByPodGC", message, Timestamp::now());
        remove(context, &pod, Some(condition)).await?;
    }
    Ok(Next::Wait)
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
            reconcile(&api.context, Key::new("n", "p")).await.unwrap();
            let found = api.writes();
            assert_eq!(found.iter().map(|write| write.method.as_str()).collect::<Vec<_>>(), writes, "{node}");
            assert!(found.first().is_none_or(|write| write.body["status"]["phase"] == "Failed"));
        }
    }
}

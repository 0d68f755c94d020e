//! Adds and removes the finalizers of claims.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::context::Context;
use crate::error::Error;
use crate::live;
use crate::object::{Claim, Key, ObjectExt, Pod};
use crate::queue::{Next, Queue};
use crate::queueing::queue_stored;
use crate::volume_protection::plan;
use crate::volume_protection::run::set;

/// Maximum number of claims that are released after one list of the pods.
const MAX_RELEASED: usize = 500;
/// Delay before a claim is checked again, if no cached pod uses the claim, but a pod in the API server uses it.
const RECHECK: Duration = Duration::from_secs(1);

/// Queues changed claims, and the claims of pods that were deleted or are shut down.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.claims, queue);
    let own = queue.clone();
    context.caches.pods.on_change(move |change| {
        let new = change.new.map(|new| &**new);
        if let Some(pod) = change.old.filter(|old| plan::frees_claims(old, new)) {
            for volume in pod.spec.volumes.iter() {
                own.add(Key::new(pod.namespace(), &volume.claim_name(pod.name())));
            }
        }
    });
}

/// Reconciles one claim.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let caches = &context.caches;
    let Some(claim) = caches.claims.get(&key) else { return Ok(Next::Wait) };
    let in_use = || caches.pods.in_namespace(&key.namespace).iter().any(|pod| plan::uses(pod, &key.name));
    let wanted = plan::finalizers(&claim.metadata, plan::CLAIM, in_use);
    if wanted.is_some() && claim.is_being_deleted() {
        return release(context, claim).await;
    }
    set(context.writer(&caches.claims), &*claim, wanted).await?;
    Ok(Next::Wait)
}

/// Removes the finalizers of a deleted claim and of other deleted claims of its namespace, if no pod uses them. The
/// pods are read from the API server, because the cache may lack a pod that was just bound. The pods of a namespace can
/// have many megabytes, so they are not read for each claim.
async fn release(context: &Context, claim: Arc<Claim>) -> Result<Next, Error> {
    let (key, caches) = (claim.key(), &context.caches);
    let pods = caches.pods.in_namespace(&key.namespace);
    let used: HashSet<String> = pods.iter().flat_map(|pod| plan::used_by(pod)).collect();
    let is_waiting = |other: &Claim| {
        other.is_being_deleted()
            && !used.contains(other.name())
            && plan::finalizers(&other.metadata, plan::CLAIM, || false).is_some()
    };
    // These claims were deleted before the pods are read, so no node starts further pods with them.
    let others = caches.claims.in_namespace(&key.namespace).into_iter();
    let others = others.filter(|other| is_waiting(other) && other.key() != key);
    let mut unused = vec![claim];
    unused.extend(others.take(MAX_RELEASED - 1));
    drop(pods);
    let leaves_none = |pod: &Pod| {
        let names: HashSet<String> = plan::used_by(pod).collect();
        unused.retain(|claim| !names.contains(claim.name()));
        unused.is_empty()
    };
    live::any(&context.client, &key.namespace, leaves_none).await?;
    let mut next = Next::After(RECHECK);
    for claim in unused {
        let finalizers = plan::finalizers(&claim.metadata, plan::CLAIM, || false);
        let written = set(context.writer(&caches.claims), &*claim, finalizers).await;
        // The other claims have reconciles of their own.
        if claim.key() == key {
            written?;
            next = Next::Wait;
        }
    }
    Ok(next)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_api::{TestApi, Write};

    #[tokio::test]
    async fn one_list_of_the_pods_releases_all_deleted_claims_that_no_pod_uses() {
        let claim = |name: &str, is_deleted: bool| {
            let deleted = is_deleted.then_some("2026-01-01T00:00:00Z");
            json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "n",
                "uid": name, "resourceVersion": "1", "finalizers": [plan::CLAIM], "deletionTimestamp": deleted}})
        };
        let pod = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"nodeName": "m", "volumes": [
            {"name": "v", "persistentVolumeClaim": {"claimName": "used"}}]}});
        let pods = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [pod]});
        let claims = "/api/v1/namespaces/n/persistentvolumeclaims";
        let path = |name: &str| format!("{claims}/{name}");
        let released = |name: &str| {
            let mut claim = claim(name, true);
            claim["metadata"]["finalizers"] = json!([]);
            claim["metadata"]["resourceVersion"] = "2".into();
            claim
        };
        let (a, b) = (path("a"), path("b"));
        let api =
            TestApi::new(&[("/api/v1/namespaces/n/pods", pods), (&a, released("a")), (&b, released("b"))]);
        for (name, is_deleted) in [("a", true), ("b", true), ("kept", false), ("used", true)] {
            let claim: Claim = serde_json::from_value(claim(name, is_deleted)).unwrap();
            api.context.caches.claims.written(claim);
        }
        let next = reconcile(&api.context, Key::new("n", "used")).await.unwrap();
        assert!(matches!(next, Next::After(_)), "a pod uses the claim");
        let patched: Vec<String> = api.writes().into_iter().map(|write| write.path).collect();
        assert_eq!(patched, [a, b]);
        let is_empty = |write: &Write| write.body["metadata"]["finalizers"] == Value::Array(vec![]);
        assert!(api.writes().iter().all(is_empty));
        // The claim has no finalizer any more: nothing is read or written.
        reconcile(&api.context, Key::new("n", "b")).await.unwrap();
        assert_eq!(api.writes().len(), 2);
    }
}

//! Counts the objects of a namespace for its quotas, and writes the status of the quotas.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::Api;
use kube::api::ListParams;
use kube::core::DynamicObject;
use serde_json::{Value, json};

use super::plan;
use crate::api_kind::ApiKind;
use crate::cache::Cache;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, Object, ObjectExt, Pod, ResourceQuota};
use crate::queue::{Next, Queue, until};
use crate::write::{Part, status_patch};

/// Time after which a quota is counted again, as upstream.
const RESYNC: Duration = Duration::from_secs(300);
/// Delay of the count after a deletion, so that one count covers many deletions.
const DELAY: Duration = Duration::from_secs(1);
/// Maximum number of objects in a page of a list.
const PAGE: u32 = 500;

/// Queues new quotas, quotas with a changed spec, and the quotas of deleted objects. Also queues the quotas of pods
/// that have ended or are over their grace period. Kinds that are not listed here are counted again after [`RESYNC`].
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let caches = &context.caches;
    let own = queue.clone();
    caches.resource_quotas.on_change(move |change| {
        let Some(new) = change.new else { return };
        if change.old.is_none_or(|old| old.spec != new.spec) {
            own.add(new.key());
        }
    });
    let (own, quotas) = (queue.clone(), caches.resource_quotas.clone());
    caches.pods.on_change(move |change| {
        let new = change.new.map(|new| &**new);
        if let Some(old) = change.old.filter(|old| frees(old, new)) {
            queue_all(&quotas, old.namespace(), &own);
        }
        let end = new.and_then(grace_end);
        if let (Some(new), Some(end)) = (new, end)
            && change.old.and_then(|old| grace_end(old)) != Some(end)
        {
            let delay = until(end, Timestamp::now()).unwrap_or_default().max(DELAY);
            for quota in quotas.in_namespace(new.namespace()) {
                own.add_after(quota.key(), delay);
            }
        }
    });
    let quotas = &caches.resource_quotas;
    queue_of_deleted(&caches.services, quotas, queue);
    queue_of_deleted(&caches.claims, quotas, queue);
    queue_of_deleted(&caches.replication_controllers, quotas, queue);
    queue_of_deleted(&caches.replica_sets, quotas, queue);
    queue_of_deleted(&caches.deployments, quotas, queue);
    queue_of_deleted(&caches.stateful_sets, quotas, queue);
    queue_of_deleted(&caches.daemon_sets, quotas, queue);
    queue_of_deleted(&caches.jobs, quotas, queue);
    queue_of_deleted(&caches.cron_jobs, quotas, queue);
    queue_of_deleted(&caches.resource_claims, quotas, queue);
}

/// Whether a changed pod may use less than before, because it is deleted or has ended.
fn frees(old: &Pod, new: Option<&Pod>) -> bool {
    new.is_none_or(|new| new.finished() && !old.finished())
}

/// The time after which a pod that is being deleted does not count. Does the same as `coracle_kinds::quota::grace_end`,
/// for typed pods.
fn grace_end(pod: &Pod) -> Option<Timestamp> {
    if pod.finished() {
        return None;
    }
    let deletion = pod.metadata.deletion_timestamp.as_ref()?.0;
    let grace = SignedDuration::from_secs(pod.metadata.deletion_grace_period_seconds?);
    Some(deletion.checked_add(grace).unwrap_or(Timestamp::MAX))
}

fn queue_of_deleted<K: Object>(
    cache: &Cache<K>,
    quotas: &Arc<Cache<ResourceQuota>>,
    queue: &Arc<Queue<Key>>,
) {
    let (own, quotas) = (queue.clone(), quotas.clone());
    cache.on_change(move |change| {
        if let (Some(old), None) = (change.old, change.new) {
            queue_all(&quotas, old.namespace(), &own);
        }
    });
}

/// Queues the quotas of a namespace.
fn queue_all(quotas: &Cache<ResourceQuota>, namespace: &str, queue: &Queue<Key>) {
    for quota in quotas.in_namespace(namespace) {
        queue.add_after(quota.key(), DELAY);
    }
}

/// Reconciles one quota.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let cache = &context.caches.resource_quotas;
    let Some(object) = cache.get(&key) else { return Ok(Next::Wait) };
    let quota = plan::limits(&object);
    let mut count = plan::Count::at(Timestamp::now());
    let found = context.kinds().await?;
    for kind in plan::in_order(&found.kinds) {
        let Some(counted) = plan::counted(&object, &quota, kind) else { continue };
        let add = |object: &Value| count.add(&quota, &counted, object);
        for_each(context, kind, &key.namespace, add).await?;
    }
    let mut status = quota.status(&count.used);
    plan::keep_unknown(&mut status, &object.status, &found);
    if let Some(mut patch) = status_patch(&*object, &object.status, &status) {
        // The API server may have added the usage of new objects since the start of the count. The write then fails,
        // and the count is repeated.
        patch["metadata"]["resourceVersion"] = json!(object.metadata.resource_version);
        context.writer(cache).merge(&key, Part::Status, patch).await?;
    }
    let next = count.next_change.map(|end| until(end, Timestamp::now()).unwrap_or_default().max(DELAY));
    Ok(Next::After(next.unwrap_or(RESYNC).min(RESYNC)))
}

/// Reads all objects of a kind in a namespace, in pages.
async fn for_each(
    context: &Context,
    kind: &ApiKind,
    namespace: &str,
    mut count: impl FnMut(&Value),
) -> Result<(), Error> {
    let api: Api<DynamicObject> = Api::namespaced_with(context.client.clone(), namespace, &kind.resource);
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let failed = |source| {
            let object = format!("{} {}", kind.resource.kind, Key::new(namespace, "*"));
            Error::Request { verb: "list", object, source }
        };
        let listed = api.list(&page).await.map_err(failed)?;
        listed.items.iter().for_each(|object| count(&json!(object)));
        match listed.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_frees_its_usage_when_it_ends_or_is_deleted() {
        let pod = |phase: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": "p"}, "status": {"phase": phase}})).unwrap()
        };
        let (running, failed) = (pod("Running"), pod("Failed"));
        assert!(frees(&running, None) && frees(&running, Some(&failed)));
        assert!(!frees(&running, Some(&pod("Running"))) && !frees(&failed, Some(&failed)));
    }

    #[test]
    fn a_pod_has_the_same_grace_period_in_both_forms() {
        let metadata = json!({"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30});
        let end: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
        for (phase, expect) in [("Running", Some(end)), ("Failed", None)] {
            let pod = json!({"metadata": metadata, "status": {"phase": phase}});
            assert_eq!(coracle_kinds::quota::grace_end(&pod), expect);
            assert_eq!(grace_end(&serde_json::from_value(pod).unwrap()), expect);
        }
    }
}

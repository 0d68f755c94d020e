//! Counts the objects of a namespace for its quotas, and writes the status of the quotas.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::Api;
use kube::api::ListParams;
use kube::core::DynamicObject;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::plan;
use crate::api_kind::ApiKind;
use crate::cache::Cache;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Claim, Key, Object, ObjectExt, Pod, ResourceQuota, Service};
use crate::queue::{Next, Queue, until};
use crate::write::{Part, status_patch};

/// Time after which a quota is counted again, as upstream.
const RESYNC: Duration = Duration::from_secs(300);
/// Delay of the count after a deletion, so that one count covers many deletions.
const DELAY: Duration = Duration::from_secs(1);
/// A quota is counted again after this many times the duration of the last count. So clients that delete objects all
/// the time keep the worker busy for at most a fifth of its time for each quota.
const PAUSE_FACTOR: u32 = 4;
/// Conditions of a pod while its resources change.
const RESIZES: [&str; 2] = ["PodResizePending", "PodResizeInProgress"];
/// Maximum number of objects in a page of a list.
const PAGE: u32 = 500;

/// Queues new quotas, quotas with a changed spec, and the quotas of deleted objects. Also queues the quotas of objects
/// whose usage may have decreased, and the quotas of pods that are over their grace period. The garbage collector
/// reports the deletions of objects of kinds without a cache. If it does not run, these kinds are counted again after
/// [`RESYNC`].
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
    let (own, quotas) = (queue.clone(), caches.resource_quotas.clone());
    context.deletions.listen(move |resource, namespace| {
        for quota in quotas.in_namespace(namespace) {
            if plan::limits_number(&quota, resource) {
                own.add_after(quota.key(), DELAY);
            }
        }
    });
    let quotas = &caches.resource_quotas;
    queue_of_freed(&caches.services, quotas, queue, service_frees);
    queue_of_freed(&caches.claims, quotas, queue, claim_frees);
    queue_of_deleted(&caches.service_accounts, quotas, queue);
    queue_of_deleted(&caches.endpoints, quotas, queue);
    queue_of_deleted(&caches.replication_controllers, quotas, queue);
    queue_of_deleted(&caches.replica_sets, quotas, queue);
    queue_of_deleted(&caches.deployments, quotas, queue);
    queue_of_deleted(&caches.stateful_sets, quotas, queue);
    queue_of_deleted(&caches.daemon_sets, quotas, queue);
    queue_of_deleted(&caches.jobs, quotas, queue);
    queue_of_deleted(&caches.cron_jobs, quotas, queue);
    queue_of_deleted(&caches.resource_claims, quotas, queue);
}

/// Whether a changed pod may use less than before: it is deleted or has ended, it has other requests, its resize has
/// ended, or it is in another scope. Source: `DefaultUpdateFilter`.
fn frees(old: &Pod, new: Option<&Pod>) -> bool {
    let Some(new) = new else { return true };
    let is_resized = |pod: &Pod| RESIZES.iter().any(|resize| pod.condition(resize).is_some());
    (new.finished() && !old.finished())
        || old.spec.requests != new.spec.requests
        || old.spec.has_deadline != new.spec.has_deadline
        || (is_resized(old) && !is_resized(new))
}

/// Whether a changed service may use less than before.
fn service_frees(old: &Service, new: &Service) -> bool {
    let ports = |service: &Service| service.spec.ports.as_ref().map_or(0, Vec::len);
    old.spec.type_ != new.spec.type_ || ports(old) != ports(new)
}

/// Whether a changed claim may use less than before, or is in another scope. Source: `RequiresQuotaReplenish`.
fn claim_frees(old: &Claim, new: &Claim) -> bool {
    old.spec.resources != new.spec.resources
        || old.status.allocated_resources != new.status.allocated_resources
        || old.spec.volume_attributes_class_name != new.spec.volume_attributes_class_name
        || old.status.current_volume_attributes_class_name != new.status.current_volume_attributes_class_name
        || old.status.modify_volume_status != new.status.modify_volume_status
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
    queue_of_freed(cache, quotas, queue, |_old, _new| false);
}

/// Queues the quotas of deleted objects, and of objects whose change may decrease their usage.
fn queue_of_freed<K: Object>(
    cache: &Cache<K>,
    quotas: &Arc<Cache<ResourceQuota>>,
    queue: &Arc<Queue<Key>>,
    frees: fn(&K, &K) -> bool,
) {
    let (own, quotas) = (queue.clone(), quotas.clone());
    cache.on_change(move |change| {
        if let Some(old) = change.old.filter(|old| change.new.is_none_or(|new| frees(old, new))) {
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
    let (quota, begun) = (plan::limits(&object), Instant::now());
    let mut count = plan::Count::at(Timestamp::now());
    let found = context.kinds().await?;
    for kind in plan::in_order(&found.kinds) {
        let Some(counted) = plan::counted(&object, &quota, kind) else { continue };
        let add = |object: &Value| count.add(&quota, &counted, object);
        for_each(context, kind, &key.namespace, counted.is_number(), add).await?;
    }
    let pause = pause_after(begun.elapsed());
    let mut status = quota.status(&count.used);
    plan::keep_unknown(&mut status, &object.status, &found);
    if let Some(mut patch) = status_patch(&*object, &object.status, &status) {
        // The API server may have added the usage of new objects since the start of the count. The write then fails,
        // and the count is repeated.
        patch["metadata"]["resourceVersion"] = json!(object.metadata.resource_version);
        match context.writer(cache).merge(&key, Part::Status, patch).await {
            // The back-off of errors begins with milliseconds, and a deletion would end it.
            Err(error) if error.is_conflict() => return Ok(Next::NotBefore(pause.max(DELAY / 10))),
            written => drop(written?),
        }
    }
    let next = count.next_change.map(|end| until(end, Timestamp::now()).unwrap_or_default().max(DELAY));
    Ok(Next::AfterPause { after: next.unwrap_or(RESYNC).min(RESYNC), pause })
}

/// The minimum time until the next count of a quota, after a count of this duration.
fn pause_after(count: Duration) -> Duration {
    count.saturating_mul(PAUSE_FACTOR).min(RESYNC)
}

/// Reads all objects of a kind in a namespace, in pages; only their metadata if `is_number` is true.
async fn for_each(
    context: &Context,
    kind: &ApiKind,
    namespace: &str,
    is_number: bool,
    mut count: impl FnMut(&Value),
) -> Result<(), Error> {
    let api: Api<DynamicObject> = Api::namespaced_with(context.client.clone(), namespace, &kind.resource);
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let failed = |source| {
            let object = format!("{} {}", kind.resource.kind, Key::new(namespace, "*"));
            Error::Request { verb: "list", object, source }
        };
        let token = if is_number {
            let listed = kind.page(&context.client, namespace, &page).await?;
            listed.items.iter().for_each(|object| count(&json!(object)));
            listed.metadata.continue_
        } else {
            let listed = api.list(&page).await.map_err(failed)?;
            listed.items.iter().for_each(|object| count(&json!(object)));
            listed.metadata.continue_
        };
        match token.filter(|token| !token.is_empty()) {
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
    fn a_pod_may_free_its_usage_when_it_is_resized_or_in_another_scope() {
        let pod = |cpu: &str, deadline: Value, condition: &str| -> Pod {
            let container = json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
            let mut pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"},
                "spec": {"containers": [container], "activeDeadlineSeconds": deadline},
                "status": {"conditions": [{"type": condition, "status": "True"}]}}))
            .unwrap();
            pod.slim();
            pod
        };
        let plain = pod("1", Value::Null, "Ready");
        for (old, new, expect) in [
            (&plain, pod("1", Value::Null, "Ready"), false),
            (&plain, pod("2", Value::Null, "Ready"), true),
            (&plain, pod("1", json!(0), "Ready"), true),
            (&plain, pod("1", Value::Null, "PodResizeInProgress"), false),
            (&pod("1", Value::Null, "PodResizeInProgress"), plain.clone(), true),
            (&pod("1", Value::Null, "PodResizePending"), pod("1", Value::Null, "PodResizeInProgress"), false),
        ] {
            assert_eq!(frees(old, Some(&new)), expect, "{old:?} {new:?}");
        }
    }

    #[test]
    fn services_and_claims_may_free_their_usage_when_they_change() {
        let service = |spec: Value| -> Service { serde_json::from_value(json!({"spec": spec})).unwrap() };
        let balanced = service(json!({"type": "LoadBalancer", "ports": [{"port": 1}]}));
        for (new, expect) in [
            (json!({"type": "LoadBalancer", "ports": [{"port": 2}]}), false),
            (json!({"type": "LoadBalancer"}), true),
            (json!({"type": "ClusterIP", "ports": [{"port": 1}]}), true),
        ] {
            assert_eq!(service_frees(&balanced, &service(new.clone())), expect, "{new}");
        }
        let claim = |more: Value| -> Claim { serde_json::from_value(more).unwrap() };
        let plain = claim(json!({"spec": {"storageClassName": "a"}, "status": {"phase": "Pending"}}));
        for (new, expect) in [
            (json!({"spec": {"storageClassName": "a"}, "status": {"phase": "Bound"}}), false),
            (json!({"spec": {"resources": {"requests": {"storage": "1Gi"}}}}), true),
            (json!({"status": {"allocatedResources": {"storage": "1Gi"}}}), true),
            (json!({"spec": {"volumeAttributesClassName": "fast"}}), true),
            (json!({"status": {"currentVolumeAttributesClassName": "fast"}}), true),
        ] {
            assert_eq!(claim_frees(&plain, &claim(new.clone())), expect, "{new}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_deletion_queues_the_quotas_that_limit_the_number_of_the_objects() {
        let (api, queue) = (crate::test_api::TestApi::new(&[]), Arc::new(Queue::new()));
        listen(&api.context, &queue);
        for (namespace, name, hard) in [("n", "a", "secrets"), ("n", "b", "pods"), ("m", "c", "secrets")] {
            let metadata = json!({"name": name, "namespace": namespace, "uid": name, "resourceVersion": "1"});
            let quota = json!({"metadata": metadata, "spec": {"hard": {(hard): "1"}}});
            api.context.caches.resource_quotas.written(serde_json::from_value(quota).unwrap());
        }
        let keys = std::sync::Mutex::new(Vec::new());
        let work = queue.work("test", |key: Key| {
            keys.lock().unwrap().push(key.to_string());
            async { Ok(Next::Wait) }
        });
        let mut work = std::pin::pin!(work);
        let pass = || tokio::time::sleep(DELAY * 2);
        tokio::select! { () = work.as_mut() => {}, () = pass() => {} }
        assert_eq!(std::mem::take(&mut *keys.lock().unwrap()).len(), 3, "new quotas");
        let kind = kube::core::GroupVersionKind::gvk("", "v1", "Secret");
        let secrets = kube::discovery::ApiResource::from_gvk_with_plural(&kind, "secrets");
        api.context.deletions.notify(&secrets, "n");
        api.context.deletions.notify(&secrets, "n");
        tokio::select! { () = work.as_mut() => {}, () = pass() => {} }
        assert_eq!(*keys.lock().unwrap(), ["n/a"]);
    }

    #[tokio::test]
    async fn the_objects_of_all_pages_are_counted_by_their_metadata() {
        let resource = json!({"resource": "secrets", "scope": "Namespaced", "responseKind": {"kind": "Secret"},
            "verbs": ["list"]});
        let versions = json!([{"version": "v1", "freshness": "Current", "resources": [resource]}]);
        let page = |names: &[&str], token: &str| {
            let items: Vec<Value> = names.iter().map(|name| json!({"metadata": {"name": name}})).collect();
            json!({"metadata": {"resourceVersion": "8", "continue": token}, "items": items})
        };
        let (path, list) = ("/api/v1/namespaces/n/resourcequotas/q", "/api/v1/namespaces/n/secrets");
        let quota = json!({"metadata": {"name": "q", "namespace": "n", "uid": "q", "resourceVersion": "1"},
            "spec": {"hard": {"secrets": "9"}}});
        let api = crate::test_api::TestApi::new(&[
            ("/apis", json!({"items": []})),
            ("/api", json!({"items": [{"metadata": {"name": ""}, "versions": versions}]})),
            (list, page(&["a", "b"], "t")),
            (&format!("{list}?continue=t"), page(&["c"], "")),
            (path, quota.clone()),
        ]);
        api.context.caches.resource_quotas.written(serde_json::from_value(quota).unwrap());
        let next = reconcile(&api.context, Key::new("n", "q")).await.unwrap();
        assert!(matches!(next, Next::AfterPause { after, .. } if after == RESYNC));
        assert_eq!(api.writes()[0].body["status"]["used"], json!({"secrets": "3"}));
    }

    #[test]
    fn a_quota_is_counted_for_at_most_a_fifth_of_the_time() {
        assert_eq!(pause_after(DELAY / 10), DELAY * 4 / 10);
        assert_eq!(pause_after(RESYNC), RESYNC);
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

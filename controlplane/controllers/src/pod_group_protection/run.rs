//! Removes the finalizer of groups.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::plan;
use crate::context::Context;
use crate::error::Error;
use crate::live;
use crate::object::{Key, ObjectExt, Pod};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// Delay before a group whose pod is not in the cache yet is reconciled again.
const RECHECK: Duration = Duration::from_secs(1);

/// Queues groups that are being deleted, and groups that lose their last active pod.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.pod_groups.on_change(move |change| {
        if let Some(group) = change.new.filter(|group| group.is_being_deleted()) {
            own.add(group.key());
        }
    });
    let (own, members) = (queue.clone(), context.group_members.clone());
    context.caches.pods.on_change(move |change| {
        if let Some(group) = members.count(change) {
            own.add(group);
        }
    });
}

/// Reconciles one group.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let cache = &context.caches.pod_groups;
    let Some(group) = cache.get(&key) else { return Ok(Next::Wait) };
    let Some(finalizers) = plan::released(&group.metadata, context.group_members.has(&key)) else {
        return Ok(Next::Wait);
    };
    // A pod that was just created may not be in the cache yet.
    let is_member = |pod: &Pod| pod.active_group().as_ref() == Some(&key);
    if live::any(&context.client, &key.namespace, is_member).await? {
        return Ok(Next::After(RECHECK));
    }
    let version = &group.metadata.resource_version;
    let patch =
        json!({"metadata": {"uid": group.uid(), "resourceVersion": version, "finalizers": finalizers}});
    context.writer(cache).merge(&key, Part::Main, patch).await?;
    Ok(Next::Wait)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_group_with_a_pod_that_the_cache_lacks_is_not_released() {
        let path = "/apis/scheduling.k8s.io/v1alpha2/namespaces/n/podgroups/g";
        let group = json!({"metadata": {"name": "g", "namespace": "n", "uid": "u", "resourceVersion": "7",
            "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["scheduling.k8s.io/podgroup-protection"]}});
        let pod = |phase: &str| {
            json!({"metadata": {"name": "p", "namespace": "n"}, "status": {"phase": phase},
                "spec": {"schedulingGroup": {"podGroupName": "g"}}})
        };
        let list =
            |items: &[Value]| json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items});
        let pods = "/api/v1/namespaces/n/pods";
        for (items, releases) in [(vec![pod("Pending")], false), (vec![pod("Failed")], true), (vec![], true)]
        {
            let api = TestApi::new(&[(path, group.clone()), (pods, list(&items))]);
            api.context.caches.pod_groups.written(serde_json::from_value(group.clone()).unwrap());
            let next = reconcile(&api.context, Key::new("n", "g")).await.unwrap();
            assert_eq!(matches!(next, Next::After(_)), !releases, "{items:?}");
            assert_eq!(api.writes().len(), usize::from(releases), "{items:?}");
        }
    }
}

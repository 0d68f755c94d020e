//! Evicts the pods of claims with tainted devices.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_events::Event;
use jiff::Timestamp;

use super::plan::{self, Pools};
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt, Pod, ResourceClaim, ResourceSlice};
use crate::queue::{Next, Queue, until};
use crate::taint_eviction::run::{Eviction, evict};

const COMPONENT: &str = "device-taint-eviction-controller";

/// Queues the claims with devices of a pool when one of its slices changes and has, or had, a tainted device. While any
/// device has a taint, also queues changed claims, and the claims of changed bound pods.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, pools: &Arc<Mutex<Pools>>) {
    let (own, all, claims) = (queue.clone(), pools.clone(), context.caches.resource_claims.clone());
    context.caches.resource_slices.on_change(move |change| {
        // A driver may write its slices often. Only taints, the generation, the pool and the node matter.
        if change.old.map(|old| &old.spec) == change.new.map(|new| &new.spec) {
            return;
        }
        let mut pools = lock(&all);
        if let Some(old) = change.old {
            pools.remove(old);
        }
        if let Some(new) = change.new {
            pools.insert(new);
        }
        drop(pools);
        for slice in [change.old, change.new].into_iter().flatten().filter(|slice| slice.is_tainted()) {
            let affected = claims.all().into_iter().filter(|claim| has_device_of(claim, slice));
            affected.for_each(|claim| own.add(claim.key()));
        }
    });
    let (own, all) = (queue.clone(), pools.clone());
    context.caches.resource_claims.on_change(move |change| {
        if let Some(claim) = change.new.filter(|claim| claim.status.allocation.is_some())
            && lock(&all).are_tainted()
        {
            own.add(claim.key());
        }
    });
    let (own, all) = (queue.clone(), pools.clone());
    context.caches.pods.on_change(move |change| {
        let Some(pod) = change.new.filter(|pod| is_bound(pod)) else { return };
        if pod.claims().next().is_some() && lock(&all).are_tainted() {
            pod.claims().for_each(|claim| own.add(Key::new(pod.namespace(), claim)));
        }
    });
}

/// Evicts the pods of one claim for which a toleration has expired. Returns the time of the next expiry.
pub(crate) async fn reconcile(context: &Context, pools: &Mutex<Pools>, key: Key) -> Result<Next, Error> {
    let caches = &context.caches;
    let Some(claim) = caches.resource_claims.get(&key) else { return Ok(Next::Wait) };
    let Some(allocation) = &claim.status.allocation else { return Ok(Next::Wait) };
    let (mut next, mut failed) = (None, None);
    for pod in pods_of(context, &claim) {
        let now = Timestamp::now();
        let node = pod.spec.node_name.as_deref().unwrap_or_default();
        let due = plan::due(allocation, &lock(pools), node, now);
        let Some(end) = due else { continue };
        match until(end, now) {
            Some(wait) => next = Some(next.map_or(wait, |next: Duration| next.min(wait))),
            // A failed eviction does not prevent the other evictions.
            None => {
                let eviction = Eviction {
                    component: COMPONENT,
                    event: Event::normal("DeviceTaintManagerEviction", "Marking for deletion"),
                    reason: "DeletionByDeviceTaintManager",
                    message: "Device Taint manager: deleting due to NoExecute taint",
                };
                failed = evict(context, &pod, eviction).await.err().or(failed);
            }
        }
    }
    match failed {
        Some(error) => Err(error),
        None => Ok(next.map_or(Next::Wait, Next::After)),
    }
}

/// The bound pods for which the claim is reserved.
fn pods_of(context: &Context, claim: &ResourceClaim) -> Vec<Arc<Pod>> {
    let users = claim.status.reserved_for.iter().filter(|user| user["resource"] == "pods");
    let pods = users.filter_map(|user| {
        let pod = context.caches.pods.get(&Key::new(claim.namespace(), user["name"].as_str()?))?;
        let uses = user["uid"] == pod.uid() && pod.claims().any(|own| own == claim.name());
        (uses && is_bound(&pod) && !pod.is_being_deleted()).then_some(pod)
    });
    pods.collect()
}

fn is_bound(pod: &Pod) -> bool {
    pod.spec.node_name.as_deref().is_some_and(|node| !node.is_empty())
}

/// Whether a device of the slice's pool is allocated to the claim.
fn has_device_of(claim: &ResourceClaim, slice: &ResourceSlice) -> bool {
    let results =
        claim.status.allocation.as_ref().and_then(|allocation| {
            allocation.pointer("/devices/results").and_then(serde_json::Value::as_array)
        });
    let (driver, pool) = slice.pool();
    results
        .into_iter()
        .flatten()
        .any(|result| result["driver"] == driver.as_str() && result["pool"] == pool.as_str())
}

fn lock(pools: &Mutex<Pools>) -> MutexGuard<'_, Pools> {
    pools.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_api::TestApi;

    /// The names of the queued claims.
    async fn queued(queue: &Queue<Key>) -> Vec<String> {
        let names = Mutex::new(Vec::new());
        let work = queue.work("test", |key| {
            names.lock().unwrap().push(key.name);
            async { Ok(Next::Wait) }
        });
        assert!(tokio::time::timeout(Duration::from_secs(1), work).await.is_err());
        names.into_inner().unwrap()
    }

    /// A claim of the device `x`, reserved for pods of these names and uids.
    fn claim(name: &str, pool: &str, users: &[(&str, &str)]) -> ResourceClaim {
        let users = users.iter().map(|(name, uid)| json!({"resource": "pods", "name": name, "uid": uid}));
        let results = json!([{"driver": "d", "pool": pool, "device": "x"}]);
        let status = json!({"allocation": {"devices": {"results": results}},
            "reservedFor": users.collect::<Vec<_>>()});
        let metadata = json!({"name": name, "namespace": "n", "uid": name, "resourceVersion": "1"});
        serde_json::from_value(json!({"metadata": metadata, "status": status})).unwrap()
    }

    /// A slice of the pool `p` whose device `x` has a taint.
    fn slice(version: &str, effect: &str) -> ResourceSlice {
        let taints = json!([{"key": "k", "effect": effect, "timeAdded": "1970-01-01T00:10:00Z"}]);
        let spec = json!({"driver": "d", "pool": {"name": "p", "generation": 1},
            "devices": [{"name": "x", "taints": taints}]});
        let metadata = json!({"name": "s", "uid": "s", "resourceVersion": version});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn only_other_taints_of_a_slice_queue_the_claims_of_its_pool() {
        let api = TestApi::new(&[]);
        let (queue, pools) = (Arc::new(Queue::new()), Arc::default());
        listen(&api.context, &queue, &pools);
        let caches = &api.context.caches;
        caches.resource_claims.written(claim("a", "p", &[]));
        caches.resource_claims.written(claim("b", "other", &[]));
        assert!(queued(&queue).await.is_empty(), "no device has a taint");
        for (version, effect, expected) in
            [("2", "NoSchedule", 0), ("3", "NoExecute", 1), ("4", "NoExecute", 0), ("5", "NoSchedule", 1)]
        {
            caches.resource_slices.written(slice(version, effect));
            assert_eq!(queued(&queue).await, vec!["a"; expected], "version {version}");
        }
    }

    #[tokio::test]
    async fn pods_on_nodes_that_have_reserved_the_claim_are_evicted() {
        let pod = |name: &str, node: Value| {
            let claims = json!([{"name": "c", "resourceClaimName": "a"}]);
            json!({"metadata": {"name": name, "namespace": "n", "uid": name, "resourceVersion": "1"},
                "spec": {"nodeName": node, "resourceClaims": claims}})
        };
        let pods =
            [("p", json!("node")), ("waits", json!(null)), ("other", json!("node")), ("new", json!("node"))];
        let pods = pods.map(|(name, node)| pod(name, node));
        let api = TestApi::new(&[("/api/v1/namespaces/n/pods/p", pods[0].clone())]);
        for pod in &pods {
            api.context.caches.pods.written(serde_json::from_value(pod.clone()).unwrap());
        }
        // The claim is reserved for a former pod named `new`, not for the present one.
        let users = [("p", "p"), ("waits", "waits"), ("new", "former")];
        api.context.caches.resource_claims.written(claim("a", "p", &users));
        let pools = Mutex::new(Pools::default());
        let key = || Key::new("n", "a");
        lock(&pools).insert(&Arc::new(slice("2", "NoSchedule")));
        assert!(matches!(reconcile(&api.context, &pools, key()).await, Ok(Next::Wait)));
        assert!(api.writes().is_empty());
        lock(&pools).insert(&Arc::new(slice("3", "NoExecute")));
        assert!(matches!(reconcile(&api.context, &pools, key()).await, Ok(Next::Wait)));
        let writes = api.writes();
        let paths = |method: &str| -> Vec<&str> {
            writes.iter().filter(|write| write.method == method).map(|write| write.path.as_str()).collect()
        };
        assert_eq!(paths("PATCH"), ["/api/v1/namespaces/n/pods/p/status"]);
        assert_eq!(paths("DELETE"), ["/api/v1/namespaces/n/pods/p"]);
    }
}

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
use crate::taint_eviction::run::evict;

const COMPONENT: &str = "device-taint-eviction-controller";

/// Queues the claims of pools whose taints changed, and changed claims and bound pods while a device has a taint.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, pools: &Arc<Mutex<Pools>>) {
    let (own, all, claims) = (queue.clone(), pools.clone(), context.caches.resource_claims.clone());
    context.caches.resource_slices.on_change(move |change| {
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

/// Evicts the pods of one claim whose tolerations have expired. Returns the time of the next expiry.
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
            // A failed eviction does not prevent the others.
            None => {
                let event = Event::normal("DeviceTaintManagerEviction", "Marking for deletion");
                let why =
                    ("DeletionByDeviceTaintManager", "Device Taint manager: deleting due to NoExecute taint");
                failed = evict(context, &pod, (COMPONENT, event), why).await.err().or(failed);
            }
        }
    }
    match failed {
        Some(error) => Err(error),
        None => Ok(next.map_or(Next::Wait, Next::After)),
    }
}

/// The pods on nodes for which the claim is reserved.
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

//! Writes finalizers and conditions of ServiceCIDRs.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use serde_json::json;

use super::plan::{self, Action};
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// Queues changed ServiceCIDRs. Terminating ServiceCIDRs are also queued when another one changes, and when an
/// IPAddress is deleted.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let ending: Arc<Mutex<BTreeSet<Key>>> = Arc::default();
    let (own, all) = (queue.clone(), ending.clone());
    context.caches.service_cidrs.on_change(move |change| {
        let mut ending = all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cidr) = change.latest() {
            ending.remove(&cidr.key());
            own.add(cidr.key());
        }
        ending.iter().for_each(|key| own.add(key.clone()));
        if let Some(cidr) = change.new.filter(|cidr| cidr.is_being_deleted()) {
            ending.insert(cidr.key());
        }
    });
    let own = queue.clone();
    context.caches.ip_addresses.on_change(move |change| {
        if change.new.is_none() {
            let ending = ending.lock().unwrap_or_else(PoisonError::into_inner);
            ending.iter().for_each(|key| own.add(key.clone()));
        }
    });
}

/// Reconciles one ServiceCIDR.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let cache = &context.caches.service_cidrs;
    let Some(cidr) = cache.get(&key) else { return Ok(Next::Wait) };
    let mut others = cache.all();
    others.retain(|other| other.name() != key.name);
    let addresses = &context.service_addresses;
    let first = |range, others: &[_]| addresses.first_only_in(range, others);
    for action in plan::plan(&cidr, &others, first, Timestamp::now()) {
        let uid = cidr.uid();
        match action {
            Action::SetFinalizers(finalizers) => {
                let version = &cidr.metadata.resource_version;
                let patch =
                    json!({"metadata": {"uid": uid, "resourceVersion": version, "finalizers": finalizers}});
                context.writer(cache).merge(&key, Part::Main, patch).await?;
            }
            Action::SetStatus(status) => {
                let patch = json!({"metadata": {"uid": uid}, "status": status});
                context.writer(cache).merge(&key, Part::Status, patch).await?;
            }
            Action::Wait(time) => return Ok(Next::After(time)),
        }
    }
    Ok(Next::Wait)
}

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

/// Queues changed ServiceCIDRs. Terminating ServiceCIDRs are also queued when another ServiceCIDR changes, and when an
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
        let (part, patch) = match action {
            Action::SetFinalizers(finalizers) => {
                let version = &cidr.metadata.resource_version;
                let patch =
                    json!({"metadata": {"uid": uid, "resourceVersion": version, "finalizers": finalizers}});
                (Part::Main, patch)
            }
            Action::SetStatus(status) => (Part::Status, json!({"metadata": {"uid": uid}, "status": status})),
            Action::Wait(time) => return Ok(Next::After(time)),
        };
        match context.writer(cache).merge(&key, part, patch).await {
            Ok(_) => {}
            // The next change queues the ServiceCIDR again. Upstream stops after 15 attempts.
            Err(error) if error.is_refused() => {
                tracing::warn!(%key, %error, cause = error.cause(), "a service range cannot be changed");
                return Ok(Next::Wait);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Next::Wait)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::ServiceCIDR;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_service_range_that_is_gone_is_not_tried_again() {
        let api = TestApi::new(&[]);
        let cidr = json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "1"},
            "spec": {"cidrs": ["10.0.0.0/24"]}, "status": {}});
        let cidr: ServiceCIDR = serde_json::from_value(cidr).unwrap();
        api.context.caches.service_cidrs.written(cidr);
        let next = reconcile(&api.context, Key::new("", "a")).await.unwrap();
        assert!(matches!(next, Next::Wait));
        assert_eq!(api.writes().len(), 1, "the status is not written after the finalizers");
    }
}

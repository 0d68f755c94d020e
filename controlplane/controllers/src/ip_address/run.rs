//! Writes the IPAddresses of services. At the start every address is planned, which corrects differences.

use std::net::IpAddr;
use std::sync::Arc;

use coracle_events::Event;
use kube::api::DeleteParams;

use super::plan::{self, Action};
use crate::context::Context;
use crate::error::{Error, is_already_exists};
use crate::object::{Key, ObjectExt};
use crate::queue::{Next, Queue};

/// The key of an address is its name.
fn key(address: IpAddr) -> Key {
    Key::new("", &address.to_string())
}

/// Queues the addresses of changed services and IPAddresses.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let (own, index) = (queue.clone(), context.service_addresses.clone());
    context.caches.services.on_change(move |change| {
        index.follow(change).into_iter().for_each(|address| own.add(key(address)));
    });
    let own = queue.clone();
    context.caches.ip_addresses.on_change(move |change| {
        if let Some(address) = change.latest() {
            own.add(address.key());
        }
    });
}

/// Reconciles one address.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let (services, cache) = (&context.caches.services, &context.caches.ip_addresses);
    let Ok(address) = key.name.parse::<IpAddr>() else { return Ok(Next::Wait) };
    if !cache.is_served() {
        // A server of an earlier version has no IPAddresses, and another server may forbid them.
        return Ok(Next::Wait);
    }
    let holders = context.service_addresses.services(address).into_iter();
    // If another program has stored two services with one address, the oldest service gets the address.
    let service = holders
        .filter_map(|key| services.get(&key))
        .min_by_key(|service| (service.metadata.creation_timestamp.clone(), service.key()));
    let failed = |verb, source| Error::Request { verb, object: format!("IPAddress {key}"), source };
    match plan::plan(address, service, cache.get(&key)) {
        Some(Action::Create(object)) => match context.writer(cache).create("", object).await {
            // The watch delivers the object, which queues the address again.
            Err(error) if is_already_exists(&error) => {}
            created => drop(created.map_err(|source| failed("create", source))?),
        },
        Some(Action::Delete(object)) => {
            let deleted = context.writer(cache).delete(&object, DeleteParams::default()).await;
            deleted.map_err(|source| failed("delete", source))?;
        }
        Some(Action::Foreign(object, service)) => {
            let message =
                format!("the IPAddress {} of {} belongs to another program", object.name(), service.key());
            context.record(
                &*service,
                "ipallocator-repair-controller",
                Event::warning("ClusterIPNotAllocated", message),
            );
        }
        None => {}
    }
    Ok(Next::Wait)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::object::Service;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn without_ip_addresses_nothing_is_written() {
        let api = TestApi::new(&[(
            "/apis/networking.k8s.io/v1/ipaddresses",
            json!({"metadata": {"name": "10.0.0.1"}}),
        )]);
        let caches = &api.context.caches;
        listen(&api.context, &Arc::new(Queue::new()));
        let service = json!({"metadata": {"name": "s", "namespace": "n", "uid": "u", "resourceVersion": "1"},
            "spec": {"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"]}});
        let service: Service = serde_json::from_value(service).unwrap();
        caches.services.written(service);
        caches.ip_addresses.set_unserved();
        assert!(matches!(reconcile(&api.context, Key::new("", "10.0.0.1")).await.unwrap(), Next::Wait));
        assert!(api.writes().is_empty());
    }
}

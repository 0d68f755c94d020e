//! Writes the IPAddresses of services. At the start every address is planned, which corrects differences.

use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;

use coracle_events::Event;
use kube::api::DeleteParams;

use super::plan::{self, Action};
use super::problems;
use crate::context::Context;
use crate::error::{Error, is_already_exists};
use crate::object::{Key, ObjectExt, Service, ServiceCIDR};
use crate::queue::{Next, Queue};
use crate::service_cidr::plan::ranges;

/// Source components of the events, as upstream.
const ADDRESSES: &str = "ipallocator-repair-controller";
const PORTS: &str = "portallocator-repair-controller";

/// The key of an address or of a node port in the queue. Its name is the address, or the number of the port.
fn key(subject: impl Display) -> Key {
    Key::new("", &subject.to_string())
}

/// Queues the addresses and node ports of changed services, and the addresses of changed IPAddresses. Queues all
/// addresses after a change of the ranges.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let (addresses, ports) = (context.service_addresses.clone(), context.service_ports.clone());
    let own = queue.clone();
    context.caches.services.on_change(move |change| {
        addresses.follow(change).into_iter().for_each(|address| own.add(key(address)));
        ports.follow(change).into_iter().for_each(|port| own.add(key(port)));
    });
    let (own, addresses) = (queue.clone(), context.service_addresses.clone());
    context.caches.service_cidrs.on_change(move |change| {
        let of = |cidr: Option<&Arc<ServiceCIDR>>| cidr.map(|cidr| ranges(cidr).collect::<Vec<_>>());
        if of(change.old) != of(change.new) {
            addresses.all().into_iter().for_each(|address| own.add(key(address)));
        }
    });
    let own = queue.clone();
    context.caches.ip_addresses.on_change(move |change| {
        if let Some(address) = change.latest() {
            own.add(address.key());
        }
    });
}

/// The services with these keys, the oldest first. If another program has stored two services with one address or node
/// port, the oldest service keeps it.
fn oldest_first(context: &Context, keys: &[Key]) -> Vec<Arc<Service>> {
    let found = keys.iter().filter_map(|key| context.caches.services.get(key));
    let mut services: Vec<Arc<Service>> = found.collect();
    services.sort_by_key(|service| (service.metadata.creation_timestamp.clone(), service.key()));
    services
}

/// The events about the services of an address.
fn address_problems(
    context: &Context,
    address: IpAddr,
    services: &[Arc<Service>],
) -> Vec<(Arc<Service>, Event)> {
    let cidrs = context.caches.service_cidrs.all();
    let ranges: Vec<_> = cidrs.iter().flat_map(|cidr| ranges(cidr)).collect();
    let of = |(place, service): (usize, &Arc<Service>)| {
        Some((service.clone(), problems::of_address(address, &ranges, place == 0)?))
    };
    services.iter().enumerate().filter_map(of).collect()
}

/// The events about the services of a node port.
fn port_problems(context: &Context, port: u16) -> Vec<(Arc<Service>, Event)> {
    let services = oldest_first(context, &context.service_ports.services(port));
    let range = &context.config.node_ports;
    let of = |(place, service): (usize, Arc<Service>)| {
        problems::of_port(port, range, place == 0).map(|event| (service, event))
    };
    services.into_iter().enumerate().filter_map(of).collect()
}

fn record(context: &Context, component: &'static str, events: Vec<(Arc<Service>, Event)>) {
    events.into_iter().for_each(|(service, event)| context.record(&*service, component, event));
}

/// Reconciles one address, or reports the problems of one node port.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    if let Ok(port) = key.name.parse::<u16>() {
        record(context, PORTS, port_problems(context, port));
        return Ok(Next::Wait);
    }
    let cache = &context.caches.ip_addresses;
    let Ok(address) = key.name.parse::<IpAddr>() else { return Ok(Next::Wait) };
    if !cache.is_served() {
        // A server of an earlier version has no IPAddresses, and another server may forbid them.
        return Ok(Next::Wait);
    }
    let services = oldest_first(context, &context.service_addresses.services(address));
    record(context, ADDRESSES, address_problems(context, address, &services));
    let service = services.into_iter().next();
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
            context.record(&*service, ADDRESSES, Event::warning("ClusterIPNotAllocated", message));
        }
        None => {}
    }
    Ok(Next::Wait)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
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

    #[tokio::test]
    async fn problems_of_addresses_and_node_ports_are_reported_to_the_newer_service() {
        let api = TestApi::new(&[]);
        let (context, queue) = (&api.context, Arc::new(Queue::new()));
        listen(context, &queue);
        let put = |name: &str, created: &str, address: &str, port: u16| {
            let service = json!({"metadata": {"name": name, "namespace": "n", "uid": name, "resourceVersion": "1",
                "creationTimestamp": created}, "spec": {"clusterIP": address, "clusterIPs": [address],
                "ports": [{"port": 80, "nodePort": port}]}});
            context.caches.services.written(serde_json::from_value(service).unwrap());
        };
        put("new", "2026-01-02T00:00:00Z", "10.0.0.1", 30080);
        put("old", "2026-01-01T00:00:00Z", "10.0.0.1", 30080);
        put("outside", "2026-01-01T00:00:00Z", "10.9.0.1", 22);
        let shown = |events: Vec<(Arc<Service>, Event)>| -> Vec<(String, &'static str)> {
            events.into_iter().map(|(service, event)| (service.name().to_owned(), event.reason)).collect()
        };
        let of_address = |address: &str| {
            let address = address.parse().unwrap();
            let services = oldest_first(context, &context.service_addresses.services(address));
            shown(address_problems(context, address, &services))
        };
        assert!(of_address("10.9.0.1").is_empty(), "the ranges are not known");
        let cidr = json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "1"},
            "spec": {"cidrs": ["10.0.0.0/24"]}, "status": {}});
        context.caches.service_cidrs.written(serde_json::from_value(cidr).unwrap());
        assert_eq!(of_address("10.0.0.1"), [("new".to_owned(), "ClusterIPAlreadyAllocated")]);
        assert_eq!(of_address("10.9.0.1"), [("outside".to_owned(), "ClusterIPOutOfRange")]);
        assert_eq!(shown(port_problems(context, 30080)), [("new".to_owned(), "PortAlreadyAllocated")]);
        assert_eq!(shown(port_problems(context, 22)), [("outside".to_owned(), "PortOutOfRange")]);
        assert!(matches!(reconcile(context, key(30080)).await.unwrap(), Next::Wait));
        assert!(api.writes().is_empty(), "a node port has no object");
    }
}

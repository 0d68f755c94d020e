//! Assigns pool addresses to LoadBalancer services, and chooses the node that announces each address. The controller
//! has one worker, so that two services cannot get the same address.
//!
//! A node that does not renew its lease becomes not ready. Its services then move to other nodes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_events::Event;
use serde_json::{Value, json};

use super::plan;
use super::service::{CLASS, is_ours};
use super::state::State;
use crate::context::Context;
use crate::error::Error;
use crate::node_balancer::plan::{BalancerNode, is_local};
use crate::node_balancer::run::{ready_nodes, service_of};
use crate::object::{Key, Node, ObjectExt, Service};
use crate::queue::{Next, Queue};
use crate::service_finalizer::plan as finalizer;
use crate::service_finalizer::run::{hold, release};
use crate::write::Part;

const COMPONENT: &str = "address-pool-controller";

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Queues changed services. A change of a node queues all services. A change of endpoints queues services with the
/// traffic policy Local.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, state: &Arc<State>) {
    let (own, kept) = (queue.clone(), state.clone());
    context.caches.services.on_change(move |change| {
        lock(&kept.claims).follow(change).into_iter().for_each(|key| own.add(key));
        // After a restart, the claims do not have a service whose type has changed.
        let is_due = |service: &&Arc<Service>| finalizer::is_due(service, CLASS, is_ours(service));
        change.new.filter(is_due).into_iter().for_each(|service| own.add(service.key()));
    });
    let (own, kept) = (queue.clone(), state.clone());
    context.caches.nodes.on_change(move |change| {
        let read = |node: Option<&Arc<Node>>| node.map(BalancerNode::of);
        let (old, new) = (read(change.old), read(change.new));
        if old != new {
            let addresses = |node: Option<BalancerNode>| node.map(|node| node.addresses().to_vec());
            let mut claims = lock(&kept.claims);
            claims.set_node(&addresses(old).unwrap_or_default(), &addresses(new).unwrap_or_default());
            claims.all().into_iter().for_each(|key| own.add(key));
        }
    });
    let (own, services) = (queue.clone(), context.caches.services.clone());
    context.caches.endpoint_slices.on_change(move |change| {
        for slice in [change.old, change.new].into_iter().flatten() {
            let Some(key) = service_of(slice) else { continue };
            if services.get(&key).is_some_and(|service| is_ours(&service) && is_local(&service)) {
                own.add(key);
            }
        }
    });
}

/// Reconciles one service.
pub(crate) async fn reconcile(context: &Context, state: &State, key: Key) -> Result<Next, Error> {
    let Some(service) = context.caches.services.get(&key) else {
        lock(&state.refusals).remove(&key);
        return Ok(Next::Wait);
    };
    let is_served = is_ours(&service);
    if !is_served || service.is_being_deleted() {
        lock(&state.refusals).remove(&key);
        // A deleted service keeps its claims until it is gone, so that no other service gets the addresses before.
        let cleared = plan::cleared(&service);
        let service = write(context, service, cleared).await?;
        release(context, &service, CLASS, is_served).await?;
        return Ok(Next::Wait);
    }
    let nodes: Vec<BalancerNode> = context.caches.nodes.all().iter().map(BalancerNode::of).collect();
    let addresses = choose_addresses(context, state, &service);
    let mut candidates: BTreeSet<String> =
        nodes.iter().filter(|node| node.is_usable()).map(|node| node.name().to_owned()).collect();
    if is_local(&service) {
        let local = ready_nodes(context, &service);
        candidates.retain(|name| local.contains(name));
    }
    let node = plan::choose_node(&service, &addresses, &candidates).filter(|_| !addresses.is_empty());
    let service = if addresses.is_empty() { service } else { hold(context, service, CLASS).await? };
    let status = plan::status(&service, &addresses, node, jiff::Timestamp::now());
    write(context, service, status).await?;
    Ok(Next::Wait)
}

/// Chooses and claims the addresses. If no address is free, an event reports the reason.
fn choose_addresses(context: &Context, state: &State, service: &Service) -> BTreeSet<IpAddr> {
    let key = service.key();
    let mut claims = lock(&state.claims);
    let chosen = plan::choose_addresses(service, &context.config.load_balancer_pool, &claims);
    let addresses = chosen.as_ref().cloned().unwrap_or_default();
    // The status change of this service queues the services that wait for a released address.
    claims.set(&key, &addresses);
    let Err(why) = chosen else {
        lock(&state.refusals).remove(&key);
        return addresses;
    };
    claims.wait(&key);
    drop(claims);
    let before = lock(&state.refusals).insert(key, why.clone());
    if before.as_ref() != Some(&why) {
        let message = format!("the service gets no address: {why}");
        context.record(service, COMPONENT, Event::warning("LoadBalancerRefused", message));
    }
    addresses
}

/// Writes a status. Returns the current service.
async fn write(
    context: &Context,
    service: Arc<Service>,
    status: Option<Value>,
) -> Result<Arc<Service>, Error> {
    let Some(status) = status else { return Ok(service) };
    let patch = json!({"metadata": {"uid": service.uid()}, "status": status});
    context.writer(&context.caches.services).merge(&service.key(), Part::Status, patch).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn the_finalizer_is_removed_after_the_addresses() {
        let path = "/api/v1/namespaces/n/services/s";
        let meta = json!({"name": "s", "namespace": "n", "uid": "u", "resourceVersion": "1",
            "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["service.kubernetes.io/load-balancer-cleanup"],
            "annotations": {"coracle.dev/load-balancer-finalizer": CLASS}});
        let service = |status: Value| {
            json!({"apiVersion": "v1", "kind": "Service", "metadata": meta, "status": status,
                "spec": {"type": "LoadBalancer", "loadBalancerClass": CLASS}})
        };
        let api = TestApi::new(&[(path, service(json!({})))]);
        let announced = json!({"type": "coracle.dev/Announced", "status": "True", "reason": "NodeChosen",
            "message": "node-1", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let status = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.8"}]}, "conditions": [announced]});
        let cached: Service = serde_json::from_value(service(status)).unwrap();
        api.context.caches.services.written(cached);
        reconcile(&api.context, &State::default(), Key::new("n", "s")).await.unwrap();
        let writes = api.writes();
        let paths: Vec<String> = writes.iter().map(|write| write.path.clone()).collect();
        assert_eq!(paths, [format!("{path}/status"), path.to_owned()]);
        assert!(writes[0].body["status"]["loadBalancer"]["ingress"].is_null());
        assert_eq!(writes[1].body["metadata"]["finalizers"], json!([]));
    }
}

//! Writes the addresses of nodes into the status of LoadBalancer services. One worker reconciles all services, so that
//! two services never get the same port.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_events::Event;
use serde_json::{Value, json};

use super::plan::{self, BalancerNode, Decision, PortRange};
use super::state::State;
use crate::context::Context;
use crate::endpoint_slice::run::SERVICE_NAME;
use crate::error::Error;
use crate::object::{EndpointSlice, Key, Node, ObjectExt, Service};
use crate::queue::{Next, Queue};
use crate::write::Part;

const COMPONENT: &str = "service-lb-controller";

/// Queues changed services, all services when a node changes, and services with the traffic policy Local when their
/// endpoints change.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, state: &Arc<State>) {
    if !context.config.node_balancers {
        let own = queue.clone();
        context.caches.services.on_change(move |change| {
            let old =
                change.new.filter(|service| plan::is_ours(service) && !plan::served(service).is_empty());
            old.into_iter().for_each(|service| own.add(service.key()));
        });
        return;
    }
    if has_well_known_ports(&context.config.node_ports) {
        tracing::warn!(
            node_ports = ?context.config.node_ports,
            "load balancers at the addresses of nodes cannot have ports of the node port range"
        );
    }
    let (own, kept, reserved) = (queue.clone(), state.clone(), reserved(context));
    context.caches.services.on_change(move |change| {
        let changed = lock(&kept.claims).follow(change, &reserved);
        changed.into_iter().for_each(|key| own.add(key));
    });
    let (own, kept) = (queue.clone(), state.clone());
    context.caches.nodes.on_change(move |change| {
        let read = |node: Option<&Arc<Node>>| node.map(BalancerNode::of);
        if read(change.old) != read(change.new) {
            lock(&kept.claims).all().into_iter().for_each(|key| own.add(key));
        }
    });
    let (own, kept) = (queue.clone(), state.clone());
    context.caches.endpoint_slices.on_change(move |change| {
        for slice in [change.old, change.new].into_iter().flatten() {
            if let Some(service) = service_of(slice).filter(|service| lock(&kept.claims).is_local(service)) {
                own.add(service);
            }
        }
    });
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The node ports, and the port of the API server.
fn reserved(context: &Context) -> Vec<PortRange> {
    let server = context.config.server.as_deref().and_then(|server| server.rsplit_once(':'));
    let server = server.and_then(|(_, port)| port.parse::<u16>().ok()).map(|port| port..=port);
    server.into_iter().chain([context.config.node_ports.clone()]).collect()
}

/// Whether services get node ports from a range that has ports of common protocols, such as 80 and 443. A load balancer
/// cannot have a port of the range, not even a free port. Another service could get such a port as its node port at any
/// time.
fn has_well_known_ports(node_ports: &PortRange) -> bool {
    *node_ports.start() < 1024
}

/// The service of a slice.
pub(crate) fn service_of(slice: &EndpointSlice) -> Option<Key> {
    let name = slice.metadata.labels.as_ref()?.get(SERVICE_NAME)?;
    Some(Key::new(slice.namespace(), name))
}

/// Reconciles one service.
pub(crate) async fn reconcile(context: &Context, state: &State, key: Key) -> Result<Next, Error> {
    let cache = &context.caches.services;
    let Some(service) = cache.get(&key).filter(|service| plan::is_ours(service)) else {
        lock(&state.refusals).remove(&key);
        return Ok(Next::Wait);
    };
    let nodes: Vec<BalancerNode> = context.caches.nodes.all().iter().map(BalancerNode::of).collect();
    if !context.config.node_balancers {
        return write(context, &service, plan::foreign(&service, &nodes)).await;
    }
    if service.is_being_deleted() {
        // Another service may get the ports after they were removed from the status.
        lock(&state.refusals).remove(&key);
        return write(context, &service, Vec::new()).await;
    }
    let local = if plan::is_local(&service) { ready_nodes(context, &service) } else { BTreeSet::new() };
    let holder = |port: &plan::Port| lock(&state.claims).holder(port, &key);
    let desired = match plan::plan(&service, &nodes, &local, &reserved(context), holder) {
        Decision::Serve(ingress) => {
            lock(&state.refusals).remove(&key);
            ingress
        }
        Decision::Refuse(why) => {
            let before = lock(&state.refusals).insert(key.clone(), why.clone());
            if before.as_ref() != Some(&why) {
                let message = format!("no node serves this service: {why}");
                context.record(&*service, COMPONENT, Event::warning("LoadBalancerRefused", message));
            }
            Vec::new()
        }
    };
    write(context, &service, desired).await
}

/// Writes the entries of a service's status, if they differ.
async fn write(context: &Context, service: &Service, desired: Vec<Value>) -> Result<Next, Error> {
    let observed: Vec<Value> = plan::ingress(service).map(|entry| json!(entry)).collect();
    if observed != desired {
        let ingress = if desired.is_empty() { Value::Null } else { desired.into() };
        let patch =
            json!({"metadata": {"uid": service.uid()}, "status": {"loadBalancer": {"ingress": ingress}}});
        context.writer(&context.caches.services).merge(&service.key(), Part::Status, patch).await?;
    }
    Ok(Next::Wait)
}

/// Nodes with ready endpoints of a service.
pub(crate) fn ready_nodes(context: &Context, service: &Service) -> BTreeSet<String> {
    let (caches, key) = (&context.caches, service.key());
    // Slices belong to the service, or to its Endpoints if the service has no selector. Slices that a user wrote belong
    // to no object.
    let endpoints = caches.endpoints.get(&key);
    let owners = [Some(service.uid()), endpoints.as_ref().map(|endpoints| endpoints.uid()), Some("")];
    let slices =
        owners.into_iter().flatten().flat_map(|uid| caches.endpoint_slices.owned_by(&key.namespace, uid));
    let mut nodes = BTreeSet::new();
    for slice in slices.filter(|slice| service_of(slice).as_ref() == Some(&key)) {
        for endpoint in &slice.endpoints {
            let ready = endpoint.conditions.as_ref().and_then(|conditions| conditions.ready);
            nodes.extend(endpoint.node_name.clone().filter(|_| ready != Some(false)));
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_with_well_known_ports_is_reported() {
        assert!(has_well_known_ports(&(1..=65535)) && has_well_known_ports(&(443..=443)));
        assert!(!has_well_known_ports(&(30000..=32767)));
    }
}

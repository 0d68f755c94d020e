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
use crate::service_finalizer::plan as finalizer;
use crate::service_finalizer::run::{hold, release};
use crate::write::Part;

const COMPONENT: &str = "service-lb-controller";

/// Queues changed services, all services when a node changes, and services with the traffic policy Local when their
/// endpoints change.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, state: &Arc<State>) {
    if !context.config.node_balancers {
        let own = queue.clone();
        context.caches.services.on_change(move |change| {
            let is_old = |service: &&Arc<Service>| {
                (plan::is_ours(service) && !plan::served(service).is_empty())
                    || finalizer::is_due(service, plan::CLASS, false)
            };
            change.new.filter(is_old).into_iter().for_each(|service| own.add(service.key()));
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
        // After a restart, the claims do not have a service whose status is already empty.
        let is_due =
            |service: &&Arc<Service>| finalizer::is_due(service, plan::CLASS, plan::is_ours(service));
        change.new.filter(is_due).into_iter().for_each(|service| own.add(service.key()));
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
    let Some(service) = context.caches.services.get(&key) else {
        lock(&state.refusals).remove(&key);
        return Ok(Next::Wait);
    };
    let is_served = context.config.node_balancers && plan::is_ours(&service);
    if !is_served || service.is_being_deleted() {
        lock(&state.refusals).remove(&key);
        let service = withdraw(context, service).await?;
        release(context, &service, plan::CLASS, is_served).await?;
        return Ok(Next::Wait);
    }
    let nodes = nodes(context);
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
    let service = if desired.is_empty() { service } else { hold(context, service, plan::CLASS).await? };
    write(context, service, desired).await?;
    Ok(Next::Wait)
}

fn nodes(context: &Context) -> Vec<BalancerNode> {
    context.caches.nodes.all().iter().map(BalancerNode::of).collect()
}

/// Removes the nodes' addresses from the status of a service that is not served any more. Another service may get the
/// ports after that. If the type of the service has changed, the API server has emptied the status.
async fn withdraw(context: &Context, service: Arc<Service>) -> Result<Arc<Service>, Error> {
    if !plan::is_ours(&service) {
        return Ok(service);
    }
    let kept = match context.config.node_balancers {
        true => Vec::new(),
        false => plan::foreign(&service, &nodes(context)),
    };
    write(context, service, kept).await
}

/// Writes the entries of a service's status, if they differ. Returns the current service.
async fn write(context: &Context, service: Arc<Service>, desired: Vec<Value>) -> Result<Arc<Service>, Error> {
    let observed: Vec<Value> = plan::ingress(&service).map(|entry| json!(entry)).collect();
    if observed == desired {
        return Ok(service);
    }
    let ingress = if desired.is_empty() { Value::Null } else { desired.into() };
    let patch = json!({"metadata": {"uid": service.uid()}, "status": {"loadBalancer": {"ingress": ingress}}});
    context.writer(&context.caches.services).merge(&service.key(), Part::Status, patch).await
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
    use crate::test_api::TestApi;

    #[test]
    fn a_range_with_well_known_ports_is_reported() {
        assert!(has_well_known_ports(&(1..=65535)) && has_well_known_ports(&(443..=443)));
        assert!(!has_well_known_ports(&(30000..=32767)));
    }

    const PATH: &str = "/api/v1/namespaces/n/services/s";

    /// A service that nodes serve, with the finalizer.
    fn service(annotations: &Value, spec: &Value, ingress: &Value) -> Value {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "n", "uid": "u",
            "resourceVersion": "1", "finalizers": ["service.kubernetes.io/load-balancer-cleanup"],
            "annotations": annotations}, "spec": spec, "status": {"loadBalancer": {"ingress": ingress}}})
    }

    /// Reconciles a service and returns the paths of the writes, and the last finalizers.
    async fn reconciled(is_enabled: bool, mut service: Value) -> (Vec<String>, Value) {
        let cached = service.clone();
        service["status"] = json!({});
        let mut api = TestApi::new(&[(PATH, service)]);
        api.context.config.node_balancers = is_enabled;
        let cached: Service = serde_json::from_value(cached).unwrap();
        api.context.caches.services.written(cached);
        reconcile(&api.context, &State::default(), Key::new("n", "s")).await.unwrap();
        let writes = api.writes();
        let last = writes.last().map(|write| write.body["metadata"]["finalizers"].clone());
        (writes.into_iter().map(|write| write.path).collect(), last.unwrap_or_default())
    }

    #[tokio::test]
    async fn the_finalizer_is_removed_after_the_addresses() {
        let own = json!({"coracle.dev/load-balancer-finalizer": plan::CLASS});
        let (balancer, ingress) = (json!({"type": "LoadBalancer"}), json!([{"ip": "192.0.2.1"}]));
        let mut deleted = service(&own, &balancer, &ingress);
        deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        let both = (vec![format!("{PATH}/status"), PATH.to_owned()], json!([]));
        assert_eq!(reconciled(true, deleted.clone()).await, both);
        // The address belongs to no node, so the disabled controller leaves it.
        let one = (vec![PATH.to_owned()], json!([]));
        assert_eq!(reconciled(false, deleted).await, one);
        assert_eq!(reconciled(true, service(&own, &json!({"type": "ClusterIP"}), &Value::Null)).await, one);
        let none = (Vec::new(), Value::Null);
        let foreign = json!({"type": "LoadBalancer", "loadBalancerClass": "example.com/other"});
        assert_eq!(reconciled(true, service(&Value::Null, &foreign, &ingress)).await, none);
        assert_eq!(reconciled(false, service(&Value::Null, &balancer, &ingress)).await, none);
    }
}

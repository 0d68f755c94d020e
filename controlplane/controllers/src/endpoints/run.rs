//! Writes the endpoints of services.

use std::sync::Arc;

use coracle_events::Event;
use k8s_openapi::api::core::v1::EndpointSubset;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::{plan, trigger_time};
use crate::context::Context;
use crate::error::{Error, is_already_exists, is_namespace_terminating};
use crate::object::{Endpoints, Key, ObjectExt, Pod, Service};
use crate::queue::{Next, Queue, pause_after_endpoints};
use crate::write::Part;

/// Queues changed services, and the services of changed pods and endpoints.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.services.on_change(move |change| {
        if let Some(service) = change.latest() {
            own.add(service.key());
        }
    });
    let own = queue.clone();
    context.caches.endpoints.on_change(move |change| {
        if let Some(endpoints) = change.latest() {
            own.add(endpoints.key());
        }
    });
    let own = queue.clone();
    on_endpoint_change(context, move |service| own.add(service));
}

/// Calls `queue` for the services of each pod whose endpoints may change.
pub(crate) fn on_endpoint_change(context: &Context, queue: impl Fn(Key) + Send + Sync + 'static) {
    let services = context.caches.services.clone();
    context.caches.pods.on_change(move |change| {
        let pods: Vec<&Arc<Pod>> = [change.old, change.new].into_iter().flatten().collect();
        let Some(pod) = pods.first() else { return };
        if let [old, new] = pods[..]
            && old.endpoint_facts() == new.endpoint_facts()
        {
            return;
        }
        for service in services.in_namespace(pod.namespace()) {
            if pods.iter().any(|pod| plan::selects(&service, pod)) {
                queue(service.key());
            }
        }
    });
}

/// Reconciles one service.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let caches = &context.caches;
    let (service, known) = (caches.services.get(&key), caches.endpoints.get(&key));
    let failed = |verb| {
        let object = format!("Endpoints {key}");
        move |source| Error::Request { verb, object, source }
    };
    let writer = context.writer(&caches.endpoints);
    let Some(service) = service.filter(|service| !service.is_being_deleted()) else {
        if let Some(known) = known.filter(|known| is_managed_by_this_controller(known)) {
            writer.delete(&known, DeleteParams::default()).await.map_err(failed("delete"))?;
        }
        return Ok(Next::Wait);
    };
    if !plan::is_ours(&service) {
        return Ok(Next::Wait);
    }
    let pods = caches.pods.in_namespace(&key.namespace);
    let mut subsets = plan::subsets(&service, &pods);
    let is_truncated = plan::truncate(&mut subsets);
    let count = subsets.iter().map(count_addresses).sum();
    let labels = labels(&service);
    match known {
        Some(known)
            if is_current(&known, &subsets, &labels) && is_marked_truncated(&known) == is_truncated => {}
        Some(known) => {
            let before = trigger_time::of_subsets(known.subsets.as_deref().unwrap_or_default());
            let written = trigger_time::of_subsets(&subsets);
            let trigger = trigger_time::time(&service, &pods, Some(&before), &written);
            let mut metadata = json!({"labels": labels});
            // Null removes an annotation.
            if is_truncated || is_marked_truncated(&known) {
                metadata["annotations"][OVER_CAPACITY] = json!(is_truncated.then_some(TRUNCATED));
            }
            if trigger.is_some() || trigger_time::is_set(&known.metadata) {
                metadata["annotations"][trigger_time::ANNOTATION] = json!(trigger);
            }
            let patch = json!({"metadata": metadata, "subsets": subsets});
            writer.merge(&key, Part::Main, patch).await.map_err(|error| reported(context, &known, error))?;
        }
        None => {
            let mut endpoints = json!({"metadata": {"name": key.name, "labels": labels}, "subsets": subsets});
            if is_truncated {
                endpoints["metadata"]["annotations"][OVER_CAPACITY] = TRUNCATED.into();
            }
            let written = trigger_time::of_subsets(&subsets);
            if let Some(trigger) = trigger_time::time(&service, &pods, None, &written) {
                endpoints["metadata"]["annotations"][trigger_time::ANNOTATION] = trigger.into();
            }
            match writer.create(&key.namespace, endpoints).await {
                Err(error) if !is_already_exists(&error) && !is_namespace_terminating(&error) => {
                    return Err(reported(context, &absent(&key), failed("create")(error)));
                }
                Ok(_) | Err(_) => {}
            }
        }
    }
    Ok(pause_after_endpoints(count, service.spec.ports.as_ref().map_or(0, Vec::len)))
}

/// Records the event of a failed write. Returns the error.
fn reported(context: &Context, endpoints: &Endpoints, error: Error) -> Error {
    context.record(endpoints, COMPONENT, failure(endpoints, &error.cause()));
    error
}

/// The event of a failed write. Without a uid, the Endpoints could not be created.
fn failure(endpoints: &Endpoints, cause: &str) -> Event {
    let key = endpoints.key();
    match endpoints.metadata.uid {
        Some(_) => {
            Event::warning("FailedToUpdateEndpoint", format!("Failed to update endpoint {key}: {cause}"))
        }
        None => Event::warning(
            "FailedToCreateEndpoint",
            format!("Failed to create endpoint for service {key}: {cause}"),
        ),
    }
}

/// The Endpoints that could not be created, for an event.
fn absent(key: &Key) -> Endpoints {
    let (name, namespace) = (Some(key.name.clone()), Some(key.namespace.clone()));
    Endpoints { metadata: ObjectMeta { name, namespace, ..ObjectMeta::default() }, subsets: None }
}

fn count_addresses(subset: &EndpointSubset) -> usize {
    [&subset.addresses, &subset.not_ready_addresses].into_iter().flatten().map(Vec::len).sum()
}

const MANAGED_BY: &str = "endpoints.kubernetes.io/managed-by";
const MANAGER: &str = "endpoint-controller";
const COMPONENT: &str = "endpoint-controller";

/// Annotation of truncated Endpoints, and its value.
const OVER_CAPACITY: &str = "endpoints.kubernetes.io/over-capacity";
const TRUNCATED: &str = "truncated";

fn is_marked_truncated(endpoints: &Endpoints) -> bool {
    let annotations = endpoints.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(OVER_CAPACITY)).is_some_and(|value| value == TRUNCATED)
}

fn is_managed_by_this_controller(endpoints: &Endpoints) -> bool {
    endpoints.metadata.labels.iter().flatten().any(|(name, value)| name == MANAGED_BY && value == MANAGER)
}

fn labels(service: &Service) -> Value {
    let mut labels = json!(service.metadata.labels.clone().unwrap_or_default());
    labels[MANAGED_BY] = MANAGER.into();
    if service.spec.cluster_ip.as_deref() == Some("None") {
        labels["service.kubernetes.io/headless"] = "".into();
    }
    labels
}

fn is_current(known: &Endpoints, subsets: &[EndpointSubset], labels: &Value) -> bool {
    let own = known.metadata.labels.clone().unwrap_or_default();
    let labelled = labels
        .as_object()
        .into_iter()
        .flatten()
        .all(|(name, value)| own.get(name).map(String::as_str) == value.as_str());
    labelled && known.subsets.as_deref().unwrap_or_default() == subsets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_is_reported_with_its_object_and_cause() {
        let mut endpoints = absent(&Key::new("n", "s"));
        let created = failure(&endpoints, "no");
        let expect = "Failed to create endpoint for service n/s: no";
        assert_eq!((created.reason, &*created.message), ("FailedToCreateEndpoint", expect));
        endpoints.metadata.uid = Some("u".to_owned());
        let updated = failure(&endpoints, "no");
        assert_eq!(
            (updated.reason, &*updated.message),
            ("FailedToUpdateEndpoint", "Failed to update endpoint n/s: no")
        );
    }
}

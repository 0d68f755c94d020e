//! Writes the endpoints of services.

use std::sync::Arc;

use coracle_events::Event;
use k8s_openapi::api::core::v1::EndpointSubset;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::{batch, plan, trigger_time};
use crate::context::Context;
use crate::error::{Error, is_already_exists, is_namespace_terminating};
use crate::object::{Endpoints, Key, ObjectExt, Pod, Service};
use crate::queue::{Next, Queue};
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
    on_endpoint_change(context, queue.clone());
}

/// Keeps the index of selectors current. It must be called before other handlers of pods are registered.
pub(crate) fn follow(context: &Context) {
    let selectors = context.selectors.clone();
    context.caches.services.on_change(move |change| {
        if let Some(service) = change.latest() {
            let selecting = change.new.filter(|service| plan::is_ours(service));
            let selector = selecting.and_then(|service| service.spec.selector.as_ref());
            selectors.follow_service(&service.key(), selector);
        }
    });
    let selectors = context.selectors.clone();
    context.caches.pods.on_change(move |change| selectors.follow_pod(change));
}

/// The pods that a service selects, in the order of their names.
pub(crate) fn selected(context: &Context, service: &Service) -> Vec<Arc<Pod>> {
    let selector = service.spec.selector.as_ref();
    context.selectors.pods_of(&context.caches.pods, service.namespace(), selector)
}

/// Queues the services of each pod whose endpoints may change.
pub(crate) fn on_endpoint_change(context: &Context, queue: Arc<Queue<Key>>) {
    let selectors = context.selectors.clone();
    context.caches.pods.on_change(move |change| {
        if let (Some(old), Some(new)) = (change.old, change.new)
            && old.endpoint_facts() == new.endpoint_facts()
        {
            return;
        }
        let services = selectors.services_of(change);
        let count = services.len();
        for (place, service) in services.into_iter().enumerate() {
            match batch::delay(place, count) {
                Some(delay) => queue.add_after(service, delay),
                None => queue.add(service),
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
    let pods = selected(context, &service);
    let plan::DesiredEndpoints { mut subsets, omitted } = plan::desired(&service, &pods);
    let is_truncated = plan::truncate(&mut subsets) || !omitted.is_empty();
    let count = subsets.iter().map(count_addresses).sum();
    let labels = labels(&service);
    match known {
        Some(known)
            if is_current(&known, &subsets, &labels) && is_marked_truncated(&known) == is_truncated => {}
        Some(known) => {
            let before = trigger_time::of_known(&known);
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
    Ok(batch::pause(count, &service, context.selectors.sharing(&key)))
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
    let known = known.subsets.as_deref().unwrap_or_default();
    labelled
        && known.len() == subsets.len()
        && known.iter().zip(subsets).all(|(known, desired)| known.equals(desired))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use super::*;
    use crate::test_api::TestApi;

    fn service(name: &str, version: usize, selector: &Value) -> Service {
        let metadata = json!({"name": name, "namespace": "d", "uid": name,
            "resourceVersion": version.to_string()});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"selector": selector}})).unwrap()
    }

    fn pod(name: &str, version: usize, ready: &str) -> Pod {
        let metadata = json!({"name": name, "namespace": "d", "uid": name, "labels": {"app": "a"},
            "resourceVersion": version.to_string()});
        let status = json!({"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": ready}]});
        serde_json::from_value(json!({"metadata": metadata, "status": status})).unwrap()
    }

    /// The number of reconciles of each service after the changes that `change` makes in 50 steps of 10 ms.
    async fn reconciles(api: &TestApi, change: impl Fn(usize)) -> HashMap<String, usize> {
        let (context, queue) = (&api.context, Arc::new(Queue::new()));
        on_endpoint_change(context, queue.clone());
        let counts = std::sync::Mutex::new(HashMap::<String, usize>::new());
        let work = queue.work("test", |key: Key| {
            let sharing = context.selectors.sharing(&key);
            *counts.lock().unwrap().entry(key.name).or_default() += 1;
            async move { Ok(batch::pause(1, &Service::default(), sharing)) }
        });
        let changes = async {
            for step in 0..50 {
                tokio::time::sleep(Duration::from_millis(10)).await;
                change(step);
            }
            tokio::time::sleep(Duration::from_secs(60)).await;
        };
        tokio::select! {
            () = work => unreachable!("work has no end"),
            () = changes => {}
        }
        counts.into_inner().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn many_changes_of_a_pod_of_very_many_services_are_few_reconciles() {
        let api = TestApi::new(&[]);
        follow(&api.context);
        for number in 0..100 {
            api.context.caches.services.written(service(
                &number.to_string(),
                number + 1,
                &json!({"app": "a"}),
            ));
        }
        let flip = |step: usize| {
            let ready = if step.is_multiple_of(2) { "True" } else { "False" };
            api.context.caches.pods.written(pod("p", step + 1, ready));
        };
        let counts = reconciles(&api, flip).await;
        assert_eq!(counts.len(), 100);
        assert!(counts.values().all(|count| *count <= 2), "{counts:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn changes_of_a_pod_of_few_services_are_not_delayed() {
        let api = TestApi::new(&[]);
        follow(&api.context);
        api.context.caches.services.written(service("web", 1, &json!({"app": "a"})));
        api.context.caches.services.written(service("other", 2, &json!({"app": "b"})));
        let flip = |step: usize| {
            let ready = if step.is_multiple_of(2) { "True" } else { "False" };
            api.context.caches.pods.written(pod("p", step + 1, ready));
        };
        let counts = reconciles(&api, flip).await;
        assert_eq!(counts, HashMap::from([("web".to_owned(), 50)]));
    }

    #[tokio::test]
    async fn a_service_reads_the_pods_that_it_selects_in_the_order_of_their_names() {
        let api = TestApi::new(&[]);
        follow(&api.context);
        let web = service("web", 1, &json!({"app": "a"}));
        api.context.caches.services.written(web.clone());
        for (version, name) in ["b", "a", "c"].into_iter().enumerate() {
            api.context.caches.pods.written(pod(name, version + 1, "True"));
        }
        let names = |service: &Service| -> Vec<String> {
            selected(&api.context, service).iter().map(|pod| pod.name().to_owned()).collect()
        };
        assert_eq!(names(&web), ["a", "b", "c"]);
        assert!(names(&service("other", 2, &json!({"app": "b"}))).is_empty());
        assert!(names(&service("none", 3, &json!(null))).is_empty());
    }

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

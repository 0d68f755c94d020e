//! Writes the EndpointSlices of services.

use std::collections::BTreeMap;
use std::sync::Arc;

use coracle_events::Event;
use coracle_values::CollectMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::topology::{self, Zones};
use super::zone_changes::ZoneChanges;
use super::{pack, plan};
use crate::context::Context;
use crate::endpoint_slice_metrics::{ServiceSync, SliceWrites};
use crate::endpoints::batch;
use crate::endpoints::plan::is_ours;
use crate::endpoints::run::{on_endpoint_change, selected};
use crate::endpoints::trigger_time;
use crate::error::{Error, is_namespace_terminating};
use crate::object::{EndpointSlice, Key, ObjectExt, Pod, Service, controller_of};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// Label of a slice with the name of its service.
pub(crate) const SERVICE_NAME: &str = "kubernetes.io/service-name";
pub(crate) const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
pub(crate) const HEADLESS: &str = "service.kubernetes.io/headless";
const MANAGER: &str = "endpointslice-controller.k8s.io";
/// Maximum bytes of labels that a slice copies from its service, and of annotations that it copies from Endpoints. A
/// service may have megabytes of labels, and one slice for each of its pods.
const MAX_COPIED_BYTES: usize = 16 << 10;
const COMPONENT: &str = "endpoint-slice-controller";

/// Queues changed services, and the services of changed pods and slices. When a node changes, queues the services with
/// automatic topology hints. When the zone of a node changes, queues the services with endpoints on the node.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    context.config.endpoint_slice_metrics.forget_all();
    let (own, zones) = (queue.clone(), context.zones.clone());
    context.caches.services.on_change(move |change| {
        if let Some(service) = change.latest() {
            zones.follow_service(
                service.key(),
                change.new.is_some_and(|service| topology::is_automatic(service)),
            );
            own.add(service.key());
        }
    });
    let own = queue.clone();
    context.caches.endpoint_slices.on_change(move |change| {
        for slice in [change.old, change.new].into_iter().flatten() {
            if let Some(owner) = controller_of(&slice.metadata).filter(|owner| owner.kind == "Service") {
                own.add(Key::new(slice.namespace(), &owner.name));
            }
        }
    });
    on_endpoint_change(context, queue.clone());
    let (own, zones) = (queue.clone(), context.zones.clone());
    context.caches.nodes.on_change(move |change| {
        let (old, new) = (change.old.and_then(topology::zone_node), change.new.and_then(topology::zone_node));
        zones.follow_node(old.as_ref(), new.as_ref()).into_iter().for_each(|service| own.add(service));
    });
    let caches = &context.caches;
    let changes = ZoneChanges::new(queue, &caches.endpoint_slices, &caches.nodes);
    caches.nodes.on_change(move |change| {
        // Nodes of the first list are skipped: every service is reconciled after that list anyway.
        if change.old.is_none() && !changes.has_nodes() {
            return;
        }
        let old = change.old.and_then(|old| topology::zone(old));
        if let Some(node) = change.new.filter(|node| topology::zone(node) != old) {
            changes.changed(node.name());
        }
    });
}

/// Reconciles one service.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let caches = &context.caches;
    // The garbage collector removes the slices of a deleted service.
    let service = caches.services.get(&key).filter(|service| !service.is_being_deleted() && is_ours(service));
    let metrics = &context.config.endpoint_slice_metrics;
    let Some(service) = service else {
        metrics.forget(&key);
        return Ok(Next::Wait);
    };
    let zone_of =
        |node: &str| caches.nodes.get(&Key::new("", node)).as_deref().and_then(topology::zone).cloned();
    let pods = selected(context, &service);
    let plan::DesiredSlices { mut groups, omitted } = plan::desired(&service, &pods, zone_of);
    if let Some(event) = omitted.event() {
        context.record(&*service, COMPONENT, event);
    }
    if topology::is_automatic(&service) {
        let zones = context.zones.processors().and_then(|processors| Zones::of(&processors));
        topology::set_hints(&mut groups, zones.as_ref());
    }
    let count = groups.iter().map(|group| group.endpoints.len()).sum();
    let full_slices = groups.iter().map(pack::full_slices).sum();
    let slices = slices_of(context, &key, service.uid(), MANAGER);
    let owner = service.controller_reference();
    let mut labels = copied(service.metadata.labels.iter().flatten());
    labels.insert(SERVICE_NAME.to_owned(), key.name.clone());
    labels.insert(MANAGED_BY.to_owned(), MANAGER.to_owned());
    if service.spec.cluster_ip.as_deref() == Some("None") {
        labels.insert(HEADLESS.to_owned(), String::new());
    } else {
        labels.remove(HEADLESS);
    }
    let changes = pack::pack(groups, &slices);
    metrics.synced(
        &key,
        &ServiceSync {
            added: changes.added,
            removed: changes.removed,
            endpoints: count,
            slices: (slices.len() + changes.create.len()).saturating_sub(changes.delete.len()),
            full_slices,
            distribution: distribution(&service),
        },
    );
    let trigger = trigger(&service, &pods, &slices, &changes);
    let identity = Identity { owner, labels, annotations: Annotations::Trigger(trigger) };
    let mut writes = SliceWrites::default();
    let applied = apply(context, &key, &identity, changes, &mut writes).await;
    metrics.wrote(writes);
    if let Err(error) = applied {
        if let Some(event) = failure(&key, &error) {
            context.record(&*service, COMPONENT, event);
        }
        return Err(error);
    }
    Ok(batch::pause(count, &service, context.selectors.sharing(&key)))
}

/// The traffic distribution of a service, for the metrics. Automatic topology hints take precedence over the traffic
/// distribution.
fn distribution(service: &Service) -> Option<&str> {
    service.spec.traffic_distribution.as_deref().filter(|_| !topology::is_automatic(service))
}

/// The event of a failed write. A conflict causes no event: the retry reads the new version.
fn failure(service: &Key, error: &Error) -> Option<Event> {
    let message = format!("Error updating Endpoint Slices for Service {service}: {}", error.cause());
    (!error.is_conflict()).then(|| Event::warning("FailedToUpdateEndpointSlices", message))
}

/// The time of the change that caused these writes. `None` if it is unknown, or if no slice is written.
fn trigger(
    service: &Service,
    pods: &[Arc<Pod>],
    slices: &[Arc<EndpointSlice>],
    changes: &pack::Changes,
) -> Option<String> {
    if changes.create.is_empty() && changes.update.is_empty() {
        return None;
    }
    let created = changes.create.iter().flat_map(|group| &group.endpoints);
    let updated = changes.update.iter().flat_map(|(_, endpoints)| endpoints);
    let written = trigger_time::of_endpoints(created.chain(updated));
    trigger_time::time(service, pods, trigger_time::of_slices(slices).as_ref(), &written)
}

/// The owner reference, labels and annotations of all slices of an owner.
pub(crate) struct Identity {
    pub(crate) owner: OwnerReference,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) annotations: Annotations,
}

/// The annotations of slices.
pub(crate) enum Annotations {
    /// Each written slice gets the time of the change that caused the write. `None` if the time is unknown. Other
    /// annotations stay.
    Trigger(Option<String>),
    /// All slices have exactly these annotations.
    Exact(BTreeMap<String, String>),
}

/// Copies the labels or annotations of a service or of Endpoints for its slices, up to [`MAX_COPIED_BYTES`].
pub(crate) fn copied<'a>(
    all: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> BTreeMap<String, String> {
    let mut bytes = 0;
    let fits = |(name, value): &(&String, &String)| {
        bytes += name.len() + value.len();
        bytes <= MAX_COPIED_BYTES
    };
    let copied = all.into_iter().take_while(fits);
    copied.map(|(name, value)| (name.clone(), value.clone())).collect_map()
}

/// The slices of the owner that this manager wrote.
pub(crate) fn slices_of(context: &Context, key: &Key, uid: &str, manager: &str) -> Vec<Arc<EndpointSlice>> {
    let mut all = context.caches.endpoint_slices.owned_by(&key.namespace, uid);
    all.retain(|slice| {
        let labels = slice.metadata.labels.as_ref();
        let by = labels.and_then(|labels| labels.get(MANAGED_BY)).map(String::as_str);
        by == Some(manager) && !slice.is_being_deleted()
    });
    all
}

/// Applies the changes, and counts them. Additions come first, so that no endpoint is missing between two requests.
pub(crate) async fn apply(
    context: &Context,
    key: &Key,
    identity: &Identity,
    changes: pack::Changes,
    writes: &mut SliceWrites,
) -> Result<(), Error> {
    let writer = context.writer(&context.caches.endpoint_slices);
    for group in changes.create {
        let mut slice = json!({
            "metadata": {"generateName": format!("{}-", key.name), "namespace": key.namespace,
                "labels": identity.labels, "ownerReferences": [identity.owner]},
            "addressType": group.slice_key.address_type,
            "endpoints": group.endpoints,
            "ports": group.slice_key.ports,
        });
        if let Some(annotations) = identity.annotations.of_new_slice() {
            slice["metadata"]["annotations"] = annotations;
        }
        match writer.create(&key.namespace, slice).await {
            Err(error) if !is_namespace_terminating(&error) => {
                return Err(Error::Request {
                    verb: "create",
                    object: format!("EndpointSlice of {key}"),
                    source: error,
                });
            }
            Ok(_) => writes.created += 1,
            Err(_) => {}
        }
    }
    for (slice, endpoints) in changes.update {
        let mut patch = json!({"endpoints": endpoints});
        if let Some(metadata) = identity.patch_of_written(&slice) {
            patch["metadata"] = metadata;
        }
        writer.merge(&slice.key(), Part::Main, patch).await?;
        writes.updated += 1;
    }
    for slice in changes.keep {
        if let Some(metadata) = identity.patch_of_kept(&slice) {
            writer.merge(&slice.key(), Part::Main, json!({"metadata": metadata})).await?;
            writes.updated += 1;
        }
    }
    for slice in changes.delete {
        let deleted = writer.delete(&slice, DeleteParams::default()).await;
        deleted.map_err(|source| Error::Request {
            verb: "delete",
            object: format!("EndpointSlice {}", slice.key()),
            source,
        })?;
        writes.deleted += 1;
    }
    Ok(())
}

/// The merge patch of labels or annotations. It has the desired entries, and null for each entry to remove. `None` if
/// all are current.
fn patch_of(known: Option<&BTreeMap<String, String>>, desired: &BTreeMap<String, String>) -> Option<Value> {
    if known.into_iter().flatten().eq(desired) {
        return None;
    }
    let mut patch = json!(desired);
    for name in known.into_iter().flatten().map(|(name, _)| name) {
        if !desired.contains_key(name) {
            patch[name] = Value::Null;
        }
    }
    Some(patch)
}

// === impl Identity ===

impl Identity {
    /// The patch of the metadata of a slice whose endpoints change. `None` if the metadata is current.
    fn patch_of_written(&self, slice: &EndpointSlice) -> Option<Value> {
        let annotations = match &self.annotations {
            // Null removes the time of an earlier change.
            Annotations::Trigger(time) => (time.is_some() || trigger_time::is_set(&slice.metadata))
                .then(|| json!({trigger_time::ANNOTATION: time})),
            Annotations::Exact(desired) => patch_of(slice.metadata.annotations.as_ref(), desired),
        };
        self.patch_with(slice, annotations)
    }

    /// The patch of the metadata of a slice whose endpoints do not change. `None` if the metadata is current.
    fn patch_of_kept(&self, slice: &EndpointSlice) -> Option<Value> {
        let annotations = match &self.annotations {
            Annotations::Trigger(_) => None,
            Annotations::Exact(desired) => patch_of(slice.metadata.annotations.as_ref(), desired),
        };
        self.patch_with(slice, annotations)
    }

    fn patch_with(&self, slice: &EndpointSlice, annotations: Option<Value>) -> Option<Value> {
        let labels = patch_of(slice.metadata.labels.as_ref(), &self.labels);
        let parts = [("labels", labels), ("annotations", annotations)];
        let parts = parts.into_iter().filter_map(|(name, part)| Some((name.to_owned(), part?)));
        let metadata: serde_json::Map<String, Value> = parts.collect_map();
        (!metadata.is_empty()).then_some(Value::Object(metadata))
    }
}

// === impl Annotations ===

impl Annotations {
    fn of_new_slice(&self) -> Option<Value> {
        match self {
            Self::Trigger(time) => time.as_ref().map(|time| json!({trigger_time::ANNOTATION: time})),
            Self::Exact(desired) => (!desired.is_empty()).then(|| json!(desired)),
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_watch::Event as Watched;

    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_reconcile_counts_the_slices_of_its_service() {
        let path = "/apis/discovery.k8s.io/v1/namespaces/n/endpointslices";
        let slice = json!({"metadata": {"namespace": "n", "name": "s-1", "uid": "u", "resourceVersion": "2"},
            "addressType": "IPv4", "endpoints": []});
        let api = TestApi::new(&[(path, slice)]);
        let service = json!({
            "metadata": {"namespace": "n", "name": "s", "uid": "s", "resourceVersion": "1"},
            "spec": {"selector": {"app": "a"}, "clusterIP": "10.43.0.9", "ipFamilies": ["IPv4"],
                "trafficDistribution": "PreferClose"}});
        let (caches, key) = (&api.context.caches, Key::new("n", "s"));
        caches.services.written(serde_json::from_value(service).unwrap());
        reconcile(&api.context, key.clone()).await.unwrap();
        let metrics = &api.context.config.endpoint_slice_metrics;
        let text = metrics.text();
        for line in [
            "endpoint_slice_controller_changes{operation=\"create\"} 1",
            "endpoint_slice_controller_num_endpoint_slices{} 1",
            "endpoint_slice_controller_services_count_by_traffic_distribution{traffic_distribution=\"PreferClose\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        caches.services.removed(&key, "s");
        reconcile(&api.context, key).await.unwrap();
        assert!(metrics.text().contains("endpoint_slice_controller_num_endpoint_slices{} 0\n"));
    }

    #[test]
    fn a_failed_write_is_reported_unless_it_is_a_conflict() {
        let of = |reason| {
            let source = kube::Error::Api(Box::new(kube::core::Status::failure("no", reason)));
            failure(&Key::new("n", "s"), &Error::Request { verb: "patch", object: String::new(), source })
        };
        let event = of("InternalError").unwrap();
        assert_eq!(event.reason, "FailedToUpdateEndpointSlices");
        assert!(
            event.message.starts_with("Error updating Endpoint Slices for Service n/s: "),
            "{}",
            event.message
        );
        assert!(of("Conflict").is_none());
    }

    #[test]
    fn slices_have_few_labels_of_a_service_with_very_many() {
        let labels = |count: usize| -> BTreeMap<String, String> {
            (0..count).map(|number| (format!("label-{number}"), "x".repeat(50))).collect()
        };
        let few = labels(100);
        assert_eq!(copied(&few), few);
        let part = copied(&labels(10_000));
        assert!((200..400).contains(&part.len()), "{}", part.len());
        assert!(copied(&labels(0)).is_empty());
    }

    #[test]
    fn slices_have_exactly_the_annotations_of_their_endpoints() {
        let slice = |annotations: Value| -> EndpointSlice {
            let metadata = json!({"name": "s", "labels": {"a": "1"}, "annotations": annotations});
            serde_json::from_value(json!({"metadata": metadata, "addressType": "IPv4"})).unwrap()
        };
        let identity = |annotations| Identity {
            owner: OwnerReference::default(),
            labels: [("a".to_owned(), "1".to_owned())].into(),
            annotations,
        };
        let one: BTreeMap<_, _> = [("x".to_owned(), "1".to_owned())].into();
        let exact = identity(Annotations::Exact(one));
        assert_eq!(exact.annotations.of_new_slice(), Some(json!({"x": "1"})));
        assert_eq!(exact.patch_of_kept(&slice(json!({"x": "1"}))), None);
        let known = slice(json!({"x": "2", "y": "3"}));
        let patch = json!({"annotations": {"x": "1", "y": null}});
        assert_eq!(exact.patch_of_kept(&known), Some(patch.clone()));
        assert_eq!(exact.patch_of_written(&known), Some(patch));
        let none = identity(Annotations::Exact(BTreeMap::new()));
        assert_eq!([none.annotations.of_new_slice(), none.patch_of_kept(&slice(json!(null)))], [None, None]);
        // The slices of a service keep the annotations of other programs.
        let time = identity(Annotations::Trigger(Some("now".to_owned())));
        let written = json!({"annotations": {trigger_time::ANNOTATION: "now"}});
        assert_eq!([time.patch_of_kept(&known), time.patch_of_written(&known)], [None, Some(written)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_zone_of_a_node_queues_the_services_with_endpoints_there() {
        let api = TestApi::new(&[]);
        let (caches, queue) = (&api.context.caches, Arc::new(Queue::new()));
        listen(&api.context, &queue);
        let (sender, mut queued) = tokio::sync::mpsc::unbounded_channel();
        let worker = queue.clone();
        tokio::spawn(async move {
            worker
                .work("test", |key: Key| {
                    sender.send(key.name).unwrap();
                    async { Ok(Next::Wait) }
                })
                .await;
        });
        let slice = |service: &str, node: &str, zone: &str| {
            let owners = json!([{"apiVersion": "v1", "kind": "Service", "name": service, "uid": service,
                "controller": true}]);
            let slice = json!({
                "metadata": {"namespace": "d", "name": service, "uid": service, "resourceVersion": "1",
                    "ownerReferences": owners},
                "endpoints": [{"addresses": ["10.0.0.1"], "nodeName": node, "zone": zone}]});
            caches.endpoint_slices.written(serde_json::from_value(slice).unwrap());
        };
        let node = |name: &str, version: &str, labels: Value| {
            let node = json!({"metadata": {"name": name, "uid": name, "resourceVersion": version, "labels": labels}});
            caches.nodes.written(serde_json::from_value(node).unwrap());
        };
        for (service, node) in [("one", "a"), ("two", "b"), ("three", "c")] {
            slice(service, node, "z");
            assert_eq!(queued.recv().await.as_deref(), Some(service));
        }
        node("a", "1", json!({"topology.kubernetes.io/zone": "z"}));
        node("a", "2", json!({"topology.kubernetes.io/zone": "z", "other": "label"}));
        node("b", "1", json!({}));
        node("c", "1", json!({"topology.kubernetes.io/zone": "y"}));
        node("b", "2", json!({"topology.kubernetes.io/zone": "y"}));
        assert_eq!(queued.recv().await.as_deref(), Some("two"), "only the zone of b has changed");
        node("a", "3", json!({}));
        assert_eq!(queued.recv().await.as_deref(), Some("one"));
        // After the first list, a node that was created again may have another zone.
        caches.nodes.apply(Watched::Init);
        caches.nodes.apply(Watched::InitDone);
        node("c", "2", json!({"topology.kubernetes.io/zone": "y"}));
        assert_eq!(queued.recv().await.as_deref(), Some("three"));
    }
}

//! Writes EndpointSlices for Endpoints of services without a selector.

use std::sync::Arc;

use super::plan;
use crate::context::Context;
use crate::endpoint_slice::pack;
use crate::endpoint_slice::run::{
    Annotations, HEADLESS, Identity, MANAGED_BY, SERVICE_NAME, apply, copied, slices_of,
};
use crate::endpoint_slice_metrics::SliceWrites;
use crate::error::Error;
use crate::object::{Key, ObjectExt, controller_of};
use crate::queue::{Next, Queue};

const MANAGER: &str = "endpointslicemirroring-controller.k8s.io";
const COMPONENT: &str = "endpoint-slice-mirroring-controller";

/// Queues changed Endpoints, and the Endpoints of changed services and slices.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.endpoints.on_change(move |change| {
        if let Some(endpoints) = change.latest() {
            own.add(endpoints.key());
        }
    });
    let own = queue.clone();
    context.caches.services.on_change(move |change| {
        if let Some(service) = change.latest() {
            own.add(service.key());
        }
    });
    let own = queue.clone();
    context.caches.endpoint_slices.on_change(move |change| {
        for slice in [change.old, change.new].into_iter().flatten() {
            if let Some(owner) = controller_of(&slice.metadata).filter(|owner| owner.kind == "Endpoints") {
                own.add(Key::new(slice.namespace(), &owner.name));
            }
        }
    });
}

/// Reconciles one Endpoints object.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let caches = &context.caches;
    // The garbage collector removes the slices of deleted Endpoints.
    let endpoints = caches.endpoints.get(&key).filter(|endpoints| !endpoints.is_being_deleted());
    let Some(endpoints) = endpoints else { return Ok(Next::Wait) };
    let service = caches.services.get(&key).filter(|service| plan::is_mirrored(&endpoints, service));
    if let Some(event) = service.as_ref().and_then(|_| plan::too_many(&endpoints)) {
        context.record(&*endpoints, COMPONENT, event);
    }
    let groups = if service.is_some() { plan::groups(&endpoints) } else { Vec::new() };
    let mut labels = copied(endpoints.metadata.labels.iter().flatten());
    labels.insert(SERVICE_NAME.to_owned(), key.name.clone());
    labels.insert(MANAGED_BY.to_owned(), MANAGER.to_owned());
    if service.is_some_and(|service| service.spec.cluster_ip.as_deref() == Some("None")) {
        labels.insert(HEADLESS.to_owned(), String::new());
    }
    let slices = slices_of(context, &key, endpoints.uid(), MANAGER);
    let annotations = Annotations::Exact(copied(plan::annotations(&endpoints)));
    let identity = Identity { owner: endpoints.controller_reference(), labels, annotations };
    // The metrics count only the slices of services.
    let mut writes = SliceWrites::default();
    apply(context, &key, &identity, pack::pack(groups, &slices), &mut writes).await?;
    Ok(Next::Wait)
}

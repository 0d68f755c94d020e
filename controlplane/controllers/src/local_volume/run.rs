//! Creates and expands local volumes, and releases the volumes of deleted nodes.

use std::sync::Arc;

use coracle_events::Event;
use serde_json::json;

use super::plan::{self, Provision};
use super::{FINALIZER, PROVISIONER_NAME};
use crate::annotation::{PROVISIONED_BY, SELECTED_NODE};
use crate::context::Context;
use crate::error::{Error, is_already_exists};
use crate::live;
use crate::object::{Claim, Key, ObjectExt, PersistentVolume};
use crate::pod_gc::run::QUARANTINE;
use crate::queue::{Next, Queue};
use crate::queueing::queue_stored;
use crate::write::Part;

const COMPONENT: &str = "local-volume-controller";

/// Queues changed claims, volumes that are being deleted, and the claims of changed classes. A volume's key has no
/// namespace.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.claims, queue);
    let own = queue.clone();
    context.caches.volumes.on_change(move |change| {
        if let Some(volume) = change.new.filter(|volume| volume.is_being_deleted()) {
            own.add(volume.key());
        }
    });
    let (own, index) = (queue.clone(), context.volumes.clone());
    context.caches.storage_classes.on_change(move |change| {
        let pending = change.new.map(|class| index.pending(class.name())).unwrap_or_default();
        pending.into_iter().for_each(|claim| own.add(claim));
    });
    let (own, volumes) = (queue.clone(), context.caches.volumes.clone());
    context.caches.nodes.on_change(move |change| {
        if let (Some(node), None) = (change.old, change.new) {
            let all = volumes.all();
            let orphans = all.iter().filter(|volume| plan::node_of(volume) == Some(node.name()));
            orphans.for_each(|volume| own.add_after(volume.key(), QUARANTINE));
        }
    });
}

/// Reconciles one claim or one volume.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    if key.namespace.is_empty() {
        if let Some(volume) = context.caches.volumes.get(&key) {
            release_orphan(context, &volume).await?;
        }
        return Ok(Next::Wait);
    }
    let Some(claim) = context.caches.claims.get(&key) else { return Ok(Next::Wait) };
    let volume = context.caches.volumes.get(&Key::new("", claim.volume()));
    match volume.filter(|volume| volume.annotation(PROVISIONED_BY) == Some(PROVISIONER_NAME)) {
        Some(volume) => expand(context, &claim, &volume).await?,
        None => provision(context, &claim).await?,
    }
    Ok(Next::Wait)
}

async fn provision(context: &Context, claim: &Claim) -> Result<(), Error> {
    let caches = &context.caches;
    let Some(class) = caches.storage_classes.get(&Key::new("", claim.class())) else { return Ok(()) };
    let node = claim.annotation(SELECTED_NODE).and_then(|node| caches.nodes.get(&Key::new("", node)));
    let failed = |reason: String| {
        let message = format!("failed to provision volume with StorageClass \"{}\": {reason}", class.name());
        context.record(claim, COMPONENT, Event::warning("ProvisioningFailed", message));
    };
    match plan::provision(claim, &class, node.as_deref()) {
        Provision::Nothing => Ok(()),
        Provision::Refuse(reason) => {
            failed(reason);
            Ok(())
        }
        Provision::Reschedule(reason) => {
            failed(reason);
            let patch = json!({"metadata": {
                "uid": claim.uid(), "resourceVersion": claim.metadata.resource_version,
                "annotations": {SELECTED_NODE: null},
            }});
            context.writer(&caches.claims).merge(&claim.key(), Part::Main, patch).await.map(drop)
        }
        Provision::Create(volume) => {
            let name = plan::name_of(claim);
            match context.writer(&caches.volumes).create("", *volume).await {
                Ok(_) => {
                    let message = format!("Successfully provisioned volume {name}");
                    context.record(claim, COMPONENT, Event::normal("ProvisioningSucceeded", message));
                    Ok(())
                }
                Err(error) if is_already_exists(&error) => Ok(()),
                Err(source) => {
                    let object = format!("PersistentVolume {name}");
                    Err(Error::Request { verb: "create", object, source })
                }
            }
        }
    }
}

/// Sets the size of a volume and its claim to the requested size. Admission has checked that the class allows
/// expansion.
async fn expand(context: &Context, claim: &Claim, volume: &PersistentVolume) -> Result<(), Error> {
    let Some(size) = plan::expansion(claim, volume) else { return Ok(()) };
    let node = plan::node_of(volume).and_then(|node| context.caches.nodes.get(&Key::new("", node)));
    if let Some(reason) = node.and_then(|node| plan::exceeds_disk(claim, &node)) {
        context.record(claim, COMPONENT, Event::warning("VolumeResizeFailed", reason));
        return Ok(());
    }
    let capacity = json!({"storage": size});
    let patch = json!({"metadata": {"uid": volume.uid()}, "spec": {"capacity": capacity}});
    context.writer(&context.caches.volumes).merge(&volume.key(), Part::Main, patch).await?;
    let patch = json!({"metadata": {"uid": claim.uid()}, "status": {"capacity": capacity}});
    context.writer(&context.caches.claims).merge(&claim.key(), Part::Status, patch).await?;
    let message = format!("The volume has {size} now");
    context.record(claim, COMPONENT, Event::normal("VolumeResizeSuccessful", message));
    Ok(())
}

/// Removes the finalizer of a volume whose node does not exist any more.
async fn release_orphan(context: &Context, volume: &PersistentVolume) -> Result<(), Error> {
    let node = plan::node_of(volume).unwrap_or_default();
    let exists = context.caches.nodes.get(&Key::new("", node)).is_some();
    if !plan::is_orphan(volume, exists) {
        return Ok(());
    }
    // A node that was just registered may not be in the cache yet. Such a node can remove the directory.
    if !node.is_empty() && live::has_node(&context.client, node).await? {
        return Ok(());
    }
    let kept: Vec<&String> =
        volume.metadata.finalizers.iter().flatten().filter(|name| *name != FINALIZER).collect();
    let patch = json!({"metadata": {
        "uid": volume.uid(), "resourceVersion": volume.metadata.resource_version, "finalizers": kept,
    }});
    match context.writer(&context.caches.volumes).merge(&volume.key(), Part::Main, patch).await {
        Err(Error::Request { source, .. }) if crate::error::is_not_found(&source) => Ok(()),
        other => other.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local_volume::NODE;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_volume_keeps_its_finalizer_while_the_api_server_has_the_node() {
        let path = "/api/v1/persistentvolumes/v";
        let volume = json!({"metadata": {"name": "v", "uid": "u", "resourceVersion": "7", "labels": {NODE: "a"},
            "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER]}});
        let node = ("/api/v1/nodes/a", json!({"metadata": {"name": "a"}}));
        for (objects, releases) in
            [(vec![(path, volume.clone()), node], false), (vec![(path, volume.clone())], true)]
        {
            let api = TestApi::new(&objects);
            api.context.caches.volumes.written(serde_json::from_value(volume.clone()).unwrap());
            reconcile(&api.context, Key::new("", "v")).await.unwrap();
            assert_eq!(api.writes().len(), usize::from(releases));
        }
    }
}

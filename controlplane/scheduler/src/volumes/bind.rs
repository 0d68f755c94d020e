//! Binds the claims of a pod to volumes, before the pod is bound to its node.

use std::time::Duration;

use coracle_values::object::{Key, ObjectExt};
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Error};
use serde_json::{Value, json};

use super::object::{Claim, Volume};
use super::{BOUND_BY_CONTROLLER, Choice, ChosenVolume, SELECTED_NODE, Volumes};

/// The reason why the volumes of a pod are not bound.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    /// A request failed.
    #[error(transparent)]
    Request(#[from] Error),
    /// The volumes were not bound in time, or a claim or a volume changed and the choice is no longer valid.
    #[error("binding volumes: {0}")]
    Volumes(String),
    /// A resource claim changed, so the choice of devices is no longer valid.
    #[error("allocating devices: {0}")]
    Devices(String),
    /// The drivers did not set the binding conditions of the pod's devices.
    #[error("{0}")]
    DeviceConditions(String),
    /// The extender that binds the pod failed.
    #[error("{0}")]
    Extender(String),
}

/// Writes the choices, and waits until every claim is bound, at most for `timeout`.
pub(crate) async fn bind(
    client: &Client,
    volumes: &Volumes,
    chosen: &[ChosenVolume],
    node: &str,
    timeout: Duration,
) -> Result<(), BindError> {
    if chosen.is_empty() {
        return Ok(());
    }
    let mut changes = volumes.changes();
    for ChosenVolume { claim: key, choice } in chosen {
        match choice {
            Choice::Existing(volume) => reserve(client, volumes, key, volume).await?,
            Choice::Provision => select_node(client, volumes, key, node).await?,
        }
    }
    let bound = async {
        loop {
            changes.borrow_and_update();
            if all_bound(volumes, chosen, node)? {
                return Ok(());
            }
            if changes.changed().await.is_err() {
                return Err(BindError::Volumes("the scheduler is stopping".to_owned()));
            }
        }
    };
    match tokio::time::timeout(timeout, bound).await {
        Ok(done) => done,
        Err(_) => Err(BindError::Volumes("context deadline exceeded".to_owned())),
    }
}

/// Reserves a volume for a claim. The volume binding controller completes the binding.
async fn reserve(client: &Client, volumes: &Volumes, key: &Key, volume: &str) -> Result<(), BindError> {
    let patch = {
        let state = volumes.lock();
        let (claim, volume) = (state.claims.get(key), state.volumes.get(volume));
        let Some((claim, volume)) = claim.zip(volume) else {
            return Err(BindError::Volumes(format!(
                "persistentvolumeclaim {:?} or its volume is gone",
                key.name
            )));
        };
        reservation(claim, volume)
    };
    let api: Api<Volume> = Api::all(client.clone());
    api.patch(volume, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

fn reservation(claim: &Claim, volume: &Volume) -> Value {
    let mut metadata = json!({"uid": volume.uid(), "resourceVersion": volume.metadata.resource_version});
    if volume.spec.claim_ref.is_none()
        && let Some(metadata) = metadata.as_object_mut()
    {
        metadata.insert("annotations".to_owned(), json!({BOUND_BY_CONTROLLER: "yes"}));
    }
    json!({"metadata": metadata, "spec": {"claimRef": {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": claim.namespace(),
        "name": claim.name(), "uid": claim.uid(), "resourceVersion": claim.metadata.resource_version,
    }}})
}

/// Sets the annotation of the claim with the node for the provisioner.
async fn select_node(client: &Client, volumes: &Volumes, key: &Key, node: &str) -> Result<(), BindError> {
    let patch = {
        let state = volumes.lock();
        let Some(claim) = state.claims.get(key) else {
            return Err(BindError::Volumes(format!("persistentvolumeclaim {:?} is gone", key.name)));
        };
        if claim.annotation(SELECTED_NODE) == Some(node) {
            return Ok(());
        }
        json!({"metadata": {"uid": claim.uid(), "resourceVersion": claim.metadata.resource_version,
            "annotations": {SELECTED_NODE: node}}})
    };
    let api: Api<Claim> = Api::namespaced(client.clone(), &key.namespace);
    let patched = api.patch(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
    // The watch may still have the claim without the annotation. That state must not count as a refusal by the
    // provisioner.
    volumes.lock().update_claim(key, patched);
    Ok(())
}

/// Whether every claim is bound.
///
/// # Errors
/// A claim is being deleted, or the provisioner has refused the node. The pod must be scheduled again.
fn all_bound(volumes: &Volumes, chosen: &[ChosenVolume], node: &str) -> Result<bool, BindError> {
    let state = volumes.lock();
    let mut all = true;
    for ChosenVolume { claim: key, choice } in chosen {
        let gone = || BindError::Volumes(format!("persistentvolumeclaim {:?} is gone", key.name));
        let claim = state.claims.get(key).filter(|claim| !claim.is_being_deleted()).ok_or_else(gone)?;
        if claim.is_bound() {
            continue;
        }
        all = false;
        if *choice == Choice::Provision && claim.annotation(SELECTED_NODE) != Some(node) {
            // The provisioner has removed the annotation, because it cannot create the volume for this node.
            let why = format!("provisioning failed for PVC {:?}", key.name);
            return Err(BindError::Volumes(why));
        }
    }
    Ok(all)
}

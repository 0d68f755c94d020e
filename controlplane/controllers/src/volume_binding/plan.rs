//! The next writes for one claim or one volume. No I/O.

use std::sync::Arc;

use coracle_events::Event;
use serde_json::{Value, json};

use super::matching::{best, has_same_mode, mismatch};
use super::{BIND_COMPLETED, BOUND_BY_CONTROLLER, PROVISIONER};
use crate::annotation::{PROVISIONED_BY, SELECTED_NODE};
use crate::local_volume;
use crate::object::{Claim, ObjectExt, PersistentVolume, Pod, StorageClass};
use crate::write::Part;

/// The provisioner of classes whose volumes an administrator creates.
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";

/// The observed state of a claim.
pub(crate) struct ObservedClaim<'a> {
    pub(crate) claim: &'a Claim,
    /// The volume in `spec.volumeName`.
    pub(crate) volume: Option<Arc<PersistentVolume>>,
    /// The claim's storage class.
    pub(crate) class: Option<Arc<StorageClass>>,
    /// Name of the default storage class.
    pub(crate) default_class: Option<String>,
    /// Volumes to which the claim could be bound.
    pub(crate) candidates: Vec<Arc<PersistentVolume>>,
    /// Names of the pods without a node that use the claim, if the claim waits for its first pod.
    pub(crate) pods: Vec<String>,
}

/// One step. Steps are applied in order, up to the first failure.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    PatchClaim(Part, Value),
    PatchVolume {
        name: String,
        part: Part,
        patch: Value,
    },
    /// Deletes this version of a released volume. The provisioner removes the data before the object is removed.
    DeleteVolume,
    Record(&'static str, bool, String),
    /// Records a warning about the claim of a volume.
    WarnClaim(&'static str, String),
}

// === impl Action ===

impl Action {
    fn warning(reason: &'static str, message: impl Into<String>) -> Action {
        Action::Record(reason, true, message.into())
    }

    fn normal(reason: &'static str, message: impl Into<String>) -> Action {
        Action::Record(reason, false, message.into())
    }
}

/// The event that a step records.
pub(crate) fn event(reason: &'static str, is_warning: bool, message: String) -> Event {
    if is_warning { Event::warning(reason, message) } else { Event::normal(reason, message) }
}

/// The steps for a claim.
pub(crate) fn claim(observed: &ObservedClaim<'_>) -> Vec<Action> {
    if observed.claim.annotation(BIND_COMPLETED).is_some() {
        return bound_claim(observed);
    }
    if observed.claim.is_being_deleted() {
        return Vec::new();
    }
    if observed.claim.volume().is_empty() {
        return unbound_claim(observed);
    }
    let name = observed.claim.volume();
    let Some(volume) = &observed.volume else {
        return phase(observed.claim, "Pending");
    };
    if volume.spec.claim_ref.is_none() {
        let why = match mismatch(observed.claim, volume) {
            _ if volume.is_being_deleted() => Some(format!("the volume is marked for deletion \"{name}\"")),
            why => why.map(str::to_owned),
        };
        if let Some(why) = why {
            let message = format!("Cannot bind to requested volume \"{name}\": {why}");
            return [phase(observed.claim, "Pending"), vec![Action::warning("VolumeMismatch", message)]]
                .concat();
        }
        return bind(observed.claim, volume);
    }
    if volume.is_for(observed.claim) {
        return bind(observed.claim, volume);
    }
    let message = format!("volume \"{name}\" already bound to a different claim.");
    [phase(observed.claim, "Pending"), vec![Action::warning("FailedBinding", message)]].concat()
}

fn unbound_claim(observed: &ObservedClaim<'_>) -> Vec<Action> {
    let claim = observed.claim;
    let waits = observed.class.as_ref().is_some_and(|class| class.waits_for_pod());
    if let Some(volume) = best(claim, &observed.candidates, waits) {
        return bind(claim, &volume);
    }
    if let (None, None, Some(default)) = (
        &claim.spec.storage_class_name,
        claim.annotation("volume.beta.kubernetes.io/storage-class"),
        &observed.default_class,
    ) {
        // The claim was created before the default class, so it gets the class now.
        let patch = json!({"metadata": version(claim), "spec": {"storageClassName": default}});
        return vec![Action::PatchClaim(Part::Main, patch)];
    }
    let selected = claim.annotation(SELECTED_NODE).is_some();
    let mut steps = phase(claim, "Pending");
    if waits && !selected {
        steps.push(waiting(&observed.pods));
        return steps;
    }
    if claim.class().is_empty() {
        let message = "no persistent volumes available for this claim and no storage class is set";
        steps.push(Action::normal("FailedBinding", message));
        return steps;
    }
    let Some(class) = &observed.class else {
        let message = format!("storageclass.storage.k8s.io \"{}\" not found", claim.class());
        steps.push(Action::warning("ProvisioningFailed", message));
        return steps;
    };
    if class.provisioner == NO_PROVISIONER {
        let message = format!("no volume plugin matched name: {NO_PROVISIONER}");
        steps.push(Action::warning("ProvisioningFailed", message));
        return steps;
    }
    if claim.annotation(PROVISIONER) != Some(&class.provisioner) {
        let annotations = json!({
            PROVISIONER: class.provisioner,
            "volume.beta.kubernetes.io/storage-provisioner": class.provisioner,
        });
        let mut metadata = version(claim);
        metadata["annotations"] = annotations;
        steps.push(Action::PatchClaim(Part::Main, json!({"metadata": metadata})));
    }
    if class.provisioner != local_volume::PROVISIONER_NAME {
        let message = format!(
            "Waiting for a volume to be created either by the external provisioner '{}' or manually by the system \
             administrator. If volume creation is delayed, please verify that the provisioner is running and \
             correctly registered.",
            class.provisioner
        );
        steps.push(Action::normal("ExternalProvisioning", message));
    }
    steps
}

/// The event of a claim that waits for its first pod. Source: `emitEventForUnboundDelayBindingClaim`.
fn waiting(pods: &[String]) -> Action {
    let message = match pods {
        [] => {
            let message = "waiting for first consumer to be created before binding";
            return Action::normal("WaitForFirstConsumer", message);
        }
        [pod] => format!("waiting for pod {pod} to be scheduled"),
        pods => format!("waiting for pods {} to be scheduled", pods.join(",")),
    };
    Action::normal("WaitForPodScheduled", message)
}

/// Whether the events about an unbound claim name its pods.
pub(crate) fn names_pods(claim: &Claim, class: Option<&StorageClass>) -> bool {
    let waits = class.is_some_and(StorageClass::waits_for_pod);
    waits && claim.volume().is_empty() && claim.annotation(SELECTED_NODE).is_none()
}

/// Whether a pod without a node uses the claim.
pub(crate) fn is_pending_user(pod: &Pod, claim: &Claim) -> bool {
    pod.spec.node_name.as_deref().is_none_or(str::is_empty)
        && pod.is_active()
        && pod.spec.volumes.iter().any(|volume| volume.claim_name(pod.name()) == claim.name())
}

fn bound_claim(observed: &ObservedClaim<'_>) -> Vec<Action> {
    let claim = observed.claim;
    let lost = |reason, message: &str| {
        if claim.status.phase.as_deref() == Some("Lost") {
            return Vec::new();
        }
        [phase(claim, "Lost"), vec![Action::warning(reason, message)]].concat()
    };
    if claim.volume().is_empty() {
        return lost(
            "ClaimLost",
            "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!",
        );
    }
    match &observed.volume {
        None => lost("ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!"),
        Some(volume) if volume.spec.claim_ref.is_none() || volume.is_for(claim) => bind(claim, volume),
        Some(_) => {
            lost("ClaimMisbound", "Two claims are bound to the same volume, this one is bound incorrectly")
        }
    }
}

/// The remaining writes to bind a claim and a volume to each other.
fn bind(claim: &Claim, volume: &PersistentVolume) -> Vec<Action> {
    let mut steps = Vec::new();
    let name = volume.name().to_owned();
    let of = volume.spec.claim_ref.as_ref();
    if of.and_then(|of| of.uid.as_deref()) != Some(claim.uid()) {
        let mut metadata = version(volume);
        if of.is_none() {
            metadata["annotations"] = json!({BOUND_BY_CONTROLLER: "yes"});
        }
        let reference = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": claim.namespace(),
            "name": claim.name(), "uid": claim.uid(), "resourceVersion": claim.metadata.resource_version,
        });
        let patch = json!({"metadata": metadata, "spec": {"claimRef": reference}});
        steps.push(Action::PatchVolume { name: name.clone(), part: Part::Main, patch });
    }
    if volume.status.phase.as_deref() != Some("Bound") {
        let patch = json!({"metadata": {"uid": volume.uid()},
            "status": {"phase": "Bound", "message": null, "reason": null}});
        steps.push(Action::PatchVolume { name: name.clone(), part: Part::Status, patch });
    }
    if claim.volume() != name || claim.annotation(BIND_COMPLETED).is_none() {
        let mut annotations = json!({BIND_COMPLETED: "yes"});
        if claim.volume().is_empty() {
            annotations[BOUND_BY_CONTROLLER] = "yes".into();
        }
        let mut metadata = version(claim);
        metadata["annotations"] = annotations;
        let patch = json!({"metadata": metadata, "spec": {"volumeName": name}});
        steps.push(Action::PatchClaim(Part::Main, patch));
    }
    if claim.status.phase.as_deref() != Some("Bound") {
        let mut status = json!({
            "phase": "Bound", "accessModes": volume.spec.access_modes, "capacity": volume.spec.capacity,
        });
        // Later the resizer of the volume's driver writes the class (`updateClaimStatus`). So this controller writes
        // the class only at the first binding.
        if claim.status.phase.as_deref() != Some("Lost") {
            status["currentVolumeAttributesClassName"] = json!(volume.spec.volume_attributes_class_name);
        }
        let patch = json!({"metadata": {"uid": claim.uid()}, "status": status});
        steps.push(Action::PatchClaim(Part::Status, patch));
    }
    steps
}

/// Sets the phase of a claim without a volume, and removes the access modes, the capacity and the current
/// VolumeAttributesClass from its status.
fn phase(claim: &Claim, phase: &str) -> Vec<Action> {
    if claim.status.phase.as_deref() == Some(phase) {
        return Vec::new();
    }
    let status = json!({
        "phase": phase, "accessModes": null, "capacity": null, "currentVolumeAttributesClassName": null,
    });
    vec![Action::PatchClaim(Part::Status, json!({"metadata": {"uid": claim.uid()}, "status": status}))]
}

/// The claim of a volume in the cache. `None` if the cache has no such claim, or another claim of the same name. The
/// cache may be older than the volume, and a wrong release may delete data. Source: `syncVolume` in `pv_controller.go`.
pub(crate) fn cached_claim(volume: &PersistentVolume, cached: Option<Arc<Claim>>) -> Option<Arc<Claim>> {
    cached.filter(|claim| volume.is_for(claim))
}

/// The steps for a volume. `claim` is the claim in its claimRef.
pub(crate) fn volume(volume: &PersistentVolume, claim: Option<&Claim>) -> Vec<Action> {
    let uid = volume.spec.claim_ref.as_ref().and_then(|reference| reference.uid.as_deref());
    if volume.is_being_deleted() {
        // A bound volume is protected from deletion. Without the phase Released the volume would never be removed.
        let is_left = uid.is_some_and(|uid| !uid.is_empty() && claim.is_none_or(|claim| claim.uid() != uid));
        return if is_left { volume_phase(volume, "Released", None) } else { Vec::new() };
    }
    let uid = uid.unwrap_or_default();
    if uid.is_empty() {
        return volume_phase(volume, "Available", None);
    }
    let Some(claim) = claim.filter(|claim| claim.uid() == uid) else { return released(volume) };
    if claim.volume() == volume.name() {
        return volume_phase(volume, "Bound", None);
    }
    if claim.volume().is_empty() && !has_same_mode(claim, volume) {
        // The reconcile of the claim does not consider this volume, so the claim's other events do not name the volume.
        let message =
            |what: String| format!("Cannot bind PersistentVolume {what} due to incompatible volumeMode.");
        let of_volume = message(format!("to requested PersistentVolumeClaim \"{}\"", claim.name()));
        let of_claim = message(format!("\"{}\" to requested PersistentVolumeClaim", volume.name()));
        return vec![
            Action::warning("VolumeMismatch", of_volume),
            Action::WarnClaim("VolumeMismatch", of_claim),
        ];
    }
    if claim.volume().is_empty() {
        // The claim's own reconcile completes the binding.
        return Vec::new();
    }
    // The claim is bound to another volume. A volume that was provisioned for the claim is deleted if its reclaim
    // policy is `Delete`. Otherwise the volume becomes available to other claims.
    let is_deleted = volume.spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete");
    if is_deleted && volume.annotation(PROVISIONED_BY).is_some() {
        return released(volume);
    }
    let chosen = volume.annotation(BOUND_BY_CONTROLLER).is_some();
    let reference = if chosen { Value::Null } else { json!({"uid": null, "resourceVersion": null}) };
    let mut metadata = version(volume);
    metadata["annotations"] = json!({BOUND_BY_CONTROLLER: null});
    let patch = json!({"metadata": metadata, "spec": {"claimRef": reference}});
    vec![Action::PatchVolume { name: volume.name().to_owned(), part: Part::Main, patch }]
}

fn released(volume: &PersistentVolume) -> Vec<Action> {
    let failed = |reason, message: String| {
        if volume.status.phase.as_deref() == Some("Failed") {
            return Vec::new();
        }
        [volume_phase(volume, "Failed", Some(&message)), vec![Action::warning(reason, message)]].concat()
    };
    let steps = volume_phase(volume, "Released", None);
    match volume.spec.persistent_volume_reclaim_policy.as_deref() {
        Some("Delete") => match volume.annotation(PROVISIONED_BY) {
            // The phase is written first. The response contains the current reclaim policy and queues the volume again.
            Some(local_volume::PROVISIONER_NAME) if steps.is_empty() => vec![Action::DeleteVolume],
            Some(_) => steps,
            None => failed(
                "VolumeFailedDelete",
                format!(
                    "error getting deleter volume plugin for volume \"{}\": no deletable volume plugin matched",
                    volume.name()
                ),
            ),
        },
        Some("Recycle") => failed("VolumeFailedRecycle", "no volume plugin matched".to_owned()),
        Some(_) | None => steps,
    }
}

fn volume_phase(volume: &PersistentVolume, phase: &str, message: Option<&str>) -> Vec<Action> {
    if volume.status.phase.as_deref() == Some(phase) {
        return Vec::new();
    }
    let patch = json!({"metadata": {"uid": volume.uid()}, "status": {"phase": phase, "message": message}});
    vec![Action::PatchVolume { name: volume.name().to_owned(), part: Part::Status, patch }]
}

/// Metadata that limits a patch to this version of the object.
fn version<K: ObjectExt>(object: &K) -> Value {
    json!({"uid": object.uid(), "resourceVersion": object.meta().resource_version})
}

#[cfg(test)]
mod tests;

//! Writes the chosen devices into the claims of a pod, before the pod is bound to its node.

use coracle_values::object::ObjectExt;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Error};
use serde_json::{Value, json};

use super::object::Claim;
use super::{Devices, Reservations};
use crate::object::Pod;
use crate::volumes::bind::BindError;

/// Finalizer that keeps a claim until its devices are free.
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// Attempts to write a claim that others change at the same time, as upstream.
const ATTEMPTS: usize = 5;

/// Writes the allocations into the claims, and the pod into `reservedFor` of the claims.
pub(crate) async fn bind(
    client: &Client,
    devices: &Devices,
    pod: &Pod,
    reserved: &Reservations,
) -> Result<(), BindError> {
    let api: Api<Claim> = Api::namespaced(client.clone(), pod.namespace());
    for (key, allocation) in reserved {
        if allocation.is_none() {
            devices.settled(key).await;
        }
        // The next pod of the gang reads the claim that this pod wrote, so that the writes do not conflict.
        let _turn = if pod.group().is_some() { Some(devices.shared.turn.lock().await) } else { None };
        let known = devices.lock().reserved_claim(key, allocation.as_ref());
        let claim = known.map_err(BindError::Devices)?;
        if let Some(written) = write(&api, pod, claim, allocation.as_ref()).await? {
            // Another pod with this claim may be scheduled before the watch delivers the claim.
            devices.apply(|state| state.update(key, written));
        }
    }
    Ok(())
}

/// Writes a claim. After a conflict the latest version is written, because other pods may reserve the claim at the same
/// time. `None` if the claim already has the allocation and the pod.
async fn write(
    api: &Api<Claim>,
    pod: &Pod,
    mut claim: Claim,
    allocation: Option<&Value>,
) -> Result<Option<Claim>, BindError> {
    let mut attempts = 1;
    loop {
        match write_once(api, pod, claim.clone(), allocation).await {
            Err(Error::Api(status)) if status.is_conflict() && attempts < ATTEMPTS => attempts += 1,
            done => return Ok(done?),
        }
        claim = latest(api, &claim, allocation).await?;
    }
}

/// Writes this version of a claim. It fails if the claim has changed.
async fn write_once(
    api: &Api<Claim>,
    pod: &Pod,
    mut claim: Claim,
    allocation: Option<&Value>,
) -> Result<Option<Claim>, Error> {
    if let (Some(_), Some(finalizers)) = (allocation, missing_finalizer(&claim)) {
        // The finalizer is written before the allocation. Otherwise the deletion of the claim could release devices that
        // the pod uses.
        let patch = json!({"metadata": version(&claim, &[("finalizers", finalizers)])});
        claim = api.patch(claim.name(), &PatchParams::default(), &Patch::Merge(patch)).await?;
    }
    let Some(status) = status(&claim, pod, allocation) else { return Ok(None) };
    let patch = json!({"metadata": version(&claim, &[]), "status": status});
    api.patch_status(claim.name(), &PatchParams::default(), &Patch::Merge(patch)).await.map(Some)
}

/// The latest version of a claim. Fails if the planned reservation is not valid for this version.
async fn latest(api: &Api<Claim>, claim: &Claim, allocation: Option<&Value>) -> Result<Claim, BindError> {
    let latest = api.get(claim.name()).await?;
    let is_same = latest.uid() == claim.uid() && !latest.is_being_deleted();
    let holds = match allocation {
        Some(_) => latest.status.allocation.is_none(),
        None => latest.status.allocation == claim.status.allocation,
    };
    if is_same && holds {
        Ok(latest)
    } else {
        Err(BindError::Devices(format!("resourceclaim {} changed", claim.key())))
    }
}

fn version(claim: &Claim, more: &[(&str, Value)]) -> Value {
    let mut metadata = json!({"uid": claim.uid(), "resourceVersion": claim.metadata.resource_version});
    for (field, value) in more {
        metadata[*field] = value.clone();
    }
    metadata
}

/// The finalizers of the claim and this one. `None` if the claim already has it.
fn missing_finalizer(claim: &Claim) -> Option<Value> {
    let own = claim.metadata.finalizers.as_deref().unwrap_or_default();
    let has = own.iter().any(|one| one == FINALIZER);
    (!has).then(|| own.iter().map(String::as_str).chain([FINALIZER]).collect())
}

/// The status with the allocation and the pod in `reservedFor`. `None` if the claim already has both.
pub(super) fn status(claim: &Claim, pod: &Pod, allocation: Option<&Value>) -> Option<Value> {
    let mut users = claim.status.reserved_for.clone();
    let is_user = users.iter().any(|user| user["uid"] == pod.uid());
    if is_user && (allocation.is_none() || claim.status.allocation.is_some()) {
        return None;
    }
    if !is_user {
        users.push(json!({"resource": "pods", "name": pod.name(), "uid": pod.uid()}));
    }
    let mut status = json!({"reservedFor": users});
    if let Some(allocation) = allocation {
        status["allocation"] = allocation.clone();
    }
    Some(status)
}

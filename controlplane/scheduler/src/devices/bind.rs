//! Writes the chosen devices into the claims of a pod, before the pod is bound to its node.

use coracle_values::object::{Key, ObjectExt};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::Request;
use kube::{Client, Error, Resource};
use serde_json::{Value, json};

use super::object::Claim;
use super::{Devices, Reservations, extended};
use crate::object::Pod;
use crate::volumes::bind::BindError;

/// Finalizer that keeps a claim until its devices are free.
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// Field of an allocation with the time at which it was written.
const ALLOCATED_AT: &str = "allocationTimestamp";

/// Attempts to write a claim that other clients change at the same time, as upstream.
const ATTEMPTS: usize = 5;

/// A claim whose devices a pod cannot use.
#[derive(Debug)]
pub(crate) struct UnusableClaim {
    pub(super) claim: Claim,
    /// Whether an earlier attempt created this claim for the pod's extended resources.
    pub(crate) is_former: bool,
}

/// The allocation of a claim that does not exist yet.
#[derive(Clone, Copy)]
struct NewAllocation<'a> {
    /// The key of the reservation until the claim has a name.
    key: &'a Key,
    allocation: &'a Value,
}

/// Writes the allocations into the claims, and the pod into `reservedFor` of the claims. Creates the claim for the
/// pod's extended resources. Returns the keys of the claims. After an error, [`unreserve`] removes the pod from
/// `reservedFor` again. The written allocations stay.
pub(crate) async fn bind(
    client: &Client,
    devices: &Devices,
    pod: &Pod,
    reserved: &Reservations,
) -> Result<Vec<Key>, BindError> {
    let mut keys = Vec::with_capacity(reserved.len());
    let done = bind_all(client, devices, pod, reserved, &mut keys).await;
    if done.is_err() {
        unreserve(client, devices, pod, &keys).await;
    }
    done.map(|()| keys)
}

/// Writes all claims. `keys` gets the keys of the claims that may be written.
async fn bind_all(
    client: &Client,
    devices: &Devices,
    pod: &Pod,
    reserved: &Reservations,
    keys: &mut Vec<Key>,
) -> Result<(), BindError> {
    let api: Api<Claim> = Api::namespaced(client.clone(), pod.namespace());
    for (key, allocation) in reserved {
        if let Some(allocation) = allocation.as_ref().filter(|_| extended::is_uncreated(key)) {
            let new = NewAllocation { key, allocation };
            let created = create(client, devices, pod, new).await?;
            keys.push(created.key());
            allocate(client, devices, pod, created, new).await?;
            continue;
        }
        keys.push(key.clone());
        if allocation.is_none() {
            devices.wait_for_allocation(key).await;
        }
        // The next pod of the gang reads the claim that this pod wrote, so that the writes do not conflict.
        let _guard = if pod.group().is_some() { Some(devices.shared.gang_writes.lock().await) } else { None };
        let known = devices.lock().reserved_claim(key, allocation.as_ref());
        let claim = known.map_err(BindError::Devices)?;
        let allocation = allocation.as_ref().map(with_time);
        if let Some(written) = write(&api, pod, claim, allocation.as_ref()).await? {
            // Another pod with this claim may be scheduled before the watch delivers the claim.
            devices.apply(|state| state.update(key, written));
        }
    }
    Ok(())
}

/// Creates the claim for the pod's extended resources.
async fn create(
    client: &Client,
    devices: &Devices,
    pod: &Pod,
    NewAllocation { key, allocation }: NewAllocation<'_>,
) -> Result<Claim, BindError> {
    let object = {
        let state = devices.lock();
        let new = state.new_claims.get(key).filter(|_| state.assumed.get(key) == Some(allocation));
        new.map(|new| new.object(pod).to_string())
    };
    let missing = || BindError::Devices("extended resource claim not found".to_owned());
    let object = object.ok_or_else(missing)?;
    let request = Request::new(Claim::url_path(&(), Some(pod.namespace())));
    let request = request.create(&PostParams::default(), object.into_bytes()).map_err(Error::BuildRequest)?;
    Ok(client.request(request).await?)
}

/// Writes the allocation into the created claim for extended resources, and the claim into the pod's status.
async fn allocate(
    client: &Client,
    devices: &Devices,
    pod: &Pod,
    created: Claim,
    NewAllocation { key, allocation }: NewAllocation<'_>,
) -> Result<(), BindError> {
    let api: Api<Claim> = Api::namespaced(client.clone(), pod.namespace());
    let status = devices.lock().new_claims.get(key).map(|new| new.pod_status(created.name()));
    let written = write(&api, pod, created, Some(&with_time(allocation))).await?;
    if let Some(written) = written {
        devices.apply(|state| state.put_created(key, written));
    }
    let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"extendedResourceClaimStatus": status}});
    let pods: Api<Pod> = Api::namespaced(client.clone(), pod.namespace());
    pods.patch_status(pod.name(), &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

/// Removes the pod from `reservedFor` of its claims, and deletes the claim for its extended resources. It is called if
/// a claim was not written, if the binding conditions were not met, or if the binding request failed. Without this
/// call, the devices would stay reserved without use. As upstream, the written allocations stay. Errors are only
/// logged, because the pod is scheduled again in any case.
///
/// A bound pod keeps its claims, as in [`deallocate`].
pub(crate) async fn unreserve(client: &Client, devices: &Devices, pod: &Pod, keys: &[Key]) {
    // An error of this request is ignored, because the following requests then most likely fail, too.
    if matches!(find(client, pod).await, Ok(Some(latest)) if latest.node().is_some()) {
        return;
    }
    for key in keys {
        if let Err(error) = unreserve_one(client, devices, pod, key).await {
            tracing::debug!(claim = key.name, namespace = key.namespace, %error, "cannot release a claim");
        }
    }
}

/// The latest version of the pod. `None` if it was deleted.
async fn find(client: &Client, pod: &Pod) -> Result<Option<Pod>, Error> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), pod.namespace());
    Ok(pods.get_opt(pod.name()).await?.filter(|latest| latest.uid() == pod.uid()))
}

async fn unreserve_one(client: &Client, devices: &Devices, pod: &Pod, key: &Key) -> Result<(), Error> {
    let api: Api<Claim> = Api::namespaced(client.clone(), pod.namespace());
    let mut attempts = 1;
    loop {
        let Some(claim) = api.get_opt(&key.name).await? else { return Ok(()) };
        let done = if extended::pod_of(&claim) == Some(pod.uid()) {
            delete(client, pod, &claim).await
        } else {
            remove_user(&api, devices, pod, &claim).await
        };
        match done {
            Err(Error::Api(status)) if status.is_conflict() && attempts < ATTEMPTS => attempts += 1,
            done => return done,
        }
    }
}

async fn remove_user(api: &Api<Claim>, devices: &Devices, pod: &Pod, claim: &Claim) -> Result<(), Error> {
    let users = &claim.status.reserved_for;
    let others: Vec<&Value> = users.iter().filter(|user| user["uid"] != pod.uid()).collect();
    if others.len() == users.len() {
        return Ok(());
    }
    let patch = json!({"metadata": version(claim, &[]), "status": {"reservedFor": others}});
    let written = api.patch_status(claim.name(), &PatchParams::default(), &Patch::Merge(patch)).await?;
    devices.apply(|state| state.update(&written.key(), written));
    Ok(())
}

/// Deletes the claim for a pod's extended resources. The finalizer of the claim is removed first, because the pod still
/// exists.
async fn delete(client: &Client, pod: &Pod, claim: &Claim) -> Result<(), Error> {
    // Remove the claim from the pod's status. In the next attempt, a device plugin may provide the resources. The node
    // would then wait for the deleted claim.
    let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"extendedResourceClaimStatus": null}});
    let pods: Api<Pod> = Api::namespaced(client.clone(), pod.namespace());
    match pods.patch_status(pod.name(), &PatchParams::default(), &Patch::Merge(patch)).await {
        // The pod was deleted, or replaced by another pod with its name.
        Err(Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
        patched => drop(patched?),
    }
    let api: Api<Claim> = Api::namespaced(client.clone(), pod.namespace());
    let own = claim.metadata.finalizers.as_deref().unwrap_or_default();
    if own.iter().any(|one| one == FINALIZER) {
        let others: Value = own.iter().map(String::as_str).filter(|one| *one != FINALIZER).collect();
        let patch = json!({"metadata": version(claim, &[("finalizers", others)])});
        api.patch(claim.name(), &PatchParams::default(), &Patch::Merge(patch)).await?;
    }
    let preconditions = Some(Preconditions { uid: Some(claim.uid().to_owned()), resource_version: None });
    let params = DeleteParams { preconditions, ..DeleteParams::default() };
    match api.delete(claim.name(), &params).await {
        Err(Error::Api(status)) if status.is_not_found() => Ok(()),
        deleted => deleted.map(drop),
    }
}

/// Releases the devices of a claim that only this pod uses, because no node can run the pod with them. The next attempt
/// allocates other devices. Deletes the claim if an earlier attempt created it for the pod's extended resources.
///
/// A claim that has changed since the decision is not written, because it may have other devices now. The change
/// triggers another attempt for the pod.
///
/// A bound pod keeps its claims. The scheduler may not know about the binding yet: the response to the binding can be
/// lost, and the watch can be late.
pub(crate) async fn deallocate(client: &Client, pod: &Pod, unusable: &UnusableClaim) -> Result<(), Error> {
    if find(client, pod).await?.is_none_or(|latest| latest.node().is_some()) {
        return Ok(());
    }
    let claim = &unusable.claim;
    let api: Api<Claim> = Api::namespaced(client.clone(), claim.namespace());
    if unusable.is_former {
        let is_same =
            |latest: &Claim| latest.uid() == claim.uid() && extended::pod_of(latest) == Some(pod.uid());
        return match api.get_opt(claim.name()).await?.filter(is_same) {
            Some(latest) => delete(client, pod, &latest).await,
            None => Ok(()),
        };
    }
    let status = json!({"reservedFor": null, "allocation": null, "devices": null});
    let patch = json!({"metadata": version(claim, &[]), "status": status});
    match api.patch_status(claim.name(), &PatchParams::default(), &Patch::Merge(patch)).await {
        Err(Error::Api(status)) if status.is_conflict() || status.is_not_found() => Ok(()),
        done => done.map(drop),
    }
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

/// Writes this version of a claim. Fails if the claim has changed.
async fn write_once(
    api: &Api<Claim>,
    pod: &Pod,
    mut claim: Claim,
    allocation: Option<&Value>,
) -> Result<Option<Claim>, Error> {
    if let (Some(_), Some(finalizers)) = (allocation, missing_finalizer(&claim)) {
        // The finalizer is written before the allocation. Otherwise the deletion of the claim could release devices
        // that the pod uses.
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

/// The finalizers of the claim with [`FINALIZER`] added. `None` if the claim already has this finalizer.
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

/// The allocation with the time at which it is written.
fn with_time(allocation: &Value) -> Value {
    let now = jiff::Timestamp::now();
    let now = jiff::Timestamp::from_second(now.as_second()).unwrap_or(now);
    let mut allocation = allocation.clone();
    allocation[ALLOCATED_AT] = now.to_string().into();
    allocation
}

/// The allocation as it was chosen, without the time.
pub(super) fn without_time(mut allocation: Value) -> Value {
    if let Some(fields) = allocation.as_object_mut() {
        fields.remove(ALLOCATED_AT);
    }
    allocation
}

// === impl UnusableClaim ===

impl UnusableClaim {
    pub(crate) fn key(&self) -> Key {
        self.claim.key()
    }
}

//! Devices in scheduling. Source: upstream's plugin DynamicResources. Resource claims restrict the nodes of a pod. The
//! scheduler allocates devices to the claims before it binds the pod.
//!
//! [`feed`] watches claims, classes and slices. [`allocate`] selects devices from the slices.

mod allocate;
mod allocated;
mod attempt;
pub(crate) mod bind;
pub(crate) mod binding;
mod capacity;
mod classes;
mod counters;
mod expression;
mod extended;
pub(crate) mod feed;
mod gang;
mod object;
mod places;
mod score;
mod slices;
#[cfg(test)]
mod tests;
mod usage;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_values::object::{Key, ObjectExt, controller_of};
use k8s_openapi::api::core::v1::NodeSelector;
use serde_json::Value;

use self::allocate::{Allocator, Failure, TOO_MUCH_WORK, Work};
use self::allocated::Allocated;
use self::classes::Classes;
pub(crate) use self::extended::is_extended;
use self::extended::{Extended, NewClaim};
use self::object::Claim;
use self::places::is_reachable;
use self::slices::Slices;
use self::usage::claim_names;
pub(crate) use self::usage::{may_use_devices, uses_any};
use crate::hint::Changes;
use crate::node_properties::NodeProperties;
use crate::object::{Pod, PodResourceClaim, is_older};
use crate::refusal::Refused;

/// Maximum number of pods that use a claim, as in the API.
const MAX_USERS: usize = 256;
/// Upstream's name of the plugin.
pub(crate) const DEVICES: &str = "DynamicResources";
/// The outcome of the plugin for a pod without claims.
pub(crate) const NOTHING_TO_DEALLOCATE: &str = "no new claims to deallocate";
/// The refusal of a node that cannot use the devices of an allocated claim.
const NOT_AVAILABLE: &str = "resourceclaim not available on the node";

/// Claims, classes and slices of the cluster. A clone shares them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Devices {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Number of changes that may help a pod. The receivers wait for the next change.
    changes: tokio::sync::watch::Sender<u64>,
    /// Serializes the writes of a gang's claims. Otherwise the pods of a gang would write the same claims at the same
    /// time.
    gang_writes: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    claims: HashMap<Key, Claim>,
    /// The claims for extended resources: by the pod's namespace and uid.
    extended_claims: HashMap<Key, Key>,
    /// The version of the latest claim that the watch delivered.
    latest_claim: Option<u64>,
    classes: Classes,
    slices: Slices,
    /// Chosen allocations that the watch has not delivered yet.
    assumed: HashMap<Key, Value>,
    /// Reserved claims for extended resources that are not created yet.
    new_claims: HashMap<Key, NewClaim>,
    /// Claims with a chosen allocation that the pods of one gang share while the gang is placed.
    shared: HashSet<Key>,
    /// The devices of all allocations, including chosen allocations.
    allocated: Allocated,
    /// The work of the searches in the current attempt.
    attempt: Option<Arc<Work>>,
    /// Changes that the scheduler has not read yet.
    pending: DeviceChanges,
    listed: [bool; 3],
    /// Timeouts of the binding conditions of devices, by the name of the scheduler.
    timeouts: HashMap<String, jiff::SignedDuration>,
}

/// The claims of a pod.
#[derive(Clone, Debug, Default)]
pub(crate) struct PodDevices {
    /// Node selectors of the claims with an allocation.
    allocated: Vec<Option<NodeSelector>>,
    /// Claims without an allocation.
    waiting: Vec<Claim>,
    /// All claims.
    claims: Vec<Key>,
    /// Whether the allocated devices of a claim failed, so that no node can use them.
    is_unusable: bool,
    /// The extended resources of the pod, if a device class provides one of them.
    extended: Option<Extended>,
    /// The work of the searches for devices. All searches of an attempt share it.
    work: Arc<Work>,
}

/// Changes of devices and claims that may help pods with claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceChanges {
    /// Whether devices were released, or slices or classes changed. Such a change may help any pod with claims.
    pub(crate) supply: bool,
    /// Changed claims, which may help the pods that use them.
    pub(crate) claims: HashSet<Key>,
}

/// The claims to write before a pod is bound, each with its new allocation. `None` if the claim already has one.
pub(crate) type Reservations = Vec<(Key, Option<Value>)>;

// === impl Devices ===

impl Devices {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives a new value when [`Self::take_changes`] has changes.
    pub(crate) fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    /// The changes since the last call.
    pub(crate) fn take_changes(&self) -> DeviceChanges {
        std::mem::take(&mut self.lock().pending)
    }

    /// Applies a change of the state, and notifies the scheduler if the change may help a pod.
    fn apply(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        let helps = state.pending != DeviceChanges::default();
        drop(state);
        if helps {
            self.shared.changes.send_modify(|count| *count += 1);
        }
    }

    /// Whether all kinds are listed.
    pub(crate) fn is_complete(&self) -> bool {
        self.lock().listed.iter().all(|listed| *listed)
    }

    /// Whether the claims of a pod exist and belong to the pod. Until then, upstream's `PreEnqueue` keeps the pod out
    /// of the scheduling queue.
    pub(crate) fn has_claims_of(&self, pod: &Pod) -> bool {
        if pod.spec.resource_claims.is_empty() {
            return true;
        }
        let state = self.lock();
        claim_names(pod).all(|(claim, name)| match name {
            Ok(Some(name)) => state.own_claim(pod, claim, &Key::new(pod.namespace(), name)).is_ok(),
            Ok(None) => true,
            Err(_) => false,
        })
    }

    /// Whether devices are searched for the pod: it has claims, or a class provides one of its extended resources.
    pub(crate) fn searches(&self, pod: &Pod) -> bool {
        !pod.spec.resource_claims.is_empty() || self.lock().provides_extended(pod)
    }

    /// The claims of a pod. The error is the reason why no node can run the pod, in upstream's words.
    pub(crate) fn of_pod(&self, pod: &Pod) -> Result<PodDevices, String> {
        let mut found = PodDevices::default();
        if !may_use_devices(pod) {
            return Ok(found);
        }
        let state = self.lock();
        found.work = state.attempt.clone().unwrap_or_default();
        found.extended = state.extended(pod);
        for (claim, name) in claim_names(pod) {
            let Some(name) = name? else { continue };
            let key = Key::new(pod.namespace(), name);
            let stored = state.claim(pod, claim, &key)?;
            match &stored.status.allocation {
                Some(allocation) => {
                    let (now, timeout) = (jiff::Timestamp::now(), state.timeout(pod));
                    found.is_unusable |= binding::has_failed(stored, now, timeout);
                    found.allocated.push(selector_of(allocation));
                }
                None => match state.assumed.get(&key) {
                    Some(allocation) if state.shared.contains(&key) => {
                        found.allocated.push(selector_of(allocation));
                    }
                    // Another pod is allocating the claim. If the allocation fails, this pod would run without devices.
                    Some(_) => {
                        return Err(format!("resource claim {key} is in the process of being allocated"));
                    }
                    None => {
                        state.check_classes(stored)?;
                        found.waiting.push(stored.clone());
                    }
                },
            }
            found.claims.push(key);
        }
        Ok(found)
    }

    /// The reason why a node cannot provide the devices of a pod. `None` if the node can provide them. An error is a
    /// fault of the claims or classes, with upstream's message. The pod is then not scheduled to any node, because a
    /// pod on another node would hide the fault.
    pub(crate) fn refuse(
        &self,
        claims: &PodDevices,
        node: &NodeProperties,
    ) -> Result<Option<Refused>, String> {
        if claims.is_empty() {
            return Ok(None);
        }
        let state = self.lock();
        let new = match state.new_claim(claims, node) {
            Ok(new) => new,
            Err(why) => return Ok(Some(refused(&why))),
        };
        if !claims.are_available(node) {
            return Ok(Some(refused(NOT_AVAILABLE)));
        }
        let waiting = claims.waiting_with(new.as_ref());
        if waiting.is_empty() {
            return Ok(None);
        }
        // The limit may be reached after many nodes. The pod can still run on the nodes that were found before.
        if claims.work.is_too_much() {
            return Ok(Some(refused(TOO_MUCH_WORK)));
        }
        match state.allocate(&waiting, &claims.work, node) {
            Ok(Some(_)) => Ok(None),
            Ok(None) => Ok(Some(refused("cannot allocate all claims"))),
            Err(Failure::Node(why)) => Ok(Some(refused(&why))),
            Err(Failure::Claim(_)) if claims.work.is_too_much() => Ok(Some(refused(TOO_MUCH_WORK))),
            Err(Failure::Claim(why)) => Err(why),
        }
    }

    /// Chooses devices on a node for the claims of a pod, and reserves them. The reservation fails if the node can no
    /// longer provide the devices, because claims, slices or classes changed after the filter. This search has its own
    /// work limit, because the filter may have used all work of the attempt.
    pub(crate) fn reserve(&self, claims: &PodDevices, node: &NodeProperties) -> Result<Reservations, String> {
        if !claims.are_available(node) {
            return Err(NOT_AVAILABLE.to_owned());
        }
        let mut state = self.lock();
        if let Some(changed) = claims.waiting.iter().find(|claim| !state.awaits_allocation(claim)) {
            return Err(format!("resourceclaim {} changed", changed.key()));
        }
        let new = state.new_claim(claims, node)?;
        let waiting = claims.waiting_with(new.as_ref());
        let chosen = if waiting.is_empty() {
            Vec::new()
        } else {
            state.allocate(&waiting, &Work::default(), node)?.ok_or("cannot allocate all claims")?
        };
        let chosen: HashMap<Key, Value> = waiting.iter().map(ObjectExt::key).zip(chosen).collect();
        for (key, allocation) in &chosen {
            state.change(key, |state| drop(state.assumed.insert(key.clone(), allocation.clone())));
        }
        let mut keys = claims.claims.clone();
        if let Some(new) = new {
            keys.push(new.claim.key());
            state.new_claims.insert(new.claim.key(), new);
        }
        Ok(keys.into_iter().map(|key| (key.clone(), chosen.get(&key).cloned())).collect())
    }

    /// The text that upstream's plugin adds to the message about a refused pod if no claim's devices are released.
    pub(crate) fn outcome(&self, pod: &Pod) -> &'static str {
        let has_claims = !pod.spec.resource_claims.is_empty() || self.lock().provides_extended(pod);
        if has_claims { "still not schedulable" } else { NOTHING_TO_DEALLOCATE }
    }

    /// Releases the devices that were reserved for a pod whose binding failed.
    pub(crate) fn release(&self, reserved: &Reservations) {
        self.apply(|state| state.release(reserved));
    }
}

// === impl State ===

impl State {
    /// Whether the claim has a chosen allocation that is not written yet.
    fn is_pending(&self, key: &Key) -> bool {
        let is_unwritten = |claim: &Claim| claim.status.allocation.is_none();
        self.assumed.contains_key(key) && self.claims.get(key).is_some_and(is_unwritten)
    }

    fn release(&mut self, reserved: &Reservations) {
        for (key, allocation) in reserved {
            if allocation.is_some() && self.assumed.get(key) == allocation.as_ref() {
                self.change(key, |state| drop(state.assumed.remove(key)));
                self.new_claims.remove(key);
                self.pending.claims.insert(key.clone());
            }
        }
    }

    /// The claim of a pod, if the pod can use it.
    fn claim(&self, pod: &Pod, of: &PodResourceClaim, key: &Key) -> Result<&Claim, String> {
        let stored = self.own_claim(pod, of, key)?;
        let users = &stored.status.reserved_for;
        if users.len() >= MAX_USERS && !users.iter().any(|user| user["uid"] == pod.uid()) {
            return Err("resourceclaim in use".to_owned());
        }
        Ok(stored)
    }

    /// The claim of a pod, if it exists and was not created for another pod.
    fn own_claim(&self, pod: &Pod, of: &PodResourceClaim, key: &Key) -> Result<&Claim, String> {
        let name = &key.name;
        let stored = self.claims.get(key).ok_or_else(|| format!("resourceclaim {name:?} not found"))?;
        if stored.is_being_deleted() {
            return Err(format!("resourceclaim {name:?} is being deleted"));
        }
        let is_own = controller_of(&stored.metadata).is_some_and(|owner| owner.uid == pod.uid());
        if of.resource_claim_template_name.is_some() && !is_own {
            return Err(format!(
                "ResourceClaim {key} was not created for Pod {} (Pod is not owner)",
                pod.key()
            ));
        }
        Ok(stored)
    }

    /// Whether a claim that a filter read still exists and has no allocation.
    fn awaits_allocation(&self, claim: &Claim) -> bool {
        let key = claim.key();
        let known = self.claims.get(&key).filter(|known| known.metadata.uid == claim.metadata.uid);
        known.is_some() && self.allocation(&key).is_none()
    }

    /// The claim of a reservation. Returns an error if the claim changed after the reservation, because the pod would
    /// be bound without its devices.
    fn reserved_claim(&self, key: &Key, allocation: Option<&Value>) -> Result<Claim, String> {
        let claim = self.claims.get(key).ok_or_else(|| format!("resourceclaim {key} not found"))?;
        let holds = match allocation {
            Some(_) => claim.status.allocation.is_none() && self.assumed.get(key) == allocation,
            None => claim.status.allocation.is_some(),
        };
        if holds { Ok(claim.clone()) } else { Err(format!("resourceclaim {key} changed")) }
    }

    /// Stores a claim that was written. A later state or a deletion that the watch has already delivered has
    /// precedence. Otherwise the claim would keep devices that are free.
    fn update(&mut self, key: &Key, written: Claim) {
        let Some(known) = self.claims.get(key) else { return };
        if known.metadata.uid != written.metadata.uid {
            return;
        }
        if is_older(&written, known) {
            let chosen = written.status.allocation.map(bind::without_time);
            return self.release(&vec![(key.clone(), chosen)]);
        }
        self.pending.claims.insert(key.clone());
        self.insert_claim(key, written);
    }

    /// Stores a claim that the watch delivers.
    fn put_claim(&mut self, claim: Claim) {
        let key = claim.key();
        let known = self.claims.get(&key);
        if known == Some(&claim) && !self.assumed.contains_key(&key) {
            return;
        }
        let is_other = known.is_some_and(|known| known.metadata.uid != claim.metadata.uid);
        // A claim can be allocated and released between two states that the watch delivers.
        let is_released =
            known.is_some_and(|known| known.status.allocation.is_some() && is_older(known, &claim));
        if known != Some(&claim) {
            self.pending.claims.insert(key.clone());
        }
        self.index_extended(&key, Some(&claim));
        self.change(&key, |state| {
            if is_other || is_released || claim.status.allocation.is_some() {
                // The chosen allocation is obsolete: the claim has an allocation now, was replaced, or was released.
                state.assumed.remove(&key);
            }
            state.claims.insert(key.clone(), claim);
        });
    }

    /// Stores a claim, and updates the devices in use.
    fn insert_claim(&mut self, key: &Key, claim: Claim) {
        self.index_extended(key, Some(&claim));
        self.change(key, |state| drop(state.claims.insert(key.clone(), claim)));
    }

    fn remove_claim(&mut self, key: &Key) {
        self.pending.claims.insert(key.clone());
        self.index_extended(key, None);
        self.change(key, |state| {
            state.assumed.remove(key);
            state.claims.remove(key);
        });
    }

    /// Removes claims that are not in a complete list.
    fn retain_claims(&mut self, listed: &HashSet<Key>) {
        let removed: Vec<Key> = self.claims.keys().filter(|key| !listed.contains(*key)).cloned().collect();
        for key in removed {
            self.remove_claim(&key);
        }
    }

    /// Applies `change` to one claim, and updates the devices in use.
    fn change(&mut self, key: &Key, change: impl FnOnce(&mut Self)) {
        let before = self.allocation(key).cloned();
        if let Some(before) = &before {
            self.allocated.remove(before);
        }
        change(self);
        if let Some(after) = self.allocation(key).cloned() {
            self.allocated.add(&after);
        }
        self.pending.supply |= before.is_some_and(|before| self.allocated.lacks_any_of(&before));
    }

    /// The allocation of a claim. The chosen allocation has precedence until the watch delivers it.
    fn allocation(&self, key: &Key) -> Option<&Value> {
        self.assumed.get(key).or_else(|| self.claims.get(key)?.status.allocation.as_ref())
    }

    fn check_classes(&self, claim: &Claim) -> Result<(), String> {
        for (name, request) in claim.spec.devices.requests.iter().flat_map(object::Request::exact) {
            let class = &request.device_class_name;
            if self.classes.get(class).is_none() {
                return Err(format!("request {name}: device class {class} does not exist"));
            }
        }
        Ok(())
    }

    /// The claim to create for the pod's extended resources on a node. The error is the reason against the node.
    fn new_claim(&self, claims: &PodDevices, node: &NodeProperties) -> Result<Option<NewClaim>, String> {
        claims.extended.as_ref().map_or(Ok(None), |extended| extended.claim(&self.classes, node))
    }

    /// Allocations of a node's devices for the claims of a pod. `None` if there are not enough devices.
    fn allocate(
        &self,
        claims: &[Claim],
        work: &Work,
        node: &NodeProperties,
    ) -> Result<Option<Vec<Value>>, Failure> {
        Allocator::new(self.classes.by_name(), &self.slices, &self.allocated, node, work).allocate(claims)
    }
}

// === impl PodDevices ===

impl PodDevices {
    /// Whether the pod needs no devices.
    pub(crate) fn is_empty(&self) -> bool {
        self.claims.is_empty() && self.extended.is_none()
    }

    /// Whether the node can use the devices of the allocated claims.
    fn are_available(&self, node: &NodeProperties) -> bool {
        !self.is_unusable && self.allocated.iter().all(|selector| is_reachable(selector.as_ref(), node))
    }

    /// The claims to allocate, with the claim for extended resources.
    fn waiting_with(&self, new: Option<&NewClaim>) -> Cow<'_, [Claim]> {
        match new {
            None => Cow::Borrowed(&self.waiting),
            Some(new) => Cow::Owned(self.waiting.iter().chain([&new.claim]).cloned().collect()),
        }
    }
}

/// The refusal of a node that does not have the devices of a pod.
pub(crate) fn refused(reason: &str) -> Refused {
    let helped_by = Changes::NODE | Changes::DEVICES;
    Refused { plugin: DEVICES, reasons: vec![reason.to_owned()], resolvable: false, helped_by }
}

fn selector_of(allocation: &Value) -> Option<NodeSelector> {
    serde_json::from_value(allocation["nodeSelector"].clone()).ok()
}

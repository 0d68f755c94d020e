//! Devices in scheduling (upstream's plugin DynamicResources). Resource claims restrict the nodes of a pod. The
//! scheduler allocates devices to the claims before it binds the pod.
//!
//! [`feed`] watches claims, classes and slices. [`allocate`] searches devices; it reads only the slices of drivers.

mod allocate;
pub(crate) mod bind;
mod expression;
pub(crate) mod feed;
mod object;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_values::node_selector::term_matches;
use coracle_values::object::{Key, ObjectExt, controller_of};
use k8s_openapi::api::core::v1::NodeSelector;
use serde_json::Value;

use self::allocate::Allocator;
use self::object::{Claim, Class, Slice};
use crate::filter::Refused;
use crate::hint::Changes;
use crate::object::{Pod, PodResourceClaim};
use crate::snapshot::Facts;

/// Maximum number of pods that use a claim, as in the API.
const MOST_USERS: usize = 256;

/// A device: driver, pool and name.
pub(crate) type DeviceId = (String, String, String);

/// Claims, classes and slices of the cluster; cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Devices {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Number of changes.
    changes: tokio::sync::watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    claims: HashMap<Key, Claim>,
    classes: HashMap<String, Class>,
    slices: BTreeMap<String, Slice>,
    /// Chosen allocations that the watch has not delivered yet.
    assumed: HashMap<Key, Value>,
    listed: [bool; 3],
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
}

/// The claims to write before a pod is bound, each with its new allocation. `None` if the claim has one already.
pub(crate) type Reservations = Vec<(Key, Option<Value>)>;

// === impl Devices ===

impl Devices {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifies about each change that may make a pod schedulable.
    pub(crate) fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    /// Whether all kinds are listed.
    pub(crate) fn is_complete(&self) -> bool {
        self.lock().listed.iter().all(|listed| *listed)
    }

    /// The claims of a pod. The error is the reason why no node can run the pod, with upstream's text.
    pub(crate) fn of_pod(&self, pod: &Pod) -> Result<PodDevices, String> {
        let mut found = PodDevices::default();
        if pod.spec.resource_claims.is_empty() {
            return Ok(found);
        }
        let state = self.lock();
        for claim in &pod.spec.resource_claims {
            let Some(name) = claim_name(pod, claim)? else { continue };
            let key = Key::new(pod.namespace(), name);
            let stored = state.claim(pod, claim, &key)?;
            let allocation = state.assumed.get(&key).or(stored.status.allocation.as_ref());
            match allocation {
                Some(allocation) => found.allocated.push(selector_of(allocation)),
                None => {
                    state.check_classes(stored)?;
                    found.waiting.push(stored.clone());
                }
            }
            found.claims.push(key);
        }
        Ok(found)
    }

    /// The reason why a node cannot provide the devices of a pod. `None` if it can.
    pub(crate) fn refuse(&self, claims: &PodDevices, node: &Facts) -> Option<Refused> {
        let refused = |reason: String| {
            Some(Refused { reasons: vec![reason], resolvable: false, helped_by: Changes::ALL })
        };
        if claims.claims.is_empty() {
            return None;
        }
        if !claims.allocated.iter().all(|selector| is_reachable(selector.as_ref(), node)) {
            return refused("resourceclaim not available on the node".to_owned());
        }
        if claims.waiting.is_empty() {
            return None;
        }
        match self.lock().allocate(&claims.waiting, node) {
            Ok(Some(_)) => None,
            Ok(None) => refused("cannot allocate all claims".to_owned()),
            Err(why) => refused(why),
        }
    }

    /// Chooses devices on a node for the claims of a pod, and reserves them.
    pub(crate) fn reserve(&self, claims: &PodDevices, node: &Facts) -> Reservations {
        let mut state = self.lock();
        let chosen = state.allocate(&claims.waiting, node).ok().flatten().unwrap_or_default();
        let chosen: HashMap<Key, Value> = claims.waiting.iter().map(ObjectExt::key).zip(chosen).collect();
        state.assumed.extend(chosen.iter().map(|(key, allocation)| (key.clone(), allocation.clone())));
        claims.claims.iter().map(|key| (key.clone(), chosen.get(key).cloned())).collect()
    }

    /// Releases the devices that were reserved for a pod whose binding failed.
    pub(crate) fn release(&self, reserved: &Reservations) {
        let mut state = self.lock();
        for (key, allocation) in reserved {
            if allocation.is_some() && state.assumed.get(key) == allocation.as_ref() {
                state.assumed.remove(key);
            }
        }
    }
}

// === impl State ===

impl State {
    fn claim(&self, pod: &Pod, of: &PodResourceClaim, key: &Key) -> Result<&Claim, String> {
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
        let users = &stored.status.reserved_for;
        if users.len() >= MOST_USERS && !users.iter().any(|user| user["uid"] == pod.uid()) {
            return Err("resourceclaim in use".to_owned());
        }
        Ok(stored)
    }

    /// Takes in what was written of a claim. One that was deleted meanwhile stays absent: it would keep its devices.
    fn update(&mut self, key: &Key, written: Claim) {
        if let Some(known) = self.claims.get_mut(key) {
            *known = written;
        }
    }

    /// Removes claims that a complete list does not have.
    fn retain_claims(&mut self, listed: &HashSet<Key>) {
        self.claims.retain(|key, _| listed.contains(key));
        self.assumed.retain(|key, _| listed.contains(key));
    }

    fn check_classes(&self, claim: &Claim) -> Result<(), String> {
        for (name, request) in claim.spec.devices.requests.iter().flat_map(object::Request::exact) {
            let class = &request.device_class_name;
            if !self.classes.contains_key(class) {
                return Err(format!("request {name}: device class {class} does not exist"));
            }
        }
        Ok(())
    }

    /// Allocations of devices of a node for the claims. `None` if there are not enough devices.
    fn allocate(&self, claims: &[Claim], node: &Facts) -> Result<Option<Vec<Value>>, String> {
        Allocator::new(&self.classes, &self.slices, self.in_use(), node).allocate(claims)
    }

    /// The devices of all allocations, except allocations with admin access.
    fn in_use(&self) -> HashSet<DeviceId> {
        let stored = self.claims.iter().filter(|(key, _)| !self.assumed.contains_key(*key));
        let stored = stored.filter_map(|(_, claim)| claim.status.allocation.as_ref());
        let results = stored.chain(self.assumed.values()).flat_map(|allocation| {
            allocation.pointer("/devices/results").and_then(Value::as_array).into_iter().flatten()
        });
        let counted = results.filter(|result| result["adminAccess"] != true);
        let text = |result: &Value, field: &str| result[field].as_str().unwrap_or_default().to_owned();
        counted.map(|one| (text(one, "driver"), text(one, "pool"), text(one, "device"))).collect()
    }
}

/// The name of a pod's claim. `None`: the pod needs no claim object. The error: the claim is not created yet.
fn claim_name<'a>(pod: &'a Pod, claim: &'a PodResourceClaim) -> Result<Option<&'a str>, String> {
    if let Some(name) = &claim.resource_claim_name {
        return Ok(Some(name));
    }
    let made = pod.status.resource_claim_statuses.iter().find(|status| status.name == claim.name);
    match made {
        Some(status) => Ok(status.resource_claim_name.as_deref()),
        None => Err(format!("pod {:?}: ResourceClaim not created yet", pod.key().to_string())),
    }
}

fn selector_of(allocation: &Value) -> Option<NodeSelector> {
    serde_json::from_value(allocation["nodeSelector"].clone()).ok()
}

/// Whether the selector, if there is one, selects the node.
fn is_reachable(selector: Option<&NodeSelector>, node: &Facts) -> bool {
    selector.is_none_or(|selector| {
        selector.node_selector_terms.iter().any(|term| term_matches(term, &node.labels, &node.name))
    })
}

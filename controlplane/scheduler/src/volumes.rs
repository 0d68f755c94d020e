//! Volumes in scheduling: the claims of a pod restrict its nodes, and unbound claims are bound before the pod.
//!
//! Source: upstream's plugins VolumeBinding, VolumeRestrictions, NodeVolumeLimits and VolumeZone. Claims, volumes,
//! classes and drivers are watched ([`feed`]). A claim that waits for its first pod gets either an existing volume
//! ([`Choice::Existing`]) or the annotation with the selected node. A provisioner creates the volume of a claim with
//! this annotation.

pub(crate) mod bind;
mod disks;
pub(crate) mod feed;
mod filter;
mod limits;
mod object;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_values::object::{Key, ObjectExt};
use tokio::sync::watch;

pub(crate) use self::disks::{Disks, disks_of};
pub(crate) use self::filter::{NodeVolumes, PodClaims, VolumeUsage};
use self::object::{Attachment, Capacity, Claim, CsiDriver, CsiNode, StorageClass, Volume};
use crate::object::{Pod, decode, is_older};

/// Annotation of a claim with the node of its first pod. The scheduler sets it.
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";

/// Claims, volumes and classes of the cluster. A clone shares them.
#[derive(Clone, Debug)]
pub(crate) struct Volumes {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Number of events after which `pending` has changes. The receivers wait for the next event.
    changes: watch::Sender<u64>,
}

/// Changes of claims and volumes that may help pods with claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct VolumeChanges {
    /// Whether volumes, classes, drivers or free space changed. Such a change may help any pod with claims.
    pub(crate) supply: bool,
    /// Changed claims, which may help the pods that use them.
    pub(crate) claims: HashSet<Key>,
}

#[derive(Debug, Default)]
struct State {
    claims: HashMap<Key, Claim>,
    volumes: BTreeMap<String, Volume>,
    classes: HashMap<String, StorageClass>,
    /// Volumes that were chosen for a claim, until the watch delivers the binding.
    reserved: HashMap<String, Key>,
    drivers: HashMap<String, CsiDriver>,
    csi_nodes: HashMap<String, CsiNode>,
    capacities: HashMap<Key, Capacity>,
    attachments: HashMap<String, Attachment>,
    /// Changes that the scheduler has not read yet.
    pending: VolumeChanges,
    /// Whether the first list of each kind is complete.
    listed: [bool; 7],
}

/// The source of the volume for an unbound claim on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The existing volume with this name.
    Existing(String),
    /// A provisioner creates the volume.
    Provision,
}

/// The choice for one claim of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChosenVolume {
    pub(crate) claim: Key,
    pub(crate) choice: Choice,
}

impl Default for Volumes {
    fn default() -> Self {
        let shared = Shared { state: Mutex::default(), changes: watch::Sender::new(0) };
        Self { shared: Arc::new(shared) }
    }
}

// === impl Volumes ===

impl Volumes {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives a new value when [`Self::take_changes`] has changes.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    /// The changes since the last call.
    pub(crate) fn take_changes(&self) -> VolumeChanges {
        std::mem::take(&mut self.lock().pending)
    }

    /// Whether all kinds are listed.
    pub(crate) fn is_complete(&self) -> bool {
        self.lock().listed.iter().all(|listed| *listed)
    }

    /// Adds an object of a simulated cluster. Objects of other kinds are ignored.
    pub(crate) fn add(&self, kind: &str, object: &serde_json::Value) -> Result<(), serde_json::Error> {
        let mut state = self.lock();
        match kind {
            "PersistentVolumeClaim" => {
                let claim: Claim = decode(object)?;
                state.claims.insert(claim.key(), claim);
            }
            "PersistentVolume" => {
                let volume: Volume = decode(object)?;
                state.volumes.insert(volume.name().to_owned(), volume);
            }
            "StorageClass" => {
                let class: StorageClass = decode(object)?;
                state.classes.insert(class.name().to_owned(), class);
            }
            "CSIDriver" => {
                let driver: CsiDriver = decode(object)?;
                state.drivers.insert(driver.name().to_owned(), driver);
            }
            "CSINode" => {
                let node: CsiNode = decode(object)?;
                state.csi_nodes.insert(node.name().to_owned(), node);
            }
            "CSIStorageCapacity" => {
                let capacity: Capacity = decode(object)?;
                state.capacities.insert(capacity.key(), capacity);
            }
            "VolumeAttachment" => {
                let attachment: Attachment = decode(object)?;
                state.attachments.insert(attachment.name().to_owned(), attachment);
            }
            _ => {}
        }
        Ok(())
    }

    /// The claims of a pod. The error is the reason why no node can run the pod, in upstream's words.
    pub(crate) fn of_pod(&self, pod: &Pod) -> Result<PodClaims, String> {
        if pod.spec.volumes.is_empty() { Ok(PodClaims::default()) } else { filter::of_pod(&self.lock(), pod) }
    }

    /// Chooses volumes for the unbound claims of a pod on a node, and reserves the chosen volumes. The error is the
    /// reason why the node cannot have the volumes.
    pub(crate) fn reserve(
        &self,
        pod: &Pod,
        node: &crate::node_properties::NodeProperties,
    ) -> Result<Vec<ChosenVolume>, String> {
        if pod.spec.volumes.is_empty() {
            return Ok(Vec::new());
        }
        // Hold the lock from the choice to the reservation. Otherwise the watch could deliver changes in between.
        let mut state = self.lock();
        let chosen = filter::of_pod(&state, pod)?.choices(node).map_err(str::to_owned)?;
        for ChosenVolume { claim, choice } in &chosen {
            if let Choice::Existing(volume) = choice {
                state.reserved.insert(volume.clone(), claim.clone());
            }
        }
        Ok(chosen)
    }

    /// Releases the volumes that were reserved for a pod whose binding failed.
    pub(crate) fn release(&self, chosen: &[ChosenVolume]) {
        let mut state = self.lock();
        for ChosenVolume { claim, choice } in chosen {
            if let Choice::Existing(volume) = choice
                && state.reserved.get(volume) == Some(claim)
            {
                state.reserved.remove(volume);
            }
        }
    }
}

// === impl State ===

impl State {
    /// Stores a claim that was written. A later state or a deletion that the watch has already delivered has
    /// precedence. Otherwise an old state could stay forever, because there may be no further event.
    fn update_claim(&mut self, key: &Key, written: Claim) {
        let known = self.claims.get(key).filter(|known| known.metadata.uid == written.metadata.uid);
        if known.is_some_and(|known| !is_older(&written, known)) {
            self.claims.insert(key.clone(), written);
        }
    }
}

/// Whether a pod uses one of these claims.
pub(crate) fn uses_any(pod: &Pod, claims: &HashSet<Key>) -> bool {
    !claims.is_empty() && claims_of(pod).any(|claim| claims.contains(&claim))
}

/// Keys of the claims that a pod uses.
pub(crate) fn claims_of(pod: &Pod) -> impl Iterator<Item = Key> {
    pod.spec.volumes.iter().filter_map(|volume| {
        let name = match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(named), _) => named.claim_name.clone(),
            (None, Some(_)) => format!("{}-{}", pod.name(), volume.name),
            (None, None) => return None,
        };
        Some(Key::new(pod.namespace(), &name))
    })
}

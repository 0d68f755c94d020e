//! Which nodes can have the volumes of a pod.

use std::collections::{BTreeSet, HashMap};

use coracle_values::label_selector::LabelSelector;
use coracle_values::node_selector::term_matches;
use coracle_values::object::{Key, ObjectExt};

use super::object::{Claim, StorageClass, Volume};
use super::{Choice, SELECTED_NODE, State, claims_of};
use crate::filter::Refusal;
use crate::object::Pod;
use crate::snapshot::{Candidate, Facts};

const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";
const NODE_CONFLICT: &str = "node(s) didn't match PersistentVolume's node affinity";
const BIND_CONFLICT: &str = "node(s) didn't find available persistent volumes to bind";
const NO_VOLUME: &str = "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)";
const ZONE_CONFLICT: &str = "node(s) had no available volume zone";
const IN_USE: &str = "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by another pod";
/// Labels of volumes that restrict them to a zone or a region.
const ZONES: [&str; 4] = [
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
];

/// The claims of a pod with what could be bound to them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PodClaims {
    /// Volumes of bound claims. None: the volume does not exist.
    bound: Vec<Option<Volume>>,
    /// Claims that wait for the pod.
    waiting: Vec<Waiting>,
    /// Claims that only one pod may use.
    exclusive: Vec<Key>,
}

/// A claim that waits for its first pod.
#[derive(Clone, Debug)]
struct Waiting {
    claim: Claim,
    class: StorageClass,
    /// Volumes that fit the claim, the smallest first.
    volumes: Vec<Volume>,
}

pub(super) fn of_pod(state: &State, pod: &Pod) -> Result<PodClaims, String> {
    let mut found = PodClaims::default();
    let mut keys = BTreeSet::new();
    for key in claims_of(pod).filter(|key| keys.insert(key.clone())) {
        let claim = claim(state, pod, &key)?;
        if claim.spec.access_modes.iter().any(|mode| mode == "ReadWriteOncePod") {
            found.exclusive.push(key.clone());
        }
        if claim.is_bound() {
            found.bound.push(state.volumes.get(claim.volume()).cloned());
            continue;
        }
        let class = state.classes.get(claim.class());
        let waits = class.filter(|class| {
            class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer") && claim.volume().is_empty()
        });
        let Some(class) = waits else {
            return Err("pod has unbound immediate PersistentVolumeClaims".to_owned());
        };
        let volumes = volumes(state, claim);
        found.waiting.push(Waiting { claim: claim.clone(), class: class.clone(), volumes });
    }
    Ok(found)
}

fn claim<'a>(state: &'a State, pod: &Pod, key: &Key) -> Result<&'a Claim, String> {
    let name = &key.name;
    let mut volumes = pod.spec.volumes.iter().filter(|volume| volume.ephemeral.is_some());
    let is_ephemeral = volumes.any(|volume| format!("{}-{}", pod.name(), volume.name) == *name);
    let Some(claim) = state.claims.get(key) else {
        return Err(if is_ephemeral {
            format!("waiting for ephemeral volume controller to create the persistentvolumeclaim {name:?}")
        } else {
            format!("persistentvolumeclaim {name:?} not found")
        });
    };
    if claim.status.phase.as_deref() == Some("Lost") {
        let volume = claim.volume();
        return Err(format!(
            "persistentvolumeclaim {name:?} bound to non-existent persistentvolume {volume:?}"
        ));
    }
    if claim.is_being_deleted() {
        return Err(format!("persistentvolumeclaim {name:?} is being deleted"));
    }
    let owner = coracle_values::object::controller_of(&claim.metadata);
    if is_ephemeral && owner.is_none_or(|owner| owner.uid != pod.uid()) {
        return Err(format!("PVC {key} was not created for pod {} (pod is not owner)", pod.key()));
    }
    Ok(claim)
}

/// Free volumes that fit the claim, and one that is reserved for it.
fn volumes(state: &State, claim: &Claim) -> Vec<Volume> {
    let selector = claim.spec.selector.as_ref().map(LabelSelector::try_from);
    let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "Filesystem".to_owned());
    let fits = |volume: &&Volume| {
        let for_claim = |reference: &k8s_openapi::api::core::v1::ObjectReference| {
            reference.namespace.as_deref() == Some(claim.namespace())
                && reference.name.as_deref() == Some(claim.name())
        };
        let free = match &volume.spec.claim_ref {
            None => volume.status.phase.as_deref() == Some("Available"),
            Some(reference) => for_claim(reference),
        };
        let taken = state.taken.get(volume.name()).is_some_and(|by| *by != claim.key());
        let size = volume.size().zip(claim.requested()).is_some_and(|(size, requested)| size >= requested);
        let selected = match &selector {
            None => true,
            Some(Ok(selector)) => selector.matches(volume.metadata.labels.as_ref()),
            Some(Err(_)) => false,
        };
        free && !taken
            && size
            && selected
            && !volume.is_being_deleted()
            && volume.class() == claim.class()
            && mode(&volume.spec.volume_mode) == mode(&claim.spec.volume_mode)
            && claim.spec.access_modes.iter().all(|mode| volume.spec.access_modes.contains(mode))
    };
    let mut found: Vec<Volume> = state.volumes.values().filter(fits).cloned().collect();
    found.sort_by(|a, b| a.size().cmp(&b.size()).then_with(|| a.name().cmp(b.name())));
    found
}

// === impl PodClaims ===

impl PodClaims {
    /// Why the node cannot have the volumes. `users` is the number of pods that use each claim.
    pub(crate) fn refusals(&self, node: Candidate<'_>, users: &HashMap<Key, usize>) -> Vec<Refusal> {
        if self.exclusive.iter().any(|claim| users.contains_key(claim)) {
            return vec![IN_USE.to_owned()];
        }
        self.permanent_refusals(node.facts)
    }

    /// The refusals that other pods have no part in.
    pub(crate) fn permanent_refusals(&self, node: &Facts) -> Vec<Refusal> {
        let mut reasons = Vec::new();
        if self.bound.iter().any(Option::is_none) {
            reasons.push(NO_VOLUME.to_owned());
        }
        if self.bound.iter().flatten().any(|volume| !is_reachable(volume, node)) {
            reasons.push(NODE_CONFLICT.to_owned());
        }
        if self.choices(node).is_none() {
            reasons.push(BIND_CONFLICT.to_owned());
        }
        if reasons.is_empty() && self.bound.iter().flatten().any(|volume| !is_in_zone(volume, node)) {
            reasons.push(ZONE_CONFLICT.to_owned());
        }
        reasons
    }

    /// How each waiting claim gets a volume on the node. None: one of them cannot.
    pub(super) fn choices(&self, node: &Facts) -> Option<Vec<(Key, Choice)>> {
        let mut taken = BTreeSet::new();
        let mut chosen = Vec::new();
        for waiting in &self.waiting {
            let choice = waiting.choice(node, &taken)?;
            if let Choice::Take(name) = &choice {
                taken.insert(name.clone());
            }
            chosen.push((waiting.claim.key(), choice));
        }
        Some(chosen)
    }
}

// === impl Waiting ===

impl Waiting {
    fn choice(&self, node: &Facts, taken: &BTreeSet<String>) -> Option<Choice> {
        if let Some(selected) = self.claim.annotation(SELECTED_NODE) {
            // A provisioner is at work there.
            return (selected == node.name).then_some(Choice::Provision);
        }
        let found =
            self.volumes.iter().find(|volume| !taken.contains(volume.name()) && is_reachable(volume, node));
        if let Some(volume) = found {
            return Some(Choice::Take(volume.name().to_owned()));
        }
        let can = !self.class.provisioner.is_empty() && self.class.provisioner != NO_PROVISIONER;
        (can && self.allows(node)).then_some(Choice::Provision)
    }

    /// Whether the class makes volumes in the node's topology.
    fn allows(&self, node: &Facts) -> bool {
        let terms = self.class.allowed_topologies.as_deref().unwrap_or_default();
        terms.is_empty()
            || terms.iter().any(|term| {
                let mut expressions = term.match_label_expressions.iter().flatten();
                expressions.all(|expression| {
                    node.labels.get(&expression.key).is_some_and(|value| expression.values.contains(value))
                })
            })
    }
}

/// Whether a volume can be used on a node, by its node affinity.
fn is_reachable(volume: &Volume, node: &Facts) -> bool {
    let required = volume.spec.node_affinity.as_ref().and_then(|affinity| affinity.required.as_ref());
    required.is_none_or(|required| {
        required.node_selector_terms.iter().any(|term| term_matches(term, &node.labels, &node.name))
    })
}

/// Whether the labels of a volume allow the node's zone. A label lists several zones with `__` between them.
fn is_in_zone(volume: &Volume, node: &Facts) -> bool {
    let labels = volume.metadata.labels.iter().flatten();
    let mut zones = labels.filter(|(name, _)| ZONES.contains(&name.as_str()));
    // A node without zones is in all of them.
    !node.labels.keys().any(|name| ZONES.contains(&name.as_str()))
        || zones.all(|(name, value)| {
            node.labels.get(name).is_some_and(|own| value.split("__").any(|zone| zone == own))
        })
}

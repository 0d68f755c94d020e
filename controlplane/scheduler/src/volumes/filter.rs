//! The volume filter: refuses nodes that cannot have the volumes of a pod.

use std::collections::{BTreeSet, HashMap, HashSet};

use coracle_values::Quantity;
use coracle_values::label_selector::LabelSelector;
use coracle_values::node_selector::term_matches;
use coracle_values::object::{Key, ObjectExt};

use super::object::{Claim, StorageClass, Volume};
use super::{Choice, ChosenVolume, Disks, SELECTED_NODE, State, Volumes, claims_of, disks_of};
use crate::config::Profile;
use crate::hint::Changes;
use crate::node_properties::NodeProperties;
use crate::object::Pod;
use crate::refusal::Refused;

/// The built-in provisioner of local volumes.
const LOCAL_PROVISIONER: &str = "coracle.dev/local-path";
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";
const NODE_CONFLICT: &str = "node(s) didn't match PersistentVolume's node affinity";
const BIND_CONFLICT: &str = "node(s) didn't find available persistent volumes to bind";
const NO_VOLUME: &str = "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)";
const NO_SPACE: &str = "node(s) did not have enough free storage";
const TOO_MANY: &str = "node(s) exceed max volume count";
const ZONE_CONFLICT: &str = "node(s) had no available volume zone";
const DISK_IN_USE: &str = "node(s) had no available disk";
const IN_USE: &str = "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by another pod";
/// Labels of volumes that restrict them to a zone or a region.
const ZONES: [&str; 4] = [
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
];

/// The claims of a pod, and the volumes that can be bound to them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PodClaims {
    /// Volumes of bound claims. `None` if the volume does not exist.
    bound: Vec<Option<Volume>>,
    /// Claims that wait for the pod.
    waiting: Vec<Waiting>,
    /// Claims that only one pod may use (access mode ReadWriteOncePod).
    exclusive: Vec<Key>,
    /// Drivers that attach volumes of the pod, with the names of the volumes in the drivers.
    attached: HashSet<(String, String)>,
    /// Disks that pods cannot share.
    disks: Disks,
}

/// The volumes that the pods of a node use. It is a trait, because the module that implements it depends on this
/// module.
pub(crate) trait NodeVolumes {
    /// The claims of all pods of the node.
    fn claims(&self) -> Box<dyn Iterator<Item = &Key> + '_>;
    /// Whether a pod of the node uses a disk that conflicts with `disks`.
    fn conflicts_with(&self, disks: &Disks) -> bool;
}

/// The use of claims and volumes in the cluster and on one node.
#[derive(Clone, Copy)]
pub(crate) struct VolumeUsage<'a> {
    /// The number of pods that use each claim.
    pub(crate) claim_users: &'a HashMap<Key, usize>,
    pub(crate) volumes: &'a Volumes,
    pub(crate) node: &'a dyn NodeVolumes,
}

/// An unbound claim whose class waits for the first pod (`WaitForFirstConsumer`).
#[derive(Clone, Debug)]
struct Waiting {
    claim: Claim,
    class: StorageClass,
    /// Volumes that match the claim, the smallest first.
    volumes: Vec<Volume>,
    /// A volume that is reserved for the claim.
    reserved: Option<Volume>,
    /// Nodes for which the driver reports enough space. `None` if the driver does not report space.
    space: Option<Vec<LabelSelector>>,
}

/// The claims of a pod. The error is the reason why no node is possible.
pub(super) fn of_pod(state: &State, pod: &Pod) -> Result<PodClaims, String> {
    let named = || {
        let sources = pod.spec.volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref());
        sources.map(|source| Key::new(pod.namespace(), &source.claim_name))
    };
    if let Some(missing) = named().find(|key| !state.claims.contains_key(key)) {
        return Err(format!("persistentvolumeclaim {:?} not found", missing.name));
    }
    // Names of the claims of ephemeral volumes. They are a set, because a pod can have thousands of volumes and claims.
    let ephemeral = pod.spec.volumes.iter().filter(|volume| volume.ephemeral.is_some());
    let ephemeral: HashSet<String> =
        ephemeral.map(|volume| format!("{}-{}", pod.name(), volume.name)).collect();
    let mut claims = Vec::new();
    let mut keys = BTreeSet::new();
    for key in claims_of(pod).filter(|key| keys.insert(key.clone())) {
        claims.push((claim(state, pod, &key, ephemeral.contains(&key.name))?, key));
    }
    let mut found = PodClaims { disks: disks_of(pod), ..PodClaims::default() };
    for (claim, key) in claims {
        if claim.spec.access_modes.iter().any(|mode| mode == "ReadWriteOncePod") {
            found.exclusive.push(key.clone());
        }
        found.attached.extend(state.driver_and_volume(&key));
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
        found.waiting.push(Waiting::of(state, claim, class));
    }
    // Upstream's VolumeZone reads only claims that the pod names.
    let volume = |key: Key| state.claims.get(&key).map(Claim::volume).filter(|volume| !volume.is_empty());
    match named().filter_map(volume).find(|volume| !state.volumes.contains_key(*volume)) {
        Some(missing) => Err(format!("persistentvolume {missing:?} not found")),
        None => Ok(found),
    }
}

/// The claim with this key. `is_ephemeral` is true if an ephemeral volume of the pod has the claim. The error is the
/// reason why the pod cannot use the claim.
fn claim<'a>(state: &'a State, pod: &Pod, key: &Key, is_ephemeral: bool) -> Result<&'a Claim, String> {
    let name = &key.name;
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

/// Free volumes that match the claim, and the volume that is reserved for the claim.
fn volumes(state: &State, claim: &Claim) -> (Vec<Volume>, Option<Volume>) {
    let selector = claim.spec.selector.as_ref().map(LabelSelector::try_from);
    let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "Filesystem".to_owned());
    let attributes = |name: &Option<String>| name.clone().unwrap_or_default();
    let for_claim = |volume: &Volume| {
        volume.spec.claim_ref.as_ref().map(|reference| {
            reference.namespace.as_deref() == Some(claim.namespace())
                && reference.name.as_deref() == Some(claim.name())
                && reference.uid.as_deref().is_none_or(|uid| uid.is_empty() || uid == claim.uid())
        })
    };
    let can = |volume: &&Volume| {
        for_claim(volume) != Some(false)
            && state.reserved.get(volume.name()).is_none_or(|by| *by == claim.key())
            && volume.size().zip(claim.requested()).is_some_and(|(size, requested)| size >= requested)
            && mode(&volume.spec.volume_mode) == mode(&claim.spec.volume_mode)
            && attributes(&volume.spec.volume_attributes_class_name)
                == attributes(&claim.spec.volume_attributes_class_name)
            && !volume.is_being_deleted()
            // As upstream, only volumes of the claim's class match.
            && volume.class() == claim.class()
    };
    let fits = |volume: &&Volume| {
        let selected = match &selector {
            None => true,
            Some(Ok(selector)) => selector.matches(volume.metadata.labels.as_ref()),
            Some(Err(_)) => false,
        };
        selected
            && volume.status.phase.as_deref() == Some("Available")
            && claim.spec.access_modes.iter().all(|mode| volume.spec.access_modes.contains(mode))
    };
    let (reserved, free): (Vec<&Volume>, Vec<&Volume>) =
        state.volumes.values().filter(can).partition(|volume| for_claim(volume) == Some(true));
    let mut free: Vec<Volume> = free.into_iter().filter(|volume| fits(volume)).cloned().collect();
    free.sort_by(|a, b| a.size().cmp(&b.size()).then_with(|| a.name().cmp(b.name())));
    (free, reserved.first().map(|volume| (*volume).clone()))
}

/// The nodes for which the class's driver reports enough space for the claim. `None` if the driver does not report
/// space, or if the claim requests no storage.
fn space(state: &State, class: &StorageClass, requested: Option<Quantity>) -> Option<Vec<LabelSelector>> {
    let requested = requested?;
    state.drivers.get(&class.provisioner)?.spec.storage_capacity.filter(|reports| *reports)?;
    let of_class = state.capacities.values().filter(|one| one.storage_class_name == class.name());
    let enough = of_class.filter(|one| one.limit().is_some_and(|limit| limit >= requested));
    Some(enough.filter_map(|one| LabelSelector::try_from(one.node_topology.as_ref()?).ok()).collect())
}

// === impl PodClaims ===

impl PodClaims {
    /// The reason why the node cannot have the volumes. `None` if the node can have them.
    pub(crate) fn refuse(
        &self,
        profile: &Profile,
        node: &NodeProperties,
        usage: VolumeUsage<'_>,
    ) -> Option<Refused> {
        if self.is_empty() {
            return None;
        }
        let refused = |plugin: &'static str, reasons: &[&str], resolvable: bool| {
            let reasons: Vec<String> = reasons.iter().map(|reason| (*reason).to_owned()).collect();
            (!reasons.is_empty()).then_some(Refused { plugin, reasons, resolvable, helped_by: Changes::ALL })
        };
        if profile.filters_by("VolumeRestrictions") {
            if !self.disks.is_empty() && usage.node.conflicts_with(&self.disks) {
                return refused("VolumeRestrictions", &[DISK_IN_USE], true);
            }
            if self.are_in_use(usage.claim_users) {
                return refused("VolumeRestrictions", &[IN_USE], true);
            }
        }
        let limited = profile.filters_by("NodeVolumeLimits") && !self.attached.is_empty();
        if limited && !usage.volumes.lock().has_room(&node.name, &self.attached, usage.node.claims()) {
            return refused("NodeVolumeLimits", &[TOO_MANY], true);
        }
        let of_bound = self.bound.iter().find_map(|volume| match volume {
            None => Some(NO_VOLUME),
            Some(volume) => (!is_reachable(volume, node)).then_some(NODE_CONFLICT),
        });
        let of_waiting = self.choices(node).err();
        let binding: Vec<&str> = of_bound.into_iter().chain(of_waiting).collect();
        refused("VolumeBinding", &binding, false).or_else(|| {
            let in_zone = self.bound.iter().flatten().all(|volume| is_in_zone(volume, node));
            let refuses = !in_zone && profile.filters_by("VolumeZone");
            if refuses { refused("VolumeZone", &[ZONE_CONFLICT], false) } else { None }
        })
    }

    /// Whether another pod uses a claim that only one pod may use.
    pub(crate) fn are_in_use(&self, claim_users: &HashMap<Key, usize>) -> bool {
        self.exclusive.iter().any(|claim| claim_users.contains_key(claim))
    }

    /// Disables the check of claims that only one pod may use. As upstream, the check is disabled if no pod used the
    /// claims at the beginning of the decision. Nominated pods that use the claims may be added later.
    pub(crate) fn skip_users(&mut self) {
        self.exclusive.clear();
    }

    /// Whether the pod has no claims, and no disks that pods cannot share.
    pub(crate) fn is_empty(&self) -> bool {
        self.bound.is_empty()
            && self.waiting.is_empty()
            && self.exclusive.is_empty()
            && self.attached.is_empty()
            && self.disks.is_empty()
    }

    /// The choice for each waiting claim: an existing volume, or a volume to provision on the node. The error is the
    /// reason of the first claim for which both are impossible.
    pub(super) fn choices(&self, node: &NodeProperties) -> Result<Vec<ChosenVolume>, &'static str> {
        let (selected, mut free): (Vec<&Waiting>, Vec<&Waiting>) =
            self.waiting.iter().partition(|waiting| waiting.claim.annotation(SELECTED_NODE).is_some());
        // The pod cannot use another node: a provisioner is already creating the volume for the selected node.
        if selected.iter().any(|waiting| waiting.claim.annotation(SELECTED_NODE) != Some(node.name.as_str()))
        {
            return Err(BIND_CONFLICT);
        }
        // The smallest claims get the smallest volumes.
        free.sort_by_key(|waiting| waiting.claim.requested());
        let (mut used, mut chosen, mut provisioned) = (BTreeSet::new(), Vec::new(), selected);
        for waiting in free {
            match waiting.volume(node, &used) {
                Some(volume) => {
                    used.insert(volume.name());
                    let choice = Choice::Existing(volume.name().to_owned());
                    chosen.push(ChosenVolume { claim: waiting.claim.key(), choice });
                }
                None => provisioned.push(waiting),
            }
        }
        for waiting in provisioned {
            waiting.check_provision(node)?;
            chosen.push(ChosenVolume { claim: waiting.claim.key(), choice: Choice::Provision });
        }
        Ok(chosen)
    }
}

// === impl Waiting ===

impl Waiting {
    fn of(state: &State, claim: &Claim, class: &StorageClass) -> Self {
        let (volumes, reserved) = volumes(state, claim);
        let space = space(state, class, claim.requested());
        Self { claim: claim.clone(), class: class.clone(), volumes, reserved, space }
    }

    /// The volume for the claim on a node. If a volume is reserved for the claim, only that volume is possible.
    fn volume(&self, node: &NodeProperties, used: &BTreeSet<&str>) -> Option<&Volume> {
        match &self.reserved {
            Some(reserved) => Some(reserved).filter(|volume| is_reachable(volume, node)),
            None => {
                let mut free = self.volumes.iter().filter(|volume| !used.contains(volume.name()));
                free.find(|volume| is_reachable(volume, node))
            }
        }
    }

    /// Checks that a provisioner can create a volume for the node.
    fn check_provision(&self, node: &NodeProperties) -> Result<(), &'static str> {
        let provisioner = self.class.provisioner.as_str();
        if provisioner.is_empty() || provisioner == NO_PROVISIONER || !self.allows(node) {
            return Err(BIND_CONFLICT);
        }
        let is_larger = |disk: Quantity| self.claim.requested().is_some_and(|requested| requested > disk);
        // Refuse the node here. Otherwise the provisioner would remove the selected node from the claim, and the pod
        // would be scheduled again without end.
        if provisioner == LOCAL_PROVISIONER && node.local_volumes_disk.is_some_and(is_larger) {
            return Err(NO_SPACE);
        }
        let has_space = |nodes: &Vec<LabelSelector>| nodes.iter().any(|one| one.matches(Some(&node.labels)));
        if self.space.as_ref().is_none_or(has_space) { Ok(()) } else { Err(NO_SPACE) }
    }

    /// Whether the class allows volumes in the node's topology.
    fn allows(&self, node: &NodeProperties) -> bool {
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

/// Whether the node affinity of a volume allows a node.
fn is_reachable(volume: &Volume, node: &NodeProperties) -> bool {
    let required = volume.spec.node_affinity.as_ref().and_then(|affinity| affinity.required.as_ref());
    required.is_none_or(|required| {
        required.node_selector_terms.iter().any(|term| term_matches(term, &node.labels, &node.name))
    })
}

/// Whether the labels of a volume allow the node's zone. The value of a label can have several zones, separated by
/// `__`.
fn is_in_zone(volume: &Volume, node: &NodeProperties) -> bool {
    let labels = volume.metadata.labels.iter().flatten();
    let mut zones = labels.filter(|(name, _)| ZONES.contains(&name.as_str()));
    // A node without zone labels is in all zones.
    !node.labels.keys().any(|name| ZONES.contains(&name.as_str()))
        || zones.all(|(name, value)| {
            let own = node.labels.get(name).or_else(|| node.labels.get(current_name(name)));
            own.is_some_and(|own| value.split("__").any(|zone| zone == own))
        })
}

/// The name that replaced a beta label.
fn current_name(label: &str) -> &str {
    match label {
        "failure-domain.beta.kubernetes.io/zone" => ZONES[0],
        "failure-domain.beta.kubernetes.io/region" => ZONES[1],
        other => other,
    }
}

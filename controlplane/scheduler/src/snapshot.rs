//! The nodes with the requests of their pods. Pods that are being bound are included.

use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;

use coracle_values::Quantity;
use coracle_values::object::{Key, ObjectExt};
use coracle_values::pod_resources::Resources;

use crate::affinity_term::{Labels, PodTerms};
use crate::budget::Budgets;
use crate::config::Profile;
use crate::devices::{Devices, Reservations};
use crate::hint::Changes;
use crate::memo::{Memo, NodeInput, NodeOutcome, NodeVersion, PodSelection};
use crate::node_properties::NodeProperties;
use crate::object::{Node, Pod};
use crate::placed::{Common, Placed, Recent};
use crate::request::HostPort;
use crate::selectors::Selectors;
use crate::volumes::{ChosenVolume, Disks, NodeVolumes, VolumeUsage, Volumes};

/// The node annotation with the size of the disk that has the node's local volumes. Absent if the size is unknown.
const LOCAL_VOLUMES_DISK: &str = "coracle.dev/local-volumes-disk";

/// A node with its pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeInfo {
    /// Properties of the node. `None` if pods are bound to this node, but the Node object does not exist.
    properties: Option<NodeProperties>,
    name: Arc<str>,
    /// Index into tables of results. Two nodes never have the same slot at the same time.
    slot: usize,
    /// Increases with each change. No two states of any nodes have the same generation.
    generation: u64,
    /// The pods by uid. The values are boxed, because the table has up to twice as many places as pods.
    pods: HashMap<Arc<str>, Box<Placed>>,
    /// Sizes of the node's images in bytes, by name. The images are not part of the properties, because a new image
    /// does not help a refused pod. The nodes share the names.
    pub(crate) images: HashMap<Arc<str>, i64>,
    pub(crate) requested: Resources,
    /// The sum of the requests that scores use. It includes assumed requests for containers without requests.
    pub(crate) weighed: Resources,
}

/// An existing node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    pub(crate) properties: &'a NodeProperties,
    pub(crate) info: &'a NodeInfo,
}

/// A pod with affinity or anti-affinity to other pods.
pub(crate) struct PodWithAffinity<'a> {
    pub(crate) uid: &'a str,
    pub(crate) terms: &'a PodTerms,
    pub(crate) node: Candidate<'a>,
}

/// A waiting pod and its nominated node.
#[derive(Debug)]
struct Nominated {
    node: String,
    placed: Placed,
}

/// The number of nodes that have each image.
#[derive(Debug, Default)]
pub(crate) struct Images {
    counts: HashMap<Arc<str>, usize>,
    nodes: usize,
}

/// All nodes.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    nodes: BTreeMap<String, NodeInfo>,
    /// The node of each pod, by uid. The texts are shared with [`NodeInfo`].
    places: HashMap<Arc<str>, Arc<str>>,
    /// The uids of pods with affinity or anti-affinity to other pods.
    with_terms: HashSet<Arc<str>>,
    /// Pods with a nominated node, by uid.
    nominated: HashMap<String, Nominated>,
    /// The images of all nodes.
    pub(crate) images: Images,
    /// The name of the node at which the next search starts, if searches do not check all nodes.
    pub(crate) search_start: RefCell<String>,
    recent_pods: Recent<Common>,
    /// Disruption budgets.
    pub(crate) budgets: Budgets,
    /// The labels of each namespace.
    pub(crate) namespaces: HashMap<String, Labels>,
    /// Claims, volumes and storage classes.
    pub(crate) volumes: Volumes,
    /// Claims of devices, and devices.
    pub(crate) devices: Devices,
    /// Selectors of services and workloads.
    pub(crate) selectors: Selectors,
    /// Number of pods on nodes that use each claim.
    pub(crate) claim_users: HashMap<Key, usize>,
    /// Results of filters and scores for equal pods.
    pub(crate) outcomes: RefCell<Memo<NodeInput, NodeOutcome>>,
    /// Numbers of selected pods for equal spread constraints.
    pub(crate) selected: RefCell<Memo<PodSelection, i64>>,
    /// The newest generation of a node.
    generation: u64,
    /// Slots of removed nodes.
    free_slots: Vec<usize>,
}

impl NodeInfo {
    /// The host ports in use.
    pub(crate) fn ports(&self) -> impl Iterator<Item = &HostPort> {
        self.pods.values().flat_map(|placed| &placed.ports)
    }

    pub(crate) fn version(&self) -> NodeVersion {
        NodeVersion { slot: self.slot, generation: self.generation }
    }

    /// The pods of the node.
    pub(crate) fn pods(&self) -> impl Iterator<Item = &Placed> {
        self.pods.values().map(Box::as_ref)
    }

    fn put(&mut self, uid: Arc<str>, placed: Placed) {
        self.requested.add(&placed.requests);
        self.weighed.add(&placed.assumed);
        self.pods.insert(uid, Box::new(placed));
    }

    fn take(&mut self, uid: &str) {
        if let Some(placed) = self.pods.remove(uid) {
            self.requested.subtract(&placed.requests);
            self.weighed.subtract(&placed.assumed);
        }
    }
}

impl NodeVolumes for NodeInfo {
    fn claims(&self) -> Box<dyn Iterator<Item = &Key> + '_> {
        Box::new(self.pods().flat_map(|placed| &placed.claims))
    }

    fn conflicts_with(&self, disks: &Disks) -> bool {
        self.pods().any(|placed| disks.conflict_with(&placed.disks))
    }
}

impl Images {
    /// The fraction of the nodes that have this image, from 0 to 1.
    #[expect(clippy::cast_precision_loss, reason = "the number of nodes is small")]
    pub(crate) fn share(&self, image: &str) -> f64 {
        self.counts.get(image).copied().unwrap_or_default() as f64 / self.nodes.max(1) as f64
    }

    /// Whether a node has this image.
    pub(crate) fn has(&self, image: &str) -> bool {
        self.counts.contains_key(image)
    }

    /// The name of an image, shared with the nodes that have the image.
    fn name(&self, name: &str) -> Arc<str> {
        self.counts.get_key_value(name).map_or_else(|| name.into(), |(known, _)| known.clone())
    }

    fn replace(&mut self, old: &HashMap<Arc<str>, i64>, new: &HashMap<Arc<str>, i64>) {
        for name in old.keys() {
            if let Entry::Occupied(mut count) = self.counts.entry(name.clone()) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
        for name in new.keys() {
            *self.counts.entry(name.clone()).or_default() += 1;
        }
    }
}

impl Snapshot {
    /// The existing nodes, ordered by name.
    pub(crate) fn candidates(&self) -> impl Iterator<Item = Candidate<'_>> {
        self.nodes.values().filter_map(|info| Some(Candidate { properties: info.properties.as_ref()?, info }))
    }

    /// The existing nodes ordered by name: the nodes from this name on, then the nodes before it.
    pub(crate) fn candidates_from(&self, name: &str) -> impl Iterator<Item = Candidate<'_>> {
        let later = self.nodes.range::<str, _>((Bound::Included(name), Bound::Unbounded));
        let earlier = self.nodes.range::<str, _>((Bound::Unbounded, Bound::Excluded(name)));
        let nodes = later.chain(earlier);
        nodes.filter_map(|(_, info)| Some(Candidate { properties: info.properties.as_ref()?, info }))
    }

    /// Number of the existing nodes.
    pub(crate) fn node_count(&self) -> usize {
        self.images.nodes
    }

    /// The existing node with this name.
    pub(crate) fn candidate(&self, name: &str) -> Option<Candidate<'_>> {
        let info = self.nodes.get(name)?;
        Some(Candidate { properties: info.properties.as_ref()?, info })
    }

    /// The pods with affinity or anti-affinity to other pods.
    pub(crate) fn with_affinity(&self) -> impl Iterator<Item = PodWithAffinity<'_>> {
        self.with_terms.iter().filter_map(|uid| {
            let node = self.places.get(uid)?;
            let info = self.nodes.get(&**node)?;
            let terms = info.pods.get(uid)?.terms()?;
            let node = Candidate { properties: info.properties.as_ref()?, info };
            Some(PodWithAffinity { uid, terms, node })
        })
    }

    /// Adds or updates a node. Returns whether the node is new, or a field changed that filters read.
    pub(crate) fn set_node(&mut self, node: &Node) -> bool {
        let disk = node.metadata.annotations.as_ref().and_then(|all| all.get(LOCAL_VOLUMES_DISK));
        let properties = NodeProperties {
            name: node.metadata.name.clone().unwrap_or_default(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: node.spec.taints.clone().unwrap_or_default(),
            unschedulable: node.spec.unschedulable == Some(true),
            allocatable: Resources::of(node.status.allocatable.as_ref().or(node.status.capacity.as_ref())),
            declared_features: node.status.declared_features.clone().unwrap_or_default(),
            local_volumes_disk: disk.and_then(|size| Quantity::parse(size).ok()),
        };
        let known = self.nodes.get(&properties.name).and_then(|info| info.properties.as_ref());
        let (is_new, changed) = (known.is_none(), known != Some(&properties));
        if changed {
            self.touch(&properties.name);
        }
        let all = &self.images;
        let images = node.status.images.iter().flatten();
        let images = images.flat_map(|image| {
            let size = image.size_bytes.unwrap_or_default();
            image.names.iter().flatten().map(move |name| (all.name(name), size))
        });
        let images: HashMap<Arc<str>, i64> = images.collect();
        let info = self.nodes.entry(properties.name.clone()).or_default();
        if info.images != images {
            let old = std::mem::replace(&mut info.images, images);
            self.images.replace(&old, &info.images);
        }
        self.images.nodes += usize::from(is_new);
        info.properties = Some(properties);
        changed
    }

    /// Removes a node. Its pods stay until they are removed.
    pub(crate) fn remove_node(&mut self, name: &str) {
        if let Some(info) = self.nodes.get_mut(name) {
            self.images.replace(&std::mem::take(&mut info.images), &HashMap::new());
            self.images.nodes -= usize::from(info.properties.is_some());
            info.properties = None;
        }
        self.renew_generation(name);
    }

    /// Gives a node a new generation. An unknown node is added.
    fn touch(&mut self, name: &str) {
        self.generation += 1;
        if let Some(info) = self.nodes.get_mut(name) {
            info.generation = self.generation;
            return;
        }
        // If no slot is free, the nodes use all slots below the number of nodes. So this number is the next slot.
        let slot = self.free_slots.pop().unwrap_or(self.nodes.len());
        let info = NodeInfo { name: name.into(), slot, generation: self.generation, ..NodeInfo::default() };
        self.nodes.insert(name.to_owned(), info);
    }

    /// Gives a changed node a new generation. A node without properties and pods is removed.
    fn renew_generation(&mut self, name: &str) {
        let Some(info) = self.nodes.get(name) else { return };
        if info.properties.is_none() && info.pods.is_empty() {
            self.free_slots.push(info.slot);
            self.nodes.remove(name);
        } else {
            self.touch(name);
        }
    }

    /// The names of the existing nodes.
    pub(crate) fn node_names(&self) -> Vec<String> {
        self.candidates().map(|node| node.properties.name.clone()).collect()
    }

    /// Adds a pod to a node, and removes it from its previous node. Returns the changes that may help waiting pods.
    /// Such a change is a new pod on the node, a pod with other labels, or a pod that requests less of a resource.
    pub(crate) fn place(&mut self, pod: &Pod, node: &str) -> Changes {
        let mut placed = Placed::of(pod);
        let before = self.nodes.get(node).and_then(|info| info.pods.get(pod.uid()));
        // Keep the generation, so that the cached results of filters and scores for the node stay valid.
        if before.is_some_and(|before| **before == placed) {
            return Changes::default();
        }
        let is_new = before.is_none_or(|before| before.labels != placed.labels);
        let is_smaller = before.is_some_and(|before| before.requests.exceeds(&placed.requests));
        let mut changes = Changes::default();
        if is_new {
            changes = changes | Changes::POD_PLACED;
        }
        if is_smaller {
            changes = changes | Changes::POD_GONE;
        }
        self.recent_pods.share(&mut placed.common);
        self.remove(pod.uid());
        self.restore(pod.uid(), node, placed);
        changes
    }

    /// Adds a pod to its node again after it was removed.
    pub(crate) fn restore(&mut self, uid: &str, node: &str, placed: Placed) {
        let uid: Arc<str> = uid.into();
        if placed.terms().is_some() {
            self.with_terms.insert(uid.clone());
        }
        for claim in &placed.claims {
            *self.claim_users.entry(claim.clone()).or_default() += 1;
        }
        self.touch(node);
        if let Some(info) = self.nodes.get_mut(node) {
            self.places.insert(uid.clone(), info.name.clone());
            info.put(uid, placed);
        }
    }

    /// A pod on a node.
    pub(crate) fn placed_pod(&self, node: &str, uid: &str) -> Option<&Placed> {
        self.nodes.get(node)?.pods.get(uid).map(Box::as_ref)
    }

    /// The pods of a node with a lower priority, by uid.
    pub(crate) fn lower_priority_pods(&self, node: &str, priority: i32) -> Vec<(String, Placed)> {
        let pods = self.nodes.get(node).into_iter().flat_map(|info| &info.pods);
        let lower = pods.filter(|(_, placed)| placed.priority < priority);
        lower.map(|(uid, placed)| (uid.to_string(), Placed::clone(placed))).collect()
    }

    /// The use of claims and volumes for the volume filter of a node.
    pub(crate) fn volume_usage<'a>(&'a self, node: Candidate<'a>) -> VolumeUsage<'a> {
        VolumeUsage { claim_users: &self.claim_users, volumes: &self.volumes, node: node.info }
    }

    /// Records the nominated node of a pod: other pods are evicted there for this pod, or the pod's status names the
    /// node.
    pub(crate) fn nominate(&mut self, pod: &Pod, node: &str) {
        let nominated = Nominated { node: node.to_owned(), placed: Placed::of(pod) };
        self.nominated.insert(pod.uid().to_owned(), nominated);
    }

    /// Removes the nomination of a pod. Returns the node for which it was nominated.
    pub(crate) fn remove_nomination(&mut self, uid: &str) -> Option<String> {
        self.nominated.remove(uid).map(|nominated| nominated.node)
    }

    /// The node on which other pods are evicted for this pod.
    pub(crate) fn nominated_node(&self, uid: &str) -> Option<&str> {
        self.nominated.get(uid).map(|nominated| nominated.node.as_str())
    }

    /// The uids of the waiting pods of a lower priority that are nominated for a node.
    pub(crate) fn nominated_below(&self, node: &str, priority: i32) -> Vec<String> {
        let lower = self.nominated.iter().filter(|(uid, other)| {
            other.node == node && other.placed.priority < priority && !self.places.contains_key(uid.as_str())
        });
        lower.map(|(uid, _)| uid.clone()).collect()
    }

    /// Whether other pods are evicted for this pod.
    pub(crate) fn is_nominated(&self, uid: &str) -> bool {
        self.nominated.contains_key(uid)
    }

    /// The nodes for which other pods with the same or a higher priority are nominated.
    pub(crate) fn nodes_nominated_beside(&self, pod: &Pod) -> BTreeSet<String> {
        self.nominated_beside(pod).map(|(_, other)| other.node.clone()).collect()
    }

    fn nominated_beside(&self, pod: &Pod) -> impl Iterator<Item = (&String, &Nominated)> {
        let priority = pod.spec.priority.unwrap_or_default();
        let others = self.nominated.iter().filter(move |(_, other)| other.placed.priority >= priority);
        others.filter(|(uid, _)| *uid != pod.uid())
    }

    /// Adds other pods that are nominated for a node to the node, if their priority is the same or higher. Returns
    /// their uids, so that the caller can remove them again.
    pub(crate) fn assume_nominated(&mut self, pod: &Pod, node: &str) -> Vec<String> {
        let others = self.nominated_beside(pod);
        let others =
            others.filter(|(uid, other)| other.node == node && !self.places.contains_key(uid.as_str()));
        let others: Vec<(String, Placed)> =
            others.map(|(uid, other)| (uid.clone(), other.placed.clone())).collect();
        for (uid, placed) in &others {
            self.restore(uid, node, placed.clone());
        }
        others.into_iter().map(|(uid, _)| uid).collect()
    }

    /// Removes a pod from its node. Returns whether the pod was on a node.
    pub(crate) fn remove(&mut self, uid: &str) -> bool {
        let Some(node) = self.places.remove(uid) else { return false };
        self.with_terms.remove(uid);
        if let Some(info) = self.nodes.get_mut(&*node) {
            for claim in info.pods.get(uid).iter().flat_map(|placed| &placed.claims) {
                if let Entry::Occupied(mut count) = self.claim_users.entry(claim.clone()) {
                    *count.get_mut() -= 1;
                    if *count.get() == 0 {
                        count.remove();
                    }
                }
            }
            info.take(uid);
        }
        self.renew_generation(&node);
        true
    }

    /// Chooses and reserves volumes on a node for the pod's claims. Volumes and claims may change during the decision.
    /// The error is the reason why the node can no longer have the volumes.
    pub(crate) fn reserve_volumes(
        &self,
        pod: &Pod,
        profile: &Profile,
        node: &str,
    ) -> Result<Vec<ChosenVolume>, String> {
        if !profile.filters_by("VolumeBinding") {
            return Ok(Vec::new());
        }
        let properties = self.nodes.get(node).and_then(|info| info.properties.as_ref());
        let properties = properties.ok_or_else(|| format!("node {node:?} not found"))?;
        self.volumes.reserve(pod, properties)
    }

    /// Chooses and reserves devices on a node for the pod's claims. The error is the reason why the node cannot provide
    /// the devices any more.
    pub(crate) fn reserve_devices(&self, pod: &Pod, node: &str) -> Result<Reservations, String> {
        let claims = self.devices.of_pod(pod)?;
        let properties = self.nodes.get(node).and_then(|info| info.properties.as_ref());
        self.devices.reserve(&claims, properties.ok_or_else(|| format!("node {node:?} not found"))?)
    }

    /// The uids of all pods on nodes.
    pub(crate) fn placed(&self) -> Vec<String> {
        self.places.keys().map(ToString::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{node, pod};
    use serde_json::json;

    #[test]
    fn a_pod_is_counted_on_one_node_and_not_after_its_removal() {
        let mut snapshot = Snapshot::default();
        assert!(snapshot.set_node(&node("a", json!({}))));
        assert!(!snapshot.set_node(&node("a", json!({}))));
        let pod = pod("p", json!({"containers": [{"resources": {"requests": {"cpu": "1"}}}]}));
        snapshot.place(&pod, "a");
        snapshot.place(&pod, "a");
        let requested = |snapshot: &Snapshot| snapshot.candidates().next().unwrap().info.requested.clone();
        assert_eq!((requested(&snapshot).cpu_millis, requested(&snapshot).pods), (1000, 1));
        assert!(snapshot.remove("p"));
        assert!(!snapshot.remove("p"));
        assert_eq!(requested(&snapshot), Resources::default());
    }

    #[test]
    fn equal_pods_share_what_they_have_in_common() {
        let mut snapshot = Snapshot::default();
        snapshot.set_node(&node("a", json!({})));
        for (name, priority) in [("p", 0), ("q", 0), ("r", 5)] {
            snapshot.place(&pod(name, json!({"priority": priority, "containers": [{}]})), "a");
        }
        let common = |uid: &str| snapshot.placed_pod("a", uid).unwrap().common.clone();
        assert!(Arc::ptr_eq(&common("p"), &common("q")) && !Arc::ptr_eq(&common("p"), &common("r")));
        let ((uid, place), info) = (snapshot.places.get_key_value("p").unwrap(), &snapshot.nodes["a"]);
        let (kept, _) = info.pods.get_key_value("p").unwrap();
        assert!(Arc::ptr_eq(uid, kept) && Arc::ptr_eq(place, &info.name));
    }

    #[test]
    fn the_size_of_the_disk_is_read_from_the_node_object() {
        let metadata = json!({"name": "a", "annotations": {LOCAL_VOLUMES_DISK: "10Gi"}});
        let mut snapshot = Snapshot::default();
        snapshot.set_node(&serde_json::from_value(json!({"metadata": metadata})).unwrap());
        let disk = snapshot.candidate("a").unwrap().properties.local_volumes_disk;
        assert_eq!(disk, Quantity::parse("10Gi").ok());
    }

    #[test]
    fn nodes_share_the_names_of_their_images() {
        let mut snapshot = Snapshot::default();
        let images = json!([{"names": ["x:1"], "sizeBytes": 5}]);
        for name in ["a", "b"] {
            snapshot.set_node(&node(name, json!({"/status/images": images})));
        }
        let name = |node: &str| snapshot.nodes[node].images.keys().next().unwrap().clone();
        assert!(Arc::ptr_eq(&name("a"), &name("b")));
        snapshot.set_node(&node("a", json!({})));
        assert!(snapshot.images.has("x:1"));
        snapshot.set_node(&node("b", json!({})));
        assert!(!snapshot.images.has("x:1"));
    }

    #[test]
    fn only_a_change_that_filters_or_scores_read_is_a_change_of_the_node() {
        let mut snapshot = Snapshot::default();
        snapshot.set_node(&node("a", json!({})));
        let mut pod = pod("p", json!({}));
        let version = |snapshot: &Snapshot| snapshot.candidate("a").unwrap().info.version();
        assert_eq!(snapshot.place(&pod, "a"), Changes::POD_PLACED);
        let before = version(&snapshot);
        pod.status.phase = Some("Running".to_owned());
        assert_eq!((snapshot.place(&pod, "a"), version(&snapshot)), (Changes::default(), before));
        pod.metadata.labels = Some([("app".to_owned(), "x".to_owned())].into());
        assert_eq!(snapshot.place(&pod, "a"), Changes::POD_PLACED);
        assert_ne!(version(&snapshot), before);
    }

    #[test]
    fn a_resized_pod_counts_with_the_larger_amount_until_it_is_smaller() {
        let mut snapshot = Snapshot::default();
        snapshot.set_node(&node("a", json!({})));
        let resized = |wanted: &str, actual: &str| {
            let container = json!({"name": "c", "resources": {"requests": {"cpu": wanted}}});
            let mut pod = pod("p", json!({"containers": [container]}));
            let status = json!([{"name": "c", "resources": {"requests": {"cpu": actual}}}]);
            pod.status.container_statuses = serde_json::from_value(status).unwrap();
            pod
        };
        let requested = |snapshot: &Snapshot| snapshot.candidates().next().unwrap().info.requested.cpu_millis;
        assert_eq!(snapshot.place(&resized("2", "2"), "a"), Changes::POD_PLACED);
        assert_eq!(snapshot.place(&resized("1", "2"), "a"), Changes::default());
        assert_eq!(requested(&snapshot), 2000);
        assert_eq!(snapshot.place(&resized("1", "1"), "a"), Changes::POD_GONE);
        assert_eq!(requested(&snapshot), 1000);
    }

    #[test]
    fn a_removed_node_is_not_a_candidate_but_keeps_its_pods() {
        let mut snapshot = Snapshot::default();
        snapshot.place(&pod("p", json!({})), "a");
        assert_eq!(snapshot.candidates().count(), 0);
        snapshot.set_node(&node("a", json!({})));
        assert_eq!(snapshot.candidates().next().unwrap().info.requested.pods, 1);
        snapshot.remove_node("a");
        assert_eq!((snapshot.candidates().count(), snapshot.placed()), (0, vec!["p".to_owned()]));
        snapshot.remove("p");
        assert!(snapshot.nodes.is_empty());
    }
}

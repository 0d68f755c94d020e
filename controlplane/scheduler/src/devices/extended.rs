//! Extended resources that device classes provide: the scheduler allocates devices for them in a claim that it creates.
//! Source: `extendeddynamicresources.go` of upstream's plugin DynamicResources.
//!
//! If a node's `allocatable` does not have such a resource, or has the amount 0, the node provides the resource by
//! devices of a class. Otherwise a device plugin of the node provides the resource.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use coracle_values::CollectMap;
use coracle_values::Quantity;
use coracle_values::names::is_extended_resource;
use coracle_values::object::{Key, ObjectExt, controller_of};
use serde_json::{Value, json};

use super::classes::{CLASS_PREFIX, Classes};
use super::object::{Claim, Exact, Request};
use super::{PodDevices, State};
use crate::node_properties::NodeProperties;
use crate::object::{Container, Pod};
use crate::request;

/// Annotation of a claim for extended resources.
pub(super) const ANNOTATION: &str = "resource.kubernetes.io/extended-resource-claim";
/// Prefix of the key's name for a claim that is not created yet. The uid of the pod follows. The API accepts no such
/// name, so no claim in the API has this key.
const UNCREATED: &str = "<extended-resources>/";
/// Maximum number of requests of a claim, as in the API.
const REQUESTS_MAX: usize = 32;
/// Maximum number of mappings. The pod's status could not hold many more.
const MAPPINGS_MAX: usize = 4096;

/// The extended resources of a pod. A device class provides at least one of them.
#[derive(Clone, Debug)]
pub(super) struct Extended {
    /// Requested amounts by name.
    amounts: BTreeMap<String, i128>,
    /// The resources that device classes provide.
    of_classes: BTreeSet<String>,
    /// The device requests for the resources in `of_classes`. They are the same for all nodes.
    requests: BTreeMap<String, OfResource>,
    containers: Vec<ContainerRequests>,
    /// The claim that an earlier attempt to bind the pod created.
    former: Option<Key>,
    /// The key of the new claim before it is created.
    pub(super) key: Key,
}

#[derive(Clone, Debug)]
struct ContainerRequests {
    name: String,
    /// Whether the container ends before later containers start. The later containers can then get the same devices.
    is_short_lived: bool,
    /// Requested amounts by name, of all resources. `None` for an amount that is not a whole number.
    amounts: BTreeMap<String, Option<i64>>,
}

/// A claim for extended resources before it is created, for one node.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NewClaim {
    pub(super) claim: Claim,
    /// Requests of the containers by resource, as in the pod's status.
    pub(super) mappings: Vec<Arc<[Mapping]>>,
}

/// A request from which a container gets devices for a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) container: String,
    pub(super) resource: String,
    pub(super) request: String,
}

/// The requests of one resource.
#[derive(Clone, Debug)]
struct OfResource {
    requests: Vec<DeviceRequest>,
    mappings: Arc<[Mapping]>,
}

/// The request of one container for devices of a resource.
#[derive(Clone, Debug)]
struct DeviceRequest {
    /// The index of the container, init containers first.
    container: usize,
    name: String,
    /// The number of devices.
    count: i64,
}

/// Whether a resource is an extended resource, or the resource of a class. Source: `IsDRAExtendedResourceName`.
pub(crate) fn is_extended(name: &str) -> bool {
    is_extended_resource(name) || name.starts_with(CLASS_PREFIX)
}

/// Whether a container of the pod requests an extended resource.
pub(crate) fn requests_extended(pod: &Pod) -> bool {
    let containers = containers(pod).filter_map(|container| container.resources.as_ref()?.requests.as_ref());
    containers.flat_map(BTreeMap::keys).any(|name| is_extended(name))
}

/// The key of the claim for a pod's extended resources before it is created.
pub(super) fn uncreated(namespace: &str, pod: &str) -> Key {
    Key::new(namespace, &format!("{UNCREATED}{pod}"))
}

/// Whether this is the key of a claim before it is created.
pub(super) fn is_uncreated(key: &Key) -> bool {
    key.name.starts_with(UNCREATED)
}

/// The uid of the pod for whose extended resources a claim was created. `None` for other claims.
pub(super) fn pod_of(claim: &Claim) -> Option<&str> {
    let annotations = claim.metadata.annotations.as_ref()?;
    let is_extended = annotations.get(ANNOTATION).is_some_and(|value| value == "true");
    controller_of(&claim.metadata).filter(|_| is_extended).map(|owner| owner.uid.as_str())
}

// === impl PodDevices ===

impl PodDevices {
    /// The extended resources that device classes provided when the pod's devices were read. This applies on nodes
    /// without a device plugin for these resources.
    pub(crate) fn resources_of_classes(&self) -> BTreeSet<String> {
        self.extended.as_ref().map(|extended| extended.of_classes.clone()).unwrap_or_default()
    }
}

// === impl State ===

impl State {
    /// The extended resources of a pod, if a class provides one of them.
    pub(super) fn extended(&self, pod: &Pod) -> Option<Extended> {
        let (amounts, of_classes) = self.extended_amounts(pod)?;
        let inits = pod.spec.init_containers.iter().flatten();
        let inits = inits.map(|container| ContainerRequests::of(container, !is_sidecar(container)));
        let others = pod.spec.containers.iter().map(|container| ContainerRequests::of(container, false));
        let containers: Vec<ContainerRequests> = inits.chain(others).collect();
        let (mut requests, mut mapped) = (BTreeMap::new(), 0);
        // A pod with more than [`MAPPINGS_MAX`] mappings gets no claim, so the remaining resources are skipped.
        for name in &of_classes {
            if mapped > MAPPINGS_MAX {
                break;
            }
            let found = OfResource::of(&containers, name);
            mapped += found.mappings.len();
            requests.insert(name.clone(), found);
        }
        let key = uncreated(pod.namespace(), pod.uid());
        let former = self.former_claim(pod).cloned();
        Some(Extended { amounts, of_classes, requests, containers, former, key })
    }

    /// Whether a class provides an extended resource of the pod.
    pub(super) fn provides_extended(&self, pod: &Pod) -> bool {
        self.extended_amounts(pod).is_some()
    }

    /// The amounts of a pod's extended resources by name, and the resources that classes provide. `None` if no class
    /// provides one of these resources.
    fn extended_amounts(&self, pod: &Pod) -> Option<(BTreeMap<String, i128>, BTreeSet<String>)> {
        if !requests_extended(pod) {
            return None;
        }
        let mut amounts = request::of_pod(pod).others;
        amounts.retain(|name, amount| *amount > 0 && is_extended(name));
        let of_classes = amounts.keys().filter(|name| self.classes.of_resource(name).is_some());
        let of_classes: BTreeSet<String> = of_classes.cloned().collect();
        of_classes.first()?;
        Some((amounts, of_classes))
    }

    /// The claim for extended resources that an earlier attempt to bind the pod has created.
    pub(super) fn former_claim(&self, pod: &Pod) -> Option<&Key> {
        self.extended_claims.get(&Key::new(pod.namespace(), pod.uid()))
    }

    /// Updates the index of the claims for extended resources. Afterwards the caller stores the claim, or removes it if
    /// `new` is `None`. Users can change the annotation and the owner of a claim. A pod that loses its claim is
    /// scheduled again.
    pub(super) fn index_extended(&mut self, key: &Key, new: Option<&Claim>) {
        let of = |pod: &str| Key::new(&key.namespace, pod);
        let known = self.claims.get(key).and_then(pod_of).map(of);
        let new = new.and_then(pod_of).map(of);
        let left =
            known.filter(|pod| new.as_ref() != Some(pod) && self.extended_claims.get(pod) == Some(key));
        if let Some(pod) = left {
            self.extended_claims.remove(&pod);
            self.pending.claims.insert(uncreated(&pod.namespace, &pod.name));
        }
        if let Some(pod) = new {
            self.extended_claims.insert(pod, key.clone());
        }
    }

    /// Stores a claim for extended resources that was created and allocated. Its devices are no longer reserved for the
    /// uncreated claim.
    pub(super) fn put_created(&mut self, uncreated: &Key, written: Claim) {
        let key = written.key();
        let is_newer = match self.claims.get(&key) {
            Some(known) => crate::object::is_older(known, &written),
            // The claim is unknown. If the watch has already delivered a later version of another claim, this claim was
            // deleted.
            None => self.latest_claim < version(&written),
        };
        if is_newer {
            self.insert_claim(&key, written);
            // The watch may still deliver an earlier state, without the allocation.
            if let Some(chosen) = self.assumed.get(uncreated).cloned() {
                self.change(&key, |state| drop(state.assumed.insert(key.clone(), chosen)));
            }
        }
        self.change(uncreated, |state| drop(state.assumed.remove(uncreated)));
        self.new_claims.remove(uncreated);
    }

    /// Records the version of a claim that the watch delivers.
    pub(super) fn received(&mut self, claim: &Claim) {
        self.latest_claim = self.latest_claim.max(version(claim));
    }
}

fn version(claim: &Claim) -> Option<u64> {
    claim.metadata.resource_version.as_deref()?.parse().ok()
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// The init containers of a pod, then its other containers.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.init_containers.iter().flatten().chain(&pod.spec.containers)
}

// === impl ContainerRequests ===

impl ContainerRequests {
    fn of(container: &Container, is_short_lived: bool) -> Self {
        let requests = container.resources.iter().filter_map(|resources| resources.requests.as_ref());
        let amounts = requests.flatten().map(|(name, amount)| {
            (name.clone(), coracle_values::quantity::of(amount).ok().and_then(Quantity::whole))
        });
        Self { name: container.name.clone(), is_short_lived, amounts: amounts.collect_map() }
    }
}

// === impl Extended ===

impl Extended {
    /// The claim with which a node provides the resources. `None` if device plugins of the node provide all of them.
    /// The error is the reason why the node cannot provide them.
    pub(super) fn claim(&self, classes: &Classes, node: &NodeProperties) -> Result<Option<NewClaim>, String> {
        if self.former.is_some() {
            return Err("cannot schedule extended resource claim".to_owned());
        }
        let (mut requests, mut mappings, mut mapped) = (Vec::new(), Vec::new(), 0);
        for resource in self.amounts.keys() {
            let allocatable = node.allocatable.others.get(resource);
            let is_lacking = allocatable.is_none_or(|amount| *amount == 0);
            match classes.of_resource(resource) {
                Some(class) if is_lacking => {
                    // The API accepts fractions of a resource with the prefix of device classes, because its domain
                    // belongs to Kubernetes.
                    if self.containers.iter().any(|one| one.amounts.get(resource) == Some(&None)) {
                        return Err("cannot allocate all claims".to_owned());
                    }
                    // The class may be newer than the pod's requests.
                    let found = self.requests.get(resource).cloned();
                    let found = found.unwrap_or_else(|| OfResource::of(&self.containers, resource));
                    requests.extend(found.requests.into_iter().map(|request| {
                        let exact = Exact {
                            device_class_name: class.to_owned(),
                            allocation_mode: Some("ExactCount".to_owned()),
                            count: Some(request.count),
                            ..Exact::default()
                        };
                        Request { name: request.name, exactly: Some(exact), ..Request::default() }
                    }));
                    mapped += found.mappings.len();
                    mappings.push(found.mappings);
                    if requests.len() > REQUESTS_MAX || mapped > MAPPINGS_MAX {
                        return Err("cannot allocate all claims".to_owned());
                    }
                }
                // The filter NodeResourcesFit did not check this resource, because a class provided it. The class may
                // have been deleted since then.
                _ if allocatable.is_none() || (is_lacking && self.of_classes.contains(resource)) => {
                    return Err("cannot fit resource".to_owned());
                }
                _ => {}
            }
        }
        if requests.is_empty() {
            return Ok(None);
        }
        requests.sort_by(|one: &Request, other| one.name.cmp(&other.name));
        let mut claim = Claim::default();
        claim.metadata.namespace = Some(self.key.namespace.clone());
        claim.metadata.name = Some(self.key.name.clone());
        claim.spec.devices.requests = requests;
        Ok(Some(NewClaim { claim, mappings }))
    }
}

// === impl OfResource ===

impl OfResource {
    /// The requests and mappings of a resource. Init containers that end share one request, and first use the devices
    /// of the containers after them. Source: `createRequestsAndMappings`.
    fn of(containers: &[ContainerRequests], resource: &str) -> Self {
        let (mut requests, mut all) = (Vec::new(), Vec::new());
        for (index, container) in containers.iter().enumerate().filter(|(_, one)| !one.is_short_lived) {
            let Some(request) = container.request(index, resource) else { continue };
            all.push(container.mapping(resource, &request.name));
            requests.push(request);
        }
        // A claim cannot have so many requests. Skip the mappings of init containers: each init container could have a
        // mapping to each request.
        if requests.len() > REQUESTS_MAX {
            return Self { requests, mappings: all.into() };
        }
        let (mut largest, mut own, mut mappings) = (None::<DeviceRequest>, BTreeSet::new(), Vec::new());
        for (index, container) in containers.iter().enumerate().filter(|(_, one)| one.is_short_lived) {
            if mappings.len() > MAPPINGS_MAX {
                break;
            }
            let Some(mut request) = container.request(index, resource) else { continue };
            request.count -= container.reuse(&request, resource, &requests, &mut mappings);
            if request.count <= 0 {
                continue;
            }
            mappings.push(container.mapping(resource, &request.name));
            own.insert(request.name.clone());
            if largest.as_ref().is_none_or(|largest| largest.count < request.count) {
                largest = Some(request);
            }
        }
        if let Some(largest) = &largest {
            for mapping in mappings.iter_mut().filter(|mapping| own.contains(&mapping.request)) {
                mapping.request.clone_from(&largest.name);
            }
        }
        all.extend(mappings);
        requests.extend(largest);
        Self { requests, mappings: all.into() }
    }
}

impl ContainerRequests {
    /// Maps the container to requests of the containers after it, until the container has enough devices. Returns the
    /// number of devices of these requests, which may be larger than the wanted number.
    fn reuse(
        &self,
        wanted: &DeviceRequest,
        resource: &str,
        requests: &[DeviceRequest],
        mappings: &mut Vec<Mapping>,
    ) -> i64 {
        let mut sum = 0_i64;
        for request in requests.iter().filter(|request| request.container > wanted.container) {
            if sum >= wanted.count {
                break;
            }
            mappings.push(self.mapping(resource, &request.name));
            sum = sum.saturating_add(request.count);
        }
        sum
    }

    /// The request for a resource. `index` is the index of the container. `None` if the container requests no devices.
    fn request(&self, index: usize, resource: &str) -> Option<DeviceRequest> {
        let count = (*self.amounts.get(resource)?).filter(|count| *count > 0)?;
        let place = self.amounts.keys().position(|name| name == resource)?;
        Some(DeviceRequest { container: index, name: format!("container-{index}-request-{place}"), count })
    }

    fn mapping(&self, resource: &str, request: &str) -> Mapping {
        let (container, resource) = (self.name.clone(), resource.to_owned());
        Mapping { container, resource, request: request.to_owned() }
    }
}

// === impl NewClaim ===

impl NewClaim {
    /// The claim to create for the pod.
    pub(super) fn object(&self, pod: &Pod) -> Value {
        let requests = self.claim.spec.devices.requests.iter().filter_map(|request| {
            let exact = request.exactly.as_ref()?;
            let exactly = json!({"deviceClassName": exact.device_class_name,
                "allocationMode": exact.allocation_mode, "count": exact.count});
            Some(json!({"name": request.name, "exactly": exactly}))
        });
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": pod.name(), "uid": pod.uid(),
            "controller": true});
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {
                "namespace": pod.namespace(),
                "generateName": format!("{}-extended-resources-", pod.name()),
                "ownerReferences": [owner],
                "annotations": {ANNOTATION: "true"},
            },
            "spec": {"devices": {"requests": requests.collect::<Vec<_>>()}},
        })
    }

    /// The field `extendedResourceClaimStatus` of the pod's status. `name` is the name of the created claim.
    pub(super) fn pod_status(&self, name: &str) -> Value {
        let mappings = self.mappings.iter().flat_map(|mappings| mappings.iter()).map(|one| {
            json!({"containerName": one.container, "resourceName": one.resource, "requestName": one.request})
        });
        json!({"resourceClaimName": name, "requestMappings": mappings.collect::<Vec<_>>()})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    const GPU: &str = "example.com/gpu";

    /// A container that requests these amounts of `example.com/gpu` and other resources.
    fn container(name: &str, requests: Value) -> Value {
        json!({"name": name, "resources": {"requests": requests}})
    }

    fn sidecar(name: &str, requests: Value) -> Value {
        let mut sidecar = container(name, requests);
        sidecar["restartPolicy"] = "Always".into();
        sidecar
    }

    /// A state in which the class `c` provides `example.com/gpu`.
    fn state() -> State {
        let mut state = State::default();
        let class = json!({"metadata": {"name": "c"}, "spec": {"extendedResourceName": GPU}});
        state.classes.insert(serde_json::from_value(class).unwrap());
        state
    }

    fn new_claim(spec: Value, node: &NodeProperties) -> Result<Option<NewClaim>, String> {
        let state = state();
        let extended = state.extended(&fixture::pod("p", spec)).unwrap();
        extended.claim(&state.classes, node)
    }

    /// Names, classes and numbers of devices.
    fn requests(claim: &NewClaim) -> Vec<(&str, &str, i64)> {
        let requests = claim.claim.spec.devices.requests.iter();
        let exact = requests.map(|request| (request, request.exactly.as_ref().unwrap()));
        let read = exact.map(|(request, exact)| {
            (request.name.as_str(), exact.device_class_name.as_str(), exact.count.unwrap())
        });
        read.collect()
    }

    fn mappings(claim: &NewClaim) -> Vec<(&str, &str)> {
        let mappings = claim.mappings.iter().flat_map(|mappings| mappings.iter());
        mappings.map(|one| (one.container.as_str(), one.request.as_str())).collect()
    }

    #[test]
    fn extended_resources_are_recognized_by_name_as_upstream() {
        for name in [GPU, "deviceclass.resource.kubernetes.io/c"] {
            assert!(is_extended(name), "{name}");
        }
        for name in ["cpu", "hugepages-2Mi", "kubernetes.io/x", "a.kubernetes.io/x", "requests.example.com/x"]
        {
            assert!(!is_extended(name), "{name}");
        }
    }

    /// The cases of upstream's `Test_createRequestsAndMappings_requests`.
    #[test]
    fn containers_get_requests_of_their_own_and_init_containers_share_one() {
        let node = NodeProperties::default();
        let gpus = |amount: &str| json!({GPU: amount});
        let one = json!({"containers": [container("a", gpus("1"))]});
        let found = new_claim(one, &node).unwrap().unwrap();
        assert_eq!(requests(&found), [("container-0-request-0", "c", 1)]);
        let inits = [container("i", gpus("1")), container("j", gpus("2"))];
        let plain = container("a", json!({"cpu": "1"}));
        let found =
            new_claim(json!({"initContainers": inits, "containers": [plain]}), &node).unwrap().unwrap();
        assert_eq!(requests(&found), [("container-1-request-0", "c", 2)]);
        assert_eq!(mappings(&found), [("i", "container-1-request-0"), ("j", "container-1-request-0")]);
        let inits = [container("i", gpus("1")), sidecar("s", gpus("1")), container("j", gpus("2"))];
        let found =
            new_claim(json!({"initContainers": inits, "containers": [plain]}), &node).unwrap().unwrap();
        assert_eq!(requests(&found), [("container-1-request-0", "c", 1), ("container-2-request-0", "c", 2)]);
        // The first init container has the devices of the sidecar, which starts later.
        let expected =
            [("s", "container-1-request-0"), ("i", "container-1-request-0"), ("j", "container-2-request-0")];
        assert_eq!(mappings(&found), expected);
        // The last number in the name of a request is the index of its resource among all resources of the container.
        let two = json!({"cpu": "1", "deviceclass.resource.kubernetes.io/c": "2", GPU: "1"});
        let found = new_claim(json!({"containers": [container("a", two)]}), &node).unwrap().unwrap();
        assert_eq!(requests(&found), [("container-0-request-1", "c", 2), ("container-0-request-2", "c", 1)]);
    }

    #[test]
    fn a_device_plugin_of_the_node_has_precedence() {
        let spec = || json!({"containers": [container("a", json!({GPU: "1"}))]});
        let with = |amounts: &[(&str, i128)]| {
            let mut node = NodeProperties::default();
            node.allocatable.others =
                amounts.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect();
            node
        };
        assert_eq!(new_claim(spec(), &with(&[(GPU, 1)])), Ok(None));
        assert!(new_claim(spec(), &with(&[(GPU, 0)])).unwrap().is_some());
        assert!(new_claim(spec(), &with(&[])).unwrap().is_some());
        let extended = state().extended(&fixture::pod("p", spec())).unwrap();
        for amounts in [&[][..], &[(GPU, 0)]] {
            let without_class = extended.claim(&Classes::default(), &with(amounts));
            assert_eq!(
                without_class,
                Err("cannot fit resource".to_owned()),
                "the class was deleted meanwhile"
            );
        }
        let other = json!({"containers": [container("a", json!({GPU: "1", "example.com/other": "1"}))]});
        assert_eq!(new_claim(other.clone(), &with(&[])), Err("cannot fit resource".to_owned()));
        assert!(new_claim(other, &with(&[("example.com/other", 1)])).unwrap().is_some());
        let none =
            fixture::pod("p", json!({"containers": [container("a", json!({"example.com/other": "1"}))]}));
        assert!(state().extended(&none).is_none(), "no class provides a resource of the pod");
    }

    #[test]
    fn a_node_cannot_provide_a_fraction_of_a_device() {
        let containers = |amount: &str| {
            let other = container("b", json!({"deviceclass.resource.kubernetes.io/c": "1"}));
            json!({"containers": [container("a", json!({"deviceclass.resource.kubernetes.io/c": amount})), other]})
        };
        let node = NodeProperties::default();
        let refused = Err("cannot allocate all claims".to_owned());
        assert_eq!(new_claim(containers("1500m"), &node), refused);
        let found = new_claim(containers("0"), &node).unwrap().unwrap();
        assert_eq!(requests(&found), [("container-1-request-0", "c", 1)]);
    }

    #[test]
    fn a_pod_with_too_many_requests_gets_no_claim_and_little_work() {
        let many = |kind: &str| -> Vec<Value> {
            (0..1000).map(|index| container(&format!("{kind}{index}"), json!({GPU: "1000"}))).collect()
        };
        let spec = json!({"initContainers": many("i"), "containers": many("c")});
        let refused = new_claim(spec, &NodeProperties::default());
        assert_eq!(refused, Err("cannot allocate all claims".to_owned()));
        // Each init container has a mapping for each of the other containers.
        let init = |index: i32| container(&format!("i{index}"), json!({GPU: "1000000"}));
        let (inits, mut few) = ((0..1000).map(init).collect::<Vec<_>>(), many("c"));
        few.truncate(REQUESTS_MAX - 1);
        let spec = json!({"initContainers": inits, "containers": few});
        let extended = state().extended(&fixture::pod("p", spec)).unwrap();
        assert!(extended.requests[GPU].mappings.len() <= MAPPINGS_MAX + 2 * REQUESTS_MAX);
        let refused = extended.claim(&state().classes, &NodeProperties::default());
        assert_eq!(refused, Err("cannot allocate all claims".to_owned()));
    }

    #[test]
    fn the_mappings_are_computed_once_for_all_nodes() {
        let state = state();
        let pod = fixture::pod("p", json!({"containers": [container("a", json!({GPU: "1"}))]}));
        let extended = state.extended(&pod).unwrap();
        let claim = || extended.claim(&state.classes, &NodeProperties::default()).unwrap().unwrap();
        assert!(Arc::ptr_eq(&claim().mappings[0], &claim().mappings[0]));
    }

    #[test]
    fn the_claim_of_an_earlier_attempt_is_found_by_the_pod() {
        let mut state = state();
        let pod = fixture::pod("p", json!({"containers": [container("a", json!({GPU: "1"}))]}));
        let claim = |namespace: &str, annotation: &str| -> Claim {
            let owner =
                json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "p", "controller": true});
            let metadata = json!({"name": "x", "namespace": namespace, "uid": "x", "ownerReferences": [owner],
                "annotations": {ANNOTATION: annotation}});
            serde_json::from_value(json!({"metadata": metadata})).unwrap()
        };
        state.put_claim(claim("d", "false"));
        state.put_claim(claim("other", "true"));
        assert_eq!(state.former_claim(&pod), None, "neither claim belongs to the pod");
        state.put_claim(claim("d", "true"));
        assert_eq!(state.former_claim(&pod), Some(&Key::new("d", "x")));
        let found = state.extended(&pod).unwrap().claim(&state.classes, &NodeProperties::default());
        assert_eq!(found, Err("cannot schedule extended resource claim".to_owned()));
        state.pending = super::super::DeviceChanges::default();
        state.remove_claim(&Key::new("d", "x"));
        assert_eq!(state.former_claim(&pod), None);
        let changes = &state.pending;
        assert!(super::super::uses_any(&pod, &changes.claims), "the pod is scheduled again");
        let other = fixture::pod("q", json!({"containers": [container("a", json!({GPU: "1"}))]}));
        assert!(!super::super::uses_any(&other, &changes.claims) && !changes.supply);
        // A claim that is no longer marked as one for extended resources is not in the index.
        state.put_claim(claim("d", "true"));
        state.put_claim(claim("d", "false"));
        assert!(
            state.extended_claims.contains_key(&Key::new("other", "p")) && state.extended_claims.len() == 1
        );
    }
}

//! The resources and host ports that a pod requests.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};

use coracle_values::pod_resources::{
    ContainerResources, PodResources, Resources, StatusResources, is_resize_infeasible,
};
use coracle_values::restart::RESTART_ALL;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::object::{Container, ContainerStatus, Pod, PodSpec};

/// Assumed requests of a container without requests. They affect only scores, so that pods without requests spread,
/// too.
const ASSUMED: [(&str, &str); 2] = [("cpu", "100m"), ("memory", "200Mi")];

/// A host port that a pod uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPort {
    pub(crate) address: String,
    pub(crate) protocol: String,
    pub(crate) port: i32,
}

/// The host ports that a pod requests, by number and protocol. They are indexed, because a node may have very many
/// ports in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WantedPorts(HashMap<i32, HashMap<String, Addresses>>);

/// The addresses of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Addresses {
    /// Whether the port is wanted on all addresses.
    all: bool,
    single: HashSet<String>,
}

/// The requests of a pod that filters and scores compare with each node. They are computed once for each pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodRequirements {
    pub(crate) requests: Resources,
    /// The requests for scores, with [`ASSUMED`] amounts.
    pub(crate) assumed: Resources,
    pub(crate) ports: WantedPorts,
    /// Whether the end of a container may restart all containers of the pod.
    pub(crate) restarts_all: bool,
    /// Requested extended resources that device classes provide, on nodes without a device plugin for them.
    pub(crate) of_classes: BTreeSet<String>,
}

impl PodRequirements {
    pub(crate) fn of(pod: &Pod) -> Self {
        let requests = of_pod(pod);
        let assumed = if assumes_nothing(pod) { requests.clone() } else { assumed_of_pod(pod) };
        Self {
            requests,
            assumed,
            ports: WantedPorts::of(host_ports(&pod.spec)),
            restarts_all: restarts_all(&pod.spec),
            of_classes: BTreeSet::new(),
        }
    }
}

/// Whether a container has a rule that restarts all containers of the pod.
fn restarts_all(spec: &PodSpec) -> bool {
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut rules = containers.flat_map(|container| container.restart_policy_rules.iter().flatten());
    rules.any(|rule| rule.action == RESTART_ALL)
}

/// The effective requests of a pod. While a resize is pending, the larger of the desired and the actual requests
/// counts.
pub(crate) fn of_pod(pod: &Pod) -> Resources {
    sum(
        pod,
        pod.spec.resources.as_ref(),
        &mut pod.spec.containers.iter().chain(inits(&pod.spec)).map(|one| one.resources.as_ref()),
    )
}

/// The amount of one resource: CPU in millicores, other resources in units.
pub(crate) fn amount(resources: &Resources, name: &str) -> i128 {
    match name {
        "cpu" => resources.cpu_millis,
        "memory" => resources.memory,
        "ephemeral-storage" => resources.ephemeral_storage,
        "pods" => resources.pods,
        other => resources.others.get(other).copied().unwrap_or_default(),
    }
}

/// The requests of a pod on a node, and its requests in scores.
pub(crate) fn of_placed(pod: &Pod) -> (Resources, Resources) {
    let requests = of_pod(pod);
    let assumed = if assumes_nothing(pod) { requests.clone() } else { assumed_of_placed(pod) };
    (requests, assumed)
}

/// Whether the requests of a pod for scores are equal to its requests: each container requests all resources of
/// [`ASSUMED`], and the pod has no pod-level requests. A second sum would have the same result.
fn assumes_nothing(pod: &Pod) -> bool {
    let mut containers = pod.spec.containers.iter().chain(inits(&pod.spec));
    pod.spec.resources.is_none() && containers.all(|one| requests_all(one.resources.as_ref(), &ASSUMED))
}

/// Whether requests have all of these resources.
fn requests_all(resources: Option<&ResourceRequirements>, amounts: &[(&str, &str)]) -> bool {
    let requests = resources.and_then(|resources| resources.requests.as_ref());
    amounts.iter().all(|(name, _)| requests.is_some_and(|requests| requests.contains_key(*name)))
}

/// The requests of a pod in scores: a container that requests no CPU or no memory counts with an assumed amount. As in
/// upstream's NodeResourcesFit, pod-level requests do not count.
fn assumed_of_pod(pod: &Pod) -> Resources {
    assumed_sum(pod, &ASSUMED, None)
}

/// The requests of a pod on a node in scores. With pod-level requests, an assumed amount applies only to resources that
/// neither the pod nor a container requests, as in upstream's `getNonMissingContainerRequests`.
fn assumed_of_placed(pod: &Pod) -> Resources {
    let spec = &pod.spec;
    let has = |resources: Option<&ResourceRequirements>, name: &str| {
        let requests = resources.and_then(|resources| resources.requests.as_ref());
        requests.is_some_and(|requests| requests.contains_key(name))
    };
    let is_pod_level = |name: &String| name == "cpu" || name == "memory" || name.starts_with("hugepages-");
    let of_pod = spec.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    if !of_pod.is_some_and(|requests| requests.keys().any(is_pod_level)) {
        return assumed_of_pod(pod);
    }
    let is_missing = |name: &str| {
        let of_container =
            spec.containers.iter().chain(inits(spec)).any(|one| has(one.resources.as_ref(), name));
        let of_overhead = spec.overhead.as_ref().is_some_and(|overhead| overhead.contains_key(name));
        !of_container && !of_overhead && !has(spec.resources.as_ref(), name)
    };
    let missing: Vec<(&str, &str)> = ASSUMED.into_iter().filter(|(name, _)| is_missing(name)).collect();
    assumed_sum(pod, &missing, spec.resources.as_ref())
}

fn assumed_sum(pod: &Pod, amounts: &[(&str, &str)], pod_level: Option<&ResourceRequirements>) -> Resources {
    let containers = pod.spec.containers.iter().chain(inits(&pod.spec));
    let assumed: Vec<Cow<'_, ResourceRequirements>> =
        containers.map(|container| assumed(container, amounts)).collect();
    sum(pod, pod_level, &mut assumed.iter().map(|resources| Some(resources.as_ref())))
}

fn inits(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten()
}

fn assumed<'a>(container: &'a Container, amounts: &[(&str, &str)]) -> Cow<'a, ResourceRequirements> {
    if let Some(resources) = container.resources.as_ref().filter(|one| requests_all(Some(*one), amounts)) {
        return Cow::Borrowed(resources);
    }
    let mut resources = container.resources.clone().unwrap_or_default();
    let requests = resources.requests.get_or_insert_default();
    for (name, amount) in amounts {
        requests.entry((*name).to_owned()).or_insert_with(|| Quantity((*amount).to_owned()));
    }
    Cow::Owned(resources)
}

/// The effective requests of a pod. `listed` yields the resources of its containers, then the resources of its init
/// containers.
fn sum<'a>(
    pod: &'a Pod,
    pod_level: Option<&'a ResourceRequirements>,
    listed: &mut dyn Iterator<Item = Option<&'a ResourceRequirements>>,
) -> Resources {
    let (spec, status) = (&pod.spec, &pod.status);
    let is_infeasible = is_resize_infeasible(status.conditions.as_ref(), pod.metadata.generation);
    let mut read = |container: &'a Container, statuses: &HashMap<&'a str, &'a ContainerStatus>| {
        let own = statuses.get(container.name.as_str()).copied();
        let mut found = resources(container, own, is_infeasible);
        found.resources = listed.next().flatten();
        found
    };
    let (of_containers, of_inits) =
        (by_name(&status.container_statuses), by_name(&status.init_container_statuses));
    let containers = spec.containers.iter().map(|c| read(c, &of_containers)).collect();
    let init_containers = inits(spec).map(|c| read(c, &of_inits)).collect();
    let allocated = status.allocated_resources.as_ref();
    let pod_status =
        status.resources.as_ref().map(|actual| StatusResources { actual, allocated, is_infeasible });
    PodResources { containers, init_containers, pod_level, pod_status, overhead: spec.overhead.as_ref() }
        .requests()
}

/// The statuses by the names of their containers. If several statuses have one name, the first status is used.
fn by_name(statuses: &[ContainerStatus]) -> HashMap<&str, &ContainerStatus> {
    let mut named = HashMap::with_capacity(statuses.len());
    for status in statuses {
        named.entry(status.name.as_str()).or_insert(status);
    }
    named
}

fn resources<'a>(
    container: &'a Container,
    status: Option<&'a ContainerStatus>,
    is_infeasible: bool,
) -> ContainerResources<'a> {
    let status = status.and_then(|status| {
        let allocated = status.allocated_resources.as_ref();
        Some(StatusResources { actual: status.resources.as_ref()?, allocated, is_infeasible })
    });
    ContainerResources { resources: container.resources.as_ref(), is_sidecar: is_sidecar(container), status }
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// The host ports of a pod's containers and sidecars.
pub(crate) fn host_ports(spec: &PodSpec) -> Vec<HostPort> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|container| is_sidecar(container));
    spec.containers.iter().chain(sidecars).flat_map(|container| ports(container, spec.host_network)).collect()
}

fn ports(container: &Container, host_network: Option<bool>) -> Vec<HostPort> {
    let mut ports = Vec::new();
    for port in container.ports.iter().flatten() {
        // With `hostNetwork` each container port is a host port. The API server's defaults do the same.
        let own = (host_network == Some(true)).then_some(port.container_port);
        let Some(number) = port.host_port.filter(|port| *port > 0).or(own) else { continue };
        ports.push(HostPort {
            address: port.host_ip.clone().filter(|ip| !ip.is_empty()).unwrap_or_else(|| "0.0.0.0".to_owned()),
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
            port: number,
        });
    }
    ports
}

impl HostPort {
    fn is_on_all_addresses(&self) -> bool {
        self.address == "0.0.0.0" || self.address == "::"
    }
}

impl WantedPorts {
    pub(crate) fn of(ports: Vec<HostPort>) -> Self {
        let mut wanted = HashMap::<i32, HashMap<String, Addresses>>::new();
        for port in ports {
            let is_on_all = port.is_on_all_addresses();
            let addresses = wanted.entry(port.port).or_default().entry(port.protocol).or_default();
            if is_on_all {
                addresses.all = true;
            } else {
                addresses.single.insert(port.address);
            }
        }
        Self(wanted)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether one of these ports conflicts with a port that is in use on a node.
    pub(crate) fn conflict(&self, used: &HostPort) -> bool {
        let addresses = self.0.get(&used.port).and_then(|protocols| protocols.get(&used.protocol));
        addresses.is_some_and(|addresses| {
            addresses.all || used.is_on_all_addresses() || addresses.single.contains(&used.address)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_container_without_requests_counts_with_an_assumed_amount_in_scores() {
        let with = |requests: serde_json::Value| serde_json::json!({"resources": {"requests": requests}});
        let pod = crate::fixture::pod(
            "p",
            serde_json::json!({"containers": [{}, with(serde_json::json!({"cpu": "0", "memory": "1Mi"}))]}),
        );
        let (real, assumed) = (of_pod(&pod), assumed_of_pod(&pod));
        assert_eq!((real.cpu_millis, real.memory), (0, 1024 * 1024));
        assert_eq!((assumed.cpu_millis, assumed.memory), (100, 201 * 1024 * 1024));
        let mut whole = pod.clone();
        whole.spec.resources = serde_json::from_value(serde_json::json!({"requests": {"cpu": "2"}})).unwrap();
        let (new, placed) = (assumed_of_pod(&whole), assumed_of_placed(&whole));
        assert_eq!((new.cpu_millis, new.memory), (100, 201 * 1024 * 1024));
        assert_eq!((placed.cpu_millis, placed.memory), (2000, 1024 * 1024));
    }

    #[test]
    fn the_requests_in_scores_are_summed_only_if_an_amount_is_assumed() {
        let with = |requests: serde_json::Value| serde_json::json!({"resources": {"requests": requests}});
        let all = with(serde_json::json!({"cpu": "1", "memory": "1Gi"}));
        let some = with(serde_json::json!({"cpu": "1"}));
        for (spec, expected) in [
            (serde_json::json!({"containers": [all], "initContainers": [all]}), true),
            (serde_json::json!({"containers": [all, some]}), false),
            (serde_json::json!({"containers": [all], "initContainers": [{}]}), false),
            (serde_json::json!({"containers": [all], "resources": {"requests": {"cpu": "3"}}}), false),
        ] {
            let pod = crate::fixture::pod("p", spec);
            assert_eq!(assumes_nothing(&pod), expected);
            assert_eq!(PodRequirements::of(&pod).assumed, assumed_of_pod(&pod));
            assert_eq!(of_placed(&pod), (of_pod(&pod), assumed_of_placed(&pod)));
        }
    }

    #[test]
    fn a_shrinking_pod_counts_with_its_allocated_pod_level_resources() {
        let mut pod = crate::fixture::pod(
            "p",
            serde_json::json!({"containers": [{}], "resources": {"requests": {"cpu": "1"}}}),
        );
        pod.status.resources = serde_json::from_value(serde_json::json!({"requests": {"cpu": "2"}})).unwrap();
        assert_eq!(of_pod(&pod).cpu_millis, 2000);
        pod.status.allocated_resources = serde_json::from_value(serde_json::json!({"cpu": "3"})).unwrap();
        assert_eq!(of_pod(&pod).cpu_millis, 3000);
    }

    #[test]
    fn a_port_on_all_addresses_conflicts_with_the_same_port_on_one() {
        let port = |address: &str, port| HostPort { address: address.into(), protocol: "TCP".into(), port };
        let conflict = |one: HostPort, other: HostPort| WantedPorts::of(vec![one]).conflict(&other);
        assert!(conflict(port("0.0.0.0", 80), port("10.0.0.1", 80)));
        assert!(conflict(port("10.0.0.1", 80), port("::", 80)));
        assert!(conflict(port("10.0.0.1", 80), port("10.0.0.1", 80)));
        assert!(!conflict(port("10.0.0.2", 80), port("10.0.0.1", 80)));
        assert!(!conflict(port("0.0.0.0", 80), port("0.0.0.0", 81)));
        let udp = HostPort { protocol: "UDP".into(), ..port("0.0.0.0", 80) };
        assert!(!conflict(port("0.0.0.0", 80), udp));
    }

    #[test]
    fn the_statuses_of_very_many_containers_are_found_in_linear_time() {
        // A search through all statuses for each container would take minutes.
        let named = |at: usize| serde_json::json!({"name": format!("c{at}")});
        let requests = serde_json::json!({"requests": {"cpu": "1m"}});
        let all: Vec<_> = (0..100_000).map(named).collect();
        let mut pod = crate::fixture::pod("p", serde_json::json!({"containers": all.clone()}));
        for container in &mut pod.spec.containers {
            container.resources = serde_json::from_value(requests.clone()).unwrap();
        }
        pod.status.container_statuses = serde_json::from_value(all.into()).unwrap();
        assert_eq!(of_pod(&pod).cpu_millis, 100_000);
    }

    #[test]
    fn very_many_host_ports_on_single_addresses_are_compared_in_linear_time() {
        // A comparison of each pair would take minutes.
        let port = |number: u32| {
            let address = std::net::Ipv4Addr::from(number).to_string();
            HostPort { address, protocol: "TCP".into(), port: 80 }
        };
        let wanted = WantedPorts::of((1..=100_000).map(port).collect());
        assert!((200_000..300_000).all(|number| !wanted.conflict(&port(number))));
        assert!(wanted.conflict(&port(100_000)));
    }
}

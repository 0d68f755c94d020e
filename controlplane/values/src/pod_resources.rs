//! Effective requests and limits of a pod. They are computed from its containers, init containers, sidecars, overhead
//! and pod-level resources.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, PodCondition, PodSpec, PodStatus, ResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use k8s_openapi::serde::Deserialize as _;

use crate::quantity::{millis_of, value_of};

/// A list of resources: the type of `requests` and `limits`.
pub type ResourceList = BTreeMap<String, ApiQuantity>;

/// Amounts of resources. They have 128 bits, so that sums over pods can neither overflow nor saturate. A saturated sum
/// would be wrong after a pod is subtracted from it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// CPU in thousandths of a core.
    pub cpu_millis: i128,
    /// Memory in bytes.
    pub memory: i128,
    /// Local ephemeral storage in bytes.
    pub ephemeral_storage: i128,
    /// Number of pods.
    pub pods: i128,
    /// All other resources in units, by name.
    pub others: BTreeMap<String, i128>,
}

/// One of the two lists of `resources`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// `resources.requests`.
    Requests,
    /// `resources.limits`.
    Limits,
}

/// The fields of a container that determine the resources of its pod.
#[derive(Clone, Copy, Debug)]
pub struct ContainerResources<'a> {
    /// `resources`.
    pub resources: Option<&'a ResourceRequirements>,
    /// Whether this is an init container with `restartPolicy: Always`.
    pub is_sidecar: bool,
    /// The resources in its status. They count while a resize is pending.
    pub status: Option<StatusResources<'a>>,
}

/// The resources in the status of a container or of a pod.
#[derive(Clone, Copy, Debug)]
pub struct StatusResources<'a> {
    /// `resources`.
    pub actual: &'a ResourceRequirements,
    /// `allocatedResources`.
    pub allocated: Option<&'a ResourceList>,
    /// Whether the node can never provide the resources of the spec.
    pub is_infeasible: bool,
}

/// The fields of a pod spec that determine the resources of the pod.
#[derive(Clone, Debug)]
pub struct PodResources<'a> {
    /// `containers`.
    pub containers: Vec<ContainerResources<'a>>,
    /// `initContainers`, in the order in which they run.
    pub init_containers: Vec<ContainerResources<'a>>,
    /// `resources` of the pod as a whole.
    pub pod_level: Option<&'a ResourceRequirements>,
    /// The resources in the status of the pod. They count for pod-level resources while a resize is pending.
    pub pod_status: Option<StatusResources<'a>>,
    /// `overhead`.
    pub overhead: Option<&'a ResourceList>,
}

/// Requests and limits of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceTotals {
    /// The requests.
    pub requests: Resources,
    /// The limits.
    pub limits: Resources,
}

/// Requests and limits of a pod in JSON, with the resources in its status. None if it is not a pod.
pub fn of_pod_json(pod: &serde_json::Value) -> Option<ResourceTotals> {
    let spec = PodSpec::deserialize(&pod["spec"]).ok()?;
    // A malformed status counts as absent.
    let status = PodStatus::deserialize(&pod["status"]).unwrap_or_default();
    let generation = pod["metadata"]["generation"].as_i64();
    let resources = PodResources::from(&spec).with_status(&spec, &status, generation);
    Some(ResourceTotals { requests: resources.requests(), limits: resources.limits() })
}

/// Requests and limits of a pod spec in JSON. None if it is not a pod spec.
pub fn of_json(spec: &serde_json::Value) -> Option<ResourceTotals> {
    let spec = PodSpec::deserialize(spec).ok()?;
    let resources = PodResources::from(&spec);
    Some(ResourceTotals { requests: resources.requests(), limits: resources.limits() })
}

// === impl Side ===

impl Side {
    /// The list of this side.
    pub fn list(self, resources: Option<&ResourceRequirements>) -> Option<&ResourceList> {
        match self {
            Side::Requests => resources?.requests.as_ref(),
            Side::Limits => resources?.limits.as_ref(),
        }
    }

    /// One entry of the list of this side.
    pub fn get<'a>(self, resources: Option<&'a ResourceRequirements>, name: &str) -> Option<&'a ApiQuantity> {
        self.list(resources)?.get(name)
    }
}

// === impl Resources ===

impl Resources {
    /// The amounts of a resource list.
    pub fn of(list: Option<&ResourceList>) -> Self {
        let mut resources = Self::default();
        for (name, quantity) in list.into_iter().flatten() {
            *resources.entry(name) = amount(name, quantity);
        }
        resources
    }

    /// Adds the other amounts.
    pub fn add(&mut self, other: &Self) {
        self.for_each(other, |own, amount| *own += amount);
    }

    /// Subtracts the other amounts.
    pub fn subtract(&mut self, other: &Self) {
        self.for_each(other, |own, amount| *own -= amount);
    }

    /// Whether one of the amounts is larger than the same amount of `other`. A missing amount counts as 0.
    pub fn exceeds(&self, other: &Self) -> bool {
        let amount_of = |name: &str| other.others.get(name).copied().unwrap_or_default();
        self.cpu_millis > other.cpu_millis
            || self.memory > other.memory
            || self.ephemeral_storage > other.ephemeral_storage
            || self.pods > other.pods
            || self.others.iter().any(|(name, amount)| *amount > amount_of(name))
    }

    /// Raises each amount to at least the same amount of `other`.
    fn raise(&mut self, other: &Self) {
        self.for_each(other, |own, amount| *own = (*own).max(amount));
    }

    fn for_each(&mut self, other: &Self, combine: impl Fn(&mut i128, i128)) {
        combine(&mut self.cpu_millis, other.cpu_millis);
        combine(&mut self.memory, other.memory);
        combine(&mut self.ephemeral_storage, other.ephemeral_storage);
        combine(&mut self.pods, other.pods);
        for (name, amount) in &other.others {
            combine(self.entry(name), *amount);
        }
    }

    fn entry(&mut self, name: &str) -> &mut i128 {
        match name {
            "cpu" => &mut self.cpu_millis,
            "memory" => &mut self.memory,
            "ephemeral-storage" => &mut self.ephemeral_storage,
            "pods" => &mut self.pods,
            other => self.others.entry(other.to_owned()).or_default(),
        }
    }
}

/// Whether the field `resources` of a pod spec can contain this resource.
pub fn is_pod_level(name: &str) -> bool {
    matches!(name, "cpu" | "memory") || name.starts_with("hugepages-")
}

/// CPU in thousandths, everything else in units.
fn amount(name: &str, quantity: &ApiQuantity) -> i128 {
    i128::from(if name == "cpu" { millis_of(quantity) } else { value_of(quantity) })
}

// === impl PodResources ===

impl<'a> From<&'a PodSpec> for PodResources<'a> {
    fn from(spec: &'a PodSpec) -> Self {
        let read = |container: &'a Container| ContainerResources {
            resources: container.resources.as_ref(),
            is_sidecar: container.restart_policy.as_deref() == Some("Always"),
            status: None,
        };
        Self {
            containers: spec.containers.iter().map(read).collect(),
            init_containers: spec.init_containers.iter().flatten().map(read).collect(),
            pod_level: spec.resources.as_ref(),
            pod_status: None,
            overhead: spec.overhead.as_ref(),
        }
    }
}

// === impl StatusResources ===

impl<'a> StatusResources<'a> {
    /// The resources of a container in the statuses of its pod. None if the node does not report them.
    ///
    /// Source: `AggregateContainerRequests` of `k8s.io/component-helpers/resource`.
    fn find(
        name: &str,
        statuses: impl IntoIterator<Item = &'a ContainerStatus>,
        is_infeasible: bool,
    ) -> Option<Self> {
        let status = statuses.into_iter().find(|status| status.name == name)?;
        let allocated = status.allocated_resources.as_ref();
        Some(Self { actual: status.resources.as_ref()?, allocated, is_infeasible })
    }

    /// Raises the amounts of the spec to the amounts of the status. The amounts of an infeasible spec do not count.
    fn effective(&self, side: Side, spec: Resources) -> Resources {
        let mut effective = if self.is_infeasible { Resources::default() } else { spec };
        effective.raise(&Resources::of(side.list(Some(self.actual))));
        if side == Side::Requests {
            effective.raise(&Resources::of(self.allocated));
        }
        effective
    }
}

/// Whether the conditions report the pod's resize as infeasible: the node can never provide the resources of the spec.
/// A condition about an earlier generation is ignored, because a later resize has other resources.
pub fn is_resize_infeasible(conditions: Option<&Vec<PodCondition>>, generation: Option<i64>) -> bool {
    let mut conditions = conditions.into_iter().flatten();
    let pending = conditions.find(|condition| condition.type_ == "PodResizePending");
    pending.is_some_and(|condition| {
        let is_earlier = condition.observed_generation.zip(generation).is_some_and(|(of, now)| of < now);
        condition.reason.as_deref() == Some("Infeasible") && !is_earlier
    })
}

impl<'a> PodResources<'a> {
    /// Adds the resources in the pod's status. `generation` is the generation of the pod.
    #[must_use]
    pub fn with_status(mut self, spec: &'a PodSpec, status: &'a PodStatus, generation: Option<i64>) -> Self {
        let is_infeasible = is_resize_infeasible(status.conditions.as_ref(), generation);
        let set = |containers: &mut [ContainerResources<'a>],
                   names: &'a [Container],
                   statuses: &'a Option<Vec<ContainerStatus>>| {
            for (container, named) in containers.iter_mut().zip(names) {
                let statuses = statuses.iter().flatten();
                container.status = StatusResources::find(&named.name, statuses, is_infeasible);
            }
        };
        set(&mut self.containers, &spec.containers, &status.container_statuses);
        let inits = spec.init_containers.as_deref().unwrap_or_default();
        set(&mut self.init_containers, inits, &status.init_container_statuses);
        let allocated = status.allocated_resources.as_ref();
        self.pod_status =
            status.resources.as_ref().map(|actual| StatusResources { actual, allocated, is_infeasible });
        self
    }
}

impl PodResources<'_> {
    /// The requests of the pod, with its overhead. The pod itself counts as one of `pods`.
    pub fn requests(&self) -> Resources {
        let mut total = self.containers_and_pod_level(Side::Requests);
        total.add(&Resources::of(self.overhead));
        total.pods = 1;
        total
    }

    /// The limits of the pod; 0 for a resource without a limit. The overhead is added to existing limits only.
    pub fn limits(&self) -> Resources {
        let mut total = self.containers_and_pod_level(Side::Limits);
        for (name, quantity) in self.overhead.into_iter().flatten() {
            let own = total.entry(name);
            if *own > 0 {
                *own += amount(name, quantity);
            }
        }
        total
    }

    /// Init containers run one after another, before the containers, beside the sidecars that started earlier. So each
    /// resource is the larger of two amounts: all containers and sidecars together, or the largest init container with
    /// the sidecars before it. Pod-level resources replace the amount.
    fn containers_and_pod_level(&self, side: Side) -> Resources {
        let of = |container: &ContainerResources<'_>| {
            let spec = Resources::of(side.list(container.resources));
            match &container.status {
                Some(status) => status.effective(side, spec),
                None => spec,
            }
        };
        let mut total = Resources::default();
        for container in &self.containers {
            total.add(&of(container));
        }
        let (mut sidecars, mut peak) = (Resources::default(), Resources::default());
        for container in &self.init_containers {
            let mut running = sidecars.clone();
            // The status counts for containers that run as long as the pod.
            let status = container.status.filter(|_| container.is_sidecar);
            running.add(&of(&ContainerResources { status, ..*container }));
            peak.raise(&running);
            if container.is_sidecar {
                sidecars = running;
            }
        }
        total.add(&sidecars);
        total.raise(&peak);
        let pod_level = side.list(self.pod_level);
        let mut effective = Resources::of(pod_level);
        if let Some(status) = &self.pod_status {
            effective = status.effective(side, effective);
        }
        for name in pod_level.into_iter().flat_map(BTreeMap::keys) {
            if is_pod_level(name) {
                *total.entry(name) = *effective.entry(name);
            }
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(spec: Value) -> PodSpec {
        let mut spec = spec;
        for list in ["containers", "initContainers"] {
            for container in spec[list].as_array_mut().into_iter().flatten() {
                container["name"] = json!("c");
            }
        }
        serde_json::from_value(spec).unwrap()
    }

    fn cpu_requested(value: Value) -> i128 {
        PodResources::from(&spec(value)).requests().cpu_millis
    }

    fn container(cpu: &str) -> Value {
        json!({"resources": {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}})
    }

    fn sidecar(cpu: &str) -> Value {
        let mut sidecar = container(cpu);
        sidecar["restartPolicy"] = json!("Always");
        sidecar
    }

    #[test]
    fn containers_add_up_and_init_containers_set_a_peak() {
        assert_eq!(cpu_requested(json!({"containers": [container("1"), container("500m")]})), 1500);
        assert_eq!(
            cpu_requested(json!({"containers": [container("1")], "initContainers": [container("3")]})),
            3000
        );
        let init = [sidecar("1"), container("2"), sidecar("1")];
        assert_eq!(cpu_requested(json!({"containers": [container("2")], "initContainers": init})), 4000);
        let init = [container("350m"), sidecar("100m"), container("250m")];
        let containers = [container("200m"), container("100m")];
        let pod = json!({"containers": containers, "initContainers": init, "overhead": {"cpu": "10m"}});
        assert_eq!(cpu_requested(pod), 410);
    }

    #[test]
    fn pod_level_resources_replace_the_sum_and_overhead_is_added() {
        assert_eq!(cpu_requested(json!({"containers": [container("1")], "overhead": {"cpu": "100m"}})), 1100);
        let whole = json!({"requests": {"cpu": "4", "hugepages-2Mi": "4Mi", "x.io/gpu": "9"}});
        let pod = spec(json!({"containers": [container("1")], "resources": whole, "overhead": {"cpu": "1"}}));
        let requests = PodResources::from(&pod).requests();
        assert_eq!((requests.cpu_millis, requests.pods), (5000, 1));
        assert_eq!(requests.others, BTreeMap::from([("hugepages-2Mi".to_owned(), 4 << 20)]));
    }

    #[test]
    fn a_pending_resize_counts_with_the_larger_amount_and_an_infeasible_one_not_at_all() {
        let at = |generation: i64, wanted: &str, actual: &str, reason: &str| {
            let resources = json!({"requests": {"cpu": actual}, "limits": {"cpu": actual}});
            let status = json!({"name": "c", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "resources": resources, "allocatedResources": {"cpu": "1500m"}});
            let mut one = container(wanted);
            one["name"] = json!("c");
            let pod = json!({"spec": {"containers": [one]}, "status": {"containerStatuses": [status],
                "conditions": [{"type": "PodResizePending", "status": "True", "reason": reason,
                    "observedGeneration": 2}]}, "metadata": {"generation": generation}});
            let ResourceTotals { requests, limits } = of_pod_json(&pod).unwrap();
            (requests.cpu_millis, limits.cpu_millis)
        };
        let pod = |wanted: &str, actual: &str, reason: &str| at(2, wanted, actual, reason);
        assert_eq!(at(3, "4", "1", "Infeasible"), (4000, 4000), "it was about an earlier resize");
        assert_eq!(pod("2", "1", "Deferred"), (2000, 2000));
        assert_eq!(pod("1", "2", "Deferred"), (2000, 2000));
        assert_eq!(pod("1", "1", "Deferred"), (1500, 1000));
        assert_eq!(pod("4", "1", "Infeasible"), (1500, 1000));
    }

    #[test]
    fn a_pending_resize_of_the_pod_as_a_whole_counts_with_the_larger_amount() {
        let at = |wanted: &str, actual: &str, reason: &str| {
            let whole = |cpu: &str| json!({"requests": {"cpu": cpu}, "limits": {"cpu": cpu}});
            let pod = json!({"spec": {"containers": [{"name": "c"}], "resources": whole(wanted)},
                "status": {"resources": whole(actual), "allocatedResources": {"cpu": "1500m"},
                    "conditions": [{"type": "PodResizePending", "status": "True", "reason": reason}]}});
            let ResourceTotals { requests, limits } = of_pod_json(&pod).unwrap();
            (requests.cpu_millis, limits.cpu_millis)
        };
        assert_eq!(at("2", "1", "Deferred"), (2000, 2000));
        assert_eq!(at("1", "2", "Deferred"), (2000, 2000));
        assert_eq!(at("1", "1", "Deferred"), (1500, 1000));
        assert_eq!(at("4", "1", "Infeasible"), (1500, 1000));
    }

    #[test]
    fn overhead_raises_only_existing_limits() {
        let pod = spec(json!({"containers": [container("1")], "overhead": {"cpu": "100m", "memory": "1Mi"}}));
        let limits = PodResources::from(&pod).limits();
        assert_eq!((limits.cpu_millis, limits.memory), (1100, 0));
    }

    #[test]
    fn a_zero_amount_does_not_exceed_a_missing_amount() {
        let of = |cpu: i128, others: &[(&str, i128)]| Resources {
            cpu_millis: cpu,
            others: others.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect(),
            ..Resources::default()
        };
        let none = of(1, &[]);
        assert!(!of(1, &[("x.io/gpu", 0)]).exceeds(&none) && !none.exceeds(&of(1, &[("x.io/gpu", 0)])));
        assert!(of(1, &[("x.io/gpu", 1)]).exceeds(&none) && of(2, &[]).exceeds(&none));
        assert!(!of(1, &[("x.io/gpu", 1)]).exceeds(&of(1, &[("x.io/gpu", 1)])));
    }

    #[test]
    fn the_largest_amounts_can_be_added_and_subtracted_again() {
        let huge = spec(json!({"containers": [container("1000E"), container("1000E")]}));
        let huge = PodResources::from(&huge).requests();
        assert_eq!(huge.cpu_millis, 2 * i128::from(i64::MAX));
        let small = PodResources::from(&spec(json!({"containers": [container("1")]}))).requests();
        let mut sum = small.clone();
        sum.add(&huge);
        sum.add(&huge);
        sum.subtract(&huge);
        sum.subtract(&huge);
        assert_eq!(sum, small);
    }
}

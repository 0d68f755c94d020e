//! NUMA topology: managers of resources give hints, and their resources are allocated on the same NUMA nodes.
//!
//! ```text
//! pod ──► hints of each provider ──► merge ──► affinity ──► allocation by each provider ──► admitted
//!          (CPUs, memory, devices)      └─────────────────────────┴──► rejected
//! ```
//! Source: `pkg/kubelet/cm/topologymanager`. [`machine`] reads the machine, [`merge`] has the policies. Providers
//! implement [`HintProvider`]; pod sync calls [`TopologyManager::admit`] from one task.

mod cpu_set;
pub(crate) mod machine;
mod merge;
pub(crate) mod numa_mask;
pub(crate) mod state_file;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use coracle_values::CollectMap;
use coracle_values::go;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use crate::kubelet_metrics::{Boundary, KubeletMetrics, Scope};
pub use cpu_set::{CpuSet, CpuSetError};
use machine::NumaNode;
use merge::NumaNodes;
pub use merge::TopologyPolicy;
pub(crate) use merge::{Hint, Hints};
use numa_mask::NumaMask;

/// Default of the option `max-allowable-numa-nodes`.
const MAX_NODES: usize = 8;

/// Settings of the topology manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopologySettings {
    /// The policy for the alignment of resources to NUMA nodes.
    pub policy: TopologyPolicy,
    /// Whether all containers of a pod get the same NUMA nodes. Otherwise each container is aligned on its own.
    pub aligns_pods: bool,
    /// Whether NUMA nodes near to each other are preferred.
    pub prefers_near_nodes: bool,
    /// Maximum number of NUMA nodes of a machine. It applies to policies other than `none` and to the memory manager.
    pub max_nodes: usize,
}

/// A manager of resources that belong to NUMA nodes.
pub(crate) trait HintProvider: Send + Sync {
    /// NUMA nodes that can satisfy the requests of a container.
    fn container_hints(&self, pod: &Pod, container: &Container) -> Hints;

    /// NUMA nodes that can satisfy the requests of all containers of a pod.
    fn pod_hints(&self, pod: &Pod) -> Hints;

    /// Allocates the resources of a container, on the nodes of the affinity if possible. Succeeds at once if the
    /// resources are already allocated. Until [`Self::record`] returns, a crash can lose the allocation.
    fn allocate(&self, pod: &Pod, container: &Container, affinity: Hint) -> Result<(), AllocationError>;

    /// Writes the allocations of a pod to the disk, once for all its containers. Succeeds at once if the pod has no
    /// allocations.
    fn record(&self, _uid: &str) -> Result<(), AllocationError> {
        Ok(())
    }

    /// Whether resources of a pod are recorded. For a pod that an earlier agent admitted, recorded resources are not
    /// allocated again.
    fn holds(&self, _uid: &str) -> bool {
        false
    }

    /// Releases all resources of a pod. Succeeds if the pod has no resources.
    fn release(&self, uid: &str);

    /// Releases the resources of pods that are not on this node any more. `keep` is true for the uid of a pod on the
    /// node.
    fn retain(&self, keep: &dyn Fn(&str) -> bool);
}

/// The reason why resources of a pod cannot be allocated. The messages are upstream's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AllocationError {
    #[error("Resources cannot be allocated with Topology locality")]
    Affinity,
    #[error("SMT Alignment Error: requested {requested} cpus not multiple cpus per core = {per_core}")]
    PartOfCore { requested: usize, per_core: usize },
    #[error(
        "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = {available}, \
         requested CPUs = {requested}, CPUs per core = {per_core}"
    )]
    FewCores { available: usize, requested: usize, per_core: usize },
    #[error("Allocate failed due to {0}, which is unexpected")]
    Unexpected(String),
}

/// The topology manager: admits pods whose resources can be allocated.
pub(crate) struct TopologyManager {
    settings: TopologySettings,
    nodes: NumaNodes,
    providers: Vec<Arc<dyn HintProvider>>,
    metrics: Arc<KubeletMetrics>,
}

impl Default for TopologySettings {
    fn default() -> Self {
        Self {
            policy: TopologyPolicy::None,
            aligns_pods: false,
            prefers_near_nodes: false,
            max_nodes: MAX_NODES,
        }
    }
}

// === impl TopologySettings ===

impl TopologySettings {
    /// Sets an option of `topologyManagerPolicyOptions`.
    ///
    /// # Errors
    /// A message for an unknown option or a wrong value.
    pub fn set_option(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "prefer-closest-numa-nodes" => {
                let parsed = go::parse_bool(value);
                self.prefers_near_nodes =
                    parsed.ok_or_else(|| format!("bad value for option {name:?}: expected true or false"))?;
            }
            "max-allowable-numa-nodes" => {
                let parsed = value.parse::<usize>().ok().filter(|nodes| *nodes >= MAX_NODES);
                self.max_nodes = parsed.ok_or_else(|| {
                    format!("bad value for option {name:?}: expected a number from {MAX_NODES}")
                })?;
            }
            _ => return Err(format!("unknown topology manager policy option: {name:?}")),
        }
        Ok(())
    }
}

// === impl AllocationError ===

impl AllocationError {
    /// Reason in the status of a rejected pod.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Affinity => "TopologyAffinityError",
            Self::PartOfCore { .. } | Self::FewCores { .. } => "SMTAlignmentError",
            Self::Unexpected(_) => "UnexpectedAdmissionError",
        }
    }
}

// === impl TopologyManager ===

impl TopologyManager {
    /// Makes the topology manager of a machine with these NUMA nodes.
    ///
    /// # Errors
    /// A message if the machine has too many NUMA nodes, or does not report their distances.
    pub(crate) fn new(
        settings: TopologySettings,
        nodes: &BTreeMap<u32, NumaNode>,
        providers: Vec<Arc<dyn HintProvider>>,
        metrics: Arc<KubeletMetrics>,
    ) -> Result<Self, String> {
        if settings.policy != TopologyPolicy::None && nodes.len() > settings.max_nodes {
            return Err(format!("unsupported on machines with more than {} NUMA nodes", settings.max_nodes));
        }
        if settings.prefers_near_nodes && nodes.values().any(|node| node.distances.is_empty()) {
            return Err("the kernel does not report the distances of NUMA nodes".to_owned());
        }
        if settings.policy != TopologyPolicy::None {
            for scope in [Scope::Container, Scope::Pod] {
                metrics.create_alignments(scope, Boundary::NumaNode, [true, false]);
            }
        }
        let distances = nodes.iter().map(|(number, node)| (*number, node.distances.clone())).collect_map();
        let nodes = NumaNodes {
            all: NumaMask::of(nodes.keys().copied()),
            distances: settings.prefers_near_nodes.then_some(distances),
        };
        Ok(Self { settings, nodes, providers, metrics })
    }

    /// Allocates the resources of a pod. Resources that are allocated already are kept.
    ///
    /// # Errors
    /// When the policy does not admit the pod, or a provider cannot allocate. Nothing stays allocated then.
    pub(crate) fn admit(&self, pod: &Pod) -> Result<(), AllocationError> {
        let begun = Instant::now();
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let all: Vec<_> = self.providers.iter().collect();
        let admitted = self.allocate(pod, &all).and_then(|()| self.record(uid));
        if admitted.is_err() {
            self.release(uid);
        }
        self.metrics.topology_admission(begun.elapsed(), admitted.is_ok());
        admitted
    }

    /// Allocates the resources of a pod that an earlier agent admitted and that may be running. Only providers without
    /// a record of the pod allocate, because they may have been enabled since.
    ///
    /// # Errors
    /// Like [`Self::admit`], but resources that were allocated before the error stay allocated.
    pub(crate) fn adopt(&self, pod: &Pod) -> Result<(), AllocationError> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let ignores_hints = self.settings.policy == TopologyPolicy::None;
        let is_missing = |provider: &&Arc<dyn HintProvider>| {
            !provider.holds(uid) && (ignores_hints || requests(pod, &***provider))
        };
        let others: Vec<_> = self.providers.iter().filter(is_missing).collect();
        if others.is_empty() {
            return Ok(());
        }
        let allocated = self.allocate(pod, &others);
        self.record(uid).and(allocated)
    }

    /// Releases all resources of a pod.
    pub(crate) fn release(&self, uid: &str) {
        self.providers.iter().for_each(|provider| provider.release(uid));
    }

    /// Releases the resources of pods that are not on this node any more.
    pub(crate) fn retain(&self, keep: &dyn Fn(&str) -> bool) {
        self.providers.iter().for_each(|provider| provider.retain(keep));
    }

    fn record(&self, uid: &str) -> Result<(), AllocationError> {
        self.providers.iter().try_for_each(|provider| provider.record(uid))
    }

    fn allocate(&self, pod: &Pod, providers: &[&Arc<dyn HintProvider>]) -> Result<(), AllocationError> {
        let Some(spec) = &pod.spec else { return Ok(()) };
        let whole_pod = if self.aligns_pods() { Some(self.pod_affinity(pod)?) } else { None };
        for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
            let affinity = match whole_pod {
                Some(affinity) => affinity,
                None => self.container_affinity(pod, container)?,
            };
            for provider in providers {
                provider.allocate(pod, container, affinity)?;
            }
            if !self.aligns_pods() {
                self.count(Scope::Container, true);
            }
        }
        if self.aligns_pods() {
            self.count(Scope::Pod, true);
        }
        Ok(())
    }

    fn aligns_pods(&self) -> bool {
        self.settings.aligns_pods && self.settings.policy != TopologyPolicy::None
    }

    fn pod_affinity(&self, pod: &Pod) -> Result<Hint, AllocationError> {
        self.merged(Scope::Pod, self.providers.iter().map(|provider| provider.pod_hints(pod)))
    }

    fn container_affinity(&self, pod: &Pod, container: &Container) -> Result<Hint, AllocationError> {
        if self.settings.policy == TopologyPolicy::None {
            return Ok(Hint::default());
        }
        let hints = self.providers.iter().map(|provider| provider.container_hints(pod, container));
        self.merged(Scope::Container, hints)
    }

    fn merged(&self, scope: Scope, hints: impl Iterator<Item = Hints>) -> Result<Hint, AllocationError> {
        let hints: Vec<Hints> = hints.collect();
        let merged = self.settings.policy.merge(&self.nodes, hints.iter().flat_map(BTreeMap::values));
        merged.ok_or_else(|| {
            self.count(scope, false);
            AllocationError::Affinity
        })
    }

    /// Counts an alignment, if the policy guarantees one NUMA node.
    fn count(&self, scope: Scope, succeeded: bool) {
        if self.settings.policy == TopologyPolicy::SingleNumaNode {
            self.metrics.aligned(scope, Boundary::NumaNode, succeeded);
        }
    }
}

/// Whether a container of the pod requests resources that belong to NUMA nodes from this provider.
fn requests(pod: &Pod, provider: &dyn HintProvider) -> bool {
    let spec = pod.spec.iter();
    let mut all = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    all.any(|container| !provider.container_hints(pod, container).is_empty())
}

/// Whether this is an init container that ends before the main containers start.
pub(crate) fn is_regular_init(spec: &PodSpec, name: &str) -> bool {
    let init = spec.init_containers.iter().flatten().find(|container| container.name == name);
    init.is_some_and(|container| container.restart_policy.as_deref() != Some("Always"))
}

/// Whether a pod has pod-level resources. The managers of CPUs and memory leave the containers of such a pod in the
/// shared pools.
pub(crate) fn has_pod_resources(pod: &Pod) -> bool {
    let resources = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let lists = resources.into_iter().flat_map(|resources| [&resources.requests, &resources.limits]);
    lists.flatten().any(|list| !list.is_empty())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::json;

    use super::*;

    /// A provider with the same hints for each container.
    struct Provider {
        hints: Hints,
        refuses: Option<&'static str>,
        holds: bool,
        calls: Mutex<Vec<String>>,
    }

    impl HintProvider for Provider {
        fn container_hints(&self, _pod: &Pod, _container: &Container) -> Hints {
            self.hints.clone()
        }

        fn pod_hints(&self, _pod: &Pod) -> Hints {
            self.hints.clone()
        }

        fn allocate(&self, _pod: &Pod, container: &Container, affinity: Hint) -> Result<(), AllocationError> {
            let nodes = affinity.nodes.map(|nodes| nodes.nodes().collect::<Vec<_>>());
            self.calls.lock().unwrap().push(format!("{} {nodes:?}", container.name));
            match self.refuses {
                Some(name) if name == container.name => Err(AllocationError::Unexpected("x".to_owned())),
                _ => Ok(()),
            }
        }

        fn record(&self, uid: &str) -> Result<(), AllocationError> {
            self.calls.lock().unwrap().push(format!("record {uid}"));
            if self.refuses == Some("record") { Err(AllocationError::Affinity) } else { Ok(()) }
        }

        fn holds(&self, _uid: &str) -> bool {
            self.holds
        }

        fn release(&self, uid: &str) {
            self.calls.lock().unwrap().push(format!("release {uid}"));
        }

        fn retain(&self, _keep: &dyn Fn(&str) -> bool) {}
    }

    fn pod() -> Pod {
        let spec = json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}]});
        serde_json::from_value(json!({"metadata": {"uid": "u"}, "spec": spec})).unwrap()
    }

    fn admitted(
        policy: TopologyPolicy,
        aligns_pods: bool,
        hints: &[(u32, bool)],
        refuses: Option<&'static str>,
    ) -> (Result<(), AllocationError>, Vec<String>) {
        let hint = |(node, preferred): &(u32, bool)| Hint {
            nodes: Some(NumaMask::of([*node])),
            preferred: *preferred,
        };
        let hints = BTreeMap::from([("cpu".to_owned(), hints.iter().map(hint).collect())]);
        let provider = Arc::new(Provider { hints, refuses, holds: false, calls: Mutex::default() });
        let settings = TopologySettings { policy, aligns_pods, ..TopologySettings::default() };
        let nodes = BTreeMap::from([(0, NumaNode::default()), (1, NumaNode::default())]);
        let manager =
            TopologyManager::new(settings, &nodes, vec![Arc::<Provider>::clone(&provider)], Arc::default());
        let admitted = manager.unwrap().admit(&pod());
        let calls = provider.calls.lock().unwrap().clone();
        (admitted, calls)
    }

    #[test]
    fn containers_are_allocated_with_the_merged_affinity() {
        for aligns_pods in [true, false] {
            let found = admitted(TopologyPolicy::Restricted, aligns_pods, &[(1, true)], None);
            assert_eq!((found.0, found.1.join(",")), (Ok(()), "i Some([1]),a Some([1]),record u".to_owned()));
        }
        let found = admitted(TopologyPolicy::None, true, &[(1, true)], None);
        assert_eq!((found.0, found.1.join(",")), (Ok(()), "i None,a None,record u".to_owned()));
    }

    #[test]
    fn a_rejected_pod_keeps_nothing() {
        let (rejected, calls) = admitted(TopologyPolicy::Restricted, false, &[(1, false)], None);
        assert_eq!((rejected, calls.join(",")), (Err(AllocationError::Affinity), "release u".to_owned()));
        let (rejected, calls) = admitted(TopologyPolicy::BestEffort, false, &[(1, false)], Some("a"));
        assert_eq!(rejected.unwrap_err().reason(), "UnexpectedAdmissionError");
        assert_eq!(calls.join(","), "i Some([1]),a Some([1]),release u");
        let (rejected, calls) = admitted(TopologyPolicy::None, false, &[], Some("record"));
        assert!(rejected.is_err() && calls.join(",") == "i None,a None,record u,release u", "{calls:?}");
    }

    #[test]
    fn a_provider_that_was_enabled_later_adopts_the_pod() {
        let provider = |holds, names: &[&str]| {
            let hints = names.iter().map(|name| ((*name).to_owned(), vec![Hint::default()])).collect();
            Arc::new(Provider { hints, refuses: None, holds, calls: Mutex::default() })
        };
        let (old, new, unused) =
            (provider(true, &["cpu"]), provider(false, &["memory"]), provider(false, &[]));
        let clone = |provider: &Arc<Provider>| -> Arc<dyn HintProvider> { Arc::<Provider>::clone(provider) };
        let providers = vec![clone(&old), clone(&new), clone(&unused)];
        let nodes = BTreeMap::from([(0, NumaNode::default())]);
        let settings = TopologySettings { policy: TopologyPolicy::BestEffort, ..TopologySettings::default() };
        let manager = TopologyManager::new(settings, &nodes, providers, Arc::default());
        manager.unwrap().adopt(&pod()).unwrap();
        assert_eq!(old.calls.lock().unwrap().join(","), "record u");
        assert_eq!(new.calls.lock().unwrap().join(","), "i Some([0]),a Some([0]),record u");
        assert_eq!(unused.calls.lock().unwrap().join(","), "record u");
    }

    #[test]
    fn errors_have_upstreams_reasons_and_messages() {
        let error = AllocationError::PartOfCore { requested: 3, per_core: 2 };
        let text = "SMT Alignment Error: requested 3 cpus not multiple cpus per core = 2";
        assert_eq!((error.reason(), error.to_string().as_str()), ("SMTAlignmentError", text));
        let error = AllocationError::FewCores { available: 2, requested: 4, per_core: 2 };
        let text = "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = 2, requested CPUs = 4, CPUs per core = 2";
        assert_eq!(error.to_string(), text);
        let error = AllocationError::Unexpected("failed to allocate cpus".to_owned());
        assert_eq!(error.to_string(), "Allocate failed due to failed to allocate cpus, which is unexpected");
    }

    #[test]
    fn options_have_upstreams_names() {
        let mut settings = TopologySettings::default();
        settings.set_option("prefer-closest-numa-nodes", "true").unwrap();
        settings.set_option("max-allowable-numa-nodes", "12").unwrap();
        assert_eq!((settings.prefers_near_nodes, settings.max_nodes), (true, 12));
        for (name, value) in
            [("max-allowable-numa-nodes", "7"), ("prefer-closest-numa-nodes", "x"), ("a", "1")]
        {
            assert!(settings.set_option(name, value).is_err(), "{name}");
        }
        let nodes = BTreeMap::from([(0, NumaNode::default())]);
        assert!(TopologyManager::new(settings, &nodes, Vec::new(), Arc::default()).is_err(), "no distances");
        let nodes = (0..9).map(|node| (node, NumaNode::default())).collect();
        let settings = TopologySettings { policy: TopologyPolicy::BestEffort, ..TopologySettings::default() };
        assert!(
            TopologyManager::new(settings, &nodes, Vec::new(), Arc::default()).is_err(),
            "too many nodes"
        );
    }
}

//! Settings of the managers of CPUs, memory and topology. Names and values are those of the kubelet.

use std::collections::BTreeMap;

use anyhow::Context as _;
use clap::ValueEnum;
use coracle_agent::{CpuOptions, CpuSet, ReservedMemory, ResourceManagerConfig, TopologySettings};
use coracle_values::Quantity;

use super::NodeSettings;
use super::feature_gates::FeatureGates;
use super::field::ValueKind;
use super::value::{Single, Value, choices};

/// The kubelet's `cpuManagerPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CpuPolicy {
    None,
    Static,
}

/// The kubelet's `memoryManagerPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub(crate) enum MemoryPolicy {
    None,
    Static,
}

/// The kubelet's `topologyManagerPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TopologyPolicy {
    None,
    BestEffort,
    Restricted,
    SingleNumaNode,
}

/// The kubelet's `topologyManagerScope`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TopologyScope {
    Container,
    Pod,
}

choices!(CpuPolicy, MemoryPolicy, TopologyPolicy, TopologyScope);

/// Bytes by NUMA node and resource: `0:memory=1Gi,hugepages-2Mi=64Mi`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryReservations(BTreeMap<u32, BTreeMap<String, u64>>);

impl Single for CpuSet {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|error| format!("{error}"))
    }
}

impl Value for MemoryReservations {
    const VALUE_KIND: ValueKind = ValueKind::Entries;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let mut all = Self::default();
        for text in texts {
            let expected = || format!("{text:?} is not of the form 0:memory=1Gi");
            let (node, amounts) = text.split_once(':').ok_or_else(expected)?;
            let of_node = all.0.entry(node.trim().parse().map_err(|_invalid| expected())?).or_default();
            for amount in amounts.split(',') {
                let (name, size) = amount.split_once('=').ok_or_else(expected)?;
                let name = name.trim();
                if name != "memory" && !name.starts_with("hugepages-") {
                    return Err(format!("{name:?} cannot be reserved; use memory or hugepages-<size>"));
                }
                let bytes = Quantity::parse(size.trim()).ok().and_then(Quantity::whole);
                let bytes = bytes.and_then(|bytes| u64::try_from(bytes).ok()).filter(|bytes| *bytes > 0);
                let bytes = bytes.ok_or_else(|| format!("{size:?} is not a number of bytes above 0"))?;
                if of_node.insert(name.to_owned(), bytes).is_some() {
                    return Err(format!("{name} of NUMA node {} is reserved twice", node.trim()));
                }
            }
        }
        Ok(all)
    }

    fn unset() -> Option<Self> {
        Some(Self::default())
    }
}

/// The settings of the managers.
pub(super) fn decide(node: &NodeSettings, gates: &FeatureGates) -> anyhow::Result<ResourceManagerConfig> {
    let options = &node.cpu_manager_policy_options;
    let cpu = match node.cpu_manager_policy {
        CpuPolicy::Static => {
            let parsed = CpuOptions::parse(options, gates.has_alpha_cpu_options());
            Some(parsed.map_err(anyhow::Error::msg).context("cpu-manager-policy-options")?)
        }
        CpuPolicy::None => {
            anyhow::ensure!(
                options.is_empty(),
                "cpu-manager-policy-options is used only with cpu-manager-policy static"
            );
            None
        }
    };
    let mut topology = TopologySettings {
        policy: match node.topology_manager_policy {
            TopologyPolicy::None => coracle_agent::TopologyPolicy::None,
            TopologyPolicy::BestEffort => coracle_agent::TopologyPolicy::BestEffort,
            TopologyPolicy::Restricted => coracle_agent::TopologyPolicy::Restricted,
            TopologyPolicy::SingleNumaNode => coracle_agent::TopologyPolicy::SingleNumaNode,
        },
        aligns_pods: node.topology_manager_scope == TopologyScope::Pod,
        ..TopologySettings::default()
    };
    for (name, value) in &node.topology_manager_policy_options {
        let set = topology.set_option(name, value).map_err(anyhow::Error::msg);
        set.context("topology-manager-policy-options")?;
    }
    let is_static = node.memory_manager_policy == MemoryPolicy::Static;
    Ok(ResourceManagerConfig {
        cpu,
        reserved_cpus: reserved_cpus(node).cloned(),
        memory: is_static.then(|| ReservedMemory(node.reserved_memory.0.clone())),
        topology,
    })
}

/// Reserved amounts of resources, by name.
pub(super) struct Reserved {
    /// For the system.
    pub(super) system: BTreeMap<String, String>,
    /// For the node's own processes.
    pub(super) own: BTreeMap<String, String>,
}

/// The amounts that are reserved for the system and for the node's own processes. As in the kubelet, the number of the
/// CPUs in reserved-cpus replaces both amounts of cpu.
pub(super) fn reserved(node: &NodeSettings) -> Reserved {
    let (mut system, mut own) = (node.system_reserved.0.clone(), node.kube_reserved.0.clone());
    if let Some(cpus) = reserved_cpus(node) {
        own.remove("cpu");
        system.insert("cpu".to_owned(), cpus.len().to_string());
    }
    Reserved { system, own }
}

fn reserved_cpus(node: &NodeSettings) -> Option<&CpuSet> {
    node.reserved_cpus.as_ref().filter(|cpus| !cpus.is_empty())
}

#[cfg(test)]
mod tests {
    use super::super::tests::node_settings;
    use super::*;

    fn of(text: &str) -> Result<ResourceManagerConfig, String> {
        decide(&node_settings(text)?, &FeatureGates::default()).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn the_policies_have_the_kubelets_names_and_defaults() {
        let none = of("").unwrap();
        assert!(none.cpu.is_none() && none.memory.is_none() && none.reserved_cpus.is_none());
        assert_eq!(none.topology, TopologySettings::default());
        let set = of(
            "cpu-manager-policy = \"static\"\nmemory-manager-policy = \"Static\"\nreserved-memory = [\"0:memory=1Gi\"]\n\
             topology-manager-policy = \"single-numa-node\"\ntopology-manager-scope = \"pod\"\nreserved-cpus = \"0-1\"\n\
             cpu-manager-policy-options = { full-pcpus-only = \"true\" }",
        );
        let set = set.unwrap();
        let memory = BTreeMap::from([(0, BTreeMap::from([("memory".to_owned(), 1 << 30)]))]);
        assert!(set.cpu.is_some_and(|options| options != CpuOptions::default()));
        assert_eq!((set.memory, set.reserved_cpus.unwrap().len()), (Some(ReservedMemory(memory)), 2));
        assert_eq!((set.topology.policy.name(), set.topology.aligns_pods), ("single-numa-node", true));
    }

    #[test]
    fn wrong_settings_are_refused() {
        for (text, part) in [
            (
                "cpu-manager-policy-options = { full-pcpus-only = \"true\" }",
                "only with cpu-manager-policy static",
            ),
            (
                "cpu-manager-policy = \"static\"\ncpu-manager-policy-options = { align-by-socket = \"true\" }",
                "CPUManagerPolicyAlphaOptions",
            ),
            (
                "topology-manager-policy-options = { near = \"true\" }",
                "unknown topology manager policy option",
            ),
            ("memory-manager-policy = \"static\"", "expected one of None, Static"),
            ("reserved-cpus = \"a\"", "is not a list of CPUs"),
            ("reserved-memory = [\"0:memory=0\"]", "is not a number of bytes above 0"),
            ("reserved-memory = [\"0:cpu=1\"]", "cannot be reserved"),
            ("reserved-memory = [\"0:memory=1\", \"0:memory=1\"]", "reserved twice"),
            ("reserved-memory = [\"memory=1\"]", "is not of the form"),
        ] {
            let error = of(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn reserved_cpus_replace_the_reserved_amounts() {
        let text = "reserved-cpus = \"0,2\"\nsystem-reserved = { cpu = \"100m\", memory = \"1Gi\" }\nkube-reserved = { cpu = \"1\" }";
        let Reserved { system, own } = reserved(&node_settings(text).unwrap());
        assert_eq!((system["cpu"].as_str(), system["memory"].as_str()), ("2", "1Gi"));
        assert!(own.is_empty());
        let Reserved { system, .. } =
            reserved(&node_settings("system-reserved = { cpu = \"100m\" }").unwrap());
        assert_eq!(system["cpu"], "100m");
    }
}

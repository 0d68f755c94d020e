//! Options of the static policy, as `cpuManagerPolicyOptions` of the kubelet.
//!
//! Source: `pkg/kubelet/cm/cpumanager/policy_options.go`.

use std::collections::BTreeMap;

use coracle_values::go;

use super::assign::Order;
use crate::topology::TopologyPolicy;
use crate::topology::machine::{CpuTopology, Level};

/// Options of the static policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Whether only whole cores are assigned.
    pub(super) full_cores: bool,
    /// Whether CPUs are aligned with sockets instead of NUMA nodes.
    pub(super) align_by_socket: bool,
    /// Whether the shared pool excludes the reserved CPUs.
    pub(super) strict_reservation: bool,
    pub(super) placement: Placement,
}

/// The placement of exclusive CPUs on the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Placement {
    /// As few cores, caches, sockets and NUMA nodes as possible.
    #[default]
    Packed,
    /// As few last-level caches as possible.
    ByCache,
    /// Evenly over NUMA nodes, if one node cannot satisfy the request.
    AcrossNuma,
    /// Over different cores.
    AcrossCores,
}

const FULL_CORES: &str = "full-pcpus-only";
const ACROSS_NUMA: &str = "distribute-cpus-across-numa";
const BY_SOCKET: &str = "align-by-socket";
const ACROSS_CORES: &str = "distribute-cpus-across-cores";
const STRICT: &str = "strict-cpu-reservation";
const BY_CACHE: &str = "prefer-align-cpus-by-uncorecache";

/// Alpha options, which need the feature gate CPUManagerPolicyAlphaOptions.
const ALPHA: [&str; 2] = [BY_SOCKET, ACROSS_CORES];

// === impl CpuOptions ===

impl CpuOptions {
    /// Parses the options. `has_alpha` is true if alpha options are enabled.
    ///
    /// # Errors
    /// A message for an unknown option, a value that is not a boolean, or options that exclude each other.
    pub fn parse(options: &BTreeMap<String, String>, has_alpha: bool) -> Result<Self, String> {
        for (name, value) in options {
            if ![FULL_CORES, ACROSS_NUMA, BY_SOCKET, ACROSS_CORES, STRICT, BY_CACHE].contains(&name.as_str())
            {
                return Err(format!("unknown CPU manager policy option: {name:?}"));
            }
            if ALPHA.contains(&name.as_str()) && !has_alpha {
                return Err(format!(
                    "the option {name:?} needs the feature gate CPUManagerPolicyAlphaOptions"
                ));
            }
            if go::parse_bool(value).is_none() {
                return Err(format!("bad value for option {name:?}: expected true or false"));
            }
        }
        let is_on = |name: &str| options.get(name).and_then(|value| go::parse_bool(value)) == Some(true);
        for (first, second) in [
            (FULL_CORES, ACROSS_CORES),
            (ACROSS_NUMA, ACROSS_CORES),
            (BY_CACHE, ACROSS_CORES),
            (BY_CACHE, ACROSS_NUMA),
        ] {
            if is_on(first) && is_on(second) {
                return Err(format!("the options {first} and {second} exclude each other"));
            }
        }
        let placements = [
            (BY_CACHE, Placement::ByCache),
            (ACROSS_NUMA, Placement::AcrossNuma),
            (ACROSS_CORES, Placement::AcrossCores),
        ];
        Ok(Self {
            full_cores: is_on(FULL_CORES),
            align_by_socket: is_on(BY_SOCKET),
            strict_reservation: is_on(STRICT),
            placement: placements
                .into_iter()
                .find(|(name, _)| is_on(name))
                .map_or(Placement::Packed, |(_, is)| is),
        })
    }

    /// Refuses options that the machine or the topology policy does not permit.
    pub(super) fn check(self, topology: &CpuTopology, policy: TopologyPolicy) -> Result<(), String> {
        if !self.align_by_socket {
            return Ok(());
        }
        if policy == TopologyPolicy::SingleNumaNode {
            return Err(format!(
                "the topology manager policy single-numa-node excludes the option {BY_SOCKET}"
            ));
        }
        if topology.parts(Level::Socket).len() > topology.parts(Level::Numa).len() {
            return Err(format!("the option {BY_SOCKET} needs at least as many NUMA nodes as sockets"));
        }
        Ok(())
    }

    pub(super) fn order(self) -> Order {
        match self.placement {
            Placement::Packed | Placement::AcrossNuma => Order::Packed,
            Placement::ByCache => Order::PackedByCache,
            Placement::AcrossCores => Order::Spread,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, has_alpha: bool) -> Result<CpuOptions, String> {
        let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
        CpuOptions::parse(
            &pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            has_alpha,
        )
    }

    #[test]
    fn options_have_upstreams_names_and_maturity() {
        assert_eq!(parse("", false).unwrap(), CpuOptions::default());
        let options =
            parse("full-pcpus-only=true,strict-cpu-reservation=true,distribute-cpus-across-numa=true", false);
        let options = options.unwrap();
        assert!(options.full_cores && options.strict_reservation && !options.align_by_socket);
        assert_eq!(options.placement, Placement::AcrossNuma);
        for name in ["align-by-socket", "distribute-cpus-across-cores"] {
            assert!(
                parse(&format!("{name}=true"), false).unwrap_err().contains("CPUManagerPolicyAlphaOptions")
            );
            assert!(parse(&format!("{name}=true"), true).is_ok());
        }
    }

    #[test]
    fn wrong_options_are_refused() {
        for wrong in [
            "full-cpus=true",
            "full-pcpus-only=yes",
            "full-pcpus-only=true,distribute-cpus-across-cores=true",
            "distribute-cpus-across-numa=true,distribute-cpus-across-cores=true",
            "prefer-align-cpus-by-uncorecache=true,distribute-cpus-across-cores=true",
            "prefer-align-cpus-by-uncorecache=true,distribute-cpus-across-numa=true",
        ] {
            assert!(parse(wrong, true).is_err(), "{wrong}");
        }
        assert!(parse("full-pcpus-only=false,distribute-cpus-across-cores=true", true).is_ok());
    }

    #[test]
    fn alignment_with_sockets_depends_on_the_machine_and_the_topology_policy() {
        use super::super::assign::tests::{dual_socket, multi_numa};
        let by_socket = parse("align-by-socket=true", true).unwrap();
        assert!(by_socket.check(&dual_socket(), TopologyPolicy::Restricted).is_ok());
        assert!(by_socket.check(&multi_numa(), TopologyPolicy::SingleNumaNode).is_err());
        assert!(CpuOptions::default().check(&multi_numa(), TopologyPolicy::SingleNumaNode).is_ok());
    }
}

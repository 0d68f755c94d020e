//! Whether this node takes a pod: one check a file, the first that refuses decides. Pure, but for [`in_use`], which
//! asks the kernel.

mod fit;
pub(crate) mod in_use;
mod place;
mod ports;
mod sysctls;
mod system;
pub(crate) mod unsupported;

use k8s_openapi::api::core::v1::{Node, Pod};

use super::state::Verdict;
use crate::cgroup::resources::Amount;
pub(crate) use ports::{HostPort, host_ports};

/// What the decision depends on.
pub(crate) struct Facts<'a> {
    pub(crate) pod: &'a Pod,
    /// What other pods hold of this node.
    pub(crate) taken: Taken,
    /// This node as the API has it, once known.
    pub(crate) node: Option<&'a Node>,
    pub(crate) max_pods: usize,
    /// What pods may use: cores in thousandths, bytes of memory.
    pub(crate) allocatable: (i64, i64),
}

/// What pods hold of a node.
#[derive(Clone, Debug, Default)]
pub(crate) struct Taken {
    pub(crate) places: usize,
    pub(crate) requested: Amount,
    pub(crate) ports: Vec<HostPort>,
}

/// Admits the pod, or says with which verdict it ends.
pub(crate) fn admit(facts: &Facts<'_>) -> Result<(), Verdict> {
    system::check(facts.pod)?;
    unsupported::check(facts.pod)?;
    sysctls::check(facts)?;
    fit::check(facts)?;
    place::check(facts)?;
    ports::check(facts)
}

fn refuse(reason: &str, message: impl Into<String>) -> Verdict {
    Verdict { reason: reason.to_owned(), message: message.into() }
}

#[cfg(test)]
mod tests;

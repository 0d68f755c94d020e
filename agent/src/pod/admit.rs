//! Admission of pods: one check per file; the first rejection decides. Pure, except [`in_use`], which reads the
//! kernel's sockets, and [`allocation`], which allocates CPUs, memory and other aligned resources.

pub(crate) mod allocation;
pub(crate) mod containers;
mod facts;
mod fit;
pub(crate) mod in_use;
mod node_selector;
mod ports;
mod pressure;
mod sysctls;
mod system;
pub(crate) mod unsupported;

use super::state::Verdict;
pub(crate) use facts::{Facts, HostPort, UsedResources, devices_unavailable, rejection_event};
pub(crate) use fit::extended_requests;
pub(crate) use ports::host_ports;

/// Admits the pod, or returns the rejection.
pub(crate) fn admit(facts: &Facts<'_>) -> Result<(), Verdict> {
    pressure::check(facts)?;
    system::check(facts.pod)?;
    containers::check(facts.pod)?;
    unsupported::check(facts.pod)?;
    sysctls::check(facts)?;
    fit::check(facts)?;
    node_selector::check(facts)?;
    ports::check(facts)
}

#[cfg(test)]
mod tests;

//! Admission of pods: one check per file; the first rejection decides. Pure, except [`in_use`], which reads the
//! kernel's sockets, and [`allocation`], which allocates CPUs, memory and other aligned resources.

pub(crate) mod allocation;
pub(crate) mod containers;
mod fit;
pub(crate) mod in_use;
mod input;
mod node_selector;
mod ports;
mod pressure;
mod shutdown;
mod sysctls;
mod system;
pub(crate) mod unsupported;

use super::eviction::is_critical;
use super::state::Verdict;
pub(crate) use fit::{Shortage, other_requests};
pub(crate) use input::{
    AdmissionInput, HostPort, UsedResources, devices_unavailable, preemption_failed, rejection_event,
};
pub(crate) use ports::host_ports;

/// Admits the pod, or returns the rejection. An admitted critical pod may need more resources than are free: then other
/// pods must end first.
pub(crate) fn admit(input: &AdmissionInput<'_>) -> Result<Vec<Shortage>, Verdict> {
    pressure::check(input)?;
    shutdown::check(input)?;
    system::check(input.pod)?;
    containers::check(input.pod)?;
    unsupported::check(input.pod)?;
    sysctls::check(input)?;
    let shortages = fit::shortages(input);
    if let Some(first) = shortages.first().filter(|_| !is_critical(input.pod)) {
        return Err(first.rejection());
    }
    node_selector::check(input)?;
    ports::check(input)?;
    Ok(shortages)
}

#[cfg(test)]
mod tests;

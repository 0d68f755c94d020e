//! Allocation of exclusive CPUs, memory of NUMA nodes and other aligned resources.

use k8s_openapi::api::core::v1::Pod;

use super::input::refuse;
use crate::pod::state::Verdict;
use crate::resource_managers::ResourceManagers;
use crate::topology::AllocationError;

/// Allocates the resources of a pod. The pod must have passed all other checks of the admission.
pub(crate) fn allocate(pod: &Pod, managers: &ResourceManagers) -> Result<(), Verdict> {
    managers.admit(pod).map_err(|error| rejection(&error))
}

fn rejection(error: &AllocationError) -> Verdict {
    refuse(error.reason(), format!("Pod was rejected: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::admit::rejection_event;

    #[test]
    fn rejections_have_upstreams_reasons_and_messages() {
        let affinity = rejection(&AllocationError::Affinity);
        let text = "Resources cannot be allocated with Topology locality";
        assert_eq!(affinity.message, format!("Pod was rejected: {text}"));
        assert_eq!(rejection_event(&affinity), ("TopologyAffinityError", text));
        let core = rejection(&AllocationError::PartOfCore { requested: 3, per_core: 2 });
        assert_eq!(rejection_event(&core).0, "SMTAlignmentError");
        let unexpected = rejection(&AllocationError::Unexpected("failed to allocate cpus".to_owned()));
        let text = "Allocate failed due to failed to allocate cpus, which is unexpected";
        assert_eq!(rejection_event(&unexpected), ("UnexpectedAdmissionError", text));
    }
}

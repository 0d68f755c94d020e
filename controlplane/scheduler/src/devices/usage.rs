//! The claims that a pod uses.

use std::collections::HashSet;

use coracle_values::object::{Key, ObjectExt};

use super::extended::{requests_extended, uncreated};
use crate::object::{Pod, PodResourceClaim};

/// Whether the pod has claims, or extended resources that a device class may provide.
pub(crate) fn may_use_devices(pod: &Pod) -> bool {
    !pod.spec.resource_claims.is_empty() || requests_extended(pod)
}

/// Whether a pod uses one of these claims.
pub(crate) fn uses_any(pod: &Pod, claims: &HashSet<Key>) -> bool {
    if claims.is_empty() {
        return false;
    }
    let mut names = pod.spec.resource_claims.iter().filter_map(|claim| claim_name(pod, claim).ok().flatten());
    names.any(|name| claims.contains(&Key::new(pod.namespace(), name)))
        || (requests_extended(pod) && claims.contains(&uncreated(pod.namespace(), pod.uid())))
}

/// The name of a pod's claim. `None` if the pod needs no claim object. Fails if the claim is not created yet.
pub(super) fn claim_name<'a>(pod: &'a Pod, claim: &'a PodResourceClaim) -> Result<Option<&'a str>, String> {
    if let Some(name) = &claim.resource_claim_name {
        return Ok(Some(name));
    }
    let generated = pod.status.resource_claim_statuses.iter().find(|status| status.name == claim.name);
    match generated {
        Some(status) => Ok(status.resource_claim_name.as_deref()),
        None => Err(format!("pod {:?}: ResourceClaim not created yet", pod.key().to_string())),
    }
}

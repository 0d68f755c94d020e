//! The claims that a pod uses.

use std::collections::{HashMap, HashSet};

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
    let mut names = claim_names(pod).filter_map(|(_, name)| name.ok().flatten());
    names.any(|name| claims.contains(&Key::new(pod.namespace(), name)))
        || (requests_extended(pod) && claims.contains(&uncreated(pod.namespace(), pod.uid())))
}

/// The name of a pod's claim. `None` if the pod needs no claim object. An error means that the claim is not created
/// yet.
type ClaimName<'a> = Result<Option<&'a str>, String>;

/// The claims in a pod's spec with their names. The status has the names of generated claims. These names are in a map,
/// because a pod can have thousands of claims. Each change of a claim reads the names of all waiting pods.
pub(super) fn claim_names(pod: &Pod) -> impl Iterator<Item = (&PodResourceClaim, ClaimName<'_>)> {
    let statuses = &pod.status.resource_claim_statuses;
    let mut generated: HashMap<&str, Option<&str>> = HashMap::with_capacity(statuses.len());
    for status in statuses {
        // If several statuses have the same name, the first status counts.
        generated.entry(status.name.as_str()).or_insert(status.resource_claim_name.as_deref());
    }
    pod.spec.resource_claims.iter().map(move |claim| {
        let name = match (&claim.resource_claim_name, generated.get(claim.name.as_str())) {
            (Some(name), _) => Ok(Some(name.as_str())),
            (None, Some(name)) => Ok(*name),
            (None, None) => Err(format!("pod {:?}: ResourceClaim not created yet", pod.key().to_string())),
        };
        (claim, name)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    #[test]
    fn the_names_of_very_many_generated_claims_are_found_in_linear_time() {
        // A search through all statuses for each claim would take minutes.
        let names = || (0..100_000).map(|at| format!("c{at}"));
        let claims: Vec<Value> =
            names().map(|name| json!({"name": name, "resourceClaimTemplateName": "t"})).collect();
        let mut pod = fixture::pod("p", json!({"resourceClaims": claims}));
        assert!(claim_names(&pod).all(|(_, name)| name.is_err()));
        let made: Vec<Value> =
            names().map(|name| json!({"name": name, "resourceClaimName": format!("p-{name}")})).collect();
        pod.status.resource_claim_statuses = serde_json::from_value(made.into()).unwrap();
        assert!(uses_any(&pod, &HashSet::from([Key::new("d", "p-c99999")])));
        assert!(!uses_any(&pod, &HashSet::from([Key::new("d", "c99999")])));
    }
}

//! The claims of a stateful set's pods, and their owner references.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, json};

use crate::object::{Claim, ObjectExt, Pod, StatefulSet};

/// The name of a pod's claim for a claim template.
pub(super) fn claim_name(set: &StatefulSet, template: &str, ordinal: i32) -> String {
    format!("{template}-{}-{ordinal}", set.name())
}

/// The names of a pod's claims.
pub(super) fn claim_names(set: &StatefulSet, ordinal: i32) -> Vec<String> {
    let templates = set.spec.volume_claim_templates.iter();
    templates
        .filter_map(|template| template["metadata"]["name"].as_str())
        .map(|template| claim_name(set, template, ordinal))
        .collect()
}

/// New claims for a pod. Existing claims are omitted.
pub(super) fn missing(set: &StatefulSet, ordinal: i32, exists: impl Fn(&str) -> bool) -> Vec<Value> {
    let mut claims = Vec::new();
    for template in &set.spec.volume_claim_templates {
        let name = claim_name(set, template["metadata"]["name"].as_str().unwrap_or_default(), ordinal);
        if exists(&name) {
            continue;
        }
        let mut labels = template["metadata"]["labels"].clone();
        if !labels.is_object() {
            labels = json!({});
        }
        for (label, value) in set.spec.selector.match_labels.iter().flatten() {
            labels[label] = value.clone().into();
        }
        let mut metadata = json!({"name": name, "labels": labels});
        if template["metadata"]["annotations"].is_object() {
            metadata["annotations"] = template["metadata"]["annotations"].clone();
        }
        let owners = owners(set, None, &[]);
        if !owners.is_empty() {
            metadata["ownerReferences"] = json!(owners);
        }
        claims.push(json!({"metadata": metadata, "spec": template["spec"]}));
    }
    claims
}

/// The owner references of a claim according to the retention policy. `condemned` is the pod if it is above the desired
/// number: its claims are deleted with it if `whenScaled` is Delete.
pub(super) fn owners(
    set: &StatefulSet,
    condemned: Option<&Pod>,
    present: &[OwnerReference],
) -> Vec<OwnerReference> {
    let policy = set.spec.persistent_volume_claim_retention_policy.as_ref();
    let deletes = |value: Option<&Option<String>>| value.and_then(Option::as_deref) == Some("Delete");
    let when_deleted = deletes(policy.map(|policy| &policy.when_deleted));
    let when_scaled = deletes(policy.map(|policy| &policy.when_scaled));
    let is_ours = |owner: &OwnerReference| {
        owner.uid == set.uid() || (owner.kind == "Pod" && owner.name.starts_with(&format!("{}-", set.name())))
    };
    let mut owners: Vec<_> = present.iter().filter(|owner| !is_ours(owner)).cloned().collect();
    let reference = |mut owner: OwnerReference| {
        owner.block_owner_deletion = Some(true);
        owner.controller = Some(true);
        owner
    };
    match condemned {
        Some(pod) if when_scaled => owners.push(reference(pod.controller_reference())),
        Some(_) | None if when_deleted => owners.push(reference(set.controller_reference())),
        Some(_) | None => {}
    }
    owners
}

/// Whether a claim is about to be deleted, so that a new pod of this ordinal must not use it. Either it is being
/// deleted, or it is owned by an earlier pod of the same name, with which the garbage collector deletes it. Source:
/// `PodClaimIsStale`.
pub(super) fn is_stale(set: &StatefulSet, claim: &Claim, ordinal: i32) -> bool {
    let policy = set.spec.persistent_volume_claim_retention_policy.as_ref();
    let deletes = policy.and_then(|policy| policy.when_scaled.as_deref()) == Some("Delete");
    let pod = format!("{}-{ordinal}", set.name());
    let mut owners = claim.metadata.owner_references.iter().flatten();
    claim.is_being_deleted() || (deletes && owners.any(|owner| owner.kind == "Pod" && owner.name == pod))
}

/// Whether the owners of a claim differ from `owners`.
pub(super) fn differs(claim: &Claim, owners: &[OwnerReference]) -> bool {
    let uids = |list: &[OwnerReference]| {
        let mut uids: Vec<String> = list.iter().map(|owner| owner.uid.clone()).collect();
        uids.sort();
        uids
    };
    uids(claim.metadata.owner_references.as_deref().unwrap_or_default()) != uids(owners)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(policy: Value) -> StatefulSet {
        serde_json::from_value(json!({"metadata": {"name": "db", "uid": "s"}, "spec": {
            "selector": {"matchLabels": {"app": "db"}}, "persistentVolumeClaimRetentionPolicy": policy,
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}]}}))
        .unwrap()
    }

    #[test]
    fn each_pod_has_claims_of_its_own() {
        let set = set(json!({"whenDeleted": "Delete", "whenScaled": "Retain"}));
        let claims = missing(&set, 3, |_| false);
        assert_eq!(claims[0]["metadata"]["name"], "data-db-3");
        assert_eq!(claims[0]["metadata"]["labels"], json!({"app": "db"}));
        assert_eq!(claims[0]["metadata"]["ownerReferences"][0]["uid"], "s");
        assert!(missing(&set, 3, |name| name == "data-db-3").is_empty());
    }

    #[test]
    fn a_claim_that_ends_with_an_earlier_pod_is_stale() {
        let claim = |owner: &str, deleted: Value| -> Claim {
            let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": owner, "uid": "before"});
            serde_json::from_value(
                json!({"metadata": {"ownerReferences": [owner], "deletionTimestamp": deleted}}),
            )
            .unwrap()
        };
        let deletes = set(json!({"whenScaled": "Delete"}));
        assert!(is_stale(&deletes, &claim("db-1", json!(null)), 1));
        assert!(!is_stale(&deletes, &claim("db-2", json!(null)), 1));
        let retains = set(json!({"whenScaled": "Retain"}));
        assert!(!is_stale(&retains, &claim("db-1", json!(null)), 1));
        assert!(is_stale(&retains, &claim("db-1", json!("2026-01-01T00:00:00Z")), 1));
    }

    #[test]
    fn the_retention_policy_decides_who_owns_a_claim() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "db-1", "uid": "p"}})).unwrap();
        let cases = [
            ("Retain", "Retain", "", ""),
            ("Delete", "Retain", "s", "s"),
            ("Retain", "Delete", "", "p"),
            ("Delete", "Delete", "s", "p"),
        ];
        for (deleted, scaled, kept, condemned) in cases {
            let set = set(json!({"whenDeleted": deleted, "whenScaled": scaled}));
            let uid = |pod: Option<&Pod>| {
                let owners = owners(&set, pod, &[]);
                owners.first().map(|owner| owner.uid.clone()).unwrap_or_default()
            };
            assert_eq!(
                (uid(None).as_str(), uid(Some(&pod)).as_str()),
                (kept, condemned),
                "{deleted} {scaled}"
            );
        }
    }
}

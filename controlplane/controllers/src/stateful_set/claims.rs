//! The claims of a stateful set's pods, and their owner references.

use std::collections::HashSet;

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
        if let Some(owner) = wanted_owner(set, None) {
            metadata["ownerReferences"] = json!([owner]);
        }
        claims.push(json!({"metadata": metadata, "spec": template["spec"]}));
    }
    claims
}

/// The retention policy of claims.
struct Deletes {
    /// Whether claims are deleted together with the set.
    with_set: bool,
    /// Whether claims are deleted together with a pod whose ordinal is not desired any more.
    with_pod: bool,
}

fn deletes(set: &StatefulSet) -> Deletes {
    let policy = set.spec.persistent_volume_claim_retention_policy.as_ref();
    let is_delete = |value: Option<&Option<String>>| value.and_then(Option::as_deref) == Some("Delete");
    Deletes {
        with_set: is_delete(policy.map(|policy| &policy.when_deleted)),
        with_pod: is_delete(policy.map(|policy| &policy.when_scaled)),
    }
}

/// The owner of a claim by the retention policy. `condemned` is the claim's pod if the pod's ordinal is not desired any
/// more. If `whenScaled` is Delete, such a pod owns its claims, so that the claims are deleted together with the pod.
fn wanted_owner(set: &StatefulSet, condemned: Option<&Pod>) -> Option<OwnerReference> {
    let Deletes { with_set, with_pod } = deletes(set);
    let mut owner = match condemned {
        Some(pod) if with_pod => pod.controller_reference(),
        Some(_) | None if with_set => set.controller_reference(),
        Some(_) | None => return None,
    };
    owner.block_owner_deletion = Some(true);
    owner.controller = Some(true);
    Some(owner)
}

/// The new owner references of a claim of the pod. `None` if they do not change. A claim that another controller
/// manages, or that belongs to a former set or pod of the same name, gets no owner. Source: `isClaimOwnerUpToDate` and
/// `updateClaimOwnerRefForSetAndPod`.
pub(super) fn changed_owners(
    set: &StatefulSet,
    pod: &Pod,
    is_condemned: bool,
    present: &[OwnerReference],
) -> Option<Vec<OwnerReference>> {
    let is = |owner: &OwnerReference, version: &str, kind: &str, name: &str| {
        owner.api_version == version && owner.kind == kind && owner.name == name
    };
    let names_set = |owner: &OwnerReference| is(owner, "apps/v1", "StatefulSet", set.name());
    let names_pod = |owner: &OwnerReference| is(owner, "v1", "Pod", pod.name());
    let is_former = |owner: &OwnerReference| {
        (names_set(owner) && owner.uid != set.uid()) || (names_pod(owner) && owner.uid != pod.uid())
    };
    if present.iter().any(is_former) {
        return None;
    }
    let owns = |uid: &str| present.iter().any(|owner| owner.uid == uid);
    let is_controller = |owner: &OwnerReference| owner.controller == Some(true);
    let mut others: Vec<_> =
        present.iter().filter(|owner| !names_set(owner) && !names_pod(owner)).cloned().collect();
    let Deletes { with_set, with_pod } = deletes(set);
    if (with_set || with_pod) && others.iter().any(is_controller) {
        return (owns(set.uid()) || owns(pod.uid())).then_some(others);
    }
    let wanted = wanted_owner(set, is_condemned.then_some(pod));
    let is_wanted = |uid: &str| wanted.as_ref().is_some_and(|owner| owner.uid == uid);
    let is_plain =
        |owner: &OwnerReference| (owner.uid == set.uid() || owner.uid == pod.uid()) && !is_controller(owner);
    let is_right = !present.iter().any(is_plain)
        && [set.uid(), pod.uid()].into_iter().all(|uid| owns(uid) == is_wanted(uid));
    if is_right {
        return None;
    }
    others.extend(wanted);
    Some(others)
}

/// Whether a claim is about to be deleted, so that a new pod of this ordinal must not use it. The claim is being
/// deleted already, or an earlier pod of the same name owns it. In the second case the garbage collector deletes both.
/// Source: `PodClaimIsStale`.
pub(super) fn is_stale(set: &StatefulSet, claim: &Claim, ordinal: i32) -> bool {
    let Deletes { with_pod, .. } = deletes(set);
    let pod = format!("{}-{ordinal}", set.name());
    let mut owners = claim.metadata.owner_references.iter().flatten();
    claim.is_being_deleted() || (with_pod && owners.any(|owner| owner.kind == "Pod" && owner.name == pod))
}

/// The ordinals with a stale claim ([`is_stale`]). `claims` are the claims of the namespace.
pub(super) fn stale_ordinals<'a>(set: &StatefulSet, claims: impl Iterator<Item = &'a Claim>) -> HashSet<i32> {
    let names = set.spec.volume_claim_templates.iter();
    let names: HashSet<&str> = names.filter_map(|template| template["metadata"]["name"].as_str()).collect();
    let suffix = format!("-{}", set.name());
    let ordinal = |claim: &Claim| {
        let (start, number) = claim.name().rsplit_once('-')?;
        let template = start.strip_suffix(&suffix)?;
        let ordinal: i32 = number.parse().ok()?;
        // The comparison of the name refuses numbers such as `01`, which are not ordinals.
        let is_own = names.contains(template) && claim_name(set, template, ordinal) == claim.name();
        (is_own && is_stale(set, claim, ordinal)).then_some(ordinal)
    };
    claims.filter_map(ordinal).collect()
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

    fn pod() -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "db-1", "uid": "p"}})).unwrap()
    }

    fn uids(owners: Option<Vec<OwnerReference>>) -> Option<String> {
        let uids: Vec<String> = owners?.into_iter().map(|owner| owner.uid).collect();
        Some(uids.join(" "))
    }

    #[test]
    fn the_retention_policy_decides_who_owns_a_claim() {
        let cases = [
            ("Retain", "Retain", None, None),
            ("Delete", "Retain", Some("s"), Some("s")),
            ("Retain", "Delete", None, Some("p")),
            ("Delete", "Delete", Some("s"), Some("p")),
        ];
        for (deleted, scaled, kept, condemned) in cases {
            let set = set(json!({"whenDeleted": deleted, "whenScaled": scaled}));
            for (is_condemned, wanted) in [(false, kept), (true, condemned)] {
                let owners = changed_owners(&set, &pod(), is_condemned, &[]);
                assert_eq!(uids(owners.clone()).as_deref(), wanted, "{deleted} {scaled} {is_condemned}");
                let again = changed_owners(&set, &pod(), is_condemned, &owners.unwrap_or_default());
                assert_eq!(uids(again), None, "the owners stay: {deleted} {scaled} {is_condemned}");
            }
        }
    }

    #[test]
    fn a_claim_of_another_controller_gets_no_owner() {
        let owner = |kind: &str, name: &str, uid: &str, controller: bool| -> OwnerReference {
            let version = if kind == "StatefulSet" { "apps/v1" } else { "v1" };
            let owner = json!({"apiVersion": version, "kind": kind, "name": name, "uid": uid, "controller": controller});
            serde_json::from_value(owner).unwrap()
        };
        let set = set(json!({"whenDeleted": "Delete", "whenScaled": "Delete"}));
        let change = |present: &[OwnerReference]| uids(changed_owners(&set, &pod(), true, present));
        let other = owner("ConfigMap", "other", "c", true);
        assert_eq!(change(std::slice::from_ref(&other)), None);
        assert_eq!(change(&[other, owner("Pod", "db-1", "p", false)]).as_deref(), Some("c"));
        assert_eq!(change(&[owner("ConfigMap", "other", "c", false)]).as_deref(), Some("c p"));
        assert_eq!(
            change(&[owner("Pod", "db-1", "p", false)]).as_deref(),
            Some("p"),
            "it becomes the controller"
        );
        assert_eq!(change(&[owner("Pod", "db-1", "former", true)]), None);
        assert_eq!(change(&[owner("StatefulSet", "db", "former", true)]), None);
    }
}

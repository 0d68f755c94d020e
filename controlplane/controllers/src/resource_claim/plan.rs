//! Plans the claims of a pod, and the release of a claim. No I/O.
//!
//! A pod can have thousands of claims, so look-ups of claims and statuses use maps.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use crate::object::{ObjectExt, Pod, PodResourceClaim, ResourceClaim, controller_of};

/// Annotation of a generated claim with the claim's name in the pod's spec.
const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";
/// Maximum number of users of a claim, as in the API.
const MAX_USERS: usize = 256;
/// Maximum length of the prefix of a claim's name: 63 characters without a dash and the five that the API server adds.
const MAX_PREFIX: usize = 57;
/// Finalizer that keeps a claim until its devices are free.
pub(crate) const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// The next step for a claim with a template.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The claim exists and has this name.
    Exists(String),
    /// The claim must be created from this template.
    Create { template: String },
}

/// The steps of a pod's claims with templates. Each has the name of the claim in the pod's spec. `owned` are candidates
/// for the pod's generated claims.
pub(crate) fn steps(pod: &Pod, owned: &[&ResourceClaim]) -> Vec<(String, Step)> {
    if pod.is_being_deleted() || pod.finished() {
        return Vec::new();
    }
    let mut made: HashMap<&str, &str> = HashMap::new();
    for claim in owned {
        let is_own = controller_of(&claim.metadata).is_some_and(|owner| owner.uid == pod.uid());
        if let Some(name) = claim.annotation(POD_CLAIM_NAME).filter(|_| is_own) {
            made.entry(name).or_insert(claim.name());
        }
    }
    let step = |claim: &PodResourceClaim| {
        let template = claim.resource_claim_template_name.clone()?;
        let step = match made.get(claim.name.as_str()) {
            Some(made) => Step::Exists((*made).to_owned()),
            None => Step::Create { template },
        };
        Some((claim.name.clone(), step))
    };
    pod.spec.resource_claims.iter().filter_map(step).collect()
}

/// The prefix of the name of a pod's claim. The API server would cut a long prefix at its end, which is the claim's
/// name in the pod's spec. So both names are cut in proportion to their lengths. Source: `handleClaim`.
fn prefix(pod: &str, name: &str) -> String {
    let whole = format!("{pod}-{name}-");
    if whole.len() <= MAX_PREFIX {
        return whole;
    }
    let kept = |text: &str| text.len() * MAX_PREFIX / whole.len();
    // Names are ASCII, so every byte is a character boundary. No name has a dot before a dash: upstream keeps this dot,
    // and the API server refuses the name.
    let pod = pod.get(..kept(pod)).unwrap_or(pod).trim_end_matches('.');
    let name = name.get(..kept(name)).unwrap_or(name);
    format!("{pod}-{name}")
}

/// The claim to create for a pod from a template.
pub(crate) fn claim(pod: &Pod, name: &str, template: &Value) -> Value {
    let meta = &template["spec"]["metadata"];
    let mut annotations = meta["annotations"].as_object().cloned().unwrap_or_default();
    annotations.insert(POD_CLAIM_NAME.to_owned(), name.into());
    json!({
        "metadata": {
            "generateName": prefix(pod.name(), name),
            "labels": meta["labels"],
            "annotations": annotations,
            "ownerReferences": [pod.controller_reference()],
        },
        "spec": template["spec"]["spec"],
    })
}

/// The status patch with the names of the generated claims. `None` if the status already contains them.
pub(crate) fn names_patch(pod: &Pod, names: &[(String, String)]) -> Option<Value> {
    let own = &pod.status.resource_claim_statuses;
    let known: HashSet<(&str, Option<&str>)> =
        own.iter().map(|one| (one.name.as_str(), one.resource_claim_name.as_deref())).collect();
    if names.iter().all(|(name, claim)| known.contains(&(name.as_str(), Some(claim.as_str())))) {
        return None;
    }
    let mut all: Vec<(String, Option<String>)> =
        names.iter().map(|(name, claim)| (name.clone(), Some(claim.clone()))).collect();
    let named: HashSet<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
    let others = own.iter().filter(|one| !named.contains(one.name.as_str()));
    all.extend(others.map(|one| (one.name.clone(), one.resource_claim_name.clone())));
    let all: Vec<Value> =
        all.into_iter().map(|(name, claim)| json!({"name": name, "resourceClaimName": claim})).collect();
    Some(json!({"metadata": {"uid": pod.uid()}, "status": {"resourceClaimStatuses": all}}))
}

/// Whether a pod has a node and uses claims. If the pod's author has set the node, no scheduler reserves the claims.
pub(crate) fn may_lack_reservations(pod: &Pod) -> bool {
    let has_node = pod.spec.node_name.as_deref().is_some_and(|node| !node.is_empty());
    has_node && !pod.spec.resource_claims.is_empty() && !pod.is_being_deleted() && !pod.finished()
}

/// The names of the claims in the pod's spec. The flag is true if the claim was created for the pod. Claims without a
/// name yet are omitted.
pub(crate) fn claims_of_spec(pod: &Pod) -> impl Iterator<Item = (&str, bool)> {
    let mut made: HashMap<&str, Option<&str>> = HashMap::new();
    for status in &pod.status.resource_claim_statuses {
        made.entry(status.name.as_str()).or_insert(status.resource_claim_name.as_deref());
    }
    pod.spec.resource_claims.iter().filter_map(move |claim| {
        if let Some(name) = &claim.resource_claim_name {
            return Some((name.as_str(), false));
        }
        let name = made.get(claim.name.as_str()).copied().flatten()?;
        Some((name, true))
    })
}

/// The users of an allocated claim with a pod that has a node. `None` if the claim has no devices, is already reserved
/// for the pod, or cannot be reserved for the pod. Source: `syncPod`.
pub(crate) fn reservation(pod: &Pod, claim: &ResourceClaim, is_own: bool) -> Option<Value> {
    let users = &claim.status.reserved_for;
    let is_reserved = users.iter().any(|user| user["uid"] == pod.uid());
    let is_of_other = is_own && controller_of(&claim.metadata).is_none_or(|owner| owner.uid != pod.uid());
    if claim.status.allocation.is_none() || is_reserved || is_of_other || users.len() >= MAX_USERS {
        return None;
    }
    let user = json!({"resource": "pods", "name": pod.name(), "uid": pod.uid()});
    Some(users.iter().cloned().chain([user]).collect())
}

/// Whether a pod no longer uses its claims.
pub(crate) fn is_done(pod: &Pod) -> bool {
    pod.finished() || (pod.is_being_deleted() && pod.spec.node_name.as_deref().is_none_or(str::is_empty))
}

/// The next step for a claim.
#[derive(Debug, PartialEq)]
pub(crate) enum Release {
    /// Writes this status: `reservedFor` without finished pods, and no allocation if no user remains.
    Status(Value),
    /// Writes this list of finalizers, without [`FINALIZER`].
    Finalizers(Vec<String>),
    /// Deletes this generated claim, because its pod has finished.
    Delete,
    Nothing,
}

/// Plans the next step for a claim. `uses` returns whether the pod with this name and uid still uses the claim.
pub(crate) fn release(claim: &ResourceClaim, uses: impl Fn(&str, &str) -> bool) -> Release {
    let status = &claim.status;
    let used = |user: &&Value| {
        let is_pod = user["resource"] == "pods" && user["apiGroup"].as_str().unwrap_or_default().is_empty();
        let text = |field: &str| user[field].as_str().unwrap_or_default();
        // Keep users of other kinds; other controllers remove them.
        !is_pod || uses(text("name"), text("uid"))
    };
    let left: Vec<&Value> = status.reserved_for.iter().filter(used).collect();
    let frees = left.is_empty() && status.allocation.is_some();
    let shrinks = left.len() < status.reserved_for.len();
    if shrinks || (frees && claim.is_being_deleted()) {
        let mut patch = json!({"reservedFor": left});
        if frees {
            patch["allocation"] = Value::Null;
            patch["devices"] = Value::Null;
        }
        return Release::Status(patch);
    }
    let finalizers = claim.metadata.finalizers.as_deref().unwrap_or_default();
    if status.allocation.is_none() && left.is_empty() && finalizers.iter().any(|one| one == FINALIZER) {
        let others = finalizers.iter().filter(|one| *one != FINALIZER).cloned();
        return Release::Finalizers(others.collect());
    }
    let owner = controller_of(&claim.metadata).filter(|owner| owner.kind == "Pod");
    if owner.is_some_and(|owner| !uses(&owner.name, &owner.uid))
        && left.is_empty()
        && !claim.is_being_deleted()
    {
        return Release::Delete;
    }
    Release::Nothing
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(status: &Value) -> Pod {
        serde_json::from_value(
            json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "status": status,
            "spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"},
                {"name": "net", "resourceClaimName": "shared"}]}}),
        )
        .unwrap()
    }

    fn stored(fields: &Value) -> ResourceClaim {
        let mut claim = claim(
            &pod(&json!({})),
            "gpu",
            &json!({"spec": {"metadata": {"labels": {"a": "b"}}, "spec": {"devices": {}}}}),
        );
        claim["metadata"]["name"] = "p-gpu-x".into();
        for (pointer, value) in fields.as_object().unwrap() {
            claim[pointer] = value.clone();
        }
        serde_json::from_value(claim).unwrap()
    }

    #[test]
    fn a_claim_by_template_is_made_once_and_named_in_the_status() {
        let pod_ = pod(&json!({}));
        let create = Step::Create { template: "t".to_owned() };
        assert_eq!(steps(&pod_, &[]), [("gpu".to_owned(), create)]);
        let made = stored(&json!({}));
        assert_eq!(made.metadata.labels.as_ref().unwrap()["a"], "b");
        let exists = Step::Exists("p-gpu-x".to_owned());
        assert_eq!(steps(&pod_, &[&made]), [("gpu".to_owned(), exists)]);
        let names = [("gpu".to_owned(), "p-gpu-x".to_owned())];
        let patch = names_patch(&pod_, &names).unwrap();
        assert_eq!(patch["status"]["resourceClaimStatuses"][0]["resourceClaimName"], "p-gpu-x");
        assert_eq!(names_patch(&pod(&patch["status"]), &names), None);
        assert_eq!(steps(&pod(&json!({"phase": "Failed"})), &[]), []);
    }

    #[test]
    fn the_name_of_a_claim_has_a_part_of_a_long_pod_name_and_of_its_own() {
        assert_eq!(prefix("p", "gpu"), "p-gpu-");
        let (pod, name) = ("p".repeat(40), "c".repeat(15));
        assert_eq!(prefix(&pod, &name), format!("{pod}-{name}-"), "57 characters");
        // 100 characters: 57 % of each name.
        let (pod, name) = ("p".repeat(78), "c".repeat(20));
        assert_eq!(prefix(&pod, &name), format!("{}-{}", "p".repeat(44), "c".repeat(11)));
        let dotted = format!("{}.{}", "p".repeat(43), "p".repeat(34));
        assert_eq!(prefix(&dotted, &name), format!("{}-{}", "p".repeat(43), "c".repeat(11)));
        let longest = prefix(&"p".repeat(253), "c");
        assert_eq!(longest, format!("{}-", "p".repeat(56)));
    }

    #[test]
    fn very_many_claims_of_a_pod_take_linear_time() {
        // A search through all claims for each claim of the pod would take minutes.
        let claims: Vec<Value> = (0..30_000)
            .map(|at| json!({"name": format!("c{at}"), "resourceClaimTemplateName": "t"}))
            .collect();
        let mut pod = pod(&json!({}));
        pod.spec.resource_claims = serde_json::from_value(claims.into()).unwrap();
        let made = |name: &str| -> ResourceClaim {
            let mut claim = claim(&pod, name, &json!({}));
            claim["metadata"]["name"] = format!("p-{name}").into();
            serde_json::from_value(claim).unwrap()
        };
        let owned: Vec<ResourceClaim> = pod.spec.resource_claims.iter().map(|one| made(&one.name)).collect();
        let owned: Vec<&ResourceClaim> = owned.iter().collect();
        let exists = |(name, step): (String, Step)| match step {
            Step::Exists(claim) => (name, claim),
            Step::Create { .. } => panic!("{name} exists"),
        };
        let names: Vec<(String, String)> = steps(&pod, &owned).into_iter().map(exists).collect();
        let patch = names_patch(&pod, &names).unwrap();
        pod.status = serde_json::from_value(patch["status"].clone()).unwrap();
        assert_eq!(names_patch(&pod, &names), None);
        assert_eq!(claims_of_spec(&pod).count(), 30_000);
        assert_eq!(claims_of_spec(&pod).last(), Some(("p-c29999", true)));
    }

    #[test]
    fn an_allocated_claim_is_reserved_for_a_pod_with_a_node() {
        let mut pod =
            pod(&json!({"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p-gpu-x"}]}));
        assert!(!may_lack_reservations(&pod), "the scheduler reserves");
        pod.spec.node_name = Some("a".to_owned());
        assert!(may_lack_reservations(&pod));
        let claims: Vec<_> = claims_of_spec(&pod).collect();
        assert_eq!(claims, [("p-gpu-x", true), ("shared", false)]);
        let user = |name: &str| json!({"resource": "pods", "name": name, "uid": name});
        let with = |status: Value| stored(&json!({"status": status}));
        assert_eq!(reservation(&pod, &with(json!({})), true), None, "no devices");
        let used = with(json!({"allocation": {}, "reservedFor": [user("other")]}));
        let both = json!([user("other"), {"resource": "pods", "name": "p", "uid": "u"}]);
        assert_eq!(reservation(&pod, &used, true), Some(both.clone()));
        assert_eq!(reservation(&pod, &with(json!({"allocation": {}, "reservedFor": both})), true), None);
        let full: Vec<Value> = (0..256).map(|number| user(&number.to_string())).collect();
        assert_eq!(reservation(&pod, &with(json!({"allocation": {}, "reservedFor": full})), true), None);
        let mut of_other = used;
        of_other.metadata.owner_references = None;
        assert_eq!(reservation(&pod, &of_other, true), None, "not the generated claim of the pod");
        assert!(reservation(&pod, &of_other, false).is_some());
        pod.status.phase = Some("Succeeded".to_owned());
        assert!(!may_lack_reservations(&pod));
    }

    #[test]
    fn a_claim_is_released_in_steps_when_its_pods_are_gone() {
        let user = |uid: &str| json!({"resource": "pods", "name": "p", "uid": uid});
        let status = json!({"allocation": {"devices": {}}, "reservedFor": [user("u"), user("v")]});
        let only = |uid: &'static str| move |_: &str, other: &str| other == uid;
        let allocated = stored(&json!({"status": status}));
        assert_eq!(release(&allocated, |_, _| true), Release::Nothing);
        assert_eq!(release(&allocated, only("u")), Release::Status(json!({"reservedFor": [user("u")]})));
        let freed = json!({"reservedFor": [], "allocation": null, "devices": null});
        assert_eq!(release(&allocated, |_, _| false), Release::Status(freed));
        let mut free = stored(&json!({}));
        free.metadata.finalizers = Some(vec![FINALIZER.to_owned(), "other".to_owned()]);
        assert_eq!(release(&free, only("u")), Release::Finalizers(vec!["other".to_owned()]));
        free.metadata.finalizers = None;
        assert_eq!(release(&free, only("u")), Release::Nothing);
        assert_eq!(release(&free, |_, _| false), Release::Delete);
    }
}

//! ResourceClaims that the scheduler creates for the extended resources of a pod. Quotas already count these resources
//! for the pod, so they must not count them again for the claim: the pod _pays_ for the claim.
//!
//! Source: `verifyOwner` in `pkg/quota/v1/evaluator/core/resource_claims.go`. A user with the permission to create
//! claims can set the annotation and the owner. So this module compares the claim with the pod. Upstream compares each
//! request of the claim with the requests of single containers. This module compares the sums, and also the uid of the
//! pod.

use jiff::Timestamp;
use serde_json::Value;

use super::usage::{self, Usage};

/// The annotation of the claims.
const ANNOTATION: &str = "resource.kubernetes.io/extended-resource-claim";

/// A pod that requests extended resources, so it can pay for a claim.
pub struct ClaimOwner {
    name: String,
    uid: String,
    /// The name of the claim in the status of the pod. `None` before the scheduler writes the status.
    claim: Option<String>,
    /// The usage of the pod: the extended resources that device classes provide implicitly.
    requests: Usage,
}

// === impl ClaimOwner ===

impl ClaimOwner {
    /// Reads a pod. `None` if the pod pays for no claim at this time: it has ended, its grace period is over, or it
    /// requests no such resource.
    pub fn of(pod: &Value, now: Timestamp) -> Option<ClaimOwner> {
        let requests = usage::implicit_requests(pod, now);
        if requests.is_empty() {
            return None;
        }
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Some(ClaimOwner {
            name: text(&pod["metadata"]["name"])?,
            uid: text(&pod["metadata"]["uid"])?,
            claim: text(&pod["status"]["extendedResourceClaimStatus"]["resourceClaimName"]),
            requests,
        })
    }

    /// The uid of the pod.
    pub fn uid(&self) -> &str {
        &self.uid
    }
}

/// Name and uid of the pod, according to a claim for the extended resources of a pod. `None` for another claim.
pub fn pod_of_claim(claim: &Value) -> Option<(&str, &str)> {
    let metadata = &claim["metadata"];
    // A claim with a second owner would outlive the pod.
    let [owner] = metadata["ownerReferences"].as_array()?.as_slice() else { return None };
    let is_pod = owner["controller"] == true && owner["kind"] == "Pod" && owner["apiVersion"] == "v1";
    let is_marked = metadata["annotations"][ANNOTATION] == "true";
    (is_pod && is_marked).then_some((owner["name"].as_str()?, owner["uid"].as_str()?))
}

/// The usage of a claim that a pod pays for. Empty if the claim does not belong to the pod.
pub fn paid_by_pod(claim: &Value, pod: &ClaimOwner) -> Usage {
    let is_owner = pod_of_claim(claim) == Some((pod.name.as_str(), pod.uid.as_str()));
    let is_claim = pod.claim.as_deref().is_none_or(|name| claim["metadata"]["name"] == name);
    if !is_owner || !is_claim {
        return Usage::new();
    }
    let paid = usage::implicit_devices(claim).into_iter().filter_map(|(name, amount)| {
        let paid = (*pod.requests.get(&name)?).min(amount);
        (paid > 0).then_some((name, paid))
    });
    paid.collect()
}

/// A usage without the part that a pod pays for.
pub fn without_paid(mut usage: Usage, paid: &Usage) -> Usage {
    for (name, paid) in paid {
        if let Some(amount) = usage.get_mut(name) {
            *amount -= paid;
        }
    }
    usage.retain(|_, amount| *amount != 0);
    usage
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GPU: &str = "requests.deviceclass.resource.kubernetes.io/gpu";

    fn claim(counts: &[i64]) -> Value {
        let request = |count: &i64| json!({"exactly": {"deviceClassName": "gpu", "count": count}});
        let requests: Vec<Value> = counts.iter().map(request).collect();
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true});
        json!({"metadata": {"name": "c", "annotations": {ANNOTATION: "true"}, "ownerReferences": [owner]},
            "spec": {"devices": {"requests": requests}}})
    }

    /// A pod with these containers.
    fn pod(uid: &str, claim: Option<&str>, spec: Value) -> Value {
        let claim = claim.map(|name| json!({"resourceClaimName": name}));
        json!({"metadata": {"name": "p", "uid": uid}, "spec": spec,
            "status": {"phase": "Running", "extendedResourceClaimStatus": claim}})
    }

    fn container(count: u8) -> Value {
        let requests = json!({"deviceclass.resource.kubernetes.io/gpu": count.to_string(), "cpu": "1"});
        json!({"name": "c", "resources": {"requests": requests}})
    }

    fn paid_at(claim: &Value, pod: &Value, now: &str) -> i128 {
        let owner = ClaimOwner::of(pod, now.parse().unwrap());
        let paid = owner.map(|owner| paid_by_pod(claim, &owner)).unwrap_or_default();
        paid.get(GPU).copied().unwrap_or(0)
    }

    fn paid(claim: &Value, uid: &str, name: Option<&str>) -> i128 {
        paid_at(claim, &pod(uid, name, json!({"containers": [container(3)]})), "2026-01-01T00:00:00Z")
    }

    #[test]
    fn a_pod_pays_with_its_whole_usage_and_only_while_it_counts() {
        let spec = json!({"containers": [container(1)], "initContainers": [container(2)]});
        let (claim, mut pod, now) = (claim(&[2]), pod("u", None, spec), "2026-01-01T00:00:30Z");
        assert_eq!(paid_at(&claim, &pod, now), 2000, "the init container requests more");
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:10Z".into();
        pod["metadata"]["deletionGracePeriodSeconds"] = 20.into();
        assert_eq!(paid_at(&claim, &pod, now), 2000, "the end of the grace period");
        assert_eq!(paid_at(&claim, &pod, "2026-01-01T00:00:31Z"), 0, "the grace period is over");
        pod["metadata"]["deletionTimestamp"] = Value::Null;
        pod["status"]["phase"] = "Failed".into();
        assert_eq!(paid_at(&claim, &pod, now), 0);
        let none = json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [{"name": "c"}]}});
        assert!(ClaimOwner::of(&none, Timestamp::UNIX_EPOCH).is_none());
    }

    #[test]
    fn a_pod_pays_for_its_own_claim_up_to_its_requests() {
        assert_eq!(pod_of_claim(&claim(&[1])), Some(("p", "u")));
        assert_eq!(paid(&claim(&[1, 2]), "u", None), 3000);
        assert_eq!(paid(&claim(&[1]), "u", Some("c")), 1000);
        assert_eq!(paid(&claim(&[2, 8]), "u", None), 3000, "the pod requests less");
        assert_eq!(paid(&claim(&[1]), "other", None), 0, "another pod of the same name");
        let mut renamed = claim(&[1]);
        renamed["metadata"]["ownerReferences"][0]["name"] = "q".into();
        assert_eq!(paid(&renamed, "u", None), 0, "no pod has this name and uid");
        assert_eq!(paid(&claim(&[1]), "u", Some("other")), 0, "the pod has another claim");
        for field in ["annotations", "ownerReferences"] {
            let mut unmarked = claim(&[1]);
            unmarked["metadata"][field] = Value::Null;
            assert_eq!((pod_of_claim(&unmarked), paid(&unmarked, "u", None)), (None, 0));
        }
        let mut shared = claim(&[1]);
        shared["metadata"]["ownerReferences"].as_array_mut().unwrap().push(json!({"kind": "ConfigMap"}));
        assert_eq!(pod_of_claim(&shared), None);
    }

    #[test]
    fn the_paid_part_is_removed() {
        let usage = |amount: i128| Usage::from([(GPU.to_owned(), amount), ("count/x".to_owned(), 1000)]);
        let paid = Usage::from([(GPU.to_owned(), 3000), ("absent".to_owned(), 1)]);
        assert_eq!(without_paid(usage(5000), &paid), usage(2000));
        assert_eq!(without_paid(usage(3000), &paid), Usage::from([("count/x".to_owned(), 1000)]));
    }
}

//! The usage that the objects of a kind add to a quota.

use std::collections::HashMap;
use std::sync::Arc;

use coracle_kinds::Resource;
use coracle_kinds::kind::by_resource;
use coracle_kinds::quota::{
    ClaimOwner, Quota, Usage, grace_end, paid_by_pod, pod_of_claim, reads_object, without_paid,
};
use jiff::Timestamp;
use kube::discovery::ApiResource;
use serde_json::{Value, json};

use crate::api_kind::{ApiKind, Discovered};
use crate::object::{ObjectExt, ResourceQuota};

/// One object, in thousandths.
const ONE: i128 = 1000;

/// The way in which the objects of a kind count.
pub(super) enum Counted {
    /// The rules of a built-in kind determine the usage.
    BuiltIn(&'static Arc<Resource>),
    /// The number of objects is the usage. The text is the name of the resource.
    Number(String),
}

// === impl Counted ===

impl Counted {
    /// Whether all objects of the kind have the same usage. Then a count needs only their metadata.
    pub(super) fn is_number(&self) -> bool {
        match self {
            Self::BuiltIn(kind) => !reads_object(kind),
            Self::Number(_) => true,
        }
    }
}

/// The kinds in the order of the count. Pods are first, because the usage of claims depends on the counted pods.
pub(super) fn in_order(kinds: &[ApiKind]) -> Vec<&ApiKind> {
    let mut kinds: Vec<&ApiKind> = kinds.iter().collect();
    kinds.sort_by_key(|kind| kind.name() != "pods");
    kinds
}

/// The limits and the scopes of a quota.
pub(super) fn limits(quota: &ResourceQuota) -> Quota {
    Quota::read(&json!({"metadata": {"name": quota.name()}, "spec": quota.spec}))
}

/// The way in which a quota counts the objects of a kind. `None` if the quota does not count them.
pub(super) fn counted(object: &ResourceQuota, quota: &Quota, kind: &ApiKind) -> Option<Counted> {
    let is_listed = kind.namespaced && kind.verbs.iter().any(|verb| verb == "list");
    let resource = &kind.resource;
    if !is_listed {
        return None;
    }
    if let Some(built_in) = by_resource(&resource.group, &resource.version, &resource.plural) {
        return quota.tracks(built_in).then_some(Counted::BuiltIn(built_in));
    }
    // Custom resources are in no scope, so a quota with scopes does not count them.
    let has_scopes = ["scopes", "scopeSelector"].iter().any(|field| !object.spec[*field].is_null());
    let name = format!("count/{}.{}", resource.plural, resource.group);
    (!has_scopes && quota.limits(&name)).then_some(Counted::Number(name))
}

/// Whether a quota limits the number of the objects of a resource.
pub(super) fn limits_number(object: &ResourceQuota, resource: &ApiResource) -> bool {
    let (hard, plural) = (&object.spec["hard"], resource.plural.as_str());
    if resource.group.is_empty() {
        return [&hard[plural], &hard[format!("count/{plural}")]].into_iter().any(|limit| !limit.is_null());
    }
    !hard[format!("count/{plural}.{}", resource.group)].is_null()
}

/// A count of the objects of a namespace.
pub(super) struct Count {
    pub(super) used: Usage,
    /// The time of the count.
    now: Timestamp,
    /// The time after which the usage of a counted pod changes, although the pod does not change.
    pub(super) next_change: Option<Timestamp>,
    /// The counted pods that can still pay for a claim, by uid. A pod pays for one claim only.
    owners: HashMap<String, ClaimOwner>,
}

impl Count {
    /// An empty count.
    pub(super) fn at(now: Timestamp) -> Self {
        Self { used: Usage::new(), now, next_change: None, owners: HashMap::new() }
    }

    /// Adds the usage of one object, without the part that a pod pays for. Pods must be added before claims.
    pub(super) fn add(&mut self, quota: &Quota, counted: &Counted, object: &Value) {
        let more = match counted {
            Counted::BuiltIn(kind) => {
                if kind.is("", "Pod") {
                    let end = grace_end(object).filter(|end| *end >= self.now);
                    self.next_change = self.next_change.into_iter().chain(end).min();
                    if quota.limits_implicit_devices() {
                        let owner = ClaimOwner::of(object, self.now);
                        self.owners.extend(owner.map(|owner| (owner.uid().to_owned(), owner)));
                    }
                }
                without_paid(quota.usage(kind, object, self.now), &self.paid(object))
            }
            Counted::Number(name) => Usage::from([(name.clone(), ONE)]),
        };
        for (name, amount) in more {
            *self.used.entry(name).or_default() += amount;
        }
    }

    /// The part of the usage of an object that a counted pod pays for. Only the first claim for the extended resources
    /// of a pod has such a part.
    fn paid(&mut self, object: &Value) -> Usage {
        let Some((_, pod)) = pod_of_claim(object) else { return Usage::new() };
        let paid = self.owners.get(pod).map(|owner| paid_by_pod(object, owner)).unwrap_or_default();
        if !paid.is_empty() {
            self.owners.remove(pod);
        }
        paid
    }
}

/// Keeps the former usage of kinds that are not known now, because their server does not respond. As upstream, their
/// objects must not count as deleted.
pub(super) fn keep_unknown(status: &mut Value, former: &Value, found: &Discovered) {
    let Some(used) = status.get_mut("used").and_then(Value::as_object_mut) else { return };
    for (name, amount) in used {
        let Some(resource) = name.strip_prefix("count/") else { continue };
        let Some((_plural, group)) = resource.split_once('.') else { continue };
        let mut unavailable = found.unavailable.iter().filter_map(|version| version.split_once('/'));
        let is_unknown = found.kinds.iter().all(|kind| kind.name() != resource);
        if is_unknown
            && unavailable.any(|(of, _version)| of == group)
            && let Some(former) = former["used"].get(name)
        {
            amount.clone_from(former);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kube::core::GroupVersionKind;

    use super::*;

    fn kind(group: &str, kind: &str, plural: &str) -> ApiKind {
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, "v1", kind), plural);
        ApiKind { resource, namespaced: true, verbs: vec!["list".to_owned()] }
    }

    fn quota(spec: Value) -> ResourceQuota {
        serde_json::from_value(json!({"metadata": {"name": "q", "namespace": "n"}, "spec": spec})).unwrap()
    }

    #[test]
    fn pods_and_custom_resources_add_to_the_usage() {
        let object =
            quota(json!({"hard": {"pods": "2", "requests.cpu": "1", "count/things.example.com": "5"}}));
        let limits = limits(&object);
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
        let mut count = Count::at(now);
        let pods = counted(&object, &limits, &kind("", "Pod", "pods")).unwrap();
        let pod = |phase: &str| {
            json!({"metadata": {"name": "p"}, "status": {"phase": phase},
                "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "250m"}}}]}})
        };
        for phase in ["Running", "Pending", "Succeeded"] {
            count.add(&limits, &pods, &pod(phase));
        }
        assert_eq!(count.next_change, None);
        // The grace periods of the first two are over, those of the others are not.
        for second in ["10", "29", "31", "30"] {
            let mut deleted = pod("Running");
            deleted["metadata"]["deletionTimestamp"] = format!("2026-01-01T00:00:{second}Z").into();
            deleted["metadata"]["deletionGracePeriodSeconds"] = 30.into();
            count.add(&limits, &pods, &deleted);
        }
        assert_eq!(count.next_change, Some(now));
        let things = counted(&object, &limits, &kind("example.com", "Thing", "things")).unwrap();
        count.add(&limits, &things, &json!({}));
        let expect = json!({"pods": "4", "requests.cpu": "1", "count/things.example.com": "1"});
        assert_eq!(limits.status(&count.used)["used"], expect);
    }

    #[test]
    fn a_claim_counts_unless_its_pod_has_requested_the_devices() {
        let name = "requests.deviceclass.resource.kubernetes.io/gpu";
        let object = quota(json!({"hard": {name: "9"}}));
        let limits = limits(&object);
        let kinds = [kind("resource.k8s.io", "ResourceClaim", "resourceclaims"), kind("", "Pod", "pods")];
        let [pods, claims] = in_order(&kinds)[..] else { panic!("two kinds") };
        let [pods, claims] = [pods, claims].map(|kind| counted(&object, &limits, kind).unwrap());
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true});
        let annotations = json!({"resource.kubernetes.io/extended-resource-claim": "true"});
        let request = json!({"name": "r", "exactly": {"deviceClassName": "gpu", "count": 3}});
        let claim = json!({"metadata": {"name": "c", "annotations": annotations, "ownerReferences": [owner]},
            "spec": {"devices": {"requests": [request]}}});
        for (uid, claim_of_pod, expect) in [("u", "c", 1000), ("u", "other", 3000), ("v", "c", 3000)] {
            let resources = json!({"requests": {"deviceclass.resource.kubernetes.io/gpu": "2"}});
            let pod = json!({"metadata": {"name": "p", "uid": uid},
                "spec": {"containers": [{"name": "c", "resources": resources}]},
                "status": {"extendedResourceClaimStatus": {"resourceClaimName": claim_of_pod}}});
            let mut count = Count::at(Timestamp::UNIX_EPOCH);
            for more in [2000, expect, 3000] {
                let before = count.used.get(name).copied().unwrap_or(0);
                let (counted, object) = if more == 2000 { (&pods, &pod) } else { (&claims, &claim) };
                count.add(&limits, counted, object);
                assert_eq!(count.used.get(name), Some(&(before + more)), "a pod counts for one claim");
            }
        }
    }

    /// The API server counts with the same rule (`coracle_kinds::quota::ClaimOwner`).
    #[test]
    fn a_pod_pays_with_its_init_containers_and_not_after_its_grace_period() {
        let name = "requests.deviceclass.resource.kubernetes.io/gpu";
        let object = quota(json!({"hard": {name: "9"}}));
        let limits = limits(&object);
        let of = |group: &str, name: &str, plural: &str| {
            counted(&object, &limits, &kind(group, name, plural)).unwrap()
        };
        let (pods, claims) =
            (of("", "Pod", "pods"), of("resource.k8s.io", "ResourceClaim", "resourceclaims"));
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true});
        let annotations = json!({"resource.kubernetes.io/extended-resource-claim": "true"});
        let request = json!({"name": "r", "exactly": {"deviceClassName": "gpu", "count": 2}});
        let claim = json!({"metadata": {"name": "c", "annotations": annotations, "ownerReferences": [owner]},
            "spec": {"devices": {"requests": [request]}}});
        let resources = json!({"requests": {"deviceclass.resource.kubernetes.io/gpu": "2"}});
        let init = json!({"name": "i", "resources": resources});
        let metadata = json!({"name": "p", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:10Z",
            "deletionGracePeriodSeconds": 20});
        let pod = json!({"metadata": metadata,
            "spec": {"containers": [{"name": "c"}], "initContainers": [init]}});
        for (now, of_pod) in [("2026-01-01T00:00:30Z", 2000), ("2026-01-01T00:00:31Z", 0)] {
            let mut count = Count::at(now.parse().unwrap());
            count.add(&limits, &pods, &pod);
            assert_eq!(count.used.get(name).copied().unwrap_or(0), of_pod, "{now}");
            count.add(&limits, &claims, &claim);
            assert_eq!(count.used.get(name), Some(&2000), "either the pod or the claim: {now}");
        }
    }

    #[test]
    fn the_usage_of_kinds_of_a_server_that_does_not_respond_stays() {
        let names = ["count/things.example.com", "count/gone.example.org", "count/cups.example.com", "pods"];
        let amounts = |amounts: [&str; 4]| {
            let used = names.iter().zip(amounts).map(|(name, amount)| ((*name).to_owned(), json!(amount)));
            json!({"used": used.collect::<serde_json::Map<String, Value>>()})
        };
        let found = Discovered {
            kinds: vec![kind("", "Pod", "pods"), kind("example.com", "Cup", "cups")],
            unavailable: vec!["example.com/v1".to_owned()],
        };
        let mut status = amounts(["0", "0", "1", "2"]);
        keep_unknown(&mut status, &amounts(["5", "6", "7", "8"]), &found);
        assert_eq!(status, amounts(["5", "0", "1", "2"]));
        let mut new = amounts(["0", "0", "1", "2"]);
        keep_unknown(&mut new, &Value::Null, &found);
        assert_eq!(new, amounts(["0", "0", "1", "2"]));
    }

    #[test]
    fn a_quota_limits_the_number_of_the_resources_in_its_spec() {
        let hard = json!({"secrets": "1", "count/configmaps": "1", "count/things.example.com": "1"});
        let object = quota(json!({"hard": hard}));
        for (group, plural, expect) in [
            ("", "secrets", true),
            ("", "configmaps", true),
            ("", "leases", false),
            ("example.com", "things", true),
            ("example.com", "cups", false),
            ("example.com", "secrets", false),
        ] {
            assert_eq!(
                limits_number(&object, &kind(group, "K", plural).resource),
                expect,
                "{plural}.{group}"
            );
        }
        assert!(!limits_number(&quota(Value::Null), &kind("", "Secret", "secrets").resource));
    }

    #[test]
    fn kinds_whose_objects_have_different_usages_are_read_completely() {
        let names = ["pods", "services", "persistentvolumeclaims", "secrets", "count/things.example.com"];
        let hard: BTreeMap<&str, &str> = names.into_iter().map(|name| (name, "1")).collect();
        let object = quota(json!({"hard": hard}));
        for (group, name, plural, expect) in [
            ("", "Pod", "pods", false),
            ("", "Service", "services", false),
            ("", "PersistentVolumeClaim", "persistentvolumeclaims", false),
            ("", "Secret", "secrets", true),
            ("example.com", "Thing", "things", true),
        ] {
            let counted = counted(&object, &limits(&object), &kind(group, name, plural)).unwrap();
            assert_eq!(counted.is_number(), expect, "{plural}");
        }
    }

    #[test]
    fn only_kinds_that_the_quota_limits_are_counted() {
        let object = quota(json!({"hard": {"count/things.example.com": "5"}, "scopes": ["BestEffort"]}));
        let limits = limits(&object);
        assert!(counted(&object, &limits, &kind("", "ConfigMap", "configmaps")).is_none());
        assert!(counted(&object, &limits, &kind("example.com", "Thing", "things")).is_none(), "scopes");
        let object = quota(json!({"hard": {"configmaps": "5"}}));
        let limits = super::limits(&object);
        assert!(counted(&object, &limits, &kind("", "ConfigMap", "configmaps")).is_some());
        let unlisted = ApiKind { verbs: Vec::new(), ..kind("", "ConfigMap", "configmaps") };
        assert!(counted(&object, &limits, &unlisted).is_none());
    }
}

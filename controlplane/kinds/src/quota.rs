//! Resource quotas: the usage of each object, the quotas that cover it, and the check of a request.
//!
//! Source: `pkg/quota/v1/evaluator/core`, and `resourcequota/controller.go` of the API server library.

mod extended_claim;
mod limited;
mod scope;
mod usage;

use std::collections::{BTreeMap, BTreeSet};

use coracle_values::CollectMap;
use coracle_values::Quantity;
use jiff::Timestamp;
use serde_json::{Map, Value};

pub use self::extended_claim::{ClaimOwner, paid_by_pod, pod_of_claim, without_paid};
pub use self::limited::{LimitedResource, Uncovered, uncovered};
use self::scope::ScopeSelector;
pub use self::scope::is_terminating;
pub use self::usage::Usage;
use crate::Resource;

/// Amounts that each container of a pod must state if a quota limits them.
const REQUIRED: [&str; 6] =
    ["cpu", "limits.cpu", "limits.memory", "memory", "requests.cpu", "requests.memory"];

/// The limits and scopes of a ResourceQuota.
#[derive(Clone, Debug, Default)]
pub struct Quota {
    /// Name of the object.
    pub name: String,
    /// `spec.hard`.
    hard: BTreeMap<String, Quantity>,
    scopes: Vec<ScopeSelector>,
}

// === impl Quota ===

impl Quota {
    /// Reads a ResourceQuota.
    pub fn read(object: &Value) -> Quota {
        let hard = object["spec"]["hard"].as_object().into_iter().flatten();
        let hard =
            hard.filter_map(|(name, amount)| Some((name.clone(), Quantity::parse(amount.as_str()?).ok()?)));
        Quota {
            name: object["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
            hard: hard.collect_map(),
            scopes: scope::read(&object["spec"]),
        }
    }

    /// Whether the quota limits an amount of this name.
    pub fn limits(&self, name: &str) -> bool {
        self.hard.contains_key(name)
    }

    /// Whether the quota counts devices that pods can pay for ([`ClaimOwner`]). No scope includes claims for devices.
    pub fn limits_implicit_devices(&self) -> bool {
        self.scopes.is_empty() && self.hard.keys().any(|name| name.starts_with(usage::IMPLICIT))
    }

    /// Whether objects of the kind can use an amount that the quota limits.
    pub fn tracks(&self, kind: &Resource) -> bool {
        let has_plain_name = kind.group.is_empty() && usage::PLAIN_COUNTS.contains(&&*kind.plural);
        usage::is_counted(kind)
            && (usage::reads_object(kind)
                || (has_plain_name && self.limits(&kind.plural))
                || self.limits(&format!("count/{}", kind.qualified_resource())))
    }

    /// Whether the scopes include the object. Without scopes they include every object.
    pub fn covers(&self, kind: &Resource, object: &Value) -> bool {
        self.scopes.iter().all(|selector| selector.matches(kind, object))
    }

    /// The names of the scopes that include the object, even if another scope of the quota does not include it.
    fn matched_scopes<'a>(&'a self, kind: &'a Resource, object: &'a Value) -> impl Iterator<Item = &'a str> {
        self.scopes.iter().filter(|scope| scope.matches(kind, object)).map(ScopeSelector::name)
    }

    /// The usage of this quota by an object at a time.
    pub fn usage(&self, kind: &Resource, object: &Value, now: Timestamp) -> Usage {
        if !self.covers(kind, object) {
            return Usage::new();
        }
        let mut usage = usage::of(kind, object, now);
        usage.retain(|name, amount| self.limits(name) && *amount != 0);
        usage
    }

    /// The reason why a request exceeds the quota. `None` if the request fits. `requested` has the positive amounts of
    /// the request.
    pub fn exceeded(&self, used: &Usage, requested: &Usage) -> Option<String> {
        let amount = |name: &str| used.get(name).copied().unwrap_or(0);
        let over: Vec<&str> = self
            .hard
            .iter()
            .filter(|(name, hard)| {
                let request = requested.get(*name).copied().unwrap_or(0);
                request > 0 && amount(name) + request > hard.thousandths()
            })
            .map(|(name, _)| name.as_str())
            .collect();
        if over.is_empty() {
            return None;
        }
        let list = |text: &dyn Fn(&str) -> String| {
            over.iter().map(|name| format!("{name}={}", text(name))).collect::<Vec<_>>().join(",")
        };
        Some(format!(
            "exceeded quota: {}, requested: {}, used: {}, limited: {}",
            self.name,
            list(&|name| self.text(name, requested.get(name).copied().unwrap_or(0))),
            list(&|name| self.text(name, amount(name))),
            list(&|name| self.hard.get(name).map(Quantity::to_string).unwrap_or_default()),
        ))
    }

    /// The status of the quota.
    pub fn status(&self, used: &Usage) -> Value {
        let hard: Map<String, Value> =
            self.hard.iter().map(|(name, hard)| (name.clone(), hard.to_string().into())).collect_map();
        let used: Map<String, Value> = self
            .hard
            .keys()
            .map(|name| (name.clone(), self.text(name, used.get(name).copied().unwrap_or(0)).into()))
            .collect_map();
        let mut status = Map::new();
        if !hard.is_empty() {
            status.insert("hard".to_owned(), hard.into());
            status.insert("used".to_owned(), used.into());
        }
        status.into()
    }

    /// Formats an amount in the form of its limit, for example with the suffix `Mi`.
    fn text(&self, name: &str, thousandths: i128) -> String {
        let like = self.hard.get(name).copied().unwrap_or_default();
        like.with_thousandths(thousandths).to_string()
    }
}

/// Whether two objects of the kind can have different usages.
pub fn reads_object(kind: &Resource) -> bool {
    usage::reads_object(kind)
}

/// The usage of an object at a time, by the resource names of quotas. It includes names that no quota limits.
pub fn whole_usage(kind: &Resource, object: &Value, now: Timestamp) -> Usage {
    usage::of(kind, object, now)
}

/// The time after which a pod that is being deleted counts only for `count/pods`, although it still exists. `None` if
/// its usage does not change with the time.
pub fn grace_end(pod: &Value) -> Option<Timestamp> {
    usage::grace_end(pod)
}

/// The growth of a usage. Amounts that do not grow are omitted.
pub fn growth(new: &Usage, old: &Usage) -> Usage {
    let grown = |(name, amount): (&String, &i128)| {
        let more = amount - old.get(name).copied().unwrap_or(0);
        (more > 0).then(|| (name.clone(), more))
    };
    new.iter().filter_map(grown).collect_map()
}

/// The requests and limits that the pod lacks, although the quota requires them of each container.
pub fn missing_requests(quota: &Quota, pod: &Value) -> Option<String> {
    if pod["spec"]["resources"].as_object().is_some_and(|resources| !resources.is_empty()) {
        return None;
    }
    let lists = ["containers", "initContainers"].map(|list| pod["spec"][list].as_array());
    let containers: Vec<&Value> = lists.into_iter().flatten().flatten().collect();
    let mut missing: Vec<String> = Vec::new();
    for name in REQUIRED.into_iter().filter(|name| quota.limits(name)) {
        let (list, resource) = match name.split_once('.') {
            Some((list, resource)) => (list, resource),
            None => ("requests", name),
        };
        let without: BTreeSet<&str> = containers
            .iter()
            .filter(|container| container["resources"][list][resource].is_null())
            .filter_map(|container| container["name"].as_str())
            .collect();
        if !without.is_empty() {
            missing.push(format!("{name} for: {}", without.into_iter().collect::<Vec<_>>().join(",")));
        }
    }
    (!missing.is_empty()).then(|| format!("must specify {}", missing.join("; ")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kind::by_kind;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn quota(spec: Value) -> Quota {
        Quota::read(&json!({"metadata": {"name": "q"}, "spec": spec}))
    }

    fn pod(more: Value) -> Value {
        let mut spec = json!({"containers": [{"name": "c", "image": "i", "resources": {
            "requests": {"cpu": "250m", "memory": "64Mi", "x.io/gpu": "2"}, "limits": {"cpu": "1", "x.io/gpu": "2"}}}]});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec})
    }

    #[test]
    fn the_refusal_has_upstreams_words() {
        let (quota, pods) = (
            quota(json!({"hard": {"pods": "1", "requests.memory": "100Mi"}})),
            by_kind("v1", "Pod").unwrap(),
        );
        let one = quota.usage(pods, &pod(json!({})), NOW);
        assert_eq!(quota.exceeded(&Usage::new(), &one), None);
        assert_eq!(
            quota.exceeded(&one, &one).unwrap(),
            "exceeded quota: q, requested: pods=1,requests.memory=64Mi, used: pods=1,requests.memory=64Mi, limited: pods=1,requests.memory=100Mi"
        );
        let status = json!({"hard": {"pods": "1", "requests.memory": "100Mi"}, "used": {"pods": "1", "requests.memory": "64Mi"}});
        assert_eq!(quota.status(&one), status);
    }

    #[test]
    fn pods_use_compute_resources_until_they_end() {
        let hard = json!({"hard": {"pods": "9", "count/pods": "9", "cpu": "9", "limits.cpu": "9", "requests.x.io/gpu": "9"}});
        let (quota, pods) = (quota(hard), by_kind("v1", "Pod").unwrap());
        let mut one = pod(json!({}));
        let usage: Vec<(String, i128)> = quota.usage(pods, &one, NOW).into_iter().collect();
        let expect = [
            ("count/pods", 1000),
            ("cpu", 250),
            ("limits.cpu", 1000),
            ("pods", 1000),
            ("requests.x.io/gpu", 2000),
        ];
        assert_eq!(usage, expect.map(|(name, amount)| (name.to_owned(), amount)));
        one["status"] = json!({"phase": "Succeeded"});
        assert_eq!(quota.usage(pods, &one, NOW), Usage::from([("count/pods".to_owned(), 1000)]));
    }

    #[test]
    fn a_pod_whose_grace_period_is_over_counts_only_as_an_object() {
        let (quota, pods) =
            (quota(json!({"hard": {"pods": "9", "count/pods": "9"}})), by_kind("v1", "Pod").unwrap());
        let mut one = pod(json!({}));
        let time = |text: &str| -> Timestamp { text.parse().unwrap() };
        let used = |pod: &Value, now: &str| quota.usage(pods, pod, time(now)).len();
        one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:10Z".into();
        assert_eq!(
            (grace_end(&one), used(&one, "2027-01-01T00:00:00Z")),
            (None, 2),
            "without a grace period"
        );
        one["metadata"]["deletionGracePeriodSeconds"] = 5.into();
        assert_eq!(grace_end(&one), Some(time("2026-01-01T00:00:15Z")));
        assert_eq!((used(&one, "2026-01-01T00:00:15Z"), used(&one, "2026-01-01T00:00:16Z")), (2, 1));
        one["metadata"]["deletionGracePeriodSeconds"] = i64::MAX.into();
        assert_eq!(grace_end(&one), Some(Timestamp::MAX));
        one["status"] = json!({"phase": "Failed"});
        assert_eq!(grace_end(&one), None);
    }

    #[test]
    fn scopes_select_pods() {
        let in_scope = |scope: Value, more: Value| {
            let quota = quota(json!({"hard": {"pods": "9"}, "scopeSelector": {"matchExpressions": [scope]}}));
            quota.covers(by_kind("v1", "Pod").unwrap(), &pod(more))
        };
        let exists = |name: &str| json!({"scopeName": name, "operator": "Exists"});
        for (scope, more, expect) in [
            (exists("Terminating"), json!({}), false),
            (exists("Terminating"), json!({"activeDeadlineSeconds": 5}), true),
            (exists("NotTerminating"), json!({}), true),
            (exists("BestEffort"), json!({}), false),
            (exists("NotBestEffort"), json!({}), true),
            (exists("PriorityClass"), json!({}), false),
            (
                json!({"scopeName": "PriorityClass", "operator": "In", "values": ["a"]}),
                json!({"priorityClassName": "a"}),
                true,
            ),
            (
                json!({"scopeName": "PriorityClass", "operator": "NotIn", "values": ["a"]}),
                json!({"priorityClassName": "a"}),
                false,
            ),
            (json!({"scopeName": "PriorityClass", "operator": "NotIn", "values": ["a"]}), json!({}), true),
            (json!({"scopeName": "PriorityClass", "operator": "DoesNotExist"}), json!({}), true),
            (exists("CrossNamespacePodAffinity"), json!({}), false),
            (
                exists("CrossNamespacePodAffinity"),
                json!({"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
                    {"podAffinityTerm": {"namespaceSelector": {}}}]}}}),
                true,
            ),
            (exists("Nope"), json!({}), false),
        ] {
            assert_eq!(in_scope(scope.clone(), more.clone()), expect, "{scope} {more}");
        }
        let config_map = by_kind("v1", "ConfigMap").unwrap();
        assert!(
            !quota(json!({"hard": {"configmaps": "1"}, "scopes": ["Terminating"]}))
                .covers(config_map, &json!({}))
        );
    }

    #[test]
    fn other_kinds_are_counted() {
        let all = |api_version: &str, name: &str, object: Value| {
            let usage = usage::of(by_kind(api_version, name).unwrap(), &object, NOW);
            usage
                .into_iter()
                .map(|(name, amount)| format!("{name}={}", amount / 1000))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(all("v1", "Secret", json!({})), "count/secrets=1 secrets=1");
        assert_eq!(all("apps/v1", "ReplicaSet", json!({})), "count/replicasets.apps=1");
        assert_eq!(all("v1", "Event", json!({})), "");
        let service = |spec: Value| all("v1", "Service", json!({"spec": spec}));
        let ports = json!([{"port": 1}, {"port": 2, "nodePort": 30000}]);
        assert_eq!(
            service(json!({"type": "NodePort", "ports": ports})),
            "count/services=1 services=1 services.loadbalancers=0 services.nodeports=2"
        );
        assert_eq!(
            service(json!({"type": "LoadBalancer", "ports": ports, "allocateLoadBalancerNodePorts": false})),
            "count/services=1 services=1 services.loadbalancers=1 services.nodeports=1"
        );
        let claim =
            json!({"spec": {"storageClassName": "fast", "resources": {"requests": {"storage": "1Ki"}}}});
        assert_eq!(
            all("v1", "PersistentVolumeClaim", claim),
            "count/persistentvolumeclaims=1 fast.storageclass.storage.k8s.io/persistentvolumeclaims=1 \
             fast.storageclass.storage.k8s.io/requests.storage=1024 persistentvolumeclaims=1 requests.storage=1024"
        );
    }

    #[test]
    fn devices_of_claims_are_counted_as_extended_resources_of_their_class() {
        let limited =
            ["gpu.deviceclass.resource.k8s.io/devices", "requests.deviceclass.resource.kubernetes.io/gpu"];
        let hard: Map<String, Value> =
            limited.map(|name| (name.to_owned(), json!("9"))).into_iter().collect();
        let (quota, kind) =
            (quota(json!({"hard": hard})), by_kind("resource.k8s.io/v1", "ResourceClaim").unwrap());
        let requests = json!([
            {"name": "a", "exactly": {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 2}},
            {"name": "b", "firstAvailable": [
                {"name": "c", "deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1},
                {"name": "d", "deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 3}]},
        ]);
        let claim = json!({"metadata": {"name": "c"}, "spec": {"devices": {"requests": requests}}});
        let usage = quota.usage(kind, &claim, NOW);
        assert_eq!(limited.map(|name| usage.get(name).copied().unwrap_or(0)), [5000, 5000]);
    }

    #[test]
    fn quotas_of_cpu_require_requests() {
        let (quota, pod) =
            (quota(json!({"hard": {"cpu": "1", "limits.memory": "1", "pods": "1"}})), pod(json!({})));
        assert_eq!(missing_requests(&quota, &pod).unwrap(), "must specify limits.memory for: c");
    }
}

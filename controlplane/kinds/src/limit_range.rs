//! Limit ranges: defaults for containers, and limits on containers, pods and claims.
//!
//! Source: `plugin/pkg/admission/limitranger/admission.go`.

use coracle_values::Quantity;
use serde_json::{Map, Value};

const ANNOTATION: &str = "kubernetes.io/limit-ranger";
/// Maximum number of listed violations. A pod can have very many containers, and each of them can violate each limit.
const MAX_PROBLEMS: usize = 100;

/// Requests and limits of a container, pod or claim, which a limit range restricts.
struct Usage<'a> {
    requests: &'a dyn Fn(&str) -> Option<Quantity>,
    limits: &'a dyn Fn(&str) -> Option<Quantity>,
}

/// Sets missing requests and limits of a pod's containers, and records the set values in an annotation.
pub fn complete(limit_range: &Value, pod: &mut Value) {
    let mut notes = Vec::new();
    for limit in limits(limit_range, "Container") {
        for (list, what) in [("containers", "container"), ("initContainers", "init container")] {
            let containers = pod["spec"].get_mut(list).and_then(Value::as_array_mut);
            for container in containers.into_iter().flatten().filter_map(Value::as_object_mut) {
                complete_container(limit, container, what, &mut notes);
            }
        }
    }
    if notes.is_empty() {
        return;
    }
    let Some(metadata) = pod["metadata"].as_object_mut() else { return };
    let annotations = metadata.entry("annotations").or_insert_with(|| Map::new().into());
    if let Some(annotations) = annotations.as_object_mut() {
        let text = format!("LimitRanger plugin set: {}", notes.join("; "));
        annotations.insert(ANNOTATION.to_owned(), text.into());
    }
}

fn complete_container(
    limit: &Value,
    container: &mut Map<String, Value>,
    what: &str,
    notes: &mut Vec<String>,
) {
    let name = container.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    for (from, to, word) in [("defaultRequest", "requests", "request"), ("default", "limits", "limit")] {
        let defaults = limit[from].as_object().into_iter().flatten();
        let resources = container.entry("resources").or_insert_with(|| Map::new().into());
        let Some(resources) = resources.as_object_mut() else { return };
        let known = resources.get(to).and_then(Value::as_object);
        let missing: Vec<_> = defaults
            .filter(|(resource, _)| known.is_none_or(|known| !known.contains_key(*resource)))
            .map(|(resource, amount)| (resource.clone(), amount.clone()))
            .collect();
        if missing.is_empty() {
            continue;
        }
        let mut names: Vec<&str> = missing.iter().map(|(resource, _)| resource.as_str()).collect();
        names.sort_unstable();
        notes.push(format!("{} {word} for {what} {name}", names.join(", ")));
        let list = resources.entry(to).or_insert_with(|| Map::new().into());
        if let Some(list) = list.as_object_mut() {
            list.extend(missing);
        }
    }
}

/// The first [`MAX_PROBLEMS`] violations of a limit range by a pod.
pub fn check_pod(limit_range: &Value, pod: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    for limit in limits(limit_range, "Container") {
        for list in ["containers", "initContainers"] {
            for container in items(&pod["spec"][list]) {
                let amount = |list: &str, name: &str| quantity(&container["resources"][list][name]);
                let usage = Usage {
                    requests: &|name| amount("requests", name),
                    limits: &|name| amount("limits", name),
                };
                check(limit, "Container", &usage, &mut problems);
            }
        }
    }
    for limit in limits(limit_range, "Pod") {
        let usage = Usage {
            requests: &|name| pod_amount(pod, "requests", name),
            limits: &|name| pod_amount(pod, "limits", name),
        };
        check(limit, "Pod", &usage, &mut problems);
    }
    problems
}

/// The violations of a limit range by a claim. Only its requests count.
pub fn check_claim(limit_range: &Value, claim: &Value) -> Vec<String> {
    let kind = "PersistentVolumeClaim";
    let mut problems = Vec::new();
    let request = |name: &str| quantity(&claim["spec"]["resources"]["requests"][name]);
    for limit in limits(limit_range, kind) {
        let usage = Usage { requests: &request, limits: &|_| None };
        for (name, enforced) in amounts(&limit["min"]) {
            problems.extend(below_minimum(kind, name, enforced, &usage));
        }
        for (name, enforced) in amounts(&limit["max"]) {
            problems.extend(match request(name) {
                None => {
                    Some(format!("maximum {name} usage per {kind} is {enforced}.  No request is specified"))
                }
                Some(request) if request > enforced => {
                    Some(format!("maximum {name} usage per {kind} is {enforced}, but request is {request}"))
                }
                Some(_) => None,
            });
        }
    }
    problems
}

/// Adds the violations of one limit, up to [`MAX_PROBLEMS`] violations in all.
fn check(limit: &Value, kind: &str, usage: &Usage<'_>, problems: &mut Vec<String>) {
    if problems.len() >= MAX_PROBLEMS {
        return;
    }
    for (name, enforced) in amounts(&limit["min"]) {
        problems.extend(below_minimum(kind, name, enforced, usage));
    }
    for (name, enforced) in amounts(&limit["max"]) {
        problems.extend(above_maximum(kind, name, enforced, usage));
    }
    for (name, enforced) in amounts(&limit["maxLimitRequestRatio"]) {
        problems.extend(above_ratio(kind, name, enforced, usage));
    }
    problems.truncate(MAX_PROBLEMS);
}

fn below_minimum(kind: &str, name: &str, enforced: Quantity, usage: &Usage<'_>) -> Option<String> {
    let head = format!("minimum {name} usage per {kind} is {enforced}");
    match ((usage.requests)(name), (usage.limits)(name)) {
        (None, _) => Some(format!("{head}.  No request is specified")),
        (Some(request), _) if request < enforced => Some(format!("{head}, but request is {request}")),
        (_, Some(limit)) if limit < enforced => Some(format!("{head}, but limit is {limit}")),
        _ => None,
    }
}

fn above_maximum(kind: &str, name: &str, enforced: Quantity, usage: &Usage<'_>) -> Option<String> {
    let head = format!("maximum {name} usage per {kind} is {enforced}");
    match ((usage.requests)(name), (usage.limits)(name)) {
        (_, None) => Some(format!("{head}.  No limit is specified")),
        (_, Some(limit)) if limit > enforced => Some(format!("{head}, but limit is {limit}")),
        (Some(request), _) if request > enforced => Some(format!("{head}, but request is {request}")),
        _ => None,
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio is compared as upstream does, in floating point")]
fn above_ratio(kind: &str, name: &str, enforced: Quantity, usage: &Usage<'_>) -> Option<String> {
    let head = format!("{name} max limit to request ratio per {kind} is {enforced}");
    let positive = |amount: Option<Quantity>| amount.filter(|amount| amount.signum() > 0);
    let Some(request) = positive((usage.requests)(name)) else {
        return Some(format!("{head}, but no request is specified or request is 0"));
    };
    let Some(limit) = positive((usage.limits)(name)) else {
        return Some(format!("{head}, but no limit is specified or limit is 0"));
    };
    let ratio = limit.millis() as f64 / request.millis() as f64;
    let is_above = ratio > enforced.millis() as f64 / 1000.0;
    is_above.then(|| format!("{head}, but provided ratio is {ratio:.6}"))
}

/// The amount that a pod needs: the larger of two amounts. One is the sum of its containers and sidecars, the other is
/// the largest init container with the sidecars before it. Pod-level CPU and memory replace the result. `None` if no
/// container has the amount.
///
/// Source: `podRequests` and `podLimits` of `plugin/pkg/admission/limitranger`.
fn pod_amount(pod: &Value, list: &str, name: &str) -> Option<Quantity> {
    let whole = quantity(&pod["spec"]["resources"][list][name]);
    if whole.is_some() && matches!(name, "cpu" | "memory") {
        return whole;
    }
    let amount = |container: &Value| quantity(&container["resources"][list][name]);
    let (mut sidecars, mut largest) = (None, None);
    for init in items(&pod["spec"]["initContainers"]) {
        let with_sidecars = sum(sidecars, amount(init));
        if init["restartPolicy"] == "Always" {
            sidecars = with_sidecars;
        }
        largest = largest.max(with_sidecars);
    }
    let running = items(&pod["spec"]["containers"]).map(amount).fold(None, sum);
    sum(running, sidecars).max(largest)
}

/// The sum of two amounts, of which either can be absent.
fn sum(left: Option<Quantity>, right: Option<Quantity>) -> Option<Quantity> {
    match (left, right) {
        (Some(left), Some(right)) => Some(left.plus(right)),
        (left, right) => left.or(right),
    }
}

fn limits<'a>(limit_range: &'a Value, kind: &'a str) -> impl Iterator<Item = &'a Value> {
    items(&limit_range["spec"]["limits"]).filter(move |limit| limit["type"] == kind)
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn amounts(list: &Value) -> impl Iterator<Item = (&String, Quantity)> {
    list.as_object().into_iter().flatten().filter_map(|(name, amount)| Some((name, quantity(amount)?)))
}

fn quantity(value: &Value) -> Option<Quantity> {
    Quantity::parse(value.as_str()?).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(resources: &Value) -> Value {
        json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "resources": resources}]}})
    }

    #[test]
    fn missing_requests_and_limits_are_set_and_noted() {
        let range = json!({"spec": {"limits": [{"type": "Container",
            "default": {"cpu": "500m", "memory": "1Gi"}, "defaultRequest": {"cpu": "100m", "memory": "1Gi"}}]}});
        let mut object = pod(&json!({"requests": {"cpu": "200m"}}));
        complete(&range, &mut object);
        let expect =
            json!({"requests": {"cpu": "200m", "memory": "1Gi"}, "limits": {"cpu": "500m", "memory": "1Gi"}});
        assert_eq!(object["spec"]["containers"][0]["resources"], expect);
        assert_eq!(
            object["metadata"]["annotations"][ANNOTATION],
            "LimitRanger plugin set: memory request for container c; cpu, memory limit for container c"
        );
        let again = object.clone();
        complete(&range, &mut object);
        assert_eq!(object, again);
    }

    #[test]
    fn a_pod_with_many_containers_has_few_listed_violations() {
        let limit = json!({"type": "Container", "min": {"cpu": "1", "memory": "1Gi", "a.io/b": "1"}});
        let containers: Vec<Value> = (0..1000).map(|at| json!({"name": format!("c{at}")})).collect();
        let pod = json!({"spec": {"containers": containers}});
        assert_eq!(check_pod(&json!({"spec": {"limits": [limit]}}), &pod).len(), MAX_PROBLEMS);
    }

    #[test]
    fn pods_and_claims_keep_to_the_limits() {
        let range = |kind: &str, rules: Value| {
            let mut limit = rules;
            limit["type"] = kind.into();
            json!({"spec": {"limits": [limit]}})
        };
        let small = pod(&json!({"requests": {"cpu": "50m"}, "limits": {"cpu": "500m"}}));
        let cases = [
            (
                "Container",
                json!({"min": {"cpu": "100m"}}),
                "minimum cpu usage per Container is 100m, but request is 50m",
            ),
            (
                "Container",
                json!({"max": {"cpu": "300m"}}),
                "maximum cpu usage per Container is 300m, but limit is 500m",
            ),
            (
                "Container",
                json!({"max": {"memory": "1Gi"}}),
                "maximum memory usage per Container is 1Gi.  No limit is specified",
            ),
            (
                "Container",
                json!({"maxLimitRequestRatio": {"cpu": "2"}}),
                "cpu max limit to request ratio per Container is 2, but provided ratio is 10.000000",
            ),
            ("Pod", json!({"min": {"cpu": "60m"}}), "minimum cpu usage per Pod is 60m, but request is 50m"),
        ];
        for (kind, rules, expect) in cases {
            assert_eq!(check_pod(&range(kind, rules), &small), [expect]);
        }
        assert!(check_pod(&range("Pod", json!({"max": {"cpu": "1"}})), &small).is_empty());
        let mut whole = small.clone();
        whole["spec"]["resources"] = json!({"requests": {"cpu": "60m"}, "limits": {"cpu": "2"}});
        let rules = json!({"min": {"cpu": "60m"}, "max": {"cpu": "1"}});
        let expect = "maximum cpu usage per Pod is 1, but limit is 2";
        assert_eq!(check_pod(&range("Pod", rules), &whole), [expect], "pod-level resources count");
        let with = |memory: &str| json!({"name": memory.to_lowercase(), "resources": {"limits": {"memory": memory}, "requests": {"memory": memory}}});
        let mut sidecar = with("5Mi");
        sidecar["restartPolicy"] = "Always".into();
        let parts = json!({"spec": {"initContainers": [with("19Mi"), sidecar, with("20Mi")], "containers": [with("10Mi")]}});
        let expect = "maximum memory usage per Pod is 24Mi, but limit is 25Mi";
        assert_eq!(check_pod(&range("Pod", json!({"max": {"memory": "24Mi"}})), &parts), [expect]);
        assert!(check_pod(&range("Pod", json!({"max": {"memory": "25Mi"}})), &parts).is_empty());
        let claim = json!({"spec": {"resources": {"requests": {"storage": "5Gi"}}}});
        let limits =
            range("PersistentVolumeClaim", json!({"max": {"storage": "2Gi"}, "min": {"storage": "1Gi"}}));
        let expect = "maximum storage usage per PersistentVolumeClaim is 2Gi, but request is 5Gi";
        assert_eq!(check_claim(&limits, &claim), [expect]);
    }
}

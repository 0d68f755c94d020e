//! Pods and pod templates.

use serde_json::{Map, Value, json};

use super::container::{container, requests_from_limits};
use super::volume::volume;
use super::{child, child_of, each, fill};
use crate::pod_level;

const GRACE_PERIOD: &str = "terminationGracePeriodSeconds";
const LISTS: [&str; 3] = ["containers", "initContainers", "ephemeralContainers"];

/// Sets the defaults of a pod: the defaults of pod templates, and the defaults that templates do not have.
pub fn pod(pod: &mut Value) {
    child(pod, "metadata");
    addresses(pod);
    let Some(spec) = child(pod, "spec") else { return };
    // A negative grace period of a pod counts as one second. This does not apply to templates. Source:
    // `Convert_v1_Pod_To_core_Pod` of `core/v1`.
    if spec.get(GRACE_PERIOD).and_then(Value::as_i64).is_some_and(|seconds| seconds < 0) {
        spec.insert(GRACE_PERIOD.to_owned(), 1.into());
    }
    pod_spec(spec);
    for list in ["containers", "initContainers"] {
        for container in each(spec, list) {
            requests_from_limits(container);
        }
    }
    whole_resources(spec);
    fill(spec, "enableServiceLinks", true);
    if spec.get("hostNetwork").and_then(Value::as_bool) == Some(true) {
        for list in ["containers", "initContainers"] {
            for container in each(spec, list) {
                host_ports(container);
            }
        }
    }
}

/// Defaults of pod-level resources. Limits of huge pages come from the containers. Requests come from the containers.
/// If the containers have no requests, the requests come from the limits. Source: `defaultHugePagePodLimits` and
/// `defaultPodRequests` of `core/v1`.
fn whole_resources(spec: &mut Map<String, Value>) {
    let Some(resources) = spec.get("resources").filter(|resources| resources.is_object()) else { return };
    let list = |name: &str| resources[name].as_object().cloned().unwrap_or_default();
    let (mut limits, mut requests) = (list("limits"), list("requests"));
    if limits.is_empty() && requests.is_empty() {
        return;
    }
    let containers = Value::Object(spec.clone());
    for (name, amount) in pod_level::sum(&containers, "limits") {
        if pod_level::is_huge_pages(&name) && !requests.contains_key(&name) {
            limits.entry(name).or_insert_with(|| amount.to_string().into());
        }
    }
    if !limits.is_empty() {
        for (name, amount) in pod_level::sum(&containers, "requests") {
            if pod_level::is_supported(&name) && !pod_level::is_huge_pages(&name) {
                requests.entry(name).or_insert_with(|| amount.to_string().into());
            }
        }
        for (name, amount) in &limits {
            if pod_level::is_supported(name) {
                requests.entry(name.clone()).or_insert_with(|| amount.clone());
            }
        }
    }
    let Some(resources) = spec.get_mut("resources").and_then(Value::as_object_mut) else { return };
    for (name, list) in [("limits", limits), ("requests", requests)] {
        if !list.is_empty() {
            resources.insert(name.to_owned(), list.into());
        }
    }
}

/// Makes `podIP` the first of `podIPs`, as upstream's conversion. If they differ, the value of `podIP` is used.
pub fn addresses(pod: &mut Value) {
    let Some(status) = pod.get_mut("status").and_then(Value::as_object_mut) else { return };
    let first = status.get("podIPs").and_then(|list| list.get(0)).map(|first| first["ip"].clone());
    match status.get("podIP").filter(|ip| ip.as_str().is_some_and(|ip| !ip.is_empty())) {
        Some(ip) if first.as_ref() != Some(ip) => {
            let list = json!([{"ip": ip}]);
            status.insert("podIPs".to_owned(), list);
        }
        None => {
            if let Some(first) = first {
                status.insert("podIP".to_owned(), first);
            }
        }
        Some(_) => {}
    }
}

/// Sets the defaults of a pod template.
pub fn template(template: &mut Map<String, Value>) {
    child_of(template, "metadata");
    if let Some(spec) = child_of(template, "spec") {
        pod_spec(spec);
    }
}

fn pod_spec(spec: &mut Map<String, Value>) {
    fill(spec, "dnsPolicy", "ClusterFirst");
    fill(spec, "restartPolicy", "Always");
    fill(spec, GRACE_PERIOD, 30);
    fill(spec, "schedulerName", "default-scheduler");
    child_of(spec, "securityContext");
    service_account(spec);
    for item in each(spec, "volumes") {
        volume(item);
    }
    for list in LISTS {
        for item in each(spec, list) {
            container(item);
        }
    }
}

/// Copies the name of the service account to the deprecated field.
fn service_account(spec: &mut Map<String, Value>) {
    let read = |name: &str| spec.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let name = read("serviceAccountName").or_else(|| read("serviceAccount")).map(str::to_owned);
    if let Some(name) = name {
        spec.insert("serviceAccount".to_owned(), name.clone().into());
        spec.insert("serviceAccountName".to_owned(), name.into());
    }
}

/// Sets the host port of each container port to the same number, if it is not set. Pods with hostNetwork need this.
fn host_ports(container: &mut Map<String, Value>) {
    for port in each(container, "ports") {
        let number = port.get("containerPort").cloned().unwrap_or_default();
        if port.get("hostPort").is_none_or(|old| old.is_null() || *old == 0) {
            port.insert("hostPort".to_owned(), number);
        }
    }
}

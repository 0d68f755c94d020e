//! Pods and pod templates.

use serde_json::{Map, Value, json};

use super::container::{container, requests_from_limits};
use super::volume::volume;
use super::{child, child_of, each, fill};

const LISTS: [&str; 3] = ["containers", "initContainers", "ephemeralContainers"];

/// Sets the defaults of a pod: those of pod templates, and those that templates do not have.
pub(crate) fn pod(pod: &mut Value) {
    child(pod, "metadata");
    addresses(pod);
    let Some(spec) = child(pod, "spec") else { return };
    pod_spec(spec);
    for list in LISTS {
        for container in each(spec, list) {
            requests_from_limits(container);
        }
    }
    fill(spec, "enableServiceLinks", true);
    if spec.get("hostNetwork").and_then(Value::as_bool) == Some(true) {
        for list in ["containers", "initContainers"] {
            for container in each(spec, list) {
                host_ports(container);
            }
        }
    }
}

/// Makes `podIP` the first of `podIPs`, as upstream's conversion: the older field wins if they differ.
pub(crate) fn addresses(pod: &mut Value) {
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
pub(super) fn template(template: &mut Map<String, Value>) {
    child_of(template, "metadata");
    if let Some(spec) = child_of(template, "spec") {
        pod_spec(spec);
    }
}

fn pod_spec(spec: &mut Map<String, Value>) {
    fill(spec, "dnsPolicy", "ClusterFirst");
    fill(spec, "restartPolicy", "Always");
    fill(spec, "terminationGracePeriodSeconds", 30);
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

/// Copies the field to its deprecated name.
fn service_account(spec: &mut Map<String, Value>) {
    let read = |name: &str| spec.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let name = read("serviceAccountName").or_else(|| read("serviceAccount")).map(str::to_owned);
    if let Some(name) = name {
        spec.insert("serviceAccount".to_owned(), name.clone().into());
        spec.insert("serviceAccountName".to_owned(), name.into());
    }
}

/// With hostNetwork each container port is also the host port.
fn host_ports(container: &mut Map<String, Value>) {
    for port in each(container, "ports") {
        let number = port.get("containerPort").cloned().unwrap_or_default();
        if port.get("hostPort").is_none_or(|old| old.is_null() || *old == 0) {
            port.insert("hostPort".to_owned(), number);
        }
    }
}

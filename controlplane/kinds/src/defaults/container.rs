//! Containers: pull policy, termination message, ports, probes, hooks, environment.

use serde_json::{Map, Value};

use super::{child_of, each, fill, present};

/// Sets the defaults of a container of any list.
pub(super) fn container(container: &mut Map<String, Value>) {
    let policy = pull_policy(container.get("image").and_then(Value::as_str).unwrap_or_default());
    fill(container, "imagePullPolicy", policy);
    fill(container, "terminationMessagePath", "/dev/termination-log");
    fill(container, "terminationMessagePolicy", "File");
    child_of(container, "resources");
    for port in each(container, "ports") {
        fill(port, "protocol", "TCP");
    }
    for variable in each(container, "env") {
        if let Some(field) = present(variable, "valueFrom").and_then(|from| present(from, "fieldRef")) {
            fill(field, "apiVersion", "v1");
        }
    }
    for name in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(probe) = present(container, name) {
            fill_probe(probe);
        }
    }
    if let Some(lifecycle) = present(container, "lifecycle") {
        for hook in ["postStart", "preStop"] {
            if let Some(get) = present(lifecycle, hook).and_then(|hook| present(hook, "httpGet")) {
                http_get(get);
            }
        }
    }
}

/// A resource with a limit but without a request gets the limit as its request.
pub(super) fn requests_from_limits(container: &mut Map<String, Value>) {
    let Some(resources) = present(container, "resources") else { return };
    let Some(limits) = resources.get("limits").and_then(Value::as_object).cloned() else { return };
    let Some(requests) = child_of(resources, "requests") else { return };
    for (name, limit) in limits {
        requests.entry(name).or_insert(limit);
    }
}

/// `Always` for the tag `latest`, which changes; `IfNotPresent` for other tags and for digests.
pub(super) fn pull_policy(image: &str) -> &'static str {
    if image.contains('@') {
        return "IfNotPresent";
    }
    let last = image.rsplit('/').next().unwrap_or(image);
    match last.split_once(':') {
        None | Some((_, "latest")) => "Always",
        Some(_) => "IfNotPresent",
    }
}

fn fill_probe(probe: &mut Map<String, Value>) {
    for (name, value) in
        [("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)]
    {
        // Go clients write 0 for an absent value.
        if probe.get(name).is_none_or(|old| old.is_null() || old == 0) {
            probe.insert(name.to_owned(), value.into());
        }
    }
    if let Some(get) = present(probe, "httpGet") {
        http_get(get);
    }
    if let Some(grpc) = present(probe, "grpc") {
        grpc.entry("service").or_insert_with(|| "".into());
    }
}

fn http_get(get: &mut Map<String, Value>) {
    fill(get, "path", "/");
    fill(get, "scheme", "HTTP");
}

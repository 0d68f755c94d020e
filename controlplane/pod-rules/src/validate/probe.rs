//! Probes and lifecycle hooks.

use serde_json::Value;

use super::{Causes, Path, items, port, text};

/// Checks the probes and hooks of a container.
pub(super) fn all(causes: &mut Causes, path: &Path, container: &Value) {
    for name in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let probe = &container[name];
        if !probe.is_null() {
            self::probe(causes, &path.field(name), probe);
            if name != "readinessProbe" && probe["successThreshold"].as_i64().is_some_and(|count| count != 1)
            {
                causes.invalid(
                    &path.field(name).field("successThreshold"),
                    &probe["successThreshold"],
                    "must be 1",
                );
            }
        }
    }
    if !container["readinessProbe"]["terminationGracePeriodSeconds"].is_null() {
        let value = &container["readinessProbe"]["terminationGracePeriodSeconds"];
        let here = path.field("readinessProbe").field("terminationGracePeriodSeconds");
        causes.invalid(&here, value, "must not be set for readinessProbes");
    }
    for hook in ["postStart", "preStop"] {
        let (here, handler) = (path.field("lifecycle").field(hook), &container["lifecycle"][hook]);
        if !handler.is_null() {
            self::handler(causes, &here, handler, &["exec", "httpGet", "tcpSocket", "sleep"]);
        }
    }
}

/// Checks that hooks sleep at most for the grace period of the pod.
pub(super) fn sleeps(causes: &mut Causes, path: &Path, spec: &Value) {
    let Some(grace) = spec["terminationGracePeriodSeconds"].as_i64() else { return };
    for list in ["containers", "initContainers"] {
        for (index, container) in items(&spec[list]) {
            for hook in ["postStart", "preStop"] {
                let handler = &container["lifecycle"][hook];
                let others = ["exec", "httpGet", "tcpSocket"].iter().any(|kind| !handler[*kind].is_null());
                let seconds = handler["sleep"]["seconds"].as_i64().unwrap_or(0);
                if !handler["sleep"].is_null() && !others && !(0..=grace).contains(&seconds) {
                    let here = path.field(list).index(index).field("lifecycle").field(hook).field("sleep");
                    let detail =
                        format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})");
                    causes.invalid(&here, &seconds.into(), &detail);
                }
            }
        }
    }
}

fn probe(causes: &mut Causes, path: &Path, probe: &Value) {
    handler(causes, path, probe, &["exec", "httpGet", "tcpSocket", "grpc"]);
    for name in
        ["initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"]
    {
        causes.not_negative(&path.field(name), &probe[name]);
    }
    if probe["terminationGracePeriodSeconds"].as_i64().is_some_and(|seconds| seconds <= 0) {
        let here = path.field("terminationGracePeriodSeconds");
        causes.invalid(&here, &probe["terminationGracePeriodSeconds"], "must be greater than 0");
    }
}

/// Checks that a probe has exactly one handler.
fn handler(causes: &mut Causes, path: &Path, handler: &Value, kinds: &[&str]) {
    let given = kinds.iter().filter(|kind| !handler[**kind].is_null());
    let mut count = 0;
    for kind in given {
        let (here, action) = (path.field(kind), &handler[*kind]);
        count += 1;
        if count > 1 {
            causes.forbidden(&here, "may not specify more than 1 handler type");
            continue;
        }
        match *kind {
            "exec" if items(&action["command"]).next().is_none() => {
                causes.required(&here.field("command"), "")
            }
            "httpGet" => http(causes, &here, action),
            "tcpSocket" => port(causes, &here.field("port"), &action["port"]),
            "grpc" => causes.in_range(&here.field("port"), &action["port"], 1..=65_535),
            _ => {}
        }
    }
    if count == 0 {
        causes.required(path, "must specify a handler type");
    }
}

fn http(causes: &mut Causes, path: &Path, action: &Value) {
    if text(&action["path"]).is_empty() {
        causes.required(&path.field("path"), "");
    }
    port(causes, &path.field("port"), &action["port"]);
    causes.one_of(&path.field("scheme"), &action["scheme"], &["HTTP", "HTTPS"]);
    for (_, header) in items(&action["httpHeaders"]) {
        let name = text(&header["name"]);
        let good = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if !good {
            let detail = "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex used for validation is '[-A-Za-z0-9]+')";
            causes.invalid(&path.field("httpHeaders"), &name.into(), detail);
        }
    }
}

fn port(causes: &mut Causes, path: &Path, value: &Value) {
    match value {
        Value::Null => port::target(causes, path, &0.into()),
        value => port::target(causes, path, value),
    }
}

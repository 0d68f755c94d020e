//! Network policies, ingresses, ingress classes, service ranges and addresses. Source:
//! `pkg/apis/networking/validation`.

use std::collections::HashSet;

use ipnetwork::IpNetwork;
use serde_json::Value;

use super::{Causes, Path, format, fully_qualified_name, items, selector, text};

/// Maximum length of the name of an ingress class' controller in bytes.
const MAX_CONTROLLER: usize = 250;
/// The older way to name the class of an ingress.
const CLASS_ANNOTATION: &str = "kubernetes.io/ingress.class";
const PATH_TYPES: &[&str] = &["Exact", "ImplementationSpecific", "Prefix"];

pub(crate) fn network_policy(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    selector::label_selector(causes, &path.field("podSelector"), &spec["podSelector"]);
    for (direction, peers) in [("ingress", "from"), ("egress", "to")] {
        for (index, rule) in items(&spec[direction]) {
            let here = path.field(direction).index(index);
            for (at, port) in items(&rule["ports"]) {
                policy_port(causes, &here.field("ports").index(at), port);
            }
            for (at, peer) in items(&rule[peers]) {
                policy_peer(causes, &here.field(peers).index(at), peer);
            }
        }
    }
    let types = path.field("policyTypes");
    if items(&spec["policyTypes"]).count() > 2 {
        causes.invalid(&types, &spec["policyTypes"], "may not specify more than two policyTypes");
        return;
    }
    for (index, kind) in items(&spec["policyTypes"]) {
        causes.optional_word(&types.index(index), kind, &["Ingress", "Egress"]);
    }
}

fn policy_port(causes: &mut Causes, path: &Path, port: &Value) {
    causes.optional_word(&path.field("protocol"), &port["protocol"], &["TCP", "UDP", "SCTP"]);
    let number = &port["port"];
    if let Some(first) = number.as_i64() {
        for problem in format::port_number(first) {
            causes.invalid(&path.field("port"), number, &problem);
        }
        if let Some(last) = port["endPort"].as_i64() {
            if last < first {
                // As upstream, the error shows `port`, not `endPort`.
                causes.invalid(&path.field("endPort"), number, "must be greater than or equal to `port`");
            }
            for problem in format::port_number(last) {
                causes.invalid(&path.field("endPort"), &port["endPort"], &problem);
            }
        }
    } else if !port["endPort"].is_null() {
        let detail = if number.is_null() {
            "may not be specified when `port` is not specified"
        } else {
            "may not be specified when `port` is non-numeric"
        };
        causes.invalid(&path.field("endPort"), &port["endPort"], detail);
    }
    if let Some(name) = number.as_str() {
        causes.format(&path.field("port"), name, format::port_name(name));
    }
}

fn policy_peer(causes: &mut Causes, path: &Path, peer: &Value) {
    let present = |field: &str| !peer[field].is_null();
    for selector in ["podSelector", "namespaceSelector"] {
        if present(selector) {
            selector::label_selector(causes, &path.field(selector), &peer[selector]);
        }
    }
    let selects = present("podSelector") || present("namespaceSelector");
    match (selects, present("ipBlock")) {
        (false, false) => causes.required(path, "must specify a peer"),
        (selects, true) => {
            ip_block(causes, &path.field("ipBlock"), &peer["ipBlock"]);
            if selects {
                causes.forbidden(path, "may not specify both ipBlock and another peer");
            }
        }
        (true, false) => {}
    }
}

fn ip_block(causes: &mut Causes, path: &Path, block: &Value) {
    let cidr = text(&block["cidr"]);
    if cidr.is_empty() {
        causes.required(&path.field("cidr"), "");
        return;
    }
    causes.format(&path.field("cidr"), cidr, format::cidr(cidr));
    let Ok(whole) = cidr.parse::<IpNetwork>() else { return };
    for (index, except) in items(&block["except"]) {
        let (here, part) = (path.field("except").index(index), text(except));
        causes.format(&here, part, format::cidr(part));
        let Ok(part) = part.parse::<IpNetwork>() else { continue };
        if !whole.contains(part.network()) || part.prefix() <= whole.prefix() {
            causes.invalid(&here, except, "must be a strict subset of `cidr`");
        }
    }
}

pub(crate) fn ingress(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let has_rules = items(&spec["rules"]).next().is_some();
    if !has_rules && spec["defaultBackend"].is_null() {
        causes.invalid(&path, &spec["rules"], "either `defaultBackend` or `rules` must be specified");
    }
    if !spec["defaultBackend"].is_null() {
        backend(causes, &path.field("defaultBackend"), &spec["defaultBackend"]);
    }
    for (index, rule) in items(&spec["rules"]) {
        let here = path.field("rules").index(index);
        host(causes, &here.field("host"), &rule["host"]);
        let paths = here.field("http").field("paths");
        if !rule["http"].is_null() && items(&rule["http"]["paths"]).next().is_none() {
            causes.required(&paths, "");
        }
        for (at, one) in items(&rule["http"]["paths"]) {
            http_path(causes, &paths.index(at), one);
        }
    }
    for (index, tls) in items(&spec["tls"]) {
        let here = path.field("tls").index(index);
        for (at, name) in items(&tls["hosts"]) {
            causes.format(&here.field("hosts").index(at), text(name), format::host_pattern(text(name)));
        }
        let secret = text(&tls["secretName"]);
        if !secret.is_empty() {
            causes.format(&here.field("secretName"), secret, format::dns1123_subdomain(secret));
        }
    }
    if let Some(class) = spec["ingressClassName"].as_str() {
        causes.format(&path.field("ingressClassName"), class, format::dns1123_subdomain(class));
        let annotation = &object["metadata"]["annotations"][CLASS_ANNOTATION];
        if old.is_none() && annotation.as_str().is_some_and(|annotation| annotation != class) {
            let path = Path::root("annotations").field(CLASS_ANNOTATION);
            causes.invalid(&path, annotation, "must match `ingressClassName` when both are specified");
        }
    }
}

/// Checks the addresses of the load balancer of an ingress.
pub(super) fn ingress_status(causes: &mut Causes, status: &Value) {
    let path = Path::root("status").field("loadBalancer").field("ingress");
    for (index, point) in items(&status["loadBalancer"]["ingress"]) {
        balancer_point(causes, &path.index(index), point);
    }
}

/// Checks the IP address and the host name of one entry of a load balancer's status.
pub(super) fn balancer_point(causes: &mut Causes, path: &Path, point: &Value) {
    let (ip, name) = (text(&point["ip"]), text(&point["hostname"]));
    if !ip.is_empty() {
        causes.format(&path.field("ip"), ip, format::ip(ip));
    }
    if !name.is_empty() {
        causes.format(&path.field("hostname"), name, format::dns1123_subdomain(name));
        if format::is_address(name) {
            causes.invalid(&path.field("hostname"), &name.into(), "must be a DNS name, not an IP address");
        }
    }
}

fn host(causes: &mut Causes, path: &Path, host: &Value) {
    let name = text(host);
    if name.is_empty() {
        return;
    }
    if format::is_address(name) {
        causes.invalid(path, host, "must be a DNS name, not an IP address");
    }
    causes.format(path, name, format::host_pattern(name));
}

fn http_path(causes: &mut Causes, path: &Path, one: &Value) {
    let (kind, here) = (&one["pathType"], text(&one["path"]));
    match kind.as_str() {
        None => return causes.required(&path.field("pathType"), "pathType must be specified"),
        Some("Exact" | "Prefix") => plain_path(causes, &path.field("path"), here),
        Some("ImplementationSpecific") => {
            if !here.is_empty() && !here.starts_with('/') {
                causes.invalid(&path.field("path"), &here.into(), "must be an absolute path");
            }
        }
        Some(_) => causes.unsupported(&path.field("pathType"), kind, PATH_TYPES),
    }
    backend(causes, &path.field("backend"), &one["backend"]);
}

/// Checks a path that is compared as text: the whole path, or its segments.
fn plain_path(causes: &mut Causes, path: &Path, here: &str) {
    if !here.starts_with('/') {
        causes.invalid(path, &here.into(), "must be an absolute path");
    }
    for bad in ["//", "/./", "/../", "%2f", "%2F"].iter().filter(|bad| here.contains(**bad)) {
        causes.invalid(path, &here.into(), &format!("must not contain '{bad}'"));
    }
    for bad in ["/..", "/."].iter().filter(|bad| here.ends_with(**bad)) {
        causes.invalid(path, &here.into(), &format!("cannot end with '{bad}'"));
    }
}

fn backend(causes: &mut Causes, path: &Path, backend: &Value) {
    let (service, resource) = (&backend["service"], &backend["resource"]);
    match (service.is_null(), resource.is_null()) {
        (false, false) => causes.invalid(path, &"".into(), "cannot set both resource and service backends"),
        (true, true) => causes.invalid(path, &"".into(), "resource or service backend is required"),
        (true, false) => {
            let path = path.field("resource");
            if let Some(group) = resource["apiGroup"].as_str() {
                causes.format(&path.field("apiGroup"), group, format::dns1123_subdomain(group));
            }
            segments(causes, &path, resource);
        }
        (false, true) => service_backend(causes, path, service),
    }
}

/// Checks the kind and the name of a reference: each is a segment of a path.
fn segments(causes: &mut Causes, path: &Path, reference: &Value) {
    for field in ["kind", "name"] {
        match text(&reference[field]) {
            "" => causes.required(&path.field(field), ""),
            value => causes.format(&path.field(field), value, format::path_segment(value)),
        }
    }
}

/// Checks the service of a backend. `backend` is the path of the backend.
fn service_backend(causes: &mut Causes, backend: &Path, service: &Value) {
    let path = &backend.field("service");
    let name = text(&service["name"]);
    match name {
        "" => causes.required(&path.field("name"), ""),
        name => causes.format(&path.field("name"), name, format::dns1123_label(name)),
    }
    let port = &service["port"];
    let (port_name, number) = (text(&port["name"]), port["number"].as_i64().unwrap_or(0));
    match (port_name, number) {
        ("", 0) => causes.required(backend, "port name or number is required"),
        ("", number) => {
            for problem in format::port_number(number) {
                causes.invalid(&path.field("port").field("number"), &port["number"], &problem);
            }
        }
        (name, 0) => causes.format(&path.field("port").field("name"), name, format::port_name(name)),
        _ => causes.invalid(backend, &"".into(), "cannot set both port name & port number"),
    }
}

pub(crate) fn ingress_class(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let controller = text(&spec["controller"]);
    if old.is_some_and(|old| old["spec"]["controller"] != spec["controller"]) {
        causes.invalid(&path.field("controller"), &controller.into(), "field is immutable");
    }
    if controller.len() > MAX_CONTROLLER {
        causes.too_long(&path.field("controller"), MAX_CONTROLLER);
    }
    fully_qualified_name::prefixed_path(causes, &path.field("controller"), controller);
    let parameters = &spec["parameters"];
    if parameters.is_null() {
        return;
    }
    let here = path.field("parameters");
    if let Some(group) = parameters["apiGroup"].as_str() {
        causes.format(&here.field("apiGroup"), group, format::dns1123_subdomain(group));
    }
    segments(causes, &here, parameters);
    let (path, namespace) = (here.field("namespace"), parameters["namespace"].as_str());
    match (parameters["scope"].as_str(), namespace) {
        (None, _) => causes.required(&here.field("scope"), ""),
        (Some("Namespace"), None) => causes.required(&path, "`parameters.scope` is set to 'Namespace'"),
        (Some("Namespace"), Some(name)) => causes.format(&path, name, format::dns1123_label(name)),
        (Some("Cluster"), None) => {}
        (Some("Cluster"), Some(_)) => causes.forbidden(&path, "`parameters.scope` is set to 'Cluster'"),
        (Some(_), _) => {
            causes.unsupported(&here.field("scope"), &parameters["scope"], &["Cluster", "Namespace"]);
        }
    }
}

pub(crate) fn service_cidr(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec").field("cidrs"), &object["spec"]);
    let ranges = |object: &Value| -> Vec<String> {
        items(&object["spec"]["cidrs"]).map(|(_, cidr)| text(cidr).to_owned()).collect()
    };
    let now = ranges(object);
    if let Some(before) = old.map(ranges) {
        // A second range may be added to a single range (dual-stack).
        if before.len() == now.len() || (before.len(), now.len()) == (1, 2) {
            for (index, (_, cidr)) in before.iter().zip(&now).enumerate().filter(|(_, (was, is))| was != is) {
                causes.invalid(&path.index(index), &cidr.as_str().into(), "field is immutable");
            }
        } else {
            causes.invalid(&path, &spec["cidrs"], "field is immutable");
        }
        if (before.len(), now.len()) != (1, 2) {
            return;
        }
    }
    match now.len() {
        0 => return causes.required(&path, "at least one CIDR required"),
        1 | 2 => {}
        _ => return causes.invalid(&path, spec, "may only hold up to 2 values"),
    }
    let mut families = HashSet::new();
    for (index, cidr) in items(&spec["cidrs"]) {
        let here = path.index(index);
        causes.format(&here, text(cidr), format::canonical_cidr(text(cidr)));
        let Ok(network) = text(cidr).parse::<IpNetwork>() else { continue };
        if !families.insert(network.is_ipv4()) {
            let detail =
                "may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64";
            causes.invalid(&path, &spec["cidrs"], detail);
        }
    }
}

pub(crate) fn ip_address(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let name = &object["metadata"]["name"];
    causes.format(&Path::root("metadata").field("name"), text(name), format::canonical_ip(text(name)));
    let prefix = text(&object["metadata"]["generateName"]);
    if !prefix.is_empty() {
        let here = Path::root("metadata").field("generateName");
        causes.format(&here, prefix, format::canonical_ip(prefix));
    }
    let (path, parent) = (Path::root("spec").field("parentRef"), &object["spec"]["parentRef"]);
    if old.is_some_and(|old| old["spec"]["parentRef"] != *parent) {
        causes.invalid(&path, parent, "field is immutable");
    }
    if parent.is_null() {
        causes.required(&path, "");
        return;
    }
    let group = text(&parent["group"]);
    if !group.is_empty() {
        causes.format(&path.field("group"), group, format::dns1123_subdomain(group));
    }
    for field in ["resource", "name", "namespace"] {
        match text(&parent[field]) {
            "" if field != "namespace" => causes.required(&path.field(field), ""),
            value => causes.format(&path.field(field), value, format::path_segment(value)),
        }
    }
}

#[cfg(test)]
mod tests;

//! Network policies, ingresses, ingress classes, service ranges and addresses. Source:
//! `pkg/apis/networking/validation`.

use std::collections::HashSet;
use std::net::IpAddr;

use ipnetwork::IpNetwork;
use serde_json::Value;

use super::{Causes, Path, format, items, selector, text};

const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];
/// Maximum length of the name of an ingress class' controller in bytes.
const MAX_CONTROLLER: usize = 250;
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
    let protocol = &port["protocol"];
    if protocol.is_null() || !PROTOCOLS.contains(&text(protocol)) {
        causes.unsupported(&path.field("protocol"), protocol, &["TCP", "UDP", "SCTP"]);
    }
    let (number, last) = (&port["port"], &port["endPort"]);
    if let Some(first) = number.as_i64() {
        for problem in format::port_number(first) {
            causes.invalid(&path.field("port"), number, &problem);
        }
        end_port(causes, &path.field("endPort"), port);
    } else if !last.is_null() {
        let state = if number.is_null() { "not specified" } else { "non-numeric" };
        let detail = format!("may not be specified when `port` is {state}");
        causes.invalid(&path.field("endPort"), last, &detail);
    }
    if let Some(name) = number.as_str() {
        causes.format(&path.field("port"), name, format::port_name(name));
    }
}

/// Checks the last port of a range. Upstream shows the first port if the range is empty.
fn end_port(causes: &mut Causes, path: &Path, port: &Value) {
    let (first, last) = (&port["port"], &port["endPort"]);
    let Some(number) = last.as_i64() else { return };
    if first.as_i64().is_some_and(|first| number < first) {
        causes.invalid(path, first, "must be greater than or equal to `port`");
    }
    for problem in format::port_number(number) {
        causes.invalid(path, last, &problem);
    }
}

fn policy_peer(causes: &mut Causes, path: &Path, peer: &Value) {
    let present = |field: &str| !peer[field].is_null();
    for selector in ["podSelector", "namespaceSelector"] {
        if present(selector) {
            selector::label_selector(causes, &path.field(selector), &peer[selector]);
        }
    }
    if present("ipBlock") {
        ip_block(causes, &path.field("ipBlock"), &peer["ipBlock"]);
    }
    let selects = present("podSelector") || present("namespaceSelector");
    match (selects, present("ipBlock")) {
        (false, false) => causes.required(path, "must specify a peer"),
        (true, true) => causes.forbidden(path, "may not specify both ipBlock and another peer"),
        (true, false) | (false, true) => {}
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

pub(crate) fn ingress(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
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
            host_name(causes, &here.field("hosts").index(at), text(name));
        }
        let secret = text(&tls["secretName"]);
        if !secret.is_empty() {
            causes.format(&here.field("secretName"), secret, format::dns1123_subdomain(secret));
        }
    }
    if let Some(class) = spec["ingressClassName"].as_str() {
        causes.format(&path.field("ingressClassName"), class, format::dns1123_subdomain(class));
    }
}

fn host(causes: &mut Causes, path: &Path, host: &Value) {
    let name = text(host);
    if name.is_empty() {
        return;
    }
    if name.parse::<IpAddr>().is_ok() {
        causes.invalid(path, host, "must be a DNS name, not an IP address");
    }
    host_name(causes, path, name);
}

/// Checks a subdomain, or `*.` and a subdomain.
fn host_name(causes: &mut Causes, path: &Path, name: &str) {
    let problems = if name.contains('*') { wildcard(name) } else { format::dns1123_subdomain(name) };
    causes.format(path, name, problems);
}

fn wildcard(name: &str) -> Vec<String> {
    const TEXT: &str = "a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, which must consist of lower case alphanumeric characters, '-' or '.' and end with an alphanumeric character (e.g. '*.example.com', regex used for validation is '\\*\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
    let rest = name.strip_prefix("*.").unwrap_or_default();
    let is_wildcard = !format::dns1123_subdomain(rest).iter().any(|text| text.starts_with("a lowercase"));
    let checks = [(name.len() > 253, "must be no more than 253 characters"), (!is_wildcard, TEXT)];
    checks.into_iter().filter(|(is_wrong, _)| *is_wrong).map(|(_, text)| text.to_owned()).collect()
}

fn http_path(causes: &mut Causes, path: &Path, one: &Value) {
    let kind = &one["pathType"];
    if kind.is_null() {
        return causes.required(&path.field("pathType"), "pathType must be specified");
    }
    if !PATH_TYPES.iter().any(|known| kind == known) {
        causes.unsupported(&path.field("pathType"), kind, PATH_TYPES);
    }
    let here = text(&one["path"]);
    let (is_exact, is_specific) = (kind == "Exact" || kind == "Prefix", kind == "ImplementationSpecific");
    if (is_exact || (is_specific && !here.is_empty())) && !here.starts_with('/') {
        causes.invalid(&path.field("path"), &here.into(), "must be an absolute path");
    }
    if is_exact {
        for bad in ["//", "/./", "/../", "%2f", "%2F"].iter().filter(|bad| here.contains(**bad)) {
            causes.invalid(&path.field("path"), &one["path"], &format!("must not contain '{bad}'"));
        }
        for bad in ["/..", "/."].iter().filter(|bad| here.ends_with(**bad)) {
            causes.invalid(&path.field("path"), &one["path"], &format!("cannot end with '{bad}'"));
        }
    }
    backend(causes, &path.field("backend"), &one["backend"]);
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
    domain_prefixed_path(causes, &path.field("controller"), controller);
    let parameters = &spec["parameters"];
    if parameters.is_null() {
        return;
    }
    let here = path.field("parameters");
    if let Some(group) = parameters["apiGroup"].as_str() {
        causes.format(&here.field("apiGroup"), group, format::dns1123_subdomain(group));
    }
    segments(causes, &here, parameters);
    let namespace = (&here.field("namespace"), parameters["namespace"].as_str());
    match (parameters["scope"].as_str(), namespace) {
        (None, _) => causes.required(&here.field("scope"), ""),
        (Some("Namespace"), (path, None)) => {
            causes.required(path, "`parameters.scope` is set to 'Namespace'")
        }
        (Some("Namespace"), (path, Some(name))) => causes.format(path, name, format::dns1123_label(name)),
        (Some("Cluster"), (_, None)) => {}
        (Some("Cluster"), (path, Some(_))) => {
            causes.forbidden(path, "`parameters.scope` is set to 'Cluster'");
        }
        (Some(_), _) => {
            causes.unsupported(&here.field("scope"), &parameters["scope"], &["Cluster", "Namespace"]);
        }
    }
}

/// Checks a domain with a path. Source: `IsDomainPrefixedPath`.
fn domain_prefixed_path(causes: &mut Causes, path: &Path, value: &str) {
    const PATH: &str = "Invalid path (regex used for validation is '[A-Za-z0-9/\\-._~%!$&'()*+,;=:]+')";
    match value.split_once('/') {
        _ if value.is_empty() => causes.required(path, ""),
        Some((domain, rest)) if !domain.is_empty() && !rest.is_empty() => {
            causes.format(path, domain, format::dns1123_subdomain(domain));
            let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~%!$&'()*+,;=:".contains(&byte);
            if !rest.bytes().all(is_known) {
                causes.invalid(path, &rest.into(), PATH);
            }
        }
        _ => {
            let detail = "must be a domain-prefixed path (such as \"acme.io/foo\")";
            causes.invalid(path, &value.into(), detail);
        }
    }
}

pub(crate) fn service_cidr(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    const IMMUTABLE: &str = "field is immutable";
    let (path, cidrs) = (Path::root("spec").field("cidrs"), &object["spec"]["cidrs"]);
    let Some(old) = old else { return service_ranges(causes, &path, cidrs) };
    let now: Vec<&Value> = items(cidrs).map(|(_, cidr)| cidr).collect();
    let before: Vec<&Value> = items(&old["spec"]["cidrs"]).map(|(_, cidr)| cidr).collect();
    // A single range may become dual-stack.
    let is_extended = before.len() == 1 && now.len() == 2;
    if now.len() != before.len() && !is_extended {
        return causes.invalid(&path, cidrs, IMMUTABLE);
    }
    for (index, (cidr, _)) in now.iter().zip(&before).enumerate().filter(|(_, (cidr, old))| cidr != old) {
        causes.invalid(&path.index(index), cidr, IMMUTABLE);
    }
    if is_extended {
        service_ranges(causes, &path, cidrs);
    }
}

fn service_ranges(causes: &mut Causes, path: &Path, cidrs: &Value) {
    match items(cidrs).count() {
        0 => return causes.required(path, "at least one CIDR required"),
        1 | 2 => {}
        _ => return causes.invalid(path, cidrs, "may only hold up to 2 values"),
    }
    let mut families = HashSet::new();
    for (index, cidr) in items(cidrs) {
        let here = path.index(index);
        causes.format(&here, text(cidr), format::cidr(text(cidr)));
        let Ok(network) = text(cidr).parse::<IpNetwork>() else { continue };
        if network.network() != network.ip() {
            causes.invalid(&here, cidr, "must not have bits set beyond the prefix length");
        }
        if !families.insert(network.is_ipv4()) {
            let detail =
                "may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64";
            causes.invalid(path, cidrs, detail);
        }
    }
}

pub(crate) fn ip_address(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let metadata = &object["metadata"];
    for field in ["name", "generateName"] {
        let name = text(&metadata[field]);
        if field == "name" || !name.is_empty() {
            causes.format(&Path::root("metadata").field(field), name, canonical_ip(name));
        }
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

/// Checks an IP address in its canonical form. Source: `IsValidIP`.
fn canonical_ip(name: &str) -> Vec<String> {
    match name.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) if address.to_ipv4_mapped().is_some() => {
            vec!["must not be an IPv4-mapped IPv6 address".to_owned()]
        }
        Ok(address) if address.to_string() != name => {
            vec![format!("must be in canonical form (\"{address}\")")]
        }
        _ => format::ip(name),
    }
}

#[cfg(test)]
mod tests;

//! Services, endpoints, endpoint slices.

use std::collections::HashSet;

use serde_json::Value;

use super::{Causes, Path, format, items, meta, text};

const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];
const TYPES: &[&str] = &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"];

pub(crate) fn service(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let kind = text(&spec["type"]);
    causes.one_of(&path.field("type"), &spec["type"], TYPES);
    causes.one_of(&path.field("sessionAffinity"), &spec["sessionAffinity"], &["ClientIP", "None"]);
    let headless = spec["clusterIP"] == "None";
    if items(&spec["ports"]).next().is_none() && !headless && kind != "ExternalName" {
        causes.required(&path.field("ports"), "");
    }
    if kind == "ExternalName" {
        external_name(causes, &path, spec);
    }
    if headless && matches!(kind, "NodePort" | "LoadBalancer") {
        let detail = format!("may not be set to 'None' for {kind} services");
        causes.invalid(&path.field("clusterIPs").index(0), &spec["clusterIP"], &detail);
    }
    let ip = text(&spec["clusterIP"]);
    if !matches!(ip, "" | "None") {
        causes.format(&path.field("clusterIPs").index(0), ip, format::ip(ip));
    }
    meta::labels(causes, &path.field("selector"), &spec["selector"]);
    for (index, ip) in items(&spec["externalIPs"]) {
        causes.format(&path.field("externalIPs").index(index), text(ip), format::ip(text(ip)));
    }
    source_ranges(causes, &path.field("LoadBalancerSourceRanges"), object, old);
    let seconds = &spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"];
    let seconds_path = path.field("sessionAffinityConfig").field("clientIP").field("timeoutSeconds");
    causes.in_range(&seconds_path, seconds, 1..=86_400);
    ports(causes, &path.field("ports"), spec);
    balancer_class(causes, &path.field("loadBalancerClass"), spec, old.map(|old| &old["spec"]));
    health_check_port(causes, &path.field("healthCheckNodePort"), spec, old.map(|old| &old["spec"]));
    if let Some(old) = old {
        same_address(causes, &path, spec, &old["spec"]);
    }
}

/// Checks the address ranges that may use a load balancer: the field, else the annotation before it.
fn source_ranges(causes: &mut Causes, path: &Path, object: &Value, old: Option<&Value>) {
    const FIELD: &str = "loadBalancerSourceRanges";
    const ANNOTATION: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";
    let ranges = &object["spec"][FIELD];
    let annotation = &object["metadata"]["annotations"][ANNOTATION];
    let has_field = items(ranges).next().is_some();
    let by_annotation = Path::root("metadata").field("annotations").key(ANNOTATION);
    let path = if has_field { path } else { &by_annotation };
    if !has_field && annotation.is_null() {
        return;
    }
    if object["spec"]["type"] != "LoadBalancer" {
        causes.forbidden(path, "may only be used when `type` is 'LoadBalancer'");
    }
    if has_field {
        // Spaces around a range are allowed, and what is stored already, as upstream.
        for (index, range) in items(ranges) {
            if !old.is_some_and(|old| items(&old["spec"][FIELD]).any(|(_, other)| other == range)) {
                let range = text(range).trim();
                causes.format(&path.index(index), range, format::cidr(range));
            }
        }
    } else if !text(annotation).trim().is_empty() {
        for range in text(annotation).split(',').map(str::trim) {
            causes.format(path, range, format::cidr(range));
        }
    }
}

/// Checks the class of a load balancer. Source: `validateLoadBalancerClassField`.
fn balancer_class(causes: &mut Causes, path: &Path, spec: &Value, old: Option<&Value>) {
    let (class, is_balancer) = (&spec["loadBalancerClass"], |spec: &Value| spec["type"] == "LoadBalancer");
    if old.is_some_and(|old| is_balancer(old) && is_balancer(spec) && old["loadBalancerClass"] != *class) {
        causes.invalid(path, class, "may not change once set");
    }
    if class.is_null() {
        return;
    }
    if is_balancer(spec) {
        causes.format(path, text(class), format::qualified_name(text(class)));
    } else {
        causes.forbidden(path, "may only be used when `type` is 'LoadBalancer'");
    }
}

/// Checks the port of health checks, which only load balancers with the external traffic policy Local have. Sources:
/// `validateServiceExternalTrafficFieldsValue`, `ValidateServiceUpdate`.
fn health_check_port(causes: &mut Causes, path: &Path, spec: &Value, old: Option<&Value>) {
    let port = |spec: &Value| spec["healthCheckNodePort"].as_i64().unwrap_or(0);
    let needs = |spec: &Value| spec["type"] == "LoadBalancer" && spec["externalTrafficPolicy"] == "Local";
    if port(spec) != 0 && !needs(spec) {
        let detail = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'";
        causes.invalid(path, &spec["healthCheckNodePort"], detail);
    }
    if old.is_some_and(|old| needs(old) && needs(spec) && port(old) != 0 && port(old) != port(spec)) {
        causes.invalid(path, &spec["healthCheckNodePort"], "field is immutable");
    }
}

fn external_name(causes: &mut Causes, path: &Path, spec: &Value) {
    let name = text(&spec["externalName"]);
    if name.is_empty() {
        causes.required(&path.field("externalName"), "");
    } else {
        let name = name.strip_suffix('.').unwrap_or(name);
        causes.format(&path.field("externalName"), name, format::dns1123_subdomain(name));
    }
    if !text(&spec["clusterIP"]).is_empty() {
        causes.forbidden(&path.field("clusterIPs"), "may not be set for ExternalName services");
    }
}

fn ports(causes: &mut Causes, path: &Path, spec: &Value) {
    let many = items(&spec["ports"]).count() > 1;
    let kind = text(&spec["type"]);
    let (mut names, mut numbers, mut node_ports) = (HashSet::new(), HashSet::new(), HashSet::new());
    for (index, port) in items(&spec["ports"]) {
        let here = path.index(index);
        let name = text(&port["name"]);
        match name {
            "" if many => causes.required(&here.field("name"), ""),
            "" => {}
            name => causes.format(&here.field("name"), name, format::dns1123_label(name)),
        }
        if !name.is_empty() && !names.insert(name) {
            causes.duplicate(&here.field("name"), &port["name"]);
        }
        number(causes, &here.field("port"), &port["port"]);
        causes.one_of(&here.field("protocol"), &port["protocol"], PROTOCOLS);
        target(causes, &here.field("targetPort"), &port["targetPort"]);
        if !numbers.insert((port["port"].as_i64(), text(&port["protocol"]))) {
            causes.duplicate(&here, &serde_json::json!({"port": port["port"], "protocol": port["protocol"]}));
        }
        let node_port = port["nodePort"].as_i64().unwrap_or(0);
        if node_port == 0 {
            continue;
        }
        if matches!(kind, "ClusterIP" | "ExternalName") {
            causes.forbidden(&here.field("nodePort"), &format!("may not be used when `type` is '{kind}'"));
        }
        if !node_ports.insert((node_port, text(&port["protocol"]))) {
            causes.duplicate(&here.field("nodePort"), &port["nodePort"]);
        }
    }
}

fn number(causes: &mut Causes, path: &Path, value: &Value) {
    for problem in format::port_number(value.as_i64().unwrap_or(0)) {
        causes.invalid(path, &value.as_i64().unwrap_or(0).into(), &problem);
    }
}

/// Checks the number or name of a port.
pub(super) fn target(causes: &mut Causes, path: &Path, value: &Value) {
    match value {
        Value::String(name) => causes.format(path, name, format::port_name(name)),
        Value::Null => {}
        _ => number(causes, path, value),
    }
}

/// Checks that a cluster IP does not change, unless the new type has none.
fn same_address(causes: &mut Causes, path: &Path, new: &Value, old: &Value) {
    let before = text(&old["clusterIP"]);
    let keeps = |spec: &Value| text(&spec["type"]) != "ExternalName";
    if keeps(new) && keeps(old) && !before.is_empty() && new["clusterIP"] != old["clusterIP"] {
        causes.invalid(&path.field("clusterIPs").index(0), &new["clusterIP"], "may not change once set");
    }
}

pub(crate) fn endpoints(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    for (index, subset) in items(&object["subsets"]) {
        let here = Path::root("subsets").index(index);
        for list in ["addresses", "notReadyAddresses"] {
            for (at, address) in items(&subset[list]) {
                let ip = text(&address["ip"]);
                causes.format(&here.field(list).index(at).field("ip"), ip, format::ip(ip));
            }
        }
        let many = items(&subset["ports"]).count() > 1;
        for (at, port) in items(&subset["ports"]) {
            let here = here.field("ports").index(at);
            if many && text(&port["name"]).is_empty() {
                causes.required(&here.field("name"), "");
            }
            number(causes, &here.field("port"), &port["port"]);
            causes.one_of(&here.field("protocol"), &port["protocol"], PROTOCOLS);
        }
    }
}

pub(crate) fn endpoint_slice(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    causes.one_of(&Path::root("addressType"), &object["addressType"], &["IPv4", "IPv6", "FQDN"]);
    if old.is_some_and(|old| old["addressType"] != object["addressType"]) {
        causes.invalid(&Path::root("addressType"), &object["addressType"], "field is immutable");
    }
    let fqdn = object["addressType"] == "FQDN";
    for (index, endpoint) in items(&object["endpoints"]) {
        let here = Path::root("endpoints").index(index).field("addresses");
        if items(&endpoint["addresses"]).next().is_none() {
            causes.required(&here, "must contain at least 1 address");
        }
        for (at, address) in items(&endpoint["addresses"]) {
            let address = text(address);
            let problems = if fqdn { format::dns1123_subdomain(address) } else { format::ip(address) };
            causes.format(&here.index(at), address, problems);
        }
    }
    let mut names = HashSet::new();
    for (index, port) in items(&object["ports"]) {
        let here = Path::root("ports").index(index);
        if !names.insert(text(&port["name"])) {
            causes.duplicate(&here.field("name"), &port["name"]);
        }
        causes.one_of(&here.field("protocol"), &port["protocol"], PROTOCOLS);
        causes.in_range(&here.field("port"), &port["port"], 1..=65_535);
    }
}

//! Services, endpoints, endpoint slices.

mod addresses;
mod slices;

use std::collections::HashSet;

use serde_json::Value;

pub use self::addresses::service_addresses;
pub(crate) use self::slices::endpoint_slice;
use super::port::{number, target};
use super::value::{items, text};
use super::{format, meta, networking};
use crate::cause::{Causes, Path};

const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];
/// Maximum time of session affinity in seconds.
const MAX_AFFINITY_SECONDS: i64 = 86_400;
const POLICIES: &[&str] = &["Cluster", "Local"];
const DISTRIBUTIONS: &[&str] = &["PreferClose", "PreferSameZone", "PreferSameNode"];
const TYPES: &[&str] = &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"];

pub(crate) fn service(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    let kind = text(&spec["type"]);
    topology(causes, &object["metadata"]["annotations"]);
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
    if kind != "ExternalName" {
        addresses::check(causes, spec);
    }
    meta::labels(causes, &path.field("selector"), &spec["selector"]);
    for (index, ip) in items(&spec["externalIPs"]) {
        let (here, ip) = (path.field("externalIPs").index(index), text(ip));
        let problems = format::ip(ip);
        let problems = if problems.is_empty() { format::endpoint_ip(ip) } else { problems };
        causes.format(&here, ip, problems);
    }
    source_ranges(causes, &path.field("LoadBalancerSourceRanges"), object, old);
    let seconds = &spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"];
    let seconds_path = path.field("sessionAffinityConfig").field("clientIP").field("timeoutSeconds");
    if seconds.as_i64().is_some_and(|seconds| !(1..=MAX_AFFINITY_SECONDS).contains(&seconds)) {
        let detail = format!("must be greater than 0 and less than {MAX_AFFINITY_SECONDS}");
        causes.invalid(&seconds_path, seconds, &detail);
    }
    ports(causes, &path.field("ports"), spec);
    traffic(causes, &path, spec);
    if !spec["allocateLoadBalancerNodePorts"].is_null() && spec["type"] != "LoadBalancer" {
        let here = path.field("allocateLoadBalancerNodePorts");
        causes.forbidden(&here, "may only be used when `type` is 'LoadBalancer'");
    }
    balancer_class(causes, &path.field("loadBalancerClass"), spec, old.map(|old| &old["spec"]));
    health_check_port(causes, &path.field("healthCheckNodePort"), spec, old.map(|old| &old["spec"]));
    if let Some(old) = old {
        addresses::check_update(causes, spec, &old["spec"]);
    }
}

/// Checks that the older and the newer annotation for topology-aware routing have the same value.
fn topology(causes: &mut Causes, annotations: &Value) {
    const HINTS: &str = "service.kubernetes.io/topology-aware-hints";
    const MODE: &str = "service.kubernetes.io/topology-mode";
    if annotations[HINTS].is_string()
        && annotations[MODE].is_string()
        && annotations[HINTS] != annotations[MODE]
    {
        let path = Path::root("metadata").field("annotations").key(MODE);
        let detail = format!("must match annotations[{HINTS}] when both are specified");
        causes.invalid(&path, &annotations[MODE], &detail);
    }
}

/// Checks the addresses of a load balancer in a service's status. Only services of the type LoadBalancer have them.
/// Source: `ValidateLoadBalancerStatus`.
pub(super) fn status(causes: &mut Causes, service: &Value) {
    let path = Path::root("status").field("loadBalancer").field("ingress");
    let points = &service["status"]["loadBalancer"]["ingress"];
    if service["spec"]["type"] != "LoadBalancer" && items(points).next().is_some() {
        return causes.forbidden(&path, "may only be used when `spec.type` is 'LoadBalancer'");
    }
    for (index, point) in items(points) {
        let here = path.index(index);
        networking::balancer_point(causes, &here, point);
        let (mode, has_ip) = (&point["ipMode"], !text(&point["ip"]).is_empty());
        let here = here.field("ipMode");
        match (mode.is_null(), has_ip) {
            (true, true) => causes.required(&here, "must be specified when `ip` is set"),
            (true, false) => {}
            (false, false) => causes.forbidden(&here, "may not be specified when `ip` is not set"),
            (false, true) => causes.optional_word(&here, mode, &["Proxy", "VIP"]),
        }
    }
}

/// Checks the address ranges that may use a load balancer: the field, or else the older annotation.
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
        // As upstream, a range may have spaces around it, and an invalid range that is already stored may stay.
        let stored = old.into_iter().flat_map(|old| items(&old["spec"][FIELD]));
        let stored: HashSet<&Value> = stored.map(|(_, range)| range).collect();
        for (index, range) in items(ranges) {
            if !stored.contains(range) {
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

/// Checks the traffic policies of a service.
fn traffic(causes: &mut Causes, path: &Path, spec: &Value) {
    let external = &spec["externalTrafficPolicy"];
    let here = path.field("externalTrafficPolicy");
    let has_addresses = items(&spec["externalIPs"]).next().is_some();
    let is_external = matches!(text(&spec["type"]), "LoadBalancer" | "NodePort")
        || (spec["type"] == "ClusterIP" && has_addresses);
    match text(external) {
        "" if is_external => causes.required(&here, ""),
        "" => {}
        _ if is_external => causes.optional_word(&here, external, POLICIES),
        _ => causes.invalid(&here, external, "may only be set for externally-accessible services"),
    }
    let internal = &spec["internalTrafficPolicy"];
    if internal.is_null() && matches!(text(&spec["type"]), "ClusterIP" | "LoadBalancer" | "NodePort") {
        causes.required(&path.field("internalTrafficPolicy"), "");
    }
    causes.optional_word(&path.field("internalTrafficPolicy"), internal, POLICIES);
    causes.optional_word(&path.field("trafficDistribution"), &spec["trafficDistribution"], DISTRIBUTIONS);
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
    } else if port(spec) != 0 {
        // The allocator sets a missing port.
        causes.in_range(path, &spec["healthCheckNodePort"], 1..=65_535);
    }
    if old.is_some_and(|old| needs(old) && needs(spec) && port(old) != 0 && port(old) != port(spec)) {
        causes.forbidden(path, "field is immutable");
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
    let has_any = |field: &str| items(&spec[field]).next().is_some();
    for (field, is_set) in [
        ("clusterIPs", has_any("clusterIPs") || !text(&spec["clusterIP"]).is_empty()),
        ("ipFamilies", has_any("ipFamilies")),
        ("ipFamilyPolicy", !spec["ipFamilyPolicy"].is_null()),
    ] {
        if is_set {
            causes.forbidden(&path.field(field), "may not be set for ExternalName services");
        }
    }
}

fn ports(causes: &mut Causes, path: &Path, spec: &Value) {
    let many = items(&spec["ports"]).count() > 1;
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
        app_protocol(causes, &here, port);
        if !numbers.insert((port["port"].as_i64(), text(&port["protocol"]))) {
            causes.duplicate(&here, &serde_json::json!({"port": port["port"], "protocol": port["protocol"]}));
        }
        let node_port = port["nodePort"].as_i64().unwrap_or(0);
        if node_port == 0 {
            continue;
        }
        if spec["type"] == "ClusterIP" {
            causes.forbidden(&here.field("nodePort"), "may not be used when `type` is 'ClusterIP'");
        }
        if !node_ports.insert((node_port, text(&port["protocol"]))) {
            causes.duplicate(&here.field("nodePort"), &port["nodePort"]);
        }
    }
}

fn app_protocol(causes: &mut Causes, path: &Path, port: &Value) {
    if let Some(protocol) = port["appProtocol"].as_str() {
        causes.format(&path.field("appProtocol"), protocol, format::qualified_name(protocol));
    }
}

pub(crate) fn endpoints(causes: &mut Causes, object: &Value, _old: Option<&Value>) {
    for (index, subset) in items(&object["subsets"]) {
        let here = Path::root("subsets").index(index);
        let addresses = |list: &str| items(&subset[list]).count();
        if addresses("addresses") + addresses("notReadyAddresses") == 0 {
            causes.required(&here, "must specify `addresses` or `notReadyAddresses`");
        }
        for list in ["addresses", "notReadyAddresses"] {
            for (at, address) in items(&subset[list]) {
                let here = here.field(list).index(at);
                endpoint_address(causes, &here, address);
                if !is_api_server(object) {
                    let ip = text(&address["ip"]);
                    let problems = match ip.parse::<std::net::IpAddr>() {
                        Ok(_) => format::endpoint_ip(ip),
                        Err(_) => vec!["must be a valid IP address".to_owned()],
                    };
                    causes.format(&here.field("ip"), ip, problems);
                }
            }
        }
        let many = items(&subset["ports"]).count() > 1;
        for (at, port) in items(&subset["ports"]) {
            let here = here.field("ports").index(at);
            match text(&port["name"]) {
                "" if many => causes.required(&here.field("name"), ""),
                "" => {}
                name => causes.format(&here.field("name"), name, format::dns1123_label(name)),
            }
            number(causes, &here.field("port"), &port["port"]);
            causes.one_of(&here.field("protocol"), &port["protocol"], PROTOCOLS);
            app_protocol(causes, &here, port);
        }
    }
}

/// Whether these are the endpoints of the API server itself. On a machine without network they have a loopback address.
fn is_api_server(object: &Value) -> bool {
    let metadata = &object["metadata"];
    metadata["namespace"] == "default" && metadata["name"] == "kubernetes"
}

fn endpoint_address(causes: &mut Causes, path: &Path, address: &Value) {
    let (ip, here) = (text(&address["ip"]), path.field("ip"));
    causes.format(&here, ip, format::ip(ip));
    let hostname = text(&address["hostname"]);
    if !hostname.is_empty() {
        causes.format(&path.field("hostname"), hostname, format::dns1123_label(hostname));
    }
    if let Some(node) = address["nodeName"].as_str() {
        causes.format(&path.field("nodeName"), node, format::dns1123_subdomain(node));
    }
}

//! Services, their endpoints, and network policies.

use serde_json::Value;

use super::{Found, address, items, text};

const TOPOLOGY_HINTS: &str = "service.kubernetes.io/topology-aware-hints";
const TOPOLOGY_MODE: &str = "service.kubernetes.io/topology-mode";
const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
/// Controllers that write addresses in the standard form. Their objects cause no warnings about addresses.
const CONTROLLERS: [&str; 2] =
    ["endpointslice-controller.k8s.io", "endpointslicemirroring-controller.k8s.io"];

pub(super) fn service(found: &mut Found, service: &Value) {
    let spec = &service["spec"];
    if !service["metadata"]["annotations"][TOPOLOGY_HINTS].is_null() {
        found.add(format!("annotation {TOPOLOGY_HINTS} is deprecated, please use {TOPOLOGY_MODE} instead"));
    }
    let cluster_ip = text(&spec["clusterIP"]);
    if !matches!(cluster_ip, "" | "None") {
        addresses(found, "spec.clusterIPs", &spec["clusterIPs"]);
    }
    let external = items(&spec["externalIPs"]).count();
    let is_headless = spec["type"] == "ClusterIP" && cluster_ip == "None";
    if is_headless {
        headless(found, spec, external);
    }
    addresses(found, "spec.externalIPs", &spec["externalIPs"]);
    let is_name = spec["type"] == "ExternalName";
    if external > 0 && !is_headless && !is_name {
        found.add(
            "spec.externalIPs is deprecated and may no longer be implemented in some clusters".to_owned(),
        );
    }
    address::address(found, || "spec.loadBalancerIP".to_owned(), text(&spec["loadBalancerIP"]));
    for (index, range) in items(&spec["loadBalancerSourceRanges"]) {
        address::ranges(found, || format!("spec.loadBalancerSourceRanges[{index}]"), text(range));
    }
    if is_name && external > 0 {
        found.add("spec.externalIPs is ignored when spec.type is \"ExternalName\"".to_owned());
    }
    if !is_name && !text(&spec["externalName"]).is_empty() {
        found.add("spec.externalName is ignored when spec.type is not \"ExternalName\"".to_owned());
    }
    if spec["trafficDistribution"] == "PreferClose" {
        found.add(
            "spec.trafficDistribution: \"PreferClose\" is deprecated; use \"PreferSameZone\"".to_owned(),
        );
    }
}

/// Warns about fields without effect in a headless service, which has no cluster IP.
fn headless(found: &mut Found, spec: &Value, external: usize) {
    for (field, is_set) in [
        ("loadBalancerIP", !text(&spec["loadBalancerIP"]).is_empty()),
        ("externalIPs", external > 0),
        ("SessionAffinity", !matches!(text(&spec["sessionAffinity"]), "" | "None")),
    ] {
        if is_set {
            found.add(format!("spec.{field} is ignored for headless services"));
        }
    }
}

pub(super) fn slice(found: &mut Found, slice: &Value, is_new: bool) {
    if is_new && slice["addressType"] == "FQDN" {
        // The path in the text is the same as upstream's.
        found.add("spec.addressType: FQDN endpoints are deprecated".to_owned());
    }
    if CONTROLLERS.contains(&text(&slice["metadata"]["labels"][MANAGED_BY])) {
        return;
    }
    for (index, endpoint) in items(&slice["endpoints"]) {
        for (number, one) in items(&endpoint["addresses"]) {
            address::address(found, || format!("endpoints[{index}].addresses[{number}]"), text(one));
        }
    }
}

pub(super) fn policy(found: &mut Found, policy: &Value) {
    for (rules, peers) in [("ingress", "from"), ("egress", "to")] {
        for (index, rule) in items(&policy["spec"][rules]) {
            for (number, peer) in items(&rule[peers]) {
                let block = &peer["ipBlock"];
                let path = || format!("spec.{rules}[{index}].{peers}[{number}].ipBlock");
                address::ranges(found, || format!("{}.cidr", path()), text(&block["cidr"]));
                for (which, range) in items(&block["except"]) {
                    address::ranges(found, || format!("{}.except[{which}]", path()), text(range));
                }
            }
        }
    }
}

fn addresses(found: &mut Found, path: &str, list: &Value) {
    for (index, one) in items(list) {
        address::address(found, || format!("{path}[{index}]"), text(one));
    }
}

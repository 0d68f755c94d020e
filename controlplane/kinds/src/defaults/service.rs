//! Services and their endpoints. The API server allocates a Service's addresses and ports.

use serde_json::Value;

use super::{child, child_of, each, fill, fill_absent};

/// Sets the defaults of a Service.
pub(crate) fn service(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    fill(spec, "type", "ClusterIP");
    fill(spec, "sessionAffinity", "None");
    let text = |spec: &serde_json::Map<String, Value>, name: &str| {
        spec.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let kind = text(spec, "type");
    if text(spec, "sessionAffinity") == "None" {
        spec.remove("sessionAffinityConfig");
    }
    if text(spec, "sessionAffinity") == "ClientIP" {
        let config = child_of(spec, "sessionAffinityConfig").and_then(|config| child_of(config, "clientIP"));
        if let Some(client) = config {
            fill(client, "timeoutSeconds", 10_800);
        }
    }
    let has_addresses =
        spec.get("externalIPs").and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    if matches!(kind.as_str(), "NodePort" | "LoadBalancer") || (kind == "ClusterIP" && has_addresses) {
        fill(spec, "externalTrafficPolicy", "Cluster");
    }
    if matches!(kind.as_str(), "ClusterIP" | "NodePort" | "LoadBalancer") {
        fill_absent(spec, "internalTrafficPolicy", "Cluster");
    }
    if kind == "LoadBalancer" {
        fill(spec, "allocateLoadBalancerNodePorts", true);
    }
    for port in each(spec, "ports") {
        fill(port, "protocol", "TCP");
        let number = port.get("port").filter(|port| !port.is_null()).cloned().unwrap_or_else(|| 0.into());
        // Go clients write 0 for an absent port.
        if port.get("targetPort").is_none_or(|target| target.is_null() || *target == 0 || target == "") {
            port.insert("targetPort".to_owned(), number);
        }
    }
    let balancer = child(object, "status").and_then(|status| child_of(status, "loadBalancer"));
    if let Some(balancer) = balancer
        && kind == "LoadBalancer"
    {
        for point in each(balancer, "ingress").filter(|point| point.get("ip").is_some_and(|ip| ip != "")) {
            fill_absent(point, "ipMode", "VIP");
        }
    }
}

/// Sets the defaults of an Endpoints.
pub(crate) fn endpoints(object: &mut Value) {
    let Some(map) = object.as_object_mut() else { return };
    for subset in each(map, "subsets") {
        for port in each(subset, "ports") {
            fill(port, "protocol", "TCP");
        }
    }
}

/// Sets the defaults of an EndpointSlice.
pub(crate) fn endpoint_slice(object: &mut Value) {
    let Some(map) = object.as_object_mut() else { return };
    for port in each(map, "ports") {
        port.entry("name").or_insert_with(|| "".into());
        fill_absent(port, "protocol", "TCP");
    }
}

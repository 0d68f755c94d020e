//! Fields of a Service that depend on its type.

use serde_json::Value;

/// Removes fields that the old type needed and the new type does not have, if they are unchanged. A client that changes
/// only the type sends these fields back. A changed field stays, so that validation refuses it. Source:
/// `dropTypeDependentFields`.
pub(super) fn drop_dependent_fields(new: &mut Value, old: &Value) {
    let (was, is) = (kind(old), kind(new));
    let ends = |has: fn(&str) -> bool| has(was) && !has(is);
    let (addresses, ports, balancer) = (ends(has_address), ends(has_ports), ends(is_balancer));
    let policy = has_policy(old) && !has_policy(new);
    let checked = has_health_check(old) && !has_health_check(new);
    if addresses && ["clusterIP", "clusterIPs"].iter().all(|field| is_same(new, old, field)) {
        remove(new, "clusterIP");
        remove(new, "clusterIPs");
    }
    for (applies, field) in [
        (addresses, "ipFamilies"),
        (addresses, "ipFamilyPolicy"),
        (addresses, "internalTrafficPolicy"),
        (checked, "healthCheckNodePort"),
        (balancer, "loadBalancerClass"),
        (balancer, "allocateLoadBalancerNodePorts"),
        (policy, "externalTrafficPolicy"),
    ] {
        if applies && is_same(new, old, field) {
            remove(new, field);
        }
    }
    if ports && node_ports(new) == node_ports(old) {
        for port in new["spec"].get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(port) = port.as_object_mut() {
                port.remove("nodePort");
            }
        }
    }
    if is_balancer(was) && !is_balancer(kind(new)) && new["status"].is_object() {
        new["status"]["loadBalancer"] = serde_json::json!({});
    }
}

fn kind(service: &Value) -> &str {
    service["spec"]["type"].as_str().unwrap_or_default()
}

fn has_address(kind: &str) -> bool {
    kind != "ExternalName"
}

fn has_ports(kind: &str) -> bool {
    matches!(kind, "NodePort" | "LoadBalancer")
}

fn is_balancer(kind: &str) -> bool {
    kind == "LoadBalancer"
}

fn has_policy(service: &Value) -> bool {
    let external = service["spec"]["externalIPs"].as_array().is_some_and(|list| !list.is_empty());
    has_ports(kind(service)) || (kind(service) == "ClusterIP" && external)
}

fn has_health_check(service: &Value) -> bool {
    is_balancer(kind(service)) && service["spec"]["externalTrafficPolicy"] == "Local"
}

fn is_same(new: &Value, old: &Value, field: &str) -> bool {
    new["spec"][field] == old["spec"][field]
}

fn remove(service: &mut Value, field: &str) {
    if let Some(spec) = service["spec"].as_object_mut() {
        spec.remove(field);
    }
}

fn node_ports(service: &Value) -> Vec<i64> {
    let ports = service["spec"]["ports"].as_array().into_iter().flatten();
    ports.map(|port| port["nodePort"].as_i64().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn balancer() -> Value {
        json!({"spec": {"type": "LoadBalancer", "clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"],
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "externalTrafficPolicy": "Local",
            "internalTrafficPolicy": "Cluster", "healthCheckNodePort": 30001, "loadBalancerClass": "a/b",
            "allocateLoadBalancerNodePorts": true, "ports": [{"port": 80, "nodePort": 30000}]}})
    }

    fn changed(kind: &str, more: Value) -> Value {
        let old = balancer();
        let mut new = old.clone();
        new["spec"]["type"] = kind.into();
        for (field, value) in more.as_object().into_iter().flatten() {
            new["spec"][field] = value.clone();
        }
        drop_dependent_fields(&mut new, &old);
        new["spec"].take()
    }

    #[test]
    fn a_new_type_has_only_its_fields() {
        let external = json!({"type": "ExternalName", "externalName": "a.b", "ports": [{"port": 80}]});
        assert_eq!(changed("ExternalName", json!({"externalName": "a.b"})), external);
        let cluster = changed("ClusterIP", json!({}));
        assert_eq!(cluster["clusterIP"], "10.0.0.1");
        for gone in ["healthCheckNodePort", "loadBalancerClass", "externalTrafficPolicy"] {
            assert!(cluster[gone].is_null(), "{gone}");
        }
        assert!(cluster["ports"][0]["nodePort"].is_null());
        let same = changed("LoadBalancer", json!({}));
        assert_eq!(same, balancer()["spec"]);
    }

    #[test]
    fn fields_that_the_client_changed_are_kept_for_validation() {
        let kept = changed(
            "ExternalName",
            json!({"clusterIP": "10.0.0.2", "ports": [{"port": 80, "nodePort": 30009}]}),
        );
        assert_eq!(kept["clusterIP"], "10.0.0.2");
        assert_eq!(kept["ports"][0]["nodePort"], 30009);
    }
}

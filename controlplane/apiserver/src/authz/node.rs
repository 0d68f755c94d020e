//! A node may read what its pods need, and write about itself and its pods. It may read every Node, which
//! upstream's authorizer does not grant: the overlay between nodes learns its peers from them.
//!
//! What it may write beyond that (only pods bound to it, only its own Node) is admission's to check
//! (`admit/node_restriction.rs`).

use coracle_kinds::kind::by_resource;
use serde_json::Value;

use super::Question;
use crate::{
    cache::{Cache, prefix_of},
    request::ResourceInfo,
};

const READ: &[&str] = &["get", "list", "watch"];
const OWN: &[&str] = &["get", "update", "patch", "delete"];

pub(super) fn allows(question: &Question<'_>) -> bool {
    let Some(node) = question.user.node() else { return false };
    let Some(resource) = &question.info.resource else { return false };
    let verb = question.verb;
    match (resource.group.as_str(), resource.resource.as_str(), resource.subresource.as_str()) {
        ("", "nodes", "" | "status") => READ.contains(&verb) || matches!(verb, "create" | "update" | "patch"),
        ("", "pods", "") if READ.contains(&verb) => own_pods(question, resource, node),
        ("", "pods", "") => matches!(verb, "create" | "delete"),
        ("", "pods", "status") => matches!(verb, "get" | "update" | "patch"),
        ("", "pods", "eviction") => verb == "create",
        ("", "services" | "namespaces" | "endpoints", "") | ("discovery.k8s.io" | "node.k8s.io", _, "") => {
            READ.contains(&verb)
        }
        ("" | "events.k8s.io", "events", "") => matches!(verb, "create" | "update" | "patch"),
        ("coordination.k8s.io", "leases", "") => {
            resource.namespace == "kube-node-lease"
                && (verb == "create" || (resource.name == node && OWN.contains(&verb)))
        }
        ("storage.k8s.io", "csinodes", "") => {
            verb == "create" || (resource.name == node && OWN.contains(&verb))
        }
        ("", "serviceaccounts", "") => verb == "get" && needed(question, resource, node, accounts_of),
        ("", "serviceaccounts", "token") => verb == "create" && needed(question, resource, node, accounts_of),
        ("certificates.k8s.io", "certificatesigningrequests", "") => READ.contains(&verb) || verb == "create",
        ("authentication.k8s.io", "tokenreviews", "")
        | ("authorization.k8s.io", "subjectaccessreviews", "") => verb == "create",
        ("", "secrets", "") => READ.contains(&verb) && needed(question, resource, node, secrets_of),
        ("", "configmaps", "") => READ.contains(&verb) && needed(question, resource, node, config_maps_of),
        _ => false,
    }
}

/// One pod that is bound to the node, or those of all that are.
fn own_pods(question: &Question<'_>, resource: &ResourceInfo, node: &str) -> bool {
    if resource.name.is_empty() {
        let selected = question.info.query.get("fieldSelector");
        return selected.split(',').any(|part| {
            let value = part.strip_prefix("spec.nodeName=");
            value.map(|value| value.trim_start_matches('=')) == Some(node)
        });
    }
    let pods = by_resource("", "v1", "pods");
    let pod = pods.and_then(|kind| question.cache.get(kind, &resource.namespace, &resource.name));
    // One that is not there is nobody's secret: its node must learn that it is gone.
    pod.is_none_or(|pod| pod.value()["spec"]["nodeName"] == node)
}

/// Whether a pod on the node refers to the named object. Lists and watches must name one too.
fn needed(
    question: &Question<'_>,
    resource: &ResourceInfo,
    node: &str,
    names: fn(&Value) -> Vec<&str>,
) -> bool {
    let selected = question.info.query.get("fieldSelector");
    let wanted = if resource.name.is_empty() {
        selected.strip_prefix("metadata.name=").unwrap_or_default()
    } else {
        &resource.name
    };
    let wanted = wanted.trim_start_matches('=');
    !wanted.is_empty()
        && !resource.namespace.is_empty()
        && pods_on(question.cache, &resource.namespace, node).iter().any(|pod| names(pod).contains(&wanted))
}

fn pods_on(cache: &Cache, namespace: &str, node: &str) -> Vec<Value> {
    let Some(kind) = by_resource("", "v1", "pods") else { return Vec::new() };
    let Ok(pods) = cache.of(kind) else { return Vec::new() };
    let prefix = prefix_of(kind, namespace);
    pods.under(&prefix).map(|pod| pod.value()).filter(|pod| pod["spec"]["nodeName"] == node).collect()
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value[field].as_array().into_iter().flatten()
}

fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    let kinds = ["containers", "initContainers", "ephemeralContainers"];
    kinds.into_iter().flat_map(|field| list(&pod["spec"], field))
}

/// Volumes and the parts of projected volumes.
fn sources(pod: &Value) -> impl Iterator<Item = &Value> {
    list(&pod["spec"], "volumes")
        .flat_map(|volume| std::iter::once(volume).chain(list(&volume["projected"], "sources")))
}

pub(crate) fn secrets_of(pod: &Value) -> Vec<&str> {
    let volumes =
        sources(pod).flat_map(|source| [&source["secret"]["secretName"], &source["secret"]["name"]]);
    let pulls = list(&pod["spec"], "imagePullSecrets").map(|pull| &pull["name"]);
    volumes
        .chain(pulls)
        .chain(environment(pod, "secretRef", "secretKeyRef"))
        .filter_map(Value::as_str)
        .collect()
}

pub(crate) fn config_maps_of(pod: &Value) -> Vec<&str> {
    let volumes = sources(pod).map(|source| &source["configMap"]["name"]);
    volumes.chain(environment(pod, "configMapRef", "configMapKeyRef")).filter_map(Value::as_str).collect()
}

fn accounts_of(pod: &Value) -> Vec<&str> {
    pod["spec"]["serviceAccountName"].as_str().into_iter().collect()
}

fn environment<'a>(
    pod: &'a Value,
    whole: &'static str,
    key: &'static str,
) -> impl Iterator<Item = &'a Value> {
    containers(pod).flat_map(move |container| {
        let all = list(container, "envFrom").map(move |from| &from[whole]["name"]);
        all.chain(list(container, "env").map(move |env| &env["valueFrom"][key]["name"]))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_needs_what_it_names() {
        let pod = json!({"spec": {
            "volumes": [
                {"secret": {"secretName": "a"}},
                {"projected": {"sources": [{"configMap": {"name": "kube-root-ca.crt"}}, {"secret": {"name": "b"}}]}},
                {"configMap": {"name": "c"}},
            ],
            "imagePullSecrets": [{"name": "d"}],
            "containers": [{"envFrom": [{"secretRef": {"name": "e"}}],
                "env": [{"valueFrom": {"configMapKeyRef": {"name": "f"}}}]}],
            "initContainers": [{"env": [{"valueFrom": {"secretKeyRef": {"name": "g"}}}]}],
        }});
        assert_eq!(secrets_of(&pod), ["a", "b", "d", "e", "g"]);
        assert_eq!(config_maps_of(&pod), ["kube-root-ca.crt", "c", "f"]);
    }
}

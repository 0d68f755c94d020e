//! The control plane's own parts may do what they are for.

use super::Question;
use crate::request::ResourceInfo;

const READ: &[&str] = &["get", "list", "watch"];

pub(super) fn allows(question: &Question<'_>) -> bool {
    let Some(resource) = &question.info.resource else { return false };
    match question.user.name.as_str() {
        "system:kube-controller-manager" => controllers(resource),
        "system:kube-scheduler" => scheduler(question.info.verb, resource),
        _ => false,
    }
}

/// The garbage collector and the namespace controller work on every kind; none of them enters pods.
fn controllers(resource: &ResourceInfo) -> bool {
    let subresource = resource.subresource.split('/').next().unwrap_or_default();
    !matches!(subresource, "exec" | "attach" | "portforward" | "proxy" | "log")
}

fn scheduler(verb: &str, resource: &ResourceInfo) -> bool {
    match (resource.group.as_str(), resource.resource.as_str(), resource.subresource.as_str()) {
        ("", "pods", "binding") | ("", "bindings", "") => verb == "create",
        ("", "pods", "status") => matches!(verb, "patch" | "update"),
        ("", "pods", "") => READ.contains(&verb) || verb == "delete",
        ("" | "events.k8s.io", "events", "") => matches!(verb, "create" | "patch" | "update"),
        ("coordination.k8s.io", "leases", "") => true,
        ("", "nodes" | "namespaces" | "services" | "replicationcontrollers", "")
        | ("", "persistentvolumes" | "persistentvolumeclaims", "")
        | ("apps" | "policy" | "storage.k8s.io" | "scheduling.k8s.io", _, "") => READ.contains(&verb),
        _ => false,
    }
}

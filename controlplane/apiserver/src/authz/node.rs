//! The node authorizer: a node can read the objects that its pods need, and write its Node and its pods. Unlike
//! upstream it can also read every Node, because the overlay network gets its peers from them.
//!
//! Admission (`admit/node_restriction.rs`) restricts the writes to the node's own objects.

use coracle_kinds::kind::by_resource;
use coracle_values::field_selector::{self, FieldRequirement};
use serde_json::Value;

use super::{AccessAttributes, Authorizer, Deciding, Decision, RulesScope, UserRules};
use crate::{
    cache::{Object, ReferenceKind},
    request::ResourceInfo,
};

const READ_VERBS: &[&str] = &["get", "list", "watch"];
const OWN_OBJECT_VERBS: &[&str] = &["get", "update", "patch", "delete"];

/// Label of local volumes with the name of the node that has the directory.
pub(crate) const LOCAL_NODE: &str = "coracle.dev/node";

/// Group and resources of cluster-wide network policies, which users may install.
const POLICY_GROUP: &str = "policy.networking.k8s.io";
const CLUSTER_POLICIES: [&str; 3] =
    ["clusternetworkpolicies", "adminnetworkpolicies", "baselineadminnetworkpolicies"];

/// Allows the requests that a node needs for its pods.
pub(super) struct Nodes;

impl Authorizer for Nodes {
    fn authorize<'a>(&'a self, attributes: &'a AccessAttributes<'a>) -> Deciding<'a> {
        // As upstream, the decision has no reason.
        Decision::allow_if(allows(attributes), "").ready()
    }

    /// The permissions of a node depend on the object, so these permissions cannot be listed as rules.
    fn add_rules(&self, of: &RulesScope<'_>, found: &mut UserRules) {
        found.unlisted.extend(of.user.node().map(|_| "node"));
    }
}

fn allows(attributes: &AccessAttributes<'_>) -> bool {
    // As upstream, an empty name is not the name of a node. An empty name would match the pods that have no node yet.
    let Some(node) = attributes.user.node().filter(|node| !node.is_empty()) else { return false };
    let Some(resource) = &attributes.info.resource else { return false };
    let verb = attributes.verb;
    match (resource.group.as_str(), resource.resource.as_str(), resource.subresource.as_str()) {
        ("", "nodes", "" | "status") => {
            READ_VERBS.contains(&verb) || matches!(verb, "create" | "update" | "patch")
        }
        ("", "pods", "") if READ_VERBS.contains(&verb) => {
            own_pods(attributes, resource, node) || verb != "get" && has_policies(attributes)
        }
        ("networking.k8s.io", "networkpolicies" | "servicecidrs", "") => READ_VERBS.contains(&verb),
        (POLICY_GROUP, name, "") => READ_VERBS.contains(&verb) && CLUSTER_POLICIES.contains(&name),
        ("apiextensions.k8s.io", "customresourcedefinitions", "") => {
            READ_VERBS.contains(&verb) && defines_policies(attributes)
        }
        ("", "pods", "") => matches!(verb, "create" | "delete"),
        // No `get`: the response is the whole pod. Admission checks updates, and nothing checks a read of another pod.
        ("", "pods", "status") => matches!(verb, "update" | "patch"),
        ("", "pods", "eviction") => verb == "create",
        ("", "services" | "namespaces" | "endpoints", "") | ("discovery.k8s.io" | "node.k8s.io", _, "") => {
            READ_VERBS.contains(&verb)
        }
        ("" | "events.k8s.io", "events", "") => matches!(verb, "create" | "update" | "patch"),
        ("coordination.k8s.io", "leases", "") => {
            resource.namespace == "kube-node-lease"
                && (verb == "create" || (resource.name == node && OWN_OBJECT_VERBS.contains(&verb)))
        }
        ("storage.k8s.io", _, "") => storage(attributes, resource, node),
        ("", "serviceaccounts", "") => {
            verb == "get" && needed(attributes, resource, node, ReferenceKind::ServiceAccount)
        }
        ("", "serviceaccounts", "token") => {
            verb == "create" && needed(attributes, resource, node, ReferenceKind::ServiceAccount)
        }
        ("", "persistentvolumeclaims", "") => {
            verb == "get" && needed(attributes, resource, node, ReferenceKind::Claim)
        }
        // Admission allows only the fields that the expansion of a volume changes.
        ("", "persistentvolumeclaims", "status") => {
            matches!(verb, "update" | "patch") && needed(attributes, resource, node, ReferenceKind::Claim)
        }
        ("", "persistentvolumes", "") => volume(attributes, resource, node),
        ("certificates.k8s.io", "certificatesigningrequests", "") => {
            READ_VERBS.contains(&verb) || verb == "create"
        }
        ("authentication.k8s.io", "tokenreviews", "")
        | ("authorization.k8s.io", "localsubjectaccessreviews" | "subjectaccessreviews", "") => {
            verb == "create"
        }
        ("", "secrets", "") => READ_VERBS.contains(&verb) && needed_secret(attributes, resource, node),
        ("", "configmaps", "") => {
            READ_VERBS.contains(&verb) && needed(attributes, resource, node, ReferenceKind::ConfigMap)
        }
        ("resource.k8s.io", "resourceclaims", "") => {
            verb == "get" && needed(attributes, resource, node, ReferenceKind::ResourceClaim)
        }
        ("resource.k8s.io", "resourceslices", "") => own_slices(attributes, resource, node),
        _ => false,
    }
}

/// Whether a request creates a slice, is for a slice of the node, or is restricted to the slices of the node. Admission
/// checks the node name of new slices.
fn own_slices(attributes: &AccessAttributes<'_>, resource: &ResourceInfo, node: &str) -> bool {
    match attributes.verb {
        "create" => true,
        "list" | "watch" | "deletecollection" => selects_node(attributes, node),
        "get" | "update" | "patch" | "delete" => {
            let kind = by_resource("resource.k8s.io", "v1", "resourceslices");
            let slice = kind.and_then(|kind| attributes.cache.get(kind, "", &resource.name));
            slice.is_some_and(|slice| slice.value()["spec"]["nodeName"] == node)
        }
        _ => false,
    }
}

/// Whether a request is for CSI drivers, for the drivers of the node, or reads an attachment of a volume to the node.
fn storage(attributes: &AccessAttributes<'_>, resource: &ResourceInfo, node: &str) -> bool {
    let verb = attributes.verb;
    match resource.resource.as_str() {
        "csidrivers" => READ_VERBS.contains(&verb),
        "csinodes" => verb == "create" || (resource.name == node && OWN_OBJECT_VERBS.contains(&verb)),
        "volumeattachments" => {
            let kind = by_resource("storage.k8s.io", "v1", "volumeattachments");
            let attachment = kind.and_then(|kind| attributes.cache.get(kind, "", &resource.name));
            let attachment = attachment.map(|attachment| attachment.part(&[&["spec", "nodeName"]]));
            verb == "get" && attachment.is_some_and(|attachment| attachment["spec"]["nodeName"] == node)
        }
        _ => false,
    }
}

/// Whether the field selector of a request requires `spec.nodeName` to be the node.
fn selects_node(attributes: &AccessAttributes<'_>, node: &str) -> bool {
    let is_own = |one: &FieldRequirement| one.equal && one.field == "spec.nodeName" && one.value == node;
    let requirements = field_selector::parse(attributes.info.query.get("fieldSelector"));
    requirements.is_ok_and(|requirements| requirements.iter().any(is_own))
}

/// Whether the cluster has network policies. Each node then needs the addresses and labels of all pods.
fn has_policies(attributes: &AccessAttributes<'_>) -> bool {
    let has = |group, resource| attributes.cache.count(group, resource) > 0;
    has("networking.k8s.io", "networkpolicies") || CLUSTER_POLICIES.iter().any(|name| has(POLICY_GROUP, name))
}

/// Whether a request names the definition of a kind of network policies.
fn defines_policies(attributes: &AccessAttributes<'_>) -> bool {
    let name = attributes.info.object_name();
    let plural = name.strip_suffix(POLICY_GROUP).and_then(|rest| rest.strip_suffix('.'));
    plural.is_some_and(|plural| CLUSTER_POLICIES.contains(&plural))
}

/// Whether a request for pods is restricted to pods that are bound to the node.
fn own_pods(attributes: &AccessAttributes<'_>, resource: &ResourceInfo, node: &str) -> bool {
    if resource.name.is_empty() {
        return selects_node(attributes, node);
    }
    let kind = by_resource("", "v1", "pods");
    let pod = kind.and_then(|kind| attributes.cache.get(kind, &resource.namespace, &resource.name));
    // A node must be able to observe that a pod was deleted. An absent pod needs no protection.
    let bound =
        |pod: &Object| kind.is_some_and(|kind| pod.selector_attributes(kind).field("spec.nodeName") == node);
    pod.is_none_or(|pod| bound(&pod))
}

/// Whether a request is for the node's local volumes, or reads the volume of a claim that a pod on the node uses.
fn volume(attributes: &AccessAttributes<'_>, resource: &ResourceInfo, node: &str) -> bool {
    if resource.name.is_empty() {
        let selected = attributes.info.query.get("labelSelector");
        return READ_VERBS.contains(&attributes.verb)
            && selected.strip_prefix(LOCAL_NODE).and_then(|rest| rest.strip_prefix('=')) == Some(node);
    }
    let kind = by_resource("", "v1", "persistentvolumes");
    let found = kind.and_then(|kind| attributes.cache.get(kind, "", &resource.name));
    let Some(found) = found.map(|found| found.value()) else { return attributes.verb == "get" };
    if found["metadata"]["labels"][LOCAL_NODE] == node {
        // Admission allows only the removal of a finalizer.
        return matches!(attributes.verb, "get" | "patch" | "update");
    }
    let claim = &found["spec"]["claimRef"];
    let (Some(namespace), Some(name)) = (claim["namespace"].as_str(), claim["name"].as_str()) else {
        return false;
    };
    let pods = by_resource("", "v1", "pods").and_then(|pods| attributes.cache.of(pods).ok());
    attributes.verb == "get"
        && pods
            .is_some_and(|pods| pods.lock().references().needed(node, ReferenceKind::Claim, namespace, name))
}

/// Whether a pod on the node refers to the named object. Lists and watches must also name one object.
fn needed(
    attributes: &AccessAttributes<'_>,
    resource: &ResourceInfo,
    node: &str,
    kind: ReferenceKind,
) -> bool {
    let wanted = attributes.info.object_name();
    let pods = by_resource("", "v1", "pods").and_then(|pods| attributes.cache.of(pods).ok());
    !wanted.is_empty()
        && !resource.namespace.is_empty()
        && pods.is_some_and(|pods| pods.lock().references().needed(node, kind, &resource.namespace, &wanted))
}

/// Whether a pod of the node, or a volume of such a pod, names the secret.
fn needed_secret(attributes: &AccessAttributes<'_>, resource: &ResourceInfo, node: &str) -> bool {
    needed(attributes, resource, node, ReferenceKind::Secret) || needed_by_volume(attributes, resource, node)
}

/// Whether a pod on the node uses a claim whose volume is mounted with the named secret. The secret may be in another
/// namespace. The volume must name the claim, so the author of a claim cannot choose the volume.
fn needed_by_volume(attributes: &AccessAttributes<'_>, resource: &ResourceInfo, node: &str) -> bool {
    let wanted = attributes.info.object_name();
    let of = |plural| by_resource("", "v1", plural);
    let (Some(claims), Some(volumes)) = (of("persistentvolumeclaims"), of("persistentvolumes")) else {
        return false;
    };
    if wanted.is_empty() || resource.namespace.is_empty() {
        return false;
    }
    let Some(pods) = of("pods").and_then(|pods| attributes.cache.of(pods).ok()) else { return false };
    let used = pods.lock().references().claims_of(node);
    used.iter().any(|(namespace, name)| {
        let claim = attributes.cache.get(claims, namespace, name);
        let claim = claim.map(|claim| claim.part(&[&["spec", "volumeName"]])).unwrap_or_default();
        let volume = claim["spec"]["volumeName"].as_str().filter(|name| !name.is_empty());
        let volume = volume.and_then(|volume| attributes.cache.get(volumes, "", volume));
        let volume = volume.map(|volume| volume.part(&[&["spec"]])).unwrap_or_default();
        let owner = &volume["spec"]["claimRef"];
        owner["namespace"] == **namespace
            && owner["name"] == **name
            && is_mounted_with(&volume["spec"], &resource.namespace, &wanted)
    })
}

/// Whether a node needs the secret to mount the volume. Source: upstream's `VisitPVSecretNames`.
fn is_mounted_with(spec: &Value, namespace: &str, name: &str) -> bool {
    let of_claim = spec["claimRef"]["namespace"].as_str().unwrap_or_default();
    let is_wanted = |found: &Value, found_namespace: &Value, default: &str| {
        let found_namespace = found_namespace.as_str().filter(|text| !text.is_empty()).unwrap_or(default);
        found == name && found_namespace == namespace
    };
    let refers =
        |reference: &Value, default: &str| is_wanted(&reference["name"], &reference["namespace"], default);
    let azure = &spec["azureFile"];
    let of_csi = ["nodePublishSecretRef", "nodeStageSecretRef", "nodeExpandSecretRef"];
    is_wanted(&azure["secretName"], &azure["secretNamespace"], of_claim)
        || ["cephfs", "flexVolume", "iscsi", "rbd", "scaleIO"]
            .iter()
            .any(|kind| refers(&spec[*kind]["secretRef"], of_claim))
        || ["cinder", "storageos"].iter().any(|kind| refers(&spec[*kind]["secretRef"], ""))
        || of_csi.iter().any(|field| refers(&spec["csi"][*field], ""))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use coracle_store::Commit;

    use crate::authn::User;
    use crate::cache::{Cache, encode, key_of, parses};
    use crate::request::RequestInfo;

    /// Pods on the node `n`, each with its own secret.
    fn cache_of(pods: u64) -> Cache {
        let (cache, kind) = (Cache::new(0), by_resource("", "v1", "pods").unwrap());
        for number in 0..pods {
            let volumes =
                json!([{"secret": {"secretName": format!("s{number}")}}, {"configMap": {"name": "c"}}]);
            let claims = json!([{"name": "c", "resourceClaimName": "rc"}]);
            let pod = json!({"metadata": {"name": format!("p{number}"), "namespace": "ns"}, "spec": {
                "nodeName": "n", "serviceAccountName": "default", "volumes": volumes, "resourceClaims": claims}});
            let key = key_of(kind, "ns", &format!("p{number}")).into();
            let value = Some(encode(kind, &pod));
            let revision = number + 1;
            cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
        }
        cache
    }

    #[test]
    fn a_node_has_only_its_own_slices() {
        let (cache, kind) = (Cache::new(0), by_resource("resource.k8s.io", "v1", "resourceslices").unwrap());
        for (revision, node) in [(1, "n"), (2, "m")] {
            let slice = json!({"metadata": {"name": node}, "spec": {"nodeName": node}});
            let (key, value) = (key_of(kind, "", node).into(), Some(encode(kind, &slice)));
            cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
        }
        let user = User::new("system:node:n", &["system:nodes"]);
        for (verb, method, path, expect) in [
            ("create", http::Method::POST, "", true),
            ("delete", http::Method::DELETE, "/n", true),
            ("delete", http::Method::DELETE, "/m", false),
            ("update", http::Method::PUT, "/m", false),
            ("get", http::Method::GET, "/absent", false),
            ("list", http::Method::GET, "", false),
            ("list", http::Method::GET, "?fieldSelector=spec.nodeName%3Dn", true),
            ("list", http::Method::GET, "?fieldSelector=spec.nodeName%3D%3Dn", true),
            ("list", http::Method::GET, "?fieldSelector=spec.nodeName%3D%3D%3Dn", false),
            ("list", http::Method::GET, "?fieldSelector=spec.nodeName!%3Dn", false),
            ("watch", http::Method::GET, "?fieldSelector=spec.driver%3Dd%5C,spec.nodeName%3Dn", false),
            ("deletecollection", http::Method::DELETE, "?fieldSelector=spec.nodeName%3Dm", false),
            (
                "deletecollection",
                http::Method::DELETE,
                "?fieldSelector=spec.driver%3Dd,spec.nodeName%3Dn",
                true,
            ),
            (
                "deletecollection",
                http::Method::DELETE,
                "?fieldSelector=spec.driver%3Dspec.nodeName%3Dn",
                false,
            ),
        ] {
            let uri = format!("/apis/resource.k8s.io/v1/resourceslices{path}").parse().unwrap();
            let info = RequestInfo::parse(&method, &uri);
            let attributes = AccessAttributes { user: &user, verb, info: &info, cache: &cache };
            assert_eq!(allows(&attributes), expect, "{verb} {path}");
        }
    }

    #[test]
    fn a_node_reads_drivers_and_its_attachments_and_writes_the_status_of_its_claims() {
        let cache = Cache::new(0);
        let attachments = by_resource("storage.k8s.io", "v1", "volumeattachments").unwrap();
        let pods = by_resource("", "v1", "pods").unwrap();
        let attachment = json!({"metadata": {"name": "a"}, "spec": {"nodeName": "n"}});
        let volumes = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]);
        let pod = json!({"metadata": {"name": "p", "namespace": "ns"}, "spec": {"nodeName": "n", "volumes": volumes}});
        for (revision, kind, namespace, object) in [(1, attachments, "", &attachment), (2, pods, "ns", &pod)]
        {
            let key = key_of(kind, namespace, object["metadata"]["name"].as_str().unwrap()).into();
            let value = Some(encode(kind, object));
            cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
        }
        let claims = "/api/v1/namespaces/ns/persistentvolumeclaims";
        let storage = "/apis/storage.k8s.io/v1";
        for (node, verb, method, path, expect) in [
            ("n", "list", http::Method::GET, format!("{storage}/csidrivers"), true),
            ("n", "watch", http::Method::GET, format!("{storage}/csidrivers"), true),
            ("n", "create", http::Method::POST, format!("{storage}/csidrivers"), false),
            ("n", "list", http::Method::GET, format!("{storage}/storageclasses"), false),
            ("n", "get", http::Method::GET, format!("{storage}/volumeattachments/a"), true),
            ("m", "get", http::Method::GET, format!("{storage}/volumeattachments/a"), false),
            ("n", "get", http::Method::GET, format!("{storage}/volumeattachments/absent"), false),
            ("n", "delete", http::Method::DELETE, format!("{storage}/volumeattachments/a"), false),
            ("n", "patch", http::Method::PATCH, format!("{claims}/c/status"), true),
            ("n", "update", http::Method::PUT, format!("{claims}/c/status"), true),
            ("n", "get", http::Method::GET, format!("{claims}/c/status"), false),
            ("n", "patch", http::Method::PATCH, format!("{claims}/other/status"), false),
            ("m", "patch", http::Method::PATCH, format!("{claims}/c/status"), false),
            ("n", "patch", http::Method::PATCH, format!("{claims}/c"), false),
        ] {
            let user = User::new(&format!("system:node:{node}"), &["system:nodes"]);
            let info = RequestInfo::parse(&method, &path.parse().unwrap());
            let attributes = AccessAttributes { user: &user, verb, info: &info, cache: &cache };
            assert_eq!(allows(&attributes), expect, "{node} {verb} {path}");
        }
    }

    #[test]
    fn a_node_reads_the_secrets_with_which_it_mounts_the_volumes_of_its_pods() {
        let cache = Cache::new(0);
        let of = |plural| by_resource("", "v1", plural).unwrap();
        let volume = |name: &str| json!({"persistentVolumeClaim": {"claimName": name}, "name": name});
        let pod = json!({"metadata": {"name": "p", "namespace": "ns"}, "spec": {"nodeName": "n",
            "volumes": [volume("c"), volume("old"), volume("foreign"), volume("unbound")]}});
        let claim = |volume: &str| json!({"spec": {"volumeName": volume}});
        let bound = |name: &str| json!({"namespace": "ns", "name": name});
        let secret = |name: &str| json!({"namespace": "storage", "name": name});
        let driver = json!({"spec": {"claimRef": bound("c"), "csi": {"nodeStageSecretRef": secret("stage"),
            "controllerPublishSecretRef": secret("controller")}}});
        let old = json!({"spec": {"claimRef": bound("old"), "rbd": {"secretRef": {"name": "rbd"}}}});
        // The volume belongs to another claim.
        let foreign =
            json!({"spec": {"claimRef": bound("other"), "csi": {"nodePublishSecretRef": secret("f")}}});
        for (revision, plural, namespace, name, object) in [
            (1, "pods", "ns", "p", &pod),
            (2, "persistentvolumeclaims", "ns", "c", &claim("v")),
            (3, "persistentvolumeclaims", "ns", "old", &claim("w")),
            (4, "persistentvolumeclaims", "ns", "foreign", &claim("x")),
            (5, "persistentvolumeclaims", "ns", "unbound", &json!({"spec": {}})),
            (6, "persistentvolumes", "", "v", &driver),
            (7, "persistentvolumes", "", "w", &old),
            (8, "persistentvolumes", "", "x", &foreign),
        ] {
            let kind = of(plural);
            let (key, value) = (key_of(kind, namespace, name).into(), Some(encode(kind, object)));
            cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
        }
        for (node, secret, expect) in [
            ("n", "storage/secrets/stage", true),
            ("m", "storage/secrets/stage", false),
            ("n", "ns/secrets/stage", false),
            ("n", "storage/secrets/controller", false),
            ("n", "storage/secrets/f", false),
            ("n", "ns/secrets/rbd", true),
            ("n", "storage/secrets/rbd", false),
        ] {
            let user = User::new(&format!("system:node:{node}"), &["system:nodes"]);
            let uri = format!("/api/v1/namespaces/{secret}").parse().unwrap();
            let info = RequestInfo::parse(&http::Method::GET, &uri);
            let attributes = AccessAttributes { user: &user, verb: "get", info: &info, cache: &cache };
            assert_eq!(allows(&attributes), expect, "{node} {secret}");
        }
    }

    #[test]
    fn a_user_without_a_node_name_is_no_node() {
        let cache = cache_of(0);
        let uri = "/api/v1/pods?fieldSelector=spec.nodeName%3D".parse().unwrap();
        let info = RequestInfo::parse(&http::Method::GET, &uri);
        for (name, verb, expect) in [
            ("system:node:n", "delete", true),
            ("system:node:", "delete", false),
            ("system:node:n", "list", false),
            ("system:node:", "list", false),
        ] {
            let user = User::new(name, &["system:nodes"]);
            let attributes = AccessAttributes { user: &user, verb, info: &info, cache: &cache };
            assert_eq!(allows(&attributes), expect, "{name} {verb}");
        }
    }

    #[test]
    fn a_node_reads_no_pod_of_another_node_through_a_subresource() {
        let cache = cache_of(1);
        let user = User::new("system:node:m", &["system:nodes"]);
        for (verb, method, sub, expect) in [
            ("get", http::Method::GET, "", false),
            ("get", http::Method::GET, "/status", false),
            ("get", http::Method::GET, "/ephemeralcontainers", false),
            ("get", http::Method::GET, "/resize", false),
            ("get", http::Method::GET, "/log", false),
            // Admission allows these for pods of the node only.
            ("update", http::Method::PUT, "/status", true),
            ("patch", http::Method::PATCH, "/status", true),
            ("create", http::Method::POST, "/eviction", true),
        ] {
            let uri = format!("/api/v1/namespaces/ns/pods/p0{sub}").parse().unwrap();
            let info = RequestInfo::parse(&method, &uri);
            let attributes = AccessAttributes { user: &user, verb, info: &info, cache: &cache };
            assert_eq!(allows(&attributes), expect, "{verb} {sub}");
        }
    }

    #[test]
    fn a_node_reads_policies_with_their_definitions_and_service_ranges_only() {
        let cache = Cache::new(0);
        let user = User::new("system:node:n", &["system:nodes"]);
        let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        let of = |name: &str| format!("{definitions}?fieldSelector=metadata.name%3D{name}");
        let policies = "/apis/policy.networking.k8s.io/v1alpha2/clusternetworkpolicies";
        for (verb, method, path, expect) in [
            ("list", http::Method::GET, of("clusternetworkpolicies.policy.networking.k8s.io"), true),
            ("watch", http::Method::GET, of("adminnetworkpolicies.policy.networking.k8s.io"), true),
            ("list", http::Method::GET, of("others.policy.networking.k8s.io"), false),
            (
                "list",
                http::Method::GET,
                of("a.example%2Cmetadata.name%3Dadminnetworkpolicies.policy.networking.k8s.io"),
                false,
            ),
            ("list", http::Method::GET, definitions.to_owned(), false),
            ("list", http::Method::GET, policies.to_owned(), true),
            ("update", http::Method::PUT, format!("{policies}/p"), false),
            ("update", http::Method::PUT, format!("{policies}/p/status"), false),
            ("watch", http::Method::GET, "/apis/networking.k8s.io/v1/servicecidrs".to_owned(), true),
            ("update", http::Method::PUT, "/apis/networking.k8s.io/v1/servicecidrs/a".to_owned(), false),
            ("list", http::Method::GET, "/api/v1/pods".to_owned(), false),
        ] {
            let info = RequestInfo::parse(&method, &path.parse().unwrap());
            let attributes = AccessAttributes { user: &user, verb, info: &info, cache: &cache };
            assert_eq!(allows(&attributes), expect, "{verb} {path}");
        }
    }

    #[test]
    fn a_decision_parses_nothing_however_many_pods_there_are() {
        let parsed = |pods: u64| {
            let cache = cache_of(pods);
            let user = User::new("system:node:n", &["system:nodes"]);
            let before = parses::so_far();
            for (path, expect) in [
                ("/api/v1/namespaces/ns/secrets/s0", true),
                ("/api/v1/namespaces/ns/secrets/absent", false),
                ("/api/v1/namespaces/ns/configmaps/c", true),
                ("/api/v1/namespaces/ns/serviceaccounts/default", true),
                ("/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/rc", true),
                ("/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/other", false),
            ] {
                let uri = path.parse().unwrap();
                let info = RequestInfo::parse(&http::Method::GET, &uri);
                let attributes = AccessAttributes { user: &user, verb: "get", info: &info, cache: &cache };
                assert_eq!(allows(&attributes), expect, "{path}");
            }
            parses::so_far() - before
        };
        assert_eq!((parsed(10), parsed(1000)), (0, 0));
    }
}

//! Node restriction: a node can write only its own Node and the pods that are bound to it.
//!
//! Upstream has a plugin with the same name. The node authorizer restricts the reads of a node.

use async_trait::async_trait;
use serde_json::Value;

use super::{Admission, Admit, Attributes, Operation, certificate};
use crate::{
    error::{ApiError, Result},
    pod_references::{self, MIRROR},
};

pub(super) struct NodeRestriction;

/// Labels of the Kubernetes domains that a node may set on itself.
const OWN_LABELS: &[&str] = &[
    "kubernetes.io/hostname",
    "kubernetes.io/arch",
    "kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/instance-type",
    "node.kubernetes.io/instance-type",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
];
/// The label and the finalizer of local volumes.
const LOCAL_NODE: &str = crate::authz::node::LOCAL_NODE;
const LOCAL_FINALIZER: &str = "coracle.dev/local-volume";
const OWN_LABEL_DOMAINS: &[&str] = &["kubelet.kubernetes.io", "node.kubernetes.io"];
/// Domain of labels by which controllers select nodes, for example nodes that serve load balancers.
const PRODUCT_DOMAIN: &str = "coracle.dev";

#[async_trait]
impl Admit for NodeRestriction {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let Some(node) = attributes.user.node() else { return Ok(()) };
        let checked = match (&*attributes.kind.group, &*attributes.kind.kind) {
            ("", "Node") => node_object(node, attributes, object),
            ("", "Pod") => pod(admission, node, attributes, object),
            ("", "PersistentVolumeClaim") => claim(node, attributes, object),
            ("coordination.k8s.io", "Lease") => lease(node, attributes, object),
            ("", "PersistentVolume") => local_volume(node, attributes, object),
            ("storage.k8s.io", "CSINode") => csi_node(node, object),
            ("certificates.k8s.io", "CertificateSigningRequest") => request(attributes, object),
            ("resource.k8s.io", "ResourceSlice") => slice(node, attributes.operation, attributes.old, object),
            _ => Ok(()),
        };
        checked.map_err(|why| ApiError::forbidden_object(attributes.kind, attributes.name, why))
    }

    fn precedes_validation(&self) -> bool {
        true
    }
}

type Checked = std::result::Result<(), String>;

fn ensure(right: bool, why: impl FnOnce() -> String) -> Checked {
    if right { Ok(()) } else { Err(why()) }
}

fn node_object(node: &str, attributes: &Attributes<'_>, object: &Value) -> Checked {
    // Compare the name in the object: a generated name could begin with the name of this node.
    ensure(object["metadata"]["name"] == node, || {
        format!("node \"{node}\" is not allowed to modify node \"{}\"", attributes.name)
    })?;
    ensure(!sets_pod_ranges(attributes.old, object), || {
        format!("node \"{node}\" is not allowed to set podCIDR and podCIDRs")
    })?;
    if let (Operation::Update, Some(old)) = (attributes.operation, attributes.old) {
        ensure(same(&old["spec"]["taints"], &object["spec"]["taints"]), || {
            format!("node \"{node}\" is not allowed to modify taints")
        })?;
        let owners = |object: &Value| object["metadata"]["ownerReferences"].clone();
        ensure(same(&owners(old), &owners(object)), || {
            format!("node \"{node}\" is not allowed to modify ownerReferences")
        })?;
    }
    let labels = forbidden_labels(attributes.old, object);
    let verb = if attributes.old.is_some() { "modify" } else { "set the following" };
    ensure(labels.is_empty(), || {
        format!("node \"{node}\" is not allowed to {verb} labels: {}", labels.join(", "))
    })
}

/// Whether a node changes the ranges of its pods. All nodes send the packets for these ranges to that node. So a node
/// that chose its ranges could get the packets of other nodes' pods. Upstream's plugin allows this change.
fn sets_pod_ranges(old: Option<&Value>, new: &Value) -> bool {
    let before = old.map_or(&Value::Null, |old| &old["spec"]);
    let after = &new["spec"];
    let range = |spec: &Value| spec["podCIDR"].as_str().unwrap_or_default().to_owned();
    range(before) != range(after) || !same(&before["podCIDRs"], &after["podCIDRs"])
}

/// Whether two lists are equal. An absent list equals an empty list.
fn same(a: &Value, b: &Value) -> bool {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    list(a) == list(b)
}

/// Changed labels that a node must not set, because other components select nodes by them.
fn forbidden_labels(old: Option<&Value>, new: &Value) -> Vec<String> {
    let of = |object: Option<&Value>| {
        object.and_then(|object| object["metadata"]["labels"].as_object()).cloned().unwrap_or_default()
    };
    let (old, new) = (of(old), of(Some(new)));
    let mut changed: Vec<String> = new
        .iter()
        .filter(|(key, value)| old.get(*key) != Some(value))
        .chain(old.iter().filter(|(key, _)| !new.contains_key(*key)))
        .map(|(key, _)| key.clone())
        .filter(|key| !is_own_label(key))
        .collect();
    changed.sort_unstable();
    changed
}

fn is_own_label(key: &str) -> bool {
    let domain = key.split_once('/').map_or("", |(domain, _)| domain);
    let within = |of: &str| domain == of || domain.strip_suffix(of).is_some_and(|rest| rest.ends_with('.'));
    let reserved = ["kubernetes.io", "k8s.io", PRODUCT_DOMAIN].into_iter().any(within);
    !reserved || OWN_LABELS.contains(&key) || OWN_LABEL_DOMAINS.iter().any(|own| within(own))
}

fn pod(admission: &Admission, node: &str, attributes: &Attributes<'_>, object: &Value) -> Checked {
    if attributes.operation == Operation::Create {
        return mirror_pod(admission, node, object);
    }
    let bound = attributes.old.unwrap_or(object)["spec"]["nodeName"] == node;
    ensure(bound, || foreign_pod(node, attributes.operation, attributes.subresource))?;
    match (attributes.operation, attributes.subresource, attributes.old) {
        (Operation::Create | Operation::Delete | Operation::Connect, ..) => Ok(()),
        (Operation::Update, "status", Some(old)) => {
            let labels = |object: &Value| object["metadata"]["labels"].clone();
            ensure(labels(old) == labels(object), || {
                format!("node \"{node}\" cannot update labels through pod status")
            })?;
            // CVE-2025-4563: the node could otherwise get access to a claim that the pod's status names.
            let claims = ["resourceClaimStatuses", "extendedResourceClaimStatus"];
            ensure(claims.iter().all(|claim| old["status"][claim] == object["status"][claim]), || {
                format!("node \"{node}\" cannot update resource claim statuses")
            })
        }
        (Operation::Update, ..) => Err(format!("node \"{node}\" can only update the status of pods")),
    }
}

/// The error for a pod that is not bound to the node, in upstream's words.
fn foreign_pod(node: &str, operation: Operation, subresource: &str) -> String {
    let own = "with spec.nodeName set to itself";
    match (operation, subresource) {
        (Operation::Delete, "eviction") => format!("node {node} can only evict pods {own}"),
        (Operation::Delete, _) => format!("node \"{node}\" can only delete pods {own}"),
        _ => format!("node \"{node}\" can only update pod status for pods {own}"),
    }
}

/// Checks a mirror pod. It must not refer to objects of the cluster.
fn mirror_pod(admission: &Admission, node: &str, pod: &Value) -> Checked {
    ensure(pod["metadata"]["annotations"][MIRROR].is_string(), || {
        format!("pod does not have \"{MIRROR}\" annotation, node \"{node}\" can only create mirror pods")
    })?;
    ensure(pod["spec"]["nodeName"] == node, || {
        format!("node \"{node}\" can only create pods with spec.nodeName set to itself")
    })?;
    let kind = coracle_kinds::kind::by_resource("", "v1", "nodes");
    let own = kind.and_then(|kind| admission.cache.get(kind, "", node)).map(|object| object.value());
    let uid = own.map(|own| own["metadata"]["uid"].clone()).unwrap_or_default();
    let owners = pod["metadata"]["ownerReferences"].as_array().cloned().unwrap_or_default();
    let owned = matches!(owners.as_slice(), [owner] if owner["apiVersion"] == "v1"
        && owner["kind"] == "Node" && owner["name"] == node && owner["uid"] == uid
        && owner["controller"] == true && owner["blockOwnerDeletion"] != true);
    ensure(owned, || format!("node \"{node}\" can only create pods with an owner reference set to itself"))?;
    let uses = |what: &str, used: bool| {
        ensure(!used, || format!("node \"{node}\" can not create pods that reference {what}"))
    };
    let account = &pod["spec"]["serviceAccountName"];
    uses("a service account", account.as_str().is_some_and(|name| !name.is_empty()))?;
    uses("secrets", !pod_references::secrets_of(pod).is_empty())?;
    uses("configmaps", !pod_references::config_maps_of(pod).is_empty())?;
    uses(
        "resourceclaims",
        pod["spec"]["resourceClaims"].as_array().is_some_and(|claims| !claims.is_empty()),
    )?;
    referred_by_volumes(pod).map_or(Ok(()), |what| uses(what, true))
}

/// The first reference to another resource in a pod's volumes. Source: `HasAPIObjectReference` in upstream's
/// `pkg/api/pod`.
fn referred_by_volumes(pod: &Value) -> Option<&'static str> {
    const VOLUMES: [(&str, &str); 7] = [
        ("persistentVolumeClaim", "persistentvolumeclaims"),
        ("ephemeral", "persistentvolumeclaims (via ephemeral volumes)"),
        ("configMap", "configmaps (via configmap volumes)"),
        ("secret", "secrets (via secret volumes)"),
        ("csi", "csidrivers (via CSI volumes)"),
        ("glusterfs", "endpoints (via glusterFS volumes)"),
        ("azureFile", "secrets (via azureFile volumes)"),
    ];
    const PROJECTED: [(&str, &str); 5] = [
        ("configMap", "configmaps (via projected volumes)"),
        ("secret", "secrets (via projected volumes)"),
        ("serviceAccountToken", "serviceaccounts (via projected volumes)"),
        ("clusterTrustBundle", "clustertrustbundles"),
        ("podCertificate", "podcertificates"),
    ];
    let of = |source: &Value, table: &[(&str, &'static str)]| {
        table.iter().find(|(field, _)| !source[*field].is_null()).map(|(_, what)| *what)
    };
    // Volumes of older types name a secret in `secretRef`.
    let has_secret = |volume: &Value| {
        let types = volume.as_object();
        types.is_some_and(|types| types.values().any(|one| !one["secretRef"].is_null()))
    };
    pod["spec"]["volumes"].as_array()?.iter().find_map(|volume| {
        let mut projected = volume["projected"]["sources"].as_array().into_iter().flatten();
        of(volume, &VOLUMES)
            .or_else(|| projected.find_map(|source| of(source, &PROJECTED)))
            .or_else(|| has_secret(volume).then_some("secrets"))
    })
}

/// Checks that a node changes only the fields of a claim's status that the expansion of its volume changes.
fn claim(node: &str, attributes: &Attributes<'_>, object: &Value) -> Checked {
    ensure(attributes.subresource == "status", || "may only update PVC status".to_owned())?;
    let is_update = attributes.operation == Operation::Update;
    ensure(is_update && attributes.old.is_some_and(|old| is_expansion(old, object)), || {
        format!(
            "node \"{node}\" is not allowed to update fields other than status.quantity and status.conditions"
        )
    })
}

/// Whether two versions of a claim differ only in the progress of an expansion.
fn is_expansion(old: &Value, new: &Value) -> bool {
    let others = |claim: &Value| {
        let mut others = claim.clone();
        let parts = [
            ("metadata", &["resourceVersion", "managedFields"][..]),
            ("status", &["capacity", "conditions", "allocatedResources", "allocatedResourceStatuses"][..]),
        ];
        for (part, fields) in parts {
            let Some(part) = others.get_mut(part).and_then(Value::as_object_mut) else { continue };
            for field in fields {
                part.remove(*field);
            }
        }
        others
    };
    let (mut old, mut new) = (others(old), others(new));
    let statuses = [&mut old, &mut new].map(|claim| claim["status"].take());
    let is_empty = |status: &Value| status.as_object().is_none_or(serde_json::Map::is_empty);
    let same = statuses[0] == statuses[1] || statuses.iter().all(is_empty);
    same && old == new
}

fn lease(node: &str, attributes: &Attributes<'_>, object: &Value) -> Checked {
    let own = object["metadata"]["name"] == node && attributes.namespace == "kube-node-lease";
    ensure(own, || "can only access node lease with the same name as the requesting node".to_owned())
}

/// Checks that the node only removes its finalizer, from one of its volumes that is being deleted.
fn local_volume(node: &str, attributes: &Attributes<'_>, object: &Value) -> Checked {
    let released = |old: &Value| {
        let mut new = object.clone();
        let own = old["metadata"]["labels"][LOCAL_NODE] == node;
        let kept = old["metadata"]["finalizers"].as_array().into_iter().flatten();
        let kept: Vec<Value> = kept.filter(|name| *name != LOCAL_FINALIZER).cloned().collect();
        let left = object["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
        if let Some(metadata) = new.get_mut("metadata").and_then(Value::as_object_mut) {
            for field in ["finalizers", "managedFields", "resourceVersion"] {
                match old["metadata"].get(field) {
                    Some(value) => metadata.insert(field.to_owned(), value.clone()),
                    None => metadata.remove(field),
                };
            }
        }
        own && old["metadata"]["deletionTimestamp"].is_string() && left == kept && new == *old
    };
    let right = attributes.operation == Operation::Update && attributes.old.is_some_and(released);
    ensure(right, || {
        format!("node \"{node}\" can only remove its finalizer from its local volumes that are being deleted")
    })
}

fn csi_node(node: &str, object: &Value) -> Checked {
    ensure(object["metadata"]["name"] == node, || {
        "can only access CSINode with the same name as the requesting node".to_owned()
    })
}

/// Checks that a node writes only slices of its own devices, and does not assign them to another node.
fn slice(node: &str, operation: Operation, old: Option<&Value>, object: &Value) -> Checked {
    let written = matches!(operation, Operation::Create | Operation::Update).then_some(object);
    let own = |slice: &Value| slice["spec"]["nodeName"] == node;
    ensure(old.into_iter().chain(written).all(own), || {
        "can only write ResourceSlice with the same NodeName as the requesting node".to_owned()
    })
}

/// Checks that a node requests certificates only for its own name.
fn request(attributes: &Attributes<'_>, object: &Value) -> Checked {
    let signer = object["spec"]["signerName"].as_str().unwrap_or_default();
    if attributes.operation != Operation::Create
        || ![certificate::NODE_CLIENT, certificate::NODE_SERVING].contains(&signer)
    {
        return Ok(());
    }
    let own = certificate::subject(object)?.is_none_or(|asked| asked.common_name == attributes.user.name);
    ensure(own, || format!("can only create a node CSR with CN={}", attributes.user.name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_writes_only_slices_of_its_own_devices() {
        let (own, foreign) = (json!({"spec": {"nodeName": "n"}}), json!({"spec": {"nodeName": "m"}}));
        let shared = json!({"spec": {"allNodes": true}});
        for (operation, old, new, expect) in [
            (Operation::Create, None, &own, true),
            (Operation::Create, None, &foreign, false),
            (Operation::Create, None, &shared, false),
            (Operation::Update, Some(&own), &own, true),
            (Operation::Update, Some(&foreign), &own, false),
            (Operation::Update, Some(&own), &shared, false),
            (Operation::Delete, Some(&own), &Value::Null, true),
            (Operation::Delete, Some(&foreign), &Value::Null, false),
        ] {
            assert_eq!(slice("n", operation, old, new).is_ok(), expect, "{operation:?} {old:?} {new}");
        }
    }

    #[test]
    fn a_node_changes_only_the_progress_of_an_expansion() {
        let old = json!({"metadata": {"name": "c", "resourceVersion": "1"}, "spec": {"volumeName": "v"},
            "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}});
        let changed = |path: &str, value: Value| {
            let mut new = old.clone();
            let (part, field) = path.split_once('/').unwrap();
            new[part][field] = value;
            is_expansion(&old, &new)
        };
        assert!(changed("status/capacity", json!({"storage": "2Gi"})));
        assert!(changed("status/conditions", json!([{"type": "Resizing", "status": "True"}])));
        assert!(changed("status/allocatedResourceStatuses", json!({"storage": "NodeResizePending"})));
        assert!(changed("metadata/resourceVersion", json!("2")));
        assert!(!changed("status/phase", json!("Lost")));
        assert!(!changed("metadata/labels", json!({"a": "b"})));
        assert!(!changed("metadata/finalizers", json!(["a/b"])));
        assert!(!changed("spec/volumeName", json!("other")));
        // A claim without a status gets its first capacity.
        let (none, first) =
            (json!({"spec": {}}), json!({"spec": {}, "status": {"capacity": {"storage": "1Gi"}}}));
        assert!(is_expansion(&none, &first) && is_expansion(&first, &none));
    }

    #[test]
    fn the_error_names_what_a_node_may_not_do() {
        let of = |operation, subresource| foreign_pod("n", operation, subresource);
        let own = "with spec.nodeName set to itself";
        assert_eq!(of(Operation::Delete, ""), format!("node \"n\" can only delete pods {own}"));
        assert_eq!(of(Operation::Delete, "eviction"), format!("node n can only evict pods {own}"));
        let status = format!("node \"n\" can only update pod status for pods {own}");
        assert_eq!(of(Operation::Update, "status"), status);
    }

    #[test]
    fn a_node_does_not_choose_the_ranges_of_its_pods() {
        let of = |spec: Value| json!({"spec": spec});
        let (none, empty) = (of(json!({})), of(json!({"podCIDR": "", "podCIDRs": []})));
        let assigned = of(json!({"podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24"]}));
        for (old, new, expect) in [
            (None, &none, false),
            (None, &empty, false),
            (None, &assigned, true),
            (None, &of(json!({"podCIDR": "0.0.0.0/1"})), true),
            (None, &of(json!({"podCIDRs": ["0.0.0.0/1"]})), true),
            (Some(&none), &empty, false),
            (Some(&none), &assigned, true),
            (Some(&assigned), &assigned, false),
            (Some(&assigned), &none, true),
        ] {
            assert_eq!(sets_pod_ranges(old, new), expect, "{old:?} {new}");
        }
    }

    #[test]
    fn a_mirror_pod_has_no_volume_of_an_object() {
        let of = |volumes: Value| referred_by_volumes(&json!({"spec": {"volumes": volumes}}));
        let projected = |source: Value| json!([{"name": "v", "projected": {"sources": [source]}}]);
        let own = json!([{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/"}}]);
        for allowed in [own, projected(json!({"downwardAPI": {}})), json!([]), Value::Null] {
            assert_eq!(of(allowed.clone()), None, "{allowed}");
        }
        for (volumes, what) in [
            (json!([{"emptyDir": {}}, {"ephemeral": {}}]), "persistentvolumeclaims (via ephemeral volumes)"),
            (json!([{"persistentVolumeClaim": {"claimName": "c"}}]), "persistentvolumeclaims"),
            (json!([{"csi": {"driver": "d"}}]), "csidrivers (via CSI volumes)"),
            (json!([{"azureFile": {"secretName": "s"}}]), "secrets (via azureFile volumes)"),
            (json!([{"name": "v", "rbd": {"secretRef": {"name": "s"}}}]), "secrets"),
            (
                projected(json!({"serviceAccountToken": {"path": "t"}})),
                "serviceaccounts (via projected volumes)",
            ),
            (projected(json!({"clusterTrustBundle": {"path": "t"}})), "clustertrustbundles"),
            (projected(json!({"podCertificate": {}})), "podcertificates"),
        ] {
            assert_eq!(of(volumes.clone()), Some(what), "{volumes}");
        }
    }

    #[test]
    fn a_node_does_not_set_labels_by_which_other_components_select_nodes() {
        let object = |labels: Value| json!({"metadata": {"labels": labels}});
        let own = object(json!({"kubernetes.io/hostname": "a", "example.com/x": "y", "plain": "z",
            "node.kubernetes.io/anything": "1", "topology.kubernetes.io/zone": "z"}));
        assert!(forbidden_labels(None, &own).is_empty());
        for label in [
            "node-role.kubernetes.io/control-plane",
            "node-restriction.kubernetes.io/secret",
            "x.node-restriction.kubernetes.io/secret",
            "foo.k8s.io/bar",
            "coracle.dev/enable-lb",
        ] {
            let set = object(json!({label: "1"}));
            assert_eq!(forbidden_labels(None, &set), [label]);
            assert_eq!(forbidden_labels(Some(&set), &object(json!({}))), [label]);
            assert!(forbidden_labels(Some(&set), &set).is_empty());
        }
    }
}

//! Update strategies: the parts of an object that each kind of write may change. The parts are status, spec, generation
//! and server-owned metadata.

mod disabled;
mod pod;
pub(crate) mod pod_group;
mod resize;
mod service;
pub(crate) mod storage;
pub(crate) mod workload;

use serde_json::{Map, Value, json};

use crate::{Resource, defaults, initialization};

pub use coracle_pod_rules::qos::qos_class;
pub use pod_group::drop_scheduling_group;
pub use resize::prepare_for_resize;
pub use workload::prepare_named;

/// Metadata that no client can change after creation.
const SERVER_OWNED: [&str; 5] =
    ["uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds"];

const CERTIFICATES: &str = "certificates.k8s.io";
const SIGNING_REQUEST: &str = "CertificateSigningRequest";

/// Prepares a new object: removes the client's status, and sets generation 1 if the kind has generations. Objects of
/// other kinds keep the generation that the client sets, as upstream.
pub fn prepare_for_create(kind: &Resource, object: &mut Value) {
    let Some(metadata) = object.as_object_mut().and_then(metadata_of) else { return };
    metadata.remove("selfLink");
    metadata.remove("deletionTimestamp");
    metadata.remove("deletionGracePeriodSeconds");
    if kind.has_generation {
        metadata.insert("generation".to_owned(), 1.into());
    }
    disabled::drop_fields(kind, object, None);
    kind.strategy().prepare_create(object);
    kind.strategy().canonical(object);
}

/// Prepares an update of the resource itself: keeps the old status, and increases the generation if the spec changed.
pub fn prepare_for_update(kind: &Resource, new: &mut Value, old: &Value) {
    keep_server_owned(new, old);
    if kind.has_status {
        take(new, old, "status");
    }
    if kind.is("", "Pod") && initialization::is_pending(old) && new["status"].is_object() {
        // An initializer may change the resources of the containers.
        new["status"]["qosClass"] = qos_class(&new["spec"]).as_str().into();
    }
    if kind.is("", "Namespace") || kind.is(CERTIFICATES, SIGNING_REQUEST) {
        // A namespace's finalizers change through /finalize only. The spec of a signing request never changes.
        take(new, old, "spec");
    }
    if kind.is("", "Service") {
        service::drop_dependent_fields(new, old);
    }
    disabled::drop_fields(kind, new, Some(old));
    if kind.is("", "PersistentVolumeClaim") {
        storage::drop_data_sources(new, Some(old));
    }
    kind.strategy().prepare_update(new, old);
    if kind.is("apps", "DaemonSet") {
        workload::update_daemon_set(new, old);
    }
    if kind.has_generation && is_new_generation(kind, new, old) {
        let generation = old["metadata"]["generation"].as_i64().unwrap_or(0) + 1;
        new["metadata"]["generation"] = generation.into();
    }
}

/// Prepares an update of `/status`: only the status changes, and the metadata that upstream allows there.
pub fn prepare_for_status_update(kind: &Resource, new: &mut Value, old: &Value) {
    keep_server_owned(new, old);
    let Some(map) = new.as_object_mut() else { return };
    // Most updates repeat the other fields, so comparing is cheaper than replacing them.
    let is_updated = |name: &str| matches!(name, "metadata" | "status");
    map.retain(|name, _| is_updated(name) || old.get(name).is_some());
    let kept = old.as_object().into_iter().flatten().filter(|(name, _)| !is_updated(name));
    for (name, value) in kept {
        if map.get(name) != Some(value) {
            map.insert(name.clone(), value.clone());
        }
    }
    if let Some(metadata) = metadata_of(map) {
        for name in status_preserved_metadata(kind) {
            match old["metadata"].get(name) {
                Some(value) => metadata.insert((*name).to_owned(), value.clone()),
                None => metadata.remove(*name),
            };
        }
    }
    if kind.is("", "Namespace") || kind.is("", "Service") {
        // Defaults of the status: the phase of a namespace, and `ipMode` of a load balancer's addresses.
        defaults::apply(kind, new);
    }
    if kind.is(CERTIFICATES, SIGNING_REQUEST) {
        keep_approval_conditions(new, old);
    }
    if kind.is("", "Pod") {
        defaults::pod::addresses(new);
        keep_class(new, old);
        pod::keep_observed_generations(new, old);
        disabled::drop_status_fields(new, old);
    }
    if kind.is("", "PersistentVolume") {
        storage::set_transition_time(new, old);
    }
    if kind.is("resource.k8s.io", "ResourceClaim") {
        drop_deallocated_devices(new);
    }
    if kind.is("scheduling.k8s.io", "PodGroup") {
        pod_group::drop_from_status(new);
    }
}

/// Removes the status of devices from a claim without an allocation. Source: `dropDeallocatedStatusDevices`.
fn drop_deallocated_devices(claim: &mut Value) {
    if claim["status"]["allocation"].is_null()
        && let Some(status) = claim.get_mut("status").and_then(Value::as_object_mut)
    {
        status.remove("devices");
    }
}

/// Keeps the QoS class of a pod if a client omits it. Source: `podStatusStrategy.PrepareForUpdate`.
fn keep_class(new: &mut Value, old: &Value) {
    let Some(class) = old["status"].get("qosClass") else { return };
    let Some(status) = new["status"].as_object_mut() else { return };
    if status.get("qosClass").is_none_or(|class| class.is_null() || class == "") {
        status.insert("qosClass".to_owned(), class.clone());
    }
}

/// Prepares an update of `/approval` of a certificate signing request: of spec and status, only the conditions change.
pub fn prepare_for_approval(kind: &Resource, new: &mut Value, old: &Value) {
    let conditions = new["status"]["conditions"].take();
    prepare_for_update(kind, new, old);
    if !new["status"].is_object() {
        new["status"] = json!({});
    }
    if let Some(status) = new["status"].as_object_mut() {
        match conditions {
            Value::Null => status.remove("conditions"),
            list => status.insert("conditions".to_owned(), list),
        };
    }
}

/// Keeps the conditions Approved and Denied: only `/approval` can change them.
fn keep_approval_conditions(new: &mut Value, old: &Value) {
    let is_verdict = |condition: &Value| matches!(condition["type"].as_str(), Some("Approved" | "Denied"));
    let list = |object: &Value, verdicts: bool| {
        let all = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.into_iter().filter(move |condition| is_verdict(condition) == verdicts).collect::<Vec<_>>()
    };
    let conditions: Vec<Value> = list(old, true).into_iter().chain(list(new, false)).collect();
    if let Some(status) = new["status"].as_object_mut() {
        if conditions.is_empty() {
            status.remove("conditions");
        } else {
            status.insert("conditions".to_owned(), conditions.into());
        }
    }
}

/// Prepares an update of `/finalize` of a namespace: keeps the status. Only this subresource can change the spec's
/// finalizers.
pub fn prepare_for_finalize(new: &mut Value, old: &Value) {
    keep_server_owned(new, old);
    take(new, old, "status");
}

/// Prepares an update of `/ephemeralcontainers` of a pod: only that list changes.
pub fn prepare_for_ephemeral_containers(kind: &Resource, new: &mut Value, old: &Value) {
    let list = new["spec"]["ephemeralContainers"].take();
    let version = new["metadata"]["resourceVersion"].take();
    *new = old.clone();
    if !version.is_null() {
        new["metadata"]["resourceVersion"] = version;
    }
    if let Some(spec) = new["spec"].as_object_mut() {
        match list {
            Value::Null => spec.remove("ephemeralContainers"),
            list => spec.insert("ephemeralContainers".to_owned(), list),
        };
    }
    prepare_for_update(kind, new, old);
}

/// Whether a write changes nothing. Such a write gets no new resourceVersion.
pub fn is_noop(new: &Value, old: &Value) -> bool {
    let (Some(new), Some(old)) = (new.as_object(), old.as_object()) else { return new == old };
    let version = "resourceVersion";
    new.len() == old.len()
        && new.iter().all(|(name, value)| match (name.as_str(), value, old.get(name)) {
            ("metadata", Value::Object(a), Some(Value::Object(b))) => {
                let others = |map: &Map<String, Value>| map.len() - usize::from(map.contains_key(version));
                others(a) == others(b)
                    && a.iter().all(|(key, value)| key == version || b.get(key) == Some(value))
            }
            (_, value, other) => Some(value) == other,
        })
}

/// The status of a new pod.
pub(crate) fn new_pod(pod: &mut Value) {
    pod["status"] = json!({"phase": "Pending", "qosClass": qos_class(&pod["spec"]).as_str()});
    pod::new_pod(pod);
}

/// Prepares a new namespace: sets the phase Active, and appends the finalizer of the namespace controller.
pub(crate) fn new_namespace(namespace: &mut Value) {
    namespace["status"] = json!({"phase": "Active"});
    let finalizers = &mut namespace["spec"]["finalizers"];
    if !finalizers.is_array() {
        *finalizers = json!([]);
    }
    if let Some(list) = finalizers.as_array_mut()
        && !list.iter().any(|finalizer| finalizer == "kubernetes")
    {
        list.push("kubernetes".into());
    }
}

/// Removes everything but the names from the secrets of a service account. Source: `cleanSecretReferences`.
pub(crate) fn clean_secrets(account: &mut Value) {
    let secrets = account.get_mut("secrets").and_then(Value::as_array_mut);
    for secret in secrets.into_iter().flatten().filter_map(Value::as_object_mut) {
        secret.retain(|field, _| field == "name");
    }
}

/// The metadata of an object. Absent metadata is created. `None` if the metadata is not a JSON object.
fn metadata_of(object: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
    object.entry("metadata").or_insert_with(|| json!({})).as_object_mut()
}

/// Keeps server-owned metadata. A client may omit this metadata, but can never set the generation and the deletion.
fn keep_server_owned(new: &mut Value, old: &Value) {
    let Some(metadata) = new.as_object_mut().and_then(metadata_of) else { return };
    metadata.remove("selfLink");
    for name in SERVER_OWNED {
        let given = metadata.get(name).is_some_and(|value| !value.is_null() && value != "");
        if given && matches!(name, "uid" | "creationTimestamp") {
            continue;
        }
        match old["metadata"].get(name) {
            Some(value) => metadata.insert(name.to_owned(), value.clone()),
            None => metadata.remove(name),
        };
    }
}

fn take(new: &mut Value, old: &Value, name: &str) {
    let Some(map) = new.as_object_mut() else { return };
    match old.get(name) {
        Some(value) => map.insert(name.to_owned(), value.clone()),
        None => map.remove(name),
    };
}

fn is_new_generation(kind: &Resource, new: &Value, old: &Value) -> bool {
    match (&*kind.group, &*kind.kind) {
        // As upstream, a change of an annotation of a deployment increases the generation.
        ("apps", "Deployment") => {
            new["spec"] != old["spec"] || new["metadata"]["annotations"] != old["metadata"]["annotations"]
        }
        ("discovery.k8s.io", "EndpointSlice") => {
            ["addressType", "endpoints", "ports"].iter().any(|name| new[name] != old[name])
                || new["metadata"]["labels"] != old["metadata"]["labels"]
        }
        ("admissionregistration.k8s.io", _) => {
            new["spec"] != old["spec"] || new["webhooks"] != old["webhooks"]
        }
        ("", "PodTemplate") => new["template"] != old["template"],
        _ if kind.is_built_in => new["spec"] != old["spec"],
        // For a custom resource, every change outside of metadata and status increases the generation.
        _ => {
            let counts = |object: &Value| {
                let mut object = object.as_object().cloned().unwrap_or_default();
                object.retain(|name, _| {
                    !matches!(name.as_str(), "apiVersion" | "kind" | "metadata" | "status")
                });
                object
            };
            counts(new) != counts(old)
        }
    }
}

/// The metadata that a client can change.
const ALL_METADATA: &[&str] = &["labels", "annotations", "finalizers", "ownerReferences"];

/// Paths of fields that a request for a subresource cannot set. An empty `subresource` means the object itself. A field
/// manager does not own these fields. Source: `GetResetFields` of upstream's strategies.
pub fn reset_fields(kind: &Resource, subresource: &str) -> &'static [&'static [&'static str]] {
    let is_request = kind.is(CERTIFICATES, SIGNING_REQUEST);
    match subresource {
        "" if is_request => &[&["spec"], &["status"]],
        "" if kind.has_status => &[&["status"]],
        "status" if is_request => &[&["spec"], &["status", "conditions"]],
        "status" if kind.is("", "Pod") => {
            &[&["spec"], &["metadata", "deletionTimestamp"], &["metadata", "ownerReferences"]]
        }
        "status" if kind.is("apps", "Deployment") => &[&["spec"], &["metadata", "labels"]],
        "status" if status_preserved_metadata(kind).starts_with(ALL_METADATA) => &[&["spec"], &["metadata"]],
        "status" => &[&["spec"]],
        "approval" if is_request => &[&["spec"], &["status", "certificate"]],
        "finalize" if kind.is("", "Namespace") => &[&["status"]],
        _ => &[],
    }
}

/// Metadata that a write of `/status` does not change. Source: `PrepareForUpdate` of the status strategies; several
/// call `ResetObjectMetaForStatus`.
fn status_preserved_metadata(kind: &Resource) -> &'static [&'static str] {
    match (&*kind.group, &*kind.kind) {
        ("apps", "Deployment") => &["labels"],
        ("", "Pod") => &["ownerReferences"],
        ("admissionregistration.k8s.io", "ValidatingAdmissionPolicy")
        | ("apiregistration.k8s.io", "APIService")
        | ("flowcontrol.apiserver.k8s.io", "FlowSchema" | "PriorityLevelConfiguration")
        | ("networking.k8s.io", "ServiceCIDR")
        | ("resource.k8s.io", "ResourceClaim")
        | ("scheduling.k8s.io", "PodGroup")
        | ("storage.k8s.io", "VolumeAttachment")
        | ("storagemigration.k8s.io", "StorageVersionMigration") => ALL_METADATA,
        _ if !kind.is_built_in => {
            &["labels", "annotations", "finalizers", "ownerReferences", "generateName", "namespace", "name"]
        }
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::by_kind;

    fn kind(name: &str) -> &'static Resource {
        by_kind("v1", name).or_else(|| by_kind("apps/v1", name)).unwrap()
    }

    #[test]
    fn a_status_write_owns_no_fields_that_it_cannot_set() {
        let of = |version: &str, name: &str, subresource: &str| {
            reset_fields(by_kind(version, name).unwrap(), subresource).concat()
        };
        assert_eq!(of("v1", "Node", ""), ["status"]);
        assert_eq!(of("v1", "Node", "status"), ["spec"]);
        assert_eq!(of("v1", "ConfigMap", ""), [""; 0]);
        assert_eq!(of("v1", "Namespace", "finalize"), ["status"]);
        assert_eq!(of("resource.k8s.io/v1", "ResourceClaim", "status"), ["spec", "metadata"]);
        assert_eq!(of("flowcontrol.apiserver.k8s.io/v1", "FlowSchema", "status"), ["spec", "metadata"]);
        let request =
            |subresource: &str| of("certificates.k8s.io/v1", "CertificateSigningRequest", subresource);
        assert_eq!(request(""), ["spec", "status"]);
        assert_eq!(request("approval"), ["spec", "status", "certificate"]);
    }

    #[test]
    fn the_status_of_a_flow_schema_keeps_its_labels() {
        let kind = by_kind("flowcontrol.apiserver.k8s.io/v1", "FlowSchema").unwrap();
        let old = json!({"metadata": {"name": "f", "labels": {"a": "b"}}, "spec": {}, "status": {}});
        let mut new = old.clone();
        new["metadata"]["labels"] = json!({"c": "d"});
        new["status"] = json!({"conditions": []});
        prepare_for_status_update(kind, &mut new, &old);
        assert_eq!(
            (&new["metadata"]["labels"], &new["status"]),
            (&json!({"a": "b"}), &json!({"conditions": []}))
        );
    }

    #[test]
    fn creation_resets_status() {
        let cases = [
            (
                "Pod",
                json!({"spec": {}, "status": {"phase": "Running"}}),
                json!({"phase": "Pending", "qosClass": "BestEffort"}),
            ),
            ("Deployment", json!({"status": {"replicas": 3}}), json!({})),
            ("Namespace", json!({"status": {"phase": "Terminating"}}), json!({"phase": "Active"})),
        ];
        for (name, mut object, expect) in cases {
            prepare_for_create(kind(name), &mut object);
            assert_eq!(object["status"], expect, "{name}");
        }
        let mut node = json!({"status": {"capacity": {"cpu": "2"}}});
        prepare_for_create(kind("Node"), &mut node);
        assert_eq!(node["status"]["capacity"], json!({"cpu": "2"}), "a node registers with its status");
    }

    #[test]
    fn a_new_object_has_generation_1_or_that_of_the_client() {
        for (name, expect) in [("Deployment", 1), ("Pod", 1), ("ConfigMap", 7), ("ControllerRevision", 7)] {
            let mut object = json!({"metadata": {"generation": 7}, "spec": {}});
            prepare_for_create(kind(name), &mut object);
            assert_eq!(object["metadata"]["generation"], expect, "{name}");
        }
    }

    #[test]
    fn a_new_namespace_keeps_the_finalizers_of_the_client() {
        for (given, expect) in [
            (json!({}), json!(["kubernetes"])),
            (json!({"finalizers": ["a.b/c"]}), json!(["a.b/c", "kubernetes"])),
            (json!({"finalizers": ["kubernetes", "a.b/c"]}), json!(["kubernetes", "a.b/c"])),
        ] {
            let mut namespace = json!({"metadata": {"name": "n"}, "spec": given});
            prepare_for_create(kind("Namespace"), &mut namespace);
            assert_eq!(namespace["spec"]["finalizers"], expect);
        }
    }

    #[test]
    fn a_service_account_has_names_of_secrets_only() {
        let mut account = json!({"secrets": [{"name": "s", "namespace": "n", "kind": "Secret"}]});
        prepare_for_create(kind("ServiceAccount"), &mut account);
        assert_eq!(account["secrets"], json!([{"name": "s"}]));
    }

    #[test]
    fn generation_counts_changes_of_the_spec() {
        let old = json!({"metadata": {"generation": 4}, "spec": {"replicas": 1}, "status": {"replicas": 1}});
        let cases = [
            (json!({"metadata": {"generation": 9}, "spec": {"replicas": 1}, "status": {}}), 4),
            (json!({"metadata": {"labels": {"a": "b"}}, "spec": {"replicas": 1}}), 4),
            (json!({"metadata": {"annotations": {"a": "b"}}, "spec": {"replicas": 1}}), 5),
            (json!({"spec": {"replicas": 2}}), 5),
        ];
        for (mut new, expect) in cases {
            prepare_for_update(kind("Deployment"), &mut new, &old);
            assert_eq!(new["metadata"]["generation"], expect);
            assert_eq!(new["status"], old["status"]);
        }
    }

    #[test]
    fn a_status_without_the_class_of_a_pod_keeps_it() {
        let old = json!({"spec": {}, "status": {"phase": "Pending", "qosClass": "Burstable"}});
        for (class, expect) in [(json!(null), "Burstable"), (json!(""), "Burstable"), (json!("x"), "x")] {
            let mut new = json!({"spec": {}, "status": {"phase": "Running", "qosClass": class}});
            prepare_for_status_update(kind("Pod"), &mut new, &old);
            assert_eq!(new["status"], json!({"phase": "Running", "qosClass": expect}));
        }
    }

    #[test]
    fn status_updates_change_status_only() {
        let old = json!({"kind": "Deployment", "metadata": {"name": "d", "labels": {"a": "1"}, "generation": 2}, "spec": {"replicas": 1}});
        let mut new = json!({"kind": "Deployment", "metadata": {"name": "d", "labels": {"a": "2"}, "annotations": {"x": "y"}},
            "spec": {"replicas": 5}, "status": {"replicas": 1}});
        prepare_for_status_update(kind("Deployment"), &mut new, &old);
        let expect = json!({"kind": "Deployment", "metadata": {"name": "d", "labels": {"a": "1"}, "annotations": {"x": "y"}, "generation": 2},
            "spec": {"replicas": 1}, "status": {"replicas": 1}});
        assert_eq!(new, expect);
        let mut new =
            json!({"kind": "Other", "metadata": {"name": "d"}, "extra": {}, "status": {"replicas": 1}});
        prepare_for_status_update(kind("Deployment"), &mut new, &old);
        assert_eq!(
            (&new["kind"], &new["spec"], new.get("extra")),
            (&json!("Deployment"), &json!({"replicas": 1}), None)
        );
    }

    #[test]
    fn a_status_update_of_a_claim_changes_no_metadata() {
        let kind = by_kind("resource.k8s.io/v1", "ResourceClaim").unwrap();
        let old = json!({"metadata": {"name": "c", "finalizers": ["a"], "labels": {"a": "1"}}, "spec": {}});
        let mut new = json!({"metadata": {"name": "c", "labels": {"a": "2"}, "annotations": {"x": "y"},
            "ownerReferences": [{"uid": "1"}]}, "spec": {}, "status": {"reservedFor": []}});
        prepare_for_status_update(kind, &mut new, &old);
        assert_eq!(new["metadata"], old["metadata"]);
        assert_eq!(new["status"], json!({"reservedFor": []}));
    }

    #[test]
    fn a_deletion_mark_stays() {
        let old = json!({"metadata": {"uid": "u", "deletionTimestamp": "2024-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}});
        let mut new = json!({"metadata": {"deletionGracePeriodSeconds": 0}});
        prepare_for_update(kind("Pod"), &mut new, &old);
        assert_eq!(new, old);
    }

    #[test]
    fn only_resource_version_may_differ_in_a_noop() {
        let old = json!({"metadata": {"name": "a", "resourceVersion": "1"}, "data": {}});
        assert!(is_noop(&json!({"metadata": {"name": "a", "resourceVersion": "2"}, "data": {}}), &old));
        assert!(is_noop(&json!({"metadata": {"name": "a"}, "data": {}}), &old));
        assert!(!is_noop(&json!({"metadata": {"name": "a", "labels": {}}, "data": {}}), &old));
        assert!(!is_noop(&json!({"metadata": {"name": "a"}}), &old));
    }
}

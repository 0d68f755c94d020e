//! Fields of features whose gates are off: a write removes them, unless the old object has them. Source:
//! `DropDisabledPodFields` of `pkg/api/pod`, and `PrepareForCreate` of the other kinds.

use serde_json::Value;

use crate::Resource;
use crate::pod_security::template_path;

/// Projected sources that need the gates `ClusterTrustBundleProjection` and `PodCertificateRequest`.
const SOURCES: [&str; 2] = ["clusterTrustBundle", "podCertificate"];
/// Fields of a Lease that need the gate `CoordinatedLeaderElection`.
const LEASE: [&str; 2] = ["strategy", "preferredHolder"];
/// Field of a device that needs the gate `DRANodeAllocatableResources`.
const MAPPINGS: &str = "nodeAllocatableResourceMappings";
/// Fields of a device's attribute that need the gate `DRAListTypeAttributes`.
const LISTS: [&str; 4] = ["bools", "ints", "strings", "versions"];
const CONTAINERS: [&str; 3] = ["containers", "initContainers", "ephemeralContainers"];
/// Field of a pod's status that needs the gate `DRANodeAllocatableResources`.
const CLAIM_STATUSES: &str = "nodeAllocatableResourceClaimStatuses";
/// Field of a volume mount in a pod's status that needs the gate `ImageVolumeWithDigest`.
const VOLUME_STATUS: &str = "volumeStatus";
const STATUSES: [&str; 3] = ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"];

/// Removes the fields from a new object, or from an update. `old` is the stored object of an update.
pub(super) fn drop_fields(kind: &Resource, object: &mut Value, old: Option<&Value>) {
    if !kind.is_built_in {
        return;
    }
    if kind.is("coordination.k8s.io", "Lease") {
        for field in LEASE {
            drop_field(object.get_mut("spec"), field, old.map(|old| &old["spec"]));
        }
    }
    if kind.is("storage.k8s.io", "CSIDriver") {
        // The gate is `VolumeLimitScaling`.
        drop_field(object.get_mut("spec"), "preventPodSchedulingIfMissing", old.map(|old| &old["spec"]));
    }
    if kind.is("", "Node") {
        // Fields of the feature `DynamicKubeletConfig`, which Kubernetes 1.24 removed from the kubelet.
        drop_field(object.get_mut("spec"), "configSource", old.map(|old| &old["spec"]));
        if old.is_none() {
            drop_field(object.get_mut("status"), "config", None);
        }
    }
    if kind.is("resource.k8s.io", "ResourceSlice") {
        slice(object, old);
    }
    let template = template_path(&kind.group, &kind.plural).map(|path| format!("{path}/spec"));
    let path = if kind.is("", "Pod") { Some("/spec".to_owned()) } else { template };
    if let Some(path) = path
        && let Some(spec) = object.pointer_mut(&path)
    {
        pod_spec(spec, old.and_then(|old| old.pointer(&path)));
    }
}

/// Removes the fields from the status of a pod, unless the old status has them. Source: `dropDisabledPodStatusFields`.
pub(super) fn drop_status_fields(pod: &mut Value, old: &Value) {
    let old = &old["status"];
    drop_field(pod.get_mut("status"), CLAIM_STATUSES, Some(old));
    let containers = STATUSES.iter().filter_map(|list| old[*list].as_array()).flatten();
    let mut mounts = containers.filter_map(|container| container["volumeMounts"].as_array()).flatten();
    if mounts.any(|mount| !mount[VOLUME_STATUS].is_null()) {
        return;
    }
    let Some(status) = pod.get_mut("status") else { return };
    for list in STATUSES {
        for container in elements(status, list) {
            elements(container, "volumeMounts")
                .for_each(|mount| drop_field(Some(mount), VOLUME_STATUS, None));
        }
    }
}

fn slice(slice: &mut Value, old: Option<&Value>) {
    let has = |is_used: fn(&Value) -> bool| {
        let devices = old.and_then(|old| old["spec"]["devices"].as_array());
        devices.into_iter().flatten().any(is_used)
    };
    let has_mappings = has(|device| !device[MAPPINGS].is_null());
    let has_lists = has(|device| {
        let mut attributes = device["attributes"].as_object().into_iter().flat_map(|map| map.values());
        attributes.any(|attribute| LISTS.iter().any(|list| !attribute[*list].is_null()))
    });
    let Some(spec) = slice.get_mut("spec") else { return };
    for device in elements(spec, "devices") {
        if !has_mappings {
            drop_field(Some(&mut *device), MAPPINGS, None);
        }
        let attributes = device.get_mut("attributes").and_then(Value::as_object_mut).filter(|_| !has_lists);
        for attribute in attributes.into_iter().flat_map(|map| map.values_mut()) {
            for list in LISTS {
                drop_field(Some(&mut *attribute), list, None);
            }
        }
    }
}

fn pod_spec(spec: &mut Value, old: Option<&Value>) {
    // The gate is `ContainerStopSignals`.
    if !old.is_some_and(has_stop_signal) {
        for list in CONTAINERS {
            elements(spec, list).for_each(drop_stop_signal);
        }
    }
    for source in SOURCES {
        if !old.is_some_and(|old| has_source(old, source)) {
            for volume in elements(spec, "volumes") {
                if let Some(projected) = volume.get_mut("projected") {
                    elements(projected, "sources")
                        .for_each(|projection| drop_field(Some(projection), source, None));
                }
            }
        }
    }
}

fn has_stop_signal(spec: &Value) -> bool {
    let containers = CONTAINERS.iter().filter_map(|list| spec[*list].as_array());
    containers.flatten().any(|container| !container["lifecycle"]["stopSignal"].is_null())
}

fn has_source(spec: &Value, source: &str) -> bool {
    let volumes = spec["volumes"].as_array().into_iter().flatten();
    let mut sources = volumes.filter_map(|volume| volume["projected"]["sources"].as_array()).flatten();
    sources.any(|projection| !projection[source].is_null())
}

/// Removes `stopSignal`, and the lifecycle if it has no other field.
fn drop_stop_signal(container: &mut Value) {
    let Some(container) = container.as_object_mut() else { return };
    let Some(lifecycle) = container.get_mut("lifecycle").and_then(Value::as_object_mut) else { return };
    if lifecycle.remove("stopSignal").is_some() && lifecycle.is_empty() {
        container.remove("lifecycle");
    }
}

/// Removes a field, unless the old value has it.
fn drop_field(value: Option<&mut Value>, field: &str, old: Option<&Value>) {
    if old.is_none_or(|old| old[field].is_null())
        && let Some(map) = value.and_then(Value::as_object_mut)
    {
        map.remove(field);
    }
}

/// The elements of a list. Yields nothing if the list is absent.
fn elements<'a>(value: &'a mut Value, list: &str) -> impl Iterator<Item = &'a mut Value> + use<'a> {
    value.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kind::by_kind;
    use crate::strategy::{prepare_for_create, prepare_for_status_update, prepare_for_update};

    fn pod() -> Value {
        let sources = json!([{"clusterTrustBundle": {"name": "a"}}, {"podCertificate": {"keyType": "ED25519"}},
            {"secret": {"name": "s"}}]);
        let container = json!({"name": "a", "image": "x", "lifecycle": {"stopSignal": "SIGUSR1"}});
        let init = json!({"name": "b", "image": "x", "lifecycle": {"stopSignal": "SIGUSR1", "preStop": {"sleep": {"seconds": 1}}}});
        json!({"containers": [container], "initContainers": [init],
            "volumes": [{"name": "v", "projected": {"sources": sources}}, {"name": "e", "emptyDir": {}}]})
    }

    #[test]
    fn fields_of_disabled_features_of_devices_are_removed_unless_the_stored_slice_has_them() {
        let kind = by_kind("resource.k8s.io/v1", "ResourceSlice").unwrap();
        let device = json!({"name": "d", "attributes": {"a": {"ints": [1]}, "b": {"int": 1}},
            "nodeAllocatableResourceMappings": {"cpu": {"quantity": "1"}}});
        let whole = json!({"metadata": {"name": "s"}, "spec": {"devices": [device]}});
        let mut new = whole.clone();
        prepare_for_create(kind, &mut new);
        assert_eq!(new["spec"]["devices"], json!([{"name": "d", "attributes": {"a": {}, "b": {"int": 1}}}]));
        let mut updated = whole.clone();
        prepare_for_update(kind, &mut updated, &new);
        assert_eq!(updated["spec"]["devices"], new["spec"]["devices"]);
        let mut kept = whole.clone();
        prepare_for_update(kind, &mut kept, &whole);
        assert_eq!(kept["spec"]["devices"], whole["spec"]["devices"]);
    }

    #[test]
    fn fields_of_disabled_features_of_pods_and_templates_are_removed() {
        for (version, name, path) in [
            ("v1", "Pod", "/spec"),
            ("v1", "PodTemplate", "/template/spec"),
            ("apps/v1", "Deployment", "/spec/template/spec"),
            ("batch/v1", "CronJob", "/spec/jobTemplate/spec/template/spec"),
        ] {
            let parts: Vec<&str> = path.split('/').skip(1).collect();
            let mut object = parts.iter().rev().fold(pod(), |value, part| json!({(*part): value}));
            object["metadata"] = json!({"name": "x"});
            prepare_for_create(by_kind(version, name).unwrap(), &mut object);
            let text = object.to_string();
            for gone in ["stopSignal", "clusterTrustBundle", "podCertificate"] {
                assert!(!text.contains(gone), "{name}: {text}");
            }
            let spec = object.pointer(path).unwrap();
            assert!(spec["containers"][0]["lifecycle"].is_null(), "{name}");
            assert!(spec["initContainers"][0]["lifecycle"]["preStop"].is_object(), "{name}");
            assert_eq!(spec["volumes"][0]["projected"]["sources"][2]["secret"]["name"], "s", "{name}");
        }
    }

    #[test]
    fn an_update_keeps_the_fields_that_the_old_object_has() {
        let kind = by_kind("v1", "Pod").unwrap();
        let old = json!({"metadata": {"name": "x"}, "spec": pod()});
        let mut new = old.clone();
        prepare_for_update(kind, &mut new, &old);
        assert_eq!(new["spec"], old["spec"]);
        prepare_for_update(kind, &mut new, &json!({"metadata": {"name": "x"}, "spec": {}}));
        assert!(!new.to_string().contains("stopSignal"));
    }

    #[test]
    fn fields_of_disabled_features_are_removed_from_the_status_of_pods() {
        let kind = by_kind("v1", "Pod").unwrap();
        let mount = json!({"name": "v", "mountPath": "/v", "volumeStatus": {"image": {"imageRef": "r"}}});
        let whole = json!({"metadata": {"name": "p"}, "spec": {}, "status": {
            "nodeAllocatableResourceClaimStatuses": [{"resourceClaimName": "c"}],
            "initContainerStatuses": [{"name": "a", "volumeMounts": [mount]}]}});
        let mut new = whole.clone();
        prepare_for_status_update(kind, &mut new, &json!({"metadata": {"name": "p"}, "spec": {}}));
        let mounts = &new["status"]["initContainerStatuses"][0]["volumeMounts"];
        assert_eq!(*mounts, json!([{"name": "v", "mountPath": "/v"}]));
        assert_eq!(new["status"].get(CLAIM_STATUSES), None);
        let mut kept = whole.clone();
        prepare_for_status_update(kind, &mut kept, &whole);
        assert_eq!(kept["status"], whole["status"]);
    }

    #[test]
    fn a_node_has_no_source_of_its_configuration() {
        let kind = by_kind("v1", "Node").unwrap();
        let whole =
            json!({"metadata": {"name": "n"}, "spec": {"configSource": {"configMap": {"name": "m"}}}});
        let mut new = whole.clone();
        new["status"] = json!({"config": {"error": "e"}, "phase": "Running"});
        prepare_for_create(kind, &mut new);
        assert_eq!(new["spec"].get("configSource"), None);
        assert_eq!(new["status"].get("config"), None);
        let mut kept = whole.clone();
        prepare_for_update(kind, &mut kept, &whole);
        assert_eq!(kept["spec"], whole["spec"], "an earlier version stored it");
    }

    #[test]
    fn a_lease_has_no_strategy() {
        let kind = by_kind("coordination.k8s.io/v1", "Lease").unwrap();
        let spec =
            json!({"holderIdentity": "a", "strategy": "OldestEmulationVersion", "preferredHolder": "b"});
        let old = json!({"metadata": {"name": "x"}, "spec": spec});
        let mut lease = old.clone();
        prepare_for_create(kind, &mut lease);
        assert_eq!(lease["spec"], json!({"holderIdentity": "a"}));
        let mut new = old.clone();
        prepare_for_update(kind, &mut new, &old);
        assert_eq!(new["spec"], spec, "an earlier version stored it");
    }
}

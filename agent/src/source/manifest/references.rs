//! References of a pod to objects of the API, which a static pod must not have. Source: `HasAPIObjectReference` of
//! upstream's `pkg/api/pod`.

use serde_json::Value;

/// Fields of volumes that refer to objects, with the resource of the object.
const VOLUMES: [(&str, &str); 7] = [
    ("persistentVolumeClaim", "persistentvolumeclaims"),
    ("ephemeral", "persistentvolumeclaims"),
    ("configMap", "configmaps"),
    ("secret", "secrets"),
    ("csi", "csidrivers"),
    ("glusterfs", "endpoints"),
    ("azureFile", "secrets"),
];
/// Sources of projected volumes.
const PROJECTED: [(&str, &str); 5] = [
    ("configMap", "configmaps"),
    ("secret", "secrets"),
    ("serviceAccountToken", "serviceaccounts"),
    ("clusterTrustBundle", "clustertrustbundles"),
    ("podCertificate", "podcertificates"),
];

/// The first kind of object that the pod references.
pub(super) fn first(pod: &Value) -> Option<&'static str> {
    let spec = &pod["spec"];
    let has_account = |field: &str| spec[field].as_str().is_some_and(|name| !name.is_empty());
    if has_account("serviceAccountName") || has_account("serviceAccount") {
        return Some("serviceaccounts");
    }
    if list(spec, "imagePullSecrets").next().is_some() {
        return Some("secrets");
    }
    if list(spec, "resourceClaims").next().is_some() {
        return Some("resourceclaims");
    }
    in_containers(spec).or_else(|| list(spec, "volumes").find_map(in_volume))
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    value[field].as_array().into_iter().flatten()
}

fn in_containers(spec: &Value) -> Option<&'static str> {
    let containers = ["initContainers", "containers", "ephemeralContainers"];
    let mut containers = containers.into_iter().flat_map(|field| list(spec, field));
    containers.find_map(|container| {
        let whole = list(container, "envFrom").find_map(|from| named(from, "secretRef", "configMapRef"));
        let key = |variable: &Value| named(&variable["valueFrom"], "secretKeyRef", "configMapKeyRef");
        whole.or_else(|| list(container, "env").find_map(key))
    })
}

fn named(source: &Value, secret: &str, config_map: &str) -> Option<&'static str> {
    if !source[secret].is_null() {
        return Some("secrets");
    }
    (!source[config_map].is_null()).then_some("configmaps")
}

fn in_volume(volume: &Value) -> Option<&'static str> {
    let projected = list(&volume["projected"], "sources").find_map(|source| present(source, &PROJECTED));
    // Volumes of older types name a secret in `secretRef`.
    let has_secret =
        || volume.as_object().is_some_and(|types| types.values().any(|one| !one["secretRef"].is_null()));
    present(volume, &VOLUMES).or(projected).or_else(|| has_secret().then_some("secrets"))
}

fn present(source: &Value, table: &[(&str, &'static str)]) -> Option<&'static str> {
    table.iter().find(|(field, _)| !source[*field].is_null()).map(|(_, what)| *what)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_kind_of_reference_is_found() {
        let container =
            |field: &str, value: Value| json!({"spec": {"containers": [{"name": "c", field: value}]}});
        let volume = |volume: Value| json!({"spec": {"volumes": [volume]}});
        for (pod, what) in [
            (json!({"spec": {"serviceAccountName": "a"}}), Some("serviceaccounts")),
            (json!({"spec": {"serviceAccountName": ""}}), None),
            (json!({"spec": {"resourceClaims": [{"name": "c"}]}}), Some("resourceclaims")),
            (container("envFrom", json!([{"configMapRef": {"name": "m"}}])), Some("configmaps")),
            (container("env", json!([{"valueFrom": {"secretKeyRef": {"name": "s"}}}])), Some("secrets")),
            (container("env", json!([{"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}])), None),
            (volume(json!({"ephemeral": {}})), Some("persistentvolumeclaims")),
            (
                volume(json!({"projected": {"sources": [{"serviceAccountToken": {}}]}})),
                Some("serviceaccounts"),
            ),
            (volume(json!({"projected": {"sources": [{"downwardAPI": {}}]}})), None),
            (volume(json!({"cephfs": {"secretRef": {"name": "s"}}})), Some("secrets")),
            (volume(json!({"name": "v", "hostPath": {"path": "/"}})), None),
        ] {
            assert_eq!(first(&pod), what, "{pod}");
        }
    }
}

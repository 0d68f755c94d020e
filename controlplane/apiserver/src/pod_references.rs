//! Names of the objects that a pod's spec and status refer to.

use serde_json::Value;

/// Annotation of mirror pods. A kubelet creates a mirror pod for each pod of its static manifests.
pub(crate) const MIRROR: &str = "kubernetes.io/config.mirror";

/// Types of volumes that name a secret in `secretRef`.
const WITH_SECRET_REF: [&str; 7] = ["cephfs", "cinder", "flexVolume", "iscsi", "rbd", "scaleIO", "storageos"];

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value[field].as_array().into_iter().flatten()
}

fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    let kinds = ["containers", "initContainers", "ephemeralContainers"];
    kinds.into_iter().flat_map(|field| list(&pod["spec"], field))
}

/// The volumes, and the sources of projected volumes.
fn sources(pod: &Value) -> impl Iterator<Item = &Value> {
    list(&pod["spec"], "volumes")
        .flat_map(|volume| std::iter::once(volume).chain(list(&volume["projected"], "sources")))
}

/// Names of the secrets that a node needs to mount volumes of types such as `iscsi` and `csi`. Source: upstream's
/// `VisitPodSecretNames`.
fn mount_secrets(pod: &Value) -> impl Iterator<Item = &Value> {
    list(&pod["spec"], "volumes").flat_map(|volume| {
        let names = WITH_SECRET_REF.into_iter().map(move |field| &volume[field]["secretRef"]["name"]);
        names.chain([&volume["azureFile"]["secretName"], &volume["csi"]["nodePublishSecretRef"]["name"]])
    })
}

/// Whether the pod is a mirror pod.
pub(crate) fn is_mirror(pod: &Value) -> bool {
    !pod["metadata"]["annotations"][MIRROR].is_null()
}

/// Names of the Secrets in volumes, pull secrets and environment of a pod.
pub(crate) fn secrets_of(pod: &Value) -> Vec<&str> {
    let volumes =
        sources(pod).flat_map(|source| [&source["secret"]["secretName"], &source["secret"]["name"]]);
    let pulls = list(&pod["spec"], "imagePullSecrets").map(|pull| &pull["name"]);
    volumes
        .chain(mount_secrets(pod))
        .chain(pulls)
        .chain(environment(pod, "secretRef", "secretKeyRef"))
        .filter_map(Value::as_str)
        .collect()
}

/// Names of the ConfigMaps in volumes and environment of a pod.
pub(crate) fn config_maps_of(pod: &Value) -> Vec<&str> {
    let volumes = sources(pod).map(|source| &source["configMap"]["name"]);
    volumes.chain(environment(pod, "configMapRef", "configMapKeyRef")).filter_map(Value::as_str).collect()
}

/// Names of the claims of a pod. `pod_name` is part of the names of claims for ephemeral volumes.
pub(crate) fn claims_of(pod: &Value, pod_name: &str) -> Vec<String> {
    let volumes = list(&pod["spec"], "volumes");
    let claim = |volume: &Value| match volume["persistentVolumeClaim"]["claimName"].as_str() {
        Some(name) => Some(name.to_owned()),
        None if volume["ephemeral"].is_object() => Some(format!("{pod_name}-{}", volume["name"].as_str()?)),
        None => None,
    };
    volumes.filter_map(claim).collect()
}

/// Names of the ResourceClaims of a pod. The spec names existing claims. The status names the claims that controllers
/// created for the pod.
pub(crate) fn resource_claims_of(pod: &Value) -> Vec<&str> {
    let statuses = list(&pod["status"], "resourceClaimStatuses");
    let claims = list(&pod["spec"], "resourceClaims").chain(statuses);
    let claims = claims.chain(std::iter::once(&pod["status"]["extendedResourceClaimStatus"]));
    claims.filter_map(|claim| claim["resourceClaimName"].as_str()).collect()
}

/// Name of the ServiceAccount of a pod. Empty if it is not set.
pub(crate) fn accounts_of(pod: &Value) -> Vec<&str> {
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
    fn a_pod_refers_to_secrets_and_config_maps() {
        let pod = json!({"spec": {
            "volumes": [
                {"secret": {"secretName": "a"}},
                {"projected": {"sources": [{"configMap": {"name": "kube-root-ca.crt"}}, {"secret": {"name": "b"}}]}},
                {"configMap": {"name": "c"}},
                {"cephfs": {"monitors": ["m"], "secretRef": {"name": "h"}}},
                {"scaleIO": {"secretRef": {"name": "i"}}},
                {"azureFile": {"secretName": "j"}},
                {"csi": {"driver": "x", "nodePublishSecretRef": {"name": "k"}}},
            ],
            "imagePullSecrets": [{"name": "d"}],
            "containers": [{"envFrom": [{"secretRef": {"name": "e"}}],
                "env": [{"valueFrom": {"configMapKeyRef": {"name": "f"}}}]}],
            "initContainers": [{"env": [{"valueFrom": {"secretKeyRef": {"name": "g"}}}]}],
        }});
        assert_eq!(secrets_of(&pod), ["a", "b", "h", "i", "j", "k", "d", "e", "g"]);
        assert_eq!(config_maps_of(&pod), ["kube-root-ca.crt", "c", "f"]);
    }

    #[test]
    fn claims_are_named_in_the_spec_or_created_for_ephemeral_volumes() {
        let pod = json!({"spec": {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "b", "ephemeral": {}}, {"name": "d", "emptyDir": {}}]}});
        assert_eq!(claims_of(&pod, "p"), ["c", "p-b"]);
    }
}

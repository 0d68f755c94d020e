//! The names in a pod's spec and status, read from the encoded pod. The parser skips all other fields, because all pods
//! are read at the start.

use serde::{Deserialize, de::IgnoredAny};
use serde_json::Value;

use crate::pod_references::{
    accounts_of, claims_of, config_maps_of, is_mirror, resource_claims_of, secrets_of,
};

/// The node of a pod and the names of the objects that it refers to. A mirror pod has no names: its node creates it and
/// could otherwise give itself permissions. Source: `AddPod` of upstream's node authorizer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    /// Empty if the pod is not bound.
    pub(super) node: String,
    pub(super) secrets: Vec<String>,
    pub(super) config_maps: Vec<String>,
    pub(super) accounts: Vec<String>,
    pub(super) claims: Vec<String>,
    pub(super) resource_claims: Vec<String>,
    /// Whether the spec has ResourceClaims. Their names may be in the status.
    pub(super) has_resource_claims: bool,
}

#[derive(Deserialize)]
struct Pod {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Metadata {
    annotations: Option<Annotations>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Annotations {
    #[serde(rename = "kubernetes.io/config.mirror")]
    mirror: Option<IgnoredAny>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    resource_claim_statuses: Vec<ResourceClaim>,
    extended_resource_claim_status: Option<ResourceClaim>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ResourceClaim {
    resource_claim_name: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    node_name: Option<String>,
    service_account_name: Option<String>,
    image_pull_secrets: Vec<Named>,
    volumes: Vec<Volume>,
    containers: Vec<Container>,
    init_containers: Vec<Container>,
    ephemeral_containers: Vec<Container>,
    resource_claims: Vec<ResourceClaim>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Named {
    name: Option<String>,
    secret_name: Option<String>,
    claim_name: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Volume {
    name: Option<String>,
    secret: Option<Named>,
    config_map: Option<Named>,
    projected: Option<Projected>,
    persistent_volume_claim: Option<Named>,
    ephemeral: Option<IgnoredAny>,
    azure_file: Option<Box<Mount>>,
    cephfs: Option<Box<Mount>>,
    cinder: Option<Box<Mount>>,
    csi: Option<Box<Mount>>,
    flex_volume: Option<Box<Mount>>,
    iscsi: Option<Box<Mount>>,
    rbd: Option<Box<Mount>>,
    #[serde(rename = "scaleIO")]
    scale_io: Option<Box<Mount>>,
    storageos: Option<Box<Mount>>,
}

/// A volume that a node mounts with a secret. Its type determines the field with the name.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Mount {
    secret_name: Option<String>,
    secret_ref: Option<Named>,
    node_publish_secret_ref: Option<Named>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Projected {
    sources: Vec<Source>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Source {
    secret: Option<Named>,
    config_map: Option<Named>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    env: Vec<Variable>,
    env_from: Vec<From>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Variable {
    value_from: Option<From>,
}

/// The source of one variable or of several.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct From {
    secret_ref: Option<Named>,
    secret_key_ref: Option<Named>,
    config_map_ref: Option<Named>,
    config_map_key_ref: Option<Named>,
}

// === impl Names ===

impl Names {
    /// The names in an encoded pod. `pod_name` is part of the names of ephemeral claims.
    pub(super) fn read(pod_name: &str, encoded: &[u8]) -> Self {
        match serde_json::from_slice::<Pod>(encoded) {
            Ok(pod) => Self::of(pod_name, pod),
            // A field has a type that differs from the schema. The other fields are still read.
            Err(_) => Self::of_tree(pod_name, &serde_json::from_slice(encoded).unwrap_or_default()),
        }
    }

    fn of(pod_name: &str, pod: Pod) -> Self {
        let Pod { metadata, spec, status } = pod;
        let mut names = Self { node: spec.node_name.unwrap_or_default(), ..Self::default() };
        if metadata.annotations.is_some_and(|annotations| annotations.mirror.is_some()) {
            return names;
        }
        names.accounts.extend(spec.service_account_name);
        names.has_resource_claims = !spec.resource_claims.is_empty();
        let claims = spec.resource_claims.into_iter().chain(status.resource_claim_statuses);
        let claims = claims.chain(status.extended_resource_claim_status);
        names.resource_claims.extend(claims.filter_map(|claim| claim.resource_claim_name));
        for volume in spec.volumes {
            names.add(volume.secret, volume.config_map);
            for source in volume.projected.into_iter().flat_map(|projected| projected.sources) {
                names.add(source.secret, source.config_map);
            }
            let mounts = [volume.azure_file, volume.cephfs, volume.cinder, volume.csi, volume.flex_volume];
            let others = [volume.iscsi, volume.rbd, volume.scale_io, volume.storageos];
            for mount in mounts.into_iter().chain(others).flatten() {
                let Mount { secret_name, secret_ref, node_publish_secret_ref } = *mount;
                names.secrets.extend(secret_name);
                names.add(secret_ref, None);
                names.add(node_publish_secret_ref, None);
            }
            match (volume.persistent_volume_claim.and_then(|claim| claim.claim_name), volume.ephemeral) {
                (Some(name), _) => names.claims.push(name),
                (None, Some(_)) => names.claims.extend(volume.name.map(|name| format!("{pod_name}-{name}"))),
                (None, None) => {}
            }
        }
        names.secrets.extend(spec.image_pull_secrets.into_iter().filter_map(|pull| pull.name));
        let lists = [spec.containers, spec.init_containers, spec.ephemeral_containers];
        for container in lists.into_iter().flatten() {
            for from in container.env_from {
                names.add(from.secret_ref, from.config_map_ref);
            }
            for from in container.env.into_iter().filter_map(|variable| variable.value_from) {
                names.add(from.secret_key_ref, from.config_map_key_ref);
            }
        }
        names
    }

    fn add(&mut self, secret: Option<Named>, config_map: Option<Named>) {
        if let Some(secret) = secret {
            self.secrets.extend(secret.secret_name.into_iter().chain(secret.name));
        }
        self.config_maps.extend(config_map.and_then(|map| map.name));
    }

    fn of_tree(pod_name: &str, pod: &Value) -> Self {
        let owned = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
        let node = pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned();
        if is_mirror(pod) {
            return Self { node, ..Self::default() };
        }
        Self {
            node,
            secrets: owned(secrets_of(pod)),
            config_maps: owned(config_maps_of(pod)),
            accounts: owned(accounts_of(pod)),
            claims: claims_of(pod, pod_name),
            resource_claims: owned(resource_claims_of(pod)),
            has_resource_claims: pod["spec"]["resourceClaims"].as_array().is_some_and(|all| !all.is_empty()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_names_equal_the_names_in_the_tree() {
        let source = json!({"secretRef": {"name": "e"}, "configMapRef": {"name": "f"}});
        let variables = json!([
            {"name": "A", "value": "b"},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "g", "key": "k"}}},
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "h", "key": "k"}}},
            {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ]);
        let volumes = json!([
            {"name": "1", "secret": {"secretName": "a"}},
            {"name": "2", "configMap": {"name": "b"}},
            {"name": "3", "projected": {"sources": [{"secret": {"name": "c"}}, {"configMap": {"name": "d"}}, {}]}},
            {"name": "4", "persistentVolumeClaim": {"claimName": "i"}},
            {"name": "5", "ephemeral": {"volumeClaimTemplate": {}}},
            {"name": "6", "emptyDir": {}},
            {"name": "7", "azureFile": {"secretName": "u"}},
            {"name": "8", "csi": {"driver": "x", "nodePublishSecretRef": {"name": "v"}}},
            {"name": "9", "flexVolume": {"driver": "x", "secretRef": {"name": "w"}}},
            {"name": "10", "scaleIO": {"secretRef": {"name": "x"}}, "storageos": {"secretRef": {"name": "y"}}},
            {"name": "11", "cephfs": {"secretRef": {"name": "z"}}, "rbd": {"image": "i"}},
        ]);
        let whole = json!({"metadata": {"name": "p"}, "spec": {
            "nodeName": "n", "serviceAccountName": "s", "imagePullSecrets": [{"name": "j"}, {}], "volumes": volumes,
            "containers": [{"name": "c", "env": variables, "envFrom": [source]}, {}],
            "initContainers": [{"env": [{"valueFrom": {"secretKeyRef": {"name": "\u{e9}\n"}}}]}],
            "ephemeralContainers": [{"envFrom": [{"secretRef": {"name": "k"}}]}],
            "resourceClaims": [{"name": "1", "resourceClaimName": "l"}, {"name": "2", "resourceClaimTemplateName": "t"}],
        }, "status": {"resourceClaimStatuses": [{"name": "2", "resourceClaimName": "m"}, {"name": "3"}],
            "extendedResourceClaimStatus": {"resourceClaimName": "o"}}});
        let mut mirror = whole.clone();
        mirror["metadata"]["annotations"] = json!({"a": "b", "kubernetes.io/config.mirror": "x"});
        let names = Names::read("p", mirror.to_string().as_bytes());
        assert_eq!(names, Names { node: "n".to_owned(), ..Names::default() }, "no names of a mirror pod");
        let empty = json!({"metadata": {"annotations": null}});
        for pod in [whole, mirror, json!({"spec": {"containers": []}}), json!({"metadata": {}}), empty] {
            let read: Pod = serde_json::from_str(&pod.to_string()).unwrap();
            let (mut read, mut tree) = (Names::of("p", read), Names::of_tree("p", &pod));
            for names in [&mut read, &mut tree] {
                names.secrets.sort();
                names.config_maps.sort();
            }
            assert_eq!(read, tree, "{pod}");
        }
        let odd = json!({"spec": {"nodeName": "n", "containers": null, "volumes": [{"secret": {"secretName": "a"}}]}});
        let names = Names::read("p", odd.to_string().as_bytes());
        assert_eq!((names.node.as_str(), names.secrets), ("n", vec!["a".to_owned()]));
    }
}

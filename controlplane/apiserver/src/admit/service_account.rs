//! Service accounts of pods: sets the default account, and mounts its token at the standard path.

use async_trait::async_trait;
use std::time::Duration;

use coracle_kinds::kind::by_resource;
use serde_json::{Value, json};

use super::{Admission, Admit, Attributes};
use crate::{
    error::{ApiError, Result},
    object_meta::random_suffix,
};

const MOUNT_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Lifetime of the token in seconds: one hour and seven seconds. Old API servers recognize this type of token by this
/// lifetime.
const TOKEN_SECONDS: i64 = 3607;
/// Maximum time that a new pod waits for its service account.
const ACCOUNT_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time for the account `default`, which a controller creates after the namespace.
const DEFAULT_ACCOUNT_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) struct ServiceAccount;

/// Waits for the service account of a new pod, for a limited time. In a new namespace or cluster, the controller may
/// not have created the account yet.
async fn wait_for_account(admission: &Admission, pod: &Value) {
    let Some(kind) = by_resource("", "v1", "serviceaccounts") else { return };
    let namespace = pod["metadata"]["namespace"].as_str().unwrap_or_default();
    let name =
        pod["spec"]["serviceAccountName"].as_str().filter(|name| !name.is_empty()).unwrap_or("default");
    let exists = || admission.cache.get(kind, namespace, name).is_some();
    // The caller checks whether the account exists.
    let limit = if name == "default" { DEFAULT_ACCOUNT_TIMEOUT } else { ACCOUNT_TIMEOUT };
    let _ = tokio::time::timeout(limit, admission.cache.until(exists)).await;
}

#[async_trait]
impl Admit for ServiceAccount {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if !attributes.writes_new_pod() || !object["spec"].is_object() {
            return Ok(());
        }
        // A mirror pod describes a pod that already runs, so it is not changed.
        if object["metadata"]["annotations"]["kubernetes.io/config.mirror"].is_string() {
            return Ok(());
        }
        wait_for_account(admission, object).await;
        let name = match object["spec"]["serviceAccountName"].as_str().unwrap_or_default() {
            "" => "default".to_owned(),
            name => name.to_owned(),
        };
        let Some(kind) = by_resource("", "v1", "serviceaccounts") else { return Ok(()) };
        let namespace = attributes.namespace;
        let account = admission.cache.get(kind, namespace, &name).ok_or_else(|| {
            let why = format!("error looking up service account {namespace}/{name}: {}", lookup_error(&name));
            ApiError::forbidden_object(attributes.kind, attributes.name, why)
        })?;
        let fields: &[&[&str]] = &[&["imagePullSecrets"], &["automountServiceAccountToken"]];
        complete(&mut object["spec"], &name, &account.part(fields));
        Ok(())
    }
}

/// The error of the look-up of a missing account, in the words of upstream's client. That client refuses names that
/// cannot be in the path of a request.
fn lookup_error(name: &str) -> String {
    let dots = matches!(name, "." | "..").then(|| format!("may not be '{name}'"));
    let signs = ['/', '%'].into_iter().filter(|sign| name.contains(*sign));
    let problems: Vec<String> =
        dots.into_iter().chain(signs.map(|sign| format!("may not contain '{sign}'"))).collect();
    if problems.is_empty() {
        return format!("serviceaccount \"{name}\" not found");
    }
    format!("invalid resource name \"{name}\": [{}]", problems.join(" "))
}

fn complete(spec: &mut Value, name: &str, account: &Value) {
    spec["serviceAccountName"] = name.into();
    spec["serviceAccount"] = name.into();
    let pulls = &account["imagePullSecrets"];
    if spec["imagePullSecrets"].as_array().is_none_or(Vec::is_empty) && pulls.is_array() {
        spec["imagePullSecrets"] = pulls.clone();
    }
    let automount = spec["automountServiceAccountToken"]
        .as_bool()
        .or_else(|| account["automountServiceAccountToken"].as_bool())
        .unwrap_or(true);
    if automount {
        mount_token(spec);
    }
}

fn mount_token(spec: &mut Value) {
    let existing =
        spec["volumes"].as_array().into_iter().flatten().filter_map(|volume| volume["name"].as_str());
    let existing = existing.filter(|name| name.starts_with("kube-api-access-")).map(str::to_owned).next();
    let is_new = existing.is_none();
    let volume = existing.unwrap_or_else(|| format!("kube-api-access-{}", random_suffix()));
    let mut mounted = false;
    for field in ["containers", "initContainers"] {
        for container in spec.get_mut(field).and_then(Value::as_array_mut).into_iter().flatten() {
            mounted |= mount(container, &volume);
        }
    }
    if !mounted || !is_new {
        return;
    }
    let volumes = spec.as_object_mut().map(|spec| spec.entry("volumes").or_insert_with(|| json!([])));
    if let Some(volumes) = volumes.and_then(Value::as_array_mut) {
        volumes.push(token_volume(&volume));
    }
}

/// Adds the mount to a container, unless it has a mount at that path. Returns whether the mount was added.
fn mount(container: &mut Value, volume: &str) -> bool {
    let Some(container) = container.as_object_mut() else { return false };
    let mounts = container.entry("volumeMounts").or_insert_with(|| json!([]));
    let Some(mounts) = mounts.as_array_mut() else { return false };
    if mounts.iter().any(|mount| mount["mountPath"] == MOUNT_PATH) {
        return false;
    }
    mounts.push(json!({"name": volume, "readOnly": true, "mountPath": MOUNT_PATH}));
    true
}

fn token_volume(name: &str) -> Value {
    let namespace = json!({"apiVersion": "v1", "fieldPath": "metadata.namespace"});
    json!({"name": name, "projected": {"defaultMode": 0o644, "sources": [
        {"serviceAccountToken": {"expirationSeconds": TOKEN_SECONDS, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": namespace}]}},
    ]}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_container_finds_the_token() {
        let mut spec = json!({"containers": [{"name": "a"}, {"name": "b", "volumeMounts": [
            {"name": "own", "mountPath": MOUNT_PATH}]}], "initContainers": [{"name": "c"}]});
        complete(&mut spec, "default", &json!({"imagePullSecrets": [{"name": "pull"}]}));
        let volume = spec["volumes"][0]["name"].as_str().unwrap().to_owned();
        assert!(volume.starts_with("kube-api-access-"));
        assert_eq!(spec["containers"][0]["volumeMounts"][0]["name"], volume.as_str());
        assert_eq!(spec["containers"][1]["volumeMounts"].as_array().unwrap().len(), 1);
        assert_eq!(spec["initContainers"][0]["volumeMounts"][0]["mountPath"], MOUNT_PATH);
        assert_eq!(spec["imagePullSecrets"][0]["name"], "pull");
    }

    #[test]
    fn a_name_that_no_path_can_have_is_an_error_of_its_own() {
        assert_eq!(lookup_error("a"), "serviceaccount \"a\" not found");
        assert_eq!(lookup_error(".."), "invalid resource name \"..\": [may not be '..']");
        assert_eq!(
            lookup_error("a/%"),
            "invalid resource name \"a/%\": [may not contain '/' may not contain '%']"
        );
    }

    #[test]
    fn accounts_and_pods_can_disable_the_token() {
        for (spec, account) in [
            (json!({"automountServiceAccountToken": false, "containers": [{}]}), json!({})),
            (json!({"containers": [{}]}), json!({"automountServiceAccountToken": false})),
        ] {
            let mut spec = spec;
            complete(&mut spec, "default", &account);
            assert!(spec["volumes"].is_null());
        }
    }
}

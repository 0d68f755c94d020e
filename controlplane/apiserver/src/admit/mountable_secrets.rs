//! Limits the secrets that a pod may use. A service account with the annotation
//! `kubernetes.io/enforce-mountable-secrets` limits its pods to the secrets and pull secrets that the account lists.
//!
//! The rule includes ephemeral containers (CVE-2023-2728) and `envFrom` (CVE-2024-3177). A mirror pod must not refer to
//! an account or a secret. Source: `limitSecretReferences` of upstream's ServiceAccount admission plugin.

use std::collections::HashSet;

use async_trait::async_trait;
use coracle_kinds::kind::by_resource;
use coracle_values::go;
use serde_json::Value;

use super::{Admission, Admit, Attributes};
use crate::{
    error::{ApiError, Result},
    pod_references,
};

const ENFORCE: &str = "kubernetes.io/enforce-mountable-secrets";
/// The container lists of a pod, with their names in upstream's messages.
const CONTAINERS: [(&str, &str); 3] = [
    ("initContainers", "init container"),
    ("containers", "container"),
    ("ephemeralContainers", "ephemeral container"),
];

pub(super) struct MountableSecrets;

#[async_trait]
impl Admit for MountableSecrets {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        let is_pod = attributes.kind.group.is_empty() && attributes.kind.kind == "Pod";
        let adds_containers = attributes.subresource == "ephemeralcontainers";
        if !is_pod || !(attributes.writes_new_pod() || adds_containers) {
            return Ok(());
        }
        let refused = |why: String| Err(ApiError::forbidden_object(attributes.kind, attributes.name, why));
        if pod_references::is_mirror(object) {
            return mirror_violation(object).map_or(Ok(()), |why| refused(why.to_owned()));
        }
        let Some(kind) = by_resource("", "v1", "serviceaccounts") else { return Ok(()) };
        let name = object["spec"]["serviceAccountName"].as_str().unwrap_or("default");
        let Some(account) = admission.cache.get(kind, attributes.namespace, name) else { return Ok(()) };
        let fields: &[&[&str]] = &[&["metadata", "annotations"], &["secrets"], &["imagePullSecrets"]];
        violation(&object["spec"], name, &account.part(fields)).map_or(Ok(()), refused)
    }

    fn precedes_validation(&self) -> bool {
        true
    }
}

/// The reason why a mirror pod is refused. Any author of a pod can set the annotation of mirror pods, and the
/// ServiceAccount plugin does not complete such a pod.
fn mirror_violation(pod: &Value) -> Option<&'static str> {
    let spec = &pod["spec"];
    if spec["serviceAccountName"].as_str().is_some_and(|name| !name.is_empty()) {
        return Some("a mirror pod may not reference service accounts");
    }
    if !pod_references::secrets_of(pod).is_empty() {
        return Some("a mirror pod may not reference secrets");
    }
    let mut sources = items(&spec["volumes"]).flat_map(|volume| items(&volume["projected"]["sources"]));
    let has_token = sources.any(|source| !source["serviceAccountToken"].is_null());
    has_token.then_some("a mirror pod may not use ServiceAccountToken volume projections")
}

/// The message about the first secret of the pod that the pod's account does not list. `None` if the account lists all
/// secrets.
fn violation(spec: &Value, account_name: &str, account: &Value) -> Option<String> {
    let enforced = account["metadata"]["annotations"][ENFORCE].as_str().unwrap_or_default();
    if go::parse_bool(enforced) != Some(true) {
        return None;
    }
    let names =
        |field: &str| -> HashSet<&Value> { items(&account[field]).map(|item| &item["name"]).collect() };
    let (secrets, pull_secrets) = (names("secrets"), names("imagePullSecrets"));
    let refused = |what: String| {
        format!("{what} is not allowed because service account {account_name} does not reference that secret")
    };
    volumes(spec)
        .chain(environments(spec))
        .find(|(name, _)| !secrets.contains(*name))
        .map(|(name, what)| refused(format!("{what} secret.secretName={name}")))
        .or_else(|| {
            let pulls = items(&spec["imagePullSecrets"]).enumerate();
            pulls.map(|(at, pull)| (at, &pull["name"])).find(|(_, name)| !pull_secrets.contains(*name)).map(
                |(at, name)| {
                    format!(
                        "imagePullSecrets[{at}].name={name} is not allowed because service account \
                         {account_name} does not reference that imagePullSecret"
                    )
                },
            )
        })
}

/// The secrets in volumes, each with the prefix of its message.
fn volumes(spec: &Value) -> impl Iterator<Item = (&Value, String)> {
    items(&spec["volumes"]).flat_map(|volume| {
        let projected = items(&volume["projected"]["sources"]).map(|source| &source["secret"]["name"]);
        std::iter::once(&volume["secret"]["secretName"])
            .chain(projected)
            .filter(|name| name.is_string())
            .map(|name| (name, "volume with".to_owned()))
    })
}

/// The secrets in environment variables of all containers, each with the prefix of its message.
fn environments(spec: &Value) -> impl Iterator<Item = (&Value, String)> {
    CONTAINERS.into_iter().flat_map(|(field, word)| {
        items(&spec[field]).flat_map(move |container| {
            let name = container["name"].as_str().unwrap_or_default();
            let single = items(&container["env"]).map(move |env| {
                let variable = env["name"].as_str().unwrap_or_default();
                let words = format!("{word} {name} with envVar {variable} referencing");
                (&env["valueFrom"]["secretKeyRef"]["name"], words)
            });
            let all = items(&container["envFrom"]).map(move |from| {
                (&from["secretRef"]["name"], format!("{word} {name} with envFrom referencing"))
            });
            single.chain(all).filter(|(name, _)| name.is_string())
        })
    })
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn account(enforced: &str) -> Value {
        json!({"metadata": {"annotations": {ENFORCE: enforced}}, "secrets": [{"name": "mine"}],
            "imagePullSecrets": [{"name": "pull"}]})
    }

    #[test]
    fn every_reference_to_a_foreign_secret_is_found() {
        let env =
            json!({"name": "c", "env": [{"name": "V", "valueFrom": {"secretKeyRef": {"name": "other"}}}]});
        let env_from = json!({"name": "c", "envFrom": [{"secretRef": {"name": "other"}}]});
        for (spec, words) in [
            (
                json!({"volumes": [{"secret": {"secretName": "other"}}]}),
                "volume with secret.secretName=\"other\"",
            ),
            (
                json!({"volumes": [{"projected": {"sources": [{"secret": {"name": "other"}}]}}]}),
                "volume with",
            ),
            (
                json!({"containers": [env]}),
                "container c with envVar V referencing secret.secretName=\"other\"",
            ),
            (json!({"initContainers": [env_from]}), "init container c with envFrom referencing"),
            (json!({"ephemeralContainers": [env_from]}), "ephemeral container c with envFrom"),
            (
                json!({"imagePullSecrets": [{"name": "pull"}, {"name": "other"}]}),
                "imagePullSecrets[1].name=\"other\"",
            ),
        ] {
            let found = violation(&spec, "a", &account("true")).unwrap();
            assert!(found.starts_with(words), "{found}");
        }
    }

    #[test]
    fn a_mirror_pod_references_no_account_and_no_secret() {
        let of = |spec: Value| mirror_violation(&json!({"spec": spec}));
        let projected = |source: Value| json!({"volumes": [{"projected": {"sources": [source]}}]});
        for allowed in [
            json!({"containers": [{"name": "c"}], "serviceAccountName": ""}),
            projected(json!({"configMap": {"name": "c"}})),
        ] {
            assert_eq!(of(allowed.clone()), None, "{allowed}");
        }
        for (spec, what) in [
            (json!({"serviceAccountName": "a"}), "service accounts"),
            (json!({"volumes": [{"secret": {"secretName": "s"}}]}), "secrets"),
            (json!({"imagePullSecrets": [{"name": "s"}]}), "secrets"),
            (json!({"ephemeralContainers": [{"envFrom": [{"secretRef": {"name": "s"}}]}]}), "secrets"),
            (projected(json!({"serviceAccountToken": {"path": "t"}})), "ServiceAccountToken"),
        ] {
            assert!(of(spec.clone()).is_some_and(|why| why.contains(what)), "{spec}");
        }
    }

    #[test]
    fn listed_secrets_and_accounts_without_the_annotation_pass() {
        let spec =
            json!({"volumes": [{"secret": {"secretName": "mine"}}], "imagePullSecrets": [{"name": "pull"}]});
        assert_eq!(violation(&spec, "a", &account("true")), None);
        let foreign = json!({"volumes": [{"secret": {"secretName": "other"}}]});
        assert_eq!(violation(&foreign, "a", &account("false")), None);
        assert_eq!(violation(&foreign, "a", &json!({})), None);
    }
}

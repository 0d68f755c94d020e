//! Records that a pod needs. Pure.

use k8s_openapi::api::core::v1::{EnvFromSource, EnvVar, Pod, ServiceAccountTokenProjection, Volume};

use super::Key;

/// Lifetime in seconds of a requested token whose volume sets no lifetime.
pub(crate) const TOKEN_SECONDS: i64 = 3600;

/// Config maps, secrets, tokens, services with their slices, and the RuntimeClass that a pod refers to anywhere.
pub(crate) fn references(pod: &Pod) -> Vec<Key> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let mut found = vec![Key::services("default"), Key::services(namespace)];
    found.extend([Key::slices("default"), Key::slices(namespace)]);
    for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
        of_env(namespace, container.env_from.as_deref(), container.env.as_deref(), &mut found);
    }
    for container in spec.ephemeral_containers.iter().flatten() {
        of_env(namespace, container.env_from.as_deref(), container.env.as_deref(), &mut found);
    }
    for volume in spec.volumes.iter().flatten() {
        of_volume(pod, volume, &mut found);
    }
    let pull_secrets = spec.image_pull_secrets.iter().flatten();
    found.extend(pull_secrets.map(|secret| Key::secret(namespace, &secret.name)));
    found.extend(runtime_class(pod).map(Key::runtime_class));
    found
}

/// The record of a token that a pod projects.
pub(crate) fn token_key(pod: &Pod, wanted: &ServiceAccountTokenProjection) -> Key {
    Key::token(
        pod.metadata.uid.as_deref().unwrap_or_default(),
        account(pod),
        wanted.audience.as_deref(),
        wanted.expiration_seconds.unwrap_or(TOKEN_SECONDS),
    )
}

/// Name of the pod's service account.
pub(crate) fn account(pod: &Pod) -> &str {
    let named = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
    named.filter(|name| !name.is_empty()).unwrap_or("default")
}

/// Name of the pod's RuntimeClass, if it has one.
pub(crate) fn runtime_class(pod: &Pod) -> Option<&str> {
    let name = pod.spec.as_ref()?.runtime_class_name.as_deref()?;
    (!name.is_empty()).then_some(name)
}

fn of_env(namespace: &str, from: Option<&[EnvFromSource]>, env: Option<&[EnvVar]>, found: &mut Vec<Key>) {
    for from in from.into_iter().flatten() {
        found.extend(from.config_map_ref.iter().map(|r| Key::config_map(namespace, &r.name)));
        found.extend(from.secret_ref.iter().map(|r| Key::secret(namespace, &r.name)));
    }
    for source in env.into_iter().flatten().filter_map(|e| e.value_from.as_ref()) {
        found.extend(source.config_map_key_ref.iter().map(|r| Key::config_map(namespace, &r.name)));
        found.extend(source.secret_key_ref.iter().map(|r| Key::secret(namespace, &r.name)));
    }
}

fn of_volume(pod: &Pod, volume: &Volume, found: &mut Vec<Key>) {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    found.extend(volume.config_map.iter().map(|v| Key::config_map(namespace, &v.name)));
    let secrets = volume.secret.iter().filter_map(|v| v.secret_name.as_deref());
    found.extend(secrets.map(|name| Key::secret(namespace, name)));
    for source in volume.projected.iter().flat_map(|p| p.sources.iter().flatten()) {
        found.extend(source.config_map.iter().map(|v| Key::config_map(namespace, &v.name)));
        found.extend(source.secret.iter().map(|v| Key::secret(namespace, &v.name)));
        found.extend(source.service_account_token.iter().map(|wanted| token_key(pod, wanted)));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn everything_that_a_pod_names_is_found() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"namespace": "n", "uid": "u"}, "spec": {
            "runtimeClassName": "gvisor",
            "imagePullSecrets": [{"name": "pull"}],
            "containers": [{"name": "c", "envFrom": [{"secretRef": {"name": "env"}}],
                "env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "key", "key": "k"}}}]}],
            "ephemeralContainers": [{"name": "e", "envFrom": [{"configMapRef": {"name": "added"}}]}],
            "volumes": [{"name": "v", "secret": {"secretName": "vol"}},
                {"name": "p", "projected": {"sources": [{"configMap": {"name": "root"}},
                    {"serviceAccountToken": {"path": "token", "audience": "vault"}}]}}]}}))
        .unwrap();
        let names: Vec<String> = references(&pod).iter().map(|key| format!("{key:?}")).collect();
        let wanted = [
            "services/default",
            "services/n",
            "slices/default",
            "slices/n",
            "secrets/n/env",
            "configmaps/n/key",
            "configmaps/n/added",
            "secrets/n/vol",
            "configmaps/n/root",
            "tokens/u/default/3600/vault",
            "secrets/n/pull",
            "runtimeclasses/gvisor",
        ];
        assert_eq!(names, wanted);
    }
}

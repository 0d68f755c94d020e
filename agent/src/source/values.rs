//! Config maps and secrets for pods: from the API server, or, while it cannot be reached, the values that
//! were last used here, kept on disk with mode 0600.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Container, Pod, Secret, Service, Volume};
use kube::api::ListParams;
use kube::{Api, Client};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::record;

/// How long the API server may take before what is remembered counts.
const PATIENCE: Duration = Duration::from_secs(5);

fn too_slow() -> kube::Error {
    let elapsed = std::io::Error::from(std::io::ErrorKind::TimedOut);
    kube::Error::Service(Box::new(elapsed))
}

/// Looks config maps and secrets up; cheap to clone.
#[derive(Clone)]
pub struct Values {
    client: Client,
    dir: Arc<PathBuf>,
}

/// Why a value is not to be had now; trying again later may help.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server refused or could not be reached, and no remembered copy is there.
    #[error("cannot get {kind} {namespace}/{name}")]
    Get {
        /// `ConfigMap` or `Secret`.
        kind: &'static str,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// What the API client said.
        #[source]
        source: Box<kube::Error>,
    },
}

impl Values {
    /// Remembers copies under `dir`.
    #[must_use]
    pub fn new(client: Client, dir: &Path) -> Self {
        Self { client, dir: Arc::new(dir.to_path_buf()) }
    }

    /// The config map, or `None` when the API server says that there is none.
    ///
    /// # Errors
    /// When the API server cannot tell and nothing is remembered.
    pub async fn config_map(&self, namespace: &str, name: &str) -> Result<Option<ConfigMap>, Error> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
        self.get(&api, "ConfigMap", (namespace, name)).await
    }

    /// The secret, or `None` when the API server says that there is none.
    ///
    /// # Errors
    /// When the API server cannot tell and nothing is remembered.
    pub async fn secret(&self, namespace: &str, name: &str) -> Result<Option<Secret>, Error> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        self.get(&api, "Secret", (namespace, name)).await
    }

    /// The services that a pod's environment tells of: the API server's own, and with a namespace those of
    /// the namespace. What cannot be had now is as it was last.
    pub(crate) async fn services(&self, namespace: Option<&str>) -> Vec<Service> {
        let own: Api<Service> = Api::namespaced(self.client.clone(), "default");
        let mut found: Vec<Service> =
            self.get(&own, "Service", ("default", "kubernetes")).await.ok().flatten().into_iter().collect();
        let Some(namespace) = namespace else { return found };
        let api: Api<Service> = Api::namespaced(self.client.clone(), namespace);
        let path = self.dir.join(format!("Services_{namespace}.json"));
        let everything = ListParams::default();
        let listed = tokio::time::timeout(PATIENCE, api.list(&everything)).await;
        let listed: Vec<Service> = match listed.unwrap_or_else(|_elapsed| Err(too_slow())) {
            Ok(list) => {
                if let Err(error) = record::write(&path, &list.items) {
                    tracing::warn!(%error, path = %path.display(), "cannot remember services");
                }
                list.items
            }
            Err(_unreachable) => record::read(&path).unwrap_or_default(),
        };
        let key = |s: &Service| (s.metadata.namespace.clone(), s.metadata.name.clone());
        for service in listed {
            if found.iter().all(|known| key(known) != key(&service)) {
                found.push(service);
            }
        }
        found
    }

    async fn get<K>(
        &self,
        api: &Api<K>,
        kind: &'static str,
        (namespace, name): (&str, &str),
    ) -> Result<Option<K>, Error>
    where
        K: Clone + DeserializeOwned + Serialize + std::fmt::Debug,
    {
        // Names of objects have no slash and no underscore, so the file name is unambiguous.
        let path = self.dir.join(format!("{kind}_{namespace}_{name}.json"));
        let asked = tokio::time::timeout(PATIENCE, api.get_opt(name)).await;
        let asked = asked.unwrap_or_else(|_elapsed| Err(too_slow()));
        match asked {
            Ok(Some(found)) => {
                if let Err(error) = record::write(&path, &found) {
                    tracing::warn!(%error, path = %path.display(), "cannot remember a value");
                }
                Ok(Some(found))
            }
            Ok(None) => {
                record::remove(&path);
                Ok(None)
            }
            Err(error) => match record::read(&path) {
                Some(remembered) => Ok(Some(remembered)),
                None => Err(Error::Get {
                    kind,
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                    source: Box::new(error),
                }),
            },
        }
    }

    /// Forgets these copies; the absent are forgotten.
    pub(crate) fn forget(&self, records: &[String]) {
        // A pod may name anything, but no object has a slash in its name.
        let named = records.iter().filter(|name| !name.contains('/'));
        named.for_each(|name| record::remove(&self.dir.join(name)));
    }

    /// Forgets the copies that none of these pods refers to.
    pub(crate) fn retain<'a>(&self, pods: impl IntoIterator<Item = &'a Pod>) {
        let mut names = HashSet::from(["Service_default_kubernetes.json".to_owned()]);
        names.extend(pods.into_iter().flat_map(records_of));
        for path in record::list(&self.dir) {
            let known = path.file_name().and_then(|n| n.to_str()).is_some_and(|n| names.contains(n));
            if !known {
                record::remove(&path);
            }
        }
    }
}

/// The file names of the copies that a pod refers to.
pub(crate) fn records_of(pod: &Pod) -> Vec<String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let named = references(pod).into_iter().map(|(kind, name)| format!("{kind}_{namespace}_{name}.json"));
    std::iter::once(format!("Services_{namespace}.json")).chain(named).collect()
}

/// The config maps and secrets that a pod names anywhere.
fn references(pod: &Pod) -> Vec<(&'static str, String)> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let mut found = Vec::new();
    for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
        of_container(container, &mut found);
    }
    for volume in spec.volumes.iter().flatten() {
        of_volume(volume, &mut found);
    }
    found.extend(spec.image_pull_secrets.iter().flatten().map(|r| ("Secret", r.name.clone())));
    found
}

fn of_container(container: &Container, found: &mut Vec<(&'static str, String)>) {
    for from in container.env_from.iter().flatten() {
        found.extend(from.config_map_ref.iter().map(|r| ("ConfigMap", r.name.clone())));
        found.extend(from.secret_ref.iter().map(|r| ("Secret", r.name.clone())));
    }
    for source in container.env.iter().flatten().filter_map(|e| e.value_from.as_ref()) {
        found.extend(source.config_map_key_ref.iter().map(|r| ("ConfigMap", r.name.clone())));
        found.extend(source.secret_key_ref.iter().map(|r| ("Secret", r.name.clone())));
    }
}

fn of_volume(volume: &Volume, found: &mut Vec<(&'static str, String)>) {
    found.extend(volume.config_map.iter().map(|v| ("ConfigMap", v.name.clone())));
    found.extend(volume.secret.iter().filter_map(|v| Some(("Secret", v.secret_name.clone()?))));
    for source in volume.projected.iter().flat_map(|p| p.sources.iter().flatten()) {
        found.extend(source.config_map.iter().map(|v| ("ConfigMap", v.name.clone())));
        found.extend(source.secret.iter().map(|v| ("Secret", v.name.clone())));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn everything_that_a_pod_names_is_found() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "imagePullSecrets": [{"name": "pull"}],
            "containers": [{"name": "c", "envFrom": [{"secretRef": {"name": "env"}}],
                "env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "key", "key": "k"}}}]}],
            "volumes": [{"name": "v", "secret": {"secretName": "vol"}},
                {"name": "p", "projected": {"sources": [{"configMap": {"name": "root"}}]}}]}}))
        .unwrap();
        let names: Vec<String> = references(&pod).into_iter().map(|(_, name)| name).collect();
        assert_eq!(names, ["env", "key", "vol", "root", "pull"]);
    }
}

//! Environment of a container, and expansion of `$(NAME)` in it, in commands and in arguments. Pure: the caller has
//! read the referenced objects and files.

mod field;
mod file;
mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Container, EnvVar, EnvVarSource, Pod, Secret, Service};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

pub(crate) use field::{Addresses, field};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use file::fuzz;
pub(crate) use file::{EnvFile, FILE_MAX, FileName, FileProblem, wanted_keys};

/// Maximum bytes of an environment, and of a command with its arguments. The kernel starts no program with more than
/// 6 MiB of both. References can multiply a value, so a small pod could fill the node's memory.
pub(crate) const BYTES_MAX: usize = 6 << 20;

/// Objects and files that containers refer to. An object is None if the API server reports that it does not exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources {
    pub(crate) config_maps: BTreeMap<String, Option<ConfigMap>>,
    pub(crate) secrets: BTreeMap<String, Option<Secret>>,
    /// Files that `fileKeyRef` refers to. The files are in `emptyDir` volumes.
    pub(crate) files: BTreeMap<FileName, EnvFile>,
    pub(crate) services: Vec<Arc<Service>>,
    pub(crate) addresses: Addresses,
    /// Allocatable resources of the node. These amounts replace a missing limit of a container.
    pub(crate) node: BTreeMap<String, Quantity>,
}

/// The reason why an environment cannot be computed. The texts are the kubelet's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EnvError {
    #[error("configmap \"{0}\" not found")]
    NoConfigMap(String),
    #[error("secret \"{0}\" not found")]
    NoSecret(String),
    #[error("couldn't find key {key} in ConfigMap {namespace}/{name}")]
    NoConfigMapKey { key: String, namespace: String, name: String },
    #[error("couldn't find key {key} in Secret {namespace}/{name}")]
    NoSecretKey { key: String, namespace: String, name: String },
    #[error("cannot find the volume {0:?} referenced by FileKeyRef")]
    NoFileVolume(String),
    #[error("couldn't parse env file: {0}")]
    File(FileProblem),
    #[error("environment variable key {key:?} not found in file {path:?}")]
    NoFileKey { key: String, path: String },
    #[error("unsupported fieldPath: {0}")]
    Field(String),
    #[error("unsupported container resource: {0}")]
    Resource(String),
    #[error("env {0} uses a source that this node does not support")]
    Source(String),
    #[error("environment or command is larger than {} MiB, the kernel's limit", BYTES_MAX >> 20)]
    TooLarge,
}

/// Names of the objects that a container's environment refers to.
pub(crate) struct References {
    pub(crate) config_maps: BTreeSet<String>,
    pub(crate) secrets: BTreeSet<String>,
}

pub(crate) fn references(container: &Container) -> References {
    let (mut maps, mut secrets) = (BTreeSet::new(), BTreeSet::new());
    for from in container.env_from.iter().flatten() {
        maps.extend(from.config_map_ref.as_ref().map(|r| r.name.clone()));
        secrets.extend(from.secret_ref.as_ref().map(|r| r.name.clone()));
    }
    for source in container.env.iter().flatten().filter_map(|e| e.value_from.as_ref()) {
        maps.extend(source.config_map_key_ref.as_ref().map(|r| r.name.clone()));
        secrets.extend(source.secret_key_ref.as_ref().map(|r| r.name.clone()));
    }
    References { config_maps: maps, secrets }
}

/// The environment in its order: `envFrom`, `env`, then service variables that do not override them.
pub(crate) fn environment(
    pod: &Pod,
    container: &Container,
    sources: &Sources,
) -> Result<Vec<(String, String)>, EnvError> {
    let links = pod.spec.as_ref().and_then(|s| s.enable_service_links) != Some(false);
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let services = service::environment(&sources.services, namespace, links);
    let mut env = Environment::default();
    let context = Context { pod, container, sources, namespace };
    context.take_objects(&mut env)?;
    for var in container.env.iter().flatten() {
        if let Some(value) = context.value(var, &env, &services)? {
            env.set(&var.name, value)?;
        }
    }
    for (name, value) in services {
        if !env.values.contains_key(&name) {
            env.set(&name, value)?;
        }
    }
    Ok(env.order.into_iter().filter_map(|name| env.values.remove_entry(&name)).collect())
}

/// Replaces `$(NAME)` by its value. `$$` becomes `$`; unknown names stay unchanged. The result has at most `most`
/// bytes.
pub(crate) fn expand<'a>(
    text: &str,
    most: usize,
    value: impl Fn(&str) -> Option<&'a str>,
) -> Result<String, EnvError> {
    let mut out = String::new();
    let mut rest = text;
    // Find the last `)` once. A search for `)` after every `$(` would take quadratic time if there is no `)`.
    let last_end = text.rfind(')');
    let has_end = |name: &&str| last_end.is_some_and(|end| text.len() - name.len() <= end);
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if let Some(tail) = after.strip_prefix('$') {
            out.push('$');
            rest = tail;
        } else if let Some((name, tail)) =
            after.strip_prefix('(').filter(has_end).and_then(|s| s.split_once(')'))
        {
            match value(name) {
                Some(value) if value.len() > most.saturating_sub(out.len()) => {
                    return Err(EnvError::TooLarge);
                }
                Some(value) => out.push_str(value),
                None => out.extend(["$(", name, ")"]),
            }
            rest = tail;
        } else {
            out.push('$');
            rest = after;
        }
    }
    out.push_str(rest);
    if out.len() > most { Err(EnvError::TooLarge) } else { Ok(out) }
}

#[derive(Default)]
struct Environment {
    order: Vec<String>,
    values: BTreeMap<String, String>,
    /// Bytes of all names and values that were set. Overwritten values count too, because the limit also bounds the
    /// time of the expansion.
    bytes: usize,
}

impl Environment {
    fn set(&mut self, name: &str, value: String) -> Result<(), EnvError> {
        self.bytes = self.bytes.saturating_add(name.len() + value.len());
        if self.bytes > BYTES_MAX {
            return Err(EnvError::TooLarge);
        }
        if self.values.insert(name.to_owned(), value).is_none() {
            self.order.push(name.to_owned());
        }
        Ok(())
    }
}

struct Context<'a> {
    pod: &'a Pod,
    container: &'a Container,
    sources: &'a Sources,
    namespace: &'a str,
}

impl Context<'_> {
    fn take_objects(&self, env: &mut Environment) -> Result<(), EnvError> {
        for from in self.container.env_from.iter().flatten() {
            let prefix = from.prefix.as_deref().unwrap_or_default();
            if let Some(reference) = &from.config_map_ref {
                match self.config_map(&reference.name) {
                    Some(map) => {
                        for (key, value) in map.data.iter().flatten() {
                            env.set(&format!("{prefix}{key}"), value.clone())?;
                        }
                    }
                    None if reference.optional == Some(true) => {}
                    None => return Err(EnvError::NoConfigMap(reference.name.clone())),
                }
            }
            if let Some(reference) = &from.secret_ref {
                match self.secret(&reference.name) {
                    Some(secret) => {
                        for (key, value) in secret.data.iter().flatten() {
                            let text = String::from_utf8_lossy(&value.0).into_owned();
                            env.set(&format!("{prefix}{key}"), text)?;
                        }
                    }
                    None if reference.optional == Some(true) => {}
                    None => return Err(EnvError::NoSecret(reference.name.clone())),
                }
            }
        }
        Ok(())
    }

    fn value(
        &self,
        var: &EnvVar,
        env: &Environment,
        services: &BTreeMap<String, String>,
    ) -> Result<Option<String>, EnvError> {
        if let Some(source) = &var.value_from {
            return self.source_value(&var.name, source);
        }
        let literal = var.value.as_deref().unwrap_or_default();
        let set = |name: &str| env.values.get(name).or_else(|| services.get(name)).map(String::as_str);
        expand(literal, BYTES_MAX - env.bytes, set).map(Some)
    }

    fn source_value(&self, name: &str, source: &EnvVarSource) -> Result<Option<String>, EnvError> {
        if let Some(reference) = &source.field_ref {
            let path = &reference.field_path;
            return field(self.pod, &self.sources.addresses, path)
                .map(Some)
                .ok_or_else(|| EnvError::Field(path.clone()));
        }
        if let Some(reference) = &source.resource_field_ref {
            return field::resource(self.pod, self.container, reference, &self.sources.node)
                .map(Some)
                .ok_or_else(|| EnvError::Resource(reference.resource.clone()));
        }
        if let Some(reference) = &source.config_map_key_ref {
            let (optional, name) = (reference.optional == Some(true), &reference.name);
            let Some(map) = self.config_map(name) else {
                return if optional { Ok(None) } else { Err(EnvError::NoConfigMap(name.clone())) };
            };
            return match map.data.as_ref().and_then(|data| data.get(&reference.key)) {
                Some(value) => Ok(Some(value.clone())),
                None if optional => Ok(None),
                None => Err(EnvError::NoConfigMapKey {
                    key: reference.key.clone(),
                    namespace: self.namespace.to_owned(),
                    name: name.clone(),
                }),
            };
        }
        if let Some(reference) = &source.secret_key_ref {
            let (optional, name) = (reference.optional == Some(true), &reference.name);
            let Some(secret) = self.secret(name) else {
                return if optional { Ok(None) } else { Err(EnvError::NoSecret(name.clone())) };
            };
            return match secret.data.as_ref().and_then(|data| data.get(&reference.key)) {
                Some(value) => Ok(Some(String::from_utf8_lossy(&value.0).into_owned())),
                None if optional => Ok(None),
                None => Err(EnvError::NoSecretKey {
                    key: reference.key.clone(),
                    namespace: self.namespace.to_owned(),
                    name: name.clone(),
                }),
            };
        }
        if let Some(reference) = &source.file_key_ref {
            return file::value(&self.sources.files, reference);
        }
        Err(EnvError::Source(name.to_owned()))
    }

    fn config_map(&self, name: &str) -> Option<&ConfigMap> {
        self.sources.config_maps.get(name).and_then(Option::as_ref)
    }

    fn secret(&self, name: &str) -> Option<&Secret> {
        self.sources.secrets.get(name).and_then(Option::as_ref)
    }
}

#[cfg(test)]
mod tests;

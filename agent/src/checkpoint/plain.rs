//! Migration of plain records of earlier versions (`agent/pods`, `agent/values`).

use std::fs;
use std::path::Path;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Checkpoint, Key, references};
use crate::json_file;

/// Encrypts the records of an earlier version. Plain files are removed after the encrypted records are on disk.
pub(super) fn take_over(checkpoint: &Checkpoint, agent_dir: &Path) {
    let (pods, values) = (agent_dir.join("pods"), agent_dir.join("values"));
    if !pods.exists() && !values.exists() {
        return;
    }
    for path in json_file::list(&pods) {
        let Some(pod) = json_file::read::<Pod>(&path) else { continue };
        let Some(uid) = pod.metadata.uid.clone() else { continue };
        checkpoint.own(&uid, references(&pod));
        checkpoint.put(Key::pod(&uid), &pod);
    }
    for path in json_file::list(&values) {
        let Some(name) = path.file_stem().and_then(|name| name.to_str()) else { continue };
        let mut parts = name.splitn(3, '_');
        match (parts.next(), parts.next(), parts.next()) {
            (Some("ConfigMap"), Some(namespace), Some(name)) => {
                copy::<ConfigMap>(checkpoint, &path, Key::config_map(namespace, name));
            }
            (Some("Secret"), Some(namespace), Some(name)) => {
                copy::<Secret>(checkpoint, &path, Key::secret(namespace, name));
            }
            (Some("Services"), Some(namespace), None) => {
                copy::<Vec<serde_json::Value>>(checkpoint, &path, Key::services(namespace));
            }
            _ => {}
        }
    }
    if checkpoint.flush() {
        tracing::warn!("plain records of an earlier version stay until they can be encrypted");
        return;
    }
    for dir in [pods, values] {
        if let Err(error) = fs::remove_dir_all(&dir).or_else(absent) {
            tracing::warn!(%error, path = %dir.display(), "cannot remove plain records of an earlier version");
        }
    }
}

fn copy<T: DeserializeOwned + Serialize>(checkpoint: &Checkpoint, path: &Path, key: Key) {
    if let Some(value) = json_file::read::<T>(path) {
        checkpoint.put(key, &value);
    }
}

fn absent(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

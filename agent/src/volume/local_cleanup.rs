//! Removes the directories of local volumes that are being deleted, then their finalizers. Gives expanded volumes their
//! size.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_cri::blocking::FileWork;
use coracle_watch::{Config, Event};
use futures::StreamExt;
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;

use super::claim;
use super::local::{self, NODE};

const FINALIZER: &str = "coracle.dev/local-volume";
/// The finalizer of volumes that are bound to a claim.
const PROTECTION: &str = "kubernetes.io/pv-protection";
/// Timeout of a watch request.
const RENEWAL_SECONDS: u32 = 1500;
/// Delay before failed volumes are tried again.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Removals of volumes.
static REMOVALS: FileWork = FileWork::new(1);

/// Directories of the node.
pub(crate) struct Directories {
    /// Directory of local volumes.
    pub(crate) volumes: PathBuf,
    /// Directory of pods.
    pub(crate) pods: PathBuf,
}

/// Removes and resizes directories until the agent ends.
pub(crate) async fn run(client: Client, node: String, directories: Directories) {
    let api: Api<PersistentVolume> = Api::all(client);
    // A longer name cannot be the value of a label: the node has no provisioned volumes.
    if node.len() > 63 {
        return std::future::pending().await;
    }
    let config = Config::default().labels(&format!("{NODE}={node}")).timeout(RENEWAL_SECONDS);
    let mut events = coracle_watch::watch(api.clone(), config);
    let mut failed: BTreeMap<String, PersistentVolume> = BTreeMap::new();
    loop {
        // Cancel-safe: the stream keeps items that were not received.
        let due = tokio::select! {
            event = events.next() => match event {
                None => return,
                Some(Ok(Event::Apply(volume) | Event::InitApply(volume))) => vec![volume],
                Some(Ok(Event::Delete(volume))) => {
                    failed.remove(volume.metadata.name.as_deref().unwrap_or_default());
                    Vec::new()
                }
                Some(Ok(Event::Init | Event::InitDone)) => Vec::new(),
                Some(Err(error)) => {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        kind = "PersistentVolume",
                        "a watch failed"
                    );
                    Vec::new()
                }
            },
            () = tokio::time::sleep(RETRY_DELAY), if !failed.is_empty() => {
                std::mem::take(&mut failed).into_values().collect()
            }
        };
        for volume in due {
            let name = volume.metadata.name.clone().unwrap_or_default();
            let done = match is_due(&volume) {
                true => release(&api, &volume, &node, &directories).await,
                false => resize(&volume, &node, &directories).await,
            };
            match done {
                Ok(Released::Done) => drop(failed.remove(&name)),
                Ok(Released::InUse) => drop(failed.insert(name, volume)),
                Err(error) => {
                    tracing::warn!(volume = name, error, "cannot remove or resize a local volume");
                    failed.insert(name, volume);
                }
            }
        }
    }
}

/// Whether the directory is to be removed now: the volume is being deleted, and no claim is bound to the volume.
fn is_due(volume: &PersistentVolume) -> bool {
    let finalizers = volume.metadata.finalizers.as_deref().unwrap_or_default();
    let has = |name: &str| finalizers.iter().any(|finalizer| finalizer == name);
    volume.metadata.deletion_timestamp.is_some()
        && local::is_provisioned(volume)
        && has(FINALIZER)
        && !has(PROTECTION)
}

/// Changes the size of the directory to the size of the volume.
async fn resize(
    volume: &PersistentVolume,
    node: &str,
    directories: &Directories,
) -> Result<Released, String> {
    if !local::is_provisioned(volume) || volume.metadata.deletion_timestamp.is_some() {
        return Ok(Released::Done);
    }
    // Mounting the volume reports the error.
    let Ok(name) = local::own_name(&directories.volumes, node, volume) else { return Ok(Released::Done) };
    let name = name.to_owned();
    let (base, volume) = (directories.volumes.clone(), volume.clone());
    let resized = coracle_threads::spawn_blocking(move || local::resize(&base, &name, &volume)).await;
    let resized = resized.map_err(|error| error.to_string())?;
    resized.map(|()| Released::Done).map_err(|error| coracle_error_chain::chain(&error))
}

/// Whether the directory of a volume was removed.
#[derive(Debug, PartialEq)]
enum Released {
    Done,
    InUse,
}

/// Removes the directory, unless a pod uses it. A pod that was deleted by force runs until its grace period ends, but
/// the API server no longer has the pod.
fn remove(pods: &Path, base: &Path, name: &str) -> std::io::Result<Released> {
    if claim::is_in_use(pods, name)? {
        return Ok(Released::InUse);
    }
    local::remove(base, name).map(|()| Released::Done)
}

async fn release(
    api: &Api<PersistentVolume>,
    volume: &PersistentVolume,
    node: &str,
    directories: &Directories,
) -> Result<Released, String> {
    let name = local::own_name(&directories.volumes, node, volume)?.to_owned();
    let (pods, base, removed) = (directories.pods.clone(), directories.volumes.clone(), name.clone());
    let done = REMOVALS.run(move || remove(&pods, &base, &removed)).await.unwrap_or_else(Err);
    if done.map_err(|error| coracle_error_chain::chain(&error))? == Released::InUse {
        return Ok(Released::InUse);
    }
    let finalizers = volume.metadata.finalizers.iter().flatten();
    let kept: Vec<&String> = finalizers.filter(|finalizer| *finalizer != FINALIZER).collect();
    let patch = json!({"metadata": {
        "uid": volume.metadata.uid, "resourceVersion": volume.metadata.resource_version, "finalizers": kept,
    }});
    match api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Released::Done),
        // The watch delivers the newer version, which is handled then.
        Err(kube::Error::Api(status)) if status.is_conflict() => Ok(Released::Done),
        Err(error) => Err(coracle_error_chain::chain(&error)),
        Ok(_) => {
            tracing::info!(volume = name, "local volume removed");
            Ok(Released::Done)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_stays_while_a_pod_on_the_node_uses_the_volume() {
        let dir = tempfile::tempdir().expect("directory");
        let (pods, base) = (dir.path().join("pods"), dir.path().join("base"));
        std::fs::create_dir_all(pods.join("uid/claims")).expect("pod");
        std::fs::create_dir_all(base.join("v")).expect("volume");
        let record = pods.join("uid/claims/data.json");
        std::fs::write(&record, r#"{"metadata": {"name": "v"}}"#).expect("record");
        assert_eq!(remove(&pods, &base, "v").expect("check"), Released::InUse);
        assert!(base.join("v").exists());
        std::fs::remove_file(record).expect("the pod ends");
        assert_eq!(remove(&pods, &base, "v").expect("remove"), Released::Done);
        assert!(!base.join("v").exists());
    }

    #[test]
    fn data_is_removed_only_after_the_last_use() {
        let volume = |finalizers: &[&str], deleted: bool| -> PersistentVolume {
            let mut object = json!({"metadata": {"name": "v", "finalizers": finalizers,
                "annotations": {"pv.kubernetes.io/provisioned-by": local::PROVISIONER}}});
            if deleted {
                object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            }
            serde_json::from_value(object).expect("volume")
        };
        assert!(is_due(&volume(&[FINALIZER], true)));
        assert!(!is_due(&volume(&[FINALIZER], false)));
        assert!(!is_due(&volume(&[FINALIZER, PROTECTION], true)));
        assert!(!is_due(&volume(&[], true)));
    }
}

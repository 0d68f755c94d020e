//! CheckpointPod. What is asked for, and which refusal it gets, is KEP-5823's, as CRI-O has it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_proto::cri;
use tracing::info;

use super::checkpoint::Stays;
use crate::checkpoint::{self, PodSubject, checkpoint_pod, take_back_pod};
use crate::container::Container;
use crate::error::Error;
use crate::runtime::Runtime;

impl Runtime {
    /// Writes a checkpoint of containers of a pod that run, and go on, to the request's directory. Another one of them
    /// waits until this one is told or taken back.
    pub(super) async fn pod_checkpoint(
        self,
        request: cri::CheckpointPodRequest,
    ) -> Result<(cri::CheckpointPodResponse, Stays), Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?;
        no_options(&request.options)?;
        let output = directory("output_path", &request.output_path)?;
        sandbox.shim()?;
        let containers = self.selected(&sandbox.id, &request.container_ids)?;
        let failed = |source| Error::Checkpoint { what: "pod sandbox", id: sandbox.id.clone(), source };
        // Nothing is frozen in vain.
        checkpoint::program().map_err(|absent| failed(absent.into()))?;
        let mut stays = Vec::new();
        // In an order that all keep.
        for container in containers.values() {
            stays.push(Arc::clone(&container.removing).lock_owned().await);
        }
        // What one before left there, whose caller went away, is taken back by now.
        is_empty(&output)?;
        let mut subjects = Vec::new();
        for container in containers.values() {
            // It may have ended while another checkpoint was made.
            let container = self.running(&container.id)?;
            subjects.push(self.subject(&container)?);
        }
        let pod = PodSubject { record: sandbox.record_now(), containers: subjects, output };
        let work = tokio::task::spawn_blocking(move || checkpoint_pod(&pod));
        let done = work.await.map_err(|panic| Error::Kernel {
            doing: "make the checkpoint",
            source: std::io::Error::other(panic),
        })?;
        done.map_err(failed)?;
        info!(sandbox = %sandbox.id, output = request.output_path, "made a checkpoint");
        Ok((cri::CheckpointPodResponse {}, Arc::new(stays)))
    }

    /// The containers that are named: at least one, each once, of this pod, and running.
    fn selected(&self, sandbox_id: &str, ids: &[String]) -> Result<BTreeMap<String, Arc<Container>>, Error> {
        let invalid = |why: String| Error::invalid("container_ids", why);
        if ids.is_empty() {
            return Err(invalid("names no container".to_owned()));
        }
        let mut selected = BTreeMap::new();
        for id in ids {
            let container = self.inner.containers.get(id).filter(|container| container.id == *id);
            let container = container.ok_or_else(|| Error::no_container(id))?;
            if container.record.sandbox_id != sandbox_id {
                return Err(invalid(format!("{id:?} is not of this pod")));
            }
            let container = self.running(id)?;
            if selected.insert(id.clone(), container).is_some() {
                return Err(invalid(format!("{id:?} is named twice")));
            }
        }
        let names: BTreeSet<String> = selected.values().map(|container| name_of(container)).collect();
        if names.len() < selected.len() {
            return Err(invalid("two of them have one name".to_owned()));
        }
        Ok(selected)
    }
}

fn name_of(container: &Container) -> String {
    container.record.config.metadata.clone().unwrap_or_default().name
}

/// There is none that we know. The CRI forbids to ignore one.
pub(super) fn no_options(options: &HashMap<String, String>) -> Result<(), Error> {
    match options.keys().min() {
        Some(name) => Err(Error::invalid("options", format!("{name:?} is not known"))),
        None => Ok(()),
    }
}

/// Whether there is nothing in the caller's directory.
fn is_empty(output: &Path) -> Result<(), Error> {
    let mut entries = std::fs::read_dir(output).map_err(Error::file("list", output))?;
    match entries.next() {
        Some(_) => Err(Error::invalid("output_path", format!("{output:?} is not empty"))),
        None => Ok(()),
    }
}

/// A directory that is one itself, and no link to one.
pub(super) fn directory(field: &'static str, path: &str) -> Result<PathBuf, Error> {
    let found = Path::new(path);
    let is_dir = || std::fs::symlink_metadata(found).is_ok_and(|metadata| metadata.is_dir());
    if !found.is_absolute() || !is_dir() {
        return Err(Error::invalid(field, format!("{path:?} is no absolute path of a directory")));
    }
    Ok(found.to_owned())
}

/// Takes a checkpoint back that nobody waits for any more.
pub(super) async fn take_back(request: cri::CheckpointPodRequest, stays: Stays) -> Result<(), Error> {
    let cri::CheckpointPodRequest { pod_sandbox_id: id, output_path, container_ids, .. } = request;
    let work = tokio::task::spawn_blocking(move || take_back_pod(Path::new(&output_path), &container_ids));
    let done = work.await;
    drop(stays);
    let done =
        done.map_err(|panic| Error::Kernel { doing: "take back", source: std::io::Error::other(panic) })?;
    done.map_err(|source| Error::Checkpoint { what: "pod sandbox", id, source })
}

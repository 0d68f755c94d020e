//! CheckpointPod, with the requirements and errors of KEP-5823, as in CRI-O.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_proto::cri;
use tracing::info;

use super::container::ContainerLocks;
use super::{CheckpointService, checkpoint_permit};
use crate::checkpoint::{self, PodSubject, checkpoint_pod, remove_pod_output};
use crate::container::Container;
use crate::error::Error;

impl CheckpointService {
    /// Writes a checkpoint of running containers of a pod to the request's directory; the containers continue to run.
    /// Another checkpoint of these containers waits until this checkpoint is delivered or undone.
    pub(crate) async fn pod_checkpoint(
        self,
        request: cri::CheckpointPodRequest,
    ) -> Result<(cri::CheckpointPodResponse, ContainerLocks), Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.tables.sandbox(id)?;
        no_options(&request.options)?;
        let output = directory("output_path", &request.output_path)?;
        sandbox.shim()?;
        let containers = self.selected(&sandbox.id, &request.container_ids)?;
        let failed = |source| Error::Checkpoint { what: "pod sandbox", id: sandbox.id.clone(), source };
        // CRIU is looked up before a container is frozen.
        checkpoint::program().map_err(|absent| failed(absent.into()))?;
        // This comes before the locks, so that the removal of a container does not wait for other checkpoints.
        let permit = checkpoint_permit().await;
        let mut locks = Vec::new();
        // Every call locks the containers in the order of their ids.
        for container in containers.values() {
            locks.push(Arc::clone(&container.removing).lock_owned().await);
        }
        // The output is checked with the locks held: an earlier, cancelled checkpoint holds the locks until its files
        // are removed from this directory.
        check_empty(&output)?;
        let mut subjects = Vec::new();
        for container in containers.values() {
            // The container may have ended while this call waited for another checkpoint.
            let container = self.tables.running(&container.id)?;
            subjects.push(self.subject(&container)?);
        }
        let pod = PodSubject { record: sandbox.record_now(), containers: subjects, output };
        let work = coracle_threads::spawn_blocking(move || {
            let _permit = permit;
            checkpoint_pod(&pod)
        });
        let done = work.await.map_err(Error::panicked("make the checkpoint"))?;
        done.map_err(failed)?;
        info!(sandbox = %sandbox.id, output = request.output_path, "made a checkpoint");
        Ok((cri::CheckpointPodResponse {}, Arc::new(locks)))
    }

    /// The requested containers: at least one, each once, of this pod, and running.
    fn selected(&self, sandbox_id: &str, ids: &[String]) -> Result<BTreeMap<String, Arc<Container>>, Error> {
        let invalid = |why: String| Error::invalid("container_ids", why);
        if ids.is_empty() {
            return Err(invalid("is empty".to_owned()));
        }
        let mut selected = BTreeMap::new();
        for id in ids {
            let container = self.tables.containers.get(id).filter(|container| container.id == *id);
            let container = container.ok_or_else(|| Error::no_container(id))?;
            if container.record.sandbox_id != sandbox_id {
                return Err(invalid(format!("{id:?} belongs to another pod")));
            }
            let container = self.tables.running(id)?;
            if selected.insert(id.clone(), container).is_some() {
                return Err(invalid(format!("{id:?} is listed twice")));
            }
        }
        let names: BTreeSet<String> = selected.values().map(|container| name_of(container)).collect();
        if names.len() < selected.len() {
            return Err(invalid("two containers have the same name".to_owned()));
        }
        Ok(selected)
    }
}

fn name_of(container: &Container) -> String {
    container.record.config.metadata.clone().unwrap_or_default().name
}

/// Refuses all options: no option is supported, and the CRI forbids to ignore an option.
pub(super) fn no_options(options: &HashMap<String, String>) -> Result<(), Error> {
    match options.keys().min() {
        Some(name) => Err(Error::invalid("options", format!("option {name:?} is not supported"))),
        None => Ok(()),
    }
}

/// Refuses an output directory that is not empty.
fn check_empty(output: &Path) -> Result<(), Error> {
    let mut entries = std::fs::read_dir(output).map_err(Error::file("list", output))?;
    match entries.next() {
        Some(_) => Err(Error::invalid("output_path", format!("{output:?} is not empty"))),
        None => Ok(()),
    }
}

/// A directory of the request: an absolute path, not a link.
pub(super) fn directory(field: &'static str, path: &str) -> Result<PathBuf, Error> {
    let found = Path::new(path);
    let is_dir = || std::fs::symlink_metadata(found).is_ok_and(|metadata| metadata.is_dir());
    if !found.is_absolute() || !is_dir() {
        return Err(Error::invalid(field, format!("{path:?} is not the absolute path of a directory")));
    }
    Ok(found.to_owned())
}

/// Removes a checkpoint whose caller disconnected before the response.
pub(crate) async fn undo_checkpoint(
    request: cri::CheckpointPodRequest,
    locks: ContainerLocks,
) -> Result<(), Error> {
    let cri::CheckpointPodRequest { pod_sandbox_id: id, output_path, container_ids, .. } = request;
    let work =
        coracle_threads::spawn_blocking(move || remove_pod_output(Path::new(&output_path), &container_ids));
    let done = work.await;
    drop(locks);
    let done = done.map_err(Error::panicked("remove the checkpoint"))?;
    done.map_err(|source| Error::Checkpoint { what: "pod sandbox", id, source })
}

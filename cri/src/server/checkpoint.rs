//! CheckpointContainer; and CheckpointPod and RestorePod, which are refused by name.

use std::path::{Path, PathBuf};

use coracle_proto::cri;
use tracing::info;

use crate::checkpoint::{Subject, checkpoint};
use crate::container::Container;
use crate::error::Error;
use crate::runtime::Runtime;

impl Runtime {
    /// Writes a checkpoint of a container that runs, and goes on, to the request's location.
    pub(super) async fn checkpoint(
        self,
        request: cri::CheckpointContainerRequest,
    ) -> Result<cri::CheckpointContainerResponse, Error> {
        let container = self.running(&request.container_id)?;
        let location = PathBuf::from(&request.location);
        if !location.is_absolute() || location.file_name().is_none() {
            return Err(Error::invalid("location", "must be the absolute path of a file"));
        }
        // One at a time, and its directories stay.
        let _stays = container.removing.lock().await;
        let subject = self.subject(&container)?;
        let work = tokio::task::spawn_blocking(move || checkpoint(&subject, &location));
        let done = work.await.map_err(|panic| Error::Kernel {
            doing: "make the checkpoint",
            source: std::io::Error::other(panic),
        })?;
        done.map_err(|source| Error::Checkpoint { id: container.id.clone(), source })?;
        info!(container = %container.id, location = request.location, "made a checkpoint");
        Ok(cri::CheckpointContainerResponse {})
    }

    fn subject(&self, container: &Container) -> Result<Subject, Error> {
        let inner = &self.inner;
        let record = container.record_now();
        // Without its image, which may be gone by now, the name that it had must do.
        let image = inner.images.get(&record.image_id);
        let name = record.config.image.as_ref().map(|image| image.image.clone()).unwrap_or_default();
        Ok(Subject {
            pid: container.pid(),
            shim_pid: self.shim_of(container)?.pid(),
            bundle: inner.records.container_dir(&container.id),
            layer: inner.records.layer_dir(&container.id),
            image: name,
            lower: image.map(|image| image.layers.to_vec()).unwrap_or_default(),
            record,
        })
    }

    /// Refuses. An unknown pod is told as such first.
    pub(super) fn pod_checkpoint(
        &self,
        request: &cri::CheckpointPodRequest,
    ) -> Result<cri::CheckpointPodResponse, Error> {
        let id = &request.pod_sandbox_id;
        self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?;
        Err(Error::Unsupported("checkpointing a pod"))
    }

    /// Refuses, and makes nothing.
    pub(super) fn pod_restore(
        &self,
        _request: &cri::RestorePodRequest,
    ) -> Result<cri::RestorePodResponse, Error> {
        Err(Error::Unsupported("restoring a pod"))
    }
}

/// Takes a checkpoint back that nobody waits for any more.
pub(super) async fn take_back(location: impl AsRef<Path>) -> Result<(), Error> {
    let location = location.as_ref();
    tokio::fs::remove_file(location).await.map_err(Error::file("remove", location))
}

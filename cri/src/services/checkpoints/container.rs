//! CheckpointContainer.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_proto::cri;
use tokio::sync::OwnedMutexGuard;
use tracing::info;

use super::{CheckpointService, checkpoint_permit};
use crate::checkpoint::{self, Subject, checkpoint};
use crate::container::Container;
use crate::error::Error;

/// Locks of containers that are in a checkpoint: no other checkpoint or removal of them begins meanwhile.
pub(crate) type ContainerLocks = Arc<Vec<OwnedMutexGuard<()>>>;

impl CheckpointService {
    /// Writes a checkpoint of a running container to the request's location; the container continues to run. Another
    /// checkpoint of the container waits until this checkpoint is delivered or undone.
    pub(crate) async fn checkpoint(
        self,
        request: cri::CheckpointContainerRequest,
    ) -> Result<(cri::CheckpointContainerResponse, ContainerLocks), Error> {
        let container = self.tables.running(&request.container_id)?;
        let location = PathBuf::from(&request.location);
        if !location.is_absolute() || location.file_name().is_none() {
            return Err(Error::invalid("location", "must be the absolute path of a file"));
        }
        let failed = |source| Error::Checkpoint { what: "container", id: container.id.clone(), source };
        is_replaceable(&location)?;
        // CRIU is looked up before a container is frozen.
        checkpoint::program().map_err(|absent| failed(absent.into()))?;
        // This comes before the lock, so that the removal of the container does not wait for other checkpoints.
        let permit = checkpoint_permit().await;
        let locks = Arc::new(vec![Arc::clone(&container.removing).lock_owned().await]);
        // The container may have ended while this call waited for another checkpoint.
        let subject = self.subject(self.tables.running(&container.id)?.as_ref())?;
        let work = coracle_threads::spawn_blocking(move || {
            let _permit = permit;
            checkpoint(&subject, &location)
        });
        let done = work.await.map_err(Error::panicked("make the checkpoint"))?;
        done.map_err(failed)?;
        info!(container = %container.id, location = request.location, "made a checkpoint");
        Ok((cri::CheckpointContainerResponse {}, locks))
    }

    pub(super) fn subject(&self, container: &Container) -> Result<Subject, Error> {
        let record = container.record_now();
        let freezer = self.cgroups.freezer(&record.cgroup);
        let freezer = freezer.ok_or(Error::Unsupported("a checkpoint without the cgroup freezer"))?;
        // The image can be removed meanwhile: then the name in the configuration is used.
        let image = self.images.get(&record.image_id);
        let name = record.config.image.as_ref().map(|image| image.image.clone()).unwrap_or_default();
        Ok(Subject {
            pid: container.pid(),
            shim: self.tables.shim_of(container)?,
            bundle: self.records.container_dir(&container.id),
            layer: self.records.layer_dir(&container.id),
            image: name,
            lower: image.map(|image| image.layers.to_vec()).unwrap_or_default(),
            stopping: Arc::clone(&container.stopping),
            freezer,
            record,
        })
    }
}

/// Refuses a location at which something other than a regular file exists. The checkpoint would replace a link or a
/// device.
fn is_replaceable(location: &Path) -> Result<(), Error> {
    match std::fs::symlink_metadata(location) {
        Ok(found) if found.is_file() => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Ok(_) => Err(Error::invalid("location", format!("{location:?} exists and is not a regular file"))),
        Err(error) => Err(Error::file("stat", location)(error)),
    }
}

/// Removes a checkpoint whose caller disconnected before the response.
pub(crate) async fn undo_checkpoint(location: impl AsRef<Path>, locks: ContainerLocks) -> Result<(), Error> {
    let location = location.as_ref();
    let removed = tokio::fs::remove_file(location).await.map_err(Error::file("remove", location));
    drop(locks);
    removed
}

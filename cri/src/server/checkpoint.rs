//! CheckpointContainer.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_proto::cri;
use tokio::sync::OwnedMutexGuard;
use tracing::info;

use crate::checkpoint::{self, Subject, checkpoint};
use crate::container::Container;
use crate::error::Error;
use crate::runtime::Runtime;

/// Of containers that are in a checkpoint: no other one is made of them meanwhile, and their directories stay.
pub(super) type Stays = Arc<Vec<OwnedMutexGuard<()>>>;

impl Runtime {
    /// Writes a checkpoint of a container that runs, and goes on, to the request's location. Another one of it waits
    /// until this one is told or taken back.
    pub(super) async fn checkpoint(
        self,
        request: cri::CheckpointContainerRequest,
    ) -> Result<(cri::CheckpointContainerResponse, Stays), Error> {
        let container = self.running(&request.container_id)?;
        let location = PathBuf::from(&request.location);
        if !location.is_absolute() || location.file_name().is_none() {
            return Err(Error::invalid("location", "must be the absolute path of a file"));
        }
        let failed = |source| Error::Checkpoint { what: "container", id: container.id.clone(), source };
        is_replaceable(&location)?;
        // Nothing is frozen in vain.
        checkpoint::program().map_err(|absent| failed(absent.into()))?;
        let stays = Arc::new(vec![Arc::clone(&container.removing).lock_owned().await]);
        // It may have ended while another checkpoint was made.
        let subject = self.subject(self.running(&container.id)?.as_ref())?;
        let work = tokio::task::spawn_blocking(move || checkpoint(&subject, &location));
        let done = work.await.map_err(|panic| Error::Kernel {
            doing: "make the checkpoint",
            source: std::io::Error::other(panic),
        })?;
        done.map_err(failed)?;
        info!(container = %container.id, location = request.location, "made a checkpoint");
        Ok((cri::CheckpointContainerResponse {}, stays))
    }

    pub(super) fn subject(&self, container: &Container) -> Result<Subject, Error> {
        let inner = &self.inner;
        let record = container.record_now();
        let freezer = inner.cgroups.freezer(&record.cgroup);
        let freezer = freezer.ok_or(Error::Unsupported("a checkpoint without the cgroup freezer"))?;
        // Without its image, which may be gone by now, the name that it had must do.
        let image = inner.images.get(&record.image_id);
        let name = record.config.image.as_ref().map(|image| image.image.clone()).unwrap_or_default();
        Ok(Subject {
            pid: container.pid(),
            shim: self.shim_of(container)?,
            bundle: inner.records.container_dir(&container.id),
            layer: inner.records.layer_dir(&container.id),
            image: name,
            lower: image.map(|image| image.layers.to_vec()).unwrap_or_default(),
            doomed: Arc::clone(&container.doomed),
            freezer,
            record,
        })
    }
}

/// What is there already must be a file, which is replaced: neither a link, nor a device, which would be as well.
fn is_replaceable(location: &Path) -> Result<(), Error> {
    match std::fs::symlink_metadata(location) {
        Ok(found) if found.is_file() => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Ok(_) => Err(Error::invalid("location", format!("{location:?} is there, and no file"))),
        Err(error) => Err(Error::file("look at", location)(error)),
    }
}

/// Takes a checkpoint back that nobody waits for any more.
pub(super) async fn take_back(location: impl AsRef<Path>, stays: Stays) -> Result<(), Error> {
    let location = location.as_ref();
    let removed = tokio::fs::remove_file(location).await.map_err(Error::file("remove", location));
    drop(stays);
    removed
}

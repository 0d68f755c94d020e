//! Restoring the processes of a container from a checkpoint, at StartContainer.

use std::path::Path;

use coracle_proto::shim;
use tracing::warn;

use super::service::ContainerService;
use crate::checkpoint;
use crate::container::Container;
use crate::error::checkpoint::CriuError;
use crate::error::{Error, chain};
use crate::records::RestoreRecord;
use crate::shim_client::Shim;

impl ContainerService {
    /// Restores the processes of a container with CRIU, in its shim.
    pub(super) async fn restore_processes(
        &self,
        container: &Container,
        shim: &Shim,
        restore: &RestoreRecord,
    ) -> Result<(), Error> {
        let layer = self.objects.records.layer_dir(&container.id);
        let failed = |source| Error::Checkpoint { what: "container", id: container.id.clone(), source };
        let program = checkpoint::program().map_err(|error| failed(error.into()))?;
        let (images, work) = (checkpoint::images_dir(&layer), checkpoint::work_dir(&layer));
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let streams = restore.streams.iter();
        let call = shim::RestoreContainer {
            container_id: container.id.clone(),
            program: text(&program),
            images: text(&images),
            work: text(&work),
            external: restore.external.clone(),
            streams: streams
                .map(|(pipe, standard)| shim::Stream { pipe: pipe.clone(), standard: *standard })
                .collect(),
        };
        let pid = match shim.restore(call).await {
            Ok(pid) => pid,
            Err(source) => {
                let Some(message) = checkpoint::criu_errors(&layer) else {
                    return Err(Error::Shim { doing: "restore the container", source });
                };
                return Err(failed(CriuError::Failed(message).into()));
            }
        };
        container.restored(pid);
        let removed = coracle_threads::spawn_blocking(move || checkpoint::forget_images(&layer)).await;
        if let Ok(Err(error)) = removed {
            warn!(
                container = container.id,
                error = chain(&error),
                "cannot remove the images of a restored container"
            );
        }
        Ok(())
    }
}

//! Checkpoints of containers: the processes dumped by CRIU, the changed files, and the configuration, in one archive.
//!
//! The archive has the layout of the existing tools (checkpointctl, CRI-O, Podman). The container continues to run. Its files
//! are copied while it is frozen (`frozen.rs`), so memory and files are of the same moment. The containers of a pod are frozen
//! together (`pod.rs`). A pod's checkpoint can be restored (`fit.rs` checks it, `restore.rs` unpacks it).

mod archive;
mod attributes;
mod build;
mod cleanup;
mod criu;
mod difference;
mod fit;
mod frozen;
mod location;
mod manifest;
mod pod;
mod restore;
mod streams;
mod subject;

use std::io;
use std::path::Path;

use self::build::BUILD_DIR;
use self::cleanup::OUTPUT;
pub(crate) use self::cleanup::{remove_incomplete, remove_pod_output};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::criu::fuzz as fuzz_mounts;
pub(crate) use self::criu::program;
pub(crate) use self::fit::fit;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::fit::fuzz;
pub(crate) use self::manifest::Manifest;
pub(crate) use self::pod::{PodSubject, checkpoint_pod};
pub(crate) use self::restore::{
    criu_errors, forget_images, images_dir, read, unpack_checkpoint, verify, work_dir,
};
use self::subject::Connections;
pub(crate) use self::subject::Subject;
use crate::error::checkpoint::CheckpointError;

/// Writes the checkpoint's archive, completely or not at all. Blocks.
pub(crate) fn checkpoint(subject: &Subject, location: &Path) -> Result<(), CheckpointError> {
    let made = remove_incomplete(&subject.layer).and_then(|()| {
        location::write_note(&subject.layer, location)?;
        coracle_fault::point("checkpoint.noted");
        let one = std::slice::from_ref(subject);
        let dumped = frozen::dump(one, Connections::Kept);
        // The container is thawed in every case, and before slow operations.
        let thawed = frozen::thaw(one);
        dumped.and(thawed)?;
        location::pack(&subject.layer, &subject.layer.join(BUILD_DIR), location)
    });
    let removed = match &made {
        Ok(()) => location::remove_note(&subject.layer),
        Err(_) => Ok(()),
    };
    let removed = removed.and(remove_incomplete(&subject.layer));
    made.and(removed)
}

/// Whether the layer has files of an incomplete checkpoint.
pub(crate) fn has_incomplete(layer: &Path) -> bool {
    layer.join(BUILD_DIR).exists() || layer.join(OUTPUT).exists() || location::has_note(layer)
}

/// Whether a CRIU process of an earlier runtime still dumps a container. CRIU is not killed, because it controls the
/// container's processes.
pub(crate) fn is_criu_running(layer: &Path) -> bool {
    !criu::running_criu(&layer.join(BUILD_DIR)).is_empty()
}

/// Waits for the end of CRIU.
pub(crate) async fn criu_ended(layer: &Path) -> io::Result<()> {
    criu::ended(&layer.join(BUILD_DIR)).await
}

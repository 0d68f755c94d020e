//! Checkpoints of containers: the processes dumped by CRIU, the changed files, and the configuration, in one archive.
//!
//! The archive has the layout of the existing tools (checkpointctl, CRI-O, Podman). The container continues to run. Its files
//! are copied while it is frozen (`frozen.rs`), so memory and files are of the same moment. The containers of a pod are frozen
//! together (`pod.rs`). A pod's checkpoint can be restored (`fit.rs` checks it, `restore.rs` unpacks it).

mod archive;
mod attributes;
mod criu;
mod difference;
mod fit;
mod frozen;
mod location;
mod manifest;
mod pod;
mod restore;
mod streams;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use jiff::Timestamp;
use serde::Serialize;

use self::frozen::Connections;
pub use criu::CriuError;
pub(crate) use criu::program;
pub(crate) use fit::fit;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use fit::fuzz;
pub(crate) use manifest::Manifest;
pub(crate) use pod::{PodSubject, checkpoint_pod, take_back_pod};
pub(crate) use restore::{forget_images, images_dir, lay_out, read, said, verify};

use crate::cgroup::freezer::Freezer;
use crate::records::{ContainerRecord, RestoreRecord};
use crate::shim_client::Shim;

/// Directory in a container's layer directory in which its checkpoint is built.
const WORKSHOP: &str = "checkpoint";
/// File beside it with the output directory of a pod's checkpoint.
const OUTPUT: &str = "checkpoint.output";

/// A running container, and its directories.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) record: ContainerRecord,
    /// Its first process.
    pub(crate) pid: i32,
    /// The shim that holds its pod's namespaces.
    pub(crate) shim: Shim,
    pub(crate) bundle: PathBuf,
    /// Directory of its writable layer.
    pub(crate) layer: PathBuf,
    /// The name of its image.
    pub(crate) image: String,
    /// The directories of the image's layers, topmost first.
    pub(crate) lower: Vec<PathBuf>,
    /// Set before the container is killed.
    pub(crate) doomed: Arc<AtomicBool>,
    pub(crate) freezer: Freezer,
}

/// Reasons why there is no checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// CRIU failed.
    #[error("dump the processes")]
    Criu(#[from] CriuError),
    /// A file could not be read or written.
    #[error("{doing} {}", path.display())]
    File {
        /// The operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A container could not be frozen.
    #[error("freeze container {id}")]
    Freeze {
        /// The container's id.
        id: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A container of the pod could not be dumped.
    #[error("container {id}")]
    Container {
        /// The container's id.
        id: String,
        /// The cause.
        #[source]
        source: Box<CheckpointError>,
    },
    /// A container was killed during its checkpoint.
    #[error("container {id} is being stopped")]
    Doomed {
        /// The container's id.
        id: String,
    },
    /// The file is not a checkpoint, or is damaged.
    #[error("{path:?} {why}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The defect.
        why: String,
    },
}

// === impl CheckpointError ===

impl CheckpointError {
    /// Whether CRIU is not installed.
    pub(crate) fn lacks_criu(&self) -> bool {
        match self {
            Self::Criu(error) => matches!(error, CriuError::Absent),
            Self::Container { source, .. } => source.lacks_criu(),
            Self::File { .. } | Self::Freeze { .. } | Self::Doomed { .. } | Self::Damaged { .. } => false,
        }
    }
}

/// The file `config.dump`: the container of the checkpoint.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ConfigDump<'a> {
    id: &'a str,
    name: &'a str,
    rootfs_image: &'a str,
    rootfs_image_ref: &'a str,
    rootfs_image_name: &'a str,
    #[serde(rename = "runtime")]
    engine: &'a str,
    created_time: Timestamp,
    checkpointed_time: Timestamp,
    restored_time: Timestamp,
    restored: bool,
}

/// Writes the checkpoint's archive, completely or not at all. Blocks.
pub(crate) fn checkpoint(subject: &Subject, location: &Path) -> Result<(), CheckpointError> {
    let made = forget(&subject.layer).and_then(|()| {
        location::note(&subject.layer, location)?;
        coracle_fault::point("checkpoint.noted");
        let one = std::slice::from_ref(subject);
        let dumped = frozen::dump(one, Connections::Kept);
        // In every case, and before slow operations.
        let thawed = frozen::thaw(one);
        dumped.and(thawed)?;
        location::pack(&subject.layer, &subject.layer.join(WORKSHOP), location)
    });
    let forgotten = match &made {
        Ok(()) => location::forget_note(&subject.layer),
        Err(_) => Ok(()),
    };
    let forgotten = forgotten.and(forget(&subject.layer));
    made.and(forgotten)
}

/// Whether an incomplete checkpoint was left.
pub(crate) fn is_left(layer: &Path) -> bool {
    layer.join(WORKSHOP).exists() || layer.join(OUTPUT).exists() || location::is_noted(layer)
}

/// Whether a CRIU of an earlier runtime still works on a container. It must end on its own: the container's processes are
/// under its control.
pub(crate) fn is_at_work(layer: &Path) -> bool {
    !criu::at_work(&layer.join(WORKSHOP)).is_empty()
}

/// Waits for the end of CRIU.
pub(crate) async fn criu_ended(layer: &Path) -> io::Result<()> {
    criu::ended(&layer.join(WORKSHOP)).await
}

/// Removes an incomplete checkpoint.
pub(crate) fn forget(layer: &Path) -> Result<(), CheckpointError> {
    pod::forget_output(layer)?;
    location::forget(layer)?;
    let workshop = layer.join(WORKSHOP);
    coracle_tree::remove(&workshop).map_err(file("remove", &workshop))
}

/// Fills the workshop. Returns the additional data that a restore needs. The container is frozen before and afterwards.
fn make(subject: &Subject, connections: Connections) -> Result<RestoreRecord, CheckpointError> {
    let workshop = subject.layer.join(WORKSHOP);
    let images = workshop.join("checkpoint");
    fs::create_dir_all(&images).map_err(file("create", &images))?;
    let external = criu::dump(subject, &workshop, &images, connections)?;
    // CRIU does not wait until the cgroup is frozen again. A process that still runs could write to the files copied below.
    let freeze = |source| CheckpointError::Freeze { id: subject.record.id.clone(), source };
    subject.freezer.freeze().map_err(freeze)?;
    coracle_fault::point("checkpoint.dumped");
    write(&workshop.join("config.dump"), &config_dump(subject))?;
    let spec = subject.bundle.join("config.json");
    fs::copy(&spec, workshop.join("spec.dump")).map_err(file("copy", &spec))?;
    let log = Path::new(&subject.record.log_path);
    if log.is_file() {
        fs::copy(log, workshop.join("container.log")).map_err(file("copy", log))?;
    }
    let diff = workshop.join("rootfs-diff.tar");
    let deleted = difference::archive(&subject.layer.join("upper"), &subject.lower, &external, &diff)
        .map_err(file("copy the changed files to", &diff))?;
    write(&workshop.join("deleted.files"), &deleted)?;
    let streams = streams::find(subject);
    let external = external.iter().map(|place| place.to_string_lossy().into_owned()).collect();
    Ok(RestoreRecord { external, streams })
}

fn config_dump(subject: &Subject) -> ConfigDump<'_> {
    let ContainerRecord { id, config, image_id, created_at, .. } = &subject.record;
    ConfigDump {
        id,
        name: config.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default(),
        rootfs_image: &subject.image,
        rootfs_image_ref: image_id,
        rootfs_image_name: &subject.image,
        engine: "coracle",
        created_time: Timestamp::from_nanosecond(i128::from(*created_at)).unwrap_or_default(),
        checkpointed_time: Timestamp::now(),
        restored_time: Timestamp::UNIX_EPOCH,
        restored: false,
    }
}

fn write(path: &Path, value: &impl Serialize) -> Result<(), CheckpointError> {
    let text = serde_json::to_vec(value).map_err(io::Error::from);
    text.and_then(|text| fs::write(path, text)).map_err(file("write", path))
}

/// For `map_err` on file operations.
fn file(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::File { doing, path, source }
}

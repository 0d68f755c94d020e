//! A checkpoint of a container: what CRIU dumps of its processes, what it changed of its root file system and what
//! it was made from, in one archive that is laid out as the tools for checkpoints read it (checkpointctl, CRI-O,
//! Podman). The container goes on.
//!
//! Files are copied just after memory was: what the container wrote in between is newer than its memory.

mod archive;
mod criu;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::Serialize;

pub use criu::CriuError;

use crate::records::ContainerRecord;

/// Where a checkpoint is put together, in the container's directory on the disk.
const WORKSHOP: &str = "checkpoint";

/// A container that runs, and where its things are.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) record: ContainerRecord,
    /// Its first process, and the shim that holds its pod's namespaces.
    pub(crate) pid: i32,
    pub(crate) shim_pid: i32,
    pub(crate) bundle: PathBuf,
    /// Its writable layer's directory.
    pub(crate) layer: PathBuf,
    /// Its image's name, and the directories of its layers, the topmost first.
    pub(crate) image: String,
    pub(crate) lower: Vec<PathBuf>,
}

/// Why there is no checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// CRIU did not do it.
    #[error("dump the processes")]
    Criu(#[from] CriuError),
    /// A file could not be read or written.
    #[error("{doing} {}", path.display())]
    File {
        /// What was tried.
        doing: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The file `config.dump`: whose checkpoint it is.
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

/// Makes the archive, whole or not at all.
pub(crate) fn checkpoint(subject: &Subject, location: &Path) -> Result<(), CheckpointError> {
    forget(&subject.layer)?;
    let workshop = subject.layer.join(WORKSHOP);
    let made = make(subject, &workshop, location);
    let forgotten = forget(&subject.layer);
    made.and(forgotten)
}

/// Removes what a checkpoint that did not come to its end has left.
pub(crate) fn forget(layer: &Path) -> Result<(), CheckpointError> {
    let workshop = layer.join(WORKSHOP);
    match fs::remove_dir_all(&workshop) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(file("remove", &workshop)(error)),
        _ => Ok(()),
    }
}

fn make(subject: &Subject, workshop: &Path, location: &Path) -> Result<(), CheckpointError> {
    let images = workshop.join("checkpoint");
    fs::create_dir_all(&images).map_err(file("make", &images))?;
    let external = criu::dump(subject, workshop, &images)?;
    write(&workshop.join("config.dump"), &config_dump(subject))?;
    let spec = subject.bundle.join("config.json");
    fs::copy(&spec, workshop.join("spec.dump")).map_err(file("copy", &spec))?;
    let log = Path::new(&subject.record.log_path);
    if log.is_file() {
        fs::copy(log, workshop.join("container.log")).map_err(file("copy", log))?;
    }
    let diff = workshop.join("rootfs-diff.tar");
    let deleted = archive::difference(&subject.layer.join("upper"), &subject.lower, &external, &diff)
        .map_err(file("copy the changed files to", &diff))?;
    write(&workshop.join("deleted.files"), &deleted)?;
    archive::pack(workshop, location).map_err(file("write", location))
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

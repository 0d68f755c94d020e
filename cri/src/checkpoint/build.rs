//! Builds a container's checkpoint in a directory: CRIU's images, the changed files, and metadata.

use std::fs;
use std::io;
use std::path::Path;

use jiff::Timestamp;
use serde::Serialize;

use super::subject::{Connections, Subject};
use super::{criu, difference, streams};
use crate::error::checkpoint::{CheckpointError, file};
use crate::records::{ContainerRecord, RestoreRecord};

/// Directory in a container's layer directory in which its checkpoint is built.
pub(super) const BUILD_DIR: &str = "checkpoint";

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

/// Fills the build directory. Returns the additional data that a restore needs. The container is frozen before and after
/// this call.
pub(super) fn build(subject: &Subject, connections: Connections) -> Result<RestoreRecord, CheckpointError> {
    let build_dir = subject.layer.join(BUILD_DIR);
    let images = build_dir.join("checkpoint");
    fs::create_dir_all(&images).map_err(file("create", &images))?;
    let external = criu::dump(subject, &build_dir, &images, connections)?;
    // CRIU does not wait until the cgroup is frozen again. A process that still runs could write to the files copied below.
    let freeze = |source| CheckpointError::Freeze { id: subject.record.id.clone(), source };
    subject.freezer.freeze().map_err(freeze)?;
    coracle_fault::point("checkpoint.dumped");
    write(&build_dir.join("config.dump"), &config_dump(subject))?;
    let spec = subject.bundle.join("config.json");
    fs::copy(&spec, build_dir.join("spec.dump")).map_err(file("copy", &spec))?;
    let log = Path::new(&subject.record.log_path);
    if log.is_file() {
        fs::copy(log, build_dir.join("container.log")).map_err(file("copy", log))?;
    }
    let diff = build_dir.join("rootfs-diff.tar");
    let deleted = difference::archive(&subject.layer.join("upper"), &subject.lower, &external, &diff)
        .map_err(file("copy the changed files to", &diff))?;
    write(&build_dir.join("deleted.files"), &deleted)?;
    let streams = streams::find(subject);
    let external = external.iter().map(|path| path.to_string_lossy().into_owned()).collect();
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

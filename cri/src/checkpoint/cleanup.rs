//! Removal of incomplete and undelivered checkpoints.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::build::BUILD_DIR;
use super::location::remove;
use super::{location, manifest, restore};
use crate::error::checkpoint::{CheckpointError, file};

/// Name of the file that contains the path of the output directory of a pod's checkpoint. It is next to the build
/// directory.
pub(super) const OUTPUT: &str = "checkpoint.output";

/// Removes an incomplete checkpoint.
pub(crate) fn remove_incomplete(layer: &Path) -> Result<(), CheckpointError> {
    forget_output(layer)?;
    location::remove_incomplete(layer)?;
    let build_dir = layer.join(BUILD_DIR);
    coracle_tree::remove(&build_dir).map_err(file("remove", &build_dir))
}

/// Removes a checkpoint of these containers from an output directory.
pub(crate) fn remove_pod_output(output: &Path, containers: &[String]) -> Result<(), CheckpointError> {
    let ids: Vec<&str> = containers.iter().map(String::as_str).collect();
    remove_output(output, &ids)
}

pub(super) fn remove_output(output: &Path, ids: &[&str]) -> Result<(), CheckpointError> {
    let manifest = output.join(manifest::FILE);
    // A manifest of another checkpoint in the same directory stays.
    let text = coracle_tree::read(&manifest, manifest::MAX).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    if ids.iter().any(|id| !id.is_empty() && text.contains(id)) {
        // All archives of the manifest are removed, including the archives of other containers, because a partial
        // checkpoint is useless.
        let named = restore::read(output).map(|manifest| manifest.containers).unwrap_or_default();
        named.iter().try_for_each(|saved| remove(&output.join(manifest::archive(&saved.id))))?;
        remove(&manifest)?;
    }
    ids.iter().try_for_each(|id| remove(&output.join(manifest::archive(id))))
}

/// Removes an incomplete checkpoint after a crash: its caller got no response.
fn forget_output(layer: &Path) -> Result<(), CheckpointError> {
    let note = layer.join(OUTPUT);
    let output = match fs::read(&note) {
        Ok(output) => PathBuf::from(std::ffi::OsStr::from_bytes(&output)),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(file("read", &note)(error)),
    };
    let id = layer.file_name().map(|name| name.to_string_lossy().into_owned());
    remove_output(&output, &[id.as_deref().unwrap_or_default()])?;
    remove_output_note(layer)
}

pub(super) fn remove_output_note(layer: &Path) -> Result<(), CheckpointError> {
    remove(&layer.join(OUTPUT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_checkpoint_is_removed_and_other_files_stay() {
        let dir = tempfile::tempdir().expect("directory");
        let (layer, output) = (dir.path().join("c1"), dir.path().join("output"));
        for dir in [&layer, &output] {
            fs::create_dir(dir).expect("make");
        }
        fs::write(layer.join(OUTPUT), output.as_os_str().as_bytes()).expect("note");
        for name in ["c1.tar", "c2.tar", "foreign"] {
            fs::write(output.join(name), "").expect("write");
        }
        fs::write(output.join(manifest::FILE), r#"{"id":"c2"}"#).expect("of another");
        remove_incomplete(&layer).expect("forget");
        let left = || -> std::collections::BTreeSet<String> {
            let entries = fs::read_dir(&output).expect("list").flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        assert_eq!(left(), ["c2.tar", manifest::FILE, "foreign"].map(str::to_owned).into());
        assert!(!layer.join(OUTPUT).exists());
        remove_pod_output(&output, &["c2".to_owned()]).expect("remove");
        assert_eq!(left(), ["foreign".to_owned()].into());
        remove_incomplete(&layer).expect("nothing is left to forget");
    }
}

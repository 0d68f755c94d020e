//! The output file of a container's checkpoint. It is written to a temporary name, and renamed when it is complete and on
//! the disk.
//!
//! A note in the container's directory has the location. After a crash, the next start of the runtime removes the output
//! file, because the caller got no response.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::archive;
use crate::error::checkpoint::{CheckpointError, file};

/// File name of the note.
const NOTE: &str = "checkpoint.location";

/// The location, and the device and inode of the complete file. They distinguish this file from an older file of the
/// same name.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    location: PathBuf,
    whole: Option<(u64, u64)>,
}

/// Writes the note before the checkpoint begins.
pub(super) fn write_note(layer: &Path, location: &Path) -> Result<(), CheckpointError> {
    Note { location: location.to_owned(), whole: None }.write(layer)
}

/// Whether there is a note.
pub(super) fn has_note(layer: &Path) -> bool {
    layer.join(NOTE).exists()
}

/// Archives a directory at the location. An existing file or link is replaced.
pub(super) fn pack(layer: &Path, directory: &Path, location: &Path) -> Result<(), CheckpointError> {
    let temporary_path = temporary_path(layer, location);
    let written =
        File::options().write(true).create_new(true).mode(0o600).open(&temporary_path).and_then(|file| {
            let metadata = file.metadata()?;
            archive::fill(directory, file).map(|()| (metadata.dev(), metadata.ino()))
        });
    let whole = written.map_err(file("write", &temporary_path))?;
    coracle_fault::point("checkpoint.written");
    Note { location: location.to_owned(), whole: Some(whole) }.write(layer)?;
    let put = fs::rename(&temporary_path, location).and_then(|()| match location.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    });
    put.map_err(file("write", location))?;
    coracle_fault::point("checkpoint.named");
    Ok(())
}

/// Removes an incomplete or undelivered checkpoint.
pub(super) fn remove_incomplete(layer: &Path) -> Result<(), CheckpointError> {
    let path = layer.join(NOTE);
    let text = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read.map_err(file("read", &path))?,
    };
    let Note { location, whole } =
        serde_json::from_slice(&text).map_err(io::Error::from).map_err(file("read", &path))?;
    remove(&temporary_path(layer, &location))?;
    let present = fs::symlink_metadata(&location).ok().map(|found| (found.dev(), found.ino()));
    if present.is_some() && present == whole {
        remove(&location)?;
    }
    remove_note(layer)
}

/// Removes the note of a delivered checkpoint.
pub(super) fn remove_note(layer: &Path) -> Result<(), CheckpointError> {
    remove(&layer.join(NOTE))
}

/// Temporary name: in the same directory, with the container's id.
fn temporary_path(layer: &Path, location: &Path) -> PathBuf {
    let id = layer.file_name().unwrap_or_default().to_string_lossy();
    location.with_file_name(format!(".{id}.checkpoint"))
}

/// Removes a file of a checkpoint. An absent file is not an error.
pub(super) fn remove(path: &Path) -> Result<(), CheckpointError> {
    coracle_tree::remove_file(path).map_err(file("remove", path))
}

// === impl Note ===

impl Note {
    fn write(&self, layer: &Path) -> Result<(), CheckpointError> {
        let (path, new) = (layer.join(NOTE), layer.join("checkpoint.location.new"));
        let text = serde_json::to_vec(self).map_err(io::Error::from);
        let written = text.and_then(|text| fs::write(&new, text)).and_then(|()| fs::rename(&new, &path));
        written.map_err(file("write", &path))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Fixture {
        _dir: tempfile::TempDir,
        layer: PathBuf,
        build_dir: PathBuf,
        location: PathBuf,
    }

    fn fixture() -> Fixture {
        let dir = tempfile::tempdir().expect("directory");
        let (layer, output) = (dir.path().join("c1"), dir.path().join("output"));
        let build_dir = layer.join("checkpoint");
        fs::create_dir_all(&build_dir).expect("make");
        fs::create_dir(&output).expect("make");
        fs::write(build_dir.join("config.dump"), "{}").expect("write");
        Fixture { layer, build_dir, location: output.join("c.tar"), _dir: dir }
    }

    fn names(fixture: &Fixture) -> Vec<String> {
        let entries = fs::read_dir(fixture.location.parent().expect("directory")).expect("list").flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn an_existing_file_is_replaced_and_a_link_is_not_followed() {
        let fixture = fixture();
        let other = fixture.layer.join("other");
        fs::write(&other, "of another").expect("write");
        symlink(&other, &fixture.location).expect("link");
        write_note(&fixture.layer, &fixture.location).expect("note");
        pack(&fixture.layer, &fixture.build_dir, &fixture.location).expect("pack");
        assert!(fs::symlink_metadata(&fixture.location).expect("there").is_file());
        assert_eq!(fs::read_to_string(&other).expect("other"), "of another");
        assert_eq!(names(&fixture), ["c.tar"]);
    }

    #[test]
    fn an_undelivered_checkpoint_is_removed_and_an_earlier_checkpoint_stays() {
        let fixture = fixture();
        fs::write(&fixture.location, "before").expect("write");
        write_note(&fixture.layer, &fixture.location).expect("note");
        fs::write(temporary_path(&fixture.layer, &fixture.location), "half").expect("write");
        remove_incomplete(&fixture.layer).expect("forget");
        assert_eq!(fs::read_to_string(&fixture.location).expect("before"), "before");
        assert_eq!(names(&fixture), ["c.tar"]);
        write_note(&fixture.layer, &fixture.location).expect("note");
        pack(&fixture.layer, &fixture.build_dir, &fixture.location).expect("pack");
        assert!(has_note(&fixture.layer));
        remove_incomplete(&fixture.layer).expect("forget");
        assert_eq!(names(&fixture), Vec::<String>::new());
        assert!(!has_note(&fixture.layer));
    }
}

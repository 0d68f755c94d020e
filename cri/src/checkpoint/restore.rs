//! Restore of a pod's checkpoint: reads and verifies it, and unpacks a container's archive into its layer.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use super::manifest::{self, ENGINE, Manifest, SavedContainer, VERSION};
use super::{archive, criu};
use crate::error::checkpoint::{CheckpointError, file};

/// Maximum bytes of the list of deleted files.
const DELETED_MAX: u64 = 64 << 20;

/// Directory with a container's images in its layer directory, until the container is started.
const IMAGES: &str = "restore";

/// Reads the manifest of a directory.
pub(crate) fn read(directory: &Path) -> Result<Manifest, CheckpointError> {
    let path = directory.join(manifest::FILE);
    let text = coracle_tree::read(&path, manifest::MAX).map_err(file("read", &path))?;
    let damaged = |why: String| CheckpointError::Damaged { path: path.clone(), why };
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|error| damaged(format!("is not a manifest of this runtime: {error}")))?;
    if manifest.engine != ENGINE || manifest.version != VERSION {
        return Err(damaged(format!("has version {} of {:?}", manifest.version, manifest.engine)));
    }
    let named =
        |saved: &SavedContainer| saved.archive == manifest::archive(&saved.id) && !saved.id.contains('/');
    if !manifest.containers.iter().all(named) {
        return Err(damaged("has an invalid archive name".to_owned()));
    }
    Ok(manifest)
}

/// Refuses archives that differ from the manifest's digests. Reads all of them.
pub(crate) fn verify(directory: &Path, manifest: &Manifest) -> Result<(), CheckpointError> {
    for saved in &manifest.containers {
        let path = directory.join(&saved.archive);
        if archive::digest(&path).map_err(file("read", &path))? != saved.sha256 {
            return Err(CheckpointError::Damaged {
                path,
                why: "differs from the manifest's digest".to_owned(),
            });
        }
    }
    Ok(())
}

/// Unpacks a container's changed files into its writable layer, and its images beside it.
pub(crate) fn unpack_checkpoint(archive: &Path, layer: &Path) -> Result<(), CheckpointError> {
    let failed = || file("unpack", archive);
    let images = layer.join(IMAGES);
    fs::create_dir_all(&images).map_err(file("create", &images))?;
    let upper = layer.join("upper");
    let mut deleted = BTreeSet::new();
    let mut entries = tar::Archive::new(BufReader::new(File::open(archive).map_err(failed())?));
    for entry in entries.entries().map_err(failed())? {
        let mut entry = entry.map_err(failed())?;
        let path = entry.path().map_err(failed())?.into_owned();
        if path == Path::new("rootfs-diff.tar") {
            coracle_images::apply_changes(BufReader::new(entry), &upper).map_err(failed())?;
        } else if path == Path::new("deleted.files") {
            deleted = deleted_paths(entry, DELETED_MAX).map_err(|error| failed()(error.into()))?;
        } else if path.starts_with("checkpoint") {
            // `unpack_in` refuses paths outside of the directory.
            entry.unpack_in(&images).map_err(failed())?;
        }
    }
    // The deleted files are hidden last, when their parent directories exist.
    coracle_images::apply_deletions(deleted.iter().map(PathBuf::as_path), &upper).map_err(failed())
}

/// The list of deleted files. The argument is the maximum number of bytes.
fn deleted_paths(list: impl io::Read, most: u64) -> serde_json::Result<BTreeSet<PathBuf>> {
    serde_json::from_reader(BufReader::new(list.take(most)))
}

/// The directory of a container's images, in CRIU's work directory.
pub(crate) fn images_dir(layer: &Path) -> PathBuf {
    work_dir(layer).join("checkpoint")
}

/// CRIU's work directory.
pub(crate) fn work_dir(layer: &Path) -> PathBuf {
    layer.join(IMAGES)
}

/// CRIU's error messages of a failed restore.
pub(crate) fn criu_errors(layer: &Path) -> Option<String> {
    let work = work_dir(layer);
    let beside = coracle_tree::read_end(&work.join("restore.err"), criu::LOG_MAX);
    let last = || beside.lines().last().map(str::to_owned);
    criu::criu_errors(&work.join("restore.log"), &beside).or_else(last)
}

/// Removes the images of a started container: they contain its memory.
pub(crate) fn forget_images(layer: &Path) -> Result<(), CheckpointError> {
    let images = layer.join(IMAGES);
    coracle_tree::remove(&images).map_err(file("remove", &images))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_of_deleted_files_is_refused() {
        let list = br#"["/a", "/b"]"#;
        assert_eq!(deleted_paths(&list[..], 12).expect("list").len(), 2);
        assert!(deleted_paths(&list[..], 11).is_err());
    }

    #[test]
    fn a_manifest_that_is_too_large_or_not_regular_is_refused() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join(manifest::FILE);
        let kind = || match read(dir.path()) {
            Err(CheckpointError::File { source, .. }) => Some(source.kind()),
            _ => None,
        };
        fs::write(&path, " ".repeat((16 << 20) + 1)).expect("write");
        assert_eq!(kind(), Some(io::ErrorKind::FileTooLarge));
        fs::remove_file(&path).expect("remove");
        fs::create_dir(&path).expect("directory");
        assert_eq!(kind(), Some(io::ErrorKind::InvalidInput));
    }
}

//! Files of checkpoint records: atomic writes, bounded reads.

use std::fmt::Display;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::bounded;

/// Extension of a complete record.
pub(super) const EXTENSION: &str = "sealed";
/// Maximum size of a record in bytes. An API object has at most 1.5 MiB; the services of a namespace may have more.
const RECORD_MAX: u64 = 64 << 20;

/// Creates a directory with mode 0700, and sets the mode of an existing one.
pub(super) fn make_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
}

/// Removes temporary files that a crash left.
pub(super) fn remove_temporary(dir: &Path) {
    for path in entries(dir).filter(|path| path.extension().is_some_and(|found| found == "tmp")) {
        let _ = fs::remove_file(path);
    }
}

/// Replaces a record. It is durable after [`sync_dir`].
pub(super) fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let written = write_new(&temporary, content).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // On a full disk the incomplete file would occupy the space that other writes need.
        let _ = fs::remove_file(&temporary);
    } else {
        let _ = fs::remove_file(path.with_extension("bad"));
    }
    written
}

fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    let _ = fs::remove_file(path);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    file.sync_data()
}

/// Makes writes and removals in a directory durable.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Content of a record; None if it does not exist.
pub(super) fn read(path: &Path) -> Option<Vec<u8>> {
    match bounded::read(path, RECORD_MAX) {
        Ok(content) => Some(content),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            quarantine(path, &error);
            None
        }
    }
}

/// Renames an unreadable record to `*.bad`.
pub(super) fn quarantine(path: &Path, error: &dyn Display) {
    tracing::warn!(%error, path = %path.display(), "renaming an unreadable checkpoint record");
    let _ = fs::rename(path, path.with_extension("bad"));
}

/// Removes a record and its `*.bad` copy.
pub(super) fn remove(path: &Path) {
    for path in [path.to_path_buf(), path.with_extension("bad")] {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, path = %path.display(), "cannot remove a checkpoint record");
            }
            _ => {}
        }
    }
}

/// Complete records in a directory, sorted.
pub(super) fn list(dir: &Path) -> Vec<PathBuf> {
    let complete = |path: &PathBuf| path.extension().is_some_and(|found| found == EXTENSION);
    let mut paths: Vec<PathBuf> = entries(dir).filter(complete).collect();
    paths.sort();
    paths
}

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

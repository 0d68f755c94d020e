//! Applies a container's changes to a writable layer. It uses the code that unpacks image layers, so that no path leads
//! out of the directory.

use std::io::{self, BufRead};
use std::path::Path;

use crate::config::Limits;
use crate::unpack::unpack;

/// No limits: the changes come from a container, and the disk usage of the container was not limited either.
const UNLIMITED: Limits = Limits {
    layer_bytes: u64::MAX,
    layer_entries: u64::MAX,
    ratio: u64::MAX,
    ratio_from: u64::MAX,
    zstd_window_log: 27,
};

/// Maximum number of whiteouts in memory at a time. Each takes at least 512 bytes, and a container can cause any number
/// of them.
const DELETIONS_AT_ONCE: usize = 1000;

/// Unpacks an archive of changed files into a writable layer.
///
/// # Errors
/// If the archive is invalid, a path leads out of the layer, or the layer cannot be written.
pub fn apply_changes(archive: impl BufRead, layer: &Path) -> io::Result<()> {
    unpack(archive, layer, &UNLIMITED).map(drop).map_err(io::Error::other)
}

/// Deletes paths of lower layers: writes a whiteout for each into the writable layer.
///
/// # Errors
/// If a path leads out of the layer, or the layer cannot be written.
pub fn apply_deletions<'a>(paths: impl IntoIterator<Item = &'a Path>, layer: &Path) -> io::Result<()> {
    let mut paths = paths.into_iter().peekable();
    while paths.peek().is_some() {
        let archive = whiteouts(paths.by_ref().take(DELETIONS_AT_ONCE))?;
        apply_changes(archive.as_slice(), layer)?;
    }
    Ok(())
}

/// An archive with a whiteout for each path.
fn whiteouts<'a>(paths: impl Iterator<Item = &'a Path>) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for path in paths {
        let relative = path.strip_prefix("/").unwrap_or(path);
        let name = relative.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut whiteout = std::ffi::OsString::from(".wh.");
        whiteout.push(name);
        let mut header = header(tar::EntryType::Regular, 0o644, 0);
        archive.append_data(&mut header, relative.with_file_name(whiteout), io::empty())?;
    }
    archive.into_inner()
}

/// A header with all required fields.
fn header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn changes_and_deletions_are_applied() {
        let dir = tempfile::tempdir().expect("directory");
        let mut archive = tar::Builder::new(Vec::new());
        let mut directory = header(tar::EntryType::Directory, 0o751, 0);
        archive.append_data(&mut directory, "bin/", io::empty()).expect("directory");
        let mut new = header(tar::EntryType::Regular, 0o640, 4);
        archive.append_data(&mut new, "bin/new", &b"mine"[..]).expect("file");
        apply_changes(archive.into_inner().expect("archive").as_slice(), dir.path()).expect("apply");
        apply_deletions([Path::new("/bin/old")], dir.path()).expect("whiteouts");
        assert_eq!(fs::read_to_string(dir.path().join("bin/new")).expect("new"), "mine");
        assert_eq!(fs::metadata(dir.path().join("bin")).expect("bin").mode() & 0o777, 0o751);
        let old = fs::symlink_metadata(dir.path().join("bin/old")).expect("a whiteout");
        assert!(old.file_type().is_char_device() && old.rdev() == 0);
        assert!(apply_deletions([Path::new("/../out")], dir.path()).is_err());
    }

    #[test]
    fn many_deletions_are_applied_in_parts() {
        let dir = tempfile::tempdir().expect("directory");
        let deleted: Vec<PathBuf> =
            (0..=DELETIONS_AT_ONCE).map(|number| PathBuf::from(format!("/{number}"))).collect();
        let mut left = deleted.iter().map(PathBuf::as_path);
        whiteouts(left.by_ref().take(DELETIONS_AT_ONCE)).expect("a part");
        assert_eq!(left.count(), 1);
        apply_deletions(deleted.iter().map(PathBuf::as_path), dir.path()).expect("whiteouts");
        assert_eq!(fs::read_dir(dir.path()).expect("list").count(), deleted.len());
    }
}

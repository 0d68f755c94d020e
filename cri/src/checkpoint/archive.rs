//! The archives of a checkpoint: the changed files of the root file system, and the whole.

use std::collections::BTreeSet;
use std::fs::{self, File, FileType};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::AtFlags;
use nix::unistd::linkat;
use sha2::{Digest, Sha256};
use tar::{Builder, HeaderMode};

/// Writes an archive of what is in a writable layer, and gives the paths that it takes away from lower ones.
/// Places that are mounted over are the runtime's, not the container's.
pub(super) fn difference(
    upper: &Path,
    lower: &[PathBuf],
    mounted: &[PathBuf],
    to: &Path,
) -> io::Result<BTreeSet<PathBuf>> {
    let mounted: BTreeSet<&Path> = mounted.iter().filter_map(|place| place.strip_prefix("/").ok()).collect();
    let mut archive = builder(BufWriter::new(File::create(to)?));
    let mut deleted = BTreeSet::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(directory) = todo.pop() {
        let there = upper.join(&directory);
        if is_opaque(&there) {
            hidden(&there, &directory, lower, &mut deleted)?;
        }
        for entry in fs::read_dir(&there)? {
            let entry = entry?;
            let path = directory.join(entry.file_name());
            let metadata = entry.metadata()?;
            if metadata.file_type().is_char_device() && metadata.rdev() == 0 {
                deleted.insert(Path::new("/").join(path));
            } else if !mounted.contains(path.as_path()) && is_archived(metadata.file_type()) {
                archive.append_path_with_name(entry.path(), &path)?;
                todo.extend(metadata.is_dir().then_some(path));
            }
        }
    }
    archive.into_inner()?.flush()?;
    Ok(deleted)
}

/// Archives a directory at a place. It has no name there before it is whole and on the disk.
pub(super) fn pack(directory: &Path, location: &Path) -> io::Result<()> {
    let parent = location.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let file = archived(directory, BufWriter::new(unnamed(parent)?))?;
    let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    match fs::remove_file(location) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    name(&file, location)?;
    File::open(parent)?.sync_all()
}

/// Archives a directory to a file without a name, which is gone when it is closed. Gives its digest as well.
pub(super) fn write(directory: &Path, parent: &Path) -> io::Result<(File, String)> {
    let to = Hashing { file: BufWriter::new(unnamed(parent)?), hash: Sha256::new() };
    let Hashing { file, hash } = archived(directory, to)?;
    let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    Ok((file, hex::encode(hash.finalize())))
}

fn archived<W: Write>(directory: &Path, to: W) -> io::Result<W> {
    let mut archive = builder(to);
    archive.append_dir_all("", directory)?;
    archive.into_inner()
}

/// A new file in a directory, without a name.
pub(super) fn unnamed(parent: &Path) -> io::Result<File> {
    File::options().write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(parent)
}

/// Gives a file its name, where there must be none.
pub(super) fn name(file: &File, location: &Path) -> io::Result<()> {
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    linkat(
        nix::fcntl::AT_FDCWD,
        unnamed.as_str(),
        nix::fcntl::AT_FDCWD,
        location,
        AtFlags::AT_SYMLINK_FOLLOW,
    )?;
    Ok(())
}

/// The digest of a file's content.
pub(super) fn digest(path: &Path) -> io::Result<String> {
    let mut hashing = Hashing { file: io::sink(), hash: Sha256::new() };
    io::copy(&mut File::open(path)?, &mut hashing)?;
    Ok(hex::encode(hashing.hash.finalize()))
}

/// What is written, and its digest.
struct Hashing<W> {
    file: W,
    hash: Sha256,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn builder<W: Write>(to: W) -> Builder<W> {
    let mut archive = Builder::new(to);
    archive.follow_symlinks(false);
    archive.mode(HeaderMode::Complete);
    archive
}

/// A socket is nothing without who listens.
fn is_archived(kind: FileType) -> bool {
    !kind.is_socket()
}

/// Whether a directory of the writable layer hides those of the same path below (the kernel's overlayfs document).
fn is_opaque(directory: &Path) -> bool {
    xattr::get(directory, "trusted.overlay.opaque").is_ok_and(|value| value.as_deref() == Some(b"y"))
}

/// What is below an opaque directory and not in it.
fn hidden(there: &Path, path: &Path, lower: &[PathBuf], deleted: &mut BTreeSet<PathBuf>) -> io::Result<()> {
    for layer in lower {
        let Ok(entries) = fs::read_dir(layer.join(path)) else { continue };
        for entry in entries {
            let name = entry?.file_name();
            if fs::symlink_metadata(there.join(&name)).is_err() {
                deleted.insert(Path::new("/").join(path).join(name));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::*;

    /// What is in an archive: files with their content.
    fn content(path: &Path) -> BTreeMap<String, String> {
        let mut archive = tar::Archive::new(File::open(path).expect("archive"));
        let entries = archive.entries().expect("entries").map(|entry| {
            let mut entry = entry.expect("entry");
            let (path, mut text) = (entry.path().expect("path").display().to_string(), String::new());
            entry.read_to_string(&mut text).expect("text");
            (path.trim_end_matches('/').to_owned(), text)
        });
        entries.collect()
    }

    #[test]
    fn what_the_container_wrote_is_there_and_what_is_mounted_over_is_not() {
        let dir = tempfile::tempdir().expect("directory");
        let upper = dir.path().join("upper");
        fs::create_dir_all(upper.join("etc/app")).expect("make");
        fs::write(upper.join("etc/app/new"), "mine").expect("write");
        fs::write(upper.join("etc/hosts"), "").expect("write");
        std::os::unix::fs::symlink("new", upper.join("etc/app/link")).expect("link");
        std::os::unix::net::UnixListener::bind(upper.join("socket")).expect("socket");
        let to = dir.path().join("diff.tar");
        let deleted = difference(&upper, &[], &["/etc/hosts".into(), "/proc".into()], &to).expect("archive");
        assert_eq!(deleted, BTreeSet::new());
        let found = content(&to);
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["etc", "etc/app", "etc/app/link", "etc/app/new"]);
        assert_eq!(found["etc/app/new"], "mine");
    }

    #[test]
    fn below_what_was_made_anew_all_is_gone_that_is_not_there_again() {
        let dir = tempfile::tempdir().expect("directory");
        let (upper, lower) = (dir.path().join("upper/a"), dir.path().join("lower"));
        fs::create_dir_all(&upper).expect("make");
        fs::create_dir_all(lower.join("a")).expect("make");
        for name in ["kept", "gone"] {
            fs::write(lower.join("a").join(name), "old").expect("write");
        }
        fs::write(upper.join("kept"), "new").expect("write");
        let mut deleted = BTreeSet::new();
        hidden(&upper, Path::new("a"), &[lower], &mut deleted).expect("look");
        assert_eq!(deleted, [PathBuf::from("/a/gone")].into());
    }

    #[test]
    fn an_archive_takes_the_place_of_an_older_one_whole() {
        let dir = tempfile::tempdir().expect("directory");
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("sub")).expect("make");
        fs::write(from.join("sub/file"), "text").expect("write");
        let location = dir.path().join("checkpoint.tar");
        fs::write(&location, "older").expect("write");
        pack(&from, &location).expect("archive");
        assert_eq!(content(&location)["sub/file"], "text");
        assert_eq!(fs::metadata(&location).expect("metadata").mode() & 0o777, 0o600);
        let missing = pack(&from, &dir.path().join("absent/checkpoint.tar")).expect_err("nowhere");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}

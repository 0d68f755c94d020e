//! Files of checkpoint records: atomic writes, bounded reads.

use std::fmt::Display;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use coracle_tree::remove_file;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::bounded::{self, is_damage};

/// Extension of a complete record.
pub(super) const EXTENSION: &str = "sealed";
/// Maximum size of a record in bytes. An API object has at most 1.5 MiB; the services of a namespace may have more.
const RECORD_MAX: u64 = 64 << 20;

/// Creates a directory with mode 0700, and sets the mode of an existing directory.
pub(super) fn make_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
}

/// Removes temporary files that a crash left.
pub(super) fn remove_temporary(dir: &Path) {
    let paths = entries(dir).unwrap_or_default();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|found| found == "tmp")) {
        let _ = fs::remove_file(path);
    }
}

/// A record under a temporary name. All records of a batch are written before the first one is replaced. So they are
/// in one transaction of the file system's journal, and the first fsync commits it.
pub(super) struct NewRecord {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
}

// === impl NewRecord ===

impl NewRecord {
    /// Writes the content, and starts its transfer to the disk.
    pub(super) fn write(path: PathBuf, content: &[u8]) -> io::Result<Self> {
        let temporary = path.with_extension("tmp");
        let _ = fs::remove_file(&temporary);
        let file = write_new(&temporary, content).inspect_err(|_| remove_incomplete(&temporary))?;
        // The call only starts the transfer. If it fails, the later fsync waits for the whole transfer.
        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        Ok(Self { file, temporary, path })
    }

    /// Replaces the record. It is durable after [`sync_dir`].
    pub(super) fn replace(self) -> io::Result<()> {
        let Self { file, temporary, path } = self;
        let replaced = file.sync_data().and_then(|()| fs::rename(&temporary, &path));
        if replaced.is_err() {
            remove_incomplete(&temporary);
        } else {
            let _ = fs::remove_file(path.with_extension("bad"));
        }
        replaced
    }
}

fn write_new(path: &Path, content: &[u8]) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    Ok(file)
}

/// Removes an incomplete file: on a full disk it would occupy the space that other writes need.
fn remove_incomplete(temporary: &Path) {
    let _ = fs::remove_file(temporary);
}

/// Makes writes and removals in a directory durable.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Content of a record; None if the record does not exist or is damaged.
///
/// # Errors
/// When the record cannot be read now, for example because the process has too many open files. The record stays in
/// place: a later start can read the record. The error is logged.
pub(super) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match bounded::read(path, RECORD_MAX) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if is_damage(&error) => {
            quarantine(path, &error);
            Ok(None)
        }
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "cannot read a checkpoint record");
            Err(error)
        }
    }
}

/// Renames an unreadable record to `*.bad`.
pub(super) fn quarantine(path: &Path, error: &dyn Display) {
    tracing::warn!(%error, path = %path.display(), "renaming an unreadable checkpoint record");
    let _ = fs::rename(path, path.with_extension("bad"));
}

/// Removes a record and its `*.bad` copy, if they exist.
///
/// # Errors
/// As unlink(2) for the record, unless it is absent. An error of the copy is only logged, because no start reads the
/// copy.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let copy = path.with_extension("bad");
    if let Err(error) = remove_file(&copy) {
        tracing::warn!(%error, path = %copy.display(), "cannot remove an unreadable checkpoint record");
    }
    remove_file(path)
}

/// Complete records in a directory, sorted. An absent directory has no records.
pub(super) fn list(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = entries(dir)?;
    paths.retain(|path| path.extension().is_some_and(|found| found == EXTENSION));
    paths.sort();
    Ok(paths)
}

fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let found = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => found?,
    };
    found.map(|entry| Ok(entry?.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_record_that_is_too_large_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sealed");
        File::create(&path).unwrap().set_len(RECORD_MAX + 1).unwrap();
        assert_eq!(read(&path).unwrap(), None);
        assert!(!path.exists() && path.with_extension("bad").exists());
    }

    #[test]
    fn only_an_invalid_record_is_renamed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sealed");
        std::os::unix::fs::symlink("b", &path).unwrap();
        assert_eq!(read(&path).unwrap(), None);
        assert!(fs::symlink_metadata(&path).is_err() && path.with_extension("bad").is_symlink());
        let directory = dir.path().join("d.sealed");
        fs::create_dir(&directory).unwrap();
        assert_eq!(read(&directory).unwrap(), None);
        assert!(!directory.exists() && directory.with_extension("bad").is_dir());
        // The first page of a process is not mapped, so a read of it is an I/O error.
        let error = bounded::read(Path::new("/proc/self/mem"), RECORD_MAX).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert!(!is_damage(&error));
        for number in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EINTR, libc::EACCES, libc::EINVAL] {
            assert!(!is_damage(&io::Error::from_raw_os_error(number)), "{number}");
        }
        fs::write(dir.path().join("c"), "12").unwrap();
        assert!(is_damage(&bounded::read(&dir.path().join("c"), 1).unwrap_err()));
    }
}

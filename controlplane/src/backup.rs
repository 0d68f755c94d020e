//! Backup files of the embedded store.

use std::{
    fs::{self, File, TryLockError},
    io::{self, BufReader, Seek as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use coracle_encryption::Encryption;
use coracle_sealing::Keys;
use coracle_store::{Backup, BackupSummary, Embedded, EmbeddedOptions, Store as _, restore, verify_backup};

use crate::store::sealing;

/// A backup or a restore failed.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The file cannot be read or written.
    #[error("cannot use the backup file {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file is not a complete backup.
    #[error("cannot use the backup file {path}")]
    Content {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: coracle_store::Error,
    },
    /// The state directory has no store.
    #[error(
        "cannot open the store {path}: it does not exist; use --state-dir, or --kubeconfig for a \
         control plane on another machine"
    )]
    Absent {
        /// The store's directory.
        path: PathBuf,
    },
    /// The store cannot be read or replaced.
    #[error("cannot use the store {path}")]
    Store {
        /// The store's directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: coracle_store::Error,
    },
    /// The key file for Secrets cannot be used.
    #[error("cannot use the encryption key")]
    Keys(#[source] coracle_sealing::Error),
}

/// A backup file that is being written. It has a temporary name in the directory of the final name.
pub struct BackupFile {
    path: PathBuf,
    partial: PathBuf,
    file: File,
}

// === impl BackupFile ===

impl BackupFile {
    /// Creates the temporary file, with mode 0600. The file is locked while it exists. Otherwise another backup of the
    /// same name, for example from a timer, could replace the file before it is complete.
    ///
    /// # Errors
    /// [`BackupError::File`], for example if another process writes a backup of this name. A path that is a device or a
    /// link, such as `/dev/stdout`, is an error, because the backup would replace it.
    pub fn create(path: &Path) -> Result<Self, BackupError> {
        if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
            let source = io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is not a regular file");
            return Err(BackupError::File { path: path.to_owned(), source });
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let failed = |source| BackupError::File { path: partial.clone(), source };
        remove_partial(&partial).map_err(failed)?;
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&partial);
        let file = file.map_err(failed)?;
        match file.try_lock() {
            Ok(()) if is_at(&file, &partial).map_err(failed)? => {}
            // Another process has locked or removed the new file, because it took the file for the file of an
            // interrupted backup.
            Ok(()) | Err(TryLockError::WouldBlock) => return Err(failed(in_use())),
            Err(TryLockError::Error(error)) => {
                let _ = fs::remove_file(&partial);
                return Err(failed(error));
            }
        }
        Ok(Self { path: path.to_owned(), partial, file })
    }

    /// Appends a chunk.
    ///
    /// # Errors
    /// [`BackupError::File`].
    pub fn write(&mut self, chunk: &[u8]) -> Result<(), BackupError> {
        self.file.write_all(chunk).map_err(|source| self.failed(source))
    }

    /// Verifies and syncs the temporary file, then renames it to its final name.
    ///
    /// # Errors
    /// [`BackupError`] if the backup is incomplete or cannot be written.
    pub fn finish(self) -> Result<BackupSummary, BackupError> {
        self.publish()
    }

    fn publish(&self) -> Result<BackupSummary, BackupError> {
        let failed = |source| self.failed(source);
        self.file.sync_all().map_err(failed)?;
        (&self.file).rewind().map_err(failed)?;
        let summary = verify_backup(BufReader::new(&self.file))
            .map_err(|source| BackupError::Content { path: self.partial.clone(), source })?;
        if !is_at(&self.file, &self.partial).map_err(failed)? {
            let why = "another process removed the incomplete backup";
            return Err(failed(io::Error::new(io::ErrorKind::NotFound, why)));
        }
        fs::rename(&self.partial, &self.path).map_err(failed)?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new("."))).and_then(|parent| parent.sync_all()).map_err(failed)?;
        Ok(summary)
    }

    fn failed(&self, source: io::Error) -> BackupError {
        BackupError::File { path: self.partial.clone(), source }
    }
}

impl Drop for BackupFile {
    fn drop(&mut self) {
        // After the rename the temporary name is free, or belongs to the next backup.
        let removed = is_at(&self.file, &self.partial)
            .and_then(|is_own| if is_own { fs::remove_file(&self.partial) } else { Ok(()) });
        if let Err(error) = removed {
            tracing::warn!(%error, path = %self.partial.display(), "cannot remove an incomplete backup");
        }
    }
}

/// Whether a path is the name of an open file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (own.dev(), own.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn in_use() -> io::Error {
    let why = "another process writes this backup; wait for its end";
    io::Error::new(io::ErrorKind::AlreadyExists, why)
}

/// Removes the temporary file of a backup that was interrupted.
fn remove_partial(partial: &Path) -> io::Result<()> {
    // The directory may belong to a user, who could put a link or a pipe there.
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    match File::options().read(true).custom_flags(flags).open(partial) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(_link_or_other) => fs::remove_file(partial),
        // The file stays locked until it is removed. Without this lock, a process that has just created the file could
        // lock it before the removal. The backup of that process would be lost.
        Ok(left) => match left.try_lock() {
            Ok(()) if !is_at(&left, partial)? => Err(in_use()),
            Ok(()) | Err(TryLockError::Error(_)) => fs::remove_file(partial),
            Err(TryLockError::WouldBlock) => Err(in_use()),
        },
    }
}

/// Starts a backup of a store that no process uses; `None` if a process uses it.
///
/// # Errors
/// [`BackupError`] if there is no store, or the store cannot be opened.
pub fn offline_backup(state_dir: &Path) -> Result<Option<Backup>, BackupError> {
    let path = state_dir.join("store");
    match path.join("version").try_exists() {
        Ok(true) => {}
        Ok(false) => return Err(BackupError::Absent { path }),
        Err(source) => {
            let source = coracle_store::Error::Open { path: path.clone(), source };
            return Err(BackupError::Store { path, source });
        }
    }
    // Values are copied as they are, so no key is needed.
    match Embedded::open(&path, EmbeddedOptions::default()) {
        Err(coracle_store::Error::Locked { .. }) => Ok(None),
        Err(source) => Err(BackupError::Store { path, source }),
        Ok(store) => match store.backup() {
            // The snapshot outlives the store.
            Ok(backup) => Ok(Some(backup)),
            Err(source) => Err(BackupError::Store { path, source }),
        },
    }
}

/// Replaces the store of a stopped control plane by a backup.
///
/// # Errors
/// [`BackupError`]. After an error the store is unchanged.
pub fn restore_backup(
    state_dir: &Path,
    key_file: Option<&Path>,
    encryption_config: Option<&Path>,
    backup: &Path,
) -> Result<BackupSummary, BackupError> {
    let unreadable = |source| BackupError::File { path: backup.to_owned(), source };
    let file = File::open(backup).map_err(unreadable)?;
    let path = state_dir.join("store");
    fs::create_dir_all(state_dir).map_err(|source| {
        let source = coracle_store::Error::Open { path: state_dir.to_owned(), source };
        BackupError::Store { path: path.clone(), source }
    })?;
    let keys = match key_file {
        Some(path) => Keys::load(path),
        None => Keys::load_or_create(&state_dir.join(crate::store::KEY_FILE)),
    };
    let keys = keys.map_err(BackupError::Keys)?;
    let encryption = encryption_config.map(Encryption::load).transpose().map_err(BackupError::Keys)?;
    let sealing = sealing(keys, encryption.map(Arc::new));
    let restored = restore(&path, Some(sealing), BufReader::new(file));
    restored.map_err(|source| match source {
        coracle_store::Error::Backup { .. } => BackupError::Content { path: backup.to_owned(), source },
        source => BackupError::Store { path, source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_backups_of_one_name_do_not_mix_and_an_interrupted_one_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (path, partial) = (directory.path().join("b"), directory.path().join("b.partial"));
        fs::write(&partial, "interrupted").unwrap();
        let mut first = BackupFile::create(&path).unwrap();
        assert!(matches!(BackupFile::create(&path), Err(BackupError::File { .. })));
        first.write(b"first").unwrap();
        assert_eq!(fs::read(&partial).unwrap(), b"first", "the second backup did not replace it");
        drop(first);
        let other = directory.path().join("other");
        fs::write(&other, "kept").unwrap();
        std::os::unix::fs::symlink(&other, &partial).unwrap();
        drop(BackupFile::create(&path).unwrap());
        assert_eq!(fs::read(&other).unwrap(), b"kept");
        assert!(!partial.exists());
    }

    #[test]
    fn errors_name_the_store_or_the_backup() {
        let directory = tempfile::tempdir().unwrap();
        let Err(error) = offline_backup(directory.path()) else { panic!("a backup of no store") };
        let store = directory.path().join("store");
        assert!(
            error
                .to_string()
                .starts_with(&format!("cannot open the store {}: it does not exist; ", store.display())),
            "{error}"
        );
        let backup = directory.path().join("b");
        fs::write(&backup, "no backup").unwrap();
        let Err(error) = restore_backup(directory.path(), None, None, &backup) else {
            panic!("a restored file that is no backup")
        };
        assert_eq!(error.to_string(), format!("cannot use the backup file {}", backup.display()));
        // A state directory that cannot be made.
        let Err(error) = restore_backup(&backup.join("state"), None, None, &backup) else {
            panic!("a restored backup below a file")
        };
        let store = backup.join("state/store");
        assert_eq!(error.to_string(), format!("cannot use the store {}", store.display()));
    }

    #[test]
    fn a_device_or_a_link_is_not_replaced_by_a_backup() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("stdout");
        std::os::unix::fs::symlink("/proc/self/fd/1", &link).unwrap();
        for path in [Path::new("/dev/null"), link.as_path(), directory.path()] {
            let refused = BackupFile::create(path).err().unwrap();
            assert!(matches!(refused, BackupError::File { .. }), "{refused}");
        }
        assert!(!directory.path().join("stdout.partial").exists());
    }

    #[test]
    fn a_finished_backup_leaves_the_temporary_file_of_the_next_one() {
        let directory = tempfile::tempdir().unwrap();
        let (path, partial) = (directory.path().join("b"), directory.path().join("b.partial"));
        drop(Embedded::open(&directory.path().join("store"), EmbeddedOptions::default()).unwrap());
        let mut first = BackupFile::create(&path).unwrap();
        for chunk in offline_backup(directory.path()).unwrap().unwrap() {
            first.write(&chunk.unwrap()).unwrap();
        }
        first.publish().unwrap();
        let second = BackupFile::create(&path).unwrap();
        drop(first);
        assert!(path.exists() && partial.exists());
        // An administrator removes the temporary file of a running backup, and starts another backup.
        fs::remove_file(&partial).unwrap();
        let third = BackupFile::create(&path).unwrap();
        drop(second);
        assert!(partial.exists());
        drop(third);
        assert!(!partial.exists());
    }
}

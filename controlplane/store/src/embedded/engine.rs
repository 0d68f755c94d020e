//! The engine: a database that can be closed and reopened while the store is open.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode, Readable as _};

use super::inspect;
use crate::{
    Commit, Entry, Error,
    backup::Record,
    codec::{EntryCodec, Revisions},
};

const REVISION_KEY: &str = "reserved-revision";

/// An open database.
pub(super) struct Engine {
    database: Database,
    entries: Keyspace,
    meta: Keyspace,
    codec: Arc<EntryCodec>,
}

/// The entries on disk before a failed batch: key and bytes, or `None` if there was no entry. The recovery writes them
/// over the entries of the failed batch.
pub(super) type Undo = Vec<(Arc<str>, Option<Vec<u8>>)>;

impl Engine {
    /// Opens the database in `path`, or creates it.
    pub(super) fn open(path: &Path, codec: Arc<EntryCodec>) -> Result<Self, Error> {
        inspect::inspect(path)?;
        Self::open_inspected(path, codec).map_err(|error| open_error(path, error))
    }

    fn open_inspected(path: &Path, codec: Arc<EntryCodec>) -> Result<Self, fjall::Error> {
        // The API server's watch cache serves most reads, so the engine needs little memory.
        let database = Database::builder(path)
            .cache_size(512 << 10)
            .worker_threads(1)
            .max_cached_files(Some(64))
            .open()?;
        let options_of = |size| move || KeyspaceCreateOptions::default().max_memtable_size(size);
        // The engine needs the memory of two memtables, because it keeps a written memtable until it writes the next
        // one. An existing database keeps the size with which it was created.
        let entries = database.keyspace("entries", options_of(1 << 20))?;
        let meta = database.keyspace("meta", options_of(64 << 10))?;
        Ok(Self { database, entries, meta, codec })
    }

    /// The end of the reserved revisions.
    pub(super) fn reserved(&self, path: &Path) -> Result<u64, Error> {
        let Some(bytes) = self.meta.get(REVISION_KEY).map_err(|error| open_error(path, error))? else {
            return Ok(1);
        };
        let wrong = |_size| Error::Corrupt {
            path: path.to_owned(),
            detail: "its revision has the wrong size".to_owned(),
        };
        bytes.as_ref().try_into().map(u64::from_be_bytes).map_err(wrong)
    }

    /// Reserves the revisions up to `until` on disk.
    pub(super) fn reserve(&self, until: u64) -> Result<(), fjall::Error> {
        self.meta.insert(REVISION_KEY, until.to_be_bytes())?;
        self.database.persist(PersistMode::SyncData)
    }

    /// The entry with this key. `None` if there is no such entry.
    pub(super) fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let found = self.entries.get(key).map_err(|error| read_error(&error))?;
        found.map(|bytes| self.codec.decode(key, &bytes)).transpose().map(Option::flatten)
    }

    /// The size of the database on disk, in bytes. `None` if the size cannot be read.
    pub(super) fn size(&self) -> Option<u64> {
        self.database.disk_space().ok()
    }

    /// Whether the value of a key is encrypted with the current key, or need not be encrypted.
    pub(super) fn is_current(&self, key: &str) -> Result<bool, Error> {
        let found = self.entries.get(key).map_err(|error| read_error(&error))?;
        Ok(found.is_none_or(|bytes| self.codec.is_current_entry(key, &bytes)))
    }

    /// The revisions of a key, without its value.
    pub(super) fn revisions(&self, key: &str) -> Result<Option<Revisions>, Error> {
        let found = self.entries.get(key).map_err(|error| read_error(&error))?;
        Ok(found.and_then(|bytes| EntryCodec::revisions(&bytes)))
    }

    /// Calls `visit` with the entries from `start` that have the prefix, in the order of their keys.
    pub(super) fn scan(
        &self,
        start: &str,
        prefix: &str,
        mut visit: impl FnMut(&str, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        for item in self.entries.range(start.as_bytes()..) {
            let (key, value) = item.into_inner().map_err(|error| read_error(&error))?;
            let Ok(key) = std::str::from_utf8(&key) else { continue };
            if !key.starts_with(prefix) {
                break;
            }
            visit(key, &value)?;
        }
        Ok(())
    }

    /// All entries at this moment, as they are on disk. Later commits do not affect the result.
    pub(super) fn snapshot(&self) -> impl Iterator<Item = Result<Record, Error>> + Send + use<> {
        let items = self.database.snapshot().iter(&self.entries);
        items.map(|item| {
            let (key, value) = item.into_inner().map_err(|error| read_error(&error))?;
            Ok((Box::from(&*key), Box::from(&*value)))
        })
    }

    /// Reads the entries of the commits' keys from disk.
    pub(super) fn undo_of<'a>(&self, commits: impl Iterator<Item = &'a Commit>) -> Result<Undo, Error> {
        let one = |commit: &Commit| {
            let found = self.entries.get(commit.key.as_bytes()).map_err(|error| read_error(&error))?;
            Ok((commit.key.clone(), found.map(|bytes| bytes.to_vec())))
        };
        commits.map(one).collect()
    }

    /// Writes all or none of the commits to disk, with one sync. Returns an upper bound of the journal's growth in
    /// bytes.
    pub(super) fn write<'a>(&self, commits: impl Iterator<Item = &'a Commit>) -> Result<u64, WriteError> {
        let mut bytes = 0;
        let mut batch = self.database.batch().durability(Some(PersistMode::SyncData));
        for commit in commits {
            bytes += (commit.key.len() + 64) as u64;
            match &commit.value {
                Some(value) => {
                    let encoded = self.encode(commit, value)?;
                    bytes += encoded.len() as u64;
                    batch.insert(&self.entries, commit.key.as_bytes(), encoded);
                }
                None => batch.remove(&self.entries, commit.key.as_bytes()),
            }
        }
        batch.commit().map_err(WriteError::Engine)?;
        Ok(bytes)
    }

    fn encode(&self, commit: &Commit, value: &Bytes) -> Result<Vec<u8>, WriteError> {
        let revisions = Revisions { created: commit.created, modified: commit.revision };
        self.codec.encode(&commit.key, revisions, value).map_err(WriteError::Seal)
    }

    /// Writes encoded entries, with one sync.
    pub(super) fn restore(&self, entries: &Undo) -> Result<(), fjall::Error> {
        let mut batch = self.database.batch().durability(Some(PersistMode::SyncAll));
        for (key, value) in entries {
            match value {
                Some(value) => batch.insert(&self.entries, key.as_bytes(), value.as_slice()),
                None => batch.remove(&self.entries, key.as_bytes()),
            }
        }
        batch.commit()
    }
}

/// The reason why commits were not written.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    /// The engine refuses writes until it is reopened.
    #[error("{}", error_text(.0))]
    Engine(fjall::Error),
    /// A value cannot be encrypted. No commit was written.
    #[error(transparent)]
    Seal(coracle_sealing::Error),
}

fn open_error(path: &Path, error: fjall::Error) -> Error {
    let path: PathBuf = path.to_owned();
    match error {
        fjall::Error::Locked => Error::Locked { path },
        fjall::Error::Io(source) if source.kind() != std::io::ErrorKind::InvalidData => {
            Error::Open { path, source }
        }
        fjall::Error::Storage(fjall::LsmError::Io(source)) if is_disk_error(source.kind()) => {
            Error::Open { path, source }
        }
        other => Error::Corrupt { path, detail: error_text(&other) },
    }
}

/// Whether an error is caused by the disk, not by the file's content.
pub(super) fn is_disk_error(kind: std::io::ErrorKind) -> bool {
    use std::io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(kind, StorageFull | QuotaExceeded | ReadOnlyFilesystem | PermissionDenied)
}

fn read_error(error: &fjall::Error) -> Error {
    Error::Read { detail: error_text(error) }
}

/// The text of the engine's error, whose Display has a debug format.
fn error_text(error: &fjall::Error) -> String {
    use fjall::{Error as E, LsmError as L};
    match error {
        E::Io(source) | E::Storage(L::Io(source)) => source.to_string(),
        E::Storage(L::ChecksumMismatch { .. }) => {
            "a block of a table is corrupt (checksum mismatch)".to_owned()
        }
        E::Storage(other) => format!("a table is corrupt ({other:?})"),
        E::Poisoned => "an earlier write or a write in the background failed".to_owned(),
        other => format!("{other:?}"),
    }
}

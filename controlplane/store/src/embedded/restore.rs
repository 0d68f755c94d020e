//! Restores a store from a backup.
//!
//! The backup is written into a new directory. After its checksum is verified, the directory replaces the store in one
//! step. A crash before that step leaves the old store, a crash after it the restored one.

use std::{
    fs::{self, File, TryLockError},
    io::{self, BufRead},
    path::Path,
    sync::Arc,
};

use super::{
    engine::{Engine, Undo},
    make_directory,
    migrate::{exchange, remove, sibling},
};
use crate::{
    Error, Sealing,
    backup::{BackupSummary, Reader},
    codec::EntryCodec,
};

/// Suffix of the directory into which the backup is written, beside the store.
pub(super) const RESTORING: &str = ".restoring";
/// Suffix of the replaced store.
const REPLACED: &str = ".replaced";
/// Minimum size of a batch in bytes, except of the last one.
const BATCH_BYTES: usize = 1 << 20;
/// Number of revisions that are skipped. The replaced store may have had commits after the backup. Clients that have
/// read the revisions of these commits must list again. etcd's documentation recommends the same number.
const SKIPPED: u64 = 1_000_000_000;

/// Replaces the store in `path` by a backup. The former store stays beside it with the suffix `.replaced`.
///
/// # Errors
/// [`Error::Locked`] if a process uses the store, [`Error::Backup`] if the backup is damaged, [`Error::Sealed`] if a
/// key is missing. The store is then unchanged.
pub fn restore(path: &Path, sealing: Option<Sealing>, backup: impl BufRead) -> Result<BackupSummary, Error> {
    let failed = |source| Error::Open { path: path.to_owned(), source };
    let _lock = lock(path)?;
    let new = sibling(path, RESTORING);
    remove(&new).map_err(failed)?;
    make_directory(&new).map_err(failed)?;
    let filled = fill(&new, &Arc::new(EntryCodec(sealing)), backup);
    let summary = filled.inspect_err(|_| drop(remove(&new)))?;
    replace(path, &new).map_err(failed)?;
    Ok(summary)
}

/// The lock of the existing store, if there is one. The engine is not opened, because the store may be damaged.
fn lock(path: &Path) -> Result<Option<File>, Error> {
    let failed = |source| Error::Open { path: path.to_owned(), source };
    let file = match File::open(path.join("lock")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(failed)?,
    };
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(Error::Locked { path: path.to_owned() }),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

fn fill(new: &Path, codec: &Arc<EntryCodec>, backup: impl BufRead) -> Result<BackupSummary, Error> {
    let failed = |error: fjall::Error| Error::Disk { detail: error.to_string() };
    let mut reader = Reader::new(backup)?;
    let engine = Engine::open(new, codec.clone())?;
    engine.reserve(reader.head.reserved.saturating_add(SKIPPED)).map_err(failed)?;
    let (mut batch, mut size): (Undo, usize) = (Vec::new(), 0);
    while let Some((key, value)) = reader.next()? {
        let name = std::str::from_utf8(&key);
        let name = name.map_err(|_invalid| Error::Backup { detail: "a key is not UTF-8".to_owned() })?;
        // With a value that no key decrypts, the restored store would be unusable.
        codec.decode(name, &value)?;
        size += key.len() + value.len();
        batch.push((name.into(), Some(value.into_vec())));
        if size > BATCH_BYTES {
            engine.restore(&batch).map_err(failed)?;
            (size, batch) = (0, Vec::new());
        }
    }
    engine.restore(&batch).map_err(failed)?;
    Ok(reader.summary())
}

fn replace(path: &Path, new: &Path) -> io::Result<()> {
    if !path.exists() {
        make_directory(path)?;
    }
    exchange(path, new)?;
    let replaced = sibling(path, REPLACED);
    remove(&replaced)?;
    fs::rename(new, replaced)
}

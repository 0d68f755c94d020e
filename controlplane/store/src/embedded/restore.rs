//! Restores a store from a backup.
//!
//! The backup is written into a new directory. After its checksum is verified, the directory replaces the store in one
//! step. A crash before that step leaves the old store. A crash after that step leaves the restored store.
//!
//! A file beside the store has the first revision of the newest restored store. A later restore continues above that
//! revision, so that two restores of one backup do not use the same revisions for different commits. The replaced store
//! is not opened, because it may be damaged.

use std::{
    fs::{self, File, TryLockError},
    io::{self, BufRead, Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
    sync::Arc,
};

use super::{
    engine::{Engine, Undo},
    make_directory,
    migrate::{exchange, remove, sibling, sync_parent},
};
use crate::{
    Error, Sealing,
    backup::{BackupSummary, Reader, invalid},
    codec::EntryCodec,
};

/// Suffix of the directory into which the backup is written, beside the store.
pub(super) const RESTORING: &str = ".restoring";
/// Suffix of the replaced store.
const REPLACED: &str = ".replaced";
/// Suffix of the file with the first revision of the newest restored store, as a decimal number.
const RESTORED: &str = ".restored";
/// Maximum size of the file with the suffix [`RESTORED`] in bytes: the digits of a revision.
const MAX_RESTORED_BYTES: u64 = 20;
/// Maximum revision in the file with the suffix [`RESTORED`]: half of all revisions. It is far above the maximum in a
/// backup.
const MAX_RESTORED: u64 = u64::MAX / 2;
/// Name of the lock file in the store's directory.
const LOCK: &str = "lock";
/// Minimum size of a batch in bytes. The last batch can be smaller.
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
    make_directory(path).map_err(failed)?;
    let path = &path.canonicalize().map_err(failed)?;
    // An absent store gets a lock, too: a server that starts during the restore would create a store.
    File::options().append(true).create(true).mode(0o600).open(path.join(LOCK)).map_err(failed)?;
    let _lock = lock(path)?;
    let new = sibling(path, RESTORING);
    remove(&new).map_err(failed)?;
    make_directory(&new).map_err(failed)?;
    let filled = fill(path, &new, &Arc::new(EntryCodec(sealing)), backup);
    let summary = filled.and_then(|summary| replace(path, &new).map(|()| summary).map_err(failed));
    // After a successful restore this directory does not exist.
    summary.inspect_err(|_| drop(remove(&new)))
}

/// The lock of the existing store, if there is one. The engine is not opened, because the store may be damaged.
pub(super) fn lock(path: &Path) -> Result<Option<File>, Error> {
    let failed = |source| Error::Open { path: path.to_owned(), source };
    let name = path.join(LOCK);
    let file = match File::open(&name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(failed)?,
    };
    match file.try_lock() {
        // Another restore may have replaced the store after the file was opened.
        Ok(()) if is_at(&file, &name).map_err(failed)? => Ok(Some(file)),
        Ok(()) | Err(TryLockError::WouldBlock) => Err(Error::Locked { path: path.to_owned() }),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// Checks that the store at this path is locked. The engine waits for a lock, and a restore that held it may have
/// replaced the store meanwhile. The engine then holds the lock of the former store, so a second process could open
/// this store.
pub(super) fn check_locked(path: &Path) -> Result<(), Error> {
    match lock(path) {
        Err(Error::Locked { .. }) => Ok(()),
        Ok(_) => Err(Error::Locked { path: path.to_owned() }),
        Err(error) => Err(error),
    }
}

/// Whether the path leads to this file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (file, named) = (file.metadata()?, fs::metadata(path)?);
    Ok((file.dev(), file.ino()) == (named.dev(), named.ino()))
}

fn fill(
    path: &Path,
    new: &Path,
    codec: &Arc<EntryCodec>,
    backup: impl BufRead,
) -> Result<BackupSummary, Error> {
    let failed = |error: fjall::Error| Error::Disk { detail: error.to_string() };
    let mut reader = Reader::new(backup)?;
    let newest = reader.head.revision.max(reader.head.reserved).max(newest_restored(path)?);
    let first = newest.saturating_add(SKIPPED);
    let engine = Engine::open(new, codec.clone())?;
    engine.reserve(first).map_err(failed)?;
    let (mut batch, mut size): (Undo, usize) = (Vec::new(), 0);
    while let Some((key, value)) = reader.next()? {
        let name = std::str::from_utf8(&key).map_err(|_invalid| invalid("a key is not UTF-8"))?;
        check_revisions(name, &value, reader.head.revision)?;
        // The check is needed, because a store with a value that no key decrypts would be unusable.
        codec.decode(name, &value)?;
        size += key.len() + value.len();
        batch.push((name.into(), Some(value.into_vec())));
        if size > BATCH_BYTES {
            engine.restore(&batch).map_err(failed)?;
            (size, batch) = (0, Vec::new());
        }
    }
    engine.restore(&batch).map_err(failed)?;
    record_restored(path, first).map_err(|source| Error::Open { path: path.to_owned(), source })?;
    Ok(reader.summary())
}

/// Checks the revisions of an entry. A revision above the newest revision would be used a second time.
fn check_revisions(key: &str, value: &[u8], newest: u64) -> Result<(), Error> {
    match EntryCodec::revisions(value) {
        Some(found) if found.created <= found.modified && found.modified <= newest => Ok(()),
        _ => Err(invalid(format!("the entry {key:?} has impossible revisions"))),
    }
}

/// The first revision of the newest restored store. 0 if no store was restored.
fn newest_restored(path: &Path) -> Result<u64, Error> {
    let file = sibling(path, RESTORED);
    let read = File::open(&file).and_then(|opened| {
        let mut text = String::new();
        opened.take(MAX_RESTORED_BYTES).read_to_string(&mut text)?;
        Ok(text)
    });
    let failed = |source| Error::Open { path: file.clone(), source };
    match read {
        Ok(text) => {
            let revision = text.trim().parse::<u64>().ok().filter(|revision| *revision <= MAX_RESTORED);
            revision.ok_or_else(|| failed(io::Error::new(io::ErrorKind::InvalidData, "it is not a revision")))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(failed(error)),
    }
}

/// Writes the file for [`newest_restored`]. The sync of the directory after the exchange makes its name durable.
fn record_restored(path: &Path, revision: u64) -> io::Result<()> {
    let (file, new) = (sibling(path, RESTORED), sibling(path, ".restored.new"));
    // An interrupted restore may have left the file. It is replaced by a new file, which is not a link and has the
    // right mode.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut written = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    written.write_all(revision.to_string().as_bytes())?;
    written.sync_all()?;
    fs::rename(new, file)
}

fn replace(path: &Path, new: &Path) -> io::Result<()> {
    if is_unused(path)? {
        exchange(path, new)?;
        sync_parent(path)?;
        return remove(new);
    }
    let replaced = sibling(path, REPLACED);
    remove(&replaced)?;
    // The new store gets this name before the exchange. So the former store never has the name of an incomplete
    // restore. The next start would remove a store with that name.
    fs::rename(new, &replaced)?;
    exchange(path, &replaced).inspect_err(|_| drop(remove(&replaced)))?;
    sync_parent(path)
}

/// Whether a directory has no store: it has at most a lock.
fn is_unused(path: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(path)? {
        if entry?.file_name() != LOCK {
            return Ok(false);
        }
    }
    Ok(true)
}

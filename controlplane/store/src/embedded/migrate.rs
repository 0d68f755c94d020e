//! Encryption of entries that were stored by an earlier version or with an earlier key.
//!
//! After a change of an entry, its old bytes stay in the journal and in tables until the engine compacts them.
//! Therefore the whole store is copied into a new directory, which replaces the old store in one step (renameat2 with
//! RENAME_EXCHANGE). A crash before that step leaves the old store. A crash after that step leaves the new store.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::{
    engine::{Engine, Undo},
    make_directory,
};
use crate::{
    Error,
    codec::{EntryCodec, FailedServices},
};

/// Minimum size of a batch of the copy in bytes. The last batch can be smaller.
const BATCH_BYTES: usize = 1 << 20;

/// A path beside the store: its path with a suffix.
pub(super) fn sibling(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

/// Encrypts the entries that are not encrypted with the first key. Entries that cannot be decrypted now stay as they
/// are: they are encrypted at a later start, or at their next write. Returns whether the store was replaced. Then
/// `engine` is the old store, and the caller must open the new store.
///
/// # Errors
/// An entry under a prefix of the key file is encrypted with an unknown key, or the copy cannot be written. The store
/// is then unchanged. [`Error::Sync`] means that the store was replaced, so `engine` must not be used.
pub(super) fn migrate(path: &Path, engine: &Engine, codec: &Arc<EntryCodec>) -> Result<bool, Error> {
    let copy = sibling(path, ".sealing");
    // The engine holds the store's lock, so an existing copy was left by a crash.
    remove(&copy).map_err(|source| Error::Open { path: copy.clone(), source })?;
    let (mut outdated, mut delayed) = (0_usize, 0_usize);
    let mut failed_services = FailedServices::default();
    for prefix in codec.prefixes() {
        engine.scan(prefix, prefix, |key, bytes| {
            match codec.resealed(&mut failed_services, key, bytes)? {
                Some(_) => outdated += 1,
                None => delayed += usize::from(!codec.is_current_entry(key, bytes)),
            }
            Ok(())
        })?;
    }
    if delayed > 0 {
        tracing::warn!(
            entries = delayed,
            "entries keep their former encryption, because a key management service failed or a key is unknown; keep \
             their former key"
        );
    }
    if outdated == 0 {
        return Ok(false);
    }
    let failed = |source| Error::Open { path: copy.clone(), source };
    // The copy becomes the store, so it is private as well.
    make_directory(&copy).map_err(failed)?;
    coracle_fault::point("store.migrate.created");
    let filled = fill(path, engine, &copy, codec, &mut failed_services);
    coracle_fault::point("store.migrate.filled");
    let copied = filled.and_then(|()| exchange(path, &copy).map_err(failed));
    copied.inspect_err(|_| drop(remove(&copy)))?;
    coracle_fault::point("store.migrate.exchanged");
    sync_parent(path).map_err(|source| Error::Sync { path: path.to_owned(), source })?;
    coracle_fault::point("store.migrate.synced");
    tracing::info!(entries = outdated, "entries encrypted");
    Ok(true)
}

/// Removes an incomplete copy, or the replaced store. A directory that does not exist is not an error.
pub(super) fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn fill(
    path: &Path,
    engine: &Engine,
    copy: &Path,
    codec: &Arc<EntryCodec>,
    failed_services: &mut FailedServices,
) -> Result<(), Error> {
    let new = Engine::open(copy, codec.clone())?;
    let failed = |error: fjall::Error| Error::Disk { detail: error.to_string() };
    new.reserve(engine.reserved(path)?).map_err(failed)?;
    let (mut batch, mut size): (Undo, usize) = (Vec::new(), 0);
    engine.scan("", "", |key, bytes| {
        let resealed = codec.resealed(failed_services, key, bytes)?;
        let bytes = resealed.unwrap_or_else(|| bytes.to_vec());
        size += key.len() + bytes.len();
        batch.push((key.into(), Some(bytes)));
        if size > BATCH_BYTES {
            new.restore(&batch).map_err(failed)?;
            coracle_fault::point("store.migrate.batch");
            batch.clear();
            size = 0;
        }
        Ok(())
    })?;
    new.restore(&batch).map_err(failed)
}

/// Replaces the store by another directory in one step. After an error the store is unchanged. The caller must call
/// [`sync_parent`] next.
pub(super) fn exchange(path: &Path, copy: &Path) -> io::Result<()> {
    File::open(copy)?.sync_all()?;
    Ok(renameat_with(CWD, copy, CWD, path, RenameFlags::EXCHANGE)?)
}

/// Syncs the names of the store and of the files beside it.
pub(super) fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}

//! Disk operations of the layer store.

use std::fs::{DirBuilder, File, Permissions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{LayerError, Meta, Pending};

/// Directory of a layer's unpacked files.
pub(super) const FILES: &str = "fs";
/// File with the recipe to rebuild the layer's archive, if that is possible.
pub(super) const RECIPE: &str = "recipe";
/// File that marks a layer as complete: its [`Meta`].
const COMPLETE: &str = "complete";

/// Makes a directory that only root may enter, because images contain set-user-id programs. An existing directory is
/// kept.
pub(crate) fn make_private(path: &Path) -> Result<(), LayerError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|source| LayerError::Disk {
        verb: "make",
        path: path.to_owned(),
        source,
    })
}

/// Makes the root directory of a layer. It has mode 0755, independent of the umask, until the layer sets another mode.
pub(super) fn make(path: &Path) -> Result<(), LayerError> {
    DirBuilder::new()
        .recursive(true)
        .create(path)
        .and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(0o755)))
        .map_err(|source| LayerError::Disk { verb: "make", path: path.to_owned(), source })
}

/// Deletes a directory tree. An absent tree is not an error.
pub(super) fn remove_tree(path: &Path) -> Result<(), LayerError> {
    coracle_tree::remove(path).map_err(|source| LayerError::Disk {
        verb: "remove",
        path: path.to_owned(),
        source,
    })
}

/// Reads a layer's metadata, without checking its state or name.
pub(super) fn read_meta_anywhere(layer: &Path) -> Option<Meta> {
    parse(&std::fs::read(layer.join(COMPLETE)).ok()?)
}

/// Reads the metadata of a complete layer. `None` if it is incomplete or does not match the directory's name.
pub(super) fn read_meta(layer: &Path) -> Option<Meta> {
    read_meta_anywhere(layer).filter(|meta| is_of(layer, meta))
}

/// Like [`read_meta`], for a layer that is removed if it is incomplete.
///
/// # Errors
/// If the kernel refuses to read the metadata or the state of the layer: running containers may use it.
pub(super) fn read_meta_before_removal(layer: &Path) -> Result<Option<Meta>, LayerError> {
    let error = |path: PathBuf| move |source| LayerError::Disk { verb: "read", path, source };
    let (meta, files) = (layer.join(COMPLETE), layer.join(FILES));
    let bytes = unless_refused(std::fs::read(&meta)).map_err(error(meta))?;
    let metadata = unless_refused(std::fs::metadata(&files)).map_err(error(files))?;
    let has_files = metadata.is_some_and(|metadata| metadata.is_dir());
    Ok(bytes.and_then(|bytes| parse(&bytes)).filter(|meta| has_files && is_named_after(layer, meta)))
}

/// The result of a read. `None` if the file is absent or damaged, an error if the kernel refuses to read it.
fn unless_refused<T>(read: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match read {
        Err(error) if coracle_tree::is_refusal(&error) => Err(error),
        read => Ok(read.ok()),
    }
}

fn parse(bytes: &[u8]) -> Option<Meta> {
    serde_json::from_slice(bytes).ok()
}

fn is_of(layer: &Path, meta: &Meta) -> bool {
    is_named_after(layer, meta) && layer.join(FILES).is_dir()
}

fn is_named_after(layer: &Path, meta: &Meta) -> bool {
    layer.file_name().is_some_and(|name| name == meta.diff_id.short().as_str())
}

/// Flushes the file system once, then renames every layer of the batch into place and notifies the waiting
/// callers.
pub(super) fn commit_all(layers: &Path, batch: Vec<Pending>) {
    let mut ready = Vec::new();
    for pending in batch {
        match write_meta(&pending) {
            Ok(()) => ready.push(pending),
            // The receiver may be cancelled. The unpacked files are deleted in either case.
            Err(error) => drop(pending.done.send(Err(Arc::new(error)))),
        }
    }
    coracle_fault::point("pull.layer-unpacked");
    let synced = sync_file_system(layers).map_err(Arc::new);
    coracle_fault::point("pull.layer-synced");
    let mut renamed = Vec::new();
    for pending in ready {
        let result = synced.clone().and_then(|()| rename(layers, &pending).map_err(Arc::new));
        renamed.push((pending, result));
    }
    coracle_fault::point("pull.layer-placed");
    // The new names must be durable before a record refers to them.
    let named = sync_directory(layers).map_err(Arc::new);
    for (pending, result) in renamed {
        let _receiver_gone = pending.done.send(result.and_then(|()| named.clone()));
    }
}

fn write_meta(pending: &Pending) -> Result<(), LayerError> {
    let path = pending.unpack_dir.path.join(COMPLETE);
    let write = || File::create(&path)?.write_all(&serde_json::to_vec(&pending.meta)?);
    write().map_err(|source| LayerError::Disk { verb: "write", path: path.clone(), source })
}

fn rename(layers: &Path, pending: &Pending) -> Result<(), LayerError> {
    let to = layers.join(pending.meta.diff_id.short());
    match read_meta(&to) {
        // The layer exists already: an earlier pull was cancelled after its rename.
        Some(meta) if meta == pending.meta => return Ok(()),
        Some(_) => {
            return Err(LayerError::Collision { path: to, diff_id: pending.meta.diff_id });
        }
        None => remove_tree(&to)?,
    }
    std::fs::rename(&pending.unpack_dir.path, &to).map_err(|source| LayerError::Disk {
        verb: "put in place",
        path: to,
        source,
    })
}

/// Makes the names in a directory durable.
pub(super) fn sync_directory(path: &Path) -> Result<(), LayerError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(|source| LayerError::Disk {
        verb: "sync",
        path: path.to_owned(),
        source,
    })
}

fn sync_file_system(path: &Path) -> Result<(), LayerError> {
    let directory = File::open(path).map_err(|source| LayerError::Disk {
        verb: "open",
        path: path.to_owned(),
        source,
    })?;
    nix::unistd::syncfs(directory.as_fd())
        .map_err(|source| LayerError::Sync { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_incomplete_only_if_its_metadata_is_absent_or_damaged() {
        let fails_with =
            |errno: i32| unless_refused::<Vec<u8>>(Err(std::io::Error::from_raw_os_error(errno)));
        for errno in [libc::EMFILE, libc::ENOMEM, libc::EACCES] {
            assert!(fails_with(errno).is_err(), "{errno}");
        }
        assert_eq!(fails_with(libc::ENOENT).unwrap(), None);
        assert_eq!(unless_refused(Ok(vec![1])).unwrap(), Some(vec![1]));
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(COMPLETE), "{").unwrap();
        assert!(read_meta_before_removal(dir.path()).unwrap().is_none());
    }
}

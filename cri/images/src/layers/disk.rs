//! What the layer store does to the disk.

use std::fs::{DirBuilder, File, Permissions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use super::{LayerError, Meta, Pending};

/// The unpacked files of a layer.
pub(super) const FILES: &str = "fs";
/// How to make its archive again, where that is possible.
pub(super) const RECIPE: &str = "recipe";
/// What makes a layer one: its [`Meta`].
const COMPLETE: &str = "complete";

/// Makes a directory that only root may enter, for images have set-user-id programs. One that is there is fine.
pub(crate) fn make_private(path: &Path) -> Result<(), LayerError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|source| LayerError::Disk {
        verb: "make",
        path: path.to_owned(),
        source,
    })
}

/// Makes the root of a layer, which has a root directory's usual mode, whatever our umask, until the layer says
/// otherwise.
pub(super) fn make(path: &Path) -> Result<(), LayerError> {
    DirBuilder::new()
        .recursive(true)
        .create(path)
        .and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(0o755)))
        .map_err(|source| LayerError::Disk { verb: "make", path: path.to_owned(), source })
}

/// Removes a directory; one that is not there is removed already.
pub(super) fn remove_tree(path: &Path) -> Result<(), LayerError> {
    coracle_tree::remove(path).map_err(|source| LayerError::Disk {
        verb: "remove",
        path: path.to_owned(),
        source,
    })
}

/// What a layer says of itself, wherever and in whatever state it is.
pub(super) fn read_meta_anywhere(layer: &Path) -> Option<Meta> {
    serde_json::from_slice(&std::fs::read(layer.join(COMPLETE)).ok()?).ok()
}

/// What a complete layer says of itself; none if it is not one, or not the one that its name says.
pub(super) fn read_meta(layer: &Path) -> Option<Meta> {
    let meta = read_meta_anywhere(layer)?;
    let named = layer.file_name().is_some_and(|name| name == meta.diff_id.short().as_str());
    (named && layer.join(FILES).is_dir()).then_some(meta)
}

/// Flushes the file system once, then renames every layer of the batch into place, and tells each who waits.
pub(super) fn commit_all(layers: &Path, batch: Vec<Pending>) {
    let mut ready = Vec::new();
    for pending in batch {
        match write_meta(&pending) {
            Ok(()) => ready.push(pending),
            // Whoever waited may have been cancelled; the workshop goes in either case.
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
    // The names must last too, before any record speaks of them.
    let named = sync_directory(layers).map_err(Arc::new);
    for (pending, result) in renamed {
        let _nobody_waits = pending.done.send(result.and_then(|()| named.clone()));
    }
}

fn write_meta(pending: &Pending) -> Result<(), LayerError> {
    let path = pending.workshop.path.join(COMPLETE);
    let write = || File::create(&path)?.write_all(&serde_json::to_vec(&pending.meta)?);
    write().map_err(|source| LayerError::Disk { verb: "write", path: path.clone(), source })
}

fn rename(layers: &Path, pending: &Pending) -> Result<(), LayerError> {
    let to = layers.join(pending.meta.diff_id.short());
    match read_meta(&to) {
        // There already: a pull that was cancelled between its rename and its end.
        Some(meta) if meta == pending.meta => return Ok(()),
        Some(_) => {
            return Err(LayerError::Collision { path: to, diff_id: pending.meta.diff_id });
        }
        None => remove_tree(&to)?,
    }
    std::fs::rename(&pending.workshop.path, &to).map_err(|source| LayerError::Disk {
        verb: "put in place",
        path: to,
        source,
    })
}

/// Makes the names in a directory last.
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

//! The layers on disk: reference counts, [unpackings](unpacking), and the commit.
//!
//! ```text
//! (absent) ──ensure──► Unpacking ──verified, synced, renamed──► Complete{refs} ──no refs, swept──► (absent)
//!                         │                                        ▲
//!                         └──failed or cancelled──► (absent)       └── found when the store is opened
//! ```
//! Images (records) and pulls in progress hold references. A layer without references stays until the next `sweep`. The
//! sweep keeps layers of an interrupted pull for a while, because a retry needs them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::digest::Digest;
use crate::error::{ErrorKind, errno_kind, io_kind};
use crate::image::Usage;
use crate::unpack::{Link, LinkError, Rebuilt, UnpackError};

mod directory_attributes;
mod disk;
mod links;
mod names;
mod spool;
mod trash;
mod unpacking;

pub(crate) use disk::make_private;
use disk::{commit_all, read_meta, read_meta_before_removal, remove_tree};
pub(crate) use spool::{Saved, Spool, Spools};
pub(crate) use trash::Trash;
use unpacking::InProgress;
pub(crate) use unpacking::Source;

/// Time for which a layer of an interrupted pull is kept for a retry.
pub(crate) const KEEP: Duration = Duration::from_secs(3600);

/// All layers of a store.
pub(crate) struct Layers {
    layers: PathBuf,
    partial: PathBuf,
    /// Data of partly fetched layers, for a retry.
    pub(crate) spools: Arc<Spools>,
    /// Removed layers that are being deleted.
    pub(crate) trash: Arc<Trash>,
    next: AtomicU64,
    states: Mutex<HashMap<Digest, LayerState>>,
    queue: Mutex<VecDeque<Pending>>,
    committing: tokio::sync::Mutex<()>,
}

/// The state of a layer.
enum LayerState {
    Unpacking(InProgress),
    Complete { meta: Meta, refs: usize, keep_until: Option<Instant> },
}

/// Metadata of a complete layer, in the file `complete` beside its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    pub(crate) diff_id: Digest,
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
    /// Directories that the layer uses but does not describe. They have the attributes of lower layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) implied: Vec<String>,
    /// Hard links to files of lower layers. The layer itself has empty files at their paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) links: Vec<Link>,
}

/// A directory in which a layer is unpacked. It is deleted when dropped before the commit.
pub(crate) struct UnpackDir {
    path: PathBuf,
}

/// A reference to a complete layer, released when dropped.
pub(crate) struct Lease {
    layers: Arc<Layers>,
    diff_id: Digest,
    keep: bool,
}

struct Pending {
    unpack_dir: UnpackDir,
    meta: Meta,
    done: oneshot::Sender<Result<(), Arc<LayerError>>>,
}

/// Errors of layers on disk.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LayerError {
    #[error("cannot {verb} {}", path.display())]
    Disk {
        verb: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot flush the file system of {}", path.display())]
    Sync {
        path: PathBuf,
        #[source]
        source: Errno,
    },
    #[error("cannot commit the layer")]
    Commit(#[source] Arc<LayerError>),
    #[error("{} holds another layer whose digest has the same prefix as {diff_id}", path.display())]
    Collision { path: PathBuf, diff_id: Digest },
    #[error("cannot set the attributes of directories of lower layers")]
    DirectoryAttributes(#[source] UnpackError),
    #[error("cannot write an archive of directories")]
    Archive(#[source] io::Error),
    #[error("cannot link to files of the layers below layer {layer}")]
    View {
        layer: Digest,
        #[source]
        source: Errno,
    },
    #[error("layer {layer} is refused")]
    Link {
        layer: Box<Digest>,
        #[source]
        source: LinkError,
    },
    #[error(
        "layer {layer} is refused: it has hard links to files of lower layers, of which there are too many ({count})"
    )]
    Deep { layer: Digest, count: usize },
    #[error(
        "layer {layer} is refused: the names of directories and links that the store keeps for all layers would \
         take more than {} MiB of memory", names::TOTAL >> 20
    )]
    Names { layer: Digest },
    #[error(
        "the image is refused: its {layers} layers use {directories} directories that they do not describe, which \
         are too many"
    )]
    Directories { directories: usize, layers: usize },
    #[error("the store is shutting down")]
    Stopped,
}

// === impl LayerError ===

impl LayerError {
    /// The kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            LayerError::Disk { source, .. } => io_kind(source),
            LayerError::Sync { source, .. } => errno_kind(*source),
            LayerError::Commit(error) => error.kind(),
            LayerError::Collision { .. } | LayerError::Names { .. } | LayerError::Directories { .. } => {
                ErrorKind::Rejected
            }
            LayerError::DirectoryAttributes(error) => error.kind(),
            LayerError::Archive(source) => io_kind(source),
            LayerError::View { source, .. } => errno_kind(*source),
            LayerError::Link { source, .. } => source.kind(),
            LayerError::Deep { .. } => ErrorKind::Unsupported,
            LayerError::Stopped => ErrorKind::Io,
        }
    }
}

// === impl Layers ===

impl Layers {
    /// Opens the layers of a store. Keeps complete layers, and removes all other files.
    pub(crate) fn open(root: &Path) -> Result<Layers, LayerError> {
        let (layers, partial) = (root.join("layers"), root.join("partial"));
        for path in [&layers, &partial] {
            disk::make_private(path)?;
        }
        disk::make(&root.join("empty"))?;
        let disk = |verb, path: &Path| {
            let path = path.to_owned();
            move |source| LayerError::Disk { verb, path, source }
        };
        let emptied = layers.clone();
        let trash = Trash::open(root, Box::new(move || disk::sync_directory(&emptied)))?;
        let mut moved = Vec::new();
        for entry in std::fs::read_dir(&partial).map_err(disk("list", &partial))? {
            moved.push(trash.move_in(&entry.map_err(disk("list", &partial))?.path(), None)?);
        }
        let mut states = HashMap::new();
        for entry in std::fs::read_dir(&layers).map_err(disk("list", &layers))? {
            let path = entry.map_err(disk("list", &layers))?.path();
            match read_meta_before_removal(&path)? {
                Some(meta) => {
                    let keep_until = Some(Instant::now() + KEEP);
                    states.insert(meta.diff_id, LayerState::Complete { meta, refs: 0, keep_until });
                }
                None => {
                    tracing::warn!(path = %path.display(), "removing an incomplete layer");
                    moved.push(trash.move_in(&path, None)?);
                }
            }
        }
        trash.delete(moved);
        Ok(Layers {
            layers,
            partial,
            spools: Arc::new(Spools::open(root)?),
            trash,
            next: AtomicU64::new(0),
            states: Mutex::new(states),
            queue: Mutex::default(),
            committing: tokio::sync::Mutex::new(()),
        })
    }

    /// The directory of a layer's files.
    pub(crate) fn path(&self, diff_id: &Digest) -> PathBuf {
        self.layers.join(diff_id.short()).join(disk::FILES)
    }

    /// Rebuilds the archive of a layer from the unpacked files and the recipe. Fails if the layer has no recipe.
    pub(crate) fn rebuild(&self, diff_id: &Digest) -> io::Result<(Rebuilt, u64)> {
        let (recipe, files) = (self.layers.join(diff_id.short()).join(disk::RECIPE), self.path(diff_id));
        Ok((Rebuilt::open(&recipe, &files)?, Rebuilt::length(&recipe, &files)?))
    }

    /// An empty directory: the lower directory of images without layers.
    pub(crate) fn empty(&self) -> PathBuf {
        self.layers.with_file_name("empty")
    }

    /// A new empty directory to unpack into.
    pub(crate) fn unpack_dir(&self) -> Result<UnpackDir, LayerError> {
        let path = self.partial.join(self.next_number().to_string());
        let unpack_dir = UnpackDir { path };
        disk::make_private(&unpack_dir.path)?;
        disk::make(&unpack_dir.files())?;
        Ok(unpack_dir)
    }

    /// A reference to a layer, if it is complete.
    pub(crate) fn lease(self: &Arc<Layers>, diff_id: Digest) -> Option<Lease> {
        match self.states().get_mut(&diff_id) {
            Some(LayerState::Complete { refs, .. }) => {
                *refs += 1;
                Some(Lease { layers: self.clone(), diff_id, keep: false })
            }
            _ => None,
        }
    }

    /// Releases references of records. The next `sweep` removes unreferenced layers.
    pub(crate) fn release(&self, diff_ids: &[Digest]) {
        for diff_id in diff_ids {
            self.drop_reference(diff_id, false);
        }
    }

    /// Moves unreferenced layers to the trash, except those kept for a retry. Blocks, but does not wait for
    /// their deletion: see [`Trash::wait_until_empty`].
    pub(crate) fn sweep(&self, now: Instant) -> Result<(), LayerError> {
        self.spools.sweep(now);
        let mut moved = Vec::new();
        let done = self.trash_unused(now, &mut moved);
        if !moved.is_empty() {
            coracle_fault::point("remove-image.trashed");
            self.trash.delete(moved);
        }
        done
    }

    fn trash_unused(&self, now: Instant, moved: &mut Vec<trash::Item>) -> Result<(), LayerError> {
        let mut states = self.states();
        let unused: Vec<Digest> = states
            .iter()
            .filter(|(_, state)| match state {
                LayerState::Complete { refs: 0, keep_until, .. } => keep_until.is_none_or(|t| t <= now),
                LayerState::Complete { .. } | LayerState::Unpacking(_) => false,
            })
            .map(|(diff_id, _)| *diff_id)
            .collect();
        for diff_id in unused {
            let Some(LayerState::Complete { meta, .. }) = states.get(&diff_id) else { continue };
            // One rename, under the lock, so that no other caller starts to unpack the same layer meanwhile.
            moved.push(self.trash.move_in(&self.layers.join(diff_id.short()), Some(meta))?);
            states.remove(&diff_id);
        }
        Ok(())
    }

    /// Time at which the next layer or spool that `sweep` keeps expires.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        let states = self.states();
        let layers = states.values().filter_map(|state| match state {
            LayerState::Complete { refs: 0, keep_until, .. } => *keep_until,
            LayerState::Complete { .. } | LayerState::Unpacking(_) => None,
        });
        layers.chain(self.spools.next_expiry()).min()
    }

    /// Disk usage of all complete layers and of the layers that are being deleted.
    pub(crate) fn usage(&self) -> Usage {
        let mut usage = self.trash.usage();
        for state in self.states().values() {
            if let LayerState::Complete { meta, .. } = state {
                usage.bytes += meta.bytes;
                usage.inodes += meta.inodes;
            }
        }
        usage
    }

    /// Bytes of the files of a complete layer, in whole blocks.
    pub(crate) fn bytes(&self, diff_id: &Digest) -> Option<u64> {
        match self.states().get(diff_id) {
            Some(LayerState::Complete { meta, .. }) => Some(meta.bytes),
            _ => None,
        }
    }

    /// The metadata of a complete layer.
    pub(crate) fn meta(&self, diff_id: &Digest) -> Option<Meta> {
        match self.states().get(diff_id) {
            Some(LayerState::Complete { meta, .. }) => Some(meta.clone()),
            _ => None,
        }
    }

    /// Moves an unpacked layer into place. Group commit: the first caller flushes the file system for all
    /// queued layers.
    async fn commit(&self, unpack_dir: UnpackDir, meta: Meta) -> Result<(), LayerError> {
        let (done, mut result) = oneshot::channel();
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(Pending {
            unpack_dir,
            meta,
            done,
        });
        let _guard = self.committing.lock().await;
        if let Ok(result) = result.try_recv() {
            return result.map_err(LayerError::Commit);
        }
        let batch: Vec<Pending> =
            self.queue.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect();
        let layers = self.layers.clone();
        tokio::task::spawn_blocking(move || commit_all(&layers, batch))
            .await
            .map_err(|_panicked_or_stopped| LayerError::Stopped)?;
        result.await.map_err(|_dropped| LayerError::Stopped)?.map_err(LayerError::Commit)
    }

    fn drop_reference(&self, diff_id: &Digest, keep: bool) {
        if let Some(LayerState::Complete { refs, keep_until, .. }) = self.states().get_mut(diff_id) {
            *refs = refs.saturating_sub(1);
            if *refs == 0 {
                *keep_until = keep.then(|| Instant::now() + KEEP);
            }
        }
    }

    fn next_number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn states(&self) -> MutexGuard<'_, HashMap<Digest, LayerState>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Lease ===

impl Lease {
    /// The layer's diff id.
    pub(crate) fn diff_id(&self) -> Digest {
        self.diff_id
    }

    /// Keeps the layer for a retry when this reference is dropped.
    pub(crate) fn keep(&mut self) {
        self.keep = true;
    }

    /// Passes the reference to a record.
    pub(crate) fn into_record(self) {
        if let Some(LayerState::Complete { refs, .. }) = self.layers.states().get_mut(&self.diff_id) {
            // The record gets its own reference, because the drop of `self` releases one.
            *refs += 1;
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.layers.drop_reference(&self.diff_id, self.keep);
    }
}

// === impl UnpackDir ===

impl UnpackDir {
    /// The directory to unpack into.
    pub(crate) fn files(&self) -> PathBuf {
        self.path.join(disk::FILES)
    }

    /// Path of the recipe: the data that rebuild the archive of the layer together with the unpacked files.
    pub(crate) fn recipe(&self) -> PathBuf {
        self.path.join(disk::RECIPE)
    }

    /// Deletes the directory now. Blocks.
    pub(crate) fn discard(self) {
        clear(&self.path);
    }
}

fn clear(path: &Path) {
    if let Err(error) = remove_tree(path) {
        tracing::warn!(error = crate::error::report(&error), "cannot remove a partly unpacked layer");
    }
}

impl Drop for UnpackDir {
    fn drop(&mut self) {
        if !self.path.exists() {
            return;
        }
        // In a cancelled task, deleting thousands of files must not block the runtime's thread.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                let path = self.path.clone();
                drop(runtime.spawn_blocking(move || clear(&path)));
            }
            Err(_no_runtime) => clear(&self.path),
        }
    }
}

#[cfg(test)]
mod tests;

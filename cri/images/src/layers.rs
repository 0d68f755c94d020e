//! The layers on disk: who needs which, one unpacking of each at a time, and the commit that makes them count.
//!
//! ```text
//! (absent) ──ensure──► Working ──unpacked, verified, synced, renamed──► Complete{refs} ──no refs, swept──► (absent)
//!                         │                                                  ▲
//!                         └──failed or cancelled──► (absent)                 └── found at open
//! ```
//! References are held by images (records) and by pulls under way. A layer without any stays until `sweep`, which
//! spares for a while those that a broken pull left: the next try needs them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};

use crate::digest::Digest;
use crate::image::Usage;
use crate::unpack::{Link, LinkError, Rebuilt, UnpackError, Unpacked};

mod disk;
mod links;
mod restate;
mod rubbish;
mod spool;

pub(crate) use disk::make_private;
use disk::{commit_all, read_meta, remove_tree};
pub(crate) use rubbish::Rubbish;
pub(crate) use spool::{Saved, Spool, Spools};

/// How long a layer of a pull that broke off is kept for the next try.
pub(crate) const KEEP: Duration = Duration::from_secs(3600);

/// All layers of a store.
pub(crate) struct Layers {
    layers: PathBuf,
    partial: PathBuf,
    /// What arrived of layers that broke off.
    pub(crate) spools: Arc<Spools>,
    /// What nobody needs any more.
    pub(crate) rubbish: Arc<Rubbish>,
    next: AtomicU64,
    slots: Mutex<HashMap<Digest, Slot>>,
    queue: Mutex<VecDeque<Pending>>,
    committing: tokio::sync::Mutex<()>,
}

enum Slot {
    Working(watch::Receiver<()>),
    Complete { meta: Meta, refs: usize, keep_until: Option<Instant> },
}

/// What is known of a complete layer; the file `complete` beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    pub(crate) diff_id: Digest,
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
    /// Directories that the layer implies but does not describe: their attributes are those of lower layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) implied: Vec<String>,
    /// Hard links whose targets are in lower layers: at their paths the layer itself has empty files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) links: Vec<Link>,
}

/// A place to unpack a layer; gone with all that is in it when dropped before the commit.
pub(crate) struct Workshop {
    path: PathBuf,
}

/// A reference to a complete layer. Dropping it lets go.
pub(crate) struct Lease {
    layers: Arc<Layers>,
    diff_id: Digest,
    keep: bool,
}

struct Pending {
    workshop: Workshop,
    meta: Meta,
    done: oneshot::Sender<Result<(), Arc<LayerError>>>,
}

/// Why the layers on disk cannot be worked with.
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
    #[error("{} holds another layer whose digest begins like {diff_id}", path.display())]
    Collision { path: PathBuf, diff_id: Digest },
    #[error("cannot restate the directories of lower layers")]
    Restate(#[source] UnpackError),
    #[error("cannot write an archive of directories")]
    Archive(#[source] io::Error),
    #[error("cannot link files of the layers below layer {layer}")]
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
    #[error("layer {layer} has links to layers below it, of which there are too many ({count})")]
    Deep { layer: Digest, count: usize },
    #[error("the store is shutting down")]
    Stopped,
}

// === impl Layers ===

impl Layers {
    /// Opens the layers below a directory: what is complete is known, everything else goes.
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
        let rubbish = Rubbish::open(root, Box::new(move || disk::sync_directory(&emptied)))?;
        let mut thrown = Vec::new();
        for entry in std::fs::read_dir(&partial).map_err(disk("list", &partial))? {
            thrown.push(rubbish.throw(&entry.map_err(disk("list", &partial))?.path(), None)?);
        }
        let mut slots = HashMap::new();
        for entry in std::fs::read_dir(&layers).map_err(disk("list", &layers))? {
            let path = entry.map_err(disk("list", &layers))?.path();
            match read_meta(&path) {
                Some(meta) => {
                    let keep_until = Some(Instant::now() + KEEP);
                    slots.insert(meta.diff_id, Slot::Complete { meta, refs: 0, keep_until });
                }
                None => {
                    tracing::warn!(path = %path.display(), "removing a layer that is not complete");
                    thrown.push(rubbish.throw(&path, None)?);
                }
            }
        }
        rubbish.delete(thrown);
        Ok(Layers {
            layers,
            partial,
            spools: Arc::new(Spools::open(root)?),
            rubbish,
            next: AtomicU64::new(0),
            slots: Mutex::new(slots),
            queue: Mutex::default(),
            committing: tokio::sync::Mutex::new(()),
        })
    }

    /// Where a layer's files are.
    pub(crate) fn path(&self, diff_id: &Digest) -> PathBuf {
        self.layers.join(diff_id.short()).join(disk::FILES)
    }

    /// The archive of a layer, as far as its recipe is here.
    pub(crate) fn rebuild(&self, diff_id: &Digest) -> io::Result<(Rebuilt, u64)> {
        let (recipe, files) = (self.layers.join(diff_id.short()).join(disk::RECIPE), self.path(diff_id));
        Ok((Rebuilt::open(&recipe, &files)?, Rebuilt::length(&recipe, &files)?))
    }

    /// A lower directory for images that have no layer at all.
    pub(crate) fn empty(&self) -> PathBuf {
        self.layers.with_file_name("empty")
    }

    /// An empty directory to unpack into.
    pub(crate) fn workshop(&self) -> Result<Workshop, LayerError> {
        let path = self.partial.join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        let workshop = Workshop { path };
        disk::make_private(&workshop.path)?;
        disk::make(&workshop.files())?;
        Ok(workshop)
    }

    /// A reference to a layer that is here.
    pub(crate) fn lease(self: &Arc<Layers>, diff_id: Digest) -> Option<Lease> {
        match self.slots().get_mut(&diff_id) {
            Some(Slot::Complete { refs, .. }) => {
                *refs += 1;
                Some(Lease { layers: self.clone(), diff_id, keep: false })
            }
            _ => None,
        }
    }

    /// A reference to a layer, after unpacking it if nobody has. Whoever comes second waits for the first, and tries
    /// for himself if that one fails.
    pub(crate) async fn ensure<E: From<LayerError>>(
        self: &Arc<Layers>,
        diff_id: Digest,
        unpack: impl AsyncFnOnce() -> Result<(Workshop, Unpacked), E>,
    ) -> Result<Lease, E> {
        let working = loop {
            if let Some(lease) = self.lease(diff_id) {
                return Ok(lease);
            }
            match Working::begin(self, diff_id) {
                Ok(working) => break working,
                // Closed when the other is done, in whatever way.
                Err(mut other) => while other.changed().await.is_ok() {},
            }
        };
        let (workshop, unpacked) = unpack().await?;
        let Unpacked { bytes, inodes, implied, links, .. } = unpacked;
        let meta = Meta { diff_id, bytes, inodes, implied, links };
        Ok(self.settle(working, workshop, meta).await?)
    }

    /// Commits a layer, in a task of its own: the disk goes on where a caller was cancelled, and what nobody waits for
    /// any more must not stay unknown.
    async fn settle(
        self: &Arc<Layers>,
        working: Working,
        workshop: Workshop,
        meta: Meta,
    ) -> Result<Lease, LayerError> {
        let (give, take) = oneshot::channel();
        let layers = self.clone();
        tokio::spawn(async move {
            let committed = layers.commit(workshop, meta.clone()).await.map(|()| working.complete(meta));
            if let Err(Ok(unclaimed)) = give.send(committed) {
                drop(unclaimed);
                let swept = tokio::task::spawn_blocking(move || layers.sweep(Instant::now())).await;
                if let Ok(Err(error)) = swept {
                    tracing::warn!(
                        error = crate::error::report(&error),
                        "cannot remove a layer of a pull that ended"
                    );
                }
            }
        });
        take.await.map_err(|_dropped| LayerError::Stopped)?
    }

    /// Lets go of references that records held. Gives nothing back: `sweep` removes.
    pub(crate) fn release(&self, diff_ids: &[Digest]) {
        for diff_id in diff_ids {
            self.drop_reference(diff_id, false);
        }
    }

    /// Throws away layers that nobody refers to, except those kept for another try. Blocks, but not until they are
    /// gone: see [`Rubbish::gone`].
    pub(crate) fn sweep(&self, now: Instant) -> Result<(), LayerError> {
        self.spools.sweep(now);
        let mut thrown = Vec::new();
        let done = self.throw_unused(now, &mut thrown);
        if !thrown.is_empty() {
            coracle_fault::point("remove-image.thrown");
            self.rubbish.delete(thrown);
        }
        done
    }

    fn throw_unused(&self, now: Instant, thrown: &mut Vec<rubbish::Item>) -> Result<(), LayerError> {
        let mut slots = self.slots();
        let unused: Vec<Digest> = slots
            .iter()
            .filter(|(_, slot)| match slot {
                Slot::Complete { refs: 0, keep_until, .. } => keep_until.is_none_or(|t| t <= now),
                Slot::Complete { .. } | Slot::Working(_) => false,
            })
            .map(|(diff_id, _)| *diff_id)
            .collect();
        for diff_id in unused {
            let Some(Slot::Complete { meta, .. }) = slots.get(&diff_id) else { continue };
            // Out of the way in one step, while nobody can begin to unpack the same again.
            thrown.push(self.rubbish.throw(&self.layers.join(diff_id.short()), Some(meta))?);
            slots.remove(&diff_id);
        }
        Ok(())
    }

    /// When the next `sweep` would find something that it spares now.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        let slots = self.slots();
        let layers = slots.values().filter_map(|slot| match slot {
            Slot::Complete { refs: 0, keep_until, .. } => *keep_until,
            Slot::Complete { .. } | Slot::Working(_) => None,
        });
        layers.chain(self.spools.next_expiry()).min()
    }

    /// What all complete layers take, and those that are not gone yet.
    pub(crate) fn usage(&self) -> Usage {
        let mut usage = self.rubbish.usage();
        for slot in self.slots().values() {
            if let Slot::Complete { meta, .. } = slot {
                usage.bytes += meta.bytes;
                usage.inodes += meta.inodes;
            }
        }
        usage
    }

    /// What is known of a complete layer.
    pub(crate) fn meta(&self, diff_id: &Digest) -> Option<Meta> {
        match self.slots().get(diff_id) {
            Some(Slot::Complete { meta, .. }) => Some(meta.clone()),
            _ => None,
        }
    }

    /// Puts an unpacked layer in its place. One flush serves all that wait for one: the first in the queue does it.
    async fn commit(&self, workshop: Workshop, meta: Meta) -> Result<(), LayerError> {
        let (done, mut result) = oneshot::channel();
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(Pending { workshop, meta, done });
        let _turn = self.committing.lock().await;
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
        if let Some(Slot::Complete { refs, keep_until, .. }) = self.slots().get_mut(diff_id) {
            *refs = refs.saturating_sub(1);
            if *refs == 0 {
                *keep_until = keep.then(|| Instant::now() + KEEP);
            }
        }
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<Digest, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right and duty to unpack one layer.
struct Working {
    layers: Arc<Layers>,
    diff_id: Digest,
    complete: bool,
    /// Closes when dropped, which wakes those who wait.
    _wake: watch::Sender<()>,
}

// === impl Working ===

impl Working {
    fn begin(layers: &Arc<Layers>, diff_id: Digest) -> Result<Working, watch::Receiver<()>> {
        let mut slots = layers.slots();
        match slots.get(&diff_id) {
            Some(Slot::Working(other)) => Err(other.clone()),
            // Completed since the caller looked: a closed channel sends him to look again.
            Some(Slot::Complete { .. }) => Err(watch::channel(()).1),
            None => {
                let (wake, working) = watch::channel(());
                slots.insert(diff_id, Slot::Working(working));
                Ok(Working { layers: layers.clone(), diff_id, complete: false, _wake: wake })
            }
        }
    }

    fn complete(mut self, meta: Meta) -> Lease {
        self.complete = true;
        let slot = Slot::Complete { meta, refs: 1, keep_until: None };
        self.layers.slots().insert(self.diff_id, slot);
        Lease { layers: self.layers.clone(), diff_id: self.diff_id, keep: false }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        if self.complete {
            return;
        }
        let mut slots = self.layers.slots();
        // A pull cancelled just after the rename leaves a layer that is good; it is unused, and known so.
        let slot = read_meta(&self.layers.layers.join(self.diff_id.short())).map(|meta| Slot::Complete {
            meta,
            refs: 0,
            keep_until: Some(Instant::now() + KEEP),
        });
        match slot {
            Some(slot) => slots.insert(self.diff_id, slot),
            None => slots.remove(&self.diff_id),
        };
    }
}

// === impl Lease ===

impl Lease {
    /// Whose reference this is.
    pub(crate) fn diff_id(&self) -> Digest {
        self.diff_id
    }

    /// When let go of, the layer stays a while for the next try.
    pub(crate) fn keep(&mut self) {
        self.keep = true;
    }

    /// The reference is a record's from now on.
    pub(crate) fn into_record(self) {
        if let Some(Slot::Complete { refs, .. }) = self.layers.slots().get_mut(&self.diff_id) {
            // Dropping takes away the one that this adds.
            *refs += 1;
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.layers.drop_reference(&self.diff_id, self.keep);
    }
}

// === impl Workshop ===

impl Workshop {
    /// The directory to unpack into.
    pub(crate) fn files(&self) -> PathBuf {
        self.path.join(disk::FILES)
    }

    /// Where the recipe for the layer's archive goes.
    pub(crate) fn recipe(&self) -> PathBuf {
        self.path.join(disk::RECIPE)
    }

    /// Removes it here and now, for whoever is on a thread that may block.
    pub(crate) fn discard(self) {
        clear(&self.path);
    }
}

fn clear(path: &Path) {
    if let Err(error) = remove_tree(path) {
        tracing::warn!(error = crate::error::report(&error), "cannot remove a half-unpacked layer");
    }
}

impl Drop for Workshop {
    fn drop(&mut self) {
        if !self.path.exists() {
            return;
        }
        // In a task that was cancelled, removing thousands of files must not hold up the others.
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

//! The trash: removed layers that are being deleted in the background. Its directory is `rubbish/`.
//!
//! A removed layer is renamed into the trash directory and deleted by a few threads. Deleting may take
//! seconds for a large image, for example on a disk that discards freed blocks. The next process
//! deletes the items that a killed process left. Layers in the trash count as disk usage.
//!
//! After a power failure no image may have a layer with missing files. So the trash syncs once between the rename and
//! the deletion. If a rename is lost, its layer is still complete. A removal needs no other sync. If the removal of a
//! record is lost, its image is complete again, or the image is dropped because a layer is missing.
//!
//! A removal itself does not wait for the sync. A sync waits for a commit of the file system's journal, and
//! the commit waits for discards of earlier deletions. The thread that deletes next syncs once for all layers
//! that were renamed meanwhile.
//!
//! The threads belong to the process, not to the async runtime, which would wait for them at its end.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::disk::{self, FILES, read_meta_anywhere};
use super::{LayerError, Meta};
use crate::image::Usage;

/// Maximum number of deleting threads: disks process several deletions in parallel.
const WORKERS: usize = 4;

/// Makes the renames durable.
type SyncRenames = Box<dyn Fn() -> Result<(), LayerError> + Send + Sync>;

/// The trash directory.
pub(crate) struct Trash {
    directory: PathBuf,
    sync_renames: SyncRenames,
    state: Mutex<State>,
    /// Number of items whose deletion is not finished. A failed deletion counts as finished.
    left: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Renamed, but the rename is not durable yet.
    unsynced: Vec<Item>,
    /// A thread is making earlier renames durable.
    syncing: bool,
    /// Ready to be deleted.
    deletable: VecDeque<Item>,
    workers: usize,
    usage: Usage,
}

/// A directory in the trash.
pub(super) struct Item {
    path: PathBuf,
    usage: Usage,
}

/// A thread's next step.
enum Work {
    Sync(Vec<Item>),
    Delete(Item),
}

// === impl Trash ===

impl Trash {
    /// Opens the trash of a store and starts to delete its content.
    pub(super) fn open(root: &Path, sync_renames: SyncRenames) -> Result<Arc<Trash>, LayerError> {
        let directory = root.join("rubbish");
        disk::make_private(&directory)?;
        let (state, left) = (Mutex::default(), watch::Sender::new(0));
        let trash = Arc::new(Trash { directory, sync_renames, state, left });
        let list = |source| LayerError::Disk { verb: "list", path: trash.directory.clone(), source };
        let mut left = Vec::new();
        for entry in std::fs::read_dir(&trash.directory).map_err(list)? {
            let entry = entry.map_err(list)?;
            let number = entry.file_name().to_str().and_then(|name| name.parse::<u64>().ok());
            let mut state = trash.state();
            state.next = state.next.max(number.map_or(0, |number| number + 1));
            drop(state);
            left.push(trash.item(entry.path(), read_meta_anywhere(&entry.path()).as_ref()));
        }
        trash.delete(left);
        Ok(trash)
    }

    /// Renames a directory into the trash. Deletion starts with [`Trash::delete`].
    pub(super) fn move_in(&self, from: &Path, meta: Option<&Meta>) -> Result<Item, LayerError> {
        let to = {
            let mut state = self.state();
            state.next += 1;
            self.directory.join((state.next - 1).to_string())
        };
        std::fs::rename(from, &to).map_err(|source| LayerError::Disk {
            verb: "move away",
            path: from.to_owned(),
            source,
        })?;
        Ok(self.item(to, meta))
    }

    fn item(&self, path: PathBuf, meta: Option<&Meta>) -> Item {
        let usage = meta.map(|meta| Usage { bytes: meta.bytes, inodes: meta.inodes }).unwrap_or_default();
        let mut state = self.state();
        state.usage.bytes += usage.bytes;
        state.usage.inodes += usage.inodes;
        self.left.send_modify(|left| *left += 1);
        Item { path, usage }
    }

    /// Starts to delete items, and returns.
    pub(super) fn delete(self: &Arc<Trash>, items: Vec<Item>) {
        let mut state = self.state();
        state.unsynced.extend(items);
        if !self.start_threads(&mut state) {
            drop(state);
            self.work();
        }
    }

    /// Starts as many threads as there is work for. Returns false if no thread runs.
    fn start_threads(self: &Arc<Trash>, state: &mut State) -> bool {
        while state.workers < (state.unsynced.len() + state.deletable.len()).min(WORKERS) {
            let trash = self.clone();
            let thread = std::thread::Builder::new().name("trash".to_owned());
            state.workers += 1;
            if let Err(error) = thread.spawn(move || trash.work()) {
                tracing::debug!(%error, "cannot start a thread to delete layers");
                // The running threads do all the work. If no thread runs, the caller does the work.
                let is_only_thread = state.workers == 1;
                state.workers -= usize::from(!is_only_thread);
                return !is_only_thread;
            }
        }
        true
    }

    /// Waits until every item is deleted, or its deletion has failed.
    pub(crate) async fn wait_until_empty(&self) {
        let mut left = self.left.subscribe();
        // `self` owns the sender, so this cannot fail.
        drop(left.wait_for(|left| *left == 0).await);
    }

    /// Disk usage of the trash.
    pub(super) fn usage(&self) -> Usage {
        self.state().usage
    }

    fn work(self: &Arc<Trash>) {
        while let Some(work) = self.next() {
            match work {
                Work::Sync(items) => self.sync(items),
                Work::Delete(item) => self.remove(&item),
            }
        }
    }

    /// The next step. Deleting comes before syncing, so that one sync serves more items. `None` ends the
    /// thread.
    fn next(&self) -> Option<Work> {
        let mut state = self.state();
        if let Some(item) = state.deletable.pop_front() {
            return Some(Work::Delete(item));
        }
        if !state.syncing && !state.unsynced.is_empty() {
            state.syncing = true;
            return Some(Work::Sync(std::mem::take(&mut state.unsynced)));
        }
        state.workers -= 1;
        None
    }

    fn sync(self: &Arc<Trash>, items: Vec<Item>) {
        let synced = (self.sync_renames)();
        let mut state = self.state();
        state.syncing = false;
        match synced {
            Ok(()) => {
                state.deletable.extend(items);
                self.start_threads(&mut state);
            }
            Err(error) => {
                drop(state);
                // If the layers were deleted now, they could reappear incomplete after a power failure. They still
                // count as usage; the next start deletes them.
                tracing::warn!(
                    error = crate::error::report(&error),
                    layers = items.len(),
                    "cannot delete layers"
                );
                self.left.send_modify(|left| *left -= items.len());
            }
        }
    }

    fn remove(&self, item: &Item) {
        // The metadata file is deleted last, because it has the layer's size.
        let deleted = disk::remove_tree(&item.path.join(FILES)).and_then(|()| disk::remove_tree(&item.path));
        if let Err(error) = deleted {
            // The directory still exists and counts as usage. The next start deletes it.
            tracing::warn!(error = crate::error::report(&error), "cannot delete a layer");
        } else {
            let mut state = self.state();
            state.usage.bytes -= item.usage.bytes;
            state.usage.inodes -= item.usage.inodes;
        }
        self.left.send_modify(|left| *left -= 1);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    fn discard(trash: &Arc<Trash>, root: &Path, name: &str) {
        let old = root.join(name);
        std::fs::create_dir_all(old.join(FILES)).unwrap();
        std::fs::write(old.join(FILES).join("file"), name).unwrap();
        let item = trash.move_in(&old, None).unwrap();
        trash.delete(vec![item]);
    }

    fn left(root: &Path) -> usize {
        std::fs::read_dir(root.join("rubbish")).unwrap().count()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn layers_discarded_during_a_sync_share_the_next_one_and_are_deleted_after_it() {
        let root = tempfile::tempdir().unwrap();
        let (began, begins) = mpsc::channel();
        let (go, gone_on) = mpsc::channel::<()>();
        let gone_on = Mutex::new(gone_on);
        let sync = move || {
            began.send(()).unwrap();
            gone_on.lock().unwrap().recv().unwrap();
            Ok(())
        };
        let trash = Trash::open(root.path(), Box::new(sync)).unwrap();
        discard(&trash, root.path(), "first");
        begins.recv().unwrap();
        (0..20).for_each(|number| discard(&trash, root.path(), &number.to_string()));
        assert_eq!(left(root.path()), 21);
        go.send(()).unwrap();
        begins.recv().unwrap();
        coracle_testing::until("the first layer is deleted", 10, || left(root.path()) == 20).await;
        go.send(()).unwrap();
        trash.wait_until_empty().await;
        assert_eq!(left(root.path()), 0);
        assert!(begins.try_recv().is_err(), "two syncs for 21 layers");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn layers_whose_rename_cannot_be_synced_stay_for_the_next_start() {
        let root = tempfile::tempdir().unwrap();
        let tries = Arc::new(AtomicUsize::new(0));
        let tried = tries.clone();
        let refuse = move || {
            tried.fetch_add(1, Ordering::SeqCst);
            Err(LayerError::Stopped)
        };
        let trash = Trash::open(root.path(), Box::new(refuse)).unwrap();
        discard(&trash, root.path(), "a");
        trash.wait_until_empty().await;
        assert_eq!((tries.load(Ordering::SeqCst), left(root.path())), (1, 1));
        let trash = Trash::open(root.path(), Box::new(|| Ok(()))).unwrap();
        trash.wait_until_empty().await;
        assert_eq!(left(root.path()), 0);
    }
}

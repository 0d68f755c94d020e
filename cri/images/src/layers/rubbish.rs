//! Layers that nobody needs any more, on their way off the disk.
//!
//! What is thrown away is renamed into a directory of its own, where nobody looks for layers, and deleted by a few
//! threads: how long that takes is the disk's affair (one that discards what is freed may take seconds for a large
//! image). What a killed process left here is deleted by the next one. Until it is gone it counts as used.
//!
//! What a power cut must not leave is an image with a layer that has lost files. So one sync stands between renaming
//! and deleting: a layer whose old name may come back is whole. It is the only one that a removal needs. A record
//! whose own removal did not last brings its image back whole, or finds a layer missing, and is dropped then. So
//! whoever removes waits for no sync, and the thread that deletes next syncs once for all that came meanwhile: a sync
//! waits for a commit of the file system's journal, and behind it for the disk to discard what was deleted before.
//!
//! The threads are the process's own and not the async runtime's, which would wait for them at its end.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::disk::{self, FILES, read_meta_anywhere};
use super::{LayerError, Meta};
use crate::image::Usage;

/// Directories that are deleted at a time: such a disk does several at once.
const WORKERS: usize = 4;

/// Has it last that what was thrown away is not at its old place any more.
type MakeLast = Box<dyn Fn() -> Result<(), LayerError> + Send + Sync>;

/// The directory of what is thrown away.
pub(crate) struct Rubbish {
    directory: PathBuf,
    make_last: MakeLast,
    state: Mutex<State>,
    /// How many are not gone yet.
    left: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// What may be at its old place after a power cut.
    thrown: Vec<Item>,
    /// Somebody makes what was thrown away before last.
    syncing: bool,
    /// What may be deleted.
    waiting: VecDeque<Item>,
    workers: usize,
    usage: Usage,
}

/// Something thrown away.
pub(super) struct Item {
    path: PathBuf,
    usage: Usage,
}

/// What a thread does next.
enum Work {
    Sync(Vec<Item>),
    Delete(Item),
}

// === impl Rubbish ===

impl Rubbish {
    /// Opens the directory below a store's, and begins to delete what is in it.
    pub(super) fn open(root: &Path, make_last: MakeLast) -> Result<Arc<Rubbish>, LayerError> {
        let directory = root.join("rubbish");
        disk::make_private(&directory)?;
        let (state, left) = (Mutex::default(), watch::Sender::new(0));
        let rubbish = Arc::new(Rubbish { directory, make_last, state, left });
        let list = |source| LayerError::Disk { verb: "list", path: rubbish.directory.clone(), source };
        let mut left = Vec::new();
        for entry in std::fs::read_dir(&rubbish.directory).map_err(list)? {
            let entry = entry.map_err(list)?;
            let number = entry.file_name().to_str().and_then(|name| name.parse::<u64>().ok());
            let mut state = rubbish.state();
            state.next = state.next.max(number.map_or(0, |number| number + 1));
            drop(state);
            left.push(rubbish.item(entry.path(), read_meta_anywhere(&entry.path()).as_ref()));
        }
        rubbish.delete(left);
        Ok(rubbish)
    }

    /// Takes a directory out of the way, in one step, to be deleted next.
    pub(super) fn throw(&self, from: &Path, meta: Option<&Meta>) -> Result<Item, LayerError> {
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

    /// Begins to delete what was thrown away, and returns.
    pub(super) fn delete(self: &Arc<Rubbish>, items: Vec<Item>) {
        let mut state = self.state();
        state.thrown.extend(items);
        if !self.hire(&mut state) {
            drop(state);
            self.work();
        }
    }

    /// As many threads as there is work for. Whether there is one at all.
    fn hire(self: &Arc<Rubbish>, state: &mut State) -> bool {
        while state.workers < (state.thrown.len() + state.waiting.len()).min(WORKERS) {
            let rubbish = self.clone();
            let thread = std::thread::Builder::new().name("rubbish".to_owned());
            state.workers += 1;
            if let Err(error) = thread.spawn(move || rubbish.work()) {
                tracing::debug!(%error, "no thread to delete layers");
                // The others do it all, or the caller in this one's place.
                let alone = state.workers == 1;
                state.workers -= usize::from(!alone);
                return !alone;
            }
        }
        true
    }

    /// Waits until all is gone.
    pub(crate) async fn gone(&self) {
        let mut left = self.left.subscribe();
        // The sender is our own, so that there is no error.
        drop(left.wait_for(|left| *left == 0).await);
    }

    /// What is not gone yet.
    pub(super) fn usage(&self) -> Usage {
        self.state().usage
    }

    fn work(self: &Arc<Rubbish>) {
        while let Some(work) = self.next() {
            match work {
                Work::Sync(items) => self.sync(items),
                Work::Delete(item) => self.remove(&item),
            }
        }
    }

    /// Deleting comes first: the more is thrown away meanwhile, the more one sync is for. None lets the thread go.
    fn next(&self) -> Option<Work> {
        let mut state = self.state();
        if let Some(item) = state.waiting.pop_front() {
            return Some(Work::Delete(item));
        }
        if !state.syncing && !state.thrown.is_empty() {
            state.syncing = true;
            return Some(Work::Sync(std::mem::take(&mut state.thrown)));
        }
        state.workers -= 1;
        None
    }

    fn sync(self: &Arc<Rubbish>, items: Vec<Item>) {
        let synced = (self.make_last)();
        let mut state = self.state();
        state.syncing = false;
        match synced {
            Ok(()) => {
                state.waiting.extend(items);
                self.hire(&mut state);
            }
            Err(error) => {
                drop(state);
                // Deleted now, they could come back in pieces. They count on; the next start tries again.
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
        // The mark goes last: until then it says what the rest takes.
        let deleted = disk::remove_tree(&item.path.join(FILES)).and_then(|()| disk::remove_tree(&item.path));
        if let Err(error) = deleted {
            // It is still there, and counted; the next start tries again.
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
    use std::time::Duration;

    use super::*;

    fn throw(rubbish: &Arc<Rubbish>, root: &Path, name: &str) {
        let old = root.join(name);
        std::fs::create_dir_all(old.join(FILES)).unwrap();
        std::fs::write(old.join(FILES).join("file"), name).unwrap();
        let item = rubbish.throw(&old, None).unwrap();
        rubbish.delete(vec![item]);
    }

    fn left(root: &Path) -> usize {
        std::fs::read_dir(root.join("rubbish")).unwrap().count()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_sync_is_for_all_that_was_thrown_away_while_another_ran_and_nothing_is_deleted_before() {
        let root = tempfile::tempdir().unwrap();
        let (began, begins) = mpsc::channel();
        let (go, gone_on) = mpsc::channel::<()>();
        let gone_on = Mutex::new(gone_on);
        let sync = move || {
            began.send(()).unwrap();
            gone_on.lock().unwrap().recv().unwrap();
            Ok(())
        };
        let rubbish = Rubbish::open(root.path(), Box::new(sync)).unwrap();
        throw(&rubbish, root.path(), "first");
        begins.recv().unwrap();
        (0..20).for_each(|number| throw(&rubbish, root.path(), &number.to_string()));
        assert_eq!(left(root.path()), 21);
        go.send(()).unwrap();
        begins.recv().unwrap();
        while left(root.path()) > 20 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        go.send(()).unwrap();
        rubbish.gone().await;
        assert_eq!(left(root.path()), 0);
        assert!(begins.try_recv().is_err(), "two syncs for 21 layers");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_cannot_be_synced_stays_for_the_next_start() {
        let root = tempfile::tempdir().unwrap();
        let tries = Arc::new(AtomicUsize::new(0));
        let tried = tries.clone();
        let refuse = move || {
            tried.fetch_add(1, Ordering::SeqCst);
            Err(LayerError::Stopped)
        };
        let rubbish = Rubbish::open(root.path(), Box::new(refuse)).unwrap();
        throw(&rubbish, root.path(), "a");
        rubbish.gone().await;
        assert_eq!((tries.load(Ordering::SeqCst), left(root.path())), (1, 1));
        let rubbish = Rubbish::open(root.path(), Box::new(|| Ok(()))).unwrap();
        rubbish.gone().await;
        assert_eq!(left(root.path()), 0);
    }
}

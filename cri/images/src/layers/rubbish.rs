//! Layers that nobody needs any more, on their way off the disk.
//!
//! What is thrown away is renamed into a directory of its own, where nobody looks for layers, and deleted by a few
//! threads: how long that takes is the disk's affair (one that discards what is freed may take seconds for a large
//! image). What a killed process left here is deleted by the next one. Until it is gone it counts as used.
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

/// The directory of what is thrown away.
pub(crate) struct Rubbish {
    directory: PathBuf,
    state: Mutex<State>,
    /// How many are not gone yet.
    left: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    next: u64,
    waiting: VecDeque<Item>,
    workers: usize,
    usage: Usage,
}

/// Something thrown away.
pub(super) struct Item {
    path: PathBuf,
    usage: Usage,
}

// === impl Rubbish ===

impl Rubbish {
    /// Opens the directory below a store's, and begins to delete what is in it.
    pub(super) fn open(root: &Path) -> Result<Arc<Rubbish>, LayerError> {
        let directory = root.join("rubbish");
        disk::make_private(&directory)?;
        let rubbish = Arc::new(Rubbish { directory, state: Mutex::default(), left: watch::Sender::new(0) });
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

    /// Begins to delete what was thrown away, and returns. Its names must be on disk by now: a layer that comes back to
    /// its old place after a power cut must be whole.
    pub(super) fn delete(self: &Arc<Rubbish>, items: Vec<Item>) {
        let mut state = self.state();
        state.waiting.extend(items);
        while state.workers < state.waiting.len().min(WORKERS) {
            let rubbish = self.clone();
            let thread = std::thread::Builder::new().name("rubbish".to_owned());
            state.workers += 1;
            if let Err(error) = thread.spawn(move || rubbish.work()) {
                tracing::debug!(%error, "no thread to delete layers");
                drop(state);
                return self.work();
            }
        }
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

    fn work(&self) {
        loop {
            let item = {
                let mut state = self.state();
                let Some(item) = state.waiting.pop_front() else {
                    state.workers -= 1;
                    return;
                };
                item
            };
            // The mark goes last: until then it says what the rest takes.
            let deleted =
                disk::remove_tree(&item.path.join(FILES)).and_then(|()| disk::remove_tree(&item.path));
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
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! The number of the last delivered event, in a file that stays open. Each delivery costs one write of 20 bytes.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tracing::warn;

use super::item::Item;
use crate::error::Error;
use crate::lock::locked;
use crate::records::remove_record;

/// The file and its contents.
#[derive(Debug)]
pub(super) struct Delivered {
    file: File,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    last: u64,
    /// Records of removed objects, by the numbers of their deletion events.
    removed: BTreeMap<u64, PathBuf>,
}

// === impl Delivered ===

impl Delivered {
    /// Opens the file. An empty or invalid file means that no event was delivered.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = file.map_err(Error::file("open", path))?;
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let last = text.trim().parse().unwrap_or_default();
        Ok(Self { file, state: Mutex::new(State { last, removed: BTreeMap::new() }) })
    }

    pub(super) fn last(&self) -> u64 {
        locked(&self.state).last
    }

    /// Keeps the record of a removed object until its event is delivered.
    pub(super) fn keep(&self, item: &Item) {
        if let Some(record) = &item.removed {
            locked(&self.state).removed.insert(item.number, record.clone());
        }
    }

    /// Sets the number of the last delivered event, or of an event that is dropped. Earlier events are not replayed, even if
    /// their listener disconnected before it received them. So their records are removed, too.
    pub(super) fn set_last(&self, number: u64) {
        let mut state = locked(&self.state);
        if number <= state.last {
            return;
        }
        state.last = number;
        let later = state.removed.split_off(&(number + 1));
        std::mem::replace(&mut state.removed, later).values().for_each(|record| remove_record(record));
        // The text always has the same length, so that it overwrites the previous number.
        if let Err(error) = self.file.write_all_at(format!("{number:020}").as_bytes(), 0) {
            warn!(%error, "cannot record the last delivered event; the next start replays events");
        }
    }
}

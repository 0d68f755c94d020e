//! How far listeners were told, across lives: the number of the last event that one of them took, in a file that stays
//! open. Each costs one write of some bytes, and none when nobody listens.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tracing::warn;

use super::Item;
use crate::error::Error;
use crate::lock::locked;
use crate::records::forget;

/// The file, and what it says.
#[derive(Debug)]
pub(super) struct Delivered {
    file: File,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    last: u64,
    /// Records of what was removed, by the numbers under which that is told.
    removed: BTreeMap<u64, PathBuf>,
}

// === impl Delivered ===

impl Delivered {
    /// One that says nothing that can be read was never written: nobody was told anything.
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

    /// An event is about to be told: the record of what was removed is kept until then.
    pub(super) fn keep(&self, item: &Item) {
        if let Some(record) = &item.removed {
            locked(&self.state).removed.insert(item.number, record.clone());
        }
    }

    /// A listener takes an event, or nobody is to be told of it any more. Those before it are not told again, whether
    /// or not a listener went before it had taken them, so their records go too.
    pub(super) fn pass(&self, number: u64) {
        let mut state = locked(&self.state);
        if number <= state.last {
            return;
        }
        state.last = number;
        let later = state.removed.split_off(&(number + 1));
        std::mem::replace(&mut state.removed, later).values().for_each(|record| forget(record));
        // As long as every other, so that it covers the one before.
        if let Err(error) = self.file.write_all_at(format!("{number:020}").as_bytes(), 0) {
            warn!(%error, "the next start tells again what listeners were told");
        }
    }
}

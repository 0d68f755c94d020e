//! How far listeners were told, across lives: the number of the last event that one of them took, in a file that stays
//! open. Each costs one write of some bytes, and none when nobody listens.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;

use tracing::warn;

use super::Item;
use crate::error::Error;
use crate::lock::locked;
use crate::records::forget;

/// The file, and what it says.
#[derive(Debug)]
pub(super) struct Told {
    file: File,
    last: Mutex<u64>,
}

// === impl Told ===

impl Told {
    /// One that says nothing that can be read was never written: nobody was told anything.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(Error::file("open", path))?;
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let last = text.trim().parse().unwrap_or_default();
        Ok(Self { file, last: Mutex::new(last) })
    }

    pub(super) fn last(&self) -> u64 {
        *locked(&self.last)
    }

    /// A listener takes an event.
    pub(super) fn take(&self, item: &Item) {
        if self.pass(item.number)
            && let Some(record) = &item.removed
        {
            forget(record);
        }
    }

    /// Nobody is to be told what waits.
    pub(super) fn waive<'a>(&self, items: impl Iterator<Item = &'a Item>) {
        let mut last = 0;
        for item in items {
            last = item.number;
            item.removed.iter().for_each(|record| forget(record));
        }
        self.pass(last);
    }

    /// Whether nobody had come so far.
    fn pass(&self, number: u64) -> bool {
        let mut last = locked(&self.last);
        if number <= *last {
            return false;
        }
        *last = number;
        // As long as every other, so that it covers the one before.
        if let Err(error) = self.file.write_all_at(format!("{number:020}").as_bytes(), 0) {
            warn!(%error, "the next start tells again what listeners were told");
        }
        true
    }
}

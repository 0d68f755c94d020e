//! Writes due records in batches, with a back-off after failures.

use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use coracle_backoff::Backoff;
use tokio::sync::watch;

use super::files::{self, NewRecord};
use super::record::context;
use super::{Change, Checkpoint, Key, Kind, State};

/// Delay of a batch, so that further changes join it. The record of a new pod changes again when its start is reported.
pub(super) const COLLECT: Duration = Duration::from_millis(100);
/// Maximum delay of a batch while many pods start. The write of a record and its fsync take a third of a millisecond of
/// processor time. The start of the pods takes precedence.
pub(super) const COLLECT_MAX: Duration = Duration::from_secs(2);
/// First back-off after a batch that could not be written (disk full). It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Maximum number of records of a batch that are open at a time.
pub(super) const OPEN_RECORDS_MAX: usize = 64;

// === impl Checkpoint ===

impl Checkpoint {
    /// Writes due records until dropped. `many_starts` is true while many pods start. A batch then waits for at most
    /// [`COLLECT_MAX`].
    pub(crate) async fn run(self, mut many_starts: watch::Receiver<bool>) {
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        loop {
            self.shared.due.notified().await;
            self.collect(&mut many_starts).await;
            while !self.state().due.is_empty() {
                let writer = self.clone();
                let failed = coracle_threads::spawn_blocking(move || writer.flush()).await.unwrap_or(true);
                if !failed {
                    backoff.reset();
                    continue;
                }
                tokio::time::sleep(backoff.next_delay()).await;
            }
        }
    }

    /// Waits for further changes. A removal, or a change that a caller waits for, ends the wait.
    pub(super) async fn collect(&self, many_starts: &mut watch::Receiver<bool>) {
        let collect = async {
            tokio::time::sleep(COLLECT).await;
            // An error means that the sender was dropped, so no pod starts any more.
            let _ended = many_starts.wait_for(|many| !*many).await;
        };
        let urgent = async {
            while !self.state().is_urgent() {
                self.shared.due.notified().await;
            }
        };
        tokio::select! {
            _late = tokio::time::timeout(COLLECT_MAX, collect) => {}
            () = urgent => {}
        }
    }

    /// Writes due records now. Returns whether a write failed and stays due.
    pub(crate) fn flush(&self) -> bool {
        let _disk = self.shared.disk.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.state();
        state.is_awaited = false;
        let due: Vec<(Key, Arc<Change>)> =
            state.due.iter().map(|(key, change)| (key.clone(), Arc::clone(change))).collect();
        drop(state);
        if due.is_empty() {
            return false;
        }
        let done = self.write(&due);
        let mut state = self.state();
        for (key, change) in done {
            // A newer change of the same record stays due.
            if state.due.get(key).is_some_and(|now| Arc::ptr_eq(now, change)) {
                state.due.remove(key);
            }
        }
        let failed =
            due.iter().any(|(key, change)| state.due.get(key).is_some_and(|now| Arc::ptr_eq(now, change)));
        drop(state);
        self.shared.written.notify_waiters();
        failed
    }

    /// Writes a batch; returns the changes that are done.
    fn write<'a>(&self, batch: &'a [(Key, Arc<Change>)]) -> Vec<(&'a Key, &'a Arc<Change>)> {
        let mut done = Vec::with_capacity(batch.len());
        let mut error = None;
        for part in batch.chunks(OPEN_RECORDS_MAX) {
            let mut new = Vec::with_capacity(part.len());
            for (key, change) in part {
                match self.begin(key, change) {
                    Ok(None) => done.push((key, change)),
                    Ok(Some(record)) => {
                        coracle_fault::point("record.written");
                        new.push((key, change, record));
                    }
                    Err(failure) => error = Some(failure),
                }
            }
            for (key, change, record) in new {
                match record.replace() {
                    Ok(()) => {
                        coracle_fault::point("record.replaced");
                        done.push((key, change));
                    }
                    Err(failure) => error = Some(failure),
                }
            }
        }
        let kinds: std::collections::BTreeSet<Kind> = done.iter().map(|(key, _)| key.kind()).collect();
        for kind in kinds {
            if let Err(failure) = files::sync_dir(&self.shared.dir.join(kind.directory())) {
                error = Some(failure);
                done.retain(|(key, _)| key.kind() != kind);
            }
        }
        if let Some(error) = error {
            let records = batch.len() - done.len();
            tracing::warn!(%error, records, "cannot write checkpoint records, retrying");
        }
        done
    }

    /// Begins a change. Returns the new record, which does not replace the former record yet. `None` if the change is
    /// done.
    fn begin(&self, key: &Key, change: &Change) -> io::Result<Option<NewRecord>> {
        let path = self.path(key);
        let (content, compare) = match change {
            Change::Remove => return files::remove(&path).map(|()| None),
            Change::Write { content, compare } => (content, *compare),
        };
        if compare && self.has_content(key.kind(), &path, content) {
            return Ok(None);
        }
        let sealed = self.shared.keys.seal(content, &context(key.kind(), &path)).map_err(io::Error::other)?;
        NewRecord::write(path, &sealed).map(Some)
    }

    /// Whether a file already has this content.
    fn has_content(&self, kind: Kind, path: &Path, content: &[u8]) -> bool {
        let sealed = files::read(path).ok().flatten();
        sealed.is_some_and(|sealed| {
            let opened = self.shared.keys.open(&sealed, &context(kind, path));
            opened.is_ok_and(|held| held == content) && self.shared.keys.is_current(&sealed)
        })
    }
}

// === impl State ===

impl State {
    /// Whether to write at once: a caller waits for a due change, or a removal is due.
    fn is_urgent(&self) -> bool {
        self.is_awaited || self.due.values().any(|change| matches!(**change, Change::Remove))
    }
}

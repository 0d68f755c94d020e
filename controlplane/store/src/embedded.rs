//! The embedded store, on fjall.
//!
//! One thread (`writer`) makes all commits. It checks the waiting writes, syncs them with one fdatasync and publishes
//! them. So commits are ordered, and concurrent commits share a sync. fjall writes less to flash storage than SQLite
//! and redb: a durable commit of a 1.5 kB object writes 5.7 kB to disk, compared with 19 kB (SQLite) and 40 kB (redb).
//! Of the three, fjall also has the lowest latency.

mod engine;
mod inspect;
mod migrate;
mod restore;
mod space;
mod state;
mod writer;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, mpsc},
};

use futures::future::BoxFuture;
use tokio::sync::oneshot;

use crate::{
    Backup, BackupHead, Entry, Error, Health, Page, Range, ReadablePage, Sealing, Store, Tier, Unreadable,
    Watch, Write,
    codec::{EntryCodec, FailedServices},
};
use engine::Engine;
pub use restore::restore;
use space::SpaceReserves;
use state::State;

/// Number of revisions that are reserved on disk in one step. Volatile commits are not written to disk. So after a
/// restart the counter continues at the end of the reservation. No earlier commit has a greater revision.
const RESERVED: u64 = 1 << 16;

/// Settings of the embedded store.
#[derive(Debug)]
pub struct EmbeddedOptions {
    /// Maximum number of recent commits that are kept. Fewer are kept if their values exceed 4 MiB. A watch can start
    /// at a revision if all later commits are kept.
    pub history: usize,
    /// The encryption of values on disk. `None` means no encryption.
    pub sealing: Option<Sealing>,
}

impl Default for EmbeddedOptions {
    fn default() -> Self {
        Self { history: 256, sealing: None }
    }
}

/// A store in its own directory.
pub struct Embedded {
    shared: Arc<Shared>,
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// The state that the writer thread and readers share.
struct Shared {
    path: PathBuf,
    codec: Arc<EntryCodec>,
    /// The database. `None` while the writer reopens the database after a failure.
    engine: RwLock<Option<Engine>>,
    state: Mutex<State>,
    /// The reason why the engine refuses writes. `None` if the engine accepts writes.
    failure: Mutex<Option<String>>,
}

/// A write for the writer thread.
struct Job {
    write: Write,
    done: oneshot::Sender<Result<u64, Error>>,
}

impl Embedded {
    /// Opens the store in `path`, or creates it. Before that, entries that must be encrypted, but are not encrypted
    /// with the first key, are encrypted with the first key. This needs disk space for a copy of the store.
    ///
    /// # Errors
    /// [`Error::Locked`], [`Error::Corrupt`], [`Error::Open`], [`Error::Read`], [`Error::Sealed`] if a key is missing,
    /// or [`Error::Sync`] if the encrypted copy may not survive a power failure.
    pub fn open(path: &Path, options: EmbeddedOptions) -> Result<Self, Error> {
        let failed = |source| Error::Open { path: path.to_owned(), source };
        make_directory(path).map_err(failed)?;
        // The files beside the store are on the store's disk, also if the path is a symbolic link.
        let path = &path.canonicalize().map_err(failed)?;
        let codec = Arc::new(EntryCodec(options.sealing));
        remove_leftovers(path).map_err(failed)?;
        let mut engine = open_locked(path, &codec)?;
        match migrate::migrate(path, &engine, &codec) {
            Ok(false) => {}
            Ok(true) => {
                drop(engine);
                engine = open_locked(path, &codec)?;
                coracle_fault::point("store.migrate.opened");
                // The replaced store may have the values in plain text.
                migrate::remove(&migrate::sibling(path, ".sealing")).map_err(failed)?;
                coracle_fault::point("store.migrate.removed");
            }
            // After [`Error::Sync`] the engine still has the replaced store open.
            Err(error @ (Error::Sealed { .. } | Error::Read { .. } | Error::Sync { .. })) => {
                return Err(error);
            }
            // The disk has no space for the copy, or the file system cannot exchange directories. The entries stay
            // readable.
            Err(error) => tracing::warn!(%error, "cannot encrypt the entries of an earlier version"),
        }
        Self::run(path, codec, engine, options.history)
    }

    fn run(path: &Path, codec: Arc<EntryCodec>, mut engine: Engine, history: usize) -> Result<Self, Error> {
        let failed = |source| Error::Open { path: path.to_owned(), source };
        let mut space = SpaceReserves::new(path);
        let start = engine.reserved(path)?;
        if let Err(error) = engine.reserve(start + RESERVED) {
            tracing::warn!(%error, "cannot write to the store; opening it again with its reserve of disk space");
            drop(engine);
            space.release();
            engine = Engine::open(path, codec.clone())?;
            engine.reserve(start + RESERVED).map_err(|error| failed(std::io::Error::other(error)))?;
        }
        // Warns at the start if the disk is full.
        space.is_full();
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            codec,
            engine: RwLock::new(Some(engine)),
            state: Mutex::new(State::new(start, start + RESERVED, history)),
            failure: Mutex::new(None),
        });
        let (jobs, queue) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("store".to_owned())
            .spawn({
                let shared = shared.clone();
                move || writer::Writer::new(&shared, space).run(&queue)
            })
            .map_err(failed)?;
        Ok(Self { shared, jobs: Some(jobs), thread: Some(thread) })
    }
}

/// Removes the files of an interrupted restore beside the store. The files are kept while another process holds the
/// store's lock. Otherwise a running restore would lose its files, and then replace the store by an incomplete store.
fn remove_leftovers(path: &Path) -> std::io::Result<()> {
    let Ok(_lock) = restore::lock(path) else { return Ok(()) };
    let remains = migrate::sibling(path, restore::RESTORING);
    if remains.exists() {
        tracing::warn!(path = %remains.display(), "repaired: removed the remains of an interrupted restore");
    }
    migrate::remove(&remains)
}

/// Opens the engine, and checks that it has the lock of the store at this path.
fn open_locked(path: &Path, codec: &Arc<EntryCodec>) -> Result<Engine, Error> {
    let engine = Engine::open(path, codec.clone())?;
    restore::check_locked(path)?;
    Ok(engine)
}

fn make_directory(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

impl Drop for Embedded {
    fn drop(&mut self) {
        // When the sender is dropped, the writer ends after the queued writes.
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Store for Embedded {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Entry>, Error>> {
        Box::pin(async move { self.shared.get(key) })
    }

    fn revision_of<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<u64>, Error>> {
        Box::pin(async move { self.shared.revision_of(key) })
    }

    fn list(&self, range: Range) -> BoxFuture<'_, Result<Page, Error>> {
        Box::pin(async move { self.shared.list_readable(&range)?.complete() })
    }

    fn list_readable(&self, range: Range) -> BoxFuture<'_, Result<ReadablePage, Error>> {
        Box::pin(async move { self.shared.list_readable(&range) })
    }

    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, Error>> {
        Box::pin(async move {
            // The writer must not wait for a key management service, and a value that it cannot encrypt fails its
            // batch.
            if write.tier == Tier::Durable && write.value.is_some() {
                self.shared.codec.ready(&write.key)?;
            }
            let (done, outcome) = oneshot::channel();
            let jobs = self.jobs.as_ref().ok_or(Error::Closed)?;
            jobs.send(Job { write, done }).map_err(|_closed| Error::Closed)?;
            outcome.await.map_err(|_closed| Error::Closed)?
        })
    }

    fn watch<'a>(&'a self, prefix: &'a str, after: u64) -> BoxFuture<'a, Result<Watch, Error>> {
        Box::pin(async move { self.shared.lock().watch(prefix, after) })
    }

    fn compact(&self, revision: u64) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async move { self.shared.lock().compact(revision) })
    }

    fn revision(&self) -> BoxFuture<'_, Result<u64, Error>> {
        Box::pin(async move { Ok(self.shared.lock().revision()) })
    }

    fn health(&self) -> Health {
        match self.shared.failure() {
            Some(failure) => Health::Failed(failure),
            None => space::health(&self.shared.path),
        }
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn size(&self) -> Option<u64> {
        self.shared.read(|engine| Ok(engine.size())).ok().flatten()
    }

    fn is_current<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, Error>> {
        Box::pin(async move {
            let is_outdated = self.shared.codec.may_be_outdated(key)
                && !self.shared.read(|engine| engine.is_current(key))?;
            Ok(!is_outdated)
        })
    }

    fn backup(&self) -> Result<Backup, Error> {
        // The writer holds this lock while it commits, so the snapshot and the revision are consistent.
        let state = self.shared.lock();
        let head = BackupHead { revision: state.revision(), reserved: state.reserved };
        let records = self.shared.read(|engine| Ok(engine.snapshot()))?;
        drop(state);
        Ok(Backup::new(head, records))
    }
}

// === impl Shared ===

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the function with the open database, which is not closed during the call.
    fn read<T>(&self, read: impl FnOnce(&Engine) -> Result<T, Error>) -> Result<T, Error> {
        let engine = self.engine.read().unwrap_or_else(PoisonError::into_inner);
        let closed = || Error::Read {
            detail: self.failure().unwrap_or_else(|| "the database is being opened again".to_owned()),
        };
        read(engine.as_ref().ok_or_else(closed)?)
    }

    /// Replaces the database after the running reads. `None` closes it.
    fn replace_engine(&self, engine: Option<Engine>) {
        *self.engine.write().unwrap_or_else(PoisonError::into_inner) = engine;
    }

    fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_failure(&self, failure: Option<String>) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = failure;
    }

    fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        if let Some(entry) = self.lock().volatile(key) {
            return Ok(Some(entry));
        }
        self.read(|engine| engine.get(key))
    }

    fn revision_of(&self, key: &str) -> Result<Option<u64>, Error> {
        if let Some(entry) = self.lock().volatile(key) {
            return Ok(Some(entry.modified));
        }
        Ok(self.read(|engine| engine.revisions(key))?.map(|revisions| revisions.modified))
    }

    /// The entries of a range, and separately those that cannot be decrypted.
    fn list_readable(&self, range: &Range) -> Result<ReadablePage, Error> {
        let start = if range.start > range.prefix { &range.start } else { &range.prefix };
        let limit = if range.limit == 0 { usize::MAX } else { range.limit };
        // The writer holds this lock while it commits. With the lock, both tiers and the revision are from the
        // same moment.
        let state = self.lock();
        let entries = state.volatile_from(start, &range.prefix);
        let mut found = Found { entries, unreadable: Vec::new() };
        let mut sealed = Vec::new();
        self.read(|engine| {
            engine.scan(start, &range.prefix, |key, bytes| {
                if self.codec.may_wait(bytes) {
                    sealed.push((key.to_owned(), bytes.to_vec()));
                    return Ok(());
                }
                found.add(key, bytes, self.codec.decode(key, bytes))
            })
        })?;
        let revision = state.revision();
        drop(state);
        // This runs without the lock, because a key management service that does not respond must not delay writes.
        let mut failed = FailedServices::default();
        for (key, bytes) in sealed {
            let decoded = self.codec.decode_in_pass(&mut failed, &key, &bytes);
            found.add(&key, &bytes, decoded)?;
        }
        let Found { mut entries, unreadable } = found;
        entries.sort_by(|left, right| left.key.cmp(&right.key));
        let more = entries.len() > limit;
        entries.truncate(limit);
        Ok(ReadablePage { page: Page { entries, revision, more }, unreadable })
    }
}

/// The entries that a list has read.
struct Found {
    /// The entries that can be decrypted.
    entries: Vec<Entry>,
    /// The other entries.
    unreadable: Vec<Unreadable>,
}

// === impl Found ===

impl Found {
    /// Adds an entry. `decoded` is the result of its decoding.
    ///
    /// # Errors
    /// The decoding failed for another reason than the encryption.
    fn add(&mut self, key: &str, bytes: &[u8], decoded: Result<Option<Entry>, Error>) -> Result<(), Error> {
        match decoded {
            Ok(entry) => self.entries.extend(entry),
            Err(error @ Error::Sealed { .. }) => {
                let modified = EntryCodec::revisions(bytes).map_or(0, |revisions| revisions.modified);
                self.unreadable.push(Unreadable { key: key.into(), modified, error });
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

#[cfg(test)]
mod disk_tests;
#[cfg(test)]
mod migrate_tests;
#[cfg(test)]
mod tests;

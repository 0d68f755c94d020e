//! The image store: what is here, by which names, and who uses it.

mod held;

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use crate::config::ImagesConfig;
use crate::digest::Digest;
use crate::error::Error;
use crate::image::{Image, Standing, Usage};
use crate::layers::{LayerError, Layers, Lease};
use crate::manifest::{self, ParsedConfig};
use crate::pull::Flights;
use crate::records::{self, Record, RecordError};
use crate::table::{self, Table};

pub use self::held::Held;

/// The store of images of one node.
#[derive(Clone)]
pub struct Images {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) config: ImagesConfig,
    pub(crate) layers: Arc<Layers>,
    pub(crate) flights: Flights,
    /// Layers that all pulls together fetch at a time.
    pub(crate) fetching: tokio::sync::Semaphore,
    directory: PathBuf,
    records: PathBuf,
    table: RwLock<Table>,
    /// Taken by whoever changes records: the disk and the table change as one.
    writing: tokio::sync::Mutex<()>,
    /// Told when an image or a name of one came or went.
    changes: watch::Sender<()>,
    runtime: tokio::runtime::Handle,
    sweep_due: AtomicBool,
    _lock: File,
}

/// Why the store cannot be opened or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("another process has it open ({} is locked)", path.display())]
    Locked { path: PathBuf },
    #[error("cannot lock {}", path.display())]
    Lock {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("this kernel cannot resolve paths within a directory (openat2, Linux 5.6)")]
    Kernel,
    #[error("the process is shutting down")]
    Stopped,
}

/// An image whose layers are all here, about to get its record.
pub(crate) struct Ready {
    pub(crate) id: Digest,
    pub(crate) tags: Vec<String>,
    pub(crate) digests: Vec<String>,
    pub(crate) size: u64,
    pub(crate) config: String,
    pub(crate) parsed: ParsedConfig,
    /// One for each layer, lowest first, none twice.
    pub(crate) leases: Vec<Lease>,
}

/// How long [`Images::given_back`] waits for the disk.
const SPACE_WITHIN: Duration = Duration::from_millis(500);
/// Layers that all pulls together fetch at a time: what bounds the memory of a node that pulls twenty images.
const FETCHING: usize = 8;

// === impl Images ===

impl Images {
    /// Opens the store, making it if it is not there, and puts right what an unclean stop left: half-unpacked
    /// layers go, unreadable records are set aside with a warning, images that miss a layer are dropped.
    ///
    /// # Errors
    /// When the directory cannot be made or read, or another process has it open.
    pub async fn open(config: ImagesConfig) -> Result<Images, Error> {
        let path = config.root.join("images");
        let runtime = tokio::runtime::Handle::current();
        let opened = blocking(move || Inner::open(config, runtime)).await;
        let inner = opened.map_err(|source| Error::Open { path, source: source.into() })?;
        let images = Images { inner: Arc::new(inner) };
        images.schedule_sweep();
        Ok(images)
    }

    /// Finds an image by name, by id or by an unambiguous beginning of its id.
    #[must_use]
    pub fn get(&self, name_or_id: &str) -> Option<Image> {
        self.table().find(name_or_id).map(|entry| entry.image.clone())
    }

    /// All images, by id.
    #[must_use]
    pub fn list(&self) -> Vec<Image> {
        let mut images: Vec<Image> = self.table().list().map(|entry| entry.image.clone()).collect();
        images.sort_by(|a, b| a.id.cmp(&b.id));
        images
    }

    /// How long an image has been here and unused, and what it takes.
    #[must_use]
    pub fn standing(&self, name_or_id: &str) -> Option<Standing> {
        let (record, held) =
            self.table().find(name_or_id).map(|entry| (entry.record.clone(), entry.held > 0))?;
        let bytes = |id| self.inner.layers.meta(id).map_or(0, |meta| meta.bytes);
        let mut layer_bytes: Vec<u64> = record.layers.iter().rev().map(bytes).collect();
        if layer_bytes.is_empty() {
            // The empty one that stands for none.
            layer_bytes.push(0);
        }
        let used = if held { SystemTime::now() } else { records::time(record.used) };
        Some(Standing { pulled: records::time(record.pulled), used, held, layer_bytes })
    }

    /// Changes whenever an image or a name of one comes or goes; several changes at once may be seen as one.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.inner.changes.subscribe()
    }

    /// Removes an image, by any of its names or its id, with all of its names. One that is not there is removed
    /// already. Its layers go when no other image and no [`Held`] needs them: at once from the store, and from the disk
    /// as fast as that can, which [`Images::given_back`] and [`Images::settled`] wait for. A power cut right after it
    /// may bring the image back whole, and never in part.
    ///
    /// # Errors
    /// When the disk refuses.
    pub async fn remove(&self, name_or_id: &str) -> Result<(), Error> {
        let images = self.clone();
        let name = name_or_id.to_owned();
        // In a task of its own: a caller that goes away must not leave disk and table apart.
        let removed = self.inner.runtime.spawn(async move { images.remove_now(&name).await }).await;
        removed.unwrap_or(Err(StoreError::Stopped)).map_err(|e| change("remove", name_or_id, e))
    }

    /// Waits until what was removed is off the disk, but not for a slow one: for who is about to ask how much is free.
    pub async fn given_back(&self) {
        let _goes_on = tokio::time::timeout(SPACE_WITHIN, self.settled()).await;
    }

    /// Waits until all that was removed is off the disk.
    pub async fn settled(&self) {
        self.inner.layers.rubbish.gone().await;
    }

    /// What the store takes of its file system, also of what was removed and is not off the disk yet.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.inner.layers.usage()
    }

    /// Removes what nobody needs any more: images that were removed while held and are no longer, and layers of
    /// pulls that never came to an end. To be called once after a restart, when all ids in use are held again.
    ///
    /// # Errors
    /// When the disk refuses.
    pub async fn collect(&self) -> Result<(), Error> {
        self.collect_now().await.map_err(|e| change("clean up after", "store", e))
    }

    /// The directory whose file system holds the images.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.inner.directory
    }

    /// Records an image. From here on it is there.
    pub(crate) async fn put(&self, ready: Ready) -> Result<Image, StoreError> {
        let images = self.clone();
        let put = self.inner.runtime.spawn(async move { images.put_now(ready).await }).await;
        put.unwrap_or(Err(StoreError::Stopped))
    }

    /// Removes unused layers, as a failed pull leaves them; says so in the log when that fails.
    pub(crate) async fn tidy(&self) {
        if let Err(error) = self.sweep().await {
            tracing::warn!(error = crate::error::report(&error), "cannot remove unused layers");
        }
    }

    /// Removes, when its time has come, what a broken pull left for another try.
    pub(crate) fn schedule_sweep(&self) {
        let Some(due) = self.inner.layers.next_expiry() else { return };
        if self.inner.sweep_due.swap(true, Ordering::AcqRel) {
            return;
        }
        let weak = Arc::downgrade(&self.inner);
        self.inner.runtime.spawn(async move {
            tokio::time::sleep_until(due.into()).await;
            let Some(inner) = weak.upgrade() else { return };
            inner.sweep_due.store(false, Ordering::Release);
            let images = Images { inner };
            images.tidy().await;
            images.schedule_sweep();
        });
    }

    async fn put_now(&self, ready: Ready) -> Result<Image, StoreError> {
        let _turn = self.inner.writing.lock().await;
        let record = Record {
            version: records::VERSION,
            id: ready.id,
            tags: ready.tags,
            digests: ready.digests,
            layers: ready.leases.iter().map(Lease::diff_id).collect(),
            size: ready.size,
            config: ready.config,
            removed: false,
            generation: 0,
            pulled: now(),
            used: now(),
        };
        let unchanged = self.table_mut().entry_mut(&record.id).and_then(|old| {
            says_the_same(&old.record, &record).then(|| {
                old.record.pulled = record.pulled;
                (old.image.clone(), held::note(old))
            })
        });
        if let Some((image, noted)) = unchanged {
            self.note_use(noted);
            return Ok(image);
        }
        let (records, known) = {
            let mut table = self.table_mut();
            let known = table.entry(&record.id).is_some();
            (table.plan_put(record), known)
        };
        self.write(records.clone()).await?;
        if !known {
            // The record's own references from now on; else it has them already and these are let go.
            ready.leases.into_iter().for_each(Lease::into_record);
        }
        let mut table = self.table_mut();
        for record in records {
            let config = match table.entry(&record.id) {
                Some(old) => old.image.config.clone(),
                None => ready.parsed.config.clone(),
            };
            let image = self.inner.image(&record, config);
            table.insert(record, image);
        }
        self.inner.changes.send_replace(());
        table.entry(&ready.id).map(|entry| entry.image.clone()).ok_or(StoreError::Stopped)
    }

    async fn remove_now(&self, name_or_id: &str) -> Result<(), StoreError> {
        let turn = self.inner.writing.lock().await;
        let found = self.table().find(name_or_id).map(|entry| entry.record.clone());
        let Some(record) = found else { return Ok(()) };
        if !self.forget(&record.id).await? {
            // Containers go on with its layers; the record stays until they are gone, also over a restart.
            let record = Record { removed: true, tags: Vec::new(), digests: Vec::new(), ..record };
            self.write(vec![record.clone()]).await?;
            if let Some(entry) = self.table_mut().entry_mut(&record.id) {
                entry.record = record;
            }
            self.inner.changes.send_replace(());
        }
        coracle_fault::point("remove-image.forgotten");
        drop(turn);
        self.collect_now().await
    }

    pub(crate) async fn collect_now(&self) -> Result<(), StoreError> {
        let turn = self.inner.writing.lock().await;
        let abandoned = self.table().abandoned();
        for id in abandoned {
            self.forget(&id).await?;
        }
        // Removing a hundred thousand files takes its time, in which others may pull.
        drop(turn);
        self.sweep().await
    }

    /// Removes a record, then lets go of the layers: the other order could lose layers of an image still recorded.
    /// Says no to an image that is held. To be called in one's turn to write.
    async fn forget(&self, id: &Digest) -> Result<bool, StoreError> {
        let Some(entry) = self.table_mut().take_unheld(id) else { return Ok(false) };
        let (records, digest) = (self.inner.records.clone(), *id);
        let removed = blocking(move || records::remove(&records, &digest).map_err(StoreError::from)).await;
        if let Err(error) = removed {
            self.table_mut().insert(entry.record, entry.image);
            return Err(error);
        }
        self.inner.layers.release(&entry.record.layers);
        self.inner.changes.send_replace(());
        Ok(true)
    }

    async fn sweep(&self) -> Result<(), StoreError> {
        let layers = self.inner.layers.clone();
        blocking(move || layers.sweep(Instant::now()).map_err(StoreError::from)).await
    }

    async fn write(&self, records: Vec<Record>) -> Result<(), StoreError> {
        let directory = self.inner.records.clone();
        blocking(move || {
            records.iter().try_for_each(|record| records::write(&directory, record)).map_err(StoreError::from)
        })
        .await
    }

    pub(crate) fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.inner.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn table_mut(&self) -> RwLockWriteGuard<'_, Table> {
        self.inner.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Images {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Images").field("directory", &self.inner.directory).finish_non_exhaustive()
    }
}

// === impl Inner ===

impl Inner {
    fn open(config: ImagesConfig, runtime: tokio::runtime::Handle) -> Result<Inner, StoreError> {
        if !crate::unpack::supported() {
            return Err(StoreError::Kernel);
        }
        let directory = config.root.join("images");
        let records = directory.join("manifests");
        crate::layers::make_private(&directory)?;
        crate::layers::make_private(&records)?;
        let lock = lock(&directory.join("lock"))?;
        let layers = Arc::new(Layers::open(&directory)?);
        let inner = Inner {
            config,
            layers,
            flights: Flights::default(),
            fetching: tokio::sync::Semaphore::new(FETCHING),
            directory,
            records,
            table: RwLock::default(),
            writing: tokio::sync::Mutex::new(()),
            changes: watch::Sender::new(()),
            runtime,
            sweep_due: AtomicBool::new(false),
            _lock: lock,
        };
        inner.load()?;
        Ok(inner)
    }

    /// Takes in the records. An image that misses a layer, for whatever reason, is none: it will be pulled again.
    fn load(&self) -> Result<(), StoreError> {
        let mut loaded = records::load(&self.records)?;
        table::settle(&mut loaded);
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        for record in loaded {
            let leases: Option<Vec<Lease>> = record.layers.iter().map(|id| self.layers.lease(*id)).collect();
            let parsed = manifest::read_config(record.config.as_bytes());
            match (leases, parsed) {
                (Some(leases), Ok(config)) => {
                    leases.into_iter().for_each(Lease::into_record);
                    let image = self.image(&record, config);
                    table.insert(record, image);
                }
                (leases, parsed) => {
                    let reason = match parsed {
                        Err(error) => crate::error::report(&error),
                        Ok(_) => "a layer is missing".to_owned(),
                    };
                    drop(leases);
                    tracing::warn!(image = %record.id, tags = ?record.tags, reason, "dropping an image");
                    records::remove(&self.records, &record.id)?;
                }
            }
        }
        Ok(())
    }

    fn image(&self, record: &Record, config: Arc<oci_spec::image::ImageConfiguration>) -> Image {
        let mut layers: Vec<PathBuf> = record.layers.iter().rev().map(|id| self.layers.path(id)).collect();
        if layers.is_empty() {
            layers.push(self.layers.empty());
        }
        Image {
            id: record.id.to_string(),
            tags: record.tags.clone(),
            digests: record.digests.clone(),
            size: record.size,
            config,
            layers,
            pinned: self.is_pinned(record),
        }
    }

    fn is_pinned(&self, record: &Record) -> bool {
        let names = || record.tags.iter().chain(&record.digests);
        self.config.pinned.iter().any(|pattern| names().any(|name| pattern.matches(name)))
    }
}

fn now() -> u64 {
    records::seconds(SystemTime::now())
}

/// Whether writing a record again would change nothing, so that a pull of what is here writes nothing.
fn says_the_same(old: &Record, new: &Record) -> bool {
    let all = |old: &[String], new: &[String]| new.iter().all(|name| old.contains(name));
    !old.removed && all(&old.tags, &new.tags) && all(&old.digests, &new.digests)
}

fn change(verb: &'static str, name: &str, error: StoreError) -> Error {
    Error::Change { verb, name: name.to_owned(), source: error.into() }
}

/// Holds the lock for as long as the file is open.
fn lock(path: &Path) -> Result<File, StoreError> {
    let error = |source| StoreError::Lock { path: path.to_owned(), source };
    let file = File::options().create(true).truncate(false).write(true).open(path).map_err(error)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StoreError::Locked { path: path.to_owned() }),
        Err(TryLockError::Error(source)) => Err(error(source)),
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(StoreError::Stopped))
}

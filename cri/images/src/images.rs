//! The image store: the images, their names and their users.

mod held;
mod weight;

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use crate::config::ImagesConfig;
use crate::digest::Digest;
use crate::error::{Cause, Error, ErrorKind, io_kind};
use crate::fetch_slots::FetchSlots;
use crate::image::{Image, ImageGcInfo, Usage};
use crate::layers::{LayerError, Layers, Lease};
use crate::manifest::{self, ParsedConfig};
use crate::owner_limits::OwnerLimits;
use crate::pulls_in_progress::PullsInProgress;
use crate::records::{self, Record, RecordError};
use crate::table::{self, Table};

pub use self::held::ImageHold;

/// The image store of a node.
#[derive(Clone)]
pub struct Images {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) config: ImagesConfig,
    pub(crate) layers: Arc<Layers>,
    pub(crate) pulls: PullsInProgress,
    pub(crate) owner_limits: OwnerLimits,
    pub(crate) fetch_slots: FetchSlots,
    /// The slot for a layer with a large zstd window. Only one such layer is unpacked at a time.
    pub(crate) large_window: FetchSlots,
    directory: PathBuf,
    records: PathBuf,
    table: RwLock<Table>,
    /// Held while records change, so that disk and table change together.
    writing: tokio::sync::Mutex<()>,
    /// Notified when an image or a name is added or removed.
    changes: watch::Sender<()>,
    runtime: tokio::runtime::Handle,
    sweep_due: AtomicBool,
    _lock: File,
}

/// Errors of opening or changing the store.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("another process has the store open ({} is locked)", path.display())]
    Locked { path: PathBuf },
    #[error("cannot lock {}", path.display())]
    Lock {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("this kernel cannot resolve paths within a directory (openat2, Linux 5.6)")]
    Kernel,
    #[error(
        "the large configurations of images take too much memory; remove images with a large configuration"
    )]
    Configurations,
    #[error("the process is shutting down")]
    Stopped,
}

/// An image whose layers are complete, before its record is written.
pub(crate) struct NewImage {
    pub(crate) id: Digest,
    /// The owner of the pull. Empty for an import.
    pub(crate) owner: String,
    pub(crate) tags: Vec<String>,
    pub(crate) digests: Vec<String>,
    pub(crate) size: u64,
    pub(crate) config: String,
    pub(crate) parsed: ParsedConfig,
    /// One reference for each layer, lowest first, without duplicates.
    pub(crate) leases: Vec<Lease>,
}

/// Maximum wait of [`Images::wait_for_space`] for the disk.
const SPACE_TIMEOUT: Duration = Duration::from_millis(500);

// === impl StoreError ===

impl StoreError {
    /// The kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            StoreError::Layer(error) => error.kind(),
            StoreError::Record(error) => io_kind(&error.source),
            StoreError::Locked { .. } => ErrorKind::Locked,
            StoreError::Lock { source, .. } => io_kind(source),
            StoreError::Kernel => ErrorKind::Unsupported,
            StoreError::Configurations => ErrorKind::Rejected,
            StoreError::Stopped => ErrorKind::Io,
        }
    }
}

impl From<StoreError> for Cause {
    fn from(error: StoreError) -> Cause {
        Cause::new(error.kind(), error)
    }
}

// === impl Images ===

impl Images {
    /// Opens the store, and makes it if it is absent. Cleans up after an unclean stop: removes partly
    /// unpacked layers, sets unreadable records aside with a warning, and drops images with missing layers.
    ///
    /// # Errors
    /// If the directory cannot be made or read, or another process has the store open.
    pub async fn open(config: ImagesConfig) -> Result<Images, Error> {
        let path = config.root.join("images");
        let runtime = tokio::runtime::Handle::current();
        let opened = blocking(move || Inner::open(config, runtime)).await;
        let inner = opened.map_err(|source| Error::Open { path, source: source.into() })?;
        let images = Images { inner: Arc::new(inner) };
        images.schedule_sweep();
        Ok(images)
    }

    /// Finds an image by name, by id or by an unambiguous prefix of its id.
    #[must_use]
    pub fn get(&self, name_or_id: &str) -> Option<Image> {
        self.table().find(name_or_id).map(|entry| entry.image.clone())
    }

    /// All images, sorted by id.
    #[must_use]
    pub fn list(&self) -> Vec<Image> {
        let mut images: Vec<Image> = self.table().list().map(|entry| entry.image.clone()).collect();
        images.sort_by(|a, b| a.id.cmp(&b.id));
        images
    }

    /// Age, use and size of an image, for garbage collection.
    #[must_use]
    pub fn gc_info(&self, name_or_id: &str) -> Option<ImageGcInfo> {
        let (record, held) =
            self.table().find(name_or_id).map(|entry| (entry.record.clone(), entry.held > 0))?;
        let bytes = |id| self.inner.layers.bytes(id).unwrap_or_default();
        let mut layer_bytes: Vec<u64> = record.layers.iter().rev().map(bytes).collect();
        if layer_bytes.is_empty() {
            // `Image::layers` has the empty layer if the image has no layers.
            layer_bytes.push(0);
        }
        let used = if held { SystemTime::now() } else { records::time(record.used) };
        Some(ImageGcInfo { pulled: records::time(record.pulled), used, held, layer_bytes })
    }

    /// Notifies whenever an image or a name is added or removed. Several changes may be merged into one
    /// notification.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.inner.changes.subscribe()
    }

    /// Removes an image by any of its names or its id, with all its names. An absent image is not an error.
    ///
    /// Layers that are not needed by another image or an [`ImageHold`] are removed from the store at once. They are
    /// deleted from the disk in the background. [`Images::wait_for_space`] and [`Images::wait_until_deleted`] wait for
    /// the disk. A power failure right after the removal may restore the complete image, never a part of it.
    ///
    /// # Errors
    /// If a file cannot be changed or removed.
    pub async fn remove(&self, name_or_id: &str) -> Result<(), Error> {
        let images = self.clone();
        let name = name_or_id.to_owned();
        // The work is done in a task, because a cancelled caller must not leave disk and table inconsistent.
        let removed = self.inner.runtime.spawn(async move { images.remove_now(&name).await }).await;
        removed.unwrap_or(Err(StoreError::Stopped)).map_err(|e| change("remove", name_or_id, e))
    }

    /// Waits until removed layers are deleted from the disk, at most half a second. For callers that then
    /// query the free space.
    pub async fn wait_for_space(&self) {
        let _timed_out = tokio::time::timeout(SPACE_TIMEOUT, self.wait_until_deleted()).await;
    }

    /// Waits until all removed layers are deleted from the disk. A failed deletion ends the wait, too.
    pub async fn wait_until_deleted(&self) {
        self.inner.layers.trash.wait_until_empty().await;
    }

    /// Disk usage of the store, including removed layers that are not deleted yet.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.inner.layers.usage()
    }

    /// Removes unused data: removed images that are no longer held, and layers of incomplete pulls that are no longer
    /// kept for a retry. Call it once after a restart, after all ids in use are held again.
    ///
    /// # Errors
    /// If a file cannot be changed or removed.
    pub async fn collect(&self) -> Result<(), Error> {
        self.collect_now().await.map_err(|e| change("clean up after", "store", e))
    }

    /// The directory of the store.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.inner.directory
    }

    /// Writes an image's record. After that the image exists.
    pub(crate) async fn put(&self, new: NewImage) -> Result<Image, StoreError> {
        let images = self.clone();
        let put = self.inner.runtime.spawn(async move { images.put_now(new).await }).await;
        put.unwrap_or(Err(StoreError::Stopped))
    }

    /// Removes unused layers, for example of a failed pull. A failure is logged.
    pub(crate) async fn remove_unused_layers(&self) {
        if let Err(error) = self.sweep().await {
            tracing::warn!(error = crate::error::report(&error), "cannot remove unused layers");
        }
    }

    /// Schedules a sweep. An interrupted pull leaves data for a retry; the sweep runs when that data expires.
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
            images.remove_unused_layers().await;
            images.schedule_sweep();
        });
    }

    async fn put_now(&self, new: NewImage) -> Result<Image, StoreError> {
        let _turn = self.inner.writing.lock().await;
        let record = Record {
            version: records::VERSION,
            id: new.id,
            tags: new.tags,
            digests: new.digests,
            layers: new.leases.iter().map(Lease::diff_id).collect(),
            size: new.size,
            config: new.config,
            removed: false,
            generation: 0,
            pulled: now(),
            owner: new.owner,
            used: now(),
        };
        let unchanged = self.table_mut().entry_mut(&record.id).and_then(|old| {
            is_unchanged(&old.record, &record).then(|| {
                old.record.pulled = record.pulled;
                (old.image.clone(), held::mark_used(old))
            })
        });
        if let Some((image, last_use)) = unchanged {
            self.record_use(last_use);
            return Ok(image);
        }
        let (records, known) = {
            let mut table = self.table_mut();
            let known = table.entry(&record.id).is_some();
            weight::check(&table, &record.id, record.owner.as_str(), record.config.as_str(), &new.parsed)?;
            (table.plan_put(record), known)
        };
        self.write(records.clone()).await?;
        if !known {
            // The references of this pull now belong to the record. If the record existed before, it has references of its
            // own. Then the references of this pull are released.
            new.leases.into_iter().for_each(Lease::into_record);
        }
        let mut table = self.table_mut();
        for record in records {
            let config = match table.entry(&record.id) {
                Some(old) => old.image.config.clone(),
                None => new.parsed.config.clone(),
            };
            let image = self.inner.image(&record, config);
            table.insert(record, image);
        }
        self.inner.changes.send_replace(());
        table.entry(&new.id).map(|entry| entry.image.clone()).ok_or(StoreError::Stopped)
    }

    async fn remove_now(&self, name_or_id: &str) -> Result<(), StoreError> {
        let guard = self.inner.writing.lock().await;
        let found = self.table().find(name_or_id).map(|entry| entry.record.clone());
        let Some(record) = found else { return Ok(()) };
        if !self.remove_record(&record.id).await? {
            // Containers still use its layers. The record stays until the containers end, even across a restart.
            let record = Record { removed: true, tags: Vec::new(), digests: Vec::new(), ..record };
            self.write(vec![record.clone()]).await?;
            if let Some(entry) = self.table_mut().entry_mut(&record.id) {
                entry.record = record;
            }
            self.inner.changes.send_replace(());
        }
        coracle_fault::point("remove-image.unrecorded");
        drop(guard);
        self.collect_now().await
    }

    pub(crate) async fn collect_now(&self) -> Result<(), StoreError> {
        let guard = self.inner.writing.lock().await;
        let abandoned = self.table().abandoned();
        for id in abandoned {
            self.remove_record(&id).await?;
        }
        // Removing very many files takes long. Pulls can continue meanwhile.
        drop(guard);
        self.sweep().await
    }

    /// Removes a record, then releases its layers: the reverse order could lose layers of a recorded image. Returns
    /// false if the image is held. The caller holds `writing`.
    async fn remove_record(&self, id: &Digest) -> Result<bool, StoreError> {
        let Some(entry) = self.table_mut().remove_unused(id) else { return Ok(false) };
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
        let time_slice = config.fetch_time_slice;
        let inner = Inner {
            config,
            layers,
            pulls: PullsInProgress::default(),
            owner_limits: OwnerLimits::default(),
            fetch_slots: FetchSlots::all(time_slice),
            large_window: FetchSlots::single(time_slice),
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

    /// Loads the records. An image with a missing layer or an invalid configuration is dropped. It will be pulled
    /// again.
    fn load(&self) -> Result<(), StoreError> {
        let mut loaded = records::load(&self.records)?;
        table::resolve_tag_conflicts(&mut loaded);
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
                    tracing::warn!(image = %record.id, tags = ?record.tags, reason, "dropping an incomplete image");
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

/// Whether the image is listed and already has all names of the new record. Then a pull writes no record.
fn is_unchanged(old: &Record, new: &Record) -> bool {
    let all = |old: &[String], new: &[String]| new.iter().all(|name| old.contains(name));
    !old.removed && all(&old.tags, &new.tags) && all(&old.digests, &new.digests)
}

fn change(verb: &'static str, name: &str, error: StoreError) -> Error {
    Error::Change { verb, name: name.to_owned(), source: error.into() }
}

/// Locks the file. The lock is held while the file is open.
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

//! Space on the store's disk: the reserves, and the writes that are refused when little space is left.
//!
//! There are two reserves. The next blocks of the journal are allocated in advance, so that commits succeed on a disk
//! that other programs have filled. A reserve file beside the store is removed when the engine has no space for a
//! table, and created again when there is space.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, StatVfs, StatVfsMountFlags, fallocate, statvfs};

use super::migrate::sibling;
use crate::Health;

/// Maximum number of bytes of the journal that are allocated in advance.
const MAX_ALLOCATED_AHEAD: u64 = 32 << 20;
/// Number of written bytes after which the journal is checked again.
const STEP: u64 = 1 << 20;
/// Bounds of the minimum free space, in bytes. The minimum is 1/32 of the disk within these bounds. With less free
/// space, the store refuses new objects.
const MIN_FREE_BYTES: std::ops::RangeInclusive<u64> = (2 << 20)..=(64 << 20);

/// The reserves of a store.
pub(super) struct SpaceReserves {
    path: PathBuf,
    reserve: PathBuf,
    journal: PathBuf,
    /// Upper bound of the number of bytes in the journal.
    position: u64,
    /// Number of allocated bytes of the journal.
    allocated: u64,
    /// Size of the journal at which it is checked again, in bytes.
    next_check: u64,
    is_full: bool,
}

/// Free space of a disk, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskSpace {
    pub(super) free: u64,
    low: u64,
    read_only: bool,
}

// === impl SpaceReserves ===

impl SpaceReserves {
    /// Reads the space of the store in `path`, whose engine is open, and creates the reserves if there is space.
    pub(super) fn new(path: &Path) -> Self {
        let mut space = Self {
            path: path.to_owned(),
            reserve: reserve_of(path),
            journal: PathBuf::new(),
            position: 0,
            allocated: 0,
            next_check: 0,
            is_full: false,
        };
        space.check_journal();
        space.refill();
        space
    }

    /// Whether new objects are refused. Reads the disk's free space.
    pub(super) fn is_full(&mut self) -> bool {
        let Ok(disk) = DiskSpace::of(&self.path) else { return self.is_full };
        let was = self.is_full;
        // The full state begins when the free space is below `low`, and ends at twice `low`. So the state does not
        // change with every write near the limit.
        self.is_full = disk.free < if was { 2 * disk.low } else { disk.low };
        if was && !self.is_full {
            tracing::info!(free = disk.free, "the store accepts all writes again");
            self.refill();
        }
        if !was && self.is_full {
            tracing::warn!(free = disk.free, path = %self.path.display(), "the store's disk is full: no new objects");
        }
        self.is_full
    }

    /// Whether updates are also refused. The blocks that are allocated in advance are then kept for deletions.
    pub(super) fn is_exhausted(&self) -> bool {
        self.allocated.saturating_sub(self.position) < MAX_ALLOCATED_AHEAD / 32
    }

    /// Records that the journal has grown by `bytes`.
    pub(super) fn wrote(&mut self, bytes: u64) {
        self.position += bytes;
        if self.position >= self.next_check {
            self.check_journal();
        }
    }

    /// Removes the reserve file.
    pub(super) fn release(&self) {
        match fs::remove_file(&self.reserve) {
            Ok(()) => tracing::warn!(path = %self.reserve.display(), "the store uses its reserve"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%error, "cannot remove the store's reserve"),
        }
    }

    /// Creates the reserve file if there is space.
    fn refill(&self) {
        let Ok(disk) = DiskSpace::of(&self.path) else { return };
        if self.reserve.exists() || disk.free < 4 * disk.low {
            return;
        }
        let created = File::options().write(true).create_new(true).mode(0o600).open(&self.reserve);
        let created = created.and_then(|file| Ok(fallocate(file, FallocateFlags::empty(), 0, disk.low)?));
        if let Err(error) = created {
            tracing::debug!(%error, "cannot create the reserve of the store");
            self.release();
        }
    }

    /// Finds the journal and allocates its next blocks.
    fn check_journal(&mut self) {
        self.next_check = self.position + STEP;
        if let Err(error) = self.allocate() {
            tracing::debug!(%error, "cannot allocate the next blocks of the journal");
        }
    }

    fn allocate(&mut self) -> io::Result<()> {
        let journal = newest_journal(&self.path)?;
        let metadata = journal.metadata()?;
        if journal != self.journal {
            // A new journal has a length but no blocks. A reopened journal ends after its last entry.
            self.position = metadata.len().min(metadata.blocks() * 512);
            (self.allocated, self.next_check) = (self.position, self.position + STEP);
            self.journal = journal;
        }
        let wanted = MAX_ALLOCATED_AHEAD.min(DiskSpace::of(&self.path)?.free / 8);
        if self.position + wanted / 2 > self.allocated {
            let file = File::options().write(true).open(&self.journal)?;
            fallocate(file, FallocateFlags::KEEP_SIZE, self.position, wanted)?;
            self.allocated = self.position + wanted;
        }
        Ok(())
    }
}

// === impl DiskSpace ===

impl DiskSpace {
    fn of(path: &Path) -> io::Result<Self> {
        let StatVfs { f_bfree, f_blocks, f_frsize, f_flag, .. } = statvfs(path)?;
        let low = (f_blocks * f_frsize / 32).clamp(*MIN_FREE_BYTES.start(), *MIN_FREE_BYTES.end());
        let read_only = f_flag.contains(StatVfsMountFlags::RDONLY);
        Ok(Self { free: f_bfree * f_frsize, low, read_only })
    }
}

/// Reads the free space from the file system.
pub(super) fn health(path: &Path) -> Health {
    match DiskSpace::of(path) {
        Ok(disk) if disk.read_only => Health::Failed("its file system is read-only".to_owned()),
        Ok(disk) if disk.free < disk.low => Health::Full { free: disk.free },
        Ok(_) => Health::Good,
        Err(error) => Health::Failed(error.to_string()),
    }
}

/// Whether a small file can be written and synced beside the store.
pub(super) fn probe(path: &Path) -> io::Result<()> {
    let probe = sibling(path, ".probe");
    let written = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&probe)
        .and_then(|mut file| file.write_all(&[1; 64 << 10]).and_then(|()| file.sync_all()));
    let removed = fs::remove_file(&probe);
    written.and(removed)
}

/// Writes the content of the journals again and syncs them. After a failed sync the kernel marks pages as clean that
/// are not on the disk (fsync(2), EIO).
pub(super) fn rewrite_journals(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileExt as _;
    for entry in fs::read_dir(path)? {
        let journal = entry?.path();
        if journal.extension().is_none_or(|extension| extension != "jnl") {
            continue;
        }
        let file = File::options().read(true).write(true).open(&journal)?;
        let (mut at, mut chunk) = (0, vec![0; 256 << 10]);
        loop {
            let read = file.read_at(&mut chunk, at)?;
            let Some(bytes) = chunk.get(..read).filter(|bytes| !bytes.is_empty()) else { break };
            // Holes are not written, because a full disk has no blocks for them.
            let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            file.write_all_at(bytes.get(..used).unwrap_or_default(), at)?;
            at += read as u64;
        }
        file.sync_all()?;
    }
    Ok(())
}

/// The reserve file of the store in `path`.
fn reserve_of(path: &Path) -> PathBuf {
    sibling(path, ".reserve")
}

fn newest_journal(path: &Path) -> io::Result<PathBuf> {
    let mut newest: Option<(u64, PathBuf)> = None;
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        let Some(number) =
            path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jnl")?.parse().ok())
        else {
            continue;
        };
        if newest.as_ref().is_none_or(|(other, _)| number > *other) {
            newest = Some((number, path));
        }
    }
    newest.map(|(_, path)| path).ok_or_else(|| io::ErrorKind::NotFound.into())
}

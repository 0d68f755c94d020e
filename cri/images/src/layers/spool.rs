//! Spools: compressed data of incomplete layers, written while the layer is unpacked. After an interrupted pull, even
//! of a killed process, the next pull requests only the rest from the registry.
//!
//! Spools are untrusted: the data is decompressed and hashed again as if it came from the network, and
//! discarded if the digest is wrong. So a spool is never flushed to disk.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{KEEP, LayerError, disk};
use crate::digest::Digest;

/// All spools of a store.
pub(crate) struct Spools {
    directory: PathBuf,
    known: Mutex<HashMap<Digest, Known>>,
}

struct Known {
    busy: bool,
    /// Whether the spool must be removed when its current user drops it.
    unwanted: bool,
    keep_until: Instant,
}

/// The data of one blob. The data is kept when this value is dropped, unless it was discarded.
pub(crate) struct Spool {
    spools: Arc<Spools>,
    digest: Digest,
    file: Arc<File>,
    length: u64,
    keep: bool,
}

/// Reads the data of an earlier attempt.
pub(crate) struct Saved {
    file: Arc<File>,
    length: u64,
    offset: u64,
}

// === impl Spools ===

impl Spools {
    /// Opens the spools of a store.
    pub(super) fn open(root: &Path) -> Result<Spools, LayerError> {
        let directory = root.join("resume");
        disk::make_private(&directory)?;
        let error = |source| LayerError::Disk { verb: "list", path: directory.clone(), source };
        let mut known = HashMap::new();
        for entry in std::fs::read_dir(&directory).map_err(error)? {
            let entry = entry.map_err(error)?;
            let digest = entry.file_name().to_str().and_then(Digest::from_hex);
            match digest {
                Some(digest) => {
                    known.insert(digest, Known::idle());
                }
                None => disk::remove_tree(&entry.path())?,
            }
        }
        Ok(Spools { directory, known: Mutex::new(known) })
    }

    /// The spool of a blob, for one user at a time. `None` if another pull uses the spool, or if its file cannot
    /// be opened; the pull then works without a spool.
    pub(crate) fn take(self: &Arc<Spools>, digest: Digest) -> Option<Spool> {
        let mut known = self.known();
        if known.get(&digest).is_some_and(|known| known.busy) {
            return None;
        }
        let open = || {
            let file = File::options()
                .create(true)
                .truncate(false)
                .read(true)
                .write(true)
                .open(self.path(&digest))?;
            let length = file.metadata()?.len();
            Ok::<_, io::Error>((file, length))
        };
        match open() {
            Ok((file, length)) => {
                known.insert(digest, Known { busy: true, ..Known::idle() });
                Some(Spool { spools: self.clone(), digest, file: Arc::new(file), length, keep: true })
            }
            Err(error) => {
                tracing::debug!(%digest, %error, "cannot open a spool: an interrupted pull cannot be resumed");
                None
            }
        }
    }

    /// Removes expired spools. Blocks.
    pub(super) fn sweep(&self, now: Instant) {
        self.known().retain(|digest, known| {
            let is_kept = known.busy || known.keep_until > now;
            if !is_kept {
                self.remove(digest);
            }
            is_kept
        });
    }

    /// Removes all spools, because the disk is full. Blocks.
    pub(crate) fn clear(&self) {
        self.known().values_mut().for_each(|known| known.unwanted = true);
        self.sweep(Instant::now() + KEEP);
    }

    /// The time at which the next spool may expire.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.known().values().map(|known| known.keep_until).min()
    }

    fn path(&self, digest: &Digest) -> PathBuf {
        self.directory.join(digest.hex())
    }

    fn remove(&self, digest: &Digest) {
        if let Err(error) = disk::remove_tree(&self.path(digest)) {
            tracing::warn!(error = crate::error::report(&error), "cannot remove a spool");
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Digest, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Known ===

impl Known {
    fn idle() -> Known {
        Known { busy: false, unwanted: false, keep_until: Instant::now() + KEEP }
    }
}

// === impl Spool ===

impl Spool {
    /// The data of an earlier attempt, if its length is plausible.
    pub(crate) fn saved(&mut self, size: u64) -> Option<Saved> {
        if self.length > size {
            self.clear();
        }
        (self.length > 0).then(|| Saved { file: self.file.clone(), length: self.length, offset: 0 })
    }

    /// Discards the data of an earlier attempt.
    pub(crate) fn clear(&mut self) {
        self.length = 0;
        // If truncating fails, the digest will be wrong and the pull starts again.
        let _too_long = self.file.set_len(0);
    }

    /// Appends data.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.length)?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Removes the spool: the blob is complete, or the data does not belong to it.
    pub(crate) fn discard(mut self) {
        self.keep = false;
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        let mut known = self.spools.known();
        let wanted = known.get(&self.digest).is_some_and(|known| !known.unwanted);
        if self.keep && wanted && self.length > 0 {
            known.insert(self.digest, Known::idle());
        } else {
            self.spools.remove(&self.digest);
            known.remove(&self.digest);
        }
    }
}

// === impl Saved ===

impl Saved {
    /// The next chunk of at most `most` bytes; empty at the end. Blocks.
    pub(crate) fn next(&mut self, most: usize) -> io::Result<Vec<u8>> {
        let left = usize::try_from(self.length - self.offset).unwrap_or(usize::MAX);
        let mut piece = vec![0; most.min(left)];
        self.file.read_exact_at(&mut piece, self.offset)?;
        self.offset += piece.len() as u64;
        Ok(piece)
    }
}

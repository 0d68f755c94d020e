//! Free bytes and inodes of the node's disk.

use std::path::Path;

use rustix::fs::statvfs;

use super::eviction::Shortage;
use super::{EvictionThresholds, MinimumReclaim};

/// A shortage of a resource of the disk, in bytes or inodes.
pub(crate) type DiskShortage = Shortage<Resource>;

/// A resource of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    Bytes,
    Inodes,
}

/// The resource that is short on the file system of the state directory. None if both suffice or cannot be
/// determined. `lasts`: a shortage was found before, and ends only when the minimum is reclaimed.
pub(crate) fn disk_shortage(
    state_dir: &Path,
    thresholds: &EvictionThresholds,
    lasts: bool,
) -> Option<DiskShortage> {
    // Most nodes have no soft thresholds.
    if thresholds.nodefs_available.is_zero() && thresholds.nodefs_inodes_free.is_zero() {
        return None;
    }
    let found = statvfs(state_dir).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    let reclaim = if lasts { thresholds.minimum_reclaim } else { MinimumReclaim::NONE };
    let amounts = [thresholds.nodefs_available, reclaim.nodefs_available];
    Shortage::find(Resource::Bytes, amounts, bytes(found.f_bavail), bytes(found.f_blocks)).or_else(|| {
        let amounts = [thresholds.nodefs_inodes_free, reclaim.nodefs_inodes_free];
        Shortage::find(Resource::Inodes, amounts, found.f_favail, found.f_files)
    })
}

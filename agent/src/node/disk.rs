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

/// The resource that is short on the file system of the state directory. None if both suffice or cannot be determined.
/// `lasts` says whether a shortage was found before. Such a shortage ends only when the minimum is reclaimed.
pub(crate) fn disk_shortage(
    state_dir: &Path,
    thresholds: &EvictionThresholds,
    lasts: bool,
) -> Option<DiskShortage> {
    disk_shortages(state_dir, thresholds, |_| lasts).into_iter().flatten().next()
}

/// The resources that are short on the file system of the state directory, bytes first. `lasts` says whether a resource
/// was short before. Such a shortage ends only when the minimum is reclaimed.
pub(crate) fn disk_shortages(
    state_dir: &Path,
    thresholds: &EvictionThresholds,
    lasts: impl Fn(Resource) -> bool,
) -> [Option<DiskShortage>; 2] {
    // Most nodes have no soft thresholds.
    if thresholds.nodefs_available.is_zero() && thresholds.nodefs_inodes_free.is_zero() {
        return [None, None];
    }
    let Ok(found) = statvfs(state_dir) else { return [None, None] };
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    let reclaim = |resource| if lasts(resource) { thresholds.minimum_reclaim } else { MinimumReclaim::NONE };
    let of_bytes = [thresholds.nodefs_available, reclaim(Resource::Bytes).nodefs_available];
    let of_inodes = [thresholds.nodefs_inodes_free, reclaim(Resource::Inodes).nodefs_inodes_free];
    [
        Shortage::find(Resource::Bytes, of_bytes, bytes(found.f_bavail), bytes(found.f_blocks)),
        Shortage::find(Resource::Inodes, of_inodes, found.f_favail, found.f_files),
    ]
}

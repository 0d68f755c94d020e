//! Free bytes and inodes of the node's disk.

use std::path::Path;

use rustix::fs::statvfs;

use super::{EvictionThresholds, MinimumReclaim, Threshold};

/// A shortage of a resource of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub(crate) resource: Resource,
    /// The minimum that must be available.
    pub(crate) threshold: u64,
    pub(crate) available: u64,
}

/// A resource of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    Bytes,
    Inodes,
}

/// The resource that is short on the file system of the state directory. None if both suffice or cannot be determined.
/// `lasts` says that a shortage was found before. It ends only when the minimum is reclaimed.
pub(crate) fn disk_shortage(
    state_dir: &Path,
    thresholds: &EvictionThresholds,
    lasts: bool,
) -> Option<Shortage> {
    disk_shortages(state_dir, thresholds, |_| lasts).into_iter().flatten().next()
}

/// The resources that are short on the file system of the state directory, bytes first. `lasts`: whether the resource was
/// short before. Its shortage ends only when the minimum is reclaimed.
pub(crate) fn disk_shortages(
    state_dir: &Path,
    thresholds: &EvictionThresholds,
    lasts: impl Fn(Resource) -> bool,
) -> [Option<Shortage>; 2] {
    // Most nodes have no soft thresholds.
    if thresholds.nodefs_available.is_zero() && thresholds.nodefs_inodes_free.is_zero() {
        return [None, None];
    }
    let Ok(found) = statvfs(state_dir) else { return [None, None] };
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    let reclaim = |resource| if lasts(resource) { thresholds.minimum_reclaim } else { MinimumReclaim::NONE };
    let shortage = |resource, [threshold, reclaim]: [Threshold; 2], [available, total]: [u64; 2]| {
        let is_short = threshold.exceeds_with(reclaim, available, total);
        is_short.then(|| Shortage { resource, threshold: threshold.of(total), available })
    };
    let of_bytes = [thresholds.nodefs_available, reclaim(Resource::Bytes).nodefs_available];
    let of_inodes = [thresholds.nodefs_inodes_free, reclaim(Resource::Inodes).nodefs_inodes_free];
    [
        shortage(Resource::Bytes, of_bytes, [bytes(found.f_bavail), bytes(found.f_blocks)]),
        shortage(Resource::Inodes, of_inodes, [found.f_favail, found.f_files]),
    ]
}

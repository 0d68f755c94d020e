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
    // Most nodes have no soft thresholds.
    if thresholds.nodefs_available.is_zero() && thresholds.nodefs_inodes_free.is_zero() {
        return None;
    }
    let found = statvfs(state_dir).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    let reclaim = if lasts { thresholds.minimum_reclaim } else { MinimumReclaim::NONE };
    let shortage = |resource, [threshold, reclaim]: [Threshold; 2], [available, total]: [u64; 2]| {
        let is_short = threshold.exceeds_with(reclaim, available, total);
        is_short.then(|| Shortage { resource, threshold: threshold.of(total), available })
    };
    let amounts = [thresholds.nodefs_available, reclaim.nodefs_available];
    shortage(Resource::Bytes, amounts, [bytes(found.f_bavail), bytes(found.f_blocks)]).or_else(|| {
        let amounts = [thresholds.nodefs_inodes_free, reclaim.nodefs_inodes_free];
        shortage(Resource::Inodes, amounts, [found.f_favail, found.f_files])
    })
}

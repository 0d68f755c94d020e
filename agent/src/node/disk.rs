//! Free bytes and inodes of the node's disk.

use std::path::Path;

use rustix::fs::statvfs;

use super::EvictionThresholds;

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

/// The resource that is short on the file system of the state directory. None if both suffice or cannot be
/// determined.
pub(crate) fn disk_shortage(state_dir: &Path, thresholds: &EvictionThresholds) -> Option<Shortage> {
    let found = statvfs(state_dir).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    let checks = [
        (Resource::Bytes, thresholds.nodefs_available, bytes(found.f_bavail), bytes(found.f_blocks)),
        (Resource::Inodes, thresholds.nodefs_inodes_free, found.f_favail, found.f_files),
    ];
    let short =
        checks.into_iter().find(|(_, threshold, available, total)| threshold.exceeds(*available, *total));
    short.map(|(resource, threshold, available, total)| Shortage {
        resource,
        threshold: threshold.of(total),
        available,
    })
}

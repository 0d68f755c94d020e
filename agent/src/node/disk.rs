//! Free bytes and inodes of the node's disk.

use std::path::Path;

use rustix::fs::{StatVfs, statvfs};

use super::eviction::{Required, Shortage};
use super::pressure::Level;
use super::{EvictionThresholds, MinimumReclaim, Threshold};

/// A shortage of a resource of the disk, in bytes or inodes.
pub(crate) type DiskShortage = Shortage<Resource>;

/// A resource of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    Bytes,
    Inodes,
}

/// Available amounts of the disk's resources. By default they are unknown, and never short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskLevels {
    pub(crate) bytes: Level,
    pub(crate) inodes: Level,
}

// === impl Resource ===

impl Resource {
    /// The hard threshold of the resource.
    pub(crate) fn threshold(self, thresholds: &EvictionThresholds) -> Threshold {
        match self {
            Self::Bytes => thresholds.nodefs_available,
            Self::Inodes => thresholds.nodefs_inodes_free,
        }
    }
}

// === impl DiskLevels ===

impl DiskLevels {
    /// Reads the amounts of the file system of the state directory. The amounts are unknown if no resource has a
    /// threshold.
    pub(crate) fn read(state_dir: &Path, thresholds: &EvictionThresholds) -> Self {
        let has_threshold = |thresholds: &EvictionThresholds| {
            [Resource::Bytes, Resource::Inodes]
                .into_iter()
                .any(|resource| !resource.threshold(thresholds).is_zero())
        };
        if !has_threshold(thresholds) && !has_threshold(&thresholds.as_soft()) {
            return Self::default();
        }
        statvfs(state_dir).map_or_else(|_unreadable| Self::default(), |found| Self::of(&found))
    }

    /// The amounts of a file system.
    pub(crate) fn of(found: &StatVfs) -> Self {
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Self {
            bytes: Level { available: bytes(found.f_bavail), capacity: bytes(found.f_blocks) },
            inodes: Level { available: found.f_favail, capacity: found.f_files },
        }
    }

    /// The resource that is below its threshold, bytes first. None if both suffice or are unknown.
    pub(crate) fn shortage(&self, thresholds: &EvictionThresholds) -> Option<DiskShortage> {
        self.shortages(thresholds, |_| false).into_iter().flatten().next()
    }

    /// The resources that are short, bytes first. `lasts` is true for a resource that was short before. Such a shortage
    /// ends only when the minimum is reclaimed.
    pub(crate) fn shortages(
        &self,
        thresholds: &EvictionThresholds,
        lasts: impl Fn(Resource) -> bool,
    ) -> [Option<DiskShortage>; 2] {
        let reclaim =
            |resource| if lasts(resource) { thresholds.minimum_reclaim } else { MinimumReclaim::NONE };
        let of_bytes = Required {
            threshold: thresholds.nodefs_available,
            reclaim: reclaim(Resource::Bytes).nodefs_available,
        };
        let of_inodes = Required {
            threshold: thresholds.nodefs_inodes_free,
            reclaim: reclaim(Resource::Inodes).nodefs_inodes_free,
        };
        [self.bytes.shortage(Resource::Bytes, of_bytes), self.inodes.shortage(Resource::Inodes, of_inodes)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_a_threshold_is_not_read() {
        let thresholds =
            EvictionThresholds { nodefs_available: Threshold::percent(10), ..EvictionThresholds::NONE };
        let read = |thresholds: &EvictionThresholds| DiskLevels::read(Path::new("/"), thresholds);
        assert_ne!(read(&thresholds), DiskLevels::default());
        assert_eq!(read(&EvictionThresholds::NONE), DiskLevels::default());
        let mut soft = EvictionThresholds::NONE;
        soft.soft.nodefs_inodes_free.threshold = Threshold::percent(5);
        assert_ne!(read(&soft), DiskLevels::default());
        let unreadable = DiskLevels::read(Path::new("/no/such/directory"), &thresholds);
        assert_eq!(unreadable.shortage(&thresholds), None);
    }
}

//! One limit for all `emptyDir` volumes on the disk of the node, by a project quota. So pods cannot fill the disk,
//! which is often also the disk of the store.
//!
//! The limit is the usage of these volumes plus the free space of the disk without a [`Reserve`]. Writes to the volumes
//! move space from one part of this sum to the other, so they do not change the limit. Only other programs change it,
//! and each eviction round adapts it.
//!
//! A limit for each volume would not protect the disk, because one pod can have many volumes. It would also be an error
//! for a program that exceeds the `sizeLimit` for a short time. As in the kubelet, whose project quotas only measure
//! (`AssignQuota`), a pod above its `sizeLimit` is evicted.
//!
//! With the default thresholds, the reserve is smaller than the eviction threshold. So volumes that reach the limit
//! cause disk pressure, and a pod is evicted. Until then writes to all volumes fail, as on a full disk.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::fstatvfs;

use crate::node::{DiskLevels, EvictionThresholds, Level, Threshold};
use crate::project_quota::{self, BLOCK, EMPTY_DIRS, Limits, Usage};

/// The limit is a multiple of this fraction of the disk. So small changes of the free space do not change the limit.
const STEPS: u64 = 1024;
/// Bounds of the minimum reserve in bytes. The minimum is 1/16 of the disk within these bounds: twice the free space
/// below which the store refuses new objects.
const MIN_RESERVE: std::ops::RangeInclusive<u64> = (4 << 20)..=(128 << 20);
/// The minimum reserve of inodes, as a fraction of the inodes of the disk.
const MIN_INODES: u64 = 128;

/// The limit of the volumes.
pub(super) struct EmptyDirQuota {
    /// `<state>/pods`.
    dir: PathBuf,
    thresholds: EvictionThresholds,
    /// Whether the file system enforced project quotas when the agent started.
    is_enforced: bool,
    /// Held by the thread that adapts the limit.
    adapting: Mutex<()>,
}

/// Bytes and inodes that the volumes leave free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reserve {
    bytes: u64,
    inodes: u64,
}

// === impl EmptyDirQuota ===

impl EmptyDirQuota {
    /// The limit of the volumes in this directory, which exists.
    pub(super) fn open(dir: &Path, thresholds: EvictionThresholds) -> Self {
        let is_enforced = project_quota::limits_sizes(dir);
        Self { dir: dir.to_owned(), thresholds, is_enforced, adapting: Mutex::new(()) }
    }

    /// Whether there is a limit.
    pub(super) fn is_enforced(&self) -> bool {
        self.is_enforced
    }

    /// Adapts the limit to the free space of the disk. Does nothing while another thread does it: a disk that does not
    /// respond then blocks one thread only.
    pub(super) fn adapt(&self) {
        let Ok(_only_one) = self.adapting.try_lock() else { return };
        if let Err(error) = self.try_adapt() {
            tracing::warn!(%error, dir = %self.dir.display(), "cannot limit the volumes of type emptyDir");
        }
    }

    fn try_adapt(&self) -> io::Result<()> {
        let Some(base) = self.base()? else { return Ok(()) };
        let used = project_quota::usage(base.as_fd(), EMPTY_DIRS)?;
        // Without volumes the limit has no effect.
        if used.inodes == 0 { Ok(()) } else { self.set(base.as_fd(), used) }
    }

    /// Adds the empty directory of a new volume.
    pub(super) fn add(&self, volume: &Path) -> io::Result<()> {
        let Some(base) = self.base()? else { return Ok(()) };
        let used = project_quota::usage(base.as_fd(), EMPTY_DIRS)?;
        self.set(base.as_fd(), used)?;
        project_quota::join(File::open(volume)?.as_fd(), EMPTY_DIRS)
    }

    /// Opens the directory of the pods. It is in no project itself, so its file system shows the free space of the
    /// whole disk. None if there is no limit.
    fn base(&self) -> io::Result<Option<File>> {
        if !self.is_enforced {
            return Ok(None);
        }
        let base = File::open(&self.dir)?;
        Ok(Some(base).filter(|base| project_quota::is_enforced(base.as_fd())))
    }

    /// Sets the limit. The usage was read before the call. If volumes have grown since then, the limit is too small
    /// until the next call. If volumes were removed since then, it is too large until the next call.
    fn set(&self, base: BorrowedFd<'_>, used: Usage) -> io::Result<()> {
        let levels = DiskLevels::of(&fstatvfs(base)?);
        let wanted = limits(used, levels, Reserve::of(levels, &self.thresholds));
        if used.limit == wanted.bytes && wanted.inodes.is_none_or(|inodes| inodes == used.inode_limit) {
            return Ok(());
        }
        project_quota::set_limits(base, EMPTY_DIRS, wanted)
    }
}

// === impl Reserve ===

impl Reserve {
    /// Half of the hard eviction thresholds, and at least the minimum.
    fn of(levels: DiskLevels, thresholds: &EvictionThresholds) -> Self {
        let half = |threshold: Threshold, level: Level| threshold.of(level.capacity) / 2;
        let minimum = (levels.bytes.capacity / 16).clamp(*MIN_RESERVE.start(), *MIN_RESERVE.end());
        Self {
            bytes: half(thresholds.nodefs_available, levels.bytes).max(minimum),
            inodes: half(thresholds.nodefs_inodes_free, levels.inodes)
                .max(levels.inodes.capacity / MIN_INODES),
        }
    }
}

/// The limits of volumes with this usage. A file system without inodes (capacity 0) has no limit of inodes.
fn limits(used: Usage, levels: DiskLevels, reserve: Reserve) -> Limits {
    let inodes = limit(used.inodes, levels.inodes, reserve.inodes, 1);
    Limits {
        bytes: limit(used.bytes, levels.bytes, reserve.bytes, BLOCK),
        inodes: (levels.inodes.capacity > 0).then_some(inodes),
    }
}

/// The limit of one resource, a multiple of `unit`. It is never 0, which would mean no limit.
fn limit(used: u64, level: Level, reserve: u64, unit: u64) -> u64 {
    let step = (level.capacity / STEPS / unit).max(1) * unit;
    let most = used.saturating_add(level.available.saturating_sub(reserve));
    (most / step * step).max(unit)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const MI: u64 = 1 << 20;

    fn levels(bytes: u64, inodes: u64) -> DiskLevels {
        DiskLevels {
            bytes: Level { available: bytes, capacity: 1024 * MI },
            inodes: Level { available: inodes, capacity: 1 << 16 },
        }
    }

    fn thresholds() -> EvictionThresholds {
        EvictionThresholds {
            nodefs_available: Threshold::percent(20),
            nodefs_inodes_free: Threshold::percent(5),
            ..EvictionThresholds::NONE
        }
    }

    #[test]
    fn the_reserve_is_below_the_eviction_threshold_and_has_room_for_the_store() {
        let reserve = |thresholds: &EvictionThresholds| Reserve::of(levels(0, 0), thresholds);
        let half = Reserve { bytes: (1024 * MI).div_ceil(5) / 2, inodes: (1_u64 << 16).div_ceil(20) / 2 };
        assert_eq!(reserve(&thresholds()), half);
        assert_eq!(reserve(&EvictionThresholds::NONE), Reserve { bytes: 64 * MI, inodes: 512 });
        let default = EvictionThresholds::default();
        for capacity in [64 * MI, 1 << 30, 1 << 40] {
            let bytes = Level { available: 0, capacity };
            let reserve = Reserve::of(DiskLevels { bytes, ..DiskLevels::default() }, &default);
            assert!(reserve.bytes < default.nodefs_available.of(capacity), "{capacity}");
            // `MIN_FREE_BYTES` of the store.
            assert!(reserve.bytes >= 2 * (capacity / 32).clamp(2 * MI, 64 * MI), "{capacity}");
        }
    }

    #[test]
    fn volumes_can_use_what_is_free_above_the_reserve() {
        let reserve = Reserve { bytes: 100 * MI, inodes: 512 };
        let of = |used: u64, free: u64| {
            let used = Usage { bytes: used * MI, inodes: used, ..Usage::default() };
            let limits = limits(used, levels(free * MI, free * 2), reserve);
            (limits.bytes / MI, limits.inodes)
        };
        assert_eq!(of(0, 500), (400, Some(488 / 64 * 64)));
        // Writes to the volumes do not change the limit of bytes.
        assert_eq!(of(300, 200).0, 400);
        // Another program has used the reserve: the volumes cannot grow.
        assert_eq!(of(300, 50).0, 300);
    }

    #[test]
    fn a_full_disk_never_removes_the_limit() {
        let reserve = Reserve { bytes: 100 * MI, inodes: 512 };
        let wanted = limits(Usage::default(), levels(0, 0), reserve);
        assert_eq!(wanted, Limits { bytes: BLOCK, inodes: Some(1) });
        let without_inodes = DiskLevels { bytes: levels(MI, 0).bytes, ..DiskLevels::default() };
        assert_eq!(limits(Usage::default(), without_inodes, reserve).inodes, None);
    }

    #[test]
    fn a_small_change_of_the_free_space_keeps_the_limit() {
        let level = |available| Level { available, capacity: 1024 * MI };
        let bytes = |available| limit(0, level(available), 0, BLOCK);
        assert_eq!(bytes(500 * MI + 4096), bytes(500 * MI + MI - 1));
        assert!(bytes(500 * MI + 4096) <= 500 * MI + 4096 && bytes(500 * MI) != bytes(501 * MI));
        assert_eq!(limit(0, Level { available: 5000, capacity: 8000 }, 0, BLOCK), 4096);
    }

    #[test]
    fn a_file_system_without_quotas_has_no_limit() {
        let quota = EmptyDirQuota::open(Path::new("/proc"), thresholds());
        assert!(!quota.is_enforced());
        quota.add(Path::new("/proc/absent")).expect("nothing is opened");
        quota.adapt();
    }

    /// Writes until the file system refuses it. Returns the error.
    fn fill(path: &Path) -> Option<i32> {
        let mut file = File::options().create(true).append(true).open(path).expect("open");
        loop {
            if let Err(error) = file.write_all(&[7; 4096]) {
                return error.raw_os_error();
            }
        }
    }

    #[test]
    fn volumes_leave_the_reserve_on_a_file_system_with_project_quotas() {
        let dir = tempfile::tempdir().expect("directory");
        let Some(disk) = project_quota::tests::mount_with_quotas(dir.path()) else {
            coracle_testing::skip!("the kernel has no project quotas of ext4");
        };
        let pods = disk.join("pods");
        std::fs::create_dir(&pods).expect("directory");
        let quota = EmptyDirQuota::open(&pods, thresholds());
        let [a, b] = ["a", "b"].map(|name| pods.join(name));
        for volume in [&a, &b] {
            std::fs::create_dir(volume).expect("directory");
            quota.add(volume).expect("add");
        }
        // The capability exempts from quotas; containers do not have it.
        caps::drop(None, caps::CapSet::Effective, caps::Capability::CAP_SYS_RESOURCE).expect("capability");
        let base = File::open(&pods).expect("open");
        let free = || DiskLevels::of(&fstatvfs(&base).expect("free space"));
        let reserve = Reserve::of(free(), &thresholds());
        let keeps_reserve = || {
            let bytes = free().bytes;
            bytes.available + MI / 4 >= reserve.bytes
                && thresholds().nodefs_available.exceeds(bytes.available, bytes.capacity)
        };
        assert_eq!(fill(&a.join("file")), Some(libc::EDQUOT));
        assert!(keeps_reserve(), "{:?} {reserve:?}", free());
        assert_eq!(fill(&b.join("file")), Some(libc::EDQUOT), "the volumes share the limit");
        std::fs::write(disk.join("store"), vec![1; 1 << 20]).expect("other programs can use the reserve");
        std::fs::remove_file(disk.join("store")).expect("remove");
        std::fs::remove_file(a.join("file")).expect("remove");
        // Another program takes space that was free when the limit was set. A new agent adapts the limit.
        std::fs::write(disk.join("image"), vec![1; 16 << 20]).expect("write");
        EmptyDirQuota::open(&pods, thresholds()).adapt();
        std::fs::write(b.join("more"), vec![1; 4 << 20]).expect("the space of the removed file is free");
        assert_eq!(fill(&b.join("file")), Some(libc::EDQUOT));
        assert!(keeps_reserve(), "{:?} {reserve:?}", free());
        std::fs::remove_file(b.join("file")).expect("remove");
        let mut files = (0..).map(|number: u32| File::create(a.join(number.to_string())));
        let refused = files.find_map(Result::err).and_then(|error| error.raw_os_error());
        assert_eq!(refused, Some(libc::EDQUOT));
        assert!(free().inodes.available + 8 >= reserve.inodes, "{:?} {reserve:?}", free());
        // A directory in a project of the administrator stays in it.
        let own = disk.join("own");
        std::fs::create_dir(&own).expect("directory");
        project_quota::join(File::open(&own).expect("open").as_fd(), 7).expect("join");
        std::fs::create_dir(own.join("volume")).expect("directory");
        quota.add(&own.join("volume")).expect("add");
        assert_eq!(project_quota::usage(base.as_fd(), 7).expect("usage").inodes, 2);
    }
}

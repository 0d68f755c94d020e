//! Size limits of volumes by project quotas. The file system must support them: ext4 or XFS, mounted with `prjquota`.
//! All `emptyDir` volumes have one project, [`EMPTY_DIRS`]. Each local volume has a project of its own.
//!
//! The directory of a local volume has a project id, which new files in it inherit. The inode stores the id, so no
//! other record is needed. An id with inodes is never given to another volume. Limits of an id without inodes have no
//! effect.
//!
//! A container may change the ids of its own files and directories. So the agent accepts the id of a directory only if
//! it is one of the [`ATTEMPTS`] ids that follow from the volume's name. Otherwise a container could make the agent
//! change the limit of another volume. A container can still give its files the id of another volume and use up that
//! volume's limit.
#![allow(unsafe_code, reason = "quotactl_fd(2) and the ioctls of project ids have no safe wrapper")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use nix::errno::Errno;
use rustix::fs::{CWD, Mode, OFlags, openat};
use sha2::{Digest, Sha256};

/// The first project id of volumes. Other programs use small numbers; the kubelet's begin with 1048577.
const FIRST: u32 = 1 << 30;
/// Number of project ids for volumes.
const COUNT: u32 = 1 << 20;
/// The project of all `emptyDir` volumes. It is none of the ids of local volumes.
pub(crate) const EMPTY_DIRS: u32 = FIRST + COUNT;
/// Ids that a volume can have: they follow from its name.
const ATTEMPTS: u32 = 64;
/// Unit of limits in bytes (`QIF_DQBLKSIZE`).
pub(crate) const BLOCK: u64 = 1024;

// <linux/quota.h>, <linux/dqblk_xfs.h>
const PROJECT: libc::c_int = 2;
const GET_QUOTA: libc::c_int = 0x80_0007;
const SET_QUOTA: libc::c_int = 0x80_0008;
const GET_STATE: libc::c_int = 0x5805;
/// `SYS_quotactl_fd`, which `libc` does not have for all architectures. The number is the same on all.
const QUOTACTL_FD: libc::c_long = 443;
const VALID_BLOCK_LIMITS: u32 = 1;
const VALID_INODE_LIMITS: u32 = 4;
/// `FS_QUOTA_PDQ_ENFD`: limits of projects are enforced.
const ENFORCED: u16 = 1 << 5;
/// `FS_XFLAG_PROJINHERIT`
const INHERIT: u32 = 0x200;

/// `struct fsxattr` of <linux/fs.h>.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(dead_code, reason = "the kernel's layout")]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_extent_size: u32,
    padding: [u8; 8],
}

/// The beginning of `struct fs_quota_stat` of <linux/dqblk_xfs.h>, and room for the rest.
#[repr(C)]
#[allow(dead_code, reason = "the kernel's layout")]
struct QuotaState {
    version: i8,
    flags: u16,
    rest: [u64; 16],
}

nix::ioctl_read!(
    /// `FS_IOC_FSGETXATTR`
    get_attributes,
    b'X',
    31,
    Attributes
);
nix::ioctl_write_ptr!(
    /// `FS_IOC_FSSETXATTR`
    set_attributes,
    b'X',
    32,
    Attributes
);

/// Whether the file system of an existing directory enforces the sizes of volumes.
pub(crate) fn limits_sizes(dir: &Path) -> bool {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    openat(CWD, dir, flags, Mode::empty()).is_ok_and(|dir| is_enforced(dir.as_fd()))
}

/// Whether the file system of a directory enforces limits of projects.
pub(crate) fn is_enforced(dir: BorrowedFd<'_>) -> bool {
    let mut state = QuotaState { version: 1, flags: 0, rest: [0; 16] };
    // SAFETY: the kernel writes a `struct fs_quota_stat` of 80 bytes, for which `state` has room.
    unsafe { quota(dir, GET_STATE, 0, (&raw mut state).cast()) }.is_ok() && state.flags & ENFORCED != 0
}

/// Limits a new, empty directory: gives it a free project id, and sets the limit of this id. If containers use all ids
/// that a volume of this name can have, the volume has no limit, as without quotas.
pub(crate) fn assign(dir: BorrowedFd<'_>, name: &str, bytes: u64) -> io::Result<()> {
    for id in ids(name) {
        if usage(dir, id)?.inodes > 0 {
            continue;
        }
        limit(dir, id, bytes)?;
        set_project(dir, id)?;
        // Another node on this file system may have taken the id at the same time.
        if usage(dir, id)?.inodes == 1 {
            return Ok(());
        }
        set_project(dir, 0)?;
    }
    tracing::warn!(volume = name, "all project ids of the volume are in use: it has no limit");
    Ok(())
}

/// Changes the limit of a volume's directory. Does nothing if the directory has no project id.
pub(crate) fn resize(dir: BorrowedFd<'_>, name: &str, bytes: u64) -> io::Result<()> {
    match project(dir, name)? {
        Some(id) if usage(dir, id)?.limit != bytes.div_ceil(BLOCK) * BLOCK => limit(dir, id, bytes),
        _ => Ok(()),
    }
}

/// Puts an empty directory into a project. A directory that has inherited a project of the administrator stays in it.
pub(crate) fn join(dir: BorrowedFd<'_>, id: u32) -> io::Result<()> {
    if attributes(dir)?.project == 0 { set_project(dir, id) } else { Ok(()) }
}

/// The project id of a volume's directory. `None` if it has no id, or an id of another volume.
pub(crate) fn project(dir: BorrowedFd<'_>, name: &str) -> io::Result<Option<u32>> {
    let id = attributes(dir)?.project;
    Ok(ids(name).any(|own| own == id).then_some(id))
}

/// The ids that a volume of this name can have.
fn ids(name: &str) -> impl Iterator<Item = u32> + use<> {
    let digest = Sha256::digest(name.as_bytes());
    let start = digest.iter().take(4).fold(0, |start, byte| (start << 8) | u32::from(*byte)) % COUNT;
    (0..ATTEMPTS).map(move |attempt| FIRST + (start + attempt) % COUNT)
}

/// Releases the id of a removed directory. `base` is a directory of the same file system.
pub(crate) fn release_id(base: BorrowedFd<'_>, id: u32) -> io::Result<()> {
    if usage(base, id)?.inodes == 0 { limit(base, id, 0) } else { Ok(()) }
}

/// Usage and limit of a project.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
    /// Bytes; 0 means no limit.
    pub(crate) limit: u64,
    /// Inodes; 0 means no limit.
    pub(crate) inode_limit: u64,
}

/// Limits of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// 0 means no limit.
    pub(crate) bytes: u64,
    /// 0 means no limit. None keeps the limit of the project.
    pub(crate) inodes: Option<u64>,
}

/// Usage and limit of a project.
pub(crate) fn usage(dir: BorrowedFd<'_>, id: u32) -> io::Result<Usage> {
    // SAFETY: all fields are integers, for which zero is valid.
    let mut found: libc::dqblk = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes a `struct if_dqblk`, which is `libc::dqblk`.
    match unsafe { quota(dir, GET_QUOTA, id, (&raw mut found).cast()) } {
        Ok(()) => Ok(Usage {
            bytes: found.dqb_curspace,
            inodes: found.dqb_curinodes,
            limit: found.dqb_bhardlimit.saturating_mul(BLOCK),
            inode_limit: found.dqb_ihardlimit,
        }),
        // XFS has no entry for an unused id.
        Err(Errno::ENOENT) => Ok(Usage::default()),
        Err(errno) => Err(errno.into()),
    }
}

fn limit(dir: BorrowedFd<'_>, id: u32, bytes: u64) -> io::Result<()> {
    set_limits(dir, id, Limits { bytes, inodes: None })
}

/// Sets the limits of a project. The number of bytes is rounded up to [`BLOCK`].
pub(crate) fn set_limits(dir: BorrowedFd<'_>, id: u32, limits: Limits) -> io::Result<()> {
    // SAFETY: all fields are integers, for which zero is valid.
    let mut wanted: libc::dqblk = unsafe { std::mem::zeroed() };
    let blocks = limits.bytes.div_ceil(BLOCK);
    (wanted.dqb_bhardlimit, wanted.dqb_bsoftlimit, wanted.dqb_valid) = (blocks, blocks, VALID_BLOCK_LIMITS);
    if let Some(inodes) = limits.inodes {
        (wanted.dqb_ihardlimit, wanted.dqb_isoftlimit) = (inodes, inodes);
        wanted.dqb_valid |= VALID_INODE_LIMITS;
    }
    // SAFETY: the kernel reads a `struct if_dqblk`, which is `libc::dqblk`.
    unsafe { quota(dir, SET_QUOTA, id, (&raw mut wanted).cast()) }.map_err(Into::into)
}

fn attributes(dir: BorrowedFd<'_>) -> io::Result<Attributes> {
    let mut found = Attributes::default();
    // SAFETY: the kernel writes a `struct fsxattr`, which `Attributes` is.
    match unsafe { get_attributes(dir.as_raw_fd(), &raw mut found) } {
        Ok(_) => Ok(found),
        // The file system has no such attributes.
        Err(Errno::ENOTTY | Errno::EOPNOTSUPP) => Ok(Attributes::default()),
        Err(errno) => Err(errno.into()),
    }
}

fn set_project(dir: BorrowedFd<'_>, id: u32) -> io::Result<()> {
    let mut wanted = attributes(dir)?;
    wanted.project = id;
    wanted.flags = if id == 0 { wanted.flags & !INHERIT } else { wanted.flags | INHERIT };
    // SAFETY: the kernel reads a `struct fsxattr`, which `Attributes` is.
    unsafe { set_attributes(dir.as_raw_fd(), &raw const wanted) }?;
    Ok(())
}

/// Calls quotactl_fd(2) of Linux 5.14. Older kernels return ENOSYS.
///
/// # Safety
/// `data` points to what the command reads or writes.
unsafe fn quota(
    dir: BorrowedFd<'_>,
    command: libc::c_int,
    id: u32,
    data: *mut libc::c_void,
) -> Result<(), Errno> {
    let command = (command << 8) | PROJECT;
    // SAFETY: the caller passes the data of the command.
    let done = unsafe { libc::syscall(QUOTACTL_FD, dir.as_raw_fd(), command, id, data) };
    Errno::result(done).map(drop)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::File;
    use std::path::PathBuf;

    use super::*;

    /// Mounts a new ext4 file system with project quotas, for this thread only. None if the kernel has no project
    /// quotas.
    pub(crate) fn mount_with_quotas(dir: &Path) -> Option<PathBuf> {
        let run = |program: &str, words: &[&str]| {
            let status = std::process::Command::new(program).args(words).status().expect(program);
            status.success()
        };
        let (image, at) = (dir.join("image"), dir.join("disk"));
        File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("image");
        std::fs::create_dir(&at).expect("mount point");
        let (image, place) = (image.to_str().expect("path"), at.to_str().expect("path"));
        assert!(run(
            "mke2fs",
            &["-q", "-t", "ext4", "-O", "quota,project", "-E", "quotatype=prjquota", image]
        ));
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("root");
        assert!(run("mount", &["--make-rprivate", "/"]));
        run("mount", &["-t", "ext4", "-o", "loop,prjquota", image, place]).then_some(at)
    }

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!((size_of::<Attributes>(), std::mem::offset_of!(QuotaState, flags)), (28, 2));
        assert!(size_of::<QuotaState>() >= 80);
    }

    #[test]
    fn the_ids_of_a_name_are_the_same_in_each_version() {
        assert_eq!(ids("v").next(), Some(FIRST + 0x4_485e));
        assert!(ids("v").all(|id| (FIRST..FIRST + COUNT).contains(&id)));
        assert!(ids("v").all(|id| ids("w").all(|other| other != id)));
    }

    #[test]
    fn a_file_system_without_quotas_has_no_projects() {
        let dir = File::open("/proc").unwrap();
        assert!(!is_enforced(dir.as_fd()));
        assert_eq!(project(dir.as_fd(), "v").unwrap(), None);
        resize(dir.as_fd(), "v", 1).unwrap();
    }
}

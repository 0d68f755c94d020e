//! Detached mounts: copied, changed while nobody sees them, attached.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use libc::c_uint;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::{c_path, check, owned};

const MOUNT_ATTR_IDMAP: u64 = 0x10_0000;

/// The kernel's `struct mount_attr`, first version.
#[repr(C)]
#[derive(Default)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// open_tree(2) with OPEN_TREE_CLONE: a detached copy of the mount at `path` alone.
pub(crate) fn copy_one_mount(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    // SAFETY: the string outlives the call.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) })
}

/// How much of what is mounted is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// The mount itself.
    One,
    /// And all that is mounted below.
    All,
}

/// What is to be true of a mount, as `mount_setattr` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) set: u64,
    pub(crate) clear: u64,
}

/// `MOUNT_ATTR_RDONLY`.
pub(crate) const READ_ONLY: Attributes = Attributes { set: 1, clear: 0 };
/// `MOUNT_ATTR_RDONLY`, `_NOSUID`, `_NODEV` and `_NOEXEC`.
pub(crate) const READ_ONLY_DATA: Attributes = Attributes { set: 0xf, clear: 0 };

/// A detached copy of the mount that `place`, an open file or directory, lies on, from there down.
pub(crate) fn copy_mount_at(place: impl AsFd, depth: Depth) -> io::Result<OwnedFd> {
    let deep = if depth == Depth::All { libc::AT_RECURSIVE } else { 0 };
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | ((libc::AT_EMPTY_PATH | deep) as c_uint);
    let place = place.as_fd();
    // SAFETY: the string outlives the call.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, place.as_raw_fd(), c"".as_ptr(), flags) })
}

/// Shows the files of a detached mount as those of `user_namespace`: an id on the disk appears as
/// the one that the namespace maps it to. Linux 5.12, and the file system must know how.
pub(crate) fn map_ids(mount: &OwnedFd, user_namespace: &OwnedFd) -> io::Result<()> {
    let user_namespace = u64::try_from(user_namespace.as_raw_fd()).map_err(io::Error::other)?;
    set(mount, &MountAttr { set: MOUNT_ATTR_IDMAP, user_namespace, ..Default::default() }, Depth::One)
}

/// Changes the attributes of a mount, detached or not.
pub(crate) fn set_attributes(mount: impl AsFd, attributes: Attributes, depth: Depth) -> io::Result<()> {
    let Attributes { set: add, clear } = attributes;
    set(mount, &MountAttr { set: add, clear, ..Default::default() }, depth)
}

fn set(mount: impl AsFd, attributes: &MountAttr, depth: Depth) -> io::Result<()> {
    let deep = if depth == Depth::All { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: string and structure outlive the call, and the size is that of the structure.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | deep,
            std::ptr::from_ref(attributes),
            std::mem::size_of::<MountAttr>(),
        )
    })
    .map(drop)
}

/// Attaches a detached mount at an open file or directory.
pub(crate) fn attach_mount_at(mount: &OwnedFd, place: impl AsFd) -> io::Result<()> {
    const MOVE_MOUNT_F_EMPTY_PATH: c_uint = 4;
    const MOVE_MOUNT_T_EMPTY_PATH: c_uint = 0x40;
    // SAFETY: both strings outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            place.as_fd().as_raw_fd(),
            c"".as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH,
        )
    })
    .map(drop)
}

/// Makes `root`, which must be a mount, the root of this mount namespace, and this process's own root and
/// working directory; what was the root is gone for good.
pub(crate) fn change_root(root: impl AsFd) -> io::Result<()> {
    let old = std::fs::File::open("/")?;
    nix::unistd::fchdir(root)?;
    // The old root ends up on top of the new one, see pivot_root(2), and goes from there.
    nix::unistd::pivot_root(".", ".")?;
    nix::unistd::fchdir(old)?;
    // The host's mounts must not hear of it.
    let none = None::<&str>;
    mount(none, ".", none, MsFlags::MS_SLAVE | MsFlags::MS_REC, none)?;
    umount2(".", MntFlags::MNT_DETACH)?;
    Ok(nix::unistd::chdir("/")?)
}

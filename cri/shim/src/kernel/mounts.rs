//! Detached mounts: copied, changed before they are visible, attached.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use libc::c_uint;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::{c_path, check, owned};

/// open_tree(2) with OPEN_TREE_CLONE: a detached copy of the single mount at `path`.
pub(crate) fn copy_one_mount(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    // SAFETY: the string outlives the call.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) })
}

/// The scope of an operation on mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// The mount alone.
    One,
    /// The mount and all mounts below it.
    All,
}

/// Attributes of a mount to set and to clear, see mount_setattr(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) set: u64,
    pub(crate) clear: u64,
}

/// `MOUNT_ATTR_RDONLY`.
pub(crate) const READ_ONLY: Attributes = Attributes { set: 1, clear: 0 };
/// `MOUNT_ATTR_RDONLY`, `_NOSUID`, `_NODEV` and `_NOEXEC`.
pub(crate) const READ_ONLY_DATA: Attributes = Attributes { set: 0xf, clear: 0 };

/// A detached copy of the mount of `place`, an open file or directory, with `place` as its root.
pub(crate) fn copy_mount_at(place: impl AsFd, depth: Depth) -> io::Result<OwnedFd> {
    let deep = if depth == Depth::All { libc::AT_RECURSIVE } else { 0 };
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | ((libc::AT_EMPTY_PATH | deep) as c_uint);
    let place = place.as_fd();
    // SAFETY: the string outlives the call.
    owned(unsafe { libc::syscall(libc::SYS_open_tree, place.as_raw_fd(), c"".as_ptr(), flags) })
}

/// Makes an idmapped mount: an id on the disk appears as the id that `user_namespace` maps it to. Needs Linux
/// 5.12 and support in the file system.
pub(crate) fn map_ids(mount: &OwnedFd, user_namespace: &OwnedFd) -> io::Result<()> {
    let userns_fd = u64::try_from(user_namespace.as_raw_fd()).map_err(io::Error::other)?;
    let attributes =
        libc::mount_attr { attr_set: libc::MOUNT_ATTR_IDMAP, attr_clr: 0, propagation: 0, userns_fd };
    set(mount, &attributes, Depth::One)
}

/// Changes the attributes of a mount, detached or not.
pub(crate) fn set_attributes(mount: impl AsFd, attributes: Attributes, depth: Depth) -> io::Result<()> {
    let Attributes { set: attr_set, clear: attr_clr } = attributes;
    set(mount, &libc::mount_attr { attr_set, attr_clr, propagation: 0, userns_fd: 0 }, depth)
}

fn set(mount: impl AsFd, attributes: &libc::mount_attr, depth: Depth) -> io::Result<()> {
    let deep = if depth == Depth::All { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: string and structure outlive the call, and the size is that of the structure.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | deep,
            std::ptr::from_ref(attributes),
            std::mem::size_of::<libc::mount_attr>(),
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

/// pivot_root(2): makes `root`, which must be a mount, the root of this mount namespace, and the process's
/// root and working directory. The old root is unmounted.
pub(crate) fn change_root(root: impl AsFd) -> io::Result<()> {
    let old = std::fs::File::open("/")?;
    nix::unistd::fchdir(root)?;
    // The old root is now on top of the new one, see pivot_root(2), and is unmounted from there.
    nix::unistd::pivot_root(".", ".")?;
    nix::unistd::fchdir(old)?;
    // The unmount must not propagate to the host.
    let none = None::<&str>;
    mount(none, ".", none, MsFlags::MS_SLAVE | MsFlags::MS_REC, none)?;
    umount2(".", MntFlags::MNT_DETACH)?;
    Ok(nix::unistd::chdir("/")?)
}

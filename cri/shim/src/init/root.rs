//! The mounts of process 1: one read-only tmpfs that holds its program.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::fcntl::{OFlag, openat};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::Mode;

use super::{NAME, program};
use crate::kernel::{self, Attributes, Depth};

/// `MOUNT_ATTR_RDONLY` and `MOUNT_ATTR_NODEV`. `MOUNT_ATTR_NOSUID` is not set: with it, SELinux changes the program's
/// label only if the policy permits `nosuid_transition`.
const READ_ONLY: Attributes = Attributes { set: 0x1 | 0x4, clear: 0 };

/// Gives the calling process its own mount and cgroup namespaces and a new root directory, which is the
/// namespace's only mount. `label` is the SELinux label of the files.
pub(super) fn enter(label: Option<&str>) -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWCGROUP)?;
    let root = make(label)?;
    // pivot_root(2) requires a mount of this namespace. The new root is attached on top of the old root, so it needs no
    // directory.
    kernel::attach_mount(&root, Path::new("/"))?;
    kernel::change_root(&root)
}

fn make(label: Option<&str>) -> io::Result<OwnedFd> {
    let fs = kernel::fs_open(c"tmpfs")?;
    for (key, value) in [(c"mode", "555"), (c"size", "64k"), (c"nr_inodes", "4")] {
        kernel::fs_set(&fs, key, Path::new(value))?;
    }
    kernel::fs_label(&fs, label)?;
    kernel::fs_create(&fs)?;
    let root = kernel::fs_mount(&fs, false)?;
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let file = openat(&root, NAME, flags, Mode::from_bits_truncate(0o555))?;
    // The file is closed before the program starts, because the kernel executes no file that is open for writing.
    File::from(file).write_all(&program::file())?;
    kernel::set_attributes(&root, READ_ONLY, Depth::One)?;
    Ok(root)
}

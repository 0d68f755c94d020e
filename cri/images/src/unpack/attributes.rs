//! Attributes of an entry: owner, mode, extended attributes.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;

use nix::errno::Errno;
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{Gid, Uid, fchown};
use xattr::FileExt as _;

use super::root::errno;
use crate::archive::Entry;

/// With more free blocks than this, the disk does not count as full. More than one block is needed: an attribute takes
/// one block, and other processes write to the disk too.
const BLOCKS: u64 = 256;

/// Error of making an entry.
#[derive(Debug)]
pub(super) enum MakeError {
    Kernel(Errno),
    /// The attribute does not fit into the space that the file system has for a file's attributes.
    Attribute {
        name: String,
        bytes: usize,
    },
}

/// Sets owner, mode and extended attributes. The owner comes first: changing it clears set-id bits and
/// capabilities.
pub(super) fn set_attributes(file: &File, entry: &Entry) -> Result<(), MakeError> {
    fchown(file.as_fd(), Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid)))?;
    fchmod(file.as_fd(), Mode::from_bits_truncate(entry.mode))?;
    set_extended(file.as_fd(), entry, |name, value| file.set_xattr(name, value))
}

/// Sets an entry's extended attributes by the function `set`. `on_file_system` is a descriptor of any file of the same
/// file system.
pub(super) fn set_extended(
    on_file_system: BorrowedFd<'_>,
    entry: &Entry,
    set: impl Fn(&OsStr, &[u8]) -> io::Result<()>,
) -> Result<(), MakeError> {
    let all = entry.xattrs.iter().filter(|(name, _)| is_allowed(name));
    for (name, value) in all {
        match set(OsStr::from_bytes(name), value).map_err(errno) {
            Ok(()) => {}
            // An image may have labels or access lists that the file system does not support.
            Err(Errno::ENOTSUP) => {}
            // `user.` attributes are for files and directories only; on other types they cannot be
            // meaningful.
            Err(Errno::EPERM) if name.starts_with(b"user.") => {}
            Err(error) if is_too_large(error, || has_room(on_file_system)) => {
                let name = String::from_utf8_lossy(name).into_owned();
                return Err(MakeError::Attribute { name, bytes: value.len() });
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Whether an image may set the attribute. `trusted.` and `user.overlay.` control overlayfs itself.
fn is_allowed(name: &[u8]) -> bool {
    !name.starts_with(b"trusted.") && !name.starts_with(b"user.overlay.") && !name.contains(&0)
}

/// Whether the attribute does not fit. A file's attributes have limited space (ext4: the inode and one block). When
/// that space is used up, setxattr(2) returns ENOSPC, as for a full disk.
fn is_too_large(error: Errno, has_room: impl FnOnce() -> bool) -> bool {
    match error {
        Errno::E2BIG | Errno::ERANGE => true,
        Errno::ENOSPC => has_room(),
        _ => false,
    }
}

fn has_room(on_file_system: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatvfs(on_file_system).is_ok_and(|disk| disk.f_bavail > BLOCKS)
}

// === impl MakeError ===

impl From<Errno> for MakeError {
    fn from(error: Errno) -> MakeError {
        MakeError::Kernel(error)
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::is_too_large;

    #[test]
    fn a_failed_attribute_counts_as_full_disk_only_if_the_disk_is_full() {
        for (error, room, expected) in [
            (Errno::ENOSPC, true, true),
            (Errno::ENOSPC, false, false),
            (Errno::E2BIG, false, true),
            (Errno::EDQUOT, true, false),
            (Errno::EIO, true, false),
        ] {
            assert_eq!(is_too_large(error, || room), expected, "{error} {room}");
        }
    }
}

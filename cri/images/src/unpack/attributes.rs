//! What an entry says of its file besides the content: owner, mode, extended attributes.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;

use nix::errno::Errno;
use nix::sys::stat::{Mode, fchmod};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{Gid, Uid, fchown};
use xattr::FileExt as _;

use super::root::errno;
use crate::archive::Entry;

/// Blocks that must be free before a disk is called anything but full: an attribute takes one, and others write too.
const BLOCKS: u64 = 256;

/// Why an entry cannot be made as it is.
#[derive(Debug)]
pub(super) enum Cannot {
    Kernel(Errno),
    /// The file system has no room in the file itself for this attribute.
    Attribute {
        name: String,
        bytes: usize,
    },
}

/// Owner first: changing it clears set-id bits and capabilities.
pub(super) fn set_attributes(file: &File, entry: &Entry) -> Result<(), Cannot> {
    fchown(file.as_fd(), Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid)))?;
    fchmod(file.as_fd(), Mode::from_bits_truncate(entry.mode))?;
    set_extended(file.as_fd(), entry, |name, value| file.set_xattr(name, value))
}

/// Sets an entry's extended attributes by a verb of the caller's; the descriptor is of the same file system.
pub(super) fn set_extended(
    near: BorrowedFd<'_>,
    entry: &Entry,
    set: impl Fn(&OsStr, &[u8]) -> io::Result<()>,
) -> Result<(), Cannot> {
    let all = entry.xattrs.iter().filter(|(name, _)| is_images(name));
    for (name, value) in all {
        match set(OsStr::from_bytes(name), value).map_err(errno) {
            Ok(()) => {}
            // A label or access list that this file system does not have is no reason to refuse an image.
            Err(Errno::ENOTSUP) => {}
            // Only files and directories have these; whoever wrote the archive could not have read one.
            Err(Errno::EPERM) if name.starts_with(b"user.") => {}
            Err(error) if is_too_large(error, || has_room(near)) => {
                let name = String::from_utf8_lossy(name).into_owned();
                return Err(Cannot::Attribute { name, bytes: value.len() });
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Attributes in `trusted.` steer overlayfs itself, where no image has a say; so does `user.overlay.`.
fn is_images(name: &[u8]) -> bool {
    !name.starts_with(b"trusted.") && !name.starts_with(b"user.overlay.") && !name.contains(&0)
}

/// Whether it is the attribute that does not fit. A file's attributes have their own small place (ext4: the inode and one
/// block), and when that is used up setxattr(2) says ENOSPC as it does for a full disk.
fn is_too_large(error: Errno, has_room: impl FnOnce() -> bool) -> bool {
    match error {
        Errno::E2BIG | Errno::ERANGE => true,
        Errno::ENOSPC => has_room(),
        _ => false,
    }
}

fn has_room(near: BorrowedFd<'_>) -> bool {
    fstatvfs(near).is_ok_and(|disk| disk.blocks_available() > BLOCKS)
}

// === impl Cannot ===

impl From<Errno> for Cannot {
    fn from(error: Errno) -> Cannot {
        Cannot::Kernel(error)
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::is_too_large;

    #[test]
    fn no_room_for_an_attribute_is_a_full_disk_only_where_the_disk_is_full() {
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

//! Sets and reads modification times by system calls. The functions of the C library are not used: on 32-bit ARM their
//! seconds have 32 bits, which end in 2038.

use std::ffi::OsStr;
use std::os::fd::AsFd;

use nix::errno::Errno;
use rustix::fs::{AtFlags, Timespec, Timestamps, fstat, futimens, utimensat};

use crate::archive::Mtime;

/// Sets both times of an open file or directory.
pub(super) fn set(file: impl AsFd, time: Mtime) -> Result<(), Errno> {
    futimens(file, &timestamps(time)).map_err(errno)
}

/// Sets both times of an entry of a directory. A symbolic link is not followed.
pub(super) fn set_at(directory: impl AsFd, name: &OsStr, time: Mtime) -> Result<(), Errno> {
    utimensat(directory, name, &timestamps(time), AtFlags::SYMLINK_NOFOLLOW).map_err(errno)
}

/// The modification time of an open file or directory.
pub(super) fn get(file: impl AsFd) -> Result<Mtime, Errno> {
    let found = fstat(file).map_err(errno)?;
    // The kernel's nanoseconds are below a second. Their type depends on the architecture.
    let nanoseconds = u32::try_from(found.st_mtime_nsec).unwrap_or_default();
    Ok(Mtime { seconds: found.st_mtime, nanoseconds })
}

fn timestamps(time: Mtime) -> Timestamps {
    let time = Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() };
    Timestamps { last_access: time, last_modification: time }
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs::File;

    use super::{Mtime, get, set, set_at};

    #[test]
    fn times_after_2038_are_set_and_links_are_not_followed() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("file");
        let file = File::create(&path).unwrap();
        std::os::unix::fs::symlink(&path, scratch.path().join("link")).unwrap();
        let (directory, time) =
            (File::open(scratch.path()).unwrap(), |seconds| Mtime { seconds, nanoseconds: 5 });
        set(&file, time(4_102_444_800)).unwrap();
        set_at(&directory, OsStr::new("link"), time(-7)).unwrap();
        assert_eq!(get(&file), Ok(time(4_102_444_800)));
        set_at(&directory, OsStr::new("file"), time(1 << 31)).unwrap();
        assert_eq!(get(&file), Ok(time(1 << 31)));
    }
}

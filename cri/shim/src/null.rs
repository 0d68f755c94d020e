//! The host's /dev/null, for container streams that are not connected.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;

use nix::sys::stat::{fstat, makedev};

use crate::kernel::{self, Depth, READ_ONLY};

/// Opens the host's /dev/null through [`mount`]. Must be called in the host's mount namespace.
pub(crate) fn open() -> io::Result<OwnedFd> {
    open_found(&mount()?)
}

/// A detached copy of the mount of the host's /dev/null. Must be called in the host's mount namespace.
///
/// The copy is read-only: through it, root of a container cannot change mode or owner of the host's node. Devices on a
/// read-only mount can still be written.
pub(crate) fn mount() -> io::Result<OwnedFd> {
    let null = kernel::copy_one_mount(Path::new("/dev/null"))?;
    if !is_null(&null)? {
        return Err(io::Error::other("the host's /dev/null is another device"));
    }
    kernel::set_attributes(&null, READ_ONLY, Depth::One)?;
    Ok(null)
}

/// Opens the container's own /dev/null below `root`; the caller is in the host's mount namespace. Links and
/// other files are refused.
pub(crate) fn open_in(root: impl AsFd) -> io::Result<OwnedFd> {
    let flags = libc::O_PATH | libc::O_NOFOLLOW;
    let found = kernel::open_plain_in_root(root, Path::new("/dev/null"), flags)?;
    if !is_null(&found)? {
        return Err(io::Error::other("the container's /dev/null is another file"));
    }
    open_found(&found)
}

/// Whether a file is the character device 1:3.
pub(crate) fn is_null(file: impl AsFd) -> io::Result<bool> {
    let found = fstat(file)?;
    Ok(found.st_mode & libc::S_IFMT == libc::S_IFCHR && found.st_rdev == makedev(1, 3))
}

/// Reopens an O_PATH descriptor for reading and writing through the host's /proc, without resolving a path
/// again.
fn open_found(found: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    Ok(File::options().read(true).write(true).open(path)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_cannot_change_the_hosts_node_through_the_mount() {
        let mount = mount().expect("this test needs root");
        let path = format!("/proc/self/fd/{}", mount.as_raw_fd());
        // The test sets the current mode. So the call changes nothing if it succeeds, as it does without the read-only
        // mount.
        let mode = std::fs::metadata(&path).unwrap().permissions();
        let refused = std::fs::set_permissions(&path, mode).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(nix::unistd::write(open().unwrap(), b"x"), Ok(1));
    }

    #[test]
    fn only_the_device_is_opened_and_no_link_is_followed() {
        let root = std::env::temp_dir().join(format!("coracle-null-{}", std::process::id()));
        std::fs::create_dir_all(root.join("dev")).unwrap();
        let (open, null) = (File::open(&root).unwrap(), root.join("dev/null"));
        std::os::unix::fs::symlink("/dev/zero", &null).unwrap();
        assert!(open_in(&open).is_err());
        std::fs::remove_file(&null).unwrap();
        std::fs::write(&null, "").unwrap();
        assert!(open_in(&open).is_err());
        std::fs::remove_dir_all(root).unwrap();
        let host = File::open("/").unwrap();
        assert!(is_null(open_in(&host).unwrap()).unwrap());
    }
}

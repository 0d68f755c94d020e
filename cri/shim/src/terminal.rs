//! A new terminal of the container that this process is in.
//!
//! No path that the container controls is opened before it is known what lies there: the directory of its devpts is
//! opened with O_PATH and checked, the master below it on the same mount, and the other side by the master (runc and
//! libcontainer open /dev/ptmx, which root of a container can replace; CVE-2025-52565).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use nix::sys::stat::{fstat, makedev};
use nix::sys::statfs::{FsType, fstatfs};

use crate::kernel;

/// `DEVPTS_SUPER_MAGIC` of linux/magic.h.
const DEVPTS: FsType = FsType(0x1cd1);

/// Makes one below `root`, sends its master to `socket`, and makes the other side the controlling terminal and the
/// standard streams of this process, which leads its session. Returns that side.
pub(crate) fn take(root: impl AsFd, socket: impl AsFd, uid: u32) -> io::Result<OwnedFd> {
    let (master, own) = make(root)?;
    let descriptors = [master.as_raw_fd()];
    let message = [ControlMessage::ScmRights(&descriptors)];
    let text = [IoSlice::new(b"/dev/ptmx")];
    sendmsg::<UnixAddr>(socket.as_fd().as_raw_fd(), &text, &message, MsgFlags::empty(), None)?;
    kernel::take_terminal(&own)?;
    (0..3).try_for_each(|standard| kernel::place(own.as_raw_fd(), standard))?;
    // A refusal costs only the opening by name.
    let _ = nix::unistd::fchown(&own, Some(uid.into()), None);
    Ok(own)
}

/// Master and other side.
fn make(root: impl AsFd) -> io::Result<(OwnedFd, OwnedFd)> {
    let directory = kernel::open_in_root(root, Path::new("/dev/pts"), libc::O_PATH | libc::O_DIRECTORY)?;
    if fstatfs(&directory)?.filesystem_type() != DEVPTS {
        return Err(io::Error::other("/dev/pts is no devpts"));
    }
    let flags = libc::O_RDWR | libc::O_NOCTTY;
    let master = kernel::open_plain_same_mount(&directory, Path::new("ptmx"), flags)?;
    let found = fstat(&master)?;
    if found.st_mode & libc::S_IFMT != libc::S_IFCHR || found.st_rdev != makedev(5, 2) {
        return Err(io::Error::other("/dev/pts/ptmx is another file"));
    }
    let own = kernel::open_terminal_of(&master)?;
    Ok((master, own))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_directory_that_is_no_devpts_gives_no_terminal() {
        let root = std::env::temp_dir().join(format!("coracle-terminal-{}", std::process::id()));
        std::fs::create_dir_all(root.join("dev/pts")).unwrap();
        std::os::unix::fs::symlink("/dev/ptmx", root.join("dev/pts/ptmx")).unwrap();
        let error = make(File::open(&root).unwrap()).unwrap_err();
        assert!(error.to_string().contains("no devpts"), "{error}");
        std::fs::remove_dir_all(root).unwrap();
        let (master, own) = make(File::open("/").unwrap()).unwrap();
        nix::unistd::write(&own, b"x").unwrap();
        assert_eq!(nix::unistd::read(&master, &mut [0; 8]), Ok(1));
    }
}

//! Makes a terminal in the container that this process has joined.
//!
//! Paths that the container controls are checked before they are opened for use. The devpts directory is opened with
//! O_PATH and checked. The master is opened on the same mount, and the slave through the master. In contrast, runc and
//! libcontainer open /dev/ptmx, which root of a container can replace (CVE-2025-52565).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use nix::sys::stat::{fstat, makedev};
use nix::sys::statfs::{FsType, fstatfs};

use crate::kernel;

/// `DEVPTS_SUPER_MAGIC` of linux/magic.h.
const DEVPTS: FsType = FsType(0x1cd1);

/// The two ends of a terminal.
#[derive(Debug)]
struct Terminal {
    master: OwnedFd,
    slave: OwnedFd,
}

/// Makes a terminal below `root`, and sends its master to `socket`. The slave becomes the controlling terminal and the
/// standard streams of this process, which must be a session leader. Returns the slave.
pub(crate) fn set_up(root: impl AsFd, socket: impl AsFd, uid: u32) -> io::Result<OwnedFd> {
    let Terminal { master, slave } = make(root)?;
    let descriptors = [master.as_raw_fd()];
    let message = [ControlMessage::ScmRights(&descriptors)];
    let text = [IoSlice::new(b"/dev/ptmx")];
    sendmsg::<UnixAddr>(socket.as_fd().as_raw_fd(), &text, &message, MsgFlags::empty(), None)?;
    kernel::take_terminal(&slave)?;
    (0..3).try_for_each(|standard| kernel::dup_to(slave.as_raw_fd(), standard))?;
    // A failure is ignored. Programs then cannot open the terminal by its name, but can use their standard streams.
    let _ = nix::unistd::fchown(&slave, Some(uid.into()), None);
    Ok(slave)
}

/// Makes a terminal with the devpts of a container.
fn make(root: impl AsFd) -> io::Result<Terminal> {
    let directory = kernel::open_in_root(root, Path::new("/dev/pts"), libc::O_PATH | libc::O_DIRECTORY)?;
    if fstatfs(&directory)?.filesystem_type() != DEVPTS {
        return Err(io::Error::other("/dev/pts is not a devpts file system"));
    }
    let flags = libc::O_RDWR | libc::O_NOCTTY;
    let master = kernel::open_plain_same_mount(&directory, Path::new("ptmx"), flags)?;
    let found = fstat(&master)?;
    if found.st_mode & libc::S_IFMT != libc::S_IFCHR || found.st_rdev != makedev(5, 2) {
        return Err(io::Error::other("/dev/pts/ptmx is not the ptmx device"));
    }
    let slave = kernel::open_terminal_of(&master)?;
    Ok(Terminal { master, slave })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_directory_that_is_not_devpts_is_refused() {
        let root = std::env::temp_dir().join(format!("coracle-terminal-{}", std::process::id()));
        std::fs::create_dir_all(root.join("dev/pts")).unwrap();
        std::os::unix::fs::symlink("/dev/ptmx", root.join("dev/pts/ptmx")).unwrap();
        let error = make(File::open(&root).unwrap()).unwrap_err();
        assert!(error.to_string().contains("not a devpts file system"), "{error}");
        std::fs::remove_dir_all(root).unwrap();
        let Terminal { master, slave } = make(File::open("/").unwrap()).unwrap();
        nix::unistd::write(&slave, b"x").unwrap();
        assert_eq!(nix::unistd::read(&master, &mut [0; 8]), Ok(1));
    }
}

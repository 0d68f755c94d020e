//! The console socket: the container's first process or the container library sends the terminal's master descriptor
//! over it.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::cmsg_space;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

use crate::kernel;

/// A listening socket that receives one message: the master descriptor.
#[derive(Debug)]
pub(crate) struct Console {
    listener: UnixListener,
    path: PathBuf,
}

// === impl Console ===

impl Console {
    pub(crate) fn listen(dir: &Path) -> io::Result<Self> {
        let path = dir.join("console.sock");
        let handle = std::fs::File::open(dir)?;
        let listener = UnixListener::bind(short_socket_path(&handle, "console.sock"))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Receives the master. It never blocks: the master was sent before the container was reported as created.
    pub(crate) fn receive(self) -> io::Result<OwnedFd> {
        let (stream, _) = self.listener.accept()?;
        let _ = std::fs::remove_file(&self.path);
        receive_from(&stream)
    }
}

/// Receives the descriptor that is queued in a socket.
pub(crate) fn receive_from(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut text = [0_u8; 64];
    let mut control = cmsg_space!([RawFd; 1]);
    let mut slices = [IoSliceMut::new(&mut text)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_fd().as_raw_fd(), &mut slices, Some(&mut control), flags)?;
    let mut fds = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            fds.append(&mut kernel::adopt(raw));
        }
    }
    fds.pop().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no terminal descriptor received"))
}

/// A path to a socket through `/proc/self/fd`. It fits into the 108 bytes of `sockaddr_un` even if the path of the directory
/// is longer.
pub(crate) fn short_socket_path(dir: &std::fs::File, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()))
}

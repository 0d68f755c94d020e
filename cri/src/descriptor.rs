//! A pipe, socket or terminal as an asynchronous stream.
#![allow(unsafe_code, reason = "registering a descriptor with the reactor requires a guarantee about it")]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// An asynchronous descriptor. EIO of a terminal, after its last process closed it, counts as end of file.
#[derive(Debug)]
pub(crate) struct Descriptor {
    fd: AsyncFd<OwnedFd>,
}

/// Sets a terminal's size through its master.
pub(crate) fn set_window(terminal: impl AsFd, width: u16, height: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the descriptor is open, and the call reads a `size` that outlives it.
    let set = unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    Ok(Errno::result(set).map(drop)?)
}

// === impl Descriptor ===

impl Descriptor {
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        // SAFETY: an `OwnedFd` names one descriptor, and keeps it open until the `AsyncFd` is dropped.
        let fd = unsafe { AsyncFd::register(fd) }.map_err(|error| error.into_parts().1)?;
        Ok(Self { fd })
    }
}

impl AsyncRead for Descriptor {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.fd.poll_read_ready(cx))?;
            let read = ready.try_io(|fd| match nix::unistd::read(fd.as_fd(), buf.initialize_unfilled()) {
                Err(Errno::EIO) => Ok(0),
                other => other.map_err(io::Error::from),
            });
            match read {
                Ok(Ok(count)) => {
                    buf.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Poll::Ready(Err(error)),
                Err(_would_block) => {}
            }
        }
    }
}

impl AsyncWrite for Descriptor {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.fd.poll_write_ready(cx))?;
            match ready.try_io(|fd| nix::unistd::write(fd.as_fd(), buf).map_err(io::Error::from)) {
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(written) => return Poll::Ready(written),
                Err(_would_block) => {}
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

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
///
/// A pipe or terminal whose other side was closed has ended, even if a process opens that side again. The reactor never
/// clears the readiness of a closed side: a task that waited for more would be polled forever.
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
            let has_ended = ready.ready().is_read_closed();
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
                Err(_would_block) if has_ended => return Poll::Ready(Ok(())),
                Err(_would_block) => {}
            }
        }
    }
}

impl AsyncWrite for Descriptor {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.fd.poll_write_ready(cx))?;
            let has_ended = ready.ready().is_write_closed();
            match ready.try_io(|fd| nix::unistd::write(fd.as_fd(), buf).map_err(io::Error::from)) {
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(written) => return Poll::Ready(written),
                Err(_would_block) if has_ended => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Duration;

    use nix::fcntl::FdFlag;
    use nix::unistd::pipe2;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::time::timeout;

    use super::*;

    /// Timeout that ends a test whose call loops forever. Without the fault the calls return at once.
    const LIMIT: Duration = Duration::from_secs(60);

    /// A process of a container can open its standard output for reading, and then open that descriptor for writing
    /// again.
    #[tokio::test]
    async fn a_pipe_that_was_closed_and_opened_again_has_ended() {
        let (read, write) = pipe2(OFlag::O_CLOEXEC).unwrap();
        let other = File::open(format!("/proc/self/fd/{}", read.as_raw_fd())).unwrap();
        let mut pipe = Descriptor::new(read).unwrap();
        drop(write);
        pipe.fd.readable().await.unwrap().retain_ready();
        let path = format!("/proc/self/fd/{}", other.as_raw_fd());
        let _again = File::options().write(true).open(path).unwrap();
        let read = timeout(LIMIT, pipe.read(&mut [0; 8])).await.expect("the read ends");
        assert_eq!(read.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_write_to_a_terminal_that_no_process_has_open_ends() {
        let terminal = nix::pty::openpty(None, None).unwrap();
        fcntl(&terminal.slave, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
        let mut master = Descriptor::new(terminal.master).unwrap();
        drop(terminal.slave);
        let written = timeout(LIMIT, master.write_all(&[b'x'; 1 << 20])).await.expect("the write ends");
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}

//! A stream with an observer: the shared part of streams that record their traffic or keep a permit.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// An observer of a stream. It gets the result of each operation, and returns the result for the caller.
pub trait Observe: Unpin {
    /// Called after a read. `is_end` is true if the read found the end of the stream.
    fn on_read(
        &mut self,
        _cx: &mut Context<'_>,
        read: Poll<io::Result<()>>,
        _is_end: bool,
    ) -> Poll<io::Result<()>> {
        read
    }

    /// Called after a write, with the number of written bytes.
    fn on_write(
        &mut self,
        _cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        written
    }

    /// Called after a flush or a shutdown. A stream with a buffer waits in these calls for a client that does not read.
    fn on_flush(&mut self, _cx: &mut Context<'_>, flushed: Poll<io::Result<()>>) -> Poll<io::Result<()>> {
        flushed
    }
}

/// A stream with its observer.
#[derive(Debug)]
pub struct Observed<I, O> {
    /// Declared before the stream, so that it is dropped first.
    observer: O,
    io: I,
}

// === impl Observed ===

impl<I, O: Observe> Observed<I, O> {
    /// Adds an observer to a stream.
    pub fn with_observer(io: I, observer: O) -> Self {
        Self { observer, io }
    }
}

impl<I: AsyncRead + Unpin, O: Observe> AsyncRead for Observed<I, O> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let room = buf.remaining();
        let read = Pin::new(&mut this.io).poll_read(cx, buf);
        let is_end = matches!(read, Poll::Ready(Ok(()))) && room > 0 && buf.remaining() == room;
        this.observer.on_read(cx, read, is_end)
    }
}

impl<I: AsyncWrite + Unpin, O: Observe> AsyncWrite for Observed<I, O> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write(cx, buf);
        this.observer.on_write(cx, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write_vectored(cx, bufs);
        this.observer.on_write(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.io).poll_flush(cx);
        this.observer.on_flush(cx, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let closed = Pin::new(&mut this.io).poll_shutdown(cx);
        this.observer.on_flush(cx, closed)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Counts ends and written bytes.
    #[derive(Default)]
    struct Counter {
        ends: usize,
        written: usize,
    }

    impl Observe for Counter {
        fn on_read(
            &mut self,
            _cx: &mut Context<'_>,
            read: Poll<io::Result<()>>,
            is_end: bool,
        ) -> Poll<io::Result<()>> {
            self.ends += usize::from(is_end);
            read
        }

        fn on_write(
            &mut self,
            _cx: &mut Context<'_>,
            written: Poll<io::Result<usize>>,
        ) -> Poll<io::Result<usize>> {
            if let Poll::Ready(Ok(count)) = &written {
                self.written += count;
            }
            written
        }
    }

    #[tokio::test]
    async fn the_end_and_all_writes_are_observed() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let mut stream = Observed::with_observer(ours, Counter::default());
        theirs.write_all(b"hello").await.expect("write");
        theirs.shutdown().await.expect("shutdown");
        stream.read_exact(&mut [0; 5]).await.expect("read");
        assert_eq!(stream.read(&mut []).await.expect("read"), 0);
        assert_eq!(stream.observer.ends, 0, "a read without room finds no end");
        assert_eq!(stream.read(&mut [0]).await.expect("read"), 0);
        assert_eq!(stream.observer.ends, 1);
        stream.write_all(b"abc").await.expect("write");
        let parts = [io::IoSlice::new(b"de"), io::IoSlice::new(b"f")];
        let count = stream.write_vectored(&parts).await.expect("write");
        stream.flush().await.expect("flush");
        assert_eq!(stream.observer.written, 3 + count);
        let mut received = vec![0; 3 + count];
        theirs.read_exact(&mut received).await.expect("read");
        assert_eq!(received, b"abcdef"[..3 + count]);
    }
}

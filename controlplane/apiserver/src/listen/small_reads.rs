//! Short reads of an HTTP/1.1 connection whose client has no certificate.
//!
//! The bytes that follow a complete request wait in the connection's buffer until the request ends. They are the start
//! of the next header. [`HeaderMemory`](super::header_memory::HeaderMemory) cannot know where a body ends, so it does
//! not count these bytes. The HTTP library reads nothing while its buffer has such bytes, so all of them come from one
//! read. One read is limited to the size of a header that does not count.

use std::{
    io,
    pin::Pin,
    sync::Weak,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum bytes of one read. The HTTP library doubles its buffer after a read of 8 KiB.
const MAX_READ: usize = (8 << 10) - 1;

/// A stream with reads of at most [`MAX_READ`] bytes.
pub(super) struct SmallReads<I, T> {
    io: I,
    /// Reads are short while the referenced value exists.
    limiting: Weak<T>,
}

// === impl SmallReads ===

impl<I, T> SmallReads<I, T> {
    /// Limits the reads of a stream while `limiting` exists.
    pub(super) fn new(io: I, limiting: Weak<T>) -> Self {
        Self { io, limiting }
    }
}

impl<I: AsyncRead + Unpin, T> AsyncRead for SmallReads<I, T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if buf.remaining() <= MAX_READ || this.limiting.strong_count() == 0 {
            return Pin::new(&mut this.io).poll_read(cx, buf);
        }
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(MAX_READ));
        ready!(Pin::new(&mut this.io).poll_read(cx, &mut part))?;
        let count = part.filled().len();
        buf.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncWrite + Unpin, T> AsyncWrite for SmallReads<I, T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        time::Duration,
    };

    use bytes::Bytes;
    use http::{Request, Response};
    use http_body_util::Full;
    use hyper::{body::Incoming, service::service_fn};
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_util::io::InspectReader;

    use super::*;
    use crate::listen::builder;

    #[tokio::test(start_paused = true)]
    async fn a_running_request_holds_few_bytes_of_the_next_header() {
        let (mut client, connection) = tokio::io::duplex(1 << 20);
        let (header, taken) = (Arc::new(()), Arc::<AtomicUsize>::default());
        let counter = taken.clone();
        let limited = SmallReads::new(connection, Arc::downgrade(&header));
        let held = InspectReader::new(limited, move |received: &[u8]| {
            counter.fetch_add(received.len(), Ordering::Relaxed);
        });
        let service = service_fn(|_request: Request<Incoming>| {
            std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>()
        });
        let pipelined =
            format!("GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nA: {}", "x".repeat(60 << 10));
        client.write_all(pipelined.as_bytes()).await.unwrap();
        let builder = builder(false);
        let served = builder.serve_connection_with_upgrades(TokioIo::new(held), service);
        // The clock advances when the server has nothing to do.
        assert!(tokio::time::timeout(Duration::from_secs(1), served).await.is_err());
        // The library first reads as many bytes as the preface of HTTP/2 has. They are the start of the running
        // request.
        let preface = 24;
        let taken = taken.load(Ordering::Relaxed);
        assert!((1..=preface + MAX_READ).contains(&taken), "{taken}");
    }

    #[tokio::test]
    async fn reads_of_an_upgraded_connection_are_long() {
        let (mut client, connection) = tokio::io::duplex(1 << 20);
        let header = Arc::new(());
        let mut stream = SmallReads::new(connection, Arc::downgrade(&header));
        client.write_all(&[1; 64 << 10]).await.unwrap();
        let mut buffer = vec![0; 32 << 10];
        assert_eq!(stream.read(&mut buffer).await.unwrap(), MAX_READ);
        assert!(buffer[..MAX_READ].iter().all(|byte| *byte == 1));
        drop(header);
        assert_eq!(stream.read(&mut buffer).await.unwrap(), buffer.len());
        stream.write_all(b"abc").await.unwrap();
        let mut received = [0; 3];
        client.read_exact(&mut received).await.unwrap();
        assert_eq!(&received, b"abc");
    }
}

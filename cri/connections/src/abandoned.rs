//! Streams whose client has closed the connection while nothing reads the data that the client sent before.
//!
//! A stream sees the end of a connection only after it has read all data before the end. A stream that waits for a slow
//! receiver does not read, so it would hold its memory and descriptors until the receiver continues. So while a stream does
//! not read, the end is polled: every [`INTERVAL`] the kernel is asked whether the client has closed its side.
#![allow(unsafe_code, reason = "poll(2) with POLLRDHUP, which nix does not have")]

use std::io;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use nix::libc;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;

use crate::ConnectionPermit;

/// Interval of the checks of a stream that does not read.
const INTERVAL: Duration = Duration::from_secs(10);
/// Intervals without a read after which a stream is abandoned if its client has closed its side. A client that only closed
/// its side for writing still waits for the answer, so its data gets some time to be read.
const IDLE_INTERVALS: u32 = 3;

/// The socket of a connection; none before its stream exists, and after it.
#[derive(Debug, Default)]
pub(crate) struct Socket {
    descriptor: Mutex<Option<RawFd>>,
}

/// The time for which a stream owns the socket of its permit.
#[derive(Debug)]
pub(crate) struct SocketOwner {
    permit: Arc<ConnectionPermit>,
}

/// A stream that records its reads.
#[derive(Debug)]
pub struct ReadWatch<I> {
    io: I,
    reads: Arc<Reads>,
}

/// Notices that the client of a stream is gone.
#[derive(Debug)]
pub struct Abandonment {
    reads: Arc<Reads>,
    /// None for a connection whose socket is not known.
    permit: Option<Arc<ConnectionPermit>>,
}

#[derive(Debug, Default)]
struct Reads {
    /// Number of completed reads.
    count: AtomicU64,
    /// The stream waits for data, and so notices the end by itself.
    is_waiting: AtomicBool,
    completed: Notify,
}

/// Watches the reads of a stream on the connection of a permit.
pub fn watch_reads<I>(io: I, permit: Option<Arc<ConnectionPermit>>) -> (ReadWatch<I>, Abandonment) {
    let reads = Arc::<Reads>::default();
    (ReadWatch { io, reads: reads.clone() }, Abandonment { reads, permit })
}

// === impl Socket ===

impl Socket {
    fn descriptor(&self) -> MutexGuard<'_, Option<RawFd>> {
        self.descriptor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the client has closed its side. The data before that may not have been read.
    fn is_closed_by_client(&self) -> bool {
        // The owner removes the descriptor before it is closed, and waits for this lock.
        let descriptor = self.descriptor();
        let Some(fd) = *descriptor else { return false };
        let mut poll = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: the call reads and writes one `pollfd`, which outlives it. It does not wait.
        let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
        ready == 1 && poll.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
    }
}

// === impl SocketOwner ===

impl SocketOwner {
    pub(crate) fn new(permit: Arc<ConnectionPermit>, descriptor: RawFd) -> Self {
        *permit.socket.descriptor() = Some(descriptor);
        Self { permit }
    }
}

impl Drop for SocketOwner {
    fn drop(&mut self) {
        *self.permit.socket.descriptor() = None;
    }
}

// === impl Abandonment ===

impl Abandonment {
    /// Returns when the client has closed the connection and the stream has not read for some time. Does not wake while
    /// the stream waits for data. Returns also when the connection is evicted, because after an upgrade nothing else
    /// closes it.
    pub async fn happened(self) {
        let Some(permit) = &self.permit else { return std::future::pending().await };
        tokio::select! {
            // The other arm only waits.
            () = permit.evicted.cancelled() => {}
            () = self.is_unread(permit) => {}
        }
    }

    /// Returns when the client has closed the connection and the stream has not read for some time.
    async fn is_unread(&self, permit: &ConnectionPermit) {
        loop {
            self.reads.completed.notified().await;
            let mut before = self.reads.count.load(Ordering::Relaxed);
            let mut idle = 0;
            loop {
                tokio::time::sleep(INTERVAL).await;
                if self.reads.is_waiting.load(Ordering::Relaxed) {
                    break;
                }
                let now = self.reads.count.load(Ordering::Relaxed);
                idle = if now == before { idle + 1 } else { 0 };
                before = now;
                if idle >= IDLE_INTERVALS && permit.socket.is_closed_by_client() {
                    return;
                }
            }
        }
    }
}

// === impl ReadWatch ===

impl<I: AsyncRead + Unpin> AsyncRead for ReadWatch<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        self.reads.is_waiting.store(read.is_pending(), Ordering::Relaxed);
        if read.is_ready() {
            self.reads.count.fetch_add(1, Ordering::Relaxed);
            self.reads.completed.notify_one();
        }
        read
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for ReadWatch<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::timeout;

    use super::*;
    use crate::{Connections, Limits, PermitStream};

    const LONG: Duration = Duration::from_secs(3600);

    /// A client that has sent five bytes, of which the stream has read the first one.
    async fn connected() -> (TcpStream, ReadWatch<PermitStream<TcpStream>>, Abandonment) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let mut client = TcpStream::connect(listener.local_addr().expect("address")).await.expect("connect");
        let (accepted, address) = listener.accept().await.expect("accept");
        let permit = Connections::new(Limits::share(8, 8)).admit(address.ip()).expect("a place");
        let permit = Arc::new(permit);
        let stream = PermitStream::of_socket(accepted, permit.clone());
        let (mut stream, abandonment) = watch_reads(stream, Some(permit));
        client.write_all(b"hello").await.expect("write");
        stream.read_exact(&mut [0]).await.expect("read");
        (client, stream, abandonment)
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_connection_is_noticed_while_its_data_is_not_read() {
        let (client, stream, abandonment) = connected().await;
        let permit = abandonment.permit.clone().expect("a permit");
        let mut happened = std::pin::pin!(abandonment.happened());
        assert!(timeout(LONG, &mut happened).await.is_err(), "the client is connected");
        drop(client);
        assert!(timeout(LONG, happened).await.is_ok());
        assert!(permit.socket.is_closed_by_client());
        drop(stream);
        assert!(!permit.socket.is_closed_by_client(), "there is no socket any more");
    }

    #[tokio::test(start_paused = true)]
    async fn an_evicted_connection_is_abandoned_at_once() {
        let (_client, _stream, abandonment) = connected().await;
        let permit = abandonment.permit.clone().expect("a permit");
        let mut happened = std::pin::pin!(abandonment.happened());
        assert!(timeout(LONG, &mut happened).await.is_err(), "the client is connected");
        permit.evicted.cancel();
        assert!(timeout(Duration::ZERO, happened).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn data_before_the_end_can_still_be_read() {
        let (client, mut stream, abandonment) = connected().await;
        drop(client);
        let reading = async {
            for _ in 0..4 {
                tokio::time::sleep(INTERVAL * 3 / 4).await;
                stream.read_exact(&mut [0]).await.expect("read");
            }
        };
        tokio::select! {
            biased;
            () = reading => {}
            () = abandonment.happened() => panic!("the stream still reads"),
        }
    }
}

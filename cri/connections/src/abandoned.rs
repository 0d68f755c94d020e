//! Detects streams whose client has closed the connection while earlier data of the client is still unread.
//!
//! A stream notices the end of a connection only after it has read all data before the end. A stream that waits for a
//! slow receiver does not read, so it would hold its memory and descriptors until the receiver continues. Therefore the
//! state of the socket is polled every [`INTERVAL`] while a stream does not read.
//!
//! The kernel distinguishes two states:
//! - The client has closed its side for writing (`POLLRDHUP`). It may still read. This state is normal once a stream
//!   has read and forwarded the end of the data.
//! - Both sides are closed, or the client has sent a reset (`POLLHUP`, `POLLERR`). No output can arrive any more. If
//!   the client has closed both sides, the kernel detects this by the client's reset, which answers the next output or
//!   keepalive probe.
//!
//! Neither state ends a stream at once. Buffers may still hold data of the client. A stream that still reads delivers
//! this data.
#![allow(unsafe_code, reason = "poll(2) with POLLRDHUP, which nix does not have")]

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use nix::libc;
use tokio::sync::Notify;

use crate::ConnectionPermit;
use crate::observed::{Observe, Observed};

/// Interval of the checks of a stream that does not read.
const INTERVAL: Duration = Duration::from_secs(10);
/// Number of intervals without a read after which a stream counts as abandoned, if its client has closed the
/// connection. A client that has only closed its side for writing still waits for the response. So the stream gets this
/// time to read the client's data.
const IDLE_INTERVALS: u32 = 3;

/// The socket of a connection. It has no descriptor before the connection has a stream, and after the stream's end.
#[derive(Debug, Default)]
pub(crate) struct Socket {
    descriptor: Mutex<Option<RawFd>>,
}

/// The registration of a stream's socket in its permit. Dropping it removes the socket from the permit.
#[derive(Debug)]
pub(crate) struct SocketOwner {
    permit: Arc<ConnectionPermit>,
}

/// State of a socket's client, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientState {
    Connected,
    /// The client has closed its side for writing, and possibly also for reading. Earlier data may still be unread.
    Closing,
    /// Both sides are closed, or the connection is broken.
    Closed,
}

/// A stream that records its reads.
pub type ReadWatch<I> = Observed<I, ReadObserver>;

/// Records the reads of a stream.
#[derive(Debug)]
pub struct ReadObserver {
    reads: Arc<Reads>,
}

/// Notices that the client of a stream is gone.
#[derive(Debug)]
pub struct Abandonment {
    reads: Arc<Reads>,
    /// `None` for a connection whose socket is not known.
    permit: Option<Arc<ConnectionPermit>>,
    /// Whether the protocol has half-closed connections.
    has_half_close: bool,
}

#[derive(Debug, Default)]
struct Reads {
    /// Number of completed reads.
    count: AtomicU64,
    /// Whether the stream waits for data. Such a stream notices the end by itself.
    is_waiting: AtomicBool,
    /// Whether the stream has read the end of the client's data.
    is_ended: AtomicBool,
    completed: Notify,
}

/// Records the reads of a stream. The [`Abandonment`] compares them with the state of the permit's socket.
pub fn watch_reads<I>(io: I, permit: Option<Arc<ConnectionPermit>>) -> (ReadWatch<I>, Abandonment) {
    let reads = Arc::<Reads>::default();
    let watch = Observed::with_observer(io, ReadObserver { reads: reads.clone() });
    (watch, Abandonment { reads, permit, has_half_close: true })
}

// === impl Socket ===

impl Socket {
    fn descriptor(&self) -> MutexGuard<'_, Option<RawFd>> {
        self.descriptor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of the client; connected while there is no socket.
    fn client(&self) -> ClientState {
        // The lock keeps the descriptor open: the owner takes the same lock to remove the descriptor, and closes it
        // only then.
        let descriptor = self.descriptor();
        let Some(fd) = *descriptor else { return ClientState::Connected };
        let mut poll = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: the call reads and writes one `pollfd`, which outlives it. It does not wait.
        let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
        match poll.revents {
            _ if ready != 1 => ClientState::Connected,
            events if events & (libc::POLLHUP | libc::POLLERR) != 0 => ClientState::Closed,
            events if events & libc::POLLRDHUP != 0 => ClientState::Closing,
            _ => ClientState::Connected,
        }
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
    /// Treats a client that closes its side for writing as gone. Only the final receiver of the connection may use
    /// this: a stream that forwards bytes does not know their protocol.
    #[must_use]
    pub fn without_half_close(self) -> Self {
        Self { has_half_close: false, ..self }
    }

    /// Returns when the client has closed the connection and the stream has not read for some time. After the stream
    /// has read the end of the data, both sides must be closed. Does not wake while the stream waits for data. Also
    /// returns when the connection is evicted, because after an upgrade nothing else closes the connection.
    pub async fn happened(self) {
        let Some(permit) = &self.permit else { return std::future::pending().await };
        tokio::select! {
            // Cancel-safe: both arms only wait.
            () = permit.evicted.cancelled() => {}
            () = self.until_unread(permit) => {}
        }
    }

    /// Returns when the client has closed the connection and the stream has not read for some time.
    async fn until_unread(&self, permit: &ConnectionPermit) {
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
                if idle >= IDLE_INTERVALS && self.is_gone(permit.socket.client()) {
                    return;
                }
            }
        }
    }

    /// Whether a client in this state, whose data is not read, is gone.
    fn is_gone(&self, client: ClientState) -> bool {
        match client {
            ClientState::Connected => false,
            ClientState::Closing => !self.has_half_close || !self.reads.is_ended.load(Ordering::Relaxed),
            ClientState::Closed => true,
        }
    }
}

// === impl ReadObserver ===

impl Observe for ReadObserver {
    fn on_read(
        &mut self,
        _cx: &mut Context<'_>,
        read: Poll<io::Result<()>>,
        is_end: bool,
    ) -> Poll<io::Result<()>> {
        self.reads.is_waiting.store(read.is_pending(), Ordering::Relaxed);
        if is_end {
            self.reads.is_ended.store(true, Ordering::Relaxed);
        }
        if read.is_ready() {
            self.reads.count.fetch_add(1, Ordering::Relaxed);
            self.reads.completed.notify_one();
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use coracle_testing::until_yielding;
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
        let permit = Connections::new(Limits::of_total(8)).admit(address.ip()).expect("a permit");
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
        assert_ne!(permit.socket.client(), ClientState::Connected);
        drop(stream);
        assert_eq!(permit.socket.client(), ClientState::Connected, "there is no socket any more");
    }

    /// Returns when the kernel reports the client in this state.
    async fn until(permit: &ConnectionPermit, state: ClientState) {
        let found = || match permit.socket.client() {
            client if client == state => Ok(()),
            client => Err(format!("{client:?}")),
        };
        until_yielding(&format!("a client in the state {state:?}"), 10, found).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_closed_only_its_side_for_writing_gets_the_rest_of_the_output() {
        let (mut client, mut stream, abandonment) = connected().await;
        let permit = abandonment.permit.clone().expect("a permit");
        client.shutdown().await.expect("shutdown");
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.expect("read");
        assert_eq!(rest, b"ello");
        until(&permit, ClientState::Closing).await;
        let mut happened = std::pin::pin!(abandonment.happened());
        assert!(timeout(LONG, &mut happened).await.is_err(), "the client may still read");
        stream.write_all(b"output").await.expect("write");
        let mut output = [0; 6];
        client.read_exact(&mut output).await.expect("read");
        assert_eq!(&output, b"output");
        // The close of a socket with unread data sends a reset.
        stream.write_all(b"more").await.expect("write");
        client.peek(&mut [0]).await.expect("unread data");
        drop(client);
        until(&permit, ClientState::Closed).await;
        assert!(timeout(LONG, happened).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_protocol_without_half_closed_connections_ends_with_its_data() {
        let (mut client, mut stream, abandonment) = connected().await;
        client.shutdown().await.expect("shutdown");
        stream.read_to_end(&mut Vec::new()).await.expect("read");
        assert!(timeout(LONG, abandonment.without_half_close().happened()).await.is_ok());
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

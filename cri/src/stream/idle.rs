//! Idle limit of connections: a connection without traffic is closed, because its client may be gone.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use coracle_connections::ReadWatch;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A connection that records its last traffic. After the limit, reads and writes fail.
#[derive(Debug)]
pub(crate) struct Watched<I> {
    io: I,
    activity: Arc<Activity>,
    expired: [Pin<Box<WaitForCancellationFutureOwned>>; 2],
}

/// The upgraded connection of a client.
pub(super) type Connection = Watched<ReadWatch<TokioIo<Upgraded>>>;

/// The timer of a connection.
#[derive(Debug)]
pub(super) struct Idle {
    activity: Arc<Activity>,
    over: CancellationToken,
}

#[derive(Debug)]
struct Activity {
    begun: Instant,
    /// Time of the last traffic, in milliseconds after `begun`.
    last: AtomicU64,
}

// Indices of the two wakers of a connection.
const READER: usize = 0;
const WRITER: usize = 1;

/// Adds an idle limit to a connection.
pub(super) fn watch<I>(io: I) -> (Watched<I>, Idle) {
    let activity = Arc::new(Activity { begun: Instant::now(), last: AtomicU64::new(0) });
    let over = CancellationToken::new();
    let expired = [(); 2].map(|()| Box::pin(over.clone().cancelled_owned()));
    (Watched { io, activity: activity.clone(), expired }, Idle { activity, over })
}

// === impl Idle ===

impl Idle {
    /// Returns when there was no traffic for `limit`; the connection then fails. Never returns without a limit. Wakes once per
    /// limit, with any amount of traffic.
    pub(super) async fn expired(self, limit: Option<Duration>) {
        let Some(limit) = limit else { return std::future::pending().await };
        loop {
            let Some(due) = self.activity.last().checked_add(limit) else {
                return std::future::pending().await;
            };
            if Instant::now() >= due {
                return self.over.cancel();
            }
            sleep_until(due).await;
        }
    }
}

// === impl Activity ===

impl Activity {
    fn note(&self) {
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    fn last(&self) -> Instant {
        self.begun + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }
}

// === impl Watched ===

impl<I> Watched<I> {
    /// Records the traffic of a result, or fails if the limit has expired.
    fn check<T>(
        &mut self,
        side: usize,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if self.expired[side].as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(ErrorKind::TimedOut.into()));
        }
        if result.is_ready() {
            self.activity.note();
        }
        result
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Watched<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        self.check(READER, cx, read)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Watched<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.check(WRITER, cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.check(WRITER, cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    // A flush is not traffic.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::sleep;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(4 * 3600);

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_fails_for_reader_and_writer() {
        let (ours, _theirs) = tokio::io::duplex(8);
        let (connection, idle) = watch(ours);
        let (mut reader, mut writer) = tokio::io::split(connection);
        let begun = Instant::now();
        let read = async { reader.read(&mut [0; 8]).await.expect_err("expired").kind() };
        let write = async { writer.write_all(&[0; 9]).await.expect_err("expired").kind() };
        let (read, write, ()) = tokio::join!(read, write, idle.expired(Some(LIMIT)));
        assert_eq!((read, write), (ErrorKind::TimedOut, ErrorKind::TimedOut));
        assert_eq!(begun.elapsed().as_secs(), LIMIT.as_secs());
        assert!(writer.write_all(b"x").await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn traffic_in_either_direction_resets_the_limit() {
        let (ours, mut theirs) = tokio::io::duplex(8);
        let (mut connection, idle) = watch(ours);
        let begun = Instant::now();
        let talk = async {
            for _ in 0..3 {
                sleep(LIMIT * 3 / 4).await;
                theirs.write_all(b"x").await.expect("write");
                connection.read_exact(&mut [0]).await.expect("read");
                sleep(LIMIT * 3 / 4).await;
                connection.write_all(b"y").await.expect("write");
            }
        };
        tokio::join!(talk, idle.expired(Some(LIMIT)));
        assert_eq!(begun.elapsed().as_secs(), (LIMIT * 11 / 2).as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_a_connection_stays_open() {
        let (_connection, idle) = watch(tokio::io::empty());
        assert!(tokio::time::timeout(LIMIT * 1000, idle.expired(None)).await.is_err());
    }
}

//! The end of a connection on which nothing moves any more: its client may be gone without a word.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A connection that notes when bytes last moved, and that ends in both directions once it is given up.
#[derive(Debug)]
pub(crate) struct Watched<I> {
    io: I,
    moves: Arc<Moves>,
    given_up: [Pin<Box<WaitForCancellationFutureOwned>>; 2],
}

/// Who gives it up.
#[derive(Debug)]
pub(super) struct Idle {
    moves: Arc<Moves>,
    over: CancellationToken,
}

#[derive(Debug)]
struct Moves {
    begun: Instant,
    /// Milliseconds after that, of the last byte.
    last: AtomicU64,
}

/// The two that may wait at a connection.
const READER: usize = 0;
const WRITER: usize = 1;

/// Watches a connection.
pub(super) fn watch<I>(io: I) -> (Watched<I>, Idle) {
    let moves = Arc::new(Moves { begun: Instant::now(), last: AtomicU64::new(0) });
    let over = CancellationToken::new();
    let given_up = [(); 2].map(|()| Box::pin(over.clone().cancelled_owned()));
    (Watched { io, moves: moves.clone(), given_up }, Idle { moves, over })
}

// === impl Idle ===

impl Idle {
    /// Returns when nothing has moved for `limit`; the connection is at its end then. Never without a limit. Wakes
    /// once in such a time, however much moves.
    pub(super) async fn expired(self, limit: Option<Duration>) {
        let Some(limit) = limit else { return std::future::pending().await };
        loop {
            let Some(due) = self.moves.last().checked_add(limit) else { return std::future::pending().await };
            if Instant::now() >= due {
                return self.over.cancel();
            }
            sleep_until(due).await;
        }
    }
}

// === impl Moves ===

impl Moves {
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
    /// What came of a reading or writing, unless the connection was given up.
    fn judge<T>(
        &mut self,
        who: usize,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if self.given_up[who].as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(ErrorKind::TimedOut.into()));
        }
        if result.is_ready() {
            self.moves.note();
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
        self.judge(READER, cx, read)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Watched<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.judge(WRITER, cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.judge(WRITER, cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    // Flushing moves nothing by itself.
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
    async fn a_silent_connection_ends_for_those_who_wait_at_it() {
        let (ours, _theirs) = tokio::io::duplex(8);
        let (connection, idle) = watch(ours);
        let (mut reader, mut writer) = tokio::io::split(connection);
        let begun = Instant::now();
        let read = async { reader.read(&mut [0; 8]).await.expect_err("given up").kind() };
        let write = async { writer.write_all(&[0; 9]).await.expect_err("given up").kind() };
        let (read, write, ()) = tokio::join!(read, write, idle.expired(Some(LIMIT)));
        assert_eq!((read, write), (ErrorKind::TimedOut, ErrorKind::TimedOut));
        assert_eq!(begun.elapsed().as_secs(), LIMIT.as_secs());
        assert!(writer.write_all(b"x").await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn what_moves_either_way_keeps_a_connection() {
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
    async fn without_a_limit_a_connection_stays() {
        let (_connection, idle) = watch(tokio::io::empty());
        assert!(tokio::time::timeout(LIMIT * 1000, idle.expired(None)).await.is_err());
    }
}

//! Idle limit of connections: a connection without traffic is closed, because its client may be gone.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use coracle_connections::{Observe, Observed, ReadWatch};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A connection that records its last traffic. After the limit, all operations fail.
pub(super) type Watched<I> = Observed<I, IdleObserver>;

/// Records the last traffic of a connection, and fails its operations after the limit.
#[derive(Debug)]
pub(super) struct IdleObserver {
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
    let observer = IdleObserver { activity: activity.clone(), expired };
    (Observed::with_observer(io, observer), Idle { activity, over })
}

// === impl Idle ===

impl Idle {
    /// Returns when there was no traffic for `limit`, or when `is_abandoned` returns. All operations of the connection fail
    /// from then on, including those that wait.
    pub(super) async fn expired(self, limit: Option<Duration>, is_abandoned: impl Future<Output = ()>) {
        tokio::select! {
            // The other arm is dropped: the connection is over.
            () = is_abandoned => {}
            () = self.has_no_traffic(limit) => {}
        }
        self.over.cancel();
    }

    /// Returns when there was no traffic for `limit`. Never returns without a limit. Wakes once per limit, with any amount
    /// of traffic.
    async fn has_no_traffic(&self, limit: Option<Duration>) {
        let Some(limit) = limit else { return std::future::pending().await };
        loop {
            let Some(due) = self.activity.last().checked_add(limit) else {
                return std::future::pending().await;
            };
            if Instant::now() >= due {
                return;
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

// === impl IdleObserver ===

impl IdleObserver {
    /// Records the traffic of a result, or fails if the limit has expired.
    fn check<T>(
        &mut self,
        side: usize,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let result = self.unless_expired(side, cx, result);
        if matches!(result, Poll::Ready(Ok(_))) {
            self.activity.note();
        }
        result
    }

    /// The result, or a failure if the limit has expired. A pending result wakes its task when the limit expires.
    fn unless_expired<T>(
        &mut self,
        side: usize,
        cx: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match self.expired[side].as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(ErrorKind::TimedOut.into())),
            Poll::Pending => result,
        }
    }
}

impl Observe for IdleObserver {
    fn on_read(
        &mut self,
        cx: &mut Context<'_>,
        read: Poll<io::Result<()>>,
        _is_end: bool,
    ) -> Poll<io::Result<()>> {
        self.check(READER, cx, read)
    }

    fn on_write(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        self.check(WRITER, cx, written)
    }

    // A flush is not traffic.
    fn on_flush(&mut self, cx: &mut Context<'_>, flushed: Poll<io::Result<()>>) -> Poll<io::Result<()>> {
        self.unless_expired(WRITER, cx, flushed)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, BufWriter};
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
        let (read, write, ()) = tokio::join!(read, write, idle.expired(Some(LIMIT), pending()));
        assert_eq!((read, write), (ErrorKind::TimedOut, ErrorKind::TimedOut));
        assert_eq!(begun.elapsed().as_secs(), LIMIT.as_secs());
        assert!(writer.write_all(b"x").await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_flush_that_waits_for_a_client_fails_too() {
        let (ours, _theirs) = tokio::io::duplex(8);
        // Like TLS, the buffer accepts more data than the client reads.
        let (mut connection, idle) = watch(BufWriter::new(ours));
        connection.write_all(&[0; 9]).await.expect("buffered");
        let flush = async { connection.flush().await.expect_err("expired").kind() };
        let (flushed, ()) = tokio::join!(flush, idle.expired(Some(LIMIT), pending()));
        assert_eq!(flushed, ErrorKind::TimedOut);
        assert!(connection.shutdown().await.is_err());
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
        tokio::join!(talk, idle.expired(Some(LIMIT), pending()));
        assert_eq!(begun.elapsed().as_secs(), (LIMIT * 11 / 2).as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_a_connection_stays_open() {
        let (_connection, idle) = watch(tokio::io::empty());
        assert!(tokio::time::timeout(LIMIT * 1000, idle.expired(None, pending())).await.is_err());
    }
}

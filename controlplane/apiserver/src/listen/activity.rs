//! Activity of a connection: detects idle connections, late request headers, and clients that do not read a response.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::Response;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::stream_tasks::stream_end;
use crate::{
    metrics::LongRunning,
    reply::Body,
    server::SLOW_CLIENT,
    short_lived::ShortLived,
    unread_bytes::{MIN_HELD_BYTES, Reader},
    verb::watch::{FirstEvents, WatchEnd},
};

/// Maximum bytes of a piece of a body that the connection gets. The connection takes a whole piece even if the client
/// reads nothing.
const MAX_PIECE_BYTES: usize = 64 << 10;
/// Maximum time for a connection to drop the bytes of an HTTP/2 stream that has ended. The connection does not drop
/// them while its socket takes no bytes. After this time, the connection is closed.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(250);

/// Activity of the requests of one connection.
pub(super) struct Activity {
    /// Number of requests whose response is not sent completely.
    running: watch::Sender<usize>,
    /// Whether bytes of the next request header were received.
    header: watch::Sender<bool>,
    /// Cancelled when the connection must be closed, because its client does not read a response.
    must_close: CancellationToken,
    /// Maximum duration of a short-lived response.
    response_limit: Duration,
}

/// A running request, until its response is sent completely.
pub(super) struct Running {
    activity: Arc<Activity>,
}

/// A response's body. The request ends when the body and all large frames that the connection has taken are dropped.
struct Tracked {
    body: Body,
    /// The rest of a frame that is longer than a piece.
    rest: Bytes,
    /// Counts frames that compression or indentation has made. `CountedBody` has already counted the other frames.
    /// `None` for long-running requests, and for refused requests.
    reader: Option<Arc<Reader>>,
    request: Arc<TrackedRequest>,
}

/// The counts and time limits that end with a request.
struct TrackedRequest {
    _running: Running,
    _ended: Option<DropGuard>,
    _limited: Option<ShortLived>,
    _long: Option<LongRunning>,
}

/// A large frame. After the end of the body, the connection may still hold the last piece of the frame, and thus the
/// memory of the whole frame.
struct LargeFrame {
    bytes: Bytes,
    _request: Arc<TrackedRequest>,
}

// === impl Activity ===

impl Activity {
    /// A new connection. The time limit of its first request header starts now.
    pub(super) fn new(response_limit: Duration) -> Self {
        Self {
            running: watch::Sender::default(),
            header: watch::Sender::new(true),
            must_close: CancellationToken::new(),
            response_limit,
        }
    }

    /// Records that bytes were received. Returns whether they are part of a request header, because no request is
    /// running.
    pub(super) fn received(&self) -> bool {
        let is_header = *self.running.borrow() == 0;
        if is_header {
            self.header.send_if_modified(|header| !std::mem::replace(header, true));
        }
        is_header
    }

    /// Returns when a request header is still incomplete `limit` after its first byte. For the first request, the time
    /// starts with the connection.
    pub(super) async fn late_header(&self, limit: Duration) {
        let mut header = self.header.subscribe();
        loop {
            // The sender is a field of `self`: it is not closed.
            let _ = header.wait_for(|header| *header).await;
            tokio::select! {
                // Cancel-safe: both futures only wait.
                () = sleep(limit) => return,
                _ = header.wait_for(|header| !header) => {}
            }
        }
    }

    /// Records the start of a request.
    pub(super) fn begin(self: &Arc<Self>) -> Running {
        self.header.send_if_modified(std::mem::take);
        self.running.send_modify(|running| *running += 1);
        Running { activity: self.clone() }
    }

    /// Returns when no request has run for `limit`.
    pub(super) async fn idle(&self, limit: Duration) {
        let mut running = self.running.subscribe();
        loop {
            // The sender is a field of `self`: it is not closed.
            let _ = running.wait_for(|running| *running == 0).await;
            tokio::select! {
                // Cancel-safe: both futures only wait.
                () = sleep(limit) => return,
                _ = running.changed() => {}
            }
        }
    }

    /// Returns when the connection must be closed, because of a response that the client does not read.
    pub(super) async fn response_timeout(&self) {
        self.must_close.cancelled().await;
    }

    /// Ends the response of the current task after `wait`. The request drops the returned guard at its end, which
    /// cancels the wait.
    fn end_response_after(&self, wait: impl Future<Output = ()> + Send + 'static) -> DropGuard {
        let (ended, must_close, stream) = (CancellationToken::new(), self.must_close.clone(), stream_end());
        let guard = ended.clone().drop_guard();
        coracle_threads::spawn(async move {
            if ended.run_until_cancelled(wait).await.is_none() {
                return;
            }
            if let Some(stream) = stream {
                stream.cancel();
                if timeout(RELEASE_TIMEOUT, ended.cancelled()).await.is_ok() {
                    return tracing::debug!("ended an HTTP/2 stream whose client does not read");
                }
            }
            must_close.cancel();
        });
        guard
    }
}

// === impl Running ===

impl Running {
    /// Returns the response with a body that keeps the request running until the body is sent or dropped. A time limit
    /// applies to the sending of a short-lived response. It also applies to the first events of a watch, and to the
    /// last events after its end. After the limit, the server ends the response: it ends the HTTP/2 stream, or the
    /// HTTP/1.1 connection. It also ends an HTTP/2 connection that still holds large frames of the stream. If the
    /// client reads a response slowly, the seats of the request are released before the limit. A response also ends if
    /// its reader is evicted because of the limit on unread bytes (`unread_bytes`).
    pub(super) fn until_sent(self, mut response: Response<Body>) -> Response<Body> {
        let mut limited = response.extensions_mut().remove::<ShortLived>();
        let long = response.extensions_mut().remove::<LongRunning>();
        let cut = response.extensions_mut().remove::<WatchEnd>();
        let first = response.extensions_mut().remove::<FirstEvents>();
        let reader = response.extensions_mut().remove::<Arc<Reader>>();
        let evicted = long.as_ref().and_then(LongRunning::reader).or_else(|| reader.clone());
        let evicted = evicted.map(|reader| reader.evicted());
        let begins = match (&limited, cut) {
            _ if response.body().is_end_stream() => None,
            (_, Some(WatchEnd(cut))) => Some(cut),
            (Some(_), None) => {
                let now = CancellationToken::new();
                now.cancel();
                Some(now)
            }
            (None, None) => None,
        };
        let ended = begins.map(|begins| {
            let limit = self.activity.response_limit;
            let seats = limited.as_mut().and_then(ShortLived::take_seats);
            let late = async move {
                if let Some(first) = first
                    && !first.are_sent_within(limit).await
                {
                    return;
                }
                begins.cancelled().await;
                sleep(limit.min(SLOW_CLIENT)).await;
                drop(seats);
                sleep(limit.saturating_sub(SLOW_CLIENT)).await;
            };
            self.activity.end_response_after(async move {
                match evicted {
                    // An eviction ends the response, so the rest of the wait is not needed.
                    Some(evicted) => {
                        let _late = evicted.run_until_cancelled_owned(late).await;
                    }
                    None => late.await,
                }
            })
        });
        response.map(|body| {
            let request = TrackedRequest { _running: self, _ended: ended, _limited: limited, _long: long };
            Tracked { body, rest: Bytes::new(), reader, request: Arc::new(request) }.boxed_unsync()
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.activity.running.send_modify(|running| *running -= 1);
    }
}

// === impl Tracked ===

impl Tracked {
    /// A frame that keeps the request running until it is dropped, if it is large.
    fn tracked(&self, frame: Bytes) -> Bytes {
        if frame.len() < MIN_HELD_BYTES {
            return frame;
        }
        Bytes::from_owner(LargeFrame { bytes: frame, _request: self.request.clone() })
    }
}

impl AsRef<[u8]> for LargeFrame {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl http_body::Body for Tracked {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        let held = match &self.reader {
                            Some(reader) => reader.hold_frame(data)?,
                            None => data,
                        };
                        self.rest = self.tracked(held);
                    }
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                end => return Poll::Ready(end),
            }
        }
        let length = self.rest.len().min(MAX_PIECE_BYTES);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (body, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(body.lower() + rest);
        if let Some(upper) = body.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use http::Method;
    use hyper::rt::Executor as _;

    use super::*;
    use crate::{
        authn::User, cache::Cache, flow_control::FlowControl, listen::stream_tasks::StreamTasks, reply::full,
        request::RequestInfo, unread_bytes::UnreadBytes,
    };

    const MINUTE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_between_requests_only() {
        let activity = Arc::new(Activity::new(MINUTE));
        let running = activity.begin();
        let idle = Duration::from_secs(90);
        assert!(tokio::time::timeout(idle * 10, activity.idle(idle)).await.is_err());
        drop(running);
        activity.idle(idle).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_header_has_its_time_from_its_first_byte() {
        let (activity, limit) = (Arc::new(Activity::new(MINUTE)), Duration::from_secs(32));
        let late = || tokio::time::timeout(limit * 10, activity.late_header(limit));
        let begin = tokio::time::Instant::now();
        late().await.expect("a connection without a request");
        assert!(begin.elapsed() < limit * 2);
        let running = activity.begin();
        activity.received();
        assert!(late().await.is_err(), "bytes of a body are not a header");
        drop(running);
        assert!(late().await.is_err(), "an idle connection has no time limit for a header");
        activity.received();
        late().await.expect("a header that is never complete");
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_that_is_not_read_ends_the_connection() {
        let activity = Arc::new(Activity::new(MINUTE));
        let short = || {
            let mut response = Response::new(full("x"));
            response.extensions_mut().insert(ShortLived::default());
            response
        };
        drop(activity.begin().until_sent(short()));
        let long = activity.begin().until_sent(Response::new(full("x")));
        assert!(tokio::time::timeout(MINUTE * 10, activity.response_timeout()).await.is_err());
        let unread = activity.begin().until_sent(short());
        activity.response_timeout().await;
        drop((long, unread));
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_that_is_not_read_gives_its_seats_back() {
        let control = FlowControl::new(20, MINUTE);
        let in_use = || control.levels().iter().map(|level| level.seats_in_use).sum::<u64>();
        let activity = Arc::new(Activity::new(MINUTE));
        let response = async || {
            let info = RequestInfo::parse(&Method::GET, &"/api/v1/namespaces/a/pods/b".parse().unwrap());
            let (_, seats) = control.enter(&User::new("eve", &[]), &info, &Cache::new(0)).await;
            let mut response = Response::new(full("x"));
            response.extensions_mut().insert(ShortLived::with_seats(seats.unwrap().unwrap()));
            activity.begin().until_sent(response)
        };
        let unread = response().await;
        assert_eq!(in_use(), 1);
        sleep(SLOW_CLIENT * 2).await;
        assert_eq!(in_use(), 0);
        drop(response().await);
        sleep(Duration::from_millis(1)).await;
        assert_eq!(in_use(), 0, "a response that was sent");
        assert!(tokio::time::timeout(MINUTE / 2, activity.response_timeout()).await.is_err());
        activity.response_timeout().await;
        drop(unread);
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_events_of_a_watch_must_be_read() {
        let activity = Arc::new(Activity::new(MINUTE));
        let watch = || {
            let first = FirstEvents::default();
            let mut response = Response::new(full("x"));
            response.extensions_mut().insert(WatchEnd(CancellationToken::new()));
            response.extensions_mut().insert(first.clone());
            (first, activity.begin().until_sent(response))
        };
        let (first, read) = watch();
        first.sent();
        let is_closed = async |time: Duration| timeout(time, activity.response_timeout()).await.is_ok();
        assert!(!is_closed(MINUTE * 10).await);
        let (first, unread) = watch();
        first.add_conversion(MINUTE);
        assert!(!is_closed(MINUTE * 3 / 2).await, "the time of the conversion does not count");
        assert!(is_closed(MINUTE).await);
        drop((read, unread));
    }

    #[tokio::test(start_paused = true)]
    async fn unread_copies_of_all_responses_have_a_limit() {
        let unread = Arc::<UnreadBytes>::default();
        let response = |owner: &str, frame: Bytes| {
            let mut response = Response::new(full(frame));
            response.extensions_mut().insert(ShortLived::default());
            response.extensions_mut().insert(unread.reader(owner));
            let activity = Arc::new(Activity::new(MINUTE));
            (activity.clone(), activity.begin().until_sent(response).into_body())
        };
        let copy = || Bytes::from(vec![0_u8; 10 << 20]);
        let mut of_eve: Vec<_> = (0..6).map(|_| response("eve", copy())).collect();
        for (_, body) in &mut of_eve {
            body.frame().await.unwrap().unwrap();
        }
        let stored = copy();
        let (_shared, mut body) = response("eve", stored.clone());
        body.frame().await.unwrap().unwrap();
        assert_eq!(unread.bytes(), 60 << 20, "a stored object takes no further memory");
        let (_failed, mut body) = response("eve", copy());
        assert!(body.frame().await.unwrap().is_err());
        let (activity, mut body) = response("bob", copy());
        assert!(body.frame().await.unwrap().is_ok());
        let newest = &of_eve.last().unwrap().0;
        timeout(MINUTE / 2, newest.response_timeout()).await.expect("the connection is closed");
        assert!(timeout(MINUTE / 2, activity.response_timeout()).await.is_err());
        drop((of_eve, body));
        assert_eq!(unread.bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_gets_time_for_each_mebibyte_of_the_first_events() {
        let activity = Arc::new(Activity::new(MINUTE));
        let (first, mut response) = (FirstEvents::default(), Response::new(full("x")));
        response.extensions_mut().insert(WatchEnd(CancellationToken::new()));
        response.extensions_mut().insert(first.clone());
        let response = activity.begin().until_sent(response);
        for _ in 0..20 {
            first.add_reading(1 << 20);
            assert!(timeout(MINUTE / 4, activity.response_timeout()).await.is_err());
        }
        timeout(MINUTE * 2, activity.response_timeout()).await.expect("the client reads no more");
        drop(response);
    }

    #[tokio::test]
    async fn a_long_body_is_sent_in_pieces_and_its_request_runs_until_the_last() {
        let activity = Arc::new(Activity::new(MINUTE));
        let text = "0123456789".repeat(20_000);
        let mut body = activity.begin().until_sent(Response::new(full(text.clone()))).into_body();
        let mut received = Vec::new();
        while !body.is_end_stream() {
            assert_eq!(body.size_hint().exact(), Some((text.len() - received.len()) as u64));
            assert_eq!(*activity.running.borrow(), 1);
            let piece = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert!(piece.len() <= MAX_PIECE_BYTES);
            received.extend_from_slice(&piece);
        }
        assert!(received == text.as_bytes(), "the pieces are not the body");
        drop(body);
        assert_eq!(*activity.running.borrow(), 0);
    }

    #[tokio::test]
    async fn a_request_runs_until_the_connection_drops_the_last_large_frame() {
        let (unread, activity) = (Arc::<UnreadBytes>::default(), Arc::new(Activity::new(MINUTE)));
        let mut response = Response::new(full(vec![0_u8; MAX_PIECE_BYTES + 1]));
        response.extensions_mut().insert(unread.reader("eve"));
        let mut body = activity.begin().until_sent(response).into_body();
        drop(body.frame().await);
        let last = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert!(last.len() == 1 && body.is_end_stream());
        drop(body);
        assert_eq!((*activity.running.borrow(), unread.bytes()), (1, MAX_PIECE_BYTES + 1));
        drop(last);
        assert_eq!((*activity.running.borrow(), unread.bytes()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_ends_alone_unless_its_connection_holds_its_bytes() {
        let unread = Arc::<UnreadBytes>::default();
        for is_held in [false, true] {
            let (activity, reader) = (Arc::new(Activity::new(MINUTE)), unread.reader("eve"));
            let (send, received) = tokio::sync::oneshot::channel();
            let mut response = Response::new(full(vec![0_u8; 1 << 20]));
            response.extensions_mut().insert(ShortLived::default());
            response.extensions_mut().insert(reader.clone());
            let running = activity.begin();
            StreamTasks.execute(async move {
                let mut body = running.until_sent(response).into_body();
                let piece = body.frame().await.unwrap().unwrap().into_data().unwrap();
                send.send(piece).unwrap();
                // The client does not read the rest.
                std::future::pending::<()>().await;
            });
            let piece = received.await.unwrap();
            let held = is_held.then_some(piece);
            reader.evicted().cancel();
            assert_eq!(timeout(MINUTE / 2, activity.response_timeout()).await.is_ok(), is_held);
            assert_eq!(unread.bytes() > 0, is_held);
            drop(held);
            assert_eq!(unread.bytes(), 0);
        }
    }
}

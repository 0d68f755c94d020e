//! Limits on the responses of one server. One limit is on the memory of responses that clients have not read. The other
//! limit is on the number of logs that are read at the same time.
//!
//! A response with the pods of the node, or with their usage, is in memory until its client has read it. A client may
//! read slowly or not at all, on many connections. So these responses share a limit. If a new response exceeds the
//! limit, the server closes connections until the response fits. The server selects the source (an address) with the
//! most unread bytes, and closes the connection with that source's oldest response. The bytes of the new response count
//! for its source. If its source has the most bytes, and no other response, the new response is refused.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use coracle_connections::{ConnectionPermit, Source};
use coracle_cri::namespace_limit::{NamespaceLimit, NamespacePermit};
use http::{Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::{Body as HttpBody, Frame, SizeHint};

use super::respond::{Refused, text};
use super::route::Route;
use crate::runtime::Body;

/// Maximum bytes of all unread responses. A response of any size is accepted while there is no other response.
const MAX_BYTES: usize = 32 << 20;
/// Minimum size in bytes of a response that counts towards [`MAX_BYTES`].
const MIN_BYTES: usize = 8 << 10;
/// Maximum logs that are read or followed at the same time. The pods of one namespace have at most three quarters.
const MAX_LOGS: usize = 512;
/// If a log has this many unsent bytes, its connection gets the next piece only after bytes are sent. Without the
/// limit, a connection would hold 400 KiB for a client that does not read.
const MAX_UNSENT: usize = 32 << 10;

/// The limits of one server.
#[derive(Clone)]
pub(super) struct ResponseLimits {
    unread: UnreadResponses,
    logs: NamespaceLimit,
}

/// The responses that are not read yet.
#[derive(Clone, Default)]
struct UnreadResponses(Arc<Mutex<Unread>>);

#[derive(Default)]
struct Unread {
    next: u64,
    total: usize,
    /// The responses by number. The oldest response is first.
    responses: BTreeMap<u64, Held>,
}

/// A response in memory.
struct Held {
    bytes: usize,
    connection: Arc<ConnectionPermit>,
}

/// Counts a response until it is dropped.
struct Count {
    unread: UnreadResponses,
    number: u64,
}

/// Bytes of a response that counts.
struct CountedBytes {
    bytes: Bytes,
    _count: Arc<Count>,
}

/// The body of a response that counts.
struct CountedBody {
    body: Body,
    count: Arc<Count>,
}

/// The body of a log.
struct LogBody {
    body: Body,
    unsent: Arc<Mutex<Unsent>>,
    _permit: LogPermit,
}

/// The permit of a log. The reader of the files can share it with the response, by an extension of the response. The
/// permit is released when both have ended.
#[derive(Clone, Default)]
pub(super) struct LogPermit(Arc<OnceLock<NamespacePermit>>);

/// Bytes of a log that its connection has not sent yet.
#[derive(Default)]
struct Unsent {
    bytes: usize,
    /// The task that waits until bytes are sent.
    waiting: Option<Waker>,
}

/// A piece of a log. It counts as unsent until it is dropped.
struct Piece {
    bytes: Bytes,
    unsent: Arc<Mutex<Unsent>>,
}

// === impl ResponseLimits ===

impl ResponseLimits {
    /// No responses yet.
    pub(super) fn new() -> Self {
        Self { unread: UnreadResponses::default(), logs: NamespaceLimit::new(MAX_LOGS) }
    }

    /// Counts a response until its client has read it. A stream does not count: few pieces of it are in memory.
    pub(super) fn count(
        &self,
        response: Response<Body>,
        connection: &Arc<ConnectionPermit>,
    ) -> Response<Body> {
        let size = response.body().size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
        let Some(bytes) = size.filter(|bytes| *bytes >= MIN_BYTES) else { return response };
        match self.unread.add(bytes, connection) {
            Some(count) => response.map(|body| CountedBody { body, count: Arc::new(count) }.boxed_unsync()),
            None => text(StatusCode::TOO_MANY_REQUESTS, "too many responses are not read by their clients\n"),
        }
    }

    /// A permit to read a log. `None` for other requests.
    pub(super) fn log_permit(&self, route: &Route) -> Result<Option<NamespacePermit>, Refused> {
        let namespace = match route {
            Route::Logs { namespace, .. } => namespace.as_str(),
            // The logs of the node count as the logs of one namespace.
            Route::NodeLogs { .. } => "",
            _ => return Ok(None),
        };
        self.logs.take(namespace).map(Some).ok_or_else(|| {
            let reason = "too many logs are read at the same time; try again later\n";
            Refused(StatusCode::TOO_MANY_REQUESTS, reason.to_owned())
        })
    }
}

/// The response with a log. The response keeps the permit until its end, and its connection holds few bytes.
pub(super) fn log(mut response: Response<Body>, permit: NamespacePermit) -> Response<Body> {
    let shared = response.extensions_mut().remove::<LogPermit>().unwrap_or_default();
    // The lock is empty: only this function sets it, once for each response.
    let _ = shared.0.set(permit);
    response.map(|body| LogBody { body, unsent: Arc::default(), _permit: shared }.boxed_unsync())
}

// === impl UnreadResponses ===

impl UnreadResponses {
    fn add(&self, bytes: usize, connection: &Arc<ConnectionPermit>) -> Option<Count> {
        let mut unread = self.lock();
        while unread.total.saturating_add(bytes) > MAX_BYTES && !unread.responses.is_empty() {
            let number = unread.oldest_of_largest_source(connection.source(), bytes)?;
            if let Some(held) = unread.remove(number) {
                held.connection.close();
            }
        }
        let number = unread.next;
        unread.next += 1;
        unread.total += bytes;
        unread.responses.insert(number, Held { bytes, connection: Arc::clone(connection) });
        Some(Count { unread: self.clone(), number })
    }

    fn lock(&self) -> MutexGuard<'_, Unread> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Unread ===

impl Unread {
    /// The oldest response of the source with the most bytes. The bytes of a new response of `source` are included.
    /// `None` if that source has only the new response.
    fn oldest_of_largest_source(&self, source: Source, bytes: usize) -> Option<u64> {
        let mut of_sources = HashMap::from([(source, bytes)]);
        for held in self.responses.values() {
            *of_sources.entry(held.connection.source()).or_default() += held.bytes;
        }
        let (most, _) = of_sources.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        let mut oldest = self.responses.iter().filter(|(_, held)| held.connection.source() == most);
        oldest.next().map(|(number, _)| *number)
    }

    fn remove(&mut self, number: u64) -> Option<Held> {
        let held = self.responses.remove(&number)?;
        self.total -= held.bytes;
        Some(held)
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        // Absent if its connection was closed.
        let _held = self.unread.lock().remove(self.number);
    }
}

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

// === impl CountedBody ===

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        let polled = ready!(Pin::new(&mut this.body).poll_frame(cx));
        // The bytes count until the connection has sent them, which may be after the end of the body.
        let counted = |bytes| Bytes::from_owner(CountedBytes { bytes, _count: Arc::clone(&this.count) });
        Poll::Ready(polled.map(|frame| frame.map(|frame| frame.map_data(counted))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

// === impl LogBody ===

impl HttpBody for LogBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if Piece::must_wait(&this.unsent, cx) {
            return Poll::Pending;
        }
        let polled = ready!(Pin::new(&mut this.body).poll_frame(cx));
        let piece = |bytes| Bytes::from_owner(Piece::new(bytes, &this.unsent));
        Poll::Ready(polled.map(|frame| frame.map(|frame| frame.map_data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

// === impl Piece ===

impl Piece {
    fn new(bytes: Bytes, unsent: &Arc<Mutex<Unsent>>) -> Self {
        unsent.lock().unwrap_or_else(PoisonError::into_inner).bytes += bytes.len();
        Self { bytes, unsent: Arc::clone(unsent) }
    }

    /// Whether too many bytes are unsent. The task is woken when bytes are sent.
    fn must_wait(unsent: &Mutex<Unsent>, cx: &Context<'_>) -> bool {
        let mut unsent = unsent.lock().unwrap_or_else(PoisonError::into_inner);
        let must_wait = unsent.bytes >= MAX_UNSENT;
        unsent.waiting = must_wait.then(|| cx.waker().clone());
        must_wait
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let mut unsent = self.unsent.lock().unwrap_or_else(PoisonError::into_inner);
        unsent.bytes -= self.bytes.len();
        let waiting = unsent.waiting.take();
        drop(unsent);
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_connections::{Connections, Limits};
    use futures::FutureExt as _;

    use super::super::respond::typed;
    use super::*;

    const MIB: usize = 1 << 20;

    fn port() -> Connections {
        let limits =
            Limits { total: 64, per_source: 64, unauthenticated: 64, unauthenticated_per_source: 64 };
        Connections::new(limits)
    }

    fn permit(port: &Connections, host: u8) -> Arc<ConnectionPermit> {
        Arc::new(port.admit([10, 0, 0, host].into()).expect("a place"))
    }

    fn response(bytes: usize) -> Response<Body> {
        typed(StatusCode::OK, "text/plain", vec![0; bytes].into())
    }

    fn is_closed(permit: &ConnectionPermit) -> bool {
        permit.evicted().now_or_never().is_some()
    }

    #[test]
    fn the_oldest_response_of_the_source_with_the_most_bytes_is_closed() {
        let (port, limits) = (port(), ResponseLimits::new());
        let many: Vec<_> = (0..3).map(|_| permit(&port, 1)).collect();
        let other = permit(&port, 2);
        let unread: Vec<_> = many.iter().map(|permit| limits.count(response(10 * MIB), permit)).collect();
        assert_eq!(limits.unread.lock().total, 30 * MIB);
        let answer = limits.count(response(5 * MIB), &other);
        assert_eq!((answer.status(), answer.body().size_hint().exact()), (StatusCode::OK, Some(5 << 20)));
        assert_eq!(many.iter().map(|permit| is_closed(permit)).collect::<Vec<_>>(), [true, false, false]);
        assert!(!is_closed(&other));
        assert_eq!(limits.unread.lock().total, 25 * MIB);
        drop((unread, answer));
        assert_eq!(limits.unread.lock().total, 0);
    }

    #[test]
    fn a_response_that_is_larger_than_all_others_is_refused_unless_it_is_alone() {
        let (port, limits) = (port(), ResponseLimits::new());
        let (few, many) = (permit(&port, 1), permit(&port, 2));
        let unread = limits.count(response(MIB), &few);
        assert_eq!(limits.count(response(40 * MIB), &many).status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(!is_closed(&few) && !is_closed(&many));
        drop(unread);
        assert_eq!(limits.count(response(40 * MIB), &many).status(), StatusCode::OK);
    }

    #[tokio::test]
    async fn bytes_count_until_the_connection_has_sent_them() {
        let (port, limits) = (port(), ResponseLimits::new());
        let connection = permit(&port, 1);
        let mut body = limits.count(response(MIB), &connection).into_body();
        let sent = body.frame().await.expect("a frame").expect("data").into_data().expect("data");
        drop(body);
        assert_eq!((sent.len(), limits.unread.lock().total), (MIB, MIB));
        drop(sent);
        assert_eq!(limits.unread.lock().total, 0);
        let small = limits.count(response(MIN_BYTES - 1), &connection);
        assert_eq!((small.status(), limits.unread.lock().total), (StatusCode::OK, 0));
    }

    #[test]
    fn a_limited_number_of_logs_is_read_and_a_namespace_leaves_some_to_others() {
        let limits = ResponseLimits::new();
        let read = |path: &str| limits.log_permit(&Route::of(path).expect("a path")).ok().flatten();
        let all = |path: &str| -> Vec<_> {
            std::iter::from_fn(|| read(path)).map(|permit| log(response(1), permit)).collect()
        };
        let many = all("/containerLogs/ns/p/c");
        let mut others = all("/containerLogs/other/p/c");
        assert_eq!((many.len(), others.len()), (MAX_LOGS * 3 / 4, MAX_LOGS * 3 / 16));
        let refused = limits.log_permit(&Route::of("/containerLogs/ns/q/c").expect("a path"));
        assert_eq!(refused.err().map(|refused| refused.0), Some(StatusCode::TOO_MANY_REQUESTS));
        assert!(read("/logs/a").is_some());
        assert!(limits.log_permit(&Route::Healthz).is_ok_and(|permit| permit.is_none()));
        others.pop();
        assert!(read("/containerLogs/other/p/c").is_some());
    }

    #[test]
    fn a_reader_keeps_the_permit_of_its_log_after_the_client_has_left() {
        // One namespace gets at most one of the two permits.
        let limits = ResponseLimits { logs: NamespaceLimit::new(2), ..ResponseLimits::new() };
        let route = Route::of("/containerLogs/ns/p/c").expect("a path");
        let take = || limits.log_permit(&route).ok().flatten();
        let of_reader = LogPermit::default();
        let mut response = response(1);
        response.extensions_mut().insert(of_reader.clone());
        let response = log(response, take().expect("a permit"));
        drop(response);
        assert!(take().is_none(), "the reader has the permit");
        drop(of_reader);
        assert!(take().is_some());
    }

    #[tokio::test]
    async fn the_connection_of_a_log_holds_few_bytes() {
        let piece = || Ok::<_, Infallible>(Frame::data(Bytes::from(vec![0; 20 << 10])));
        let pieces = futures::stream::iter((0..10).map(move |_| piece()));
        let stream = http_body_util::StreamBody::new(pieces).boxed_unsync();
        let limits = ResponseLimits::new();
        let permit =
            limits.log_permit(&Route::of("/logs/a").expect("a path")).ok().flatten().expect("a permit");
        let mut body = log(Response::new(stream), permit).into_body();
        let mut held = Vec::new();
        while let Some(Some(Ok(frame))) = body.frame().now_or_never() {
            held.push(frame);
        }
        assert_eq!(held.len(), 2, "the connection has sent none");
        let (next, ()) = tokio::join!(body.frame(), async { held.clear() });
        assert!(next.is_some_and(|frame| frame.is_ok()), "woken by the sent pieces");
    }
}

//! Bodies of requests as streams, for the servers behind a proxy.
//!
//! A connection to a server takes the next piece of a body when its buffer has room. A slow server therefore slows the
//! client, and a body of any length takes little memory.

use std::{
    fmt::Display,
    io,
    pin::{Pin, pin},
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, header};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, error::Elapsed, timeout_at};

use crate::reply::Body;

/// The time at which a connection took the last piece of a body.
#[derive(Clone)]
pub(crate) struct Progress {
    last: Arc<Mutex<Instant>>,
}

/// A body that records its progress.
pub(crate) struct WatchedBody {
    body: Body,
    progress: Progress,
}

/// The body of a client's request as a stream.
pub(crate) fn boxed<B>(body: B) -> Body
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Display,
{
    body.map_err(|error| io::Error::other(error.to_string())).boxed_unsync()
}

/// Sets the header for the length of the body. Servers could disagree about the end of a request that has both
/// `Content-Length` and `Transfer-Encoding`, so a request has only one of these headers. As Go's client does, a request
/// without a body has a length only if requests with its method usually have a body.
pub(crate) fn set_length(request: &mut Request<Body>) {
    let usually_has_body = matches!(*request.method(), Method::POST | Method::PUT | Method::PATCH);
    let length = if request.body().is_end_stream() { Some(0) } else { request.body().size_hint().exact() };
    let headers = request.headers_mut();
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::TRANSFER_ENCODING);
    match length {
        Some(0) if !usually_has_body => {}
        Some(length) => {
            headers.insert(header::CONTENT_LENGTH, length.into());
        }
        None => {
            headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
    }
}

// === impl Progress ===

impl Progress {
    /// The progress of a body whose first piece may be taken now.
    pub(crate) fn begin() -> Self {
        Self { last: Arc::new(Mutex::new(Instant::now())) }
    }

    /// A body that records its progress here.
    pub(crate) fn watch(&self, body: Body) -> WatchedBody {
        WatchedBody { body, progress: self.clone() }
    }

    /// Waits for an answer up to `limit` after the last piece of the body.
    pub(crate) async fn answer_within<F: Future>(
        &self,
        limit: Duration,
        answer: F,
    ) -> Result<F::Output, Elapsed> {
        let mut answer = pin!(answer);
        loop {
            let deadline = self.last() + limit;
            let answered = timeout_at(deadline, answer.as_mut()).await;
            if answered.is_ok() || self.last() + limit <= deadline {
                return answered;
            }
        }
    }

    fn last(&self) -> Instant {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

// === impl WatchedBody ===

impl http_body::Body for WatchedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.progress.record();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{Full, StreamBody};

    use super::*;
    use crate::reply::full;

    #[test]
    fn a_request_to_a_server_has_one_length() {
        let piece = || Ok::<_, io::Error>(Frame::data(Bytes::from_static(b"abc")));
        let unknown = || StreamBody::new(futures::stream::iter([piece()])).boxed_unsync();
        let lengths = |method: Method, body: Body| {
            // The headers describe the connection of the client.
            let request = Request::builder().method(method).header("content-length", "7");
            let mut request = request.header("transfer-encoding", "gzip, chunked").body(body).unwrap();
            set_length(&mut request);
            let values =
                ["content-length", "transfer-encoding"].map(|name| request.headers().get(name).cloned());
            values.map(|value| value.map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default())
        };
        for method in [Method::GET, Method::POST] {
            assert_eq!(lengths(method.clone(), full("abc")), ["3", ""], "{method}");
            assert_eq!(lengths(method.clone(), unknown()), ["", "chunked"], "{method}");
        }
        assert_eq!(lengths(Method::POST, full("")), ["0", ""]);
        assert_eq!(lengths(Method::GET, full("")), ["", ""]);
        assert_eq!(lengths(Method::POST, boxed(Full::new(Bytes::from_static(b"abcd")))), ["4", ""]);
    }
}

//! Compression of large responses with gzip, for clients that accept it.
//!
//! Source: `k8s.io/apiserver/pkg/endpoints/handlers/responsewriters`: gets and lists from 128 KiB on, at the fastest
//! level.

use std::{
    collections::VecDeque,
    io::Write as _,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use http::{HeaderMap, HeaderValue, header};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;

use crate::{
    error::ApiError,
    offload,
    reply::{self, Body, Reply},
    request::RequestInfo,
};

/// Minimum bytes of a response that is compressed.
pub(crate) const MIN_COMPRESSED_BYTES: usize = 128 << 10;

/// A body whose start was read to determine its size.
struct Started {
    start: VecDeque<Bytes>,
    rest: Body,
}

/// A body that is compressed chunk by chunk.
struct Compressed {
    body: Started,
    /// Compressor of the body. `None` after the end of the body.
    encoder: Option<GzEncoder<Vec<u8>>>,
}

/// Whether the response to this request may be compressed.
pub(crate) fn is_wanted(info: &RequestInfo, headers: &HeaderMap) -> bool {
    let is_read = matches!(info.verb, "get" | "list");
    let is_object = info
        .resource
        .as_ref()
        .is_some_and(|path| matches!(path.subresource.as_str(), "" | "status" | "scale"));
    let accepted = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let mut codings = accepted.flat_map(|value| value.split(','));
    is_read
        && (is_object || info.path.starts_with("/openapi/"))
        && codings.any(|coding| {
            let mut parts = coding.split(';').map(str::trim);
            let is_gzip = parts.next() == Some("gzip");
            is_gzip && !parts.any(|weight| matches!(weight, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
        })
}

/// Compresses a response if it is large enough. `limit` is the maximum wait for the start of the body. The body may
/// come from another server that sends nothing, and the request holds its seats while it waits.
pub(crate) async fn compress_within(limit: Duration, reply: Reply) -> Reply {
    tokio::time::timeout(limit, compress(reply)).await.unwrap_or_else(|_elapsed| {
        let error = ApiError::timeout("request did not complete within the allotted timeout", 1);
        reply::failure(&error)
    })
}

async fn compress(reply: Reply) -> Reply {
    if reply.status() != 200 || reply.headers().contains_key(header::CONTENT_ENCODING) {
        return reply;
    }
    let (mut parts, mut body) = reply.into_parts();
    let (mut start, mut size) = (VecDeque::new(), 0);
    while size < MIN_COMPRESSED_BYTES && !body.is_end_stream() {
        match body.frame().await {
            Some(Ok(frame)) => {
                let Ok(data) = frame.into_data() else { continue };
                size += data.len();
                start.push_back(data);
            }
            // Pass the error on, so that the connection ends as it would without compression.
            Some(Err(error)) => {
                let failed = futures::stream::iter([Err::<Frame<Bytes>, _>(error)]);
                let body = http_body_util::StreamBody::new(failed).boxed_unsync();
                return Reply::from_parts(parts, body);
            }
            None => {
                // The body is replaced, because a body may panic when it is polled after its end.
                body = http_body_util::Empty::<Bytes>::new().map_err(|never| match never {}).boxed_unsync();
                break;
            }
        }
    }
    let body = Started { start, rest: body };
    parts.headers.append(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    if size < MIN_COMPRESSED_BYTES {
        return Reply::from_parts(parts, body.boxed_unsync());
    }
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    let encoder = Some(GzEncoder::new(Vec::new(), Compression::fast()));
    Reply::from_parts(parts, Compressed { body, encoder }.boxed_unsync())
}

impl http_body::Body for Started {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        match self.start.pop_front() {
            Some(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
            None => Pin::new(&mut self.rest).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.start.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        let known: u64 = self.start.iter().map(|data| data.len() as u64).sum();
        let rest = self.rest.size_hint();
        let mut hint = http_body::SizeHint::new();
        hint.set_lower(known + rest.lower());
        if let Some(upper) = rest.upper() {
            hint.set_upper(known + upper);
        }
        hint
    }
}

impl http_body::Body for Compressed {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        loop {
            if self.encoder.is_none() {
                return Poll::Ready(None);
            }
            let next = std::task::ready!(Pin::new(&mut self.body).poll_frame(cx));
            let Some(mut encoder) = self.encoder.take() else { return Poll::Ready(None) };
            let text = match next {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        // A large object takes tens of milliseconds.
                        let is_large = data.len() > offload::MIN_OFFLOADED_BYTES;
                        offload::run(is_large, || encoder.write_all(data))?;
                    }
                    let text = std::mem::take(encoder.get_mut());
                    self.encoder = Some(encoder);
                    text
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => encoder.finish()?,
            };
            if !text.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(text.into()))));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use http::Method;

    use super::*;

    fn wanted(method: Method, uri: &str, accepted: &'static str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(accepted));
        is_wanted(&RequestInfo::parse(&method, &uri.parse().unwrap()), &headers)
    }

    #[test]
    fn reads_of_objects_are_compressed_for_clients_that_accept_it() {
        assert!(wanted(Method::GET, "/api/v1/pods", "br, gzip;q=0.5"));
        assert!(wanted(Method::GET, "/openapi/v2", "gzip"));
        for (method, uri, accepted) in [
            (Method::GET, "/api/v1/pods", "gzip;q=0"),
            (Method::GET, "/api/v1/pods", "br"),
            (Method::GET, "/api/v1/pods?watch=1", "gzip"),
            (Method::POST, "/api/v1/namespaces", "gzip"),
            (Method::GET, "/api/v1/namespaces/a/pods/b/log", "gzip"),
            (Method::GET, "/api/v1/namespaces/a/pods/b/proxy/x", "gzip"),
        ] {
            assert!(!wanted(method, uri, accepted), "{uri} {accepted}");
        }
    }

    #[tokio::test]
    async fn large_responses_are_compressed_and_small_ones_are_whole() {
        for (size, is_compressed) in
            [(0, false), (MIN_COMPRESSED_BYTES - 1, false), (MIN_COMPRESSED_BYTES, true), (1 << 20, true)]
        {
            let text = "pod ".repeat(size)[..size].to_owned();
            let reply = compress(reply::bytes(200, "application/json", text.clone())).await;
            assert_eq!(reply.headers().contains_key(header::CONTENT_ENCODING), is_compressed, "{size}");
            assert_eq!(reply.body().size_hint().exact().is_some(), !is_compressed);
            let body = reply.into_body().collect().await.unwrap().to_bytes();
            let mut read = String::new();
            if is_compressed {
                flate2::read::GzDecoder::new(&*body).read_to_string(&mut read).unwrap();
            } else {
                read = String::from_utf8(body.to_vec()).unwrap();
            }
            assert!(read == text, "{size}");
        }
    }

    #[tokio::test]
    async fn a_body_that_never_begins_ends_the_request() {
        let never = futures::stream::pending::<Result<Frame<Bytes>, std::io::Error>>();
        let body = http_body_util::StreamBody::new(never).boxed_unsync();
        let reply = compress_within(Duration::ZERO, Reply::new(body)).await;
        assert_eq!(reply.status(), 504);
    }

    #[tokio::test]
    async fn a_small_body_is_not_read_after_its_end() {
        // A stream of `unfold` panics when it is polled after its end.
        let chunks = futures::stream::unfold(0, async |number| {
            (number < 2).then(|| (Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(b"a"))), number + 1))
        });
        let body = http_body_util::StreamBody::new(chunks).boxed_unsync();
        let reply = compress(Reply::new(body)).await;
        assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), "aa");
    }
}

//! Bodies that count each rendered frame as unread bytes as soon as the frame exists. Indentation and compression keep
//! a frame in memory until the connection has taken its last part.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::header;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;

use crate::{
    media,
    reply::{Body, Reply},
    superseded::{OpenResponse, SupersededObjects},
    unread_bytes::{MIN_HELD_BYTES, Reader},
};

struct CountedBody {
    body: Body,
    reader: Arc<Reader>,
    /// The body refers to objects, so this field is dropped after the body.
    _open: OpenResponse,
}

/// Counts the rendered frames of a response as unread, and registers the response as one that may refer to superseded
/// objects. A short response does not count. `begin` is the result of [`SupersededObjects::counted`] at the start of
/// the request.
pub(crate) fn counted(
    reply: Reply,
    reader: Arc<Reader>,
    superseded: &Arc<SupersededObjects>,
    begin: usize,
) -> Reply {
    let hint = reply.body().size_hint();
    if hint.exact().is_some_and(|length| length < MIN_HELD_BYTES as u64) {
        return reply;
    }
    // The length of a protobuf response is not an upper bound: the stored objects are larger than their protobuf.
    let is_protobuf = reply.headers().get(header::CONTENT_TYPE).is_some_and(|found| found == media::PROTOBUF);
    let size = hint.upper().filter(|_| !is_protobuf).and_then(|length| usize::try_from(length).ok());
    let open = superseded.open(&reader, begin, size.unwrap_or(usize::MAX));
    reply.map(|body| CountedBody { body, reader, _open: open }.boxed_unsync())
}

// === impl CountedBody ===

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(cx)) else { return Poll::Ready(None) };
        Poll::Ready(Some(match frame?.into_data() {
            Ok(data) => self.reader.hold_frame(data).map(Frame::data),
            Err(trailers) => Ok(trailers),
        }))
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
    use super::*;
    use crate::{pretty, reply, unread_bytes::UnreadBytes};

    #[tokio::test]
    async fn an_object_that_is_indented_in_parts_counts_until_the_last() {
        let (unread, superseded) = (Arc::<UnreadBytes>::default(), Arc::<SupersededObjects>::default());
        let text = "x".repeat(1 << 20);
        let answer = reply::json(200, &serde_json::json!({"data": text}));
        assert!(answer.body().size_hint().exact().is_some());
        let answer = counted(answer, unread.reader("eve"), &superseded, 0);
        let mut body = pretty::indented(answer).into_body();
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert!(first.len() < 1 << 14 && unread.bytes() > 1 << 20, "{} of {}", first.len(), unread.bytes());
        let rest = body.collect().await.unwrap().to_bytes();
        assert!(first.len() + rest.len() > 1 << 20);
        assert_eq!((unread.bytes(), superseded.responses()), (0, 0));
    }

    #[test]
    fn a_response_is_registered_until_it_is_dropped() {
        let (unread, superseded) = (Arc::<UnreadBytes>::default(), Arc::<SupersededObjects>::default());
        let answer = |length: usize| {
            let answer = reply::bytes(200, "application/json", vec![b'x'; length]);
            counted(answer, unread.reader("eve"), &superseded, 0)
        };
        let (short, long) = (answer(MIN_HELD_BYTES - 1), answer(MIN_HELD_BYTES));
        assert_eq!(superseded.responses(), 1);
        drop((short, long));
        assert_eq!(superseded.responses(), 0);
    }
}

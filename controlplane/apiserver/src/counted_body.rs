//! Bodies whose rendered frames count as unread bytes from their beginning. Indentation and compression keep a frame
//! in memory until the connection has taken its last part.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;

use crate::{
    reply::Body,
    unread_bytes::{MIN_HELD_BYTES, Reader},
};

struct CountedBody {
    body: Body,
    reader: Arc<Reader>,
}

/// The body with a count of its rendered frames. A short body does not count.
pub(crate) fn counted(body: Body, reader: Arc<Reader>) -> Body {
    if body.size_hint().exact().is_some_and(|length| length < MIN_HELD_BYTES as u64) {
        return body;
    }
    CountedBody { body, reader }.boxed_unsync()
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
        let unread = Arc::<UnreadBytes>::default();
        let text = "x".repeat(1 << 20);
        let answer = reply::json(200, &serde_json::json!({"data": text})).map(|body| {
            assert!(body.size_hint().exact().is_some());
            counted(body, unread.reader("eve"))
        });
        let mut body = pretty::indented(answer).into_body();
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert!(first.len() < 1 << 14 && unread.bytes() > 1 << 20, "{} of {}", first.len(), unread.bytes());
        let rest = body.collect().await.unwrap().to_bytes();
        assert!(first.len() + rest.len() > 1 << 20);
        assert_eq!(unread.bytes(), 0);
    }
}

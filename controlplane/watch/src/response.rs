//! The response to a watch request.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use http_body_util::{BodyDataStream, BodyExt};
use kube::client::Body;
use serde::de::IgnoredAny;
use tokio::time::{Instant, Sleep};

use crate::error::Error;
use crate::lines::Lines;

/// Time after the timeout of a request. If the response has not ended by then, the connection counts as dead.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(5);
/// Minimum duration of a successful watch. A shorter watch without a line counts as failed.
const SHORT: Duration = Duration::from_secs(1);
/// Maximum depth of a chain of errors.
const MAX_CAUSES: usize = 16;

/// The response to a watch request.
#[derive(Debug)]
pub(crate) struct Response {
    body: BodyDataStream<Body>,
    lines: Lines,
    started: Instant,
    /// The server must end the response before this time. Otherwise the connection counts as dead.
    deadline: Pin<Box<Sleep>>,
    /// Maximum bytes of a line.
    limit: usize,
    /// Whether a line was received.
    has_line: bool,
    is_ended: bool,
}

/// The result of reading.
#[derive(Debug)]
pub(crate) enum Read {
    Line(Bytes),
    /// The response ended. `is_short` is true if the response ended within a second and without a line.
    End {
        is_short: bool,
    },
}

impl Response {
    /// Reads the lines of a body. `timeout` is the timeout of the request. `limit` is the maximum number of bytes of a
    /// line.
    pub(crate) fn new(body: Body, timeout: Duration, limit: usize) -> Self {
        Self {
            body: body.into_data_stream(),
            lines: Lines::new(limit),
            started: Instant::now(),
            deadline: Box::pin(tokio::time::sleep(timeout + TIMEOUT_MARGIN)),
            limit,
            has_line: false,
            is_ended: false,
        }
    }

    /// Reads a line, or the end.
    pub(crate) fn poll_line(&mut self, context: &mut Context<'_>) -> Poll<Result<Read, Error>> {
        loop {
            match self.lines.next() {
                Ok(Some(line)) if line.is_empty() => continue,
                Ok(Some(line)) => return Poll::Ready(Ok(self.line(line))),
                Ok(None) if self.is_ended => return Poll::Ready(Ok(self.end())),
                Ok(None) => {}
                Err(_too_long) => return Poll::Ready(Err(Error::TooLarge { limit: self.limit })),
            }
            match Pin::new(&mut self.body).poll_next(context) {
                Poll::Ready(Some(Ok(frame))) => self.lines.push(frame),
                Poll::Ready(Some(Err(error))) if !is_end(&error) => {
                    return Poll::Ready(Err(Error::Read(error)));
                }
                Poll::Ready(Some(Err(_)) | None) => self.is_ended = true,
                Poll::Pending => {
                    ready!(self.deadline.as_mut().poll(context));
                    self.is_ended = true;
                }
            }
        }
    }

    /// Whether the response began less than a second ago.
    pub(crate) fn is_young(&self) -> bool {
        self.started.elapsed() < SHORT
    }

    fn line(&mut self, line: Bytes) -> Read {
        self.has_line = true;
        Read::Line(line)
    }

    /// The last line may have no end. An incomplete line is ignored: the next watch repeats it.
    fn end(&mut self) -> Read {
        let rest = self.lines.rest();
        if serde_json::from_slice::<IgnoredAny>(&rest).is_ok() {
            return self.line(rest);
        }
        Read::End { is_short: !self.has_line && self.is_young() }
    }
}

/// Whether the connection was closed before the end of the response. A proxy with its own timeout closes connections of
/// watches in this way.
fn is_end(error: &kube::Error) -> bool {
    let first: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(first), |error| error.source()).take(MAX_CAUSES).any(|cause| {
        let cause = cause.downcast_ref::<std::io::Error>();
        cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::UnexpectedEof)
    })
}

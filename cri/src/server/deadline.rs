//! Deadlines of calls, with gRPC's status code.
//!
//! The transport cancels a call at its timeout with `Cancelled`. A client whose own timer fires later gets this code
//! instead of `DeadlineExceeded`. So the same timeout is applied here first.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response};
use tokio::time::{Instant, sleep_until};
use tonic::Status;
use tonic::body::Body;
use tower::{Layer, Service};

/// Layer that applies deadlines to all calls.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadlines;

/// A service with deadlines.
#[derive(Clone, Debug)]
pub(super) struct WithDeadlines<S>(S);

impl<S> Layer<S> for Deadlines {
    type Service = WithDeadlines<S>;

    fn layer(&self, inner: S) -> Self::Service {
        WithDeadlines(inner)
    }
}

impl<S> Service<Request<Body>> for WithDeadlines<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // This deadline is computed before the transport's deadline, which begins after this call returns.
        let end = parse_timeout(request.headers()).and_then(|time| Instant::now().checked_add(time));
        let answer = self.0.call(request);
        match end {
            Some(end) => Box::pin(until(end, answer)),
            None => Box::pin(answer),
        }
    }
}

async fn until<E>(
    end: Instant,
    answer: impl Future<Output = Result<Response<Body>, E>>,
) -> Result<Response<Body>, E> {
    let (mut answer, mut sleep) = (pin!(answer), pin!(sleep_until(end)));
    poll_fn(|context| {
        if let Poll::Ready(answer) = answer.as_mut().poll(context) {
            return Poll::Ready(answer);
        }
        // The transport's timer can wake this task first: the clock decides, not the timer that fired.
        let late = sleep.as_mut().poll(context).is_ready() || Instant::now() >= end;
        if late { Poll::Ready(Ok(exceeded())) } else { Poll::Pending }
    })
    .await
}

fn exceeded() -> Response<Body> {
    Status::deadline_exceeded("the deadline of the call has passed").into_http()
}

/// Parses `grpc-timeout`: at most eight digits and a unit (gRPC over HTTP/2). An invalid value is ignored.
fn parse_timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::{pending, ready};

    use super::*;

    fn headers(text: &str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static("grpc-timeout"), text.parse().unwrap())])
    }

    #[test]
    fn a_timeout_is_up_to_eight_digits_and_a_unit() {
        for (text, time) in [
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("1m", Some(Duration::from_millis(1))),
            ("5u", Some(Duration::from_micros(5))),
            ("7n", Some(Duration::from_nanos(7))),
            ("123456789n", None),
            ("S", None),
            ("", None),
            ("-1S", None),
            ("+1S", None),
            ("1s", None),
        ] {
            assert_eq!(parse_timeout(&headers(text)), time, "{text:?}");
        }
        assert_eq!(parse_timeout(&HeaderMap::new()), None);
    }

    async fn code<F>(answer: fn() -> F, time_out: Option<&str>) -> Option<tonic::Code>
    where
        F: Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
    {
        let mut service = Deadlines.layer(tower::service_fn(move |_: Request<Body>| answer()));
        let mut request = Request::new(Body::empty());
        if let Some(text) = time_out {
            *request.headers_mut() = headers(text);
        }
        let response = service.call(request).await.unwrap();
        Status::from_header_map(response.headers()).map(|status| status.code())
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_call_gets_deadline_exceeded() {
        assert_eq!(code(pending, Some("50m")).await, Some(tonic::Code::DeadlineExceeded));
        assert_eq!(code(|| ready(Ok(Response::default())), Some("50m")).await, None);
        assert_eq!(code(|| ready(Ok(Response::default())), None).await, None);
    }
}

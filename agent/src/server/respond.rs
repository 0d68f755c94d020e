//! Responses of the kubelet API.

use bytes::Bytes;
use http::{Response, StatusCode, header};
use http_body_util::{BodyExt, Full};

use crate::runtime::{Body, RuntimeError};

/// A request that is answered by an error status and one line of text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refused(pub(super) StatusCode, pub(super) String);

impl Refused {
    pub(super) fn by_runtime(error: &RuntimeError) -> Refused {
        Refused(StatusCode::INTERNAL_SERVER_ERROR, error.message().to_owned())
    }

    pub(super) fn answer(self) -> Response<Body> {
        text(self.0, self.1)
    }
}

pub(super) fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    typed(status, "text/plain; charset=utf-8", text.into())
}

pub(super) fn json(value: &serde_json::Value) -> Response<Body> {
    typed(StatusCode::OK, "application/json", value.to_string().into())
}

/// Makes a large response on a thread for blocking calls, because its encoding takes long.
pub(super) async fn on_blocking_thread(
    make: impl FnOnce() -> Response<Body> + Send + 'static,
) -> Response<Body> {
    match coracle_threads::spawn_blocking(make).await {
        Ok(response) => response,
        Err(error) => Refused(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).answer(),
    }
}

pub(super) fn typed(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Full::new(body).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

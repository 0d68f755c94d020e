//! Requests from the network: refusals during the shutdown, and web pages from other origins (CORS).

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};

use super::Apiserver;
use crate::{
    browsers,
    drain::{self, Begun},
    reply::{self, Body, Reply},
    short_lived::ShortLived,
};

impl Apiserver {
    /// Handles a request from the network. If its page has an allowed origin, the page may read the response. The
    /// request may be refused during the shutdown.
    pub(crate) async fn handle_network<B>(&self, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: std::fmt::Display,
    {
        let drained = match self.state.drain.as_ref().map(|drain| drain.begin(&request)) {
            // As upstream, a refused request has no audit event, no metrics and no CORS headers.
            Some(Begun::Refused) => return drain::refusal(request.version()),
            Some(Begun::Counted(token)) => Some(token),
            Some(Begun::NotCounted) | None => None,
        };
        let origin = self.state.browsers.origins.of(request.headers());
        // A browser sends a preflight request without credentials, so it is not authenticated.
        let is_preflight = origin.is_some() && *request.method() == Method::OPTIONS;
        let mut reply = if is_preflight { self.preflight() } else { self.handle(request, None).await };
        if let Some(origin) = origin {
            browsers::allow(reply.headers_mut(), origin);
        }
        if let Some(token) = drained {
            let limits = reply.extensions_mut().remove::<ShortLived>().unwrap_or_default();
            reply.extensions_mut().insert(limits.with_drained(token));
        }
        reply
    }

    fn preflight(&self) -> Reply {
        let mut reply = Reply::new(reply::full(""));
        *reply.status_mut() = StatusCode::NO_CONTENT;
        self.for_network(reply, None, None)
    }
}

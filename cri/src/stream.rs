//! Streams to clients: exec, attach and port-forward, over WebSocket and SPDY/3.1.
//!
//! A client comes with a token in its path; the ticket behind it says what it may do. The upgraded
//! connection is given to one of two transports, which turn it into the same few channels.

mod descriptor;
mod token;

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::debug;

pub(crate) use self::descriptor::Descriptor;
pub(crate) use self::token::{Ticket, Tokens};
use crate::runtime::Runtime;

/// The body of an answer: short texts only, the streams go over the upgraded connection.
pub type BoxBody = Full<Bytes>;

impl Runtime {
    /// Answers a request for `/exec/{token}`, `/attach/{token}` or `/portforward/{token}` and serves
    /// the stream on the connection that it upgrades.
    pub async fn stream(&self, request: Request<Incoming>) -> Response<BoxBody> {
        let path = request.uri().path().trim_matches('/').to_owned();
        let ticket = path
            .rsplit_once('/')
            .and_then(|(verb, token)| self.inner.tokens.take(verb.rsplit('/').next().unwrap_or(verb), token));
        match ticket {
            Some(_ticket) => text(StatusCode::BAD_REQUEST, "upgrade to WebSocket or SPDY/3.1 required"),
            None => text(StatusCode::NOT_FOUND, "no such stream: its token is unknown, used or too old"),
        }
    }
}

fn text(status: StatusCode, text: &str) -> Response<BoxBody> {
    let mut response = Response::new(Full::from(text.to_owned()));
    *response.status_mut() = status;
    response
}

/// Serves streams over HTTP until `shutdown`: for gRPC clients, which are given URLs.
pub async fn serve(runtime: Runtime, listener: TcpListener, shutdown: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            // Both arms are cancel safe: nothing is accepted that is not returned.
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((connection, _)) = accepted else { continue };
        let runtime = runtime.clone();
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request| {
                let runtime = runtime.clone();
                async move { Ok::<_, Infallible>(runtime.stream(request).await) }
            });
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(connection), service)
                .with_upgrades()
                .await;
            if let Err(error) = served {
                debug!(%error, "a streaming connection ended badly");
            }
        });
    }
}

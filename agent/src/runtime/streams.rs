//! Exec, attach and port-forward streams: served by the runtime in this process, or forwarded to the streaming server
//! of a runtime in another process.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use coracle_connections::{ConnectionPermit, watch_reads};
use coracle_error_chain::chain;

/// Maximum size in bytes of a response that does not upgrade the connection.
const REFUSAL_MAX: usize = 1 << 20;

/// The body of a response.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Serves exec, attach and port-forward streams that the runtime has prepared.
pub trait Streams: Send + Sync + 'static {
    /// Responds to the caller's request, and upgrades its connection if the request asks for an upgrade. `url` is the
    /// result of the runtime's Exec, Attach or PortForward.
    fn stream(&self, url: &str, request: Request<Incoming>) -> BoxFuture<'static, Response<Body>>;
}

/// Replaces the request's path by the URL's, which contains the token. The caller's query is kept.
fn retarget(url: &str, request: &mut Request<Incoming>) -> Option<Uri> {
    let url: Uri = url.parse().ok()?;
    let query = request.uri().query().or(url.query()).map(|query| format!("?{query}")).unwrap_or_default();
    let path = PathAndQuery::try_from(format!("{}{query}", url.path())).ok()?;
    *request.uri_mut() = Uri::from(path);
    Some(url)
}

/// 502: the runtime returned an address that is not a URL.
fn bad_url(url: &str) -> Response<Body> {
    text(StatusCode::BAD_GATEWAY, format!("the container runtime returned the invalid URL {url:?}"))
}

/// Streams of a runtime in another process. The bytes are forwarded unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct Proxy;

impl Streams for Proxy {
    fn stream(&self, url: &str, mut request: Request<Incoming>) -> BoxFuture<'static, Response<Body>> {
        let url = url.to_owned();
        Box::pin(async move {
            let Some(address) =
                retarget(&url, &mut request).and_then(|url| url.authority().map(ToString::to_string))
            else {
                return bad_url(&url);
            };
            match forward(&address, request).await {
                Ok(response) => response,
                Err(reason) => text(
                    StatusCode::BAD_GATEWAY,
                    format!("cannot connect to the container runtime's streaming server: {reason}"),
                ),
            }
        })
    }
}

/// Forwards the request, and copies bytes between both connections after an upgrade.
async fn forward(address: &str, mut request: Request<Incoming>) -> Result<Response<Body>, String> {
    let cause = |error: &dyn std::error::Error| chain(error);
    let stream = TcpStream::connect(address).await.map_err(|e| cause(&e))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| cause(&e))?;
    tokio::spawn(connection.with_upgrades());
    let mut forwarded = Request::new(Empty::<Bytes>::new());
    *forwarded.method_mut() = request.method().clone();
    *forwarded.uri_mut() = request.uri().clone();
    let host = HeaderValue::from_str(address).map_err(|e| cause(&e))?;
    *forwarded.headers_mut() = headers_for(host, request.headers());
    let mut answer = sender.send_request(forwarded).await.map_err(|e| cause(&e))?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, REFUSAL_MAX).collect().await.map_err(|e| cause(&*e))?.to_bytes();
        return Ok(Response::from_parts(head, http_body_util::Full::new(body).boxed_unsync()));
    }
    let permit = request.extensions().get::<Arc<ConnectionPermit>>().cloned();
    let (theirs, ours) = (hyper::upgrade::on(&mut answer), hyper::upgrade::on(&mut request));
    coracle_threads::spawn(async move {
        if let (Ok(theirs), Ok(ours)) = tokio::join!(theirs, ours) {
            let (mut ours, abandonment) = watch_reads(TokioIo::new(ours), permit);
            let mut theirs = TokioIo::new(theirs);
            tokio::select! {
                // A stream ends when either end closes it: it cannot be resumed.
                _ = tokio::io::copy_bidirectional(&mut theirs, &mut ours) => {}
                () = abandonment.happened() => {}
            }
        }
    });
    Ok(answer.map(|_| Empty::new().boxed_unsync()))
}

/// The headers for the runtime. As upstream, the runtime gets no credentials: the kubelet API has checked them, and the
/// connection to the runtime is not encrypted.
fn headers_for(host: HeaderValue, arrived: &HeaderMap) -> HeaderMap {
    let mut headers = arrived.clone();
    headers.remove(header::AUTHORIZATION);
    headers.insert(header::HOST, host);
    headers
}

/// A response of one line of text.
fn text(status: StatusCode, text: String) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(text)).boxed_unsync());
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtime_gets_the_upgrade_and_no_credentials() {
        let mut arrived = HeaderMap::new();
        for (name, value) in
            [("authorization", "Bearer secret"), ("host", "node:10250"), ("upgrade", "SPDY/3.1")]
        {
            arrived.insert(name, HeaderValue::from_static(value));
        }
        let headers = headers_for(HeaderValue::from_static("127.0.0.1:7"), &arrived);
        assert_eq!((headers.len(), &headers[header::HOST]), (2, &HeaderValue::from_static("127.0.0.1:7")));
        assert_eq!(headers[header::UPGRADE], "SPDY/3.1");
    }
}

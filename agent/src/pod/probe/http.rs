//! HTTP GET of probes and hooks: without verification of certificates, and with redirects within the same host.

use std::sync::Arc;

use bytes::Bytes;
use coracle_any_certificate::AnyCertificate;
use coracle_error_chain::chain;
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use url::Url;

use super::outcome::Outcome;
use super::target::USER_AGENT;
use crate::event_recorder::MESSAGE_MAX;
use crate::resolver;

/// Maximum bytes that are read of a response's body.
const BODY_BYTES: usize = 10 * 1024;
/// Size of the read buffer in bytes. A longer header of a response is an error. A pod can have 1,500 probes at the same
/// time.
const BUFFER_BYTES: usize = 32 * 1024;
/// Maximum requests of one probe, redirects included.
const REQUESTS_MAX: usize = 10;
/// Characters that a request's path and query cannot have. These characters are escaped as by the kubelet, like all
/// characters outside of ASCII.
const ESCAPED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'<')
    .add(b'>')
    .add(b'\\')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');

/// A GET request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    tls: bool,
    host: String,
    /// Whether the host is the pod itself. Otherwise the author of the spec chose the host.
    is_own: bool,
    port: u16,
    path: String,
    headers: Vec<(String, String)>,
}

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    status: http::StatusCode,
    location: Option<String>,
    /// The other host of a redirect, which is not followed.
    elsewhere: Option<String>,
    /// The first bytes of a redirect's body, if the pod itself sent it.
    body: Option<String>,
}

/// The reason why there is no successful response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("the port is neither a number from 1 to 65535 nor the name of a port of the container")]
    Port,
    #[error("cannot connect to {host}:{port}: {source}")]
    Connect { host: String, port: u16, source: std::io::Error },
    #[error("HTTP: {0}")]
    Http(#[from] hyper::Error),
    #[error("the request is not valid: {0}")]
    Request(#[from] http::Error),
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("HTTP probe failed with statuscode: {0}")]
    Status(u16),
    #[error("the redirect is not a URL that can be followed")]
    Location,
    #[error("stopped after {REQUESTS_MAX} redirects")]
    Redirects,
}

impl HttpError {
    /// The outcome of a probe. Without a port the probe has no result, as in the kubelet.
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Self::Port => Outcome::Unknown(self.to_string()),
            error => Outcome::of(error, chain(error)),
        }
    }
}

impl Request {
    /// The request of a handler, to a container of the pod with this address.
    pub(crate) fn new(get: &HTTPGetAction, container: &Container, ip: &str) -> Result<Self, HttpError> {
        let path = utf8_percent_encode(get.path.as_deref().unwrap_or("/"), ESCAPED).to_string();
        Ok(Self {
            tls: get.scheme.as_deref().is_some_and(|s| s.eq_ignore_ascii_case("https")),
            is_own: get.host.as_ref().is_none_or(String::is_empty),
            host: get.host.clone().filter(|h| !h.is_empty()).unwrap_or_else(|| ip.to_owned()),
            port: super::target::port(&get.port, container).ok_or(HttpError::Port)?,
            path: if path.starts_with('/') { path } else { format!("/{path}") },
            headers: get
                .http_headers
                .iter()
                .flatten()
                .map(|header| (header.name.clone(), header.value.clone()))
                .collect(),
        })
    }

    fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    /// The URL of a redirect.
    fn target(&self, location: &str) -> Result<Url, HttpError> {
        let scheme = if self.tls { "https" } else { "http" };
        let base = Url::parse(&format!("{scheme}://{}{}", self.authority(), self.path));
        let target = base.and_then(|base| base.join(location)).map_err(|_invalid| HttpError::Location)?;
        match target.scheme() {
            "http" | "https" => Ok(target),
            _ => Err(HttpError::Location),
        }
    }

    /// The request to a redirect's URL. None if the URL is on another host.
    fn redirected(&self, location: &str) -> Result<Option<Request>, HttpError> {
        let target = self.target(location)?;
        let own = self.target("/")?;
        if target.host_str() != own.host_str() {
            return Ok(None);
        }
        let path = &target[url::Position::BeforePath..url::Position::AfterQuery];
        // A relative redirect keeps the Host header of the probe. An absolute redirect has a host of its own.
        let absolute = Url::parse(location).is_ok();
        let mut headers = self.headers.clone();
        headers.retain(|(name, _)| !(absolute && name.eq_ignore_ascii_case("host")));
        Ok(Some(Request {
            tls: target.scheme() == "https",
            host: self.host.clone(),
            is_own: self.is_own,
            port: target.port_or_known_default().ok_or(HttpError::Location)?,
            path: path.to_owned(),
            headers,
        }))
    }

    fn build(&self) -> Result<http::Request<Empty<Bytes>>, http::Error> {
        let authority = self.authority();
        let mut request = http::Request::get(&self.path);
        let has = |name: &str| self.headers.iter().any(|(n, _)| n.eq_ignore_ascii_case(name));
        for (name, default) in [("Host", authority.as_str()), ("User-Agent", USER_AGENT), ("Accept", "*/*")] {
            if !has(name) {
                request = request.header(name, default);
            }
        }
        for (name, value) in self.headers.iter().filter(|(_, value)| !value.is_empty()) {
            request = request.header(name, value);
        }
        request.header("Connection", "close").body(Empty::new())
    }
}

impl Answer {
    /// 2xx and 3xx are successes.
    pub(crate) fn success(&self) -> Result<(), HttpError> {
        match self.status.as_u16() {
            200..400 => Ok(()),
            code => Err(HttpError::Status(code)),
        }
    }

    /// The outcome of a probe. As upstream, a redirect that is not followed shows the body, but only if the pod itself
    /// sent the body. The author of the spec may lack the permission to read from another host.
    pub(super) fn outcome(&self) -> Outcome {
        if let (Ok(()), 300.., Some(body)) = (self.success(), self.status.as_u16(), &self.body) {
            return Outcome::Warning(format!("Probe terminated redirects, Response body: {body}"));
        }
        match (self.success(), self.status.as_u16(), &self.elsewhere) {
            (Err(error), ..) => Outcome::Failure(error.to_string()),
            (Ok(()), 300.., Some(host)) => {
                Outcome::Warning(format!("Probe terminated redirects: {host} is another host"))
            }
            (Ok(()), 300.., None) => Outcome::Warning("Probe terminated redirects".to_owned()),
            (Ok(()), ..) => Outcome::Success,
        }
    }

    /// The `Location` header, if the response is a redirect.
    fn redirect(&self) -> Option<&str> {
        let redirects = matches!(self.status.as_u16(), 301 | 302 | 303 | 307 | 308);
        self.location.as_deref().filter(|_| redirects)
    }
}

/// Sends the request of a pod of the namespace, and follows redirects within the host.
pub(crate) async fn get(mut request: Request, namespace: &str) -> Result<Answer, HttpError> {
    for _ in 0..REQUESTS_MAX {
        let mut answer = once(&request, namespace).await?;
        let Some(location) = answer.redirect() else { return Ok(answer) };
        match request.redirected(location)? {
            Some(next) => request = next,
            None => {
                answer.elsewhere = request.target(location)?.host_str().map(str::to_owned);
                return Ok(answer);
            }
        }
    }
    Err(HttpError::Redirects)
}

async fn once(request: &Request, namespace: &str) -> Result<Answer, HttpError> {
    let connect_error =
        |source| HttpError::Connect { host: request.host.clone(), port: request.port, source };
    let stream = resolver::connect(namespace, &request.host, request.port).await.map_err(connect_error)?;
    if !request.tls {
        return exchange(stream, request).await;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()?
        .dangerous()
        // A probe checks whether a server responds, not its identity.
        .with_custom_certificate_verifier(Arc::new(AnyCertificate::new(provider)))
        .with_no_client_auth();
    let name = ServerName::try_from(request.host.clone()).map_err(|_invalid| {
        HttpError::Tls(rustls::Error::General("the host is not a valid server name".to_owned()))
    })?;
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    exchange(connector.connect(name, stream).await.map_err(connect_error)?, request).await
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: &Request,
) -> Result<Answer, HttpError> {
    let mut builder = hyper::client::conn::http1::Builder::new();
    builder.max_buf_size(BUFFER_BYTES);
    let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await?;
    let exchange = async {
        let response = sender.send_request(request.build()?).await?;
        let status = response.status();
        let location = response.headers().get(http::header::LOCATION).and_then(|l| l.to_str().ok());
        let location = location.map(str::to_owned);
        let is_shown = request.is_own && status.is_redirection();
        let begin = begin_of(response.into_body()).await;
        let body = is_shown.then(|| String::from_utf8_lossy(&begin).into_owned());
        Ok(Answer { status, location, elsewhere: None, body })
    };
    tokio::pin!(exchange);
    tokio::pin!(connection);
    // The connection is polled concurrently with the exchange, and dropped with it.
    tokio::select! {
        answer = &mut exchange => answer,
        ended = &mut connection => match ended {
            Ok(()) => exchange.await,
            Err(error) => Err(error.into()),
        },
    }
}

/// Reads a body to its end or the limit, so that the server does not see a reset connection. Returns only the first
/// bytes, which fit into an event.
async fn begin_of(mut body: hyper::body::Incoming) -> Vec<u8> {
    let (mut read, mut begin) = (0, Vec::new());
    while read < BODY_BYTES
        && let Some(Ok(frame)) = body.frame().await
    {
        let Some(data) = frame.data_ref() else { continue };
        read += data.len();
        begin.extend(data.iter().take(MESSAGE_MAX.saturating_sub(begin.len())));
    }
    begin
}

/// Fuzz target: the header `Location` of a redirect, which a container sets. The next request must go to the same host.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let location = String::from_utf8_lossy(data);
    let (host, path) = ("10.42.0.2".to_owned(), "/a/b?c=d".to_owned());
    let mut request = Request { tls: false, host, is_own: true, port: 80, path, headers: Vec::new() };
    for _ in 0..REQUESTS_MAX {
        let Ok(Some(next)) = request.redirected(&location) else { return };
        assert_eq!(next.host, "10.42.0.2", "the redirect leads to another host");
        let is_clean = |c: char| !c.is_control() && !c.is_whitespace();
        assert!(next.path.starts_with('/') && next.path.chars().all(is_clean), "{:?}", next.path);
        let _refused = next.build();
        request = next;
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Starts a server with a response for each path. Returns its port.
    async fn serve(answers: &'static [(&'static str, &'static str)]) -> u16 {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = [0; 1024];
                let read = stream.read(&mut head).await.unwrap();
                let head = String::from_utf8_lossy(&head[..read]).into_owned();
                let path = head.split(' ').nth(1).unwrap();
                let known = answers.iter().find(|(known, _)| *known == path);
                let answer = known.map_or("404 Not Found\r\n", |known| known.1);
                let answer = format!("HTTP/1.1 {answer}Content-Length: 6\r\n\r\n<body>");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        port
    }

    async fn outcome(port: u16, path: &str) -> Outcome {
        outcome_of(serde_json::json!({"path": path, "port": port})).await
    }

    async fn outcome_of(get: serde_json::Value) -> Outcome {
        let request = Request::new(&serde_json::from_value(get).unwrap(), &Container::default(), "127.0.0.1");
        super::get(request.unwrap(), "ns")
            .await
            .map_or_else(|error| error.outcome(), |answer| answer.outcome())
    }

    #[test]
    fn a_probe_of_an_unknown_port_name_has_no_result() {
        let get = serde_json::from_value(serde_json::json!({"port": "web"})).unwrap();
        let error = Request::new(&get, &Container::default(), "127.0.0.1").unwrap_err();
        assert_eq!(error.outcome().passed(), None);
    }

    #[tokio::test]
    async fn a_body_without_end_does_not_delay_a_probe() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            // Read the request first, because a response before the request is a protocol error.
            let mut head = [0; 1024];
            assert_ne!(stream.read(&mut head).await.unwrap(), 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
            while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
        });
        assert_eq!(outcome(port, "/").await, Outcome::Success);
    }

    #[tokio::test]
    async fn a_long_header_of_a_response_is_a_failure() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert_ne!(stream.read(&mut [0; 1024]).await.unwrap(), 0);
            let head = format!("HTTP/1.1 200 OK\r\nA: {}\r\n\r\n", "x".repeat(200 << 10));
            // The client closes the connection before the end of the header.
            let _closed = stream.write_all(head.as_bytes()).await;
        });
        assert_eq!(outcome(port, "/").await.passed(), Some(false));
    }

    #[tokio::test]
    async fn a_path_is_escaped_where_http_requires_it() {
        let port = serve(&[("/a%20b/%C3%A9?c=%3Cd%20%2F", "200 OK\r\n")]).await;
        assert_eq!(outcome(port, "a b/\u{e9}?c=<d %2F").await, Outcome::Success);
    }

    #[tokio::test]
    async fn redirects_are_followed_within_the_host() {
        let port = serve(&[
            ("/ok", "200 OK\r\n"),
            ("/to-ok", "302 Found\r\nLocation: /ok\r\n"),
            ("/to-bad", "301 Moved\r\nLocation: bad\r\n"),
            ("/away", "302 Found\r\nLocation: http://198.51.100.1/\r\n"),
            ("/loop", "307 Temporary\r\nLocation: /loop\r\n"),
            ("/file", "302 Found\r\nLocation: file:///etc/passwd\r\n"),
            ("/choice", "300 Multiple Choices\r\n"),
        ])
        .await;
        assert_eq!(outcome(port, "/to-ok").await, Outcome::Success);
        let failed = Outcome::Failure("HTTP probe failed with statuscode: 404".to_owned());
        assert_eq!(outcome(port, "/to-bad").await, failed);
        let own = "Probe terminated redirects, Response body: <body>";
        assert_eq!(outcome(port, "/away").await, Outcome::Warning(own.to_owned()));
        let chosen = serde_json::json!({"path": "/away", "port": port, "host": "127.0.0.1"});
        let away = "Probe terminated redirects: 198.51.100.1 is another host";
        assert_eq!(outcome_of(chosen).await, Outcome::Warning(away.to_owned()), "without the body");
        assert_eq!(outcome(port, "/loop").await, Outcome::Failure("stopped after 10 redirects".to_owned()));
        assert_eq!(outcome(port, "/file").await.passed(), Some(false));
        assert_eq!(outcome(port, "/choice").await.passed(), Some(true));
    }

    #[test]
    fn an_absolute_redirect_within_the_host_may_change_port_and_scheme() {
        let get = serde_json::json!({"path": "/a?b=c", "port": 80,
            "httpHeaders": [{"name": "Host", "value": "n"}, {"name": "X", "value": "y"}]});
        let get = serde_json::from_value(get).unwrap();
        let request = Request::new(&get, &Container::default(), "2001:db8::1").unwrap();
        let next = request.redirected("https://[2001:db8::1]:8443/x?y=z#w").unwrap().unwrap();
        assert_eq!((next.tls, next.port, next.path.as_str()), (true, 8443, "/x?y=z"));
        assert_eq!(next.headers, [("X".to_owned(), "y".to_owned())]);
        let next = request.redirected("d").unwrap().unwrap();
        assert_eq!((next.tls, next.port, next.path.as_str()), (false, 80, "/d"));
        assert_eq!(next.headers.len(), 2, "a relative redirect keeps the requested host name");
    }
}

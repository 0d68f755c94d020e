//! One HTTPS request to a webhook.

use std::{sync::Arc, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::rt::TokioIo;
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::offload::{self, LARGE};
use crate::server::State;
use crate::sub;

/// Maximum bytes of a response to a small request.
const MAX_RESPONSE: usize = 3 << 20;

/// How much longer than its request a response may be, in addition to [`MAX_RESPONSE`].
const MAX_GROWTH: usize = 8;

/// Default port of a service.
const PORT: u16 = 443;

/// How a webhook is called.
#[derive(Clone)]
pub(crate) struct Endpoint {
    target: Target,
    /// The TLS configuration, or why there is none.
    tls: Result<Arc<rustls::ClientConfig>, String>,
    timeout: Duration,
    /// Maximum bytes of a response to a large request.
    max_response: usize,
}

/// Where a webhook listens.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    Url { host: String, port: u16, path: String },
    Service { namespace: String, name: String, port: u16, path: String },
}

/// The TLS configuration with the authorities of `caBundle`.
fn tls(ca_bundle: &str) -> Result<Arc<rustls::ClientConfig>, String> {
    if ca_bundle.is_empty() {
        return Err("clientConfig.caBundle is not set, and there are no system roots".to_owned());
    }
    let pem =
        BASE64_STANDARD.decode(ca_bundle).map_err(|error| format!("caBundle is not base64: {error}"))?;
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|error| format!("caBundle is not PEM: {error}"))?;
        roots.add(certificate).map_err(|error| format!("caBundle has an invalid certificate: {error}"))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
}

/// Sends a review to a webhook, within its timeout.
pub(crate) async fn call(state: &State, hook: &Endpoint, review: &Value) -> Result<Value, String> {
    let url = hook.target.url(hook.timeout.as_secs());
    let called = tokio::time::timeout(hook.timeout, exchange(state, hook, review)).await;
    let called = called.unwrap_or_else(|_elapsed| Err("context deadline exceeded".to_owned()));
    called.map_err(|why| format!("failed to call webhook: Post {url:?}: {why}"))
}

async fn exchange(state: &State, hook: &Endpoint, review: &Value) -> Result<Value, String> {
    let tls = hook.tls.clone()?;
    let (stream, host) = connect(state, &hook.target).await?;
    let name = ServerName::try_from(host.clone()).map_err(|error| error.to_string())?;
    let stream =
        TlsConnector::from(tls).connect(name, stream).await.map_err(|error| format!("tls: {error}"))?;
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| error.to_string())?;
    // The sender gets the failure of the connection.
    tokio::spawn(connection);
    let text = offload::run(is_large(review), || review.to_string());
    let max_response = hook.max_response(text.len());
    let path = format!("{}?timeout={}s", hook.target.path(), hook.timeout.as_secs());
    let request = Request::post(path)
        .header(header::HOST, host)
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ACCEPT, "application/json")
        .body(Full::<Bytes>::from(text))
        .map_err(|error| error.to_string())?;
    let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
    let status = response.status();
    if !status.is_success() {
        return Err(format!("the webhook responded with the status {status}"));
    }
    let body = Limited::new(response.into_body(), max_response).collect().await;
    let body = body.map_err(|error| format!("cannot read the response: {error}"))?.to_bytes();
    let parsed = offload::run(body.len() > LARGE, || serde_json::from_slice(&body));
    parsed.map_err(|error| format!("the response is not JSON: {error}"))
}

/// Connects to the webhook. Returns the connection and the name of the server's certificate. A service is reached through
/// one of its ready endpoints, under the same restrictions as the proxy of services.
async fn connect(state: &State, target: &Target) -> Result<(TcpStream, String), String> {
    match target {
        Target::Url { host, port, .. } => {
            let stream = TcpStream::connect((host.as_str(), *port)).await;
            let stream = stream.map_err(|error| format!("dial tcp {host}:{port}: {error}"))?;
            let _ = stream.set_nodelay(true);
            Ok((stream, host.clone()))
        }
        Target::Service { namespace, name, port, .. } => {
            let endpoint = sub::target::service(state, (namespace, name), &port.to_string());
            let stream = endpoint.map_err(|error| error.message)?.connect().await;
            Ok((stream.map_err(|error| error.message)?, format!("{name}.{namespace}.svc")))
        }
    }
}

/// Whether the text of the value is longer than [`LARGE`]. Reads no more than that of it.
fn is_large(value: &Value) -> bool {
    fn rest(value: &Value, left: usize) -> Option<usize> {
        let left = left.checked_sub(2)?;
        match value {
            Value::String(text) => left.checked_sub(text.len()),
            Value::Array(items) => items.iter().try_fold(left, |left, item| rest(item, left)),
            Value::Object(fields) => {
                fields.iter().try_fold(left, |left, (name, value)| rest(value, left.checked_sub(name.len())?))
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => Some(left),
        }
    }
    rest(value, LARGE).is_none()
}

// === impl Endpoint ===

impl Endpoint {
    /// Reads a `clientConfig`.
    pub(crate) fn read(config: &Value, timeout: Duration) -> Self {
        let tls = tls(config["caBundle"].as_str().unwrap_or_default());
        Self { target: Target::read(config), tls, timeout, max_response: MAX_RESPONSE }
    }

    /// The same with a higher limit for responses to large requests.
    pub(crate) fn with_max_response(mut self, bytes: usize) -> Self {
        self.max_response = bytes;
        self
    }

    /// Maximum bytes of the response to a request of this length.
    fn max_response(&self, request: usize) -> usize {
        MAX_RESPONSE.saturating_add(request.saturating_mul(MAX_GROWTH)).min(self.max_response)
    }
}

// === impl Target ===

impl Target {
    fn read(config: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let service = &config["service"];
        if service.is_object() {
            let path = text(&service["path"]);
            let port = service["port"].as_u64().and_then(|port| u16::try_from(port).ok());
            return Self::Service {
                namespace: text(&service["namespace"]),
                name: text(&service["name"]),
                port: port.unwrap_or(PORT),
                path: if path.is_empty() { "/".to_owned() } else { path },
            };
        }
        let uri: http::Uri = text(&config["url"]).parse().unwrap_or_default();
        Self::Url {
            host: uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(PORT),
            path: uri.path().to_owned(),
        }
    }

    /// The URL in messages.
    fn url(&self, seconds: u64) -> String {
        match self {
            Self::Url { host, port, path } => format!("https://{host}:{port}{path}?timeout={seconds}s"),
            Self::Service { namespace, name, port, path } => {
                format!("https://{name}.{namespace}.svc:{port}{path}?timeout={seconds}s")
            }
        }
    }

    fn path(&self) -> &str {
        match self {
            Self::Url { path, .. } | Self::Service { path, .. } => path,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_target_is_a_service_or_a_url() {
        let url = Target::read(&json!({"url": "https://[2001:db8::1]:8443/hook"}));
        assert_eq!(url, Target::Url { host: "2001:db8::1".into(), port: 8443, path: "/hook".into() });
        let service = Target::read(&json!({"service": {"namespace": "n", "name": "s", "port": 443}}));
        assert_eq!(service.url(5), "https://s.n.svc:443/?timeout=5s");
    }

    #[test]
    fn a_response_may_be_as_much_longer_as_its_request_is_long() {
        let endpoint = Endpoint::read(&json!({"url": "https://a"}), Duration::from_secs(1));
        assert_eq!([endpoint.max_response(100), endpoint.max_response(1 << 30)], [MAX_RESPONSE; 2]);
        let conversion = endpoint.with_max_response(64 << 20);
        assert_eq!(conversion.max_response(1000), MAX_RESPONSE + 8000);
        assert_eq!(conversion.max_response(1 << 30), 64 << 20);
    }

    #[test]
    fn large_reviews_are_recognized() {
        assert!(!is_large(&json!({"a": ["b", 1, null]})));
        assert!(is_large(&json!({"a": {"b": "x".repeat(LARGE)}})) && is_large(&json!(vec![0; LARGE])));
    }
}

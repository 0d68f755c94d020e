//! One HTTPS request to a webhook.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use coracle_kinds::kind::by_resource;
use http::{Request, header};
use http_body_util::Full;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use serde_json::Value;
use tokio::{net::TcpStream, time::Instant};
use tokio_rustls::TlsConnector;

use crate::{
    body,
    bundle_verifier::BundleVerifier,
    cache::Cache,
    external_name,
    in_flight::{BodyMemory, InFlight},
    offload::{self, MIN_OFFLOADED_BYTES},
    remote::{
        identities::{Identities, Identity},
        kubeconfig::ClientCertificate,
    },
    request_owner, resolver, target, waits,
    webhook_connections::WebhookPermit,
};

/// Maximum bytes of the response to an empty request. The limit grows with the request.
const MAX_RESPONSE: usize = 3 << 20;

/// Bytes by which the limit of a response grows for each request byte, up to the endpoint's own limit.
const PER_BYTE_SENT: usize = 8;

/// Maximum time for a connection to end after the timeout of its call.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Default port of a service.
const PORT: u16 = 443;

/// Address, TLS configuration, timeout and response limit of a webhook.
#[derive(Clone)]
pub(crate) struct Endpoint {
    target: Target,
    /// The credentials of the server. `None` for an anonymous call.
    identity: Option<Arc<Identity>>,
    /// The TLS configuration, or the reason why it is invalid.
    tls: Result<Arc<rustls::ClientConfig>, String>,
    timeout: Duration,
    /// Maximum bytes of a response.
    max_response: usize,
}

/// The address of a webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    Url { host: String, port: u16, path: String },
    Service { namespace: String, name: String, port: u16, path: String },
}

/// The TLS configuration with the authorities of `caBundle`, or with the authorities of the machine if `caBundle` is
/// empty.
fn tls(ca_bundle: &str, client: Option<&ClientCertificate>) -> Result<Arc<rustls::ClientConfig>, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = BundleVerifier::of(ca_bundle, provider.clone())?;
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let Some(client) = client else { return Ok(Arc::new(builder.with_no_client_auth())) };
    let (chain, key) = client.parts();
    let config = builder.with_client_auth_cert(chain, key);
    config.map(Arc::new).map_err(|error| format!("the client certificate is invalid: {error}"))
}

/// The permit for the connection of a call, and the deadline of the call.
pub(crate) struct Slot {
    permit: WebhookPermit,
    deadline: Instant,
}

/// Waits for a connection to a webhook, within the webhook's timeout. The timeout includes the call that follows. The
/// caller creates its review after this wait, so that waiting calls need little memory.
pub(crate) async fn reserve(in_flight: &InFlight, hook: &Endpoint) -> Result<Slot, String> {
    let deadline = Instant::now() + hook.timeout;
    let host = hook.host();
    let permit = waits::for_server(in_flight.webhook(&host, request_owner::current()));
    let why = match tokio::time::timeout_at(deadline, permit).await {
        Ok(Some(permit)) => return Ok(Slot { permit, deadline }),
        Ok(None) => "too many calls wait for connections to webhooks; try again",
        Err(_elapsed) => "context deadline exceeded: other calls use all connections to webhooks",
    };
    Err(hook.failed(why))
}

/// Sends a review to a webhook, within its timeout.
///
/// The response is charged to the memory of all webhook responses until `memory` is dropped.
pub(crate) async fn call(
    cache: &Cache,
    hook: &Endpoint,
    slot: Slot,
    review: &Value,
    memory: &mut BodyMemory,
) -> Result<Value, String> {
    let Slot { permit, deadline } = slot;
    let answer = waits::for_server(exchange(cache, hook, permit, review, memory));
    let called = tokio::time::timeout_at(deadline, answer).await;
    let called = called.unwrap_or_else(|_elapsed| Err("context deadline exceeded".to_owned()));
    called.map_err(|why| hook.failed(&why))
}

async fn exchange(
    cache: &Cache,
    hook: &Endpoint,
    permit: WebhookPermit,
    review: &Value,
    memory: &mut BodyMemory,
) -> Result<Value, String> {
    let tls = hook.tls.clone()?;
    let name = ServerName::try_from(hook.target.host()).map_err(|error| error.to_string())?;
    let stream = connect(cache, &hook.target).await?;
    let stream =
        TlsConnector::from(tls).connect(name, stream).await.map_err(|error| format!("tls: {error}"))?;
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| error.to_string())?;
    // A failure of the connection is returned by the sender. A server that reads nothing delays the end of the
    // connection.
    let limit = hook.timeout + CLOSE_TIMEOUT;
    coracle_threads::spawn(async move {
        let _ended = tokio::time::timeout(limit, connection).await;
        drop(permit);
    });
    let sent = offload::run(offload::is_longer(review, MIN_OFFLOADED_BYTES), || serde_json::to_vec(review));
    let sent = sent.map_err(|error| error.to_string())?;
    let max_response = hook.max_response(sent.len());
    let path = format!("{}?timeout={}s", hook.target.path(), hook.timeout.as_secs());
    let mut request = Request::post(path)
        .header(header::HOST, hook.target.authority())
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ACCEPT, "application/json");
    if let Some(identity) = &hook.identity
        && let Some(value) = identity.authorization().await?
    {
        request = request.header(header::AUTHORIZATION, value);
    }
    let request = request.body(Full::<Bytes>::from(sent)).map_err(|error| error.to_string())?;
    let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
    let status = response.status();
    if !status.is_success() {
        return Err(format!("the webhook responded with the status {status}"));
    }
    let body = body::read_up_to(response.into_body(), max_response, memory).await;
    let body = body.map_err(|error| match error.code {
        413 => format!("cannot read the response: it has more than {max_response} bytes"),
        429 => "cannot read the response: other webhook responses use all the memory; try again".to_owned(),
        _ => format!("cannot read the response: {}", error.message),
    })?;
    let parsed = offload::run(body.len() > MIN_OFFLOADED_BYTES, || serde_json::from_slice(&body));
    parsed.map_err(|error| format!("the response is not JSON: {error}"))
}

/// A connection to a webhook. A service is reached through one of its ready endpoints, or by its external name. The
/// limits of `resolver` apply to the look-up of a name.
async fn connect(cache: &Cache, target: &Target) -> Result<TcpStream, String> {
    match target {
        Target::Url { host, port, .. } => {
            let found = resolver::resolve(host, *port).await;
            let found = found.map_err(|error| format!("dial tcp: lookup {host}: {error}"))?;
            let stream = TcpStream::connect(found.as_slice()).await;
            let stream = stream.map_err(|error| format!("dial tcp {host}:{port}: {error}"))?;
            let _ = stream.set_nodelay(true);
            Ok(stream)
        }
        Target::Service { namespace, name, port, .. } => {
            if let Some(host) = external_name::of(cache, namespace, name) {
                let connected = external_name::connect(&host, *port).await;
                return connected.map(|(_, stream)| stream).map_err(|error| error.message);
            }
            let endpoint = endpoint(cache, namespace, name, *port)?;
            endpoint.connect().await.map_err(|error| error.message)
        }
    }
}

/// A ready endpoint of a service. The rules of proxied requests apply, because tenants can write endpoints.
fn endpoint(cache: &Cache, namespace: &str, name: &str, port: u16) -> Result<target::Endpoint, String> {
    let services = by_resource("", "v1", "services").ok_or("the kind is not served")?;
    let service = cache.get(services, namespace, name);
    let service = service.ok_or_else(|| format!("service {name:?} not found"))?.value();
    let ports = service["spec"]["ports"].as_array().into_iter().flatten();
    let wanted = ports.into_iter().find(|one| one["port"].as_u64() == Some(port.into()));
    let wanted = wanted.ok_or_else(|| format!("no service port {port} found for service {name:?}"))?;
    let port_name = wanted["name"].as_str().unwrap_or_default();
    target::ready(cache, namespace, name, port_name).map_err(|error| error.message)
}

// === impl Endpoint ===

impl Endpoint {
    /// Reads a `clientConfig`. The calls are anonymous.
    pub(crate) fn read(config: &Value, timeout: Duration) -> Self {
        Self::authenticated(config, timeout, &Identities::default())
    }

    /// Reads a `clientConfig`. The server authenticates with the identity for the webhook's address.
    pub(crate) fn authenticated(config: &Value, timeout: Duration, identities: &Identities) -> Self {
        let target = Target::read(config);
        let identity = identities.find(&target.authority());
        let client = identity.as_ref().and_then(|identity| identity.certificate());
        let tls = tls(config["caBundle"].as_str().unwrap_or_default(), client);
        Self { target, identity, tls, timeout, max_response: MAX_RESPONSE }
    }

    /// Sets the upper limit of a response in bytes. It is reached only after long requests.
    pub(crate) fn with_max_response(mut self, bytes: usize) -> Self {
        self.max_response = bytes;
        self
    }

    /// The host of the webhook. The memory for responses is shared fairly among hosts.
    pub(crate) fn host(&self) -> String {
        self.target.host()
    }

    /// The message of a failed call.
    fn failed(&self, why: &str) -> String {
        format!("failed to call webhook: Post {:?}: {why}", self.target.url(self.timeout.as_secs()))
    }

    /// Maximum bytes of the response to a request of `sent` bytes.
    fn max_response(&self, sent: usize) -> usize {
        MAX_RESPONSE.saturating_add(sent.saturating_mul(PER_BYTE_SENT)).min(self.max_response)
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
        format!("https://{}{}?timeout={seconds}s", self.authority(), self.path())
    }

    /// Host and port, as in a URL.
    fn authority(&self) -> String {
        let (Self::Url { port, .. } | Self::Service { port, .. }) = self;
        match self.host() {
            address if address.contains(':') => format!("[{address}]:{port}"),
            name => format!("{name}:{port}"),
        }
    }

    /// The host name, which the server's certificate must contain.
    fn host(&self) -> String {
        match self {
            Self::Url { host, .. } => host.clone(),
            Self::Service { namespace, name, .. } => format!("{name}.{namespace}.svc"),
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
    use base64::{Engine as _, prelude::BASE64_STANDARD};
    use coracle_store::Commit;
    use serde_json::json;

    use super::*;
    use crate::cache::{encode, key_of};
    use crate::in_flight::MAX_IN_FLIGHT;

    #[test]
    fn a_target_is_a_service_or_a_url() {
        let url = Target::read(&json!({"url": "https://[2001:db8::1]:8443/hook"}));
        assert_eq!(url, Target::Url { host: "2001:db8::1".into(), port: 8443, path: "/hook".into() });
        assert_eq!(url.url(5), "https://[2001:db8::1]:8443/hook?timeout=5s");
        let service = Target::read(&json!({"service": {"namespace": "n", "name": "s", "port": 443}}));
        assert_eq!(service.url(5), "https://s.n.svc:443/?timeout=5s");
    }

    #[test]
    fn a_client_certificate_is_used_for_the_address_of_its_user() {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate =
            rcgen::CertificateParams::new(Vec::<String>::new()).unwrap().self_signed(&key).unwrap();
        let data = |pem: String| BASE64_STANDARD.encode(pem);
        let file = json!({"users": [{"name": "*.n.svc", "user": {
            "client-certificate-data": data(certificate.pem()), "client-key-data": data(key.serialize_pem())}}]});
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        std::fs::write(&path, file.to_string()).unwrap();
        let identities = Identities::read(&path).unwrap();
        for (namespace, has_certificate) in [("n", true), ("m", false)] {
            let config = json!({"caBundle": data(certificate.pem()), "service": {"namespace": namespace, "name": "s"}});
            let endpoint = Endpoint::authenticated(&config, Duration::from_secs(1), &identities);
            let tls = endpoint.tls.unwrap();
            assert_eq!(tls.client_auth_cert_resolver.has_certs(), has_certificate, "{namespace}");
        }
    }

    #[tokio::test]
    async fn a_webhook_behind_an_external_name_is_called_by_its_name() {
        let cache = Cache::new(1);
        let kind = by_resource("", "v1", "services").unwrap();
        let service = json!({"metadata": {"name": "s", "namespace": "n"},
            "spec": {"type": "ExternalName", "externalName": "127.0.0.1"}});
        let (key, value) = (key_of(kind, "n", "s").into(), Some(encode(kind, &service)));
        cache.apply(&Commit { key, revision: 2, value, created: 2, guard_follows: false });
        let target = Target::read(&json!({"service": {"namespace": "n", "name": "s"}}));
        // The name is used, and the service needs no ports. But the address belongs to this machine.
        assert_eq!(connect(&cache, &target).await.unwrap_err(), "address not allowed");
        let other = Target::read(&json!({"service": {"namespace": "n", "name": "t"}}));
        assert_eq!(connect(&cache, &other).await.unwrap_err(), "service \"t\" not found");
    }

    /// The limits of look-ups are tested in `resolver.rs`.
    #[tokio::test]
    async fn the_host_of_a_url_is_looked_up_before_the_connection() {
        // No host can have a name with an empty label, so the look-up asks no name server.
        let target = Target::read(&json!({"url": "https://a..b/hook"}));
        let error = connect(&Cache::new(1), &target).await.unwrap_err();
        assert!(error.starts_with("dial tcp: lookup a..b: "), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_waits_for_a_connection_until_its_timeout() {
        let hook = Endpoint::read(&json!({"url": "https://slow.example/hook"}), Duration::from_secs(5));
        let in_flight = InFlight::new(MAX_IN_FLIGHT).with_webhooks(2, 2);
        let first = reserve(&in_flight, &hook).await.ok().unwrap();
        let error = reserve(&in_flight, &hook).await.err().unwrap();
        let url = "failed to call webhook: Post \"https://slow.example:443/hook?timeout=5s\": ";
        let why = "context deadline exceeded: other calls use all connections to webhooks";
        assert_eq!(error, format!("{url}{why}"));
        let began = Instant::now();
        let release = async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            drop(first);
        };
        let (second, ()) = tokio::join!(reserve(&in_flight, &hook), release);
        let end = second.ok().unwrap().deadline;
        assert_eq!(end - began, hook.timeout, "the wait counts for the timeout");
    }

    #[test]
    fn the_limit_of_a_response_depends_on_the_request() {
        let hook = Endpoint::read(&json!({}), Duration::from_secs(1));
        assert_eq!(hook.max_response(1 << 20), 3 << 20);
        let conversion = hook.with_max_response(64 << 20);
        for (sent, limit) in [(0, 3), (1 << 20, 11), (100 << 20, 64), (usize::MAX, 64)] {
            assert_eq!(conversion.max_response(sent), limit << 20, "{sent}");
        }
    }
}

//! Servers in the cluster: the address of a pod or of a service's endpoint, and one request to it.

use std::{
    any::Any,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use coracle_any_certificate::AnyCertificate;
use coracle_connections::{PermitStream, keep_alive};
use coracle_kinds::kind::by_resource;
use http::{Request, Response, StatusCode};
use http_body::Body as _;
use hyper::{
    body::Incoming,
    client::conn::http1::{self, Connection, SendRequest},
};
use hyper_util::rt::TokioIo;
use rand::seq::IndexedRandom as _;
use rustls_pki_types::ServerName;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::sync::CancellationToken;

use crate::{
    cache::Cache,
    error::{ApiError, Result},
    reply::Body,
    request_body::Progress,
};

/// Maximum time to connect.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum bytes of a response that are in memory, for example of its header. The owner of a pod can have a thousand
/// connections to it whose responses never begin.
const RESPONSE_BUFFER: usize = 64 << 10;

/// An address to which requests may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    address: IpAddr,
    port: u16,
}

/// TLS configuration and name of a server.
pub(crate) struct TlsServer {
    pub(crate) config: Arc<rustls::ClientConfig>,
    /// The name in the server's certificate.
    pub(crate) name: ServerName<'static>,
}

/// The sender of requests on one connection. The connection ends when the sender is dropped.
pub(crate) type Sender = SendRequest<Body>;

/// A value that is dropped at the end of the reply to the client. It is the permit of a connection that stays open, or
/// a guard that ends the connection. The guard is needed because a server may respond without reading the whole body of
/// the request. As upstream, the connection then ends with the response.
#[derive(Clone)]
pub(crate) struct ConnectionGuard {
    _held: Arc<dyn Any + Send + Sync>,
}

/// Connects to a server. The kernel ends the connection within minutes if the server's machine disappears.
pub(crate) async fn dial(address: impl ToSocketAddrs) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    let _ = stream.set_nodelay(true);
    keep_alive(&stream);
    Ok(stream)
}

/// The address of a pod. The default port is the first port of its containers.
pub(crate) fn pod(cache: &Cache, namespace: &str, name: &str, port: &str) -> Result<Endpoint> {
    let kind = by_resource("", "v1", "pods").ok_or_else(ApiError::no_resource)?;
    let pod = cache.get(kind, namespace, name).ok_or_else(|| ApiError::not_found(kind, name))?.value();
    let address = pod["status"]["podIP"].as_str().unwrap_or_default();
    if address.is_empty() {
        return Err(ApiError::bad_request("address not allowed: the pod has no address"));
    }
    let first = || {
        let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
        containers.flat_map(|container| container["ports"].as_array().into_iter().flatten()).find_map(number)
    };
    let port = match port {
        "" => first().unwrap_or(80),
        text => port_number(text)?,
    };
    Endpoint::of(address, port)
}

/// A port of a node other than the port of its kubelet. `own` is the address of this API server, which is refused: a
/// request would come back to this server.
pub(crate) fn node(address: &str, port: &str, own: SocketAddr) -> Result<Endpoint> {
    let found = Endpoint::of(address, port_number(port)?)?;
    if found.port == own.port() && found.address.to_canonical() == own.ip().to_canonical() {
        return Err(ApiError::bad_request("address not allowed"));
    }
    Ok(found)
}

fn port_number(text: &str) -> Result<u16> {
    text.parse().map_err(|_error| ApiError::bad_request("the port must be a number"))
}

fn number(port: &Value) -> Option<u16> {
    u16::try_from(port["containerPort"].as_u64()?).ok()
}

/// A ready endpoint of a service. `port` is a number or a name; it may be empty if the service has only one port, or an
/// unnamed port.
pub(crate) fn service(cache: &Cache, namespace: &str, name: &str, port: &str) -> Result<Endpoint> {
    let services = by_resource("", "v1", "services").ok_or_else(ApiError::no_resource)?;
    let service = cache.get(services, namespace, name);
    let service = service.ok_or_else(|| ApiError::not_found(services, name))?.value();
    let ports = service["spec"]["ports"].as_array().map_or(&[][..], Vec::as_slice);
    let wanted = match (port, ports) {
        ("", [only]) => Some(only),
        ("", _) => ports.iter().find(|one| one["name"].as_str().unwrap_or_default().is_empty()),
        _ => ports.iter().find(|one| {
            one["name"] == port || one["port"].as_u64().is_some_and(|number| port.parse() == Ok(number))
        }),
    };
    let none = || match port.parse::<u16>() {
        Ok(number) => ApiError::unavailable(format!("no service port {number} found for service {name:?}")),
        Err(_name) => no_endpoints(name),
    };
    ready(cache, namespace, name, wanted.ok_or_else(none)?["name"].as_str().unwrap_or_default())
}

/// A random ready endpoint of a service's port. Endpoints to which requests must not be sent are excluded.
pub(crate) fn ready(cache: &Cache, namespace: &str, name: &str, port_name: &str) -> Result<Endpoint> {
    let slices = slices_of(cache, namespace, name)?;
    let (found, refused) = ready_in(&slices, name, port_name);
    let chosen = found.choose(&mut rand::rng()).cloned();
    chosen.ok_or_else(|| refused.unwrap_or_else(|| no_endpoints(name)))
}

/// The EndpointSlices of a service. The labels are cached, so slices of other services are not parsed.
pub(crate) fn slices_of(cache: &Cache, namespace: &str, name: &str) -> Result<Vec<Value>> {
    let kind = by_resource("discovery.k8s.io", "v1", "endpointslices").ok_or_else(ApiError::no_resource)?;
    let slices = cache.list(kind, namespace);
    let own = slices.iter().filter(|slice| {
        slice.selector_attributes(kind.stored_as()).label("kubernetes.io/service-name") == Some(name)
    });
    Ok(own.map(|slice| slice.value()).collect())
}

/// The error for a service without a ready endpoint. `name` is the service as the client names it.
pub(crate) fn no_endpoints(name: &str) -> ApiError {
    ApiError::unavailable(format!("no endpoints available for service {name:?}"))
}

/// The ready endpoints of a service's port, and the error of an endpoint to which requests must not be sent.
fn ready_in(slices: &[Value], name: &str, port_name: &str) -> (Vec<Endpoint>, Option<ApiError>) {
    let (mut found, mut refused) = (Vec::new(), None);
    for slice in slices {
        if slice["metadata"]["labels"]["kubernetes.io/service-name"] != name {
            continue;
        }
        let mut ports = slice["ports"].as_array().into_iter().flatten();
        let port = ports.find(|one| one["name"].as_str().unwrap_or_default() == port_name);
        let Some(port) = port.and_then(|one| u16::try_from(one["port"].as_u64()?).ok()) else { continue };
        let endpoints = slice["endpoints"].as_array().into_iter().flatten();
        for endpoint in endpoints.filter(|one| one["conditions"]["ready"] != false) {
            let addresses = endpoint["addresses"].as_array().into_iter().flatten();
            for address in addresses.filter_map(Value::as_str) {
                match Endpoint::of(address, port) {
                    Ok(endpoint) => found.push(endpoint),
                    Err(error) => refused = Some(error),
                }
            }
        }
    }
    (found, refused)
}

// === impl Endpoint ===

impl Endpoint {
    /// The endpoint, if requests may be sent to its address.
    pub(crate) fn of(address: &str, port: u16) -> Result<Self> {
        let address: Option<IpAddr> = address.parse().ok();
        let address = address.filter(|address| is_proxyable(*address) && port != 0);
        address
            .map(|address| Self { address, port })
            .ok_or_else(|| ApiError::bad_request("address not allowed"))
    }

    /// Sends a request. With TLS, the server may have any certificate. The permit is held until the connection is
    /// closed.
    pub(crate) async fn send(
        &self,
        is_tls: bool,
        request: Request<Body>,
        limit: Duration,
        permit: impl Send + Unpin + 'static,
    ) -> Result<Response<Incoming>> {
        let target = self.to_string();
        let stream = PermitStream::new(self.connect().await?, permit);
        if !is_tls {
            return exchange(stream, request, &target, limit).await;
        }
        let config = any_certificate().map_err(ApiError::internal)?;
        let server = TlsServer { config, name: ServerName::from(self.address) };
        self.send_tls(stream, server, request, limit).await
    }

    /// Connects to the address.
    pub(crate) async fn connect(&self) -> Result<TcpStream> {
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, dial((self.address, self.port))).await;
        let failed = |error: &dyn std::fmt::Display| {
            ApiError::unavailable(format!("error trying to reach service: dial tcp {self}: {error}"))
        };
        connected.map_err(|elapsed| failed(&elapsed))?.map_err(|error| failed(&error))
    }

    /// Sends a request over TLS on a connection.
    pub(crate) async fn send_tls(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        server: TlsServer,
        request: Request<Body>,
        limit: Duration,
    ) -> Result<Response<Incoming>> {
        let stream = begin_tls(stream, server).await?;
        exchange(stream, request, &self.to_string(), limit).await
    }

    /// Connects over TLS. The connection can be used for several requests, but not for an upgrade.
    pub(crate) async fn open(&self, server: TlsServer) -> Result<Sender> {
        let stream = begin_tls(self.connect().await?, server).await?;
        open(stream, &self.to_string()).await
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        SocketAddr::new(self.address, self.port).fmt(f)
    }
}

// === impl ConnectionGuard ===

impl ConnectionGuard {
    /// Holds a value until the end of the reply.
    pub(crate) fn new(held: impl Send + Sync + 'static) -> Self {
        Self { _held: Arc::new(held) }
    }
}

/// Begins TLS on a connection.
async fn begin_tls<I>(stream: I, server: TlsServer) -> Result<TlsStream<I>>
where
    I: AsyncRead + AsyncWrite + Unpin,
{
    let failed = |error: &dyn std::fmt::Display| {
        ApiError::unavailable(format!("error trying to reach service: tls: {error}"))
    };
    let connecting = TlsConnector::from(server.config).connect(server.name, stream);
    let connecting = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
    connecting.map_err(|elapsed| failed(&elapsed))?.map_err(|error| failed(&error))
}

/// Begins HTTP on a connection. The caller must poll the returned connection.
async fn begin_http<I, B>(stream: I, target: &str) -> Result<(SendRequest<B>, Connection<TokioIo<I>, B>)>
where
    I: AsyncRead + AsyncWrite + Unpin,
    B: http_body::Body<Data = bytes::Bytes, Error = io::Error> + 'static,
{
    let mut builder = http1::Builder::new();
    builder.max_buf_size(RESPONSE_BUFFER);
    let begun = builder.handshake(TokioIo::new(stream)).await;
    begun
        .map_err(|error| ApiError::internal(format!("error dialing backend: no HTTP with {target}: {error}")))
}

/// Begins HTTP on a connection, and spawns the task that polls it. The connection can be used for several requests, but
/// not for an upgrade.
pub(crate) async fn open<I>(stream: I, target: &str) -> Result<Sender>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = begin_http(stream, target).await?;
    coracle_threads::spawn(async move {
        // The caller gets a failure of the connection as an error of the request or of the body.
        let _ended = connection.await;
    });
    Ok(sender)
}

/// A TLS configuration that accepts every certificate, as upstream: pods have no certificates of the cluster.
fn any_certificate() -> std::result::Result<Arc<rustls::ClientConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate::new(provider)));
    Ok(Arc::new(builder.with_no_client_auth()))
}

/// Sends the request and waits for the head of the response, up to `limit` after the server took the last piece of the
/// request's body. The body of the response may take longer. The response to a request with a body has a
/// [`ConnectionGuard`]. If the future is dropped, or the client does not send the whole body, the connection ends.
pub(crate) async fn exchange<I>(
    stream: I,
    request: Request<Body>,
    target: &str,
    limit: Duration,
) -> Result<Response<Incoming>>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = begin_http(stream, target).await?;
    let ended = CancellationToken::new();
    let guard = ended.clone().drop_guard();
    coracle_threads::spawn(async move {
        tokio::select! {
            // The other arm may be dropped: the connection is closed then. The caller gets a failure of the connection
            // as an error of the body.
            _ = connection.with_upgrades() => {}
            () = ended.cancelled() => {}
        }
    });
    let has_body = !request.body().is_end_stream();
    let progress = Progress::begin();
    let request = request.map(|body| progress.watch(body));
    let answered = progress.answer_within(limit, sender.send_request(request)).await;
    let answered = answered.map_err(|_elapsed| late(target, limit))?;
    let mut answer = answered.map_err(|error| request_failed(target, &error))?;
    if has_body && answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        answer.extensions_mut().insert(ConnectionGuard::new(guard));
    } else {
        guard.disarm();
    }
    Ok(answer)
}

/// The error for a response whose head does not arrive in time.
pub(crate) fn late(target: &str, limit: Duration) -> ApiError {
    ApiError::timeout(format!("the server at {target} does not answer within {} s", limit.as_secs()), 1)
}

/// The error for a request whose connection failed.
pub(crate) fn request_failed(target: &str, error: &hyper::Error) -> ApiError {
    ApiError::internal(format!("error dialing backend: request to {target}: {error}"))
}

/// Whether requests may be sent to an address. Loopback, link-local, multicast, broadcast and unspecified addresses are
/// refused.
fn is_proxyable(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => {
            address.is_unicast_link_local()
                || address.to_ipv4_mapped().is_some_and(|v4| !is_proxyable(v4.into()))
        }
    };
    !(address.is_loopback() || address.is_unspecified() || address.is_multicast() || is_link_local)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;
    use coracle_store::Commit;
    use futures::StreamExt as _;
    use http_body::Frame;
    use http_body_util::{BodyExt as _, StreamBody};
    use nix::sys::socket::{getsockopt, sockopt};
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::cache::{encode, key_of};
    use crate::reply::full;
    use crate::sub::stream::pass;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn the_slices_of_a_service_are_those_with_its_label() {
        let cache = Cache::new(1);
        let kind = by_resource("discovery.k8s.io", "v1", "endpointslices").unwrap();
        let slices =
            [("n", "web-1", "web"), ("n", "web-2", "other"), ("m", "web-3", "web"), ("n", "a", "web")];
        for (revision, (namespace, name, of)) in (2..).zip(slices) {
            let slice = json!({"metadata": {"name": name, "namespace": namespace,
                "labels": {"kubernetes.io/service-name": of}}});
            let (key, value) = (key_of(kind, namespace, name).into(), Some(encode(kind, &slice)));
            cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
        }
        let found = slices_of(&cache, "n", "web").unwrap();
        let names: Vec<&Value> = found.iter().map(|slice| &slice["metadata"]["name"]).collect();
        assert_eq!(names, ["a", "web-1"]);
    }

    #[test]
    fn a_port_number_that_the_service_does_not_have_is_named() {
        let cache = Cache::new(1);
        let kind = by_resource("", "v1", "services").unwrap();
        let web = json!({"metadata": {"name": "web", "namespace": "n"},
            "spec": {"ports": [{"name": "http", "port": 80}]}});
        let (key, value) = (key_of(kind, "n", "web").into(), Some(encode(kind, &web)));
        cache.apply(&Commit { key, revision: 2, value, created: 2, guard_follows: false });
        let error = |port: &str| service(&cache, "n", "web", port).unwrap_err().message;
        assert_eq!(error("81"), "no service port 81 found for service \"web\"");
        for port in ["80", "http", "https"] {
            assert_eq!(error(port), "no endpoints available for service \"web\"", "{port}");
        }
    }

    #[tokio::test]
    async fn a_response_with_a_very_long_header_is_an_error() {
        for (length, is_accepted) in [(32 << 10, true), (300 << 10, false)] {
            let (ours, mut theirs) = tokio::io::duplex(1 << 20);
            let head = format!("HTTP/1.1 204 No Content\r\nA: {}\r\n\r\n", "x".repeat(length));
            let answer = async {
                // Read the request first: a response before the request is a protocol error.
                assert_ne!(theirs.read(&mut [0; 1024]).await.unwrap(), 0);
                theirs.write_all(head.as_bytes()).await.unwrap();
            };
            let request = Request::get("/").header("Host", "a").body(full("")).unwrap();
            let exchanged = exchange(ours, request, "a", Duration::from_secs(60));
            let (response, ()) = tokio::join!(exchanged, answer);
            assert_eq!(response.is_ok(), is_accepted, "{length}");
        }
    }

    #[tokio::test]
    async fn a_connection_ends_with_its_response_if_the_server_has_not_read_the_request() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 10);
        let permit = Arc::new(());
        // Like TLS, the buffer accepts more data than the server reads, and its shutdown waits for the server.
        let stream = PermitStream::new(tokio::io::BufWriter::new(ours), permit.clone());
        let answer = async {
            assert_ne!(theirs.read(&mut [0; 16]).await.unwrap(), 0);
            theirs.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno").await.unwrap();
        };
        let body = full(vec![b'x'; 4 << 10]);
        let request = Request::post("/").header("Host", "a").body(body).unwrap();
        let (response, ()) = tokio::join!(exchange(stream, request, "a", Duration::from_secs(60)), answer);
        let reply = pass(response.unwrap());
        assert_eq!(Arc::strong_count(&permit), 2, "the response is not read yet");
        assert_eq!(&reply.into_body().collect().await.unwrap().to_bytes()[..], b"no");
        coracle_testing::until("the connection ends", 10, || Arc::strong_count(&permit) == 1).await;
        drop(theirs);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_server_slows_the_client_and_a_long_body_takes_little_memory() {
        const PIECE: usize = 16 << 10;
        const PIECES: usize = (20 << 20) / PIECE;
        /// Maximum bytes of the body between the client and the server.
        const MOST: usize = 4 * RESPONSE_BUFFER;
        let piece = |at: usize| vec![if at.is_multiple_of(2) { b'a' } else { b'b' }; PIECE];
        let (ours, mut theirs) = tokio::io::duplex(4 << 10);
        let taken = Arc::<AtomicUsize>::default();
        let counter = taken.clone();
        let pieces = futures::stream::iter(0..PIECES).map(move |at| {
            counter.fetch_add(PIECE, Ordering::Relaxed);
            Ok::<_, io::Error>(Frame::data(Bytes::from(piece(at))))
        });
        let body = StreamBody::new(pieces).boxed_unsync();
        let request = Request::post("/").header("Host", "a").header("Content-Length", PIECES * PIECE);
        let exchanged = exchange(ours, request.body(body).unwrap(), "a", MINUTE);
        let server = async {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(theirs.read_u8().await.unwrap());
            }
            // The paused clock advances when no task can continue: the client waits for the server.
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(taken.load(Ordering::Relaxed) <= MOST, "taken before the server reads");
            let mut received = vec![0; PIECE];
            for at in 0..PIECES {
                theirs.read_exact(&mut received).await.unwrap();
                assert!(received == piece(at), "piece {at}");
                let ahead = taken.load(Ordering::Relaxed) - (at + 1) * PIECE;
                assert!(ahead <= MOST, "{ahead} bytes are in memory");
            }
            theirs.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
        };
        let (answer, ()) = tokio::join!(exchanged, server);
        assert_eq!(answer.unwrap().status(), 204);
    }

    #[tokio::test]
    async fn a_client_that_does_not_send_the_whole_body_ends_the_connection() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 12);
        let pieces =
            [Ok(Frame::data(Bytes::from_static(b"x"))), Err(io::Error::other("the client has gone"))];
        let body = StreamBody::new(futures::stream::iter(pieces)).boxed_unsync();
        let request =
            Request::post("/").header("Host", "a").header("Content-Length", "9").body(body).unwrap();
        let exchanged = exchange(ours, request, "a", MINUTE);
        let mut received = Vec::new();
        let (answer, read) = tokio::join!(exchanged, theirs.read_to_end(&mut received));
        assert!(answer.is_err());
        read.expect("the end of the connection");
        assert!(!received.ends_with(b"xx"), "no bytes were added");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_without_progress_ends_the_request() {
        for (pause, expect) in [(MINUTE / 2, 200), (MINUTE * 2, 504)] {
            let (ours, mut theirs) = tokio::io::duplex(1 << 12);
            let pieces = futures::stream::iter(0..6).then(move |_at| async move {
                tokio::time::sleep(pause).await;
                Ok::<_, io::Error>(Frame::data(Bytes::from_static(b"x")))
            });
            let body = StreamBody::new(pieces).boxed_unsync();
            let request = Request::post("/").header("Host", "a").header("Content-Length", "6");
            let exchanged = exchange(ours, request.body(body).unwrap(), "a", MINUTE);
            let server = async {
                let mut received = Vec::new();
                while !received.ends_with(b"xxxxxx") {
                    let Ok(byte) = theirs.read_u8().await else { return };
                    received.push(byte);
                }
                theirs.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            };
            let (answer, ()) = tokio::join!(exchanged, server);
            let code = answer.map_or_else(|error| error.code, |answer| answer.status().as_u16());
            assert_eq!(code, expect, "a piece each {} s", pause.as_secs());
        }
    }

    #[tokio::test]
    async fn the_kernel_ends_connections_to_servers_that_have_disappeared() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = dial(listener.local_addr().unwrap()).await.unwrap();
        assert_eq!(getsockopt(&stream, sockopt::KeepAlive), Ok(true));
    }

    #[test]
    fn endpoints_of_this_machine_and_names_are_never_chosen() {
        let slice = |addresses: Value| {
            json!({"metadata": {"labels": {"kubernetes.io/service-name": "s"}},
                "ports": [{"name": "p", "port": 443}], "endpoints": [{"addresses": addresses}]})
        };
        let slices =
            [slice(json!(["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1"])), slice(json!(["a.example"]))];
        let (found, refused) = ready_in(&slices, "s", "p");
        let found: Vec<String> = found.iter().map(Endpoint::to_string).collect();
        assert_eq!((found, refused.unwrap().code), (vec!["10.1.2.3:443".to_owned()], 400));
        assert!(ready_in(&slices, "s", "q").0.is_empty());
        assert!(ready_in(&slices, "t", "p").0.is_empty());
    }

    #[test]
    fn a_port_of_a_node_is_reached_unless_it_is_the_port_of_this_server() {
        let own: SocketAddr = "192.0.2.1:6443".parse().unwrap();
        let found = |address: &str, port: &str| {
            node(address, port, own).map(|endpoint| endpoint.to_string()).map_err(|error| error.message)
        };
        assert_eq!(found("192.0.2.1", "9100").as_deref(), Ok("192.0.2.1:9100"));
        assert_eq!(found("192.0.2.2", "6443").as_deref(), Ok("192.0.2.2:6443"));
        for (address, port) in [
            ("192.0.2.1", "6443"),
            ("::ffff:192.0.2.1", "6443"),
            ("127.0.0.1", "9100"),
            ("169.254.169.254", "80"),
            ("node-1", "9100"),
            ("192.0.2.1", "0"),
        ] {
            assert_eq!(found(address, port).unwrap_err(), "address not allowed", "{address} {port}");
        }
        assert_eq!(found("192.0.2.1", "metrics").unwrap_err(), "the port must be a number");
    }

    #[test]
    fn addresses_of_this_machine_and_of_groups_are_refused() {
        for (address, expect) in [
            ("10.42.0.7", true),
            ("fd00::7", true),
            ("127.0.0.1", false),
            ("::1", false),
            ("::ffff:127.0.0.1", false),
            ("0.0.0.0", false),
            ("169.254.169.254", false),
            ("fe80::1", false),
            ("224.0.0.1", false),
            ("255.255.255.255", false),
        ] {
            assert_eq!(is_proxyable(address.parse().unwrap()), expect, "{address}");
        }
    }
}

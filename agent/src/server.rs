//! The kubelet's HTTPS API: logs, exec, attach, port-forward, pods and figures of this node.
//!
//! Its callers are the API server and administrators with a client certificate of the cluster's CA, and all others to
//! whom the API server gives the permission, by certificate or token ([`Access`]); only `/healthz` answers everybody. Requests of pods are looked up in a [`PodView`], containers by asking
//! the runtime, so that an answer is never older than the runtime itself. Streams are the runtime's: a
//! request is checked, exchanged for a token, and handed over whole ([`Streams`]).

mod access;
mod authorize;
pub(crate) mod logs;
mod route;
mod stats;
mod streams;
mod tls;

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coracle_connections::{ACCEPT_PAUSE, Connections, HANDSHAKE, Held, Limits, LogLimit, Slot};
use coracle_error_chain::chain;
use futures::future::BoxFuture;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use rustls::server::ResolvesServerCert;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::runtime::Runtime;
use authorize::Caller;
use route::Route;

pub use access::Access;
pub use streams::Proxy;

/// The body of an answer.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Where the API listens and whom it trusts.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address and port, 10250 as a rule.
    pub listen: SocketAddr,
    /// Its own certificate.
    pub certificate: Certificate,
    /// The CA whose client certificates are accepted; without it none are.
    pub client_ca: Option<PathBuf>,
}

/// What the node's API shows itself by.
#[derive(Clone, Debug)]
pub enum Certificate {
    /// Files of a certificate and its key, read at the start.
    Files(PathBuf, PathBuf),
    /// Whatever is right at each handshake.
    Current(Arc<dyn ResolvesServerCert>),
}

/// The pods of this node, as pod sync knows them.
pub trait PodView: Send + Sync + 'static {
    /// All of them.
    fn pods(&self) -> Vec<Arc<Pod>>;

    /// One by its name.
    fn pod(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        let is = |pod: &Arc<Pod>| {
            pod.metadata.namespace.as_deref() == Some(namespace) && pod.metadata.name.as_deref() == Some(name)
        };
        self.pods().into_iter().find(is)
    }

    /// The status of a pod as this node has it, which the API server may not have yet.
    fn status(&self, _uid: &str) -> Option<PodStatus> {
        None
    }
}

/// Serves a stream that the runtime has prepared.
pub trait Streams: Send + Sync + 'static {
    /// Answers the caller's request, upgraded where it asks for it, by the stream at `url`: what the
    /// runtime's Exec, Attach or PortForward returned.
    fn stream(&self, url: &str, request: Request<Incoming>) -> BoxFuture<'static, Response<Body>>;
}

/// Everything that answers are made of.
#[derive(Clone)]
pub struct Backend {
    /// Whose pods.
    pub pods: Arc<dyn PodView>,
    /// What runs them.
    pub runtime: Arc<dyn Runtime>,
    /// Ways into them.
    pub streams: Arc<dyn Streams>,
    /// What the API server says of callers.
    pub access: Arc<Access>,
    /// The agent's settings in the form of a KubeletConfiguration.
    pub configuration: Arc<serde_json::Value>,
}

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The port is taken or the address is not ours.
    #[error("cannot listen on {address} for the kubelet API")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A certificate or key could not be used.
    #[error("cannot use {path} for the kubelet API: {reason}")]
    Certificate {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// The API, listening but not yet answering.
pub struct Server {
    listener: TcpListener,
    tls: TlsAcceptor,
}

/// The port's share of the process's descriptors is one in this many.
const SHARE: u64 = 8;
/// Maximum connections, whatever the descriptor limit.
const CONNECTIONS: usize = 4 << 10;
/// Maximum time without a request, and for the header of one, as the API server's.
const IDLE: Duration = Duration::from_secs(90);

// === impl Server ===

impl Server {
    /// Reads the certificates and takes the port.
    ///
    /// # Errors
    /// When either fails; nothing is left behind then.
    pub async fn bind(config: &ServerConfig) -> Result<Server, ServerError> {
        let tls = TlsAcceptor::from(Arc::new(tls::config(config)?));
        let listener = TcpListener::bind(config.listen).await;
        let listener = listener.map_err(|source| ServerError::Listen { address: config.listen, source })?;
        Ok(Server { listener, tls })
    }

    /// Where it listens: the port that the kernel chose, if the setting left it open.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Answers until `shutdown`; connections end with it, their clients come back to the next agent.
    pub async fn run(self, backend: Backend, shutdown: CancellationToken) {
        let tasks = TaskTracker::new();
        let connections = Connections::new(Limits::share(SHARE, CONNECTIONS));
        let (refusals, failures) = (LogLimit::default(), LogLimit::default());
        loop {
            let accepted = tokio::select! {
                // Both arms are cancel safe: nothing is accepted that is not returned.
                () = shutdown.cancelled() => break,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((connection, client)) => match connections.admit(client.ip()) {
                    Ok(slot) => {
                        let serving = serve(connection, self.tls.clone(), backend.clone(), Arc::new(slot));
                        let shutdown = shutdown.clone();
                        tasks.spawn(async move { shutdown.run_until_cancelled(serving).await });
                    }
                    Err(reason) => {
                        if let Some(suppressed) = refusals.pass(client.ip()) {
                            let client = client.ip();
                            tracing::warn!(%client, %reason, suppressed, "refused a connection to the kubelet API");
                        }
                    }
                },
                Err(error) => {
                    // Out of descriptors: a moment later some will have been closed.
                    if let Some(suppressed) = failures.pass(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) {
                        tracing::warn!(%error, suppressed, "cannot accept a connection to the kubelet API");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        tasks.close();
        tasks.wait().await;
    }
}

/// Serves one connection until it ends or its place is taken from it.
async fn serve(connection: TcpStream, tls: TlsAcceptor, backend: Backend, slot: Arc<Slot>) {
    tokio::select! {
        // Both may be dropped: the connection is closed then.
        () = requests(connection, tls, backend, slot.clone()) => {}
        () = slot.expired() => tracing::debug!("closed a connection without an authenticated request"),
    }
}

async fn requests(connection: TcpStream, tls: TlsAcceptor, backend: Backend, slot: Arc<Slot>) {
    let _ = connection.set_nodelay(true);
    coracle_cri::notice_lost_client(&connection);
    let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, tls.accept(connection)).await else { return };
    let caller = Arc::new(Caller::of(stream.get_ref().1.peer_certificates()));
    let held = Held::new(stream, slot.clone());
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(slot.clone());
        let (backend, caller) = (backend.clone(), caller.clone());
        async move { Ok::<_, Infallible>(answer(&backend, &caller, request).await) }
    });
    let http = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .serve_connection(TokioIo::new(held), service);
    // A connection that breaks is the client's affair.
    if let Err(error) = http.with_upgrades().await {
        tracing::debug!(error = chain(&error), "a connection to the kubelet API ended");
    }
}

async fn answer(backend: &Backend, caller: &Caller, request: Request<Incoming>) -> Response<Body> {
    let route = Route::of(request.uri().path());
    if matches!(route, Some(Route::Healthz)) {
        return text(StatusCode::OK, "ok");
    }
    let needed = access::Needed::of(request.method(), route.as_ref());
    if let Err(refused) = caller.may_use(&backend.access, request.headers(), needed).await {
        return refused.answer();
    }
    if let Some(slot) = request.extensions().get::<Arc<Slot>>() {
        slot.prove();
    }
    let Some(route) = route else { return text(StatusCode::NOT_FOUND, "404 page not found\n") };
    let is_stream = matches!(route, Route::Exec(_) | Route::Attach(_) | Route::PortForward { .. });
    if !(request.method() == Method::GET || is_stream && request.method() == Method::POST) {
        return text(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed");
    }
    match route {
        Route::Healthz => text(StatusCode::OK, "ok"),
        Route::Configz => json(&serde_json::json!({"kubeletconfig": *backend.configuration})),
        Route::Pods => pods(backend),
        Route::Logs { namespace, pod, container } => {
            let query = request.uri().query().unwrap_or_default().to_owned();
            logs::answer(backend, (&namespace, &pod, &container), &query).await
        }
        Route::Exec(target) => streams::exec(backend, &target, request).await,
        Route::Attach(target) => streams::attach(backend, &target, request).await,
        Route::PortForward { namespace, pod } => {
            streams::port_forward(backend, (&namespace, &pod), request).await
        }
        Route::StatsSummary => stats::summary(backend).await,
        Route::Metrics => stats::metrics(backend).await,
        Route::MetricsResource => stats::resource_metrics(backend).await,
    }
}

fn pods(backend: &Backend) -> Response<Body> {
    let shown = |pod: &Arc<Pod>| {
        let status = pod.metadata.uid.as_deref().and_then(|uid| backend.pods.status(uid));
        let status = status.or_else(|| pod.status.clone());
        serde_json::json!(Pod { metadata: pod.metadata.clone(), spec: pod.spec.clone(), status })
    };
    let items: Vec<serde_json::Value> = backend.pods.pods().iter().map(shown).collect();
    json(&serde_json::json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
}

/// Why a request gets no more than a line of text.
#[derive(Debug, PartialEq, Eq)]
struct Refused(StatusCode, String);

impl Refused {
    fn by_runtime(status: &tonic::Status) -> Refused {
        Refused(StatusCode::INTERNAL_SERVER_ERROR, status.message().to_owned())
    }

    fn answer(self) -> Response<Body> {
        text(self.0, self.1)
    }
}

// === answers ===

fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<Body> {
    typed(status, "text/plain; charset=utf-8", text.into())
}

fn json(value: &serde_json::Value) -> Response<Body> {
    typed(StatusCode::OK, "application/json", value.to_string().into())
}

fn typed(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Full::new(body).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests;

//! The kubelet API over HTTPS: logs, exec, attach, port-forward, pods and usage of this node.
//!
//! The API server and administrators authenticate with a client certificate of the cluster's CA. All other callers,
//! with a certificate or a token, need a permission that the API server confirms ([`Access`]). The rule also applies to
//! `/healthz`. Pods come from a [`PodView`]; containers are read from the runtime, so that a response is never older
//! than the runtime's state. Exec, attach and port-forward are authorized here and served by the runtime (`Streams`).

mod access;
mod authorize;
mod backend;
mod cadvisor;
mod checkpoint;
mod component_pages;
mod config;
mod container_ends;
mod limits;
mod log_watches;
pub(crate) mod logs;
mod node_logs;
mod node_metrics;
mod node_usage;
mod pod_usage;
mod respond;
mod route;
mod running_pods;
mod stats;
mod streams;
mod summary;
mod tls;

use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_connections::{
    ACCEPT_RETRY_DELAY, ConnectionPermit, Connections, Limits, LogLimit, PermitStream, Share,
    UNCERTIFIED_HEADER, handshake, keep_alive,
};
use coracle_error_chain::chain;
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use k8s_openapi::api::core::v1::Pod;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api_handlers::ApiHandlers;
use crate::kubelet_metrics::RequestLabels;
use crate::runtime::Body;
use authorize::Caller;
use limits::ResponseLimits;
use route::Route;

pub use access::Access;
pub use backend::{Backend, DiskUsageView, PodDiskUsage, PodView};
pub use component_pages::ComponentPages;
pub use config::{Certificate, ServerConfig, ServerError};
pub use container_ends::ContainerEnds;
pub use log_watches::LogWatches;
use respond::{json, on_blocking_thread, text, typed};

/// The kubelet API, listening but not serving yet.
pub struct Server {
    listener: TcpListener,
    tls: TlsAcceptor,
    connections: Limits,
    handlers: ApiHandlers,
}

/// Answers requests.
#[derive(Clone)]
struct Handler {
    backend: Backend,
    limits: ResponseLimits,
    handlers: ApiHandlers,
}

/// Text of a response to an unknown path.
const NOT_FOUND: &str = "404 page not found\n";
/// Maximum responses with all pods, or their usage, that are made at the same time: with 1,000 pods each takes
/// megabytes. Further requests wait.
const MEASUREMENTS: usize = 4;
/// Permits for responses with all pods, or their usage. All servers of the process share them, because they share the
/// runtime.
static MEASURING: Semaphore = Semaphore::const_new(MEASUREMENTS);
/// Maximum time between two requests of a connection, and for the header of a request, as in the API server.
const IDLE: Duration = Duration::from_secs(90);

// === impl Server ===

impl Server {
    /// Loads the certificates and binds the port.
    ///
    /// # Errors
    /// When a certificate cannot be loaded, or the port cannot be bound. The port is free then.
    pub async fn bind(config: &ServerConfig) -> Result<Server, ServerError> {
        let tls = TlsAcceptor::from(Arc::new(tls::config(config)?));
        let listener = TcpListener::bind(config.listen).await;
        let listener = listener.map_err(|source| ServerError::Listen { address: config.listen, source })?;
        let connections = Share::KubeletConnections.limits();
        Ok(Server { listener, tls, connections, handlers: config.handlers })
    }

    /// The address that the server listens on. If the configured port is 0, the result has the port that the kernel
    /// chose.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Serves until `shutdown`. Connections end then; their clients retry with the next agent.
    pub async fn run(self, backend: Backend, shutdown: CancellationToken) {
        let tasks = TaskTracker::new();
        let connections = Connections::new(self.connections);
        let (refusals, failures) = (LogLimit::default(), LogLimit::default());
        let limits = ResponseLimits::new();
        loop {
            let accepted = tokio::select! {
                // Both arms are cancel-safe: an accepted connection is always returned.
                () = shutdown.cancelled() => break,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((connection, client)) => match connections.admit(client.ip()) {
                    Ok(permit) => {
                        let (backend, limits) = (backend.clone(), limits.clone());
                        let handler = Handler { backend, limits, handlers: self.handlers };
                        let serving = serve(connection, self.tls.clone(), handler, Arc::new(permit));
                        let shutdown = shutdown.clone();
                        tasks.spawn(async move { shutdown.run_until_cancelled(serving).await });
                    }
                    Err(reason) => {
                        if let Some(suppressed) = refusals.allow(client.ip()) {
                            let client = client.ip();
                            tracing::warn!(%client, %reason, suppressed, "refused a connection to the kubelet API");
                        }
                    }
                },
                Err(error) => {
                    // Descriptors are used up: some may be free after the delay.
                    if let Some(suppressed) = failures.allow(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) {
                        tracing::warn!(%error, suppressed, "cannot accept a connection to the kubelet API");
                    }
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
        tasks.close();
        tasks.wait().await;
    }
}

/// Serves one connection until it ends, or until its permit expires.
async fn serve(connection: TcpStream, tls: TlsAcceptor, handler: Handler, permit: Arc<ConnectionPermit>) {
    tokio::select! {
        // Both arms may be dropped: the connection is closed then.
        () = requests(connection, tls, handler, permit.clone()) => {}
        () = permit.expired() => tracing::debug!("closed a connection that was evicted or not authenticated in time"),
    }
}

async fn requests(connection: TcpStream, tls: TlsAcceptor, handler: Handler, permit: Arc<ConnectionPermit>) {
    let _ = connection.set_nodelay(true);
    keep_alive(&connection);
    let Some(Ok(stream)) = handshake(tls.accept(connection)).await else { return };
    let caller = Arc::new(Caller::of(stream.get_ref().1.peer_certificates()));
    let held = PermitStream::of_socket(stream, permit.clone());
    let http = builder(&caller);
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(permit.clone());
        let (handler, caller, permit) = (handler.clone(), caller.clone(), permit.clone());
        async move {
            let response = answer(&handler, &caller, request).await;
            Ok::<_, Infallible>(handler.limits.count(response, &permit))
        }
    });
    // A broken connection is not an error of the server.
    if let Err(error) = http.serve_connection(TokioIo::new(held), service).with_upgrades().await {
        tracing::debug!(error = chain(&error), "a connection to the kubelet API ended");
    }
}

/// The settings of HTTP for a connection.
fn builder(caller: &Caller) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(IDLE);
    if *caller == Caller::Anonymous {
        http.max_header_size(UNCERTIFIED_HEADER).max_buf_size(UNCERTIFIED_HEADER);
    }
    http
}

/// Answers a request and counts it.
async fn answer(handler: &Handler, caller: &Caller, request: Request<Incoming>) -> Response<Body> {
    let begun = Instant::now();
    let route = Route::of(request.uri().path());
    let labels = RequestLabels {
        method: method_label(request.method()),
        path: route.as_ref().map_or("other", Route::label),
        is_long: route.as_ref().is_some_and(Route::is_stream),
    };
    let response = respond_to(handler, caller, route, request).await;
    handler.backend.metrics.request(labels, begun.elapsed());
    response
}

/// The method as a label of metrics: a client may send any text.
fn method_label(method: &Method) -> &'static str {
    const KNOWN: [&str; 8] = ["OPTIONS", "GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "CONNECT"];
    KNOWN.into_iter().find(|known| *known == method.as_str()).unwrap_or("other")
}

async fn respond_to(
    handler: &Handler,
    caller: &Caller,
    route: Option<Route>,
    request: Request<Incoming>,
) -> Response<Body> {
    let Handler { backend, limits, handlers } = handler;
    let needed = access::RequiredPermission::of(request.method(), route.as_ref());
    if let Err(refused) = caller.may_use(&backend.access, request.headers(), needed).await {
        return refused.answer();
    }
    if let Some(permit) = request.extensions().get::<Arc<ConnectionPermit>>() {
        permit.set_authenticated();
    }
    let Some(route) = route else { return text(StatusCode::NOT_FOUND, NOT_FOUND) };
    if !route.allows(request.method()) {
        return text(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed");
    }
    if let Some((status, why)) = disabled(*handlers, &route) {
        return text(status, why);
    }
    let log_permit = match limits.log_permit(&route) {
        Ok(permit) => permit,
        Err(refused) => return refused.answer(),
    };
    let _measuring = measuring(&route).await;
    let response = handle(backend, route, request).await;
    match log_permit {
        Some(permit) => limits::log(response, permit),
        None => response,
    }
}

/// Status and text of the response if the handler of the request is disabled, as upstream. None if it is enabled.
fn disabled(handlers: ApiHandlers, route: &Route) -> Option<(StatusCode, &'static str)> {
    if !handlers.debugging && route.is_for_debugging() {
        return Some((StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.\n"));
    }
    if !handlers.debugging && route.is_absent_without_debugging() {
        return Some((StatusCode::NOT_FOUND, NOT_FOUND));
    }
    let is_off = !handlers.system_log && matches!(route, Route::NodeLogs { .. });
    is_off.then_some((StatusCode::METHOD_NOT_ALLOWED, "logs endpoint is disabled.\n"))
}

/// Responds to an authorized request.
async fn handle(backend: &Backend, route: Route, request: Request<Incoming>) -> Response<Body> {
    match route {
        Route::Healthz => text(StatusCode::OK, healthz(request.uri().query().unwrap_or_default())),
        Route::Configz => json(&serde_json::json!({"kubeletconfig": *backend.configuration})),
        Route::Statusz => backend.pages.statusz(request.headers()),
        Route::Flagz => backend.pages.flagz(request.headers()),
        Route::Pods => pods(backend).await,
        Route::RunningPods => running_pods::answer(backend).await,
        Route::Logs { namespace, pod, container } => {
            let query = request.uri().query().unwrap_or_default().to_owned();
            logs::answer(backend, &namespace, &pod, &container, &query).await
        }
        Route::NodeLogs { path, is_directory } => node_logs::answer(path, is_directory).await,
        Route::Exec(target) => streams::exec(backend, &target, request).await,
        Route::Attach(target) => streams::attach(backend, &target, request).await,
        Route::PortForward { namespace, pod } => {
            streams::port_forward(backend, &namespace, &pod, request).await
        }
        Route::Checkpoint(target) => {
            let query = request.uri().query().unwrap_or_default().to_owned();
            checkpoint::answer(backend, &target, &query).await
        }
        Route::StatsSummary => {
            let query = request.uri().query().unwrap_or_default();
            let is_brief = route::flag(query, &["only_cpu_and_memory"]);
            summary::answer(backend, is_brief).await
        }
        Route::Metrics => node_metrics::metrics(backend).await,
        Route::MetricsResource => stats::resource_metrics(backend).await,
        Route::MetricsCadvisor => cadvisor::metrics(backend).await,
        Route::MetricsProbes => {
            let view = Arc::clone(&backend.pods);
            on_blocking_thread(move || stats::exposition(view.probes())).await
        }
        Route::MetricsSlis => node_metrics::health(),
    }
}

/// A permit for a response with all pods, or their usage. None for other responses.
async fn measuring(route: &Route) -> Option<SemaphorePermit<'static>> {
    // The semaphore is never closed.
    if route.has_all_pods() { MEASURING.acquire().await.ok() } else { None }
}

/// The response of `/healthz`, with the kubelet's checks. All checks pass if the server can respond at all.
fn healthz(query: &str) -> &'static str {
    match route::values(query, &["verbose"]).next() {
        Some(_) => "[+]ping ok\n[+]log ok\n[+]syncloop ok\nhealthz check passed\n",
        None => "ok",
    }
}

async fn pods(backend: &Backend) -> Response<Body> {
    let view = Arc::clone(&backend.pods);
    on_blocking_thread(move || {
        let shown = |pod: Arc<Pod>| {
            let status = pod.metadata.uid.as_deref().and_then(|uid| view.status(uid));
            let status = status.or_else(|| pod.status.clone());
            serde_json::json!(Pod { metadata: pod.metadata.clone(), spec: pod.spec.clone(), status })
        };
        pod_list(view.pods().into_iter().map(shown))
    })
    .await
}

/// A list of pods in JSON. Pods are converted to JSON one at a time, because a JSON tree of all pods would take much
/// memory.
fn pod_list(items: impl Iterator<Item = serde_json::Value>) -> Response<Body> {
    let mut list = r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":["#.to_owned();
    for (index, item) in items.enumerate() {
        let comma = if index == 0 { "" } else { "," };
        let _never_fails = write!(list, "{comma}{item}");
    }
    list.push_str("]}");
    typed(StatusCode::OK, "application/json", list.into())
}

#[cfg(test)]
mod tests;

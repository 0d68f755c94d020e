//! The kubelet API over HTTPS: logs, exec, attach, port-forward, pods and usage of this node.
//!
//! The API server and administrators authenticate with a client certificate of the cluster's CA. All others need a
//! permission that the API server confirms, for a certificate or a token ([`Access`]), also for `/healthz`. Pods come
//! from a [`PodView`]; containers are read from the runtime, so that a response is never older than the runtime's
//! state. Exec, attach and port-forward are authorized here and served by the runtime (`Streams`).

mod access;
mod authorize;
mod backend;
mod cadvisor;
mod checkpoint;
mod component_pages;
mod config;
mod container_ends;
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
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_connections::{
    ACCEPT_PAUSE, ConnectionPermit, Connections, Limits, LogLimit, PermitStream, handshake, keep_alive,
};
use coracle_error_chain::chain;
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use k8s_openapi::api::core::v1::Pod;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::kubelet_metrics::RequestLabels;
use crate::runtime::Body;
use authorize::Caller;
use route::Route;

pub use access::Access;
pub use backend::{Backend, DiskUsageView, PodDiskUsage, PodView};
pub use component_pages::ComponentPages;
pub use config::{Certificate, ServerConfig, ServerError};
pub use container_ends::ContainerEnds;
pub use log_watches::LogWatches;
use respond::{json, text};

/// The kubelet API, listening but not serving yet.
pub struct Server {
    listener: TcpListener,
    tls: TlsAcceptor,
}

/// Divisor of the process's descriptor limit: the quotient is the maximum number of connections.
const SHARE: u64 = 8;
/// Maximum connections, even if the descriptor limit permits more.
const CONNECTIONS: usize = 4 << 10;
/// Maximum responses with the usage of all pods that are made at the same time: with 1,000 pods each takes megabytes.
/// Further requests wait.
const MEASUREMENTS: usize = 4;
/// Permits for these responses. One for the process, as the runtime is.
static MEASURING: Semaphore = Semaphore::const_new(MEASUREMENTS);
/// Maximum time without a request, and of sending a request's header, as in the API server.
const IDLE: Duration = Duration::from_secs(90);

// === impl Server ===

impl Server {
    /// Loads the certificates and binds the port.
    ///
    /// # Errors
    /// When either fails. The port is free then.
    pub async fn bind(config: &ServerConfig) -> Result<Server, ServerError> {
        let tls = TlsAcceptor::from(Arc::new(tls::config(config)?));
        let listener = TcpListener::bind(config.listen).await;
        let listener = listener.map_err(|source| ServerError::Listen { address: config.listen, source })?;
        Ok(Server { listener, tls })
    }

    /// The address that it listens on, with the port that the kernel chose if the setting is 0.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Serves until `shutdown`. Connections end then; their clients retry with the next agent.
    pub async fn run(self, backend: Backend, shutdown: CancellationToken) {
        let tasks = TaskTracker::new();
        let connections = Connections::new(Limits::share(SHARE, CONNECTIONS));
        let (refusals, failures) = (LogLimit::default(), LogLimit::default());
        loop {
            let accepted = tokio::select! {
                // Both arms are cancel-safe: an accepted connection is always returned.
                () = shutdown.cancelled() => break,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((connection, client)) => match connections.admit(client.ip()) {
                    Ok(permit) => {
                        let serving = serve(connection, self.tls.clone(), backend.clone(), Arc::new(permit));
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
                    // Descriptors are used up: some are free again after a pause.
                    if let Some(suppressed) = failures.allow(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) {
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

/// Serves one connection until it ends, or until its permit expires.
async fn serve(connection: TcpStream, tls: TlsAcceptor, backend: Backend, permit: Arc<ConnectionPermit>) {
    tokio::select! {
        // Both arms may be dropped: the connection is closed then.
        () = requests(connection, tls, backend, permit.clone()) => {}
        () = permit.expired() => tracing::debug!("closed a connection that was evicted or not authenticated in time"),
    }
}

async fn requests(connection: TcpStream, tls: TlsAcceptor, backend: Backend, permit: Arc<ConnectionPermit>) {
    let _ = connection.set_nodelay(true);
    keep_alive(&connection);
    let Some(Ok(stream)) = handshake(tls.accept(connection)).await else { return };
    let caller = Arc::new(Caller::of(stream.get_ref().1.peer_certificates()));
    let held = PermitStream::of_socket(stream, permit.clone());
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(permit.clone());
        let (backend, caller) = (backend.clone(), caller.clone());
        async move { Ok::<_, Infallible>(answer(&backend, &caller, request).await) }
    });
    let http = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .serve_connection(TokioIo::new(held), service);
    // A broken connection is not an error of the server.
    if let Err(error) = http.with_upgrades().await {
        tracing::debug!(error = chain(&error), "a connection to the kubelet API ended");
    }
}

/// Answers a request and counts it.
async fn answer(backend: &Backend, caller: &Caller, request: Request<Incoming>) -> Response<Body> {
    let begun = Instant::now();
    let route = Route::of(request.uri().path());
    let labels = RequestLabels {
        method: method_label(request.method()),
        path: route.as_ref().map_or("other", Route::label),
        is_long: route.as_ref().is_some_and(Route::is_stream),
    };
    let response = respond_to(backend, caller, route, request).await;
    backend.metrics.request(labels, begun.elapsed());
    response
}

/// The method as a label of metrics: a client may send any text.
fn method_label(method: &Method) -> &'static str {
    const KNOWN: [&str; 8] = ["OPTIONS", "GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "CONNECT"];
    KNOWN.into_iter().find(|known| *known == method.as_str()).unwrap_or("other")
}

async fn respond_to(
    backend: &Backend,
    caller: &Caller,
    route: Option<Route>,
    request: Request<Incoming>,
) -> Response<Body> {
    let needed = access::RequiredPermission::of(request.method(), route.as_ref());
    if let Err(refused) = caller.may_use(&backend.access, request.headers(), needed).await {
        return refused.answer();
    }
    if let Some(permit) = request.extensions().get::<Arc<ConnectionPermit>>() {
        permit.set_authenticated();
    }
    let Some(route) = route else { return text(StatusCode::NOT_FOUND, "404 page not found\n") };
    if !route.allows(request.method()) {
        return text(StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed");
    }
    let _measuring = measuring(&route).await;
    match route {
        Route::Healthz => text(StatusCode::OK, healthz(request.uri().query().unwrap_or_default())),
        Route::Configz => json(&serde_json::json!({"kubeletconfig": *backend.configuration})),
        Route::Statusz => backend.pages.statusz(request.headers()),
        Route::Flagz => backend.pages.flagz(request.headers()),
        Route::Pods => pods(backend),
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
        Route::MetricsProbes => stats::exposition(backend.pods.probes()),
        Route::MetricsSlis => node_metrics::health(),
    }
}

/// A permit for a response with the usage of all pods. None for other responses.
async fn measuring(route: &Route) -> Option<SemaphorePermit<'static>> {
    // The semaphore is never closed.
    if route.is_measured() { MEASURING.acquire().await.ok() } else { None }
}

/// The checks have passed whenever the server answers.
fn healthz(query: &str) -> &'static str {
    match route::values(query, &["verbose"]).next() {
        Some(_) => "[+]ping ok\n[+]log ok\n[+]syncloop ok\nhealthz check passed\n",
        None => "ok",
    }
}

fn pods(backend: &Backend) -> Response<Body> {
    let shown = |pod: &Arc<Pod>| {
        let status = pod.metadata.uid.as_deref().and_then(|uid| backend.pods.status(uid));
        let status = status.or_else(|| pod.status.clone());
        serde_json::json!(Pod { metadata: pod.metadata.clone(), spec: pod.spec.clone(), status })
    };
    let items: Vec<serde_json::Value> = backend.pods.pods().iter().map(shown).collect();
    pod_list(&items)
}

fn pod_list(items: &[serde_json::Value]) -> Response<Body> {
    json(&serde_json::json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}))
}

#[cfg(test)]
mod tests;

//! The metrics `rest_client_*`: requests to API servers over the network. Requests to an API server in this process are
//! not counted.
//!
//! Source of names, labels and buckets: `component-base/metrics/prometheus/restclient`.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::{Method, Request, Response, Uri};
use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry, TextEncoder};
use tower::Service;

use crate::metric::valid;

/// Bounds in seconds of the durations.
const DURATIONS: [f64; 12] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];

/// The requests of this process, as in upstream's components.
static ALL: LazyLock<RestClientMetrics> = LazyLock::new(RestClientMetrics::default);

/// Counts requests. A clone shares the counts.
#[derive(Clone)]
pub(super) struct RestClientMetrics {
    registry: Registry,
    requests: IntCounterVec,
    durations: HistogramVec,
}

/// A service whose requests are counted.
#[derive(Clone)]
pub(super) struct Measured<S> {
    inner: S,
    /// Host and port of the server.
    host: Arc<str>,
    metrics: RestClientMetrics,
}

/// All metrics in the text format of Prometheus. Empty before the first request.
pub(crate) fn text() -> String {
    ALL.text()
}

// === impl RestClientMetrics ===

impl Default for RestClientMetrics {
    fn default() -> Self {
        let requests = Opts::new(
            "rest_client_requests_total",
            "Number of HTTP requests by status code, method and host.",
        );
        let durations = HistogramOpts::new(
            "rest_client_request_duration_seconds",
            "Seconds until the response of a request begins, by verb and host. Watches are not counted.",
        );
        let metrics = Self {
            registry: Registry::new(),
            requests: valid(IntCounterVec::new(requests, &["code", "method", "host"])),
            durations: valid(HistogramVec::new(durations.buckets(DURATIONS.to_vec()), &["verb", "host"])),
        };
        valid(metrics.registry.register(Box::new(metrics.requests.clone())));
        valid(metrics.registry.register(Box::new(metrics.durations.clone())));
        metrics
    }
}

impl RestClientMetrics {
    /// Counts a request. `code` is `None` without a response.
    fn count(&self, method: &'static str, host: &str, code: Option<u16>, took: Option<Duration>) {
        let code = code.map_or_else(|| "<error>".to_owned(), |code| code.to_string());
        self.requests.with_label_values(&[code.as_str(), method, host]).inc();
        if let Some(took) = took {
            self.durations.with_label_values(&[method, host]).observe(took.as_secs_f64());
        }
    }

    fn text(&self) -> String {
        // Writing to memory cannot fail, and empty families are not gathered.
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default()
    }
}

// === impl Measured ===

impl<S> Measured<S> {
    /// A service for the server at this address.
    pub(super) fn new(inner: S, server: &Uri) -> Self {
        Self::with(inner, server, ALL.clone())
    }

    fn with(inner: S, server: &Uri, metrics: RestClientMetrics) -> Self {
        let host = server.authority().map_or("", |authority| authority.as_str()).into();
        Self { inner, host, metrics }
    }
}

impl<S, B, R> Service<Request<B>> for Measured<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let method = name(request.method());
        let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let (host, metrics) = (Arc::clone(&self.host), self.metrics.clone());
        let began = Instant::now();
        let responding = self.inner.call(request);
        Box::pin(async move {
            let response = responding.await;
            let code = response.as_ref().ok().map(|response| response.status().as_u16());
            let took = (!is_watch).then(|| began.elapsed());
            metrics.count(method, &host, code, took);
            response
        })
    }
}

/// The name of a method, as a label with few values.
fn name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_have_the_names_labels_and_buckets_of_client_go() {
        let server = tower::service_fn(|request: Request<()>| async move {
            match *request.method() {
                Method::GET => Ok(Response::builder().status(404).body(()).unwrap()),
                _ => Err("no connection"),
            }
        });
        let metrics = RestClientMetrics::default();
        let address = Uri::from_static("https://192.0.2.1:6443/");
        let mut client = Measured::with(server, &address, metrics.clone());
        let mut send = async |method: Method, path: &str| {
            let request = Request::builder().method(method).uri(path).body(()).unwrap();
            client.call(request).await.is_ok()
        };
        assert!(send(Method::GET, "/api/v1/pods").await);
        assert!(send(Method::GET, "/api/v1/pods?watch=true").await);
        assert!(!send(Method::POST, "/api/v1/pods").await);
        let text = metrics.text();
        for line in [
            "# TYPE rest_client_requests_total counter",
            "rest_client_requests_total{code=\"404\",host=\"192.0.2.1:6443\",method=\"GET\"} 2",
            "rest_client_requests_total{code=\"<error>\",host=\"192.0.2.1:6443\",method=\"POST\"} 1",
            "# TYPE rest_client_request_duration_seconds histogram",
            "rest_client_request_duration_seconds_bucket{host=\"192.0.2.1:6443\",verb=\"GET\",le=\"60\"} 1",
            "rest_client_request_duration_seconds_count{host=\"192.0.2.1:6443\",verb=\"POST\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }
}

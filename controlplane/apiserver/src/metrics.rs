//! `/metrics` in the text format of Prometheus, with the names and labels of upstream.
//!
//! Source: `apiserver/pkg/endpoints/metrics/metrics.go`. Requests are counted as they are answered; all other values
//! are read when a client gets the metrics. Labels come from the registry, never from the request, so that clients
//! cannot add values.

use std::time::Duration;

use coracle_kinds::{Resource, Resources};
use http::HeaderMap;
use prometheus::{
    Encoder as _, HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry, TextEncoder,
    core::Collector, process_collector::ProcessCollector,
};

use crate::{
    media,
    reply::{self, Reply},
    request::RequestInfo,
    server::State,
};

/// Path of the metrics.
const PATH: &str = "/metrics";
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Upper bounds of the durations of requests, in seconds.
const DURATIONS: [f64; 23] = [
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0,
    20.0, 30.0, 45.0, 60.0,
];
/// Labels of a request, in the order of [`Request::labels`].
const LABELS: [&str; 8] =
    ["verb", "dry_run", "group", "version", "resource", "subresource", "scope", "component"];

/// The metrics of this server.
pub(crate) struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    durations: HistogramVec,
}

/// The labels of one request.
pub(crate) struct Request {
    verb: &'static str,
    dry_run: &'static str,
    group: String,
    version: String,
    resource: String,
    subresource: String,
    scope: &'static str,
    is_long: bool,
}

// === impl Metrics ===

impl Metrics {
    pub(crate) fn new() -> Self {
        let with_code: Vec<&str> = LABELS.into_iter().chain(["code"]).collect();
        let metrics = Self {
            registry: Registry::new(),
            requests: valid(IntCounterVec::new(
                Opts::new(
                    "apiserver_request_total",
                    "Counter of apiserver requests broken out for each verb, dry run \
                    value, group, version, resource, scope, component, and HTTP response code.",
                ),
                &with_code,
            )),
            durations: valid(HistogramVec::new(
                HistogramOpts::new(
                    "apiserver_request_duration_seconds",
                    "Response latency distribution in seconds for \
                    each verb, dry run value, group, version, resource, subresource, scope and component.",
                )
                .buckets(DURATIONS.to_vec()),
                &LABELS,
            )),
        };
        let collectors: [Box<dyn Collector>; 3] = [
            Box::new(metrics.requests.clone()),
            Box::new(metrics.durations.clone()),
            Box::new(ProcessCollector::for_self()),
        ];
        for collector in collectors {
            valid(metrics.registry.register(collector));
        }
        metrics
    }

    /// Counts an answered request.
    pub(crate) fn answered(&self, request: &Request, code: u16, took: Duration) {
        let labels = request.labels();
        let code = code.to_string();
        let with_code: Vec<&str> = labels.into_iter().chain([code.as_str()]).collect();
        self.requests.with_label_values(&with_code).inc();
        if !request.is_long {
            self.durations.with_label_values(&labels).observe(took.as_secs_f64());
        }
    }

    fn text(&self, state: &State) -> Vec<u8> {
        let in_flight = gauge(
            "apiserver_current_inflight_requests",
            "Number of currently used inflight requests of this apiserver per request kind.",
            &["request_kind"],
        );
        let [read, write] = state.in_flight.total();
        for (kind, number) in [("readOnly", read), ("mutating", write)] {
            in_flight.with_label_values(&[kind]).set(signed(number));
        }
        let objects = gauge(
            "apiserver_resource_objects",
            "Number of stored objects split by kind.",
            &["group", "resource"],
        );
        for collection in state.cache.all() {
            let collection = collection.lock();
            let kind = collection.kind();
            objects.with_label_values(&[&*kind.group, &*kind.plural]).set(signed(collection.len()));
        }
        let mut families = self.registry.gather();
        families.extend(in_flight.collect().into_iter().chain(objects.collect()));
        let mut text = Vec::new();
        // Writing to memory fails only for a family without metrics, and the encoder gets none.
        let _ = TextEncoder::new().encode(&families, &mut text);
        text
    }
}

fn gauge(name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    valid(IntGaugeVec::new(Opts::new(name, help), labels))
}

/// Unwraps a result that is an error only if a name in this file is invalid.
fn valid<T>(made: prometheus::Result<T>) -> T {
    made.unwrap_or_else(|error| unreachable!("invalid metric: {error}"))
}

fn signed(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

// === impl Request ===

impl Request {
    pub(crate) fn of(info: &RequestInfo, headers: &HeaderMap, resources: &Resources, is_long: bool) -> Self {
        let path = info.resource.as_ref();
        let kind = path.and_then(|path| path.find(resources)).map(|kind| &**kind);
        let subresource = path.map_or("", |path| path.subresource.as_str());
        let subresource = kind.and_then(|kind: &Resource| kind.subresource(subresource)).map(|_| subresource);
        let scope = match (path, kind) {
            (Some(path), Some(_)) if !path.name.is_empty() => "resource",
            (Some(path), Some(_)) if !path.namespace.is_empty() => "namespace",
            (_, Some(_)) => "cluster",
            _ => "",
        };
        Self {
            verb: verb(info.verb, headers),
            dry_run: if info.query.get("dryRun") == "All" { "All" } else { "" },
            group: kind.map(|kind| kind.group.clone().into_owned()).unwrap_or_default(),
            version: kind.map(|kind| kind.version.clone().into_owned()).unwrap_or_default(),
            resource: kind.map(|kind| kind.plural.clone().into_owned()).unwrap_or_default(),
            subresource: subresource.unwrap_or_default().to_owned(),
            scope,
            is_long,
        }
    }

    fn labels(&self) -> [&str; 8] {
        [
            self.verb,
            self.dry_run,
            &self.group,
            &self.version,
            &self.resource,
            &self.subresource,
            self.scope,
            "apiserver",
        ]
    }
}

/// The verb as upstream reports it.
fn verb(verb: &str, headers: &HeaderMap) -> &'static str {
    match verb {
        "get" => "GET",
        "list" => "LIST",
        "watch" => "WATCH",
        "create" | "post" => "POST",
        "update" | "put" => "PUT",
        "patch" if matches!(media::body_type(headers), Ok(media::BodyType::ApplyPatch)) => "APPLY",
        "patch" => "PATCH",
        "delete" => "DELETE",
        "deletecollection" => "DELETECOLLECTION",
        "head" => "HEAD",
        "options" => "OPTIONS",
        _ => "other",
    }
}

/// The response, if the path is that of the metrics.
pub(crate) fn find(state: &State, info: &RequestInfo) -> Option<Reply> {
    (info.path == PATH).then(|| reply::bytes(200, TEXT, state.metrics.text(state)))
}

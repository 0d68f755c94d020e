//! `/metrics` in the text format of Prometheus, with the names and labels of upstream.
//!
//! Source: `apiserver/pkg/endpoints/metrics/metrics.go`. Events such as answered requests are counted when they happen.
//! The current state, such as the number of objects, is read when a client requests the metrics. Labels come from the
//! registry and not from the request, so that clients cannot create label values.

mod access;
mod admission;
mod buckets;
mod flow_control;
mod health;
mod impersonation;
mod known_names;
mod pod_resources;
mod policies;
mod reloads;
mod remotes;
mod request_labels;
mod serving;
mod store_size;
mod tokens;

use std::{collections::HashMap, sync::Arc, time::Duration};

use coracle_process_metrics::ProcessMetrics;
use coracle_store::{MemberSize, Store};
use http_body::Body as _;
use prometheus::{
    Encoder as _, HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry, TextEncoder,
    core::{Collector, MetricVec, MetricVecBuilder},
    proto::MetricFamily,
};

pub(crate) use access::AccessMetrics;
pub(crate) use admission::{AdmissionMetrics, Step, WebhookCall};
pub(crate) use policies::{FailedValidation, FailureKind};
pub(crate) use request_labels::Request;
pub(crate) use serving::{LongRunning, Terminated, WatchEvents};

use buckets::{DURATIONS, SIZES, SLI_DURATIONS, VALIDITIES};
use health::HealthMetrics;
use policies::PolicyMetrics;
use reloads::Reloads;
use remotes::RemoteMetrics;
use request_labels::{DEPRECATED_LABELS, LABELS, SLI_LABELS};
use serving::ServingMetrics;
use tokens::TokenMetrics;

use crate::{
    aggregation::Remotes,
    audit::Auditor,
    authz::impersonation::ImpersonationCounts,
    cache::Cache,
    cel_metrics,
    flow_control::FlowControl,
    in_flight::InFlight,
    reply::{self, Reply},
    request::RequestInfo,
    version::version,
};

/// Path of the metrics.
pub(crate) const PATH: &str = "/metrics";
/// Path of the results of health checks.
pub(crate) const SLI_PATH: &str = "/metrics/slis";
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The metrics of this server.
pub(crate) struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    durations: HistogramVec,
    /// Durations without the waits for webhooks and seats.
    sli_durations: HistogramVec,
    certificates: HistogramVec,
    authentication_reloads: Reloads,
    authorization_reloads: Reloads,
    /// Sizes of the responses to reads, if they are known before the response is sent.
    sizes: HistogramVec,
    deprecated: IntGaugeVec,
    pub(crate) access: AccessMetrics,
    pub(crate) admission: AdmissionMetrics,
    pub(crate) policies: PolicyMetrics,
    pub(crate) impersonation: ImpersonationCounts,
    pub(crate) serving: ServingMetrics,
    pub(crate) tokens: TokenMetrics,
    pub(crate) remotes: RemoteMetrics,
    pub(crate) health: HealthMetrics,
}

/// The services whose state is read when a client requests the metrics.
pub(crate) struct Sources<'a> {
    pub(crate) cache: &'a Cache,
    pub(crate) in_flight: &'a InFlight,
    pub(crate) flow_control: &'a FlowControl,
    pub(crate) auditor: Option<&'a Auditor>,
    pub(crate) remotes: &'a Remotes,
    pub(crate) components: Option<&'a ComponentMetrics>,
    pub(crate) store: &'a dyn Store,
    /// Whether the metrics have the number of objects of each resource.
    pub(crate) has_object_counts: bool,
}

/// Returns the metrics of other components in this process, in the text format of Prometheus.
#[derive(Clone)]
pub struct ComponentMetrics(pub Arc<dyn Fn() -> String + Send + Sync>);

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
            durations: histogram(
                "apiserver_request_duration_seconds",
                "Response latency distribution in seconds for \
                each verb, dry run value, group, version, resource, subresource, scope and component.",
                &DURATIONS,
                &LABELS,
            ),
            sli_durations: histogram(
                "apiserver_request_sli_duration_seconds",
                "Response latency distribution in seconds, without the time of webhooks and queues, for \
                each verb, group, version, resource, subresource, scope and component.",
                &SLI_DURATIONS,
                &SLI_LABELS,
            ),
            certificates: certificate_lifetimes(),
            authentication_reloads: Reloads::new("authentication"),
            authorization_reloads: Reloads::new("authorization"),
            sizes: histogram(
                "apiserver_response_sizes",
                "Sizes of the responses to reads in bytes, for each verb, resource, scope and component.",
                &SIZES,
                &SLI_LABELS,
            ),
            deprecated: gauge(
                "apiserver_requested_deprecated_apis",
                "1 for each deprecated API that was requested, by group, version, resource and subresource.",
                &DEPRECATED_LABELS,
            ),
            access: AccessMetrics::new(),
            admission: AdmissionMetrics::new(),
            policies: PolicyMetrics::new(),
            impersonation: impersonation::counts(),
            serving: ServingMetrics::new(),
            tokens: TokenMetrics::new(),
            remotes: RemoteMetrics::new(),
            health: HealthMetrics::new(),
        };
        metrics.register();
        metrics
    }

    fn register(&self) {
        let parts = self.serving.collectors().into_iter().chain(self.tokens.collectors());
        let parts = parts.chain(self.policies.collectors()).chain(self.admission.collectors());
        let parts =
            parts.chain(impersonation::collectors(&self.impersonation)).chain(self.access.collectors());
        let parts = parts.chain(cel_metrics::collectors()).chain(coracle_store::etcd_metrics());
        for collector in self.collectors().into_iter().chain(parts) {
            valid(self.registry.register(collector));
        }
    }

    fn collectors(&self) -> [Box<dyn Collector>; 12] {
        [
            self.remotes.collector(),
            Box::new(self.authentication_reloads.count.clone()),
            Box::new(self.authentication_reloads.last.clone()),
            Box::new(self.authorization_reloads.count.clone()),
            Box::new(self.authorization_reloads.last.clone()),
            Box::new(self.certificates.clone()),
            Box::new(self.sizes.clone()),
            Box::new(self.deprecated.clone()),
            Box::new(self.requests.clone()),
            Box::new(self.durations.clone()),
            Box::new(self.sli_durations.clone()),
            Box::new(ProcessMetrics::new()),
        ]
    }

    /// Counts an answered request. `took` is its duration, `waited` its wait for webhooks and seats.
    pub(crate) fn answered(&self, request: &Request, reply: &Reply, took: Duration, waited: Duration) {
        let labels = request.labels();
        let code = reply.status().as_u16().to_string();
        let with_code: Vec<&str> = labels.into_iter().chain([code.as_str()]).collect();
        self.requests.with_label_values(&with_code).inc();
        if !request.is_long {
            self.durations.with_label_values(&labels).observe(took.as_secs_f64());
        }
        if !request.is_long && request.dry_run.is_empty() {
            let own = took.saturating_sub(waited);
            self.sli_durations.with_label_values(&request.sli_labels()).observe(own.as_secs_f64());
        }
        if let Some(size) = reply.body().size_hint().exact().filter(|_| request.is_read()) {
            #[expect(clippy::cast_precision_loss, reason = "a response has less than 2^53 bytes")]
            self.sizes.with_label_values(&request.sli_labels()).observe(size as f64);
        }
        // As upstream, only allowed requests are counted. A client without permissions must not cause alerts on
        // deprecated APIs.
        let is_refused = matches!(reply.status().as_u16(), 401 | 403);
        if request.is_deprecated && !is_refused {
            self.deprecated.with_label_values(&request.deprecated_labels()).set(1);
        }
    }

    /// Removes the counts of a resource that is not served any more. Clients that create and delete definitions of
    /// custom resources would otherwise add labels without end.
    pub(crate) fn forget(&self, group: &str, plural: &str) {
        remove_resource(&self.requests, group, plural);
        remove_resource(&self.durations, group, plural);
        remove_resource(&self.sli_durations, group, plural);
        remove_resource(&self.sizes, group, plural);
        remove_resource(&self.deprecated, group, plural);
        self.serving.forget(group, plural);
        coracle_store::forget_etcd_metrics(group, plural);
    }

    /// Counts a client certificate of a request, by its remaining validity in seconds.
    pub(crate) fn presented_certificate(&self, remaining: i64) {
        #[expect(clippy::cast_precision_loss, reason = "seconds of a validity have less than 53 bits")]
        self.certificates.with_label_values::<&str>(&[]).observe(remaining as f64);
    }

    /// Counts a reload of the authentication configuration.
    pub(crate) fn reloaded_authentication(&self, is_valid: bool) {
        self.authentication_reloads.record(is_valid);
    }

    /// Counts a reload of the authorization configuration.
    pub(crate) fn reloaded_authorization(&self, is_valid: bool) {
        self.authorization_reloads.record(is_valid);
    }

    fn text(&self, sources: &Sources<'_>, sizes: &[MemberSize]) -> Vec<u8> {
        let in_flight = gauge(
            "apiserver_current_inflight_requests",
            "Number of currently used inflight requests of this apiserver per request kind.",
            &["request_kind"],
        );
        let [read, write] = sources.in_flight.total();
        for (kind, number) in [("readOnly", read), ("mutating", write)] {
            in_flight.with_label_values(&[kind]).set(signed(number));
        }
        let objects = gauge(
            "apiserver_resource_objects",
            "Number of stored objects split by kind.",
            &["group", "resource"],
        );
        let deprecated = "Number of stored objects at the time of last check split by kind. Use apiserver_resource_objects.";
        let stored = gauge("apiserver_storage_objects", deprecated, &["resource"]);
        let events = counter(
            "apiserver_storage_events_received_total",
            "Number of changes received from the store split by kind.",
            &["group", "resource"],
        );
        let undecryptable = gauge(
            "coracle_undecryptable_objects",
            "Number of stored objects that cannot be decrypted split by kind. -1 if all requests of the kind fail.",
            &["group", "resource"],
        );
        for shared in sources.cache.all() {
            let collection = shared.lock();
            // As upstream, -1 means that the objects cannot be read.
            let number = if shared.is_readable() { signed(collection.len()) } else { -1 };
            let kind = collection.kind();
            let labels = [&*kind.group, &*kind.plural];
            events.with_label_values(&labels).inc_by(collection.received());
            let unreadable = if shared.is_readable() { signed(collection.unreadable_len()) } else { -1 };
            if unreadable != 0 {
                undecryptable.with_label_values(&labels).set(unreadable);
            }
            let resource = [&*kind.plural, &*kind.group].join(".");
            if sources.has_object_counts {
                objects.with_label_values(&labels).set(number);
                stored.with_label_values(&[resource.trim_end_matches('.')]).set(number);
            }
        }
        let mut families = self.registry.gather();
        families.extend([in_flight, objects, stored, undecryptable].iter().flat_map(Collector::collect));
        families.extend(events.collect());
        families.extend(watchers(sources.cache).collect());
        families.extend(flow_control::current(sources.flow_control));
        families.extend(sources.auditor.into_iter().flat_map(audit));
        families.extend(remotes::current(sources.remotes, sources.cache).collect());
        families.extend(store_size::families(sources.store, sizes));
        families.extend(build_info().collect());
        let mut text = encoded(families);
        text.extend(sources.components.into_iter().flat_map(|components| (components.0)().into_bytes()));
        text
    }
}

fn encoded(mut families: Vec<MetricFamily>) -> Vec<u8> {
    // The encoder stops at a family without metrics.
    families.retain(|family| !family.get_metric().is_empty());
    let mut text = Vec::new();
    // Writing to memory cannot fail.
    let _ = TextEncoder::new().encode(&families, &mut text);
    text
}

/// The running watches.
fn watchers(cache: &Cache) -> IntGaugeVec {
    let all = gauge(
        "apiserver_registered_watchers",
        "Number of currently registered watchers for a given resources.",
        &["group", "version", "kind"],
    );
    for collection in cache.all() {
        let collection = collection.lock();
        let (kind, number) = (collection.kind(), collection.watchers());
        if number > 0 {
            all.with_label_values(&[&*kind.group, &*kind.version, &*kind.kind]).set(signed(number));
        }
    }
    all
}

/// The version of the API, as labels.
fn build_info() -> IntGaugeVec {
    const FIELDS: [(&str, &str); 9] = [
        ("major", "major"),
        ("minor", "minor"),
        ("git_version", "gitVersion"),
        ("git_commit", "gitCommit"),
        ("git_tree_state", "gitTreeState"),
        ("build_date", "buildDate"),
        ("go_version", "goVersion"),
        ("compiler", "compiler"),
        ("platform", "platform"),
    ];
    let help =
        "A metric with a constant '1' value, whose labels are the version of the API and the platform.";
    let info = gauge("kubernetes_build_info", help, &FIELDS.map(|(label, _)| label));
    let version = version();
    let values = FIELDS.map(|(_, field)| version[field].as_str().unwrap_or_default());
    info.with_label_values(&values).set(1);
    info
}

/// Counters of audit events.
fn audit(auditor: &Auditor) -> Vec<MetricFamily> {
    let [events, lost, lost_by_log, refused] = auditor.counts();
    let all = counter(
        "apiserver_audit_event_total",
        "Counter of audit events generated and sent to the audit backend.",
        &[],
    );
    all.with_label_values::<&str>(&[]).inc_by(events);
    let errors = counter(
        "apiserver_audit_error_total",
        "Counter of audit events that failed to be audited properly.",
        &["plugin"],
    );
    errors.with_label_values(&["webhook"]).inc_by(lost);
    errors.with_label_values(&["log"]).inc_by(lost_by_log);
    errors.with_label_values(&["truncate"]).inc_by(auditor.lost_by_size());
    let rejected = counter(
        "apiserver_audit_requests_rejected_total",
        "Counter of apiserver requests rejected due to an error in audit logging backend.",
        &[],
    );
    rejected.with_label_values::<&str>(&[]).inc_by(refused);
    let levels = counter(
        "apiserver_audit_level_total",
        "Counter of policy levels for audit events (1 per request).",
        &["level"],
    );
    for (level, count) in auditor.levels() {
        levels.with_label_values(&[level]).inc_by(count);
    }
    let families = [all.collect(), errors.collect(), rejected.collect(), levels.collect()];
    families.into_iter().flatten().collect()
}

fn certificate_lifetimes() -> HistogramVec {
    histogram(
        "apiserver_client_certificate_expiration_seconds",
        "Distribution of the remaining lifetime on the certificate used to authenticate a request.",
        &VALIDITIES,
        &[],
    )
}

fn histogram(name: &str, help: &str, buckets: &[f64], labels: &[&str]) -> HistogramVec {
    valid(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels))
}

fn counter(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    valid(IntCounterVec::new(Opts::new(name, help), labels))
}

fn gauge(name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    valid(IntGaugeVec::new(Opts::new(name, help), labels))
}

fn remove_resource<B: MetricVecBuilder>(all: &MetricVec<B>, group: &str, plural: &str) {
    for family in all.collect() {
        for metric in family.get_metric() {
            let labels = metric.get_label().iter().map(|label| (label.name(), label.value()));
            let labels: HashMap<&str, &str> = labels.collect();
            if labels.get("group") == Some(&group) && labels.get("resource") == Some(&plural) {
                // An error means that another task has removed these labels already.
                let _ = all.remove(&labels);
            }
        }
    }
}

/// Unwraps a result that is an error only if a metric in this file is invalid.
fn valid<T>(made: prometheus::Result<T>) -> T {
    made.unwrap_or_else(|error| unreachable!("invalid metric: {error}"))
}

fn signed(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The response, if the request is for metrics.
pub(crate) async fn find(metrics: &Metrics, sources: &Sources<'_>, info: &RequestInfo) -> Option<Reply> {
    let text = match info.path.as_str() {
        PATH => {
            let sizes = sources.store.member_sizes().await;
            metrics.text(sources, &sizes)
        }
        SLI_PATH => metrics.health.text(),
        pod_resources::PATH => pod_resources::text(sources.cache),
        _ => return None,
    };
    Some(reply::bytes(200, TEXT, text))
}

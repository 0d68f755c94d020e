//! Counters of the server, with the names of CoreDNS' metrics.
//!
//! Counting is an addition to an atomic number: it takes no lock and allocates nothing.

mod programming;
mod upstream_servers;

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;

use programming::Programming;
pub use programming::ServiceKind;
pub(crate) use upstream_servers::{ServerMetrics, ServerMetricsByAddress};

/// Transport protocols of queries.
const PROTOCOLS: [&str; 2] = ["udp", "tcp"];
/// Address families of clients, as CoreDNS numbers them.
const FAMILIES: [&str; 2] = ["1", "2"];
/// Query types that are counted separately, as in CoreDNS.
const TYPES: [&str; 20] = [
    "A", "AAAA", "ANY", "AXFR", "CNAME", "DNSKEY", "DS", "HTTPS", "IXFR", "MX", "NS", "NSEC", "NSEC3", "PTR",
    "RRSIG", "SOA", "SRV", "SVCB", "TXT", "other",
];
/// Response codes that are counted separately.
const CODES: [&str; 7] = ["NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED", "other"];
/// Plugins of CoreDNS whose functions this server has.
const PLUGINS: [&str; 5] = ["cache", "forward", "kubernetes", "loop", "prometheus"];
/// Number of buckets of the histogram of durations. The first upper bound is 0.25 ms; each further bound is twice the
/// previous bound.
const BUCKETS: usize = 16;
const FIRST_BUCKET_SECONDS: f64 = 0.000_25;
/// Upper bounds in bytes of the sizes of messages, as in CoreDNS.
const SIZES: [usize; 14] =
    [0, 100, 200, 300, 400, 511, 1023, 2047, 4095, 8291, 16_000, 32_000, 48_000, 64_000];

/// Counters of the DNS server of this node.
#[derive(Debug, Default)]
pub struct Metrics {
    requests: [[[AtomicU64; TYPES.len()]; FAMILIES.len()]; PROTOCOLS.len()],
    /// Queries of clients that accept signatures (DNSSEC).
    signature_requests: AtomicU64,
    responses: [AtomicU64; CODES.len()],
    durations: Durations,
    /// Sizes of queries and of responses, by transport protocol.
    sizes: [[Sizes; PROTOCOLS.len()]; 2],
    /// Cache hits: of answers with records, and of negative answers.
    hits: [AtomicU64; 2],
    misses: AtomicU64,
    prefetches: AtomicU64,
    stale: AtomicU64,
    /// Forwarded queries for which every server was down.
    without_servers: AtomicU64,
    rejects: AtomicU64,
    programming: Programming,
    forwarder: OnceLock<std::sync::Mutex<Option<Weak<dyn ForwarderState>>>>,
}

/// A histogram of durations.
#[derive(Debug, Default)]
struct Durations {
    buckets: [AtomicU64; BUCKETS + 1],
    micros: AtomicU64,
}

/// The current counts of a histogram of durations, or the sum of several histograms.
#[derive(Default)]
struct DurationCounts {
    buckets: [u64; BUCKETS + 1],
    micros: u64,
}

/// A histogram of the sizes of messages.
#[derive(Debug, Default)]
struct Sizes {
    buckets: [AtomicU64; SIZES.len() + 1],
    bytes: AtomicU64,
}

/// Counts of the cache. The first number of each pair counts answers with records, the second number counts negative
/// answers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CacheCounts {
    /// Cached answers.
    pub(crate) entries: [usize; 2],
    /// Answers that were removed to make room, since the start.
    pub(crate) evictions: [u64; 2],
}

/// The state of the forwarder, which is read when a client requests the metrics.
pub(crate) trait ForwarderState: Send + Sync {
    /// The counts of the cache at one moment.
    fn cache_counts(&self) -> CacheCounts;

    /// The counters of the upstream servers.
    fn servers(&self) -> ServerMetricsByAddress;
}

/// A query that was received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceivedQuery {
    pub(crate) is_tcp: bool,
    pub(crate) is_ipv4: bool,
    /// `None` if the query cannot be parsed.
    pub(crate) kind: Option<RecordType>,
}

// === impl Metrics ===

impl Metrics {
    /// Sets the forwarder whose state the metrics report.
    pub(crate) fn show_forwarder(&self, forwarder: Weak<dyn ForwarderState>) {
        let shown = self.forwarder.get_or_init(std::sync::Mutex::default);
        *shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(forwarder);
    }

    fn forwarder(&self) -> Option<Arc<dyn ForwarderState>> {
        let shown = self.forwarder.get()?;
        shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner).as_ref()?.upgrade()
    }

    pub(crate) fn record_response(&self, received: ReceivedQuery, code: ResponseCode, took: Duration) {
        let name: &str = received.kind.map_or("", Into::into);
        let kind = TYPES.iter().position(|known| *known == name).unwrap_or(TYPES.len() - 1);
        self.requests[usize::from(received.is_tcp)][usize::from(!received.is_ipv4)][kind]
            .fetch_add(1, Relaxed);
        self.responses[code_index(code)].fetch_add(1, Relaxed);
        self.durations.observe(took);
    }

    /// Counts a query of a client that accepts signatures.
    pub(crate) fn signatures_requested(&self) {
        self.signature_requests.fetch_add(1, Relaxed);
    }

    /// Counts the sizes of a query and its response, in bytes.
    pub(crate) fn record_sizes(&self, is_tcp: bool, query: usize, response: usize) {
        for (sizes, size) in self.sizes.iter().zip([query, response]) {
            sizes[usize::from(is_tcp)].observe(size);
        }
    }

    pub(crate) fn cache_hit(&self, is_positive: bool) {
        self.hits[usize::from(!is_positive)].fetch_add(1, Relaxed);
    }

    pub(crate) fn cache_missed(&self) {
        self.misses.fetch_add(1, Relaxed);
    }

    pub(crate) fn prefetched(&self) {
        self.prefetches.fetch_add(1, Relaxed);
    }

    pub(crate) fn served_stale(&self) {
        self.stale.fetch_add(1, Relaxed);
    }

    /// Counts a query that is forwarded although every server is down.
    pub(crate) fn servers_down(&self) {
        self.without_servers.fetch_add(1, Relaxed);
    }

    pub(crate) fn rejected(&self) {
        self.rejects.fetch_add(1, Relaxed);
    }

    /// Counts a change of a Service's endpoints, and the time until the server answers with them.
    pub fn programmed(&self, kind: ServiceKind, took: Duration) {
        self.programming.observe(kind, took);
    }

    /// The counters in Prometheus' text format.
    #[must_use]
    pub fn render(&self) -> String {
        let mut out = String::new();
        render_properties(&mut out);
        self.render_requests(&mut out);
        self.render_sizes(&mut out);
        let forwarder = self.forwarder();
        let forwarder = forwarder.as_deref();
        self.render_cache(&mut out, forwarder.map(ForwarderState::cache_counts).unwrap_or_default());
        let rejects = ("max_concurrent_rejects", "Queries refused because too many wait for other servers");
        let broken = ("healthcheck_broken", "Queries that were forwarded while every other server was down");
        for ((name, help), count) in [(rejects, &self.rejects), (broken, &self.without_servers)] {
            let name = format!("coredns_forward_{name}_total");
            head(&mut out, &name, "counter", help);
            let _ = writeln!(out, "{name} {}", count.load(Relaxed));
        }
        upstream_servers::render(&mut out, &forwarder.map(ForwarderState::servers).unwrap_or_default());
        self.programming.render(&mut out);
        out
    }

    fn render_requests(&self, out: &mut String) {
        let name = "coredns_dns_requests_total";
        head(out, name, "counter", "Queries");
        for (protocol, families) in PROTOCOLS.iter().zip(&self.requests) {
            for (family, types) in FAMILIES.iter().zip(families) {
                for (kind, count) in TYPES.iter().zip(types).filter(|(_, count)| count.load(Relaxed) > 0) {
                    let count = count.load(Relaxed);
                    let labels = format!("family=\"{family}\",proto=\"{protocol}\",type=\"{kind}\"");
                    let _ =
                        writeln!(out, "{name}{{{labels},server=\"dns://:53\",view=\"\",zone=\".\"}} {count}");
                }
            }
        }
        let name = "coredns_dns_do_requests_total";
        head(out, name, "counter", "Queries of clients that accept signatures");
        let labels = "server=\"dns://:53\",view=\"\",zone=\".\"";
        let _ = writeln!(out, "{name}{{{labels}}} {}", self.signature_requests.load(Relaxed));
        let name = "coredns_dns_responses_total";
        head(out, name, "counter", "Responses");
        for (code, count) in CODES.iter().zip(&self.responses).filter(|(_, count)| count.load(Relaxed) > 0) {
            let count = count.load(Relaxed);
            let labels = format!("plugin=\"\",rcode=\"{code}\",server=\"dns://:53\",view=\"\",zone=\".\"");
            let _ = writeln!(out, "{name}{{{labels}}} {count}");
        }
        let name = "coredns_dns_request_duration_seconds";
        head(out, name, "histogram", "Time in which queries were answered");
        let labels = "server=\"dns://:53\",view=\"\",zone=\".\"";
        DurationCounts::sum([&self.durations]).render(out, name, labels);
    }

    fn render_sizes(&self, out: &mut String) {
        let kinds = [("request", "Sizes of queries in bytes"), ("response", "Sizes of responses in bytes")];
        for ((kind, help), protocols) in kinds.into_iter().zip(&self.sizes) {
            let name = format!("coredns_dns_{kind}_size_bytes");
            head(out, &name, "histogram", help);
            for (protocol, sizes) in PROTOCOLS.iter().zip(protocols) {
                let labels = format!("proto=\"{protocol}\",server=\"dns://:53\",view=\"\",zone=\".\"");
                sizes.render(out, &name, &labels);
            }
        }
    }

    fn render_cache(&self, out: &mut String, counts: CacheCounts) {
        let labels = |kind| format!("server=\"dns://:53\",type=\"{kind}\",view=\"\",zones=\".\"");
        let name = "coredns_cache_entries";
        head(out, name, "gauge", "Cached answers");
        for (kind, count) in ["success", "denial"].iter().zip(counts.entries) {
            let _ = writeln!(out, "{name}{{{}}} {count}", labels(kind));
        }
        let name = "coredns_cache_evictions_total";
        head(out, name, "counter", "Answers removed from the cache to make room");
        for (kind, count) in ["success", "denial"].iter().zip(counts.evictions) {
            let _ = writeln!(out, "{name}{{{}}} {count}", labels(kind));
        }
        let name = "coredns_cache_hits_total";
        head(out, name, "counter", "Queries answered from the cache");
        for (kind, count) in ["success", "denial"].iter().zip(&self.hits) {
            let _ = writeln!(out, "{name}{{{}}} {}", labels(kind), count.load(Relaxed));
        }
        let lookups: u64 = self.hits.iter().chain([&self.misses]).map(|count| count.load(Relaxed)).sum();
        counter(out, "coredns_cache_requests_total", "Queries that were looked up in the cache", lookups);
        let name = "coredns_cache_misses_total";
        counter(out, name, "Queries that the cache cannot answer", self.misses.load(Relaxed));
        let name = "coredns_cache_prefetch_total";
        counter(out, name, "Cached answers renewed before they expired", self.prefetches.load(Relaxed));
        let name = "coredns_cache_served_stale_total";
        counter(out, name, "Expired answers that were used", self.stale.load(Relaxed));
    }
}

// === impl Sizes ===

impl Sizes {
    fn observe(&self, size: usize) {
        let bucket = SIZES.iter().position(|bound| size <= *bound).unwrap_or(SIZES.len());
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.bytes.fetch_add(u64::try_from(size).unwrap_or(u64::MAX), Relaxed);
    }

    fn render(&self, out: &mut String, name: &str, labels: &str) {
        let mut sum = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            sum += count.load(Relaxed);
            let bound = SIZES.get(index).map_or_else(|| "+Inf".to_owned(), usize::to_string);
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {sum}");
        }
        let bytes = self.bytes.load(Relaxed);
        let _ = writeln!(out, "{name}_sum{{{labels}}} {bytes}\n{name}_count{{{labels}}} {sum}");
    }
}

// === impl Durations ===

impl Durations {
    fn observe(&self, took: Duration) {
        let bucket = (0..BUCKETS).find(|index| took.as_secs_f64() <= bound(*index)).unwrap_or(BUCKETS);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.micros.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }
}

// === impl DurationCounts ===

impl DurationCounts {
    fn sum<'a>(parts: impl IntoIterator<Item = &'a Durations>) -> Self {
        let mut all = Self::default();
        for part in parts {
            for (sum, count) in all.buckets.iter_mut().zip(&part.buckets) {
                *sum += count.load(Relaxed);
            }
            all.micros = all.micros.wrapping_add(part.micros.load(Relaxed));
        }
        all
    }

    /// Number of durations.
    fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    fn render(&self, out: &mut String, name: &str, labels: &str) {
        let mut sum = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            sum += count;
            let bound = if index < BUCKETS { bound(index).to_string() } else { "+Inf".to_owned() };
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {sum}");
        }
        let seconds = Duration::from_micros(self.micros).as_secs_f64();
        let _ = writeln!(out, "{name}_sum{{{labels}}} {seconds}\n{name}_count{{{labels}}} {sum}");
    }
}

/// Writes the version and the functions of the server. Dashboards find the servers by these metrics.
fn render_properties(out: &mut String) {
    let (name, version) = ("coredns_build_info", env!("CARGO_PKG_VERSION"));
    head(out, name, "gauge", "Version of the node");
    let _ = writeln!(out, "{name}{{goversion=\"\",revision=\"\",version=\"{version}\"}} 1");
    let name = "coredns_plugin_enabled";
    head(out, name, "gauge", "Plugins of CoreDNS whose functions the server has");
    for plugin in PLUGINS {
        let _ = writeln!(out, "{name}{{name=\"{plugin}\",server=\"dns://:53\",view=\"\",zone=\".\"}} 1");
    }
    let name = "coredns_panics_total";
    head(out, name, "counter", "Always 0: a panic ends the process");
    let _ = writeln!(out, "{name} 0");
}

/// The index of a response code in [`CODES`].
fn code_index(code: ResponseCode) -> usize {
    match code {
        ResponseCode::NoError => 0,
        ResponseCode::FormErr => 1,
        ResponseCode::ServFail => 2,
        ResponseCode::NXDomain => 3,
        ResponseCode::NotImp => 4,
        ResponseCode::Refused => 5,
        _ => 6,
    }
}

fn bound(index: usize) -> f64 {
    FIRST_BUCKET_SECONDS * f64::from(1u32 << index.min(BUCKETS))
}

fn counter(out: &mut String, name: &str, help: &str, value: u64) {
    head(out, name, "counter", help);
    let labels = "server=\"dns://:53\",view=\"\",zones=\".\"";
    let _ = writeln!(out, "{name}{{{labels}}} {value}");
}

/// Writes the header of a metric. Writing to a string cannot fail.
fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_have_the_names_of_coredns() {
        let metrics = Metrics::default();
        let received = ReceivedQuery { is_tcp: false, is_ipv4: true, kind: Some(RecordType::A) };
        metrics.record_response(received, ResponseCode::NoError, Duration::from_micros(300));
        metrics.record_response(received, ResponseCode::NXDomain, Duration::from_secs(60));
        metrics.record_sizes(false, 40, 600);
        metrics.record_sizes(true, 511, 65_000);
        let unusual = ReceivedQuery { kind: Some(RecordType::HTTPS), ..received };
        metrics.record_response(unusual, ResponseCode::NoError, Duration::ZERO);
        let unknown = ReceivedQuery { kind: Some(RecordType::Unknown(65_280)), ..received };
        metrics.record_response(unknown, ResponseCode::NoError, Duration::ZERO);
        metrics.cache_hit(true);
        metrics.cache_missed();
        metrics.signatures_requested();
        let text = metrics.render();
        for line in [
            "coredns_dns_requests_total{family=\"1\",proto=\"udp\",type=\"A\",server=\"dns://:53\",view=\"\",zone=\".\"} 2",
            "coredns_dns_responses_total{plugin=\"\",rcode=\"NXDOMAIN\",server=\"dns://:53\",view=\"\",zone=\".\"} 1",
            "coredns_dns_request_duration_seconds_bucket{server=\"dns://:53\",view=\"\",zone=\".\",le=\"0.00025\"} 2",
            "coredns_dns_request_duration_seconds_bucket{server=\"dns://:53\",view=\"\",zone=\".\",le=\"0.0005\"} 3",
            "coredns_dns_request_duration_seconds_bucket{server=\"dns://:53\",view=\"\",zone=\".\",le=\"+Inf\"} 4",
            "coredns_dns_requests_total{family=\"1\",proto=\"udp\",type=\"HTTPS\",server=\"dns://:53\",view=\"\",zone=\".\"} 1",
            "coredns_dns_requests_total{family=\"1\",proto=\"udp\",type=\"other\",server=\"dns://:53\",view=\"\",zone=\".\"} 1",
            "coredns_dns_do_requests_total{server=\"dns://:53\",view=\"\",zone=\".\"} 1",
            "coredns_cache_requests_total{server=\"dns://:53\",view=\"\",zones=\".\"} 2",
            "coredns_forward_healthcheck_broken_total 0",
            "coredns_forward_max_concurrent_rejects_total 0",
            "# TYPE coredns_dns_request_size_bytes histogram",
            "coredns_dns_request_size_bytes_bucket{proto=\"udp\",server=\"dns://:53\",view=\"\",zone=\".\",le=\"0\"} 0",
            "coredns_dns_request_size_bytes_bucket{proto=\"udp\",server=\"dns://:53\",view=\"\",zone=\".\",le=\"100\"} 1",
            "coredns_dns_request_size_bytes_bucket{proto=\"tcp\",server=\"dns://:53\",view=\"\",zone=\".\",le=\"511\"} 1",
            "coredns_dns_response_size_bytes_bucket{proto=\"udp\",server=\"dns://:53\",view=\"\",zone=\".\",le=\"1023\"} 1",
            "coredns_dns_response_size_bytes_bucket{proto=\"tcp\",server=\"dns://:53\",view=\"\",zone=\".\",le=\"64000\"} 0",
            "coredns_dns_response_size_bytes_sum{proto=\"tcp\",server=\"dns://:53\",view=\"\",zone=\".\"} 65000",
            "coredns_cache_hits_total{server=\"dns://:53\",type=\"success\",view=\"\",zones=\".\"} 1",
            "coredns_cache_evictions_total{server=\"dns://:53\",type=\"success\",view=\"\",zones=\".\"} 0",
            "# TYPE coredns_build_info gauge",
            "coredns_plugin_enabled{name=\"kubernetes\",server=\"dns://:53\",view=\"\",zone=\".\"} 1",
            "coredns_panics_total 0",
            "# TYPE coredns_kubernetes_dns_programming_duration_seconds histogram",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}

//! Counters of the queries to upstream servers.
//!
//! CoreDNS has renamed its metrics of forwarded queries: the plugin `forward` had them, and a package `proxy` has them
//! now. Dashboards use both names, so the same counts are exported under both names.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hickory_proto::op::ResponseCode;

use super::{CODES, DurationCounts, Durations, code_index, head};

/// Counters of the queries to an upstream server.
#[derive(Debug, Default)]
pub(crate) struct ServerMetrics {
    queries: AtomicU64,
    failures: AtomicU64,
    /// Times until a response, by its code.
    responses: [Durations; CODES.len()],
}

/// The counters of all upstream servers. A server of several domains has one entry for each domain.
pub(crate) type ServerMetricsByAddress = BTreeMap<SocketAddr, Vec<Arc<ServerMetrics>>>;

/// The current counts of a server.
struct Row {
    to: SocketAddr,
    queries: u64,
    failures: u64,
    responses: Vec<(&'static str, DurationCounts)>,
}

// === impl ServerMetrics ===

impl ServerMetrics {
    /// Counts a query that is sent.
    pub(crate) fn queried(&self) {
        self.queries.fetch_add(1, Relaxed);
    }

    /// Counts a query that the server did not answer.
    pub(crate) fn failed(&self) {
        self.failures.fetch_add(1, Relaxed);
    }

    /// Counts a response and the time until it arrived.
    pub(crate) fn responded(&self, code: ResponseCode, took: Duration) {
        self.responses[code_index(code)].observe(took);
    }
}

// === impl Row ===

impl Row {
    fn new(to: SocketAddr, parts: &[Arc<ServerMetrics>]) -> Self {
        let responses = (0..CODES.len()).map(|index| {
            let counts = DurationCounts::sum(parts.iter().map(|part| &part.responses[index]));
            (CODES[index], counts)
        });
        Self {
            to,
            queries: parts.iter().map(|part| part.queries.load(Relaxed)).sum(),
            failures: parts.iter().map(|part| part.failures.load(Relaxed)).sum(),
            responses: responses.filter(|(_, counts)| counts.count() > 0).collect(),
        }
    }
}

/// Writes the counts of all servers in Prometheus' text format.
pub(super) fn render(out: &mut String, servers: &ServerMetricsByAddress) {
    let rows: Vec<Row> = servers.iter().map(|(to, parts)| Row::new(*to, parts)).collect();
    let name = "coredns_forward_requests_total";
    head(out, name, "counter", "Queries to other servers");
    for Row { to, queries, .. } in &rows {
        let _ = writeln!(out, "{name}{{to=\"{to}\"}} {queries}");
    }
    let name = "coredns_forward_responses_total";
    head(out, name, "counter", "Responses of other servers");
    for Responses { to, code, counts } in responses(&rows) {
        let _ = writeln!(out, "{name}{{rcode=\"{code}\",to=\"{to}\"}} {}", counts.count());
    }
    for (part, label) in [("forward", ""), ("proxy", "proxy_name=\"forward\",")] {
        let name = format!("coredns_{part}_healthcheck_failures_total");
        head(out, &name, "counter", "Queries that other servers did not answer");
        for Row { to, failures, .. } in &rows {
            let _ = writeln!(out, "{name}{{{label}to=\"{to}\"}} {failures}");
        }
        let name = format!("coredns_{part}_request_duration_seconds");
        head(out, &name, "histogram", "Time until the response of another server");
        for Responses { to, code, counts } in responses(&rows) {
            counts.render(out, &name, &format!("{label}rcode=\"{code}\",to=\"{to}\""));
        }
    }
}

/// The responses of a server with one response code.
struct Responses<'a> {
    to: SocketAddr,
    code: &'static str,
    counts: &'a DurationCounts,
}

fn responses(rows: &[Row]) -> impl Iterator<Item = Responses<'_>> {
    rows.iter().flat_map(|row| {
        row.responses.iter().map(move |(code, counts)| Responses { to: row.to, code, counts })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_to_servers_have_the_former_and_the_present_names_of_coredns() {
        let [first, second, silent]: [Arc<ServerMetrics>; 3] = Default::default();
        first.queried();
        first.responded(ResponseCode::NoError, Duration::from_micros(300));
        second.queried();
        second.responded(ResponseCode::NoError, Duration::from_micros(100));
        silent.queried();
        silent.failed();
        let mut servers = ServerMetricsByAddress::new();
        // A server of two domains has one sample of each metric.
        servers.insert("192.0.2.1:53".parse().unwrap(), vec![first, second]);
        servers.insert("[2001:db8::1]:53".parse().unwrap(), vec![silent]);
        let mut text = String::new();
        render(&mut text, &servers);
        for line in [
            "coredns_forward_requests_total{to=\"192.0.2.1:53\"} 2",
            "coredns_forward_requests_total{to=\"[2001:db8::1]:53\"} 1",
            "coredns_forward_responses_total{rcode=\"NOERROR\",to=\"192.0.2.1:53\"} 2",
            "coredns_forward_healthcheck_failures_total{to=\"[2001:db8::1]:53\"} 1",
            "coredns_proxy_healthcheck_failures_total{proxy_name=\"forward\",to=\"192.0.2.1:53\"} 0",
            "# TYPE coredns_forward_request_duration_seconds histogram",
            "coredns_forward_request_duration_seconds_bucket{rcode=\"NOERROR\",to=\"192.0.2.1:53\",le=\"0.00025\"} 1",
            "coredns_proxy_request_duration_seconds_bucket{proxy_name=\"forward\",rcode=\"NOERROR\",to=\"192.0.2.1:53\",le=\"0.0005\"} 2",
            "coredns_proxy_request_duration_seconds_bucket{proxy_name=\"forward\",rcode=\"NOERROR\",to=\"192.0.2.1:53\",le=\"8.192\"} 2",
            "coredns_proxy_request_duration_seconds_count{proxy_name=\"forward\",rcode=\"NOERROR\",to=\"192.0.2.1:53\"} 2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!text.contains("SERVFAIL"), "codes that no server has returned have no series\n{text}");
    }
}

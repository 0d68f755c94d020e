//! Time from the change of a Service's endpoints until the server answers with them.
//!
//! Source of the name, the labels and the buckets: `plugin/kubernetes/object/metrics.go` of CoreDNS.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::head;

/// Number of buckets. The first upper bound is 1 ms; each further bound is twice the previous bound.
const BUCKETS: usize = 20;
const FIRST_BUCKET_SECONDS: f64 = 0.001;
/// Values of the label `service_kind`, in the order of [`ServiceKind`].
const KINDS: [&str; 2] = ["cluster_ip", "headless_with_selector"];

/// The kind of a Service whose endpoints have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceKind {
    /// The Service has cluster IPs.
    ClusterIp,
    /// The Service is headless, and a controller writes its EndpointSlices.
    HeadlessWithSelector,
}

/// The times of all changes, by the kind of the Service.
#[derive(Debug, Default)]
pub(super) struct Programming {
    kinds: [Histogram; KINDS.len()],
}

#[derive(Debug, Default)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS + 1],
    micros: AtomicU64,
}

// === impl Programming ===

impl Programming {
    pub(super) fn observe(&self, kind: ServiceKind, took: Duration) {
        let histogram = match kind {
            ServiceKind::ClusterIp => &self.kinds[0],
            ServiceKind::HeadlessWithSelector => &self.kinds[1],
        };
        let index = (0..BUCKETS).find(|index| took.as_secs_f64() <= bound(*index)).unwrap_or(BUCKETS);
        histogram.buckets[index].fetch_add(1, Relaxed);
        histogram.micros.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Writes the histogram of each kind that has a change.
    pub(super) fn render(&self, out: &mut String) {
        let name = "coredns_kubernetes_dns_programming_duration_seconds";
        head(out, name, "histogram", "Time from a change of endpoints until they are served");
        for (kind, histogram) in KINDS.iter().zip(&self.kinds) {
            let label = format!("service_kind=\"{kind}\"");
            // Each count is read once, so that all lines have one state.
            let counts: Vec<u64> = histogram.buckets.iter().map(|count| count.load(Relaxed)).collect();
            let total: u64 = counts.iter().sum();
            if total == 0 {
                continue;
            }
            let mut sum = 0;
            for (index, count) in counts.iter().enumerate() {
                sum += count;
                let bound = if index < BUCKETS { bound(index).to_string() } else { "+Inf".to_owned() };
                let _ = writeln!(out, "{name}_bucket{{{label},le=\"{bound}\"}} {sum}");
            }
            let seconds = Duration::from_micros(histogram.micros.load(Relaxed)).as_secs_f64();
            let _ = writeln!(out, "{name}_sum{{{label}}} {seconds}\n{name}_count{{{label}}} {total}");
        }
    }
}

fn bound(index: usize) -> f64 {
    FIRST_BUCKET_SECONDS * f64::from(1u32 << index.min(BUCKETS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_endpoints_have_the_buckets_and_kinds_of_coredns() {
        let programming = Programming::default();
        let render = || {
            let mut text = String::new();
            programming.render(&mut text);
            text
        };
        let name = "coredns_kubernetes_dns_programming_duration_seconds";
        assert!(!render().contains("_bucket"), "nothing has changed");
        programming.observe(ServiceKind::HeadlessWithSelector, Duration::from_micros(1500));
        programming.observe(ServiceKind::HeadlessWithSelector, Duration::from_secs(3600));
        let text = render();
        for line in [
            format!("# TYPE {name} histogram"),
            format!("{name}_bucket{{service_kind=\"headless_with_selector\",le=\"0.001\"}} 0"),
            format!("{name}_bucket{{service_kind=\"headless_with_selector\",le=\"0.002\"}} 1"),
            format!("{name}_bucket{{service_kind=\"headless_with_selector\",le=\"524.288\"}} 1"),
            format!("{name}_bucket{{service_kind=\"headless_with_selector\",le=\"+Inf\"}} 2"),
            format!("{name}_sum{{service_kind=\"headless_with_selector\"}} 3600.0015"),
            format!("{name}_count{{service_kind=\"headless_with_selector\"}} 2"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!text.contains("cluster_ip"), "{text}");
        programming.observe(ServiceKind::ClusterIp, Duration::ZERO);
        let line = format!("{name}_bucket{{service_kind=\"cluster_ip\",le=\"0.001\"}} 1");
        assert!(render().lines().any(|found| found == line));
    }
}

//! The metrics of zones of nodes, in the text format of Prometheus. Source: `pkg/controller/nodelifecycle/metrics.go`.
//!
//! Only zones with nodes have values, so the number of zones is at most the number of nodes.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_values::metric_label::escaped;

/// Counts the nodes and the evictions of zones. A clone shares the counts.
#[derive(Clone, Debug, Default)]
pub struct ZoneMetrics(Arc<Mutex<BTreeMap<String, Counts>>>);

/// The nodes of a zone.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ZoneNodes {
    /// Number of nodes.
    pub(crate) nodes: usize,
    /// Number of nodes that are not ready.
    pub(crate) unready: usize,
}

#[derive(Debug, Default)]
struct Counts {
    nodes: ZoneNodes,
    evictions: u64,
}

// === impl ZoneMetrics ===

impl ZoneMetrics {
    /// Sets the zones with their nodes. A zone has the form `REGION/ZONE`.
    pub(crate) fn set<'a>(&self, zones: impl Iterator<Item = (&'a str, ZoneNodes)>) {
        let mut counts = self.lock();
        let mut former = std::mem::take(&mut *counts);
        counts.extend(zones.map(|(zone, nodes)| {
            let evictions = former.remove(zone).unwrap_or_default().evictions;
            (zone.to_owned(), Counts { nodes, evictions })
        }));
    }

    /// Counts a node that got a NoExecute taint.
    pub(crate) fn evicted(&self, zone: &str) {
        if let Some(counts) = self.lock().get_mut(zone) {
            counts.evictions += 1;
        }
    }

    /// All metrics in the text format of Prometheus. Empty if there was no node yet.
    #[must_use]
    pub fn text(&self) -> String {
        let counts = self.lock();
        let mut text = String::new();
        let evictions = counts.iter().map(|(zone, counts)| (zone.as_str(), counts.evictions));
        let help = "Number of nodes that got a NoExecute taint.";
        write(&mut text, "evictions_total", "counter", help, evictions);
        let nodes = counts.iter().map(|(zone, counts)| (zone.as_str(), counts.nodes.nodes));
        write(&mut text, "zone_size", "gauge", "Number of registered nodes in a zone.", nodes);
        let health = counts.iter().map(|(zone, counts)| (zone.as_str(), counts.nodes.ready_percent()));
        write(&mut text, "zone_health", "gauge", "Percentage of ready nodes in a zone.", health);
        let unready = counts.iter().map(|(zone, counts)| (zone.as_str(), counts.nodes.unready));
        let help = "Number of nodes in a zone that are not ready.";
        write(&mut text, "unhealthy_nodes_in_zone", "gauge", help, unready);
        text
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Counts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl ZoneNodes ===

impl ZoneNodes {
    /// Percentage of the nodes that are ready. 100 without nodes.
    #[expect(clippy::cast_precision_loss, reason = "a cluster has less than 2^53 nodes")]
    fn ready_percent(self) -> f64 {
        let ready = self.nodes.saturating_sub(self.unready);
        if self.nodes == 0 { 100.0 } else { 100.0 * ready as f64 / self.nodes as f64 }
    }
}

fn write<'a, V: Display>(
    text: &mut String,
    name: &str,
    kind: &str,
    help: &str,
    values: impl ExactSizeIterator<Item = (&'a str, V)>,
) {
    let number = values.len();
    if number > 0 {
        // Writing to memory cannot fail.
        let _ = writeln!(text, "# HELP node_collector_{name} {help}\n# TYPE node_collector_{name} {kind}");
    }
    for (zone, value) in values {
        let _ = writeln!(text, "node_collector_{name}{{zone=\"{}\"}} {value}", label(zone));
    }
}

/// The zone in upstream's form: empty without region and zone, otherwise `REGION:\0:ZONE` with a null character. The
/// function escapes the labels, because another API server may not validate them.
fn label(zone: &str) -> String {
    match zone.split_once('/') {
        Some(("", "")) | None => String::new(),
        Some((region, zone)) => [region, zone].map(escaped).join(":\0:"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_have_their_nodes_and_evictions() {
        let metrics = ZoneMetrics::default();
        assert_eq!(metrics.text(), "");
        let nodes = |nodes, unready| ZoneNodes { nodes, unready };
        metrics.set([("/", nodes(1, 0)), ("r/a", nodes(3, 0))].into_iter());
        metrics.evicted("r/a");
        metrics.evicted("gone/b");
        metrics.set([("r/a", nodes(4, 1)), ("/x\"\n", nodes(1, 1))].into_iter());
        metrics.evicted("r/a");
        let text = metrics.text();
        for line in [
            "# TYPE node_collector_evictions_total counter",
            "node_collector_evictions_total{zone=\"r:\0:a\"} 2",
            "node_collector_evictions_total{zone=\":\0:x\\\"\\n\"} 0",
            "# TYPE node_collector_zone_size gauge",
            "node_collector_zone_size{zone=\"r:\0:a\"} 4",
            "# TYPE node_collector_zone_health gauge",
            "node_collector_zone_health{zone=\"r:\0:a\"} 75",
            "node_collector_zone_health{zone=\":\0:x\\\"\\n\"} 0",
            "# TYPE node_collector_unhealthy_nodes_in_zone gauge",
            "node_collector_unhealthy_nodes_in_zone{zone=\"r:\0:a\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        assert!(!text.contains("zone=\"\""), "the zone has no nodes any more: {text}");
        metrics.set([("/", nodes(0, 0))].into_iter());
        assert!(metrics.text().contains("node_collector_zone_health{zone=\"\"} 100\n"), "{}", metrics.text());
        assert!(
            metrics.text().contains("node_collector_evictions_total{zone=\"\"} 0\n"),
            "{}",
            metrics.text()
        );
    }
}

//! The metrics of EndpointSlices, in the text format of Prometheus. Source: `k8s.io/endpointslice/metrics`.
//!
//! The numbers of each service are kept. The sums over all services are computed when the metrics are read.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::metric_text::{Histogram, head, line};
use crate::object::Key;

/// Upper bounds of the numbers of endpoints that a reconcile adds or removes.
const ENDPOINTS: [f64; 15] =
    [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0];
/// The values of `trafficDistribution`.
const DISTRIBUTIONS: [&str; 3] = ["PreferClose", "PreferSameZone", "PreferSameNode"];
const PREFIX: &str = "endpoint_slice_controller";

/// Counts the work on EndpointSlices. A clone shares the counts.
#[derive(Clone, Debug, Default)]
pub struct EndpointSliceMetrics(Arc<Mutex<Counts>>);

/// A reconcile of a service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceSync<'a> {
    /// Number of endpoints that the service gets.
    pub(crate) added: usize,
    /// Number of endpoints that the service loses.
    pub(crate) removed: usize,
    /// Number of endpoints.
    pub(crate) endpoints: usize,
    /// Number of slices.
    pub(crate) slices: usize,
    /// Number of slices if all slices except the last were full.
    pub(crate) full_slices: usize,
    /// The field `trafficDistribution`. Also `None` if the service has topology hints.
    pub(crate) distribution: Option<&'a str>,
}

/// Numbers of slices that were written.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SliceWrites {
    pub(crate) created: u64,
    pub(crate) updated: u64,
    pub(crate) deleted: u64,
}

#[derive(Debug, Default)]
struct Counts {
    added: Histogram,
    removed: Histogram,
    writes: SliceWrites,
    services: BTreeMap<Key, ServiceSlices>,
}

/// The slices of a service.
#[derive(Debug)]
struct ServiceSlices {
    endpoints: usize,
    slices: usize,
    full_slices: usize,
    distribution: Option<&'static str>,
}

// === impl EndpointSliceMetrics ===

impl EndpointSliceMetrics {
    /// Counts a reconcile of a service.
    pub(crate) fn synced(&self, service: &Key, sync: &ServiceSync<'_>) {
        let ServiceSync { added, removed, endpoints, slices, full_slices, distribution } = *sync;
        let known = |value: &str| DISTRIBUTIONS.into_iter().find(|known| *known == value);
        let distribution = distribution.map(|value| known(value).unwrap_or("ImplementationSpecific"));
        let mut counts = self.lock();
        counts.added.observe(&ENDPOINTS, float(added));
        counts.removed.observe(&ENDPOINTS, float(removed));
        let of_service = ServiceSlices { endpoints, slices, full_slices, distribution };
        counts.services.insert(service.clone(), of_service);
    }

    /// Counts written slices.
    pub(crate) fn wrote(&self, writes: SliceWrites) {
        let mut counts = self.lock();
        let total = &mut counts.writes;
        total.created += writes.created;
        total.updated += writes.updated;
        total.deleted += writes.deleted;
    }

    /// Removes a service that has no slices of this controller.
    pub(crate) fn forget(&self, service: &Key) {
        self.lock().services.remove(service);
    }

    /// Removes all services, before the first reconcile of a leadership term.
    pub(crate) fn forget_all(&self) {
        self.lock().services.clear();
    }

    /// All metrics in the text format of Prometheus. Empty if there was no service yet.
    #[must_use]
    pub fn text(&self) -> String {
        let counts = self.lock();
        let mut text = String::new();
        if counts.added.count == 0 {
            return text;
        }
        for (name, help, histogram) in [
            ("endpoints_added_per_sync", "Number of endpoints that a service gets.", &counts.added),
            ("endpoints_removed_per_sync", "Number of endpoints that a service loses.", &counts.removed),
        ] {
            let name = format!("{PREFIX}_{name}");
            head(&mut text, &name, "histogram", help, 1);
            histogram.write(&mut text, &name, "", &ENDPOINTS);
        }
        let name = format!("{PREFIX}_changes");
        head(&mut text, &name, "counter", "Number of written EndpointSlices.", 1);
        let SliceWrites { created, updated, deleted } = counts.writes;
        for (operation, count) in [("create", created), ("update", updated), ("delete", deleted)] {
            line(&mut text, &name, &format!("operation=\"{operation}\""), count);
        }
        counts.write_services(&mut text);
        text
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Counts ===

impl Counts {
    fn write_services(&self, text: &mut String) {
        let sum = |of: fn(&ServiceSlices) -> usize| self.services.values().map(of).sum::<usize>();
        for (name, help, value) in [
            ("endpoints_desired", "Number of endpoints of all services.", sum(|one| one.endpoints)),
            ("num_endpoint_slices", "Number of EndpointSlices of all services.", sum(|one| one.slices)),
            (
                "desired_endpoint_slices",
                "Number of EndpointSlices if all but the last one of a service were full.",
                sum(|one| one.full_slices),
            ),
        ] {
            let name = format!("{PREFIX}_{name}");
            head(text, &name, "gauge", help, 1);
            line(text, &name, "", number(value));
        }
        let mut distributions = BTreeMap::<&str, u64>::new();
        for distribution in self.services.values().filter_map(|one| one.distribution) {
            *distributions.entry(distribution).or_default() += 1;
        }
        let name = format!("{PREFIX}_services_count_by_traffic_distribution");
        head(text, &name, "gauge", "Number of services with a trafficDistribution.", distributions.len());
        for (distribution, count) in distributions {
            line(text, &name, &format!("traffic_distribution=\"{distribution}\""), count);
        }
    }
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "a service has less than 2^53 endpoints")]
fn float(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_all_services_are_sums_and_a_reconcile_replaces_its_numbers() {
        let metrics = EndpointSliceMetrics::default();
        assert_eq!(metrics.text(), "");
        let sync = |added, endpoints, distribution| ServiceSync {
            added,
            removed: 1,
            endpoints,
            slices: 3,
            full_slices: 2,
            distribution,
        };
        let service = |name: &str| Key::new("n", name);
        metrics.synced(&service("a"), &sync(5, 5, None));
        metrics.synced(&service("a"), &sync(3, 8, Some("PreferClose")));
        metrics.synced(&service("b"), &sync(0, 1, Some("example.com/other")));
        metrics.synced(&service("c"), &sync(0, 1, Some("PreferClose")));
        metrics.forget(&service("c"));
        metrics.wrote(SliceWrites { created: 2, updated: 1, deleted: 0 });
        let text = metrics.text();
        for line in [
            "# TYPE endpoint_slice_controller_endpoints_added_per_sync histogram",
            "endpoint_slice_controller_endpoints_added_per_sync_bucket{le=\"2\"} 2",
            "endpoint_slice_controller_endpoints_added_per_sync_bucket{le=\"4\"} 3",
            "endpoint_slice_controller_endpoints_added_per_sync_bucket{le=\"32768\"} 4",
            "endpoint_slice_controller_endpoints_added_per_sync_sum{} 8",
            "endpoint_slice_controller_endpoints_removed_per_sync_count{} 4",
            "# TYPE endpoint_slice_controller_changes counter",
            "endpoint_slice_controller_changes{operation=\"create\"} 2",
            "# TYPE endpoint_slice_controller_endpoints_desired gauge",
            "endpoint_slice_controller_endpoints_desired{} 9",
            "endpoint_slice_controller_num_endpoint_slices{} 6",
            "endpoint_slice_controller_desired_endpoint_slices{} 4",
            "endpoint_slice_controller_services_count_by_traffic_distribution{traffic_distribution=\"PreferClose\"} 1",
            "endpoint_slice_controller_services_count_by_traffic_distribution{traffic_distribution=\"ImplementationSpecific\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        metrics.forget_all();
        assert!(metrics.text().contains("endpoint_slice_controller_endpoints_desired{} 0\n"));
    }
}

//! Metrics of the API services of other servers. Source: `k8s.io/kube-aggregator/pkg/controllers/status/metrics`.

use std::collections::BTreeSet;

use coracle_kinds::kind::by_resource;
use prometheus::{IntCounterVec, IntGaugeVec, core::Collector};

use super::{counter, gauge};
use crate::{aggregation::Remotes, cache::Cache};

/// Counts API services that become unavailable. The names are names of APIService objects.
pub(crate) struct RemoteMetrics {
    failures: IntCounterVec,
}

// === impl RemoteMetrics ===

impl RemoteMetrics {
    pub(super) fn new() -> Self {
        let name = "aggregator_unavailable_apiservice_total";
        let help = "Counter of APIServices which are marked as unavailable broken down by APIService name and reason.";
        Self { failures: counter(name, help, &["name", "reason"]) }
    }

    pub(super) fn collector(&self) -> Box<dyn Collector> {
        Box::new(self.failures.clone())
    }

    /// Counts an API service that was available and is marked as unavailable.
    pub(crate) fn unavailable(&self, name: &str, reason: &'static str) {
        self.failures.with_label_values(&[name, reason]).inc();
    }

    /// Removes the counts of an API service that does not exist any more.
    pub(crate) fn forget(&self, name: &str, reasons: &[&'static str]) {
        for reason in reasons {
            // An error means that the reason has not occurred.
            let _ = self.failures.remove_label_values(&[name, *reason]);
        }
    }
}

/// A gauge for each APIService: 1 if the server is unavailable, otherwise 0. Local APIServices are always available.
pub(super) fn current(remotes: &Remotes, cache: &Cache) -> IntGaugeVec {
    let all = gauge(
        "aggregator_unavailable_apiservice",
        "Gauge of APIServices which are marked as unavailable broken down by APIService name.",
        &["name"],
    );
    let remotes = remotes.current();
    let unavailable = remotes.values().filter(|remote| !remote.is_available());
    let unavailable: BTreeSet<String> = unavailable.map(|remote| remote.object_name()).collect();
    let kind = by_resource("apiregistration.k8s.io", "v1", "apiservices");
    for object in kind.into_iter().flat_map(|kind| cache.list(kind, "")) {
        all.with_label_values(&[object.name()]).set(unavailable.contains(object.name()).into());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_end_with_their_api_service() {
        let metrics = RemoteMetrics::new();
        for name in ["v1.a", "v1.b"] {
            metrics.unavailable(name, "ServiceNotFound");
        }
        metrics.forget("v1.a", &["ServiceNotFound", "MissingEndpoints"]);
        let families = metrics.failures.collect();
        let left: Vec<&str> =
            families[0].get_metric().iter().map(|metric| metric.get_label()[0].value()).collect();
        assert_eq!(left, ["v1.b"]);
    }
}

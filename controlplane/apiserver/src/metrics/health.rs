//! `/metrics/slis`: results of health checks. Source: `prometheus/slis` of `k8s.io/component-base`.

use prometheus::{IntCounterVec, IntGaugeVec, Registry};

use super::{counter, encoded, gauge, valid};

/// Results of health checks. All label values are names in this program.
pub(crate) struct HealthMetrics {
    registry: Registry,
    last: IntGaugeVec,
    total: IntCounterVec,
}

// === impl HealthMetrics ===

impl HealthMetrics {
    pub(super) fn new() -> Self {
        let metrics = Self {
            registry: Registry::new(),
            last: gauge(
                "kubernetes_healthcheck",
                "This metric records the result of a single healthcheck.",
                &["name", "type"],
            ),
            total: counter(
                "kubernetes_healthchecks_total",
                "This metric records the results of all healthcheck.",
                &["name", "status", "type"],
            ),
        };
        valid(metrics.registry.register(Box::new(metrics.last.clone())));
        valid(metrics.registry.register(Box::new(metrics.total.clone())));
        metrics
    }

    /// Records the result of a check below an endpoint: `healthz`, `livez` or `readyz`.
    pub(crate) fn observe(&self, name: &'static str, endpoint: &'static str, has_passed: bool) {
        self.last.with_label_values(&[name, endpoint]).set(has_passed.into());
        let status = if has_passed { "success" } else { "error" };
        self.total.with_label_values(&[name, status, endpoint]).inc();
    }

    pub(super) fn text(&self) -> Vec<u8> {
        encoded(self.registry.gather())
    }
}

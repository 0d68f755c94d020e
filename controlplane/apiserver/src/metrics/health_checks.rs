//! `/metrics/slis`: the results of health checks, with upstream's names. They are counted when a client asks for checks.

use prometheus::{Encoder as _, IntCounterVec, IntGaugeVec, Registry, TextEncoder};

use super::{TEXT, counter, gauge, valid};
use crate::reply::{self, Reply};

/// Path of these metrics.
pub(crate) const PATH: &str = "/metrics/slis";

/// The results of health checks.
pub(crate) struct HealthChecks {
    registry: Registry,
    last: IntGaugeVec,
    all: IntCounterVec,
}

// === impl HealthChecks ===

impl HealthChecks {
    pub(super) fn new() -> Self {
        let checks = Self {
            registry: Registry::new(),
            last: gauge(
                "kubernetes_healthcheck",
                "This metric records the result of a single healthcheck.",
                &["name", "type"],
            ),
            all: counter(
                "kubernetes_healthchecks_total",
                "This metric records the results of all healthcheck.",
                &["name", "type", "status"],
            ),
        };
        valid(checks.registry.register(Box::new(checks.last.clone())));
        valid(checks.registry.register(Box::new(checks.all.clone())));
        checks
    }

    /// Counts the result of a check of `healthz`, `livez` or `readyz`. Both names come from the server.
    pub(crate) fn checked(&self, name: &str, kind: &str, is_healthy: bool) {
        let status = if is_healthy { "success" } else { "error" };
        self.last.with_label_values(&[name, kind]).set(i64::from(is_healthy));
        self.all.with_label_values(&[name, kind, status]).inc();
    }

    pub(super) fn reply(&self) -> Reply {
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            tracing::warn!(%error, "cannot encode the metrics of health checks");
        }
        reply::bytes(200, TEXT, text)
    }
}

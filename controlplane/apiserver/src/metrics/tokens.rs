//! Metrics of service account tokens with an extended validity. Source:
//! `k8s.io/kubernetes/pkg/serviceaccount/metrics.go`.

use prometheus::{IntCounterVec, core::Collector};

use super::counter;

/// Uses of extended tokens: before and after the time at which they would expire without the extension.
pub(crate) struct TokenMetrics {
    valid: IntCounterVec,
    stale: IntCounterVec,
}

// === impl TokenMetrics ===

impl TokenMetrics {
    pub(super) fn new() -> Self {
        let metrics = Self {
            valid: counter(
                "serviceaccount_valid_tokens_total",
                "Cumulative valid projected service account tokens used",
                &[],
            ),
            stale: counter(
                "serviceaccount_stale_tokens_total",
                "Cumulative stale projected service account tokens used",
                &[],
            ),
        };
        // The numbers are present before the first use.
        for count in [&metrics.valid, &metrics.stale] {
            count.with_label_values::<&str>(&[]);
        }
        metrics
    }

    pub(super) fn collectors(&self) -> [Box<dyn Collector>; 2] {
        [Box::new(self.valid.clone()), Box::new(self.stale.clone())]
    }

    /// Counts a request with an extended token.
    pub(crate) fn used(&self, is_stale: bool) {
        let count = if is_stale { &self.stale } else { &self.valid };
        count.with_label_values::<&str>(&[]).inc();
    }
}

//! Metrics of validating admission policies. Source: `apiserver/pkg/admission/plugin/policy/validating/metrics`.
//!
//! As upstream, only failed validations are counted, once for each action of the binding. Errors that the failure
//! policy ignores are not counted here.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec, core::Collector};

use super::{buckets::POLICY_DURATIONS, counter, histogram, known_names::KnownNames};

/// Maximum number of bindings with their own label. Further bindings have the label `other`.
const MAX_BINDINGS: usize = 200;
const LABELS: [&str; 4] = ["policy", "policy_binding", "error_type", "enforcement_action"];

/// Failed validations.
pub(crate) struct PolicyMetrics {
    checks: IntCounterVec,
    durations: HistogramVec,
    names: KnownNames,
}

/// The reason why a validation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// An expression does not compile.
    Compilation,
    /// An expression is false, or its evaluation failed.
    Invalid,
    /// The cost limit stopped the evaluation.
    OutOfBudget,
}

/// A validation of a policy that failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailedValidation<'a> {
    pub(crate) policy: &'a str,
    pub(crate) binding: &'a str,
    pub(crate) kind: FailureKind,
    /// `deny`, `audit` or `warn`.
    pub(crate) action: &'static str,
}

// === impl PolicyMetrics ===

impl PolicyMetrics {
    pub(super) fn new() -> Self {
        let name = |suffix: &str| format!("apiserver_validating_admission_policy_check_{suffix}");
        Self {
            checks: counter(
                &name("total"),
                "Number of failed validations of admission policies by binding, error and action.",
                &LABELS,
            ),
            durations: histogram(
                &name("duration_seconds"),
                "Duration of the evaluation of a validating admission policy in seconds.",
                &POLICY_DURATIONS,
                &LABELS,
            ),
            names: KnownNames::new(MAX_BINDINGS),
        }
    }

    pub(super) fn collectors(&self) -> [Box<dyn Collector>; 2] {
        [Box::new(self.checks.clone()), Box::new(self.durations.clone())]
    }

    /// Counts a failed validation.
    pub(crate) fn failed(&self, failed: FailedValidation<'_>, took: Duration) {
        let FailedValidation { policy, binding, kind, action } = failed;
        let error = match kind {
            FailureKind::Compilation => "compile_error",
            FailureKind::Invalid => "invalid_error",
            FailureKind::OutOfBudget => "out_of_budget",
        };
        let is_known = self.names.has(&format!("{policy}/{binding}"));
        let [policy, binding] = if is_known { [policy, binding] } else { ["other"; 2] };
        let labels = [policy, binding, error, action];
        self.checks.with_label_values(&labels).inc();
        self.durations.with_label_values(&labels).observe(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bindings_above_the_limit_share_a_label() {
        let metrics = PolicyMetrics::new();
        let failed = |binding: &str, kind, action| {
            metrics.failed(FailedValidation { policy: "p", binding, kind, action }, Duration::ZERO);
        };
        for index in 0..=MAX_BINDINGS {
            failed(&format!("b{index}"), FailureKind::Invalid, "warn");
        }
        failed("b0", FailureKind::OutOfBudget, "deny");
        let count = |labels: [&str; 4]| metrics.checks.with_label_values(&labels).get();
        assert_eq!(count(["p", "b0", "invalid_error", "warn"]), 1);
        assert_eq!(count(["p", "b0", "out_of_budget", "deny"]), 1);
        assert_eq!(count(["other", "other", "invalid_error", "warn"]), 1);
    }
}

//! Metrics of validating admission policies. Source: `apiserver/pkg/admission/plugin/policy/validating/metrics`.
//!
//! Upstream counts each validation. Here a policy that denies nothing is counted once for each binding and parameter.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec, core::Collector};

use super::{buckets::POLICY_DURATIONS, counter, histogram, known_names::KnownNames};

/// Maximum number of bindings with their own label. Further ones have the label `other`.
const MAX_BINDINGS: usize = 200;
const LABELS: [&str; 4] = ["policy", "policy_binding", "error_type", "enforcement_action"];

/// Evaluations of policies.
pub(crate) struct PolicyMetrics {
    checks: IntCounterVec,
    durations: HistogramVec,
    names: KnownNames,
}

/// The result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CheckResult {
    /// No validation failed.
    Passed,
    /// A validation failed, or could not be evaluated.
    Failed,
    /// The cost limit stopped the evaluation.
    OutOfBudget,
}

// === impl PolicyMetrics ===

impl PolicyMetrics {
    pub(super) fn new() -> Self {
        let name = |suffix: &str| format!("apiserver_validating_admission_policy_check_{suffix}");
        Self {
            checks: counter(
                &name("total"),
                "Number of evaluations of validating admission policies by binding, error and action.",
                &LABELS,
            ),
            durations: histogram(
                &name("duration_seconds"),
                "Duration of the evaluation of a validating admission policy in seconds.",
                (&POLICY_DURATIONS, &LABELS),
            ),
            names: KnownNames::new(MAX_BINDINGS),
        }
    }

    pub(super) fn collectors(&self) -> [Box<dyn Collector>; 2] {
        [Box::new(self.checks.clone()), Box::new(self.durations.clone())]
    }

    /// Counts an evaluation. `action`: `allow`, `deny`, `audit` or `warn`.
    pub(crate) fn checked(
        &self,
        (policy, binding): (&str, &str),
        (result, action): (CheckResult, &'static str),
        took: Duration,
    ) {
        let error = match result {
            CheckResult::Passed => "no_error",
            CheckResult::Failed => "invalid_error",
            CheckResult::OutOfBudget => "out_of_budget",
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
        for index in 0..=MAX_BINDINGS {
            metrics.checked(("p", &format!("b{index}")), (CheckResult::Passed, "allow"), Duration::ZERO);
        }
        metrics.checked(("p", "b0"), (CheckResult::OutOfBudget, "deny"), Duration::ZERO);
        let count = |labels: [&str; 4]| metrics.checks.with_label_values(&labels).get();
        assert_eq!(count(["p", "b0", "no_error", "allow"]), 1);
        assert_eq!(count(["p", "b0", "out_of_budget", "deny"]), 1);
        assert_eq!(count(["other", "other", "no_error", "allow"]), 1);
    }
}

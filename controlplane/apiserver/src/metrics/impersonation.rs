//! Metrics of impersonation. Source: `k8s.io/apiserver/pkg/endpoints/filters/impersonation/metrics`.

use prometheus::core::Collector;

use super::{buckets::ACCESS_DURATIONS, counter, histogram};
use crate::authz::impersonation::{Counted, ImpersonationCounts};

const LABELS: [&str; 2] = ["mode", "decision"];

/// Empty counts with the names of upstream.
pub(super) fn counts() -> ImpersonationCounts {
    let durations = |name: &str, help: &str| histogram(name, help, &ACCESS_DURATIONS, &LABELS);
    ImpersonationCounts {
        attempts: Counted {
            number: counter(
                "apiserver_impersonation_attempts_total",
                "Number of requests that impersonate a user, by mode and decision.",
                &LABELS,
            ),
            durations: durations(
                "apiserver_impersonation_attempts_duration_seconds",
                "Duration of the decisions on impersonations in seconds, by mode and decision.",
            ),
        },
        checks: Counted {
            number: counter(
                "apiserver_impersonation_authorization_attempts_total",
                "Number of authorization checks for impersonations, by mode and decision.",
                &LABELS,
            ),
            durations: durations(
                "apiserver_impersonation_authorization_attempts_duration_seconds",
                "Duration of authorization checks for impersonations in seconds, by mode and decision.",
            ),
        },
    }
}

pub(super) fn collectors(counts: &ImpersonationCounts) -> [Box<dyn Collector>; 4] {
    [
        Box::new(counts.attempts.number.clone()),
        Box::new(counts.attempts.durations.clone()),
        Box::new(counts.checks.number.clone()),
        Box::new(counts.checks.durations.clone()),
    ]
}

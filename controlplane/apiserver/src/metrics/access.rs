//! Metrics of authentication and authorization. Source: `k8s.io/apiserver/pkg/endpoints/filters/metrics.go`.
//!
//! The samples exist from the start, so a request changes only atomic numbers.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, core::Collector};

use super::{buckets::ACCESS_DURATIONS, counter, histogram};
use crate::{
    authn::User,
    authz::{Decision, Verdict},
    error::Result,
};

/// Results of authentications.
const AUTHENTICATIONS: [&str; 2] = ["success", "failure"];
/// Results of authorization checks.
const AUTHORIZATIONS: [&str; 3] = ["allowed", "denied", "no-opinion"];

/// Counts authentications and authorization checks of requests.
pub(crate) struct AccessMetrics {
    authentications: Results<{ AUTHENTICATIONS.len() }>,
    authorizations: Results<{ AUTHORIZATIONS.len() }>,
}

/// Numbers and durations by result.
struct Results<const N: usize> {
    attempts: IntCounterVec,
    durations: HistogramVec,
    each: [(IntCounter, Histogram); N],
}

// === impl AccessMetrics ===

impl AccessMetrics {
    pub(super) fn new() -> Self {
        let durations = |name: &str, help: &str| histogram(name, help, &ACCESS_DURATIONS, &["result"]);
        Self {
            authentications: Results::new(
                counter("authentication_attempts", "Counter of authenticated attempts.", &["result"]),
                durations(
                    "authentication_duration_seconds",
                    "Authentication duration in seconds broken out by result.",
                ),
                AUTHENTICATIONS,
            ),
            authorizations: Results::new(
                counter(
                    "authorization_attempts_total",
                    "Counter of authorization attempts broken down by result.",
                    &["result"],
                ),
                durations(
                    "authorization_duration_seconds",
                    "Authorization duration in seconds broken out by result.",
                ),
                AUTHORIZATIONS,
            ),
        }
    }

    pub(super) fn collectors(&self) -> [Box<dyn Collector>; 4] {
        [
            Box::new(self.authentications.attempts.clone()),
            Box::new(self.authentications.durations.clone()),
            Box::new(self.authorizations.attempts.clone()),
            Box::new(self.authorizations.durations.clone()),
        ]
    }

    /// Counts an authentication of a request from the network. Anonymous requests are not counted.
    ///
    /// # Errors
    /// The errors of the authentication.
    pub(crate) async fn authentication(&self, work: impl Future<Output = Result<User>>) -> Result<User> {
        let began = Instant::now();
        let identified = work.await;
        let is_anonymous = identified.as_ref().is_ok_and(User::is_anonymous);
        if !is_anonymous {
            let result = if identified.is_ok() { "success" } else { "failure" };
            self.authentications.observe(&AUTHENTICATIONS, result, began.elapsed());
        }
        identified
    }

    /// Counts an authorization check of a request.
    pub(crate) async fn authorization(&self, work: impl Future<Output = Decision>) -> Decision {
        let began = Instant::now();
        let decision = work.await;
        let result = match decision.verdict {
            Verdict::Allow => "allowed",
            Verdict::Deny => "denied",
            Verdict::NoOpinion => "no-opinion",
        };
        self.authorizations.observe(&AUTHORIZATIONS, result, began.elapsed());
        decision
    }
}

// === impl Results ===

impl<const N: usize> Results<N> {
    fn new(attempts: IntCounterVec, durations: HistogramVec, results: [&str; N]) -> Self {
        let each = results
            .map(|result| (attempts.with_label_values(&[result]), durations.with_label_values(&[result])));
        Self { attempts, durations, each }
    }

    fn observe(&self, results: &[&str; N], result: &str, took: Duration) {
        for ((number, times), _) in self.each.iter().zip(results).filter(|(_, known)| **known == result) {
            number.inc();
            times.observe(took.as_secs_f64());
        }
    }
}

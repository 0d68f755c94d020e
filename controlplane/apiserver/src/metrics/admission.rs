//! Metrics of admission: its steps, and the calls of webhooks. Source: `k8s.io/apiserver/pkg/admission/metrics`.

use std::time::Duration;

use prometheus::{Histogram, HistogramVec, IntCounterVec, core::Collector};

use super::{
    buckets::{STEP_DURATIONS, WEBHOOK_DURATIONS},
    counter, histogram,
    known_names::KnownNames,
};

/// Maximum number of webhooks with their own label. Further webhooks have the label `other`.
const MAX_WEBHOOKS: usize = 200;

/// Metrics of admission.
pub(crate) struct AdmissionMetrics {
    steps: HistogramVec,
    plugins: HistogramVec,
    webhooks: HistogramVec,
    refusals: IntCounterVec,
    failures: IntCounterVec,
    /// Names of webhooks with their own label.
    webhook_names: KnownNames,
}

/// A step of admission.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// The mutating plugins.
    Admit,
    /// The validating plugins.
    Validate,
}

/// Labels of a call of a webhook.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WebhookCall<'a> {
    pub(crate) name: &'a str,
    pub(crate) step: Step,
    /// `CREATE`, `UPDATE`, `DELETE` or `CONNECT`.
    pub(crate) operation: &'static str,
}

// === impl AdmissionMetrics ===

impl AdmissionMetrics {
    pub(super) fn new() -> Self {
        Self {
            steps: histogram(
                "apiserver_admission_step_admission_duration_seconds",
                "Duration of the steps of admission in seconds, by the type of the step and the operation.",
                &STEP_DURATIONS,
                &["type", "operation", "rejected"],
            ),
            plugins: histogram(
                "apiserver_admission_controller_admission_duration_seconds",
                "Duration of single admission plugins in seconds, by name, type of the step and operation.",
                &STEP_DURATIONS,
                &["name", "type", "operation", "rejected"],
            ),
            webhooks: histogram(
                "apiserver_admission_webhook_admission_duration_seconds",
                "Duration of the calls of admission webhooks in seconds, by name, type and operation.",
                &WEBHOOK_DURATIONS,
                &["name", "type", "operation", "rejected"],
            ),
            refusals: counter(
                "apiserver_admission_webhook_rejection_count",
                "Number of requests that admission webhooks rejected, by name, type and operation. error_type is \
                 calling_webhook_error if the call failed.",
                &["name", "type", "operation", "error_type", "rejection_code"],
            ),
            failures: counter(
                "apiserver_admission_webhook_fail_open_count",
                "Number of failed calls of admission webhooks that did not reject the request, by name and type.",
                &["name", "type"],
            ),
            webhook_names: KnownNames::new(MAX_WEBHOOKS),
        }
    }

    pub(super) fn collectors(&self) -> [Box<dyn Collector>; 5] {
        [
            Box::new(self.steps.clone()),
            Box::new(self.plugins.clone()),
            Box::new(self.webhooks.clone()),
            Box::new(self.refusals.clone()),
            Box::new(self.failures.clone()),
        ]
    }

    /// Counts a step of the admission of one object.
    pub(crate) fn step(&self, step: Step, operation: &str, rejected: bool, took: Duration) {
        let labels = [step.name(), operation, flag(rejected)];
        self.steps.with_label_values(&labels).observe(took.as_secs_f64());
    }

    /// The durations of a plugin. `name` is one of the names in this program.
    pub(crate) fn plugin_durations(
        &self,
        name: &'static str,
        step: Step,
        operation: &'static str,
        rejected: bool,
    ) -> Histogram {
        self.plugins.with_label_values(&[name, step.name(), operation, flag(rejected)])
    }

    /// Counts a call of a webhook.
    pub(crate) fn called(&self, call: WebhookCall<'_>, rejected: bool, took: Duration) {
        let labels = [self.webhook_label(call.name), call.kind(), call.operation, flag(rejected)];
        self.webhooks.with_label_values(&labels).observe(took.as_secs_f64());
    }

    /// Counts a request that a webhook rejected, with this HTTP code. `None` if the call failed.
    pub(crate) fn rejected(&self, call: WebhookCall<'_>, code: Option<u16>) {
        let kind = if code.is_some() { "no_error" } else { "calling_webhook_error" };
        // Webhooks choose the code; larger codes count as 600, as upstream.
        let code = code.map_or(0, |code| code.min(600)).to_string();
        let labels = [self.webhook_label(call.name), call.kind(), call.operation, kind, code.as_str()];
        self.refusals.with_label_values(&labels).inc();
    }

    /// Counts a failed call of a webhook that did not reject the request.
    pub(crate) fn failed_open(&self, call: WebhookCall<'_>) {
        self.failures.with_label_values(&[self.webhook_label(call.name), call.kind()]).inc();
    }

    /// The label of a webhook. Webhooks can be replaced without a limit, so the number of labels needs a limit.
    fn webhook_label<'a>(&self, name: &'a str) -> &'a str {
        if self.webhook_names.has(name) { name } else { "other" }
    }
}

// === impl Step ===

impl Step {
    /// The type of the step, as upstream names it.
    fn name(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Validate => "validate",
        }
    }
}

// === impl WebhookCall ===

impl WebhookCall<'_> {
    /// The type of the webhook, as upstream names it.
    fn kind(&self) -> &'static str {
        match self.step {
            Step::Admit => "admit",
            Step::Validate => "validating",
        }
    }
}

fn flag(value: bool) -> &'static str {
    if value { "true" } else { "false" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call<'a>(name: &'a str, operation: &'static str) -> WebhookCall<'a> {
        WebhookCall { name, step: Step::Validate, operation }
    }

    #[test]
    fn a_webhook_keeps_its_label_when_there_are_too_many_others() {
        let metrics = AdmissionMetrics::new();
        let count_call =
            |name: &str, operation| metrics.called(call(name, operation), false, Duration::from_millis(1));
        for index in 0..=MAX_WEBHOOKS {
            count_call(&format!("hook-{index}"), "CREATE");
        }
        count_call("hook-0", "CREATE");
        count_call("hook-0", "UPDATE");
        let count = |name: &str, operation: &str| {
            metrics.webhooks.with_label_values(&[name, "validating", operation, "false"]).get_sample_count()
        };
        assert_eq!([count("hook-0", "CREATE"), count("hook-0", "UPDATE")], [2, 1]);
        assert_eq!(count("other", "CREATE"), 1);
    }

    #[test]
    fn the_code_of_a_rejection_has_a_limit() {
        let metrics = AdmissionMetrics::new();
        metrics.rejected(call("hook", "CREATE"), Some(65_000));
        metrics.rejected(call("hook", "CREATE"), None);
        let count = |kind: &str, code: &str| {
            metrics.refusals.with_label_values(&["hook", "validating", "CREATE", kind, code]).get()
        };
        assert_eq!([count("no_error", "600"), count("calling_webhook_error", "0")], [1, 1]);
    }
}

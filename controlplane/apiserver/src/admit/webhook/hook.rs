//! One webhook of a configuration. No I/O.

use std::time::Duration;

use coracle_admission_policies::Conditions;
use serde_json::Value;

use super::super::matching::Matching;
use crate::{remote::identities::Identities, webhook_client::Endpoint};

/// A parsed webhook.
pub(in crate::admit) struct Hook {
    pub(crate) name: String,
    /// Name of the configuration that has the webhook.
    pub(super) configuration: String,
    pub(super) matching: Matching,
    pub(crate) conditions: Conditions,
    pub(crate) endpoint: Endpoint,
    /// Whether a failed call rejects the request.
    pub(crate) fail_closed: bool,
    /// Whether the webhook may be called for a dry run.
    pub(crate) dry_run: bool,
    /// Whether the webhook is called again if the object has changed after its call.
    pub(crate) reinvoke: bool,
    /// Version of the AdmissionReview.
    pub(crate) version: &'static str,
}

// === impl Hook ===

impl Hook {
    /// Parses a webhook of the configuration with this name, after validation and defaulting. The server authenticates
    /// to the webhook with one of `identities`.
    pub(crate) fn read(configuration: &str, hook: &Value, identities: &Identities) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let seconds = hook["timeoutSeconds"].as_u64().unwrap_or(10);
        let versions = hook["admissionReviewVersions"].as_array().into_iter().flatten();
        let version = versions.filter_map(Value::as_str).find(|version| matches!(*version, "v1" | "v1beta1"));
        Self {
            name: text(&hook["name"]),
            configuration: configuration.to_owned(),
            matching: Matching::of_webhook(hook),
            conditions: Conditions::read(&hook["matchConditions"], false),
            endpoint: Endpoint::authenticated(
                &hook["clientConfig"],
                Duration::from_secs(seconds),
                identities,
            ),
            fail_closed: hook["failurePolicy"] != "Ignore",
            dry_run: matches!(hook["sideEffects"].as_str(), Some("None" | "NoneOnDryRun")),
            reinvoke: hook["reinvocationPolicy"] == "IfNeeded",
            version: if version == Some("v1beta1") { "v1beta1" } else { "v1" },
        }
    }
}

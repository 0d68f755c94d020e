//! Validation of `spec.conversion`.

use serde_json::Value;

use super::one_of;
use crate::definition::{Spec, Webhook};
use crate::violation::{Path, Violations};
use coracle_values::names;

/// Checks strategy and webhook.
pub(super) fn validate(spec: &Spec, path: &Path, violations: &mut Violations) {
    let Some(conversion) = &spec.conversion else { return };
    one_of(&path.field("strategy"), &conversion.strategy, &["None", "Webhook"], violations);
    let config = path.field("webhookClientConfig");
    let reviews = path.field("conversionReviewVersions");
    if conversion.strategy != "Webhook" {
        if let Some(webhook) = &conversion.webhook {
            let detail = "should not be set when strategy is not set to Webhook";
            if webhook.client_config.is_some() {
                violations.forbidden(&config, detail);
            }
            if !webhook.conversion_review_versions.is_empty() {
                violations.forbidden(&reviews, detail);
            }
        }
        return;
    }
    if spec.preserve_unknown_fields {
        let detail = "must be None if spec.preserveUnknownFields is true";
        violations.invalid(&path.field("strategy"), &conversion.strategy.clone().into(), detail);
    }
    let default = Webhook::default();
    let webhook = conversion.webhook.as_ref().unwrap_or(&default);
    match &webhook.client_config {
        None => violations.required(&config, "required when strategy is set to Webhook"),
        Some(client) => client_config(client, &config, violations),
    }
    review_versions(&webhook.conversion_review_versions, &reviews, violations);
}

fn client_config(client: &Value, path: &Path, violations: &mut Violations) {
    match (client.get("url").and_then(Value::as_str), client.get("service")) {
        (Some(url), None) => webhook_url(url, &path.field("url"), violations),
        (None, Some(service)) => {
            let place = path.field("service");
            for field in ["name", "namespace"] {
                if service[field].as_str().unwrap_or_default().is_empty() {
                    violations.required(&place.field(field), &format!("service {field} is required"));
                }
            }
            let port = service["port"].as_i64().unwrap_or(443);
            if !(1..=65535).contains(&port) {
                let detail = "port is not valid: must be between 1 and 65535, inclusive";
                violations.invalid(&place.field("port"), &port.into(), detail);
            }
        }
        _ => violations.required(path, "exactly one of url or service is required"),
    }
}

fn webhook_url(text: &str, path: &Path, violations: &mut Violations) {
    let value = Value::from(text);
    let form = "; desired format: https://host[/path]";
    let Ok(url) = url::Url::parse(text) else {
        violations.required(path, &format!("url must be a valid URL{form}"));
        return;
    };
    let mut fail = |detail: String| violations.invalid(path, &value, &detail);
    if url.scheme() != "https" {
        fail(format!("'https' is the only allowed URL scheme{form}"));
    }
    if url.host_str().unwrap_or_default().is_empty() {
        fail(format!("host must be specified{form}"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        fail("user information is not permitted in the URL".to_owned());
    }
    if url.fragment().is_some() {
        fail("fragments are not permitted in the URL".to_owned());
    }
    if url.query().is_some() {
        fail("query parameters are not permitted in the URL".to_owned());
    }
}

fn review_versions(versions: &[String], path: &Path, violations: &mut Violations) {
    if versions.is_empty() {
        violations.required(path, "");
        return;
    }
    let mut seen = std::collections::HashSet::new();
    for (index, version) in versions.iter().enumerate() {
        if !seen.insert(version) {
            violations.invalid(&path.index(index), &version.clone().into(), "duplicate version");
            continue;
        }
        for problem in names::dns1035_label(version) {
            violations.invalid(&path.index(index), &version.clone().into(), &problem);
        }
    }
    if !versions.iter().any(|version| matches!(version.as_str(), "v1" | "v1beta1")) {
        violations.invalid(path, &versions.into(), "must include at least one of v1, v1beta1");
    }
}

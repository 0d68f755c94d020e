//! Webhook configurations. Source: `pkg/apis/admissionregistration/v1/defaults.go`.

use serde_json::{Map, Value};

use super::{child_of, each, fill, present};

pub(crate) fn validating(object: &mut Value) {
    let Some(object) = object.as_object_mut() else { return };
    each(object, "webhooks").for_each(webhook);
}

pub(crate) fn mutating(object: &mut Value) {
    let Some(object) = object.as_object_mut() else { return };
    for hook in each(object, "webhooks") {
        webhook(hook);
        fill(hook, "reinvocationPolicy", "Never");
    }
}

fn webhook(hook: &mut Map<String, Value>) {
    fill(hook, "failurePolicy", "Fail");
    fill(hook, "matchPolicy", "Equivalent");
    fill(hook, "timeoutSeconds", 10);
    child_of(hook, "namespaceSelector");
    child_of(hook, "objectSelector");
    for rule in each(hook, "rules") {
        fill(rule, "scope", "*");
    }
    if let Some(service) = present(hook, "clientConfig").and_then(|config| present(config, "service")) {
        fill(service, "port", 443);
    }
}

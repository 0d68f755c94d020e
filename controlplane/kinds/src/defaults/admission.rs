//! Webhook configurations and admission policies. Source: `pkg/apis/admissionregistration/v1/defaults.go`.

use serde_json::{Map, Value};

use super::{child_of, each, fill, fill_absent, present};

pub(crate) fn validating(object: &mut Value) {
    let Some(object) = object.as_object_mut() else { return };
    each(object, "webhooks").for_each(webhook);
}

pub(crate) fn mutating(object: &mut Value) {
    let Some(object) = object.as_object_mut() else { return };
    for hook in each(object, "webhooks") {
        webhook(hook);
        fill_absent(hook, "reinvocationPolicy", "Never");
    }
}

fn webhook(hook: &mut Map<String, Value>) {
    fill_absent(hook, "failurePolicy", "Fail");
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

/// A ValidatingAdmissionPolicy.
pub(crate) fn validating_policy(object: &mut Value) {
    policy(object);
}

/// A MutatingAdmissionPolicy. Upstream has no default for its reinvocationPolicy.
pub(crate) fn mutating_policy(object: &mut Value) {
    policy(object);
}

/// The binding of a policy of either sort.
pub(crate) fn binding(object: &mut Value) {
    let Some(spec) = object.as_object_mut().and_then(|object| present(object, "spec")) else { return };
    if let Some(resources) = present(spec, "matchResources") {
        match_resources(resources);
    }
}

fn policy(object: &mut Value) {
    let Some(spec) = object.as_object_mut().and_then(|object| present(object, "spec")) else { return };
    fill_absent(spec, "failurePolicy", "Fail");
    if let Some(constraints) = present(spec, "matchConstraints") {
        match_resources(constraints);
    }
}

fn match_resources(resources: &mut Map<String, Value>) {
    fill(resources, "matchPolicy", "Equivalent");
    child_of(resources, "namespaceSelector");
    child_of(resources, "objectSelector");
    for list in ["resourceRules", "excludeResourceRules"] {
        for rule in each(resources, list) {
            fill(rule, "scope", "*");
        }
    }
}

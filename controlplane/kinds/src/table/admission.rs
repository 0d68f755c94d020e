//! Webhook configurations and admission policies.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, integer, length, name, string};

pub(crate) const WEBHOOKS: &[Column] = &[NAME, integer("Webhooks", "Number of webhooks."), AGE];

pub(crate) fn webhooks(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), length(&object["webhooks"]), age_cell(object, now)]
}

const PARAM_KIND: Column = string("ParamKind", "Kind of the policy's parameters.");

pub(crate) const VALIDATING_POLICIES: &[Column] =
    &[NAME, integer("Validations", "Number of validations."), PARAM_KIND, AGE];

pub(crate) const MUTATING_POLICIES: &[Column] =
    &[NAME, integer("Mutations", "Number of mutations."), PARAM_KIND, AGE];

pub(crate) const BINDINGS: &[Column] = &[
    NAME,
    string("PolicyName", "The policy that is bound."),
    string("ParamRef", "The parameters of the policy."),
    AGE,
];

pub(crate) fn validating_policy(object: &Value, now: Timestamp) -> Vec<Value> {
    policy(object, "validations", now)
}

pub(crate) fn mutating_policy(object: &Value, now: Timestamp) -> Vec<Value> {
    policy(object, "mutations", now)
}

fn policy(object: &Value, list: &str, now: Timestamp) -> Vec<Value> {
    let kind = &object["spec"]["paramKind"];
    let text = |field: &str| kind[field].as_str().unwrap_or_default();
    let kind = match kind.is_object() {
        true => format!("{}/{}", text("apiVersion"), text("kind")),
        false => UNSET.to_owned(),
    };
    vec![name(object), length(&object["spec"][list]), kind.into(), age_cell(object, now)]
}

pub(crate) fn binding(object: &Value, now: Timestamp) -> Vec<Value> {
    let reference = &object["spec"]["paramRef"];
    let text = |field: &str| reference[field].as_str().unwrap_or_default();
    let parameters = match (text("namespace"), text("name")) {
        (_, "") if reference["selector"].is_object() => reference["selector"].to_string(),
        (_, "") => UNSET.to_owned(),
        ("", name) => format!("*/{name}"),
        (namespace, name) => format!("{namespace}/{name}"),
    };
    vec![name(object), object["spec"]["policyName"].clone(), parameters.into(), age_cell(object, now)]
}

const UNSET: &str = "<unset>";

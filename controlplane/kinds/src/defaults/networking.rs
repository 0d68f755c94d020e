//! Network policies and ingress classes.

use serde_json::{Value, json};

use super::{child, child_of, each, fill_absent};

/// Sets the defaults of a NetworkPolicy.
pub(crate) fn network_policy(object: &mut Value) {
    let Some(spec) = child(object, "spec") else { return };
    for rules in ["ingress", "egress"] {
        for rule in each(spec, rules) {
            for port in each(rule, "ports") {
                fill_absent(port, "protocol", "TCP");
            }
        }
    }
    if spec.get("policyTypes").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        let has_egress = spec.get("egress").and_then(Value::as_array).is_some_and(|rules| !rules.is_empty());
        let types = if has_egress { json!(["Ingress", "Egress"]) } else { json!(["Ingress"]) };
        spec.insert("policyTypes".to_owned(), types);
    }
}

/// Sets the defaults of an IngressClass.
pub(crate) fn ingress_class(object: &mut Value) {
    let Some(spec) =
        child(object, "spec").filter(|spec| spec.get("parameters").is_some_and(Value::is_object))
    else {
        return;
    };
    if let Some(parameters) = child_of(spec, "parameters") {
        fill_absent(parameters, "scope", "Cluster");
    }
}

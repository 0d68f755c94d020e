//! Network policies, ingresses, ingress classes, service ranges and addresses.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, items, name, string};
use coracle_values::label_selector::LabelSelector;

pub(crate) const NETWORK_POLICY: &[Column] =
    &[NAME, string("Pod-Selector", "The pods to which the policy applies."), AGE];

pub(crate) fn network_policy(object: &Value, now: Timestamp) -> Vec<Value> {
    let selector = match LabelSelector::from_object(&object["spec"]["podSelector"]) {
        Ok(selector) if !selector.is_empty() => selector.to_string(),
        Ok(_) | Err(_) => "<none>".to_owned(),
    };
    vec![name(object), selector.into(), age_cell(object, now)]
}

pub(crate) const INGRESS: &[Column] = &[
    NAME,
    string("Class", "Name of the IngressClass."),
    string("Hosts", "Hosts of the rules."),
    string("Address", "Addresses of the load balancer."),
    string("Ports", "Ports of TLS and HTTP."),
    AGE,
];

pub(crate) fn ingress(object: &Value, now: Timestamp) -> Vec<Value> {
    let spec = &object["spec"];
    let class = spec["ingressClassName"].as_str().unwrap_or("<none>");
    let addresses = items(&object["status"]["loadBalancer"]["ingress"])
        .filter_map(|entry| entry["ip"].as_str().or(entry["hostname"].as_str()))
        .collect::<Vec<_>>()
        .join(",");
    let ports = if items(&spec["tls"]).len() > 0 { "80, 443" } else { "80" };
    vec![
        name(object),
        class.into(),
        hosts(spec).into(),
        addresses.into(),
        ports.into(),
        age_cell(object, now),
    ]
}

fn hosts(spec: &Value) -> String {
    const SHOWN: usize = 3;
    let all: Vec<&str> = items(&spec["rules"])
        .filter_map(|rule| rule["host"].as_str())
        .filter(|host| !host.is_empty())
        .collect();
    match all.len() {
        0 => "*".to_owned(),
        count if count > SHOWN => format!("{} + {} more...", all[..SHOWN].join(","), count - SHOWN),
        _ => all.join(","),
    }
}

pub(crate) const INGRESS_CLASS: &[Column] = &[
    NAME,
    string("Controller", "The controller of the class."),
    string("Parameters", "The object with the parameters of the class."),
    AGE,
];

pub(crate) fn ingress_class(object: &Value, now: Timestamp) -> Vec<Value> {
    let parameters = &object["spec"]["parameters"];
    let text = |field: &str| parameters[field].as_str().unwrap_or_default();
    let shown = match (text("apiGroup"), text("kind")) {
        (_, "") => "<none>".to_owned(),
        ("", kind) => format!("{kind}/{}", text("name")),
        (group, kind) => format!("{kind}.{group}/{}", text("name")),
    };
    vec![name(object), object["spec"]["controller"].clone(), shown.into(), age_cell(object, now)]
}

pub(crate) const SERVICE_CIDR: &[Column] = &[NAME, string("CIDRs", "The ranges of service addresses."), AGE];

pub(crate) fn service_cidr(object: &Value, now: Timestamp) -> Vec<Value> {
    let all: Vec<&str> = items(&object["spec"]["cidrs"]).filter_map(Value::as_str).collect();
    vec![name(object), all.join(",").into(), age_cell(object, now)]
}

pub(crate) const IP_ADDRESS: &[Column] = &[NAME, string("ParentRef", "The object that has the address.")];

pub(crate) fn ip_address(object: &Value, _now: Timestamp) -> Vec<Value> {
    vec![name(object), parent(&object["spec"]["parentRef"]).into()]
}

/// A reference as `resource.group/namespace/name`.
fn parent(reference: &Value) -> String {
    let text = |field: &str| reference[field].as_str().filter(|text| !text.is_empty());
    if reference.is_null() {
        return "<none>".to_owned();
    }
    let resource: Vec<&str> = [text("resource"), text("group")].into_iter().flatten().collect();
    let parts = [Some(resource.join(".").to_lowercase()), text("namespace").map(str::to_owned)];
    let name = text("name").unwrap_or_default().to_owned();
    parts.into_iter().flatten().chain([name]).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_address_shows_its_parent() {
        let service = json!({"resource": "services", "namespace": "n", "name": "s"});
        assert_eq!(parent(&service), "services/n/s");
        assert_eq!(parent(&json!({"group": "x.io", "resource": "Gates", "name": "g"})), "gates.x.io/g");
        assert_eq!(parent(&Value::Null), "<none>");
    }
}

//! Services, endpoints, endpoint slices.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, age_cell, items, name, or_none, string, wide};
use coracle_values::label_selector::LabelSelector;

/// Number of addresses that are shown before "+ N more...".
const SHOWN: usize = 3;

pub(crate) const COLUMNS: &[Column] = &[
    NAME,
    string("Type", "Type of the service."),
    string("Cluster-IP", "Virtual address inside the cluster."),
    string("External-IP", "Addresses outside the cluster."),
    string("Port(s)", "Ports, with node ports after a colon."),
    AGE,
    wide(string("Selector", "Labels of the selected pods.")),
];

pub(crate) fn cells(service: &Value, now: Timestamp) -> Vec<Value> {
    let spec = &service["spec"];
    let cluster_ip =
        if spec["clusterIPs"][0].is_string() { &spec["clusterIPs"][0] } else { &spec["clusterIP"] };
    let selector = LabelSelector::from_map(&spec["selector"]);
    vec![
        name(service),
        spec["type"].clone(),
        or_none(cluster_ip),
        external(service).into(),
        joined(items(&spec["ports"]).map(port)).into(),
        age_cell(service, now),
        if selector.is_empty() { "<none>".into() } else { selector.to_string().into() },
    ]
}

fn external(service: &Value) -> String {
    let spec = &service["spec"];
    let listed = || items(&spec["externalIPs"]).filter_map(Value::as_str).map(str::to_owned);
    match spec["type"].as_str().unwrap_or_default() {
        "ExternalName" => spec["externalName"].as_str().unwrap_or_default().to_owned(),
        "LoadBalancer" => {
            let ingress = items(&service["status"]["loadBalancer"]["ingress"]);
            let given = ingress.filter_map(|entry| entry["ip"].as_str().or(entry["hostname"].as_str()));
            let all: Vec<String> = given.map(str::to_owned).chain(listed()).collect();
            if all.is_empty() { "<pending>".to_owned() } else { all.join(",") }
        }
        _ => joined(listed()),
    }
}

fn port(port: &Value) -> String {
    let protocol = port["protocol"].as_str().unwrap_or("TCP");
    let number = port["port"].as_i64().unwrap_or(0);
    match port["nodePort"].as_i64() {
        None | Some(0) => format!("{number}/{protocol}"),
        Some(node_port) => format!("{number}:{node_port}/{protocol}"),
    }
}

fn joined(texts: impl Iterator<Item = String>) -> String {
    let all: Vec<String> = texts.collect();
    if all.is_empty() { "<none>".to_owned() } else { all.join(",") }
}

pub(crate) const ENDPOINTS: &[Column] =
    &[NAME, string("Endpoints", "Addresses and ports behind the service."), AGE];

pub(crate) fn endpoints(object: &Value, now: Timestamp) -> Vec<Value> {
    let mut all = Vec::new();
    for subset in items(&object["subsets"]) {
        for address in items(&subset["addresses"]) {
            let ip = address["ip"].as_str().unwrap_or_default();
            if items(&subset["ports"]).len() == 0 {
                all.push(ip.to_owned());
            }
            for port in items(&subset["ports"]) {
                all.push(host_port(ip, port["port"].as_i64().unwrap_or(0)));
            }
        }
    }
    vec![name(object), shortened(&all, "<none>").into(), age_cell(object, now)]
}

fn host_port(ip: &str, port: i64) -> String {
    if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") }
}

fn shortened(all: &[String], none: &str) -> String {
    match all.len() {
        0 => none.to_owned(),
        count if count > SHOWN => format!("{} + {} more...", all[..SHOWN].join(","), count - SHOWN),
        _ => all.join(","),
    }
}

pub(crate) const ENDPOINT_SLICE: &[Column] = &[
    NAME,
    string("AddressType", "IPv4, IPv6 or FQDN."),
    string("Ports", "Ports of every endpoint."),
    string("Endpoints", "Addresses of the endpoints."),
    AGE,
];

pub(crate) fn endpoint_slice(object: &Value, now: Timestamp) -> Vec<Value> {
    let ports: Vec<String> = items(&object["ports"])
        .map(|port| match (port["port"].as_i64(), port["name"].as_str()) {
            (Some(number), _) => number.to_string(),
            (None, Some(name)) if !name.is_empty() => name.to_owned(),
            _ => "*".to_owned(),
        })
        .collect();
    let addresses: Vec<String> = items(&object["endpoints"])
        .flat_map(|endpoint| items(&endpoint["addresses"]))
        .filter_map(|address| address.as_str().map(str::to_owned))
        .collect();
    vec![
        name(object),
        object["addressType"].clone(),
        shortened(&ports, "<unset>").into(),
        shortened(&addresses, "<unset>").into(),
        age_cell(object, now),
    ]
}

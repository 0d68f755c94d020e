//! Endpoint slices. Source: `pkg/apis/discovery/validation`.

use std::collections::HashSet;

use serde_json::Value;

use super::{PROTOCOLS, app_protocol, is_api_server};
use crate::cause::{Cause, Causes, Path};
use crate::validate::value::{entries, items, text};
use crate::validate::{format, meta};

/// Maximum endpoints of one slice.
const MAX_ENDPOINTS: usize = 1000;
/// Maximum addresses of one endpoint.
const MAX_ADDRESSES: usize = 100;
/// Maximum ports of one slice.
const MAX_PORTS: usize = 20_000;
/// Maximum zones or nodes in the hints of one endpoint.
const MAX_HINTS: usize = 8;
/// Maximum labels in the deprecated topology of one endpoint.
const MAX_TOPOLOGY: usize = 16;
const ZONE: &str = "topology.kubernetes.io/zone";

pub(crate) fn endpoint_slice(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let kind = &object["addressType"];
    causes.one_of(&Path::root("addressType"), kind, &["FQDN", "IPv4", "IPv6"]);
    ports(causes, &Path::root("ports"), &object["ports"]);
    let (path, count) = (Path::root("endpoints"), items(&object["endpoints"]).count());
    if count > MAX_ENDPOINTS {
        causes.too_many(&path, count, MAX_ENDPOINTS);
    } else {
        for (index, one) in items(&object["endpoints"]) {
            let here = path.index(index);
            addresses(causes, &here.field("addresses"), &one["addresses"], object);
            endpoint(causes, &here, one);
        }
    }
    if old.is_some_and(|old| old["addressType"] != *kind) {
        causes.invalid(&Path::root("addressType"), kind, "field is immutable");
    }
}

/// Checks the addresses of one endpoint of a slice.
fn addresses(causes: &mut Causes, path: &Path, list: &Value, slice: &Value) {
    match items(list).count() {
        0 => causes.required(path, "must contain at least 1 address"),
        count if count > MAX_ADDRESSES => causes.too_many(path, count, MAX_ADDRESSES),
        _ => {}
    }
    for (index, value) in items(list) {
        let (here, address) = (path.index(index), text(value));
        let (problems, is_family, detail) = match text(&slice["addressType"]) {
            "IPv4" => (format::ip(address), !address.contains(':'), "must be an IPv4 address"),
            "IPv6" => (format::canonical_ip(address), address.contains(':'), "must be an IPv6 address"),
            "FQDN" => {
                domain(causes, &here, address);
                continue;
            }
            _ => continue,
        };
        if !problems.is_empty() {
            causes.format(&here, address, problems);
            continue;
        }
        if !is_family {
            causes.invalid(path, value, detail);
        }
        if !is_api_server(slice) {
            causes.format(&here, address, format::endpoint_ip(address));
        }
    }
}

/// Checks a domain name of at least two labels. Source: `IsFullyQualifiedDomainName`.
fn domain(causes: &mut Causes, path: &Path, name: &str) {
    if name.is_empty() {
        return causes.required(path, "");
    }
    let name = name.strip_suffix('.').unwrap_or(name);
    let problems = format::dns1123_subdomain(name);
    if !problems.is_empty() {
        return causes.invalid(path, &name.into(), &problems.join(","));
    }
    if !name.contains('.') {
        let detail = "should be a domain with at least two segments separated by dots";
        return causes.invalid(path, &name.into(), detail);
    }
    let mut labels = name.split('.').map(|label| (label, format::dns1123_label(label)));
    if let Some((label, problems)) = labels.find(|(_, problems)| !problems.is_empty()) {
        causes.invalid(path, &label.into(), &problems.join(","));
    }
}

/// Checks host name, node, topology and hints of an endpoint.
fn endpoint(causes: &mut Causes, path: &Path, endpoint: &Value) {
    if let Some(node) = endpoint["nodeName"].as_str() {
        causes.format(&path.field("nodeName"), node, format::dns1123_subdomain(node));
    }
    let (here, topology) = (path.field("deprecatedTopology"), &endpoint["deprecatedTopology"]);
    let count = entries(topology).count();
    if count > MAX_TOPOLOGY {
        causes.too_many(&here, count, MAX_TOPOLOGY);
    }
    meta::labels(causes, &here, topology);
    if !topology[ZONE].is_null() {
        causes.push(Cause {
            reason: "InternalError",
            field: here.key(ZONE).to_string(),
            message: "Internal error: reserved key was not removed in conversion".to_owned(),
        });
    }
    if let Some(hostname) = endpoint["hostname"].as_str() {
        causes.format(&path.field("hostname"), hostname, format::dns1123_label(hostname));
    }
    for (list, what) in [
        ("forZones", format::label_value as fn(&str) -> Vec<String>),
        ("forNodes", format::dns1123_subdomain),
    ] {
        let here = path.field("hints").field(list);
        let hints = &endpoint["hints"][list];
        let count = items(hints).count();
        if count > MAX_HINTS {
            return causes.too_many(&here, count, MAX_HINTS);
        }
        let mut seen = HashSet::new();
        for (index, hint) in items(hints) {
            let (here, name) = (here.index(index).field("name"), text(&hint["name"]));
            if !seen.insert(name) {
                causes.duplicate(&here, &name.into());
            }
            causes.format(&here, name, what(name));
        }
    }
}

fn ports(causes: &mut Causes, path: &Path, list: &Value) {
    let count = items(list).count();
    if count > MAX_PORTS {
        return causes.too_many(path, count, MAX_PORTS);
    }
    let mut names = HashSet::new();
    for (index, port) in items(list) {
        let here = path.index(index);
        let name = text(&port["name"]);
        if !name.is_empty() {
            causes.format(&here.field("name"), name, format::dns1123_label(name));
        }
        if !names.insert(name) {
            causes.duplicate(&here.field("name"), &name.into());
        }
        if port["protocol"].is_null() {
            causes.required(&here.field("protocol"), "");
        }
        causes.optional_word(&here.field("protocol"), &port["protocol"], PROTOCOLS);
        app_protocol(causes, &here, port);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn said(slice: &Value) -> Vec<String> {
        let mut causes = Causes::default();
        endpoint_slice(&mut causes, slice, None);
        causes.into_list().iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
    }

    #[test]
    fn addresses_have_the_type_of_their_slice() {
        let slice =
            |kind: &str, address: &str| json!({"addressType": kind, "endpoints": [{"addresses": [address]}]});
        for (kind, address) in [("IPv4", "10.0.0.1"), ("IPv6", "fd00::1"), ("FQDN", "a.b."), ("FQDN", "a.b")]
        {
            assert_eq!(said(&slice(kind, address)), Vec::<String>::new(), "{kind} {address}");
        }
        for (kind, address, expected) in [
            (
                "IPv4",
                "fd00::1",
                "endpoints[0].addresses: Invalid value: \"fd00::1\": must be an IPv4 address",
            ),
            (
                "IPv6",
                "10.0.0.1",
                "endpoints[0].addresses: Invalid value: \"10.0.0.1\": must be an IPv6 address",
            ),
            (
                "IPv6",
                "FD00::1",
                "endpoints[0].addresses[0]: Invalid value: \"FD00::1\": must be in canonical form",
            ),
            (
                "IPv4",
                "010.0.0.1",
                "endpoints[0].addresses[0]: Invalid value: \"010.0.0.1\": must not have leading 0s",
            ),
            (
                "IPv4",
                "127.0.0.1",
                "endpoints[0].addresses[0]: Invalid value: \"127.0.0.1\": may not be in the loop",
            ),
            (
                "IPv4",
                "169.254.169.254",
                "endpoints[0].addresses[0]: Invalid value: \"169.254.169.254\": may not be in the link-local range",
            ),
            (
                "IPv6",
                "fe80::1",
                "endpoints[0].addresses[0]: Invalid value: \"fe80::1\": may not be in the link-local range",
            ),
            (
                "FQDN",
                "a",
                "endpoints[0].addresses[0]: Invalid value: \"a\": should be a domain with at least two",
            ),
            ("FQDN", "", "endpoints[0].addresses[0]: Required value"),
        ] {
            let causes = said(&slice(kind, address));
            assert!(causes.len() == 1 && causes[0].starts_with(expected), "{kind} {address}: {causes:?}");
        }
    }

    #[test]
    fn slices_have_limits() {
        let endpoint = json!({"addresses": ["10.0.0.1"]});
        let many = json!({"addressType": "IPv4", "endpoints": vec![endpoint; 1001]});
        assert_eq!(said(&many), ["endpoints: Too many: 1001: must have at most 1000 items"]);
        let many = json!({"addressType": "IPv4", "endpoints": [{"addresses": vec!["10.0.0.1"; 101]}]});
        assert_eq!(said(&many), ["endpoints[0].addresses: Too many: 101: must have at most 100 items"]);
        let labels: serde_json::Map<String, Value> = (0..17).map(|n| (format!("a{n}"), json!("b"))).collect();
        let one = json!({"addresses": ["10.0.0.1"], "deprecatedTopology": labels});
        let many = json!({"addressType": "IPv4", "endpoints": [one]});
        assert_eq!(
            said(&many),
            ["endpoints[0].deprecatedTopology: Too many: 17: must have at most 16 items"]
        );
    }

    #[test]
    fn hints_and_ports_are_checked() {
        let hints = json!({"forZones": [{"name": "a b"}, {"name": "a b"}]});
        let slice = json!({"addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.0.1"], "hints": hints}],
            "ports": [{"name": "a"}, {"name": "a", "protocol": "X"}]});
        let fields: Vec<String> = said(&slice)
            .iter()
            .map(|cause| cause.split(": ").take(2).collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(
            fields,
            [
                "ports[0].protocol Required value",
                "ports[1].name Duplicate value",
                "ports[1].protocol Unsupported value",
                "endpoints[0].hints.forZones[0].name Invalid value",
                "endpoints[0].hints.forZones[1].name Duplicate value",
                "endpoints[0].hints.forZones[1].name Invalid value",
            ]
        );
    }
}

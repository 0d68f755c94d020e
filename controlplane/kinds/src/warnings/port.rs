//! Ports of containers that are defined twice.

use std::collections::HashMap;

use serde_json::Value;

use super::{Found, MAX_COMPARED, items, text};

/// A definition of a port.
struct Defined<'a> {
    path: String,
    port: &'a Value,
}

/// Warns about the ports of these containers. Each container comes with its path.
pub(super) fn ports(found: &mut Found, containers: &[(String, &Value)]) {
    let mut same: HashMap<(Option<i64>, &str), Vec<Defined<'_>>> = HashMap::new();
    let mut names: HashMap<&str, String> = HashMap::new();
    let mut duplicates = Vec::new();
    for (path, container) in containers {
        for (index, port) in items(&container["ports"]) {
            let path = format!("{path}.ports[{index}]");
            if !text(&port["hostIP"]).is_empty() && host_port(port) == 0 {
                found.add(format!("{path}: hostIP set without hostPort: {}", shown(port)));
            }
            let is_full = found.is_full();
            let others = same.entry((port["containerPort"].as_i64(), text(&port["protocol"]))).or_default();
            for other in others.iter().filter(|_| !is_full) {
                if let Some(how) = conflict(port, other.port) {
                    found.add(format!("{path}: {how} port definition with {}", other.path));
                }
            }
            let name = text(&port["name"]);
            if let Some(first) = names.get(name) {
                duplicates.push(format!(
                    "{path}: duplicate port name {name:?} with {first}, services and probes that select ports by name will \
                     use {first}"
                ));
            } else if !name.is_empty() {
                names.insert(name, path.clone());
            }
            if others.len() < MAX_COMPARED {
                others.push(Defined { path, port });
            }
        }
    }
    duplicates.into_iter().for_each(|warning| found.add(warning));
}

/// The conflict between two definitions of one port and protocol. `None` if there is no conflict.
fn conflict(one: &Value, other: &Value) -> Option<&'static str> {
    let ips = (text(&one["hostIP"]), text(&other["hostIP"]));
    let numbers = (host_port(one), host_port(other));
    match () {
        () if ips.0 == ips.1 && numbers.0 == numbers.1 => Some("duplicate"),
        () if numbers.0 == 0 || numbers.1 == 0 => Some("overlapping"),
        () if numbers.0 == numbers.1 && ips.0.is_empty() != ips.1.is_empty() => Some("dangerously ambiguous"),
        () => None,
    }
}

fn host_port(port: &Value) -> i64 {
    port["hostPort"].as_i64().unwrap_or(0)
}

/// A port in the form of upstream's text.
fn shown(port: &Value) -> String {
    format!(
        "{{Name:{} HostPort:{} ContainerPort:{} Protocol:{} HostIP:{}}}",
        text(&port["name"]),
        host_port(port),
        port["containerPort"],
        text(&port["protocol"]),
        text(&port["hostIP"])
    )
}

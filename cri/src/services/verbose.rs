//! Additional data of verbose responses. The field names are those of other runtimes, because tools expect them. Pure.

use serde::Serialize;
use serde_json::{Map, Value, json};

/// Members with arbitrary keys: empty values in them are kept.
const MAPS: [&str; 4] = ["annotations", "labels", "sysctls", "unified"];

/// A message in the JSON of the CRI's Go types: names of the .proto files, without empty fields.
pub(super) fn message(message: &impl Serialize) -> Value {
    let mut value = serde_json::to_value(message).unwrap_or_default();
    remove_empty(&mut value);
    value
}

fn remove_empty(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|_, member| !is_empty(member));
            let members = members.iter_mut().filter(|(name, _)| !MAPS.contains(&name.as_str()));
            members.for_each(|(_, member)| remove_empty(member));
        }
        Value::Array(elements) => elements.iter_mut().for_each(remove_empty),
        _ => {}
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is) => !is,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(elements) => elements.is_empty(),
        Value::Object(members) => members.is_empty(),
    }
}

/// The result of CNI plugins in containerd's format: by interface, with addresses without prefix.
pub(super) fn cni_result(answer: &Value, default_interface: &str) -> Value {
    let list = |name: &str| answer[name].as_array().cloned().unwrap_or_default();
    let names: Vec<String> =
        list("interfaces").iter().map(|one| one["name"].as_str().unwrap_or_default().to_owned()).collect();
    let mut interfaces = Map::new();
    for (interface, name) in list("interfaces").iter().zip(&names) {
        let text = |name: &str| interface[name].as_str().unwrap_or_default().to_owned();
        let config = json!({"IPConfigs": null, "Mac": text("mac"), "Sandbox": text("sandbox")});
        interfaces.insert(name.clone(), config);
    }
    for ip in list("ips") {
        let index = ip["interface"].as_u64().and_then(|index| usize::try_from(index).ok());
        let name = index.and_then(|index| names.get(index)).map_or(default_interface, String::as_str);
        let address = ip["address"].as_str().unwrap_or_default();
        let bare = address.split_once('/').map_or(address, |(bare, _)| bare);
        let config = json!({"IP": bare, "Gateway": ip["gateway"].as_str().unwrap_or_default()});
        let Some(interface) = interfaces.entry(name).or_insert_with(|| json!({})).as_object_mut() else {
            continue;
        };
        match interface.get_mut("IPConfigs").and_then(Value::as_array_mut) {
            Some(configs) => configs.push(config),
            None => drop(interface.insert("IPConfigs".to_owned(), json!([config]))),
        }
    }
    json!({"Interfaces": interfaces, "DNS": [answer["dns"]], "Routes": answer["routes"]})
}

/// Sorts the capabilities of a spec: they are sets, whose order is random.
pub(super) fn order_capabilities(spec: &mut Value) {
    let sets = spec.pointer_mut("/process/capabilities").and_then(Value::as_object_mut);
    for names in sets.into_iter().flat_map(Map::values_mut).filter_map(Value::as_array_mut) {
        names.sort_by(|one, other| one.as_str().cmp(&other.as_str()));
    }
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri;

    use super::*;

    #[test]
    fn a_configuration_is_shown_without_empty_fields() {
        let config = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "c".to_owned(), attempt: 0 }),
            envs: vec![cri::KeyValue { key: "K".to_owned(), value: b"v\xff".to_vec() }],
            labels: [("kept".to_owned(), String::new())].into(),
            linux: Some(cri::LinuxContainerConfig::default()),
            tty: true,
            ..Default::default()
        };
        let shown = json!({
            "metadata": {"name": "c"},
            "envs": [{"key": "K", "value": "v\u{fffd}"}],
            "labels": {"kept": ""},
            "linux": {},
            "tty": true,
        });
        assert_eq!(message(&config), shown);
    }

    #[test]
    fn a_cni_result_is_shown_by_interface() {
        let answer = json!({
            "cniVersion": "1.1.0",
            "interfaces": [{"name": "br0", "mac": "b"}, {"name": "eth0", "mac": "e", "sandbox": "/n"}],
            "ips": [
                {"interface": 1, "address": "10.0.0.2/24", "gateway": "10.0.0.1"},
                {"address": "fd00::2/64"},
            ],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dns": {},
        });
        let shown = json!({
            "Interfaces": {
                "br0": {"IPConfigs": null, "Mac": "b", "Sandbox": ""},
                "eth0": {
                    "IPConfigs": [{"IP": "10.0.0.2", "Gateway": "10.0.0.1"}, {"IP": "fd00::2", "Gateway": ""}],
                    "Mac": "e",
                    "Sandbox": "/n",
                },
            },
            "DNS": [{}],
            "Routes": [{"dst": "0.0.0.0/0"}],
        });
        assert_eq!(cni_result(&answer, "eth0"), shown);
    }

    #[test]
    fn capabilities_are_sorted() {
        let mut spec =
            json!({"process": {"capabilities": {"bounding": ["CAP_B", "CAP_C", "CAP_A"], "ambient": []}}});
        order_capabilities(&mut spec);
        assert_eq!(
            spec["process"]["capabilities"],
            json!({"bounding": ["CAP_A", "CAP_B", "CAP_C"], "ambient": []})
        );
    }
}

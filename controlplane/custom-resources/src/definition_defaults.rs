//! Defaults of definitions (`apis/apiextensions/v1/defaults.go`).

use serde_json::{Value, json};

/// Sets the defaults of a definition.
pub fn set(object: &mut Value) {
    let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return };
    let names = spec.entry("names").or_insert_with(|| json!({}));
    if let Some(names) = names.as_object_mut() {
        let kind = names.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
        let absent = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().is_empty();
        if !kind.is_empty() {
            if absent(names.get("singular")) {
                names.insert("singular".to_owned(), kind.to_lowercase().into());
            }
            if absent(names.get("listKind")) {
                names.insert("listKind".to_owned(), format!("{kind}List").into());
            }
        }
    }
    let conversion = spec.entry("conversion").or_insert_with(|| json!({"strategy": "None"}));
    if let Some(service) =
        conversion.pointer_mut("/webhook/clientConfig/service").and_then(Value::as_object_mut)
    {
        service.entry("port").or_insert_with(|| 443.into());
    }
    let storage = storage_version(object);
    if let Some(name) = storage
        && object.pointer("/status/storedVersions").and_then(Value::as_array).is_none_or(Vec::is_empty)
    {
        add_stored_version(object, name);
    }
}

/// Adds the storage version to `status.storedVersions`. It is called on each write of the definition.
pub fn record_storage_version(object: &mut Value) {
    if let Some(name) = storage_version(object) {
        add_stored_version(object, name);
    }
}

fn storage_version(object: &Value) -> Option<String> {
    let versions = object.pointer("/spec/versions")?.as_array()?;
    versions.iter().find(|version| version["storage"] == true)?["name"].as_str().map(str::to_owned)
}

fn add_stored_version(object: &mut Value, name: String) {
    if !object["status"].is_object() {
        object["status"] = json!({});
    }
    match &mut object["status"]["storedVersions"] {
        Value::Array(list) if list.iter().any(|version| version == name.as_str()) => {}
        Value::Array(list) => list.push(name.into()),
        other => *other = json!([name]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_conversion_and_stored_versions_have_defaults() {
        let mut object = json!({"spec": {"names": {"kind": "Foo"}, "versions": [{"name": "v1"}, {"name": "v2", "storage": true}]}});
        set(&mut object);
        assert_eq!(object["spec"]["names"], json!({"kind": "Foo", "singular": "foo", "listKind": "FooList"}));
        assert_eq!(object["spec"]["conversion"], json!({"strategy": "None"}));
        assert_eq!(object["status"]["storedVersions"], json!(["v2"]));
        object["spec"]["versions"] = json!([{"name": "v3", "storage": true}]);
        record_storage_version(&mut object);
        assert_eq!(object["status"]["storedVersions"], json!(["v2", "v3"]));
    }
}

//! Config maps and secrets.

use std::collections::HashMap;

use base64::Engine;
use serde_json::Value;

use super::{Causes, Path, entries, format, text};

/// Maximum size of all values together, in bytes.
const MAX_SIZE: usize = 1024 * 1024;

pub(crate) fn config_map(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let mut size = 0;
    for (key, value) in entries(&object["data"]) {
        let path = Path::root("data").key(key);
        causes.format(&path, key, format::config_key(key));
        if object["binaryData"].get(key).is_some() {
            causes.invalid(&path, &key.as_str().into(), "duplicate of key present in binaryData");
        }
        size += text(value).len();
    }
    for (key, value) in entries(&object["binaryData"]) {
        causes.format(&Path::root("binaryData").key(key), key, format::config_key(key));
        size += decoded_length(value);
    }
    if size > MAX_SIZE {
        causes.too_long(&Path::whole(), MAX_SIZE);
    }
    if let Some(old) = old {
        immutable(causes, object, old, &["data", "binaryData"]);
    }
}

pub(crate) fn secret(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let data = &object["data"];
    for (key, _) in entries(data) {
        causes.format(&Path::root("data").key(key), key, format::config_key(key));
    }
    if entries(data).map(|(_, value)| decoded_length(value)).sum::<usize>() > MAX_SIZE {
        causes.too_long(&Path::root("data"), MAX_SIZE);
    }
    typed(causes, object);
    if let Some(old) = old {
        if object["type"] != old["type"] {
            causes.invalid(&Path::root("type"), &object["type"], "field is immutable");
        }
        immutable(causes, object, old, &["data"]);
    }
}

/// Checks the required keys of each type of Secret.
fn typed(causes: &mut Causes, object: &Value) {
    let data = &object["data"];
    let mut need = |key: &str| {
        if data.get(key).is_none() {
            causes.required(&Path::root("data").key(key), "");
        }
    };
    match text(&object["type"]) {
        "kubernetes.io/dockerconfigjson" => json_key(causes, data, ".dockerconfigjson"),
        "kubernetes.io/dockercfg" => json_key(causes, data, ".dockercfg"),
        "kubernetes.io/tls" => {
            need("tls.crt");
            need("tls.key");
        }
        "kubernetes.io/ssh-auth" if text(&data["ssh-privatekey"]).is_empty() => {
            causes.required(&Path::root("data").key("ssh-privatekey"), "");
        }
        "kubernetes.io/basic-auth" if data.get("username").is_none() && data.get("password").is_none() => {
            need("username");
            need("password");
        }
        "kubernetes.io/service-account-token" => {
            let name = "kubernetes.io/service-account.name";
            if text(&object["metadata"]["annotations"][name]).is_empty() {
                causes.required(&Path::root("metadata").field("annotations").key(name), "");
            }
        }
        _ => {}
    }
}

fn json_key(causes: &mut Causes, data: &Value, key: &str) {
    let path = Path::root("data").key(key);
    let Some(value) = data.get(key) else { return causes.required(&path, "") };
    let bytes = base64::engine::general_purpose::STANDARD.decode(text(value)).unwrap_or_default();
    // Go decodes null as an empty map.
    if let Err(error) = serde_json::from_slice::<Option<HashMap<String, serde::de::IgnoredAny>>>(&bytes) {
        causes.invalid(&path, &"<secret contents redacted>".into(), &error.to_string());
    }
}

fn immutable(causes: &mut Causes, new: &Value, old: &Value, fields: &[&str]) {
    if old["immutable"] != true {
        return;
    }
    let detail = "field is immutable when `immutable` is set";
    if new["immutable"] != true {
        causes.forbidden(&Path::root("immutable"), detail);
    }
    for field in fields {
        if new[*field] != old[*field] {
            causes.forbidden(&Path::root(field), detail);
        }
    }
}

/// The decoded length of a base64 text.
fn decoded_length(value: &Value) -> usize {
    let text = text(value);
    text.trim_end_matches('=').len() * 3 / 4
}

//! Pod templates as the JSON that the API server sent. Decoding into typed structs would drop fields of newer API
//! versions, and so change the pods.

use std::sync::Arc;

use coracle_values::CollectMap;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// The label that distinguishes the pods of a deployment's replica sets.
pub(crate) const HASH_LABEL: &str = "pod-template-hash";

/// Map fields in which an empty map counts as absent.
const MAPS: [&str; 11] = [
    "labels",
    "annotations",
    "metadata",
    "nodeSelector",
    "limits",
    "requests",
    "matchLabels",
    "resources",
    "overhead",
    "volumeAttributes",
    "userAnnotations",
];
/// Boolean fields in which false counts as absent.
const FALSE: [&str; 10] = [
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "readOnly",
    "stdin",
    "stdinOnce",
    "tty",
    "chapAuthDiscovery",
    "chapAuthSession",
    "sslEnabled",
];
/// Number fields in which zero counts as absent.
const ZERO: [&str; 2] = ["hostPort", "initialDelaySeconds"];
/// Text fields in which an empty string differs from an absent string.
const TEXT: [&str; 3] = ["storageClassName", "volumeAttributesClassName", "apiGroup"];

/// A pod template as compact JSON.
#[derive(Clone, Debug)]
pub(crate) struct Template(Arc<str>);

impl Default for Template {
    fn default() -> Self {
        Self("{}".into())
    }
}

impl<'de> Deserialize<'de> for Template {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Value::deserialize(deserializer).map(|value| Self::new(&value))
    }
}

impl Template {
    /// Creates a template from JSON. JSON that is not an object counts as an empty object.
    pub(crate) fn new(value: &Value) -> Self {
        if value.is_object() { Self(value.to_string().into()) } else { Self::default() }
    }

    /// The template as a JSON object.
    pub(crate) fn value(&self) -> Value {
        // The text was created from an object, so it is valid.
        Value::Object(serde_json::from_str(&self.0).unwrap_or_default())
    }

    /// The template's labels.
    pub(crate) fn labels(&self) -> std::collections::BTreeMap<String, String> {
        let value = self.value();
        let labels = value.pointer("/metadata/labels").and_then(Value::as_object);
        labels
            .into_iter()
            .flatten()
            .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
            .collect_map()
    }

    /// Whether two templates create the same pods, apart from the hash label. Absent and empty values are equal,
    /// because clients with typed structs replace absent values by empty values, or the reverse.
    pub(crate) fn equals_ignoring_hash(&self, other: &Self) -> bool {
        self.0 == other.0 || self.canonical() == other.canonical()
    }

    /// The template without hash label, nulls, and values that count as absent.
    fn canonical(&self) -> Value {
        let mut value = self.value();
        if let Some(labels) = value.pointer_mut("/metadata/labels").and_then(Value::as_object_mut) {
            labels.remove(HASH_LABEL);
        }
        if let Value::Object(fields) = &mut value {
            prune(fields);
        }
        value
    }

    /// The hash of this template for labels and names: FNV-1a over the canonical form and the collision count, encoded
    /// in an alphabet without vowels.
    pub(crate) fn hash(&self, collisions: Option<i32>) -> String {
        let mut hash = fnv(0x811c_9dc5, sorted(&self.canonical()).as_bytes());
        if let Some(count) = collisions {
            hash = fnv(hash, &count.to_le_bytes());
        }
        safe_encode(&hash.to_string())
    }
}

/// The name of an object for one template of a workload: the workload's name, at most `longest` bytes of it, and the
/// hash.
pub(crate) fn name_with_hash(workload: &str, longest: usize, hash: &str) -> String {
    // Names are ASCII, so every byte is a character boundary. No name has a dot before a dash: upstream keeps this dot,
    // and the API server refuses the name.
    let start = workload.get(..longest).map_or(workload, |start| start.trim_end_matches('.'));
    format!("{start}-{hash}")
}

fn fnv(start: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(start, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// Encodes a text in letters and digits that cannot form words.
fn safe_encode(text: &str) -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    text.bytes().map(|byte| char::from(ALPHABET[usize::from(byte) % ALPHABET.len()])).collect()
}

/// JSON text with sorted keys.
fn sorted(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let mut names: Vec<&String> = fields.keys().collect();
            names.sort();
            let inner: Vec<String> =
                names.into_iter().map(|name| format!("{name:?}:{}", sorted(&fields[name]))).collect();
            format!("{{{}}}", inner.join(","))
        }
        Value::Array(items) => {
            format!("[{}]", items.iter().map(sorted).collect::<Vec<_>>().join(","))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.to_string(),
    }
}

fn prune(fields: &mut Map<String, Value>) {
    for value in fields.values_mut() {
        match value {
            Value::Object(inner) => prune(inner),
            Value::Array(items) => items.iter_mut().filter_map(Value::as_object_mut).for_each(prune),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    fields.retain(|name, value| match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(inner) => !(inner.is_empty() && MAPS.contains(&name.as_str())),
        Value::Bool(false) => !FALSE.contains(&name.as_str()),
        Value::Number(number) => !(number.as_i64() == Some(0) && ZERO.contains(&name.as_str())),
        Value::String(text) if name == "divisor" => text != "0",
        Value::String(text) => !text.is_empty() || TEXT.contains(&name.as_str()),
        Value::Bool(true) => true,
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_name_of_a_workload_is_shortened_before_its_hash() {
        for (workload, expected) in
            [("ab", "ab-x"), ("abc", "abc-x"), ("abcd", "abc-x"), ("ab.c", "ab-x"), ("a-b.c", "a-b-x")]
        {
            assert_eq!(name_with_hash(workload, 3, "x"), expected);
        }
    }

    #[test]
    fn the_hash_label_and_empty_values_make_no_difference() {
        let plain = Template::new(
            &json!({"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [{"name": "c", "env": [{"name": "A"}]}]}}),
        );
        let other = Template::new(&json!({
            "metadata": {"creationTimestamp": null, "labels": {"app": "a", HASH_LABEL: "x"}, "annotations": {}},
            "spec": {"containers": [{"name": "c", "resources": {}, "tty": false, "ports": [],
                "env": [{"name": "A", "value": ""}]}], "hostNetwork": false},
        }));
        assert!(plain.equals_ignoring_hash(&other));
        assert_eq!(plain.hash(None), other.hash(None));
    }

    #[test]
    fn an_empty_struct_with_a_meaning_is_kept() {
        let with = Template::new(&json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}));
        let without = Template::new(&json!({"spec": {"volumes": [{"name": "v"}]}}));
        assert!(!with.equals_ignoring_hash(&without));
    }

    #[test]
    fn another_image_or_another_collision_is_another_hash() {
        let one = Template::new(&json!({"spec": {"containers": [{"image": "a:1"}]}}));
        let two = Template::new(&json!({"spec": {"containers": [{"image": "a:2"}]}}));
        assert_ne!(one.hash(None), two.hash(None));
        assert_ne!(one.hash(None), one.hash(Some(1)));
        assert!(one.hash(None).bytes().all(|byte| b"bcdfghjklmnpqrstvwxz2456789".contains(&byte)));
    }
}

//! The fields of an encoded object, with the texts of their values. A caller that changes a few fields does not parse
//! the other fields.

use std::{borrow::Cow, collections::BTreeMap};

use coracle_values::CollectMap;
use serde_json::{Value, value::RawValue};

/// The fields of a JSON object by name, with the JSON texts of their values.
#[derive(Debug, Default)]
pub(crate) struct Fields<'a>(BTreeMap<String, Cow<'a, str>>);

// === impl Fields ===

impl<'a> Fields<'a> {
    /// Reads the fields of a JSON object. `None` if the text is not a JSON object.
    pub(crate) fn parse(text: &'a str) -> Option<Self> {
        let fields: BTreeMap<String, &'a RawValue> = serde_json::from_str(text).ok()?;
        Some(Self(fields.into_iter().map(|(name, value)| (name, Cow::Borrowed(value.get()))).collect_map()))
    }

    /// The fields of a field that is an object. Empty if the field is absent or null; `None` if the field has another
    /// type.
    pub(crate) fn object(&self, name: &str) -> Option<Fields<'_>> {
        match self.text(name) {
            None | Some("null") => Some(Fields::default()),
            Some(text) => Fields::parse(text),
        }
    }

    /// The tree of a field; null if it is absent.
    pub(crate) fn value(&self, name: &str) -> Value {
        self.text(name).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }

    /// The JSON text of a field.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|text| &**text)
    }

    /// Whether the object has no fields.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether both objects have the same fields with equal texts, except for the field `name`.
    pub(crate) fn equal_except(&self, other: &Self, name: &str) -> bool {
        let others = |fields: &Self| fields.0.len() - usize::from(fields.0.contains_key(name));
        others(self) == others(other)
            && self.0.iter().all(|(key, text)| key == name || other.0.get(key) == Some(text))
    }

    /// Sets a field.
    pub(crate) fn set(&mut self, name: &str, value: &Value) {
        self.0.insert(name.to_owned(), Cow::Owned(value.to_string()));
    }

    /// Sets a field to the JSON text of a value.
    pub(crate) fn set_text(&mut self, name: &str, text: String) {
        self.0.insert(name.to_owned(), Cow::Owned(text));
    }

    /// Removes a field.
    pub(crate) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// The object as JSON.
    pub(crate) fn json(&self) -> String {
        let length: usize = self.iter().map(|(name, value)| name.len() + value.len() + "\"\":,".len()).sum();
        let mut json = String::with_capacity(length + "{}".len());
        json.push('{');
        for (name, value) in self.iter() {
            if json.len() > 1 {
                json.push(',');
            }
            push_string(&mut json, name);
            json.push(':');
            json.push_str(value);
        }
        json.push('}');
        json
    }

    /// Names and JSON texts, in the order of the names.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), &**value))
    }
}

/// Appends a string as JSON. Names of fields rarely have characters that need an escape.
fn push_string(json: &mut String, text: &str) {
    if text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._/".contains(&byte)) {
        json.push('"');
        json.push_str(text);
        json.push('"');
    } else {
        json.push_str(&Value::from(text).to_string());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn other_fields_keep_their_text() {
        let text = r#"{"a\"b":1e3,"list":[1,{"x":null}],"map":{"k":"v"},"none":null}"#;
        let mut fields = Fields::parse(text).unwrap();
        assert_eq!(fields.json(), text);
        let metadata = Fields::parse(r#"{"labels":{},"name":"p","uid":"u"}"#).unwrap().json();
        assert_eq!(metadata.capacity(), metadata.len() + 1, "one allocation, with room for one more comma");
        assert_eq!(fields.value("list"), json!([1, {"x": null}]));
        assert_eq!(fields.value("absent"), Value::Null);
        let changed = {
            let mut map = fields.object("map").unwrap();
            map.set("l", &json!(["m"]));
            map.json()
        };
        fields.set_text("map", changed);
        fields.set("list", &json!([]));
        assert_eq!(fields.json(), r#"{"a\"b":1e3,"list":[],"map":{"k":"v","l":["m"]},"none":null}"#);
        fields.remove("list");
        fields.remove("absent");
        assert_eq!(fields.json(), r#"{"a\"b":1e3,"map":{"k":"v","l":["m"]},"none":null}"#);
    }

    #[test]
    fn a_field_of_another_type_is_no_object() {
        let fields = Fields::parse(r#"{"a":1,"none":null}"#).unwrap();
        assert!(fields.object("a").is_none());
        assert!(fields.object("none").is_some_and(|empty| empty.is_empty()));
        assert!(fields.object("absent").is_some_and(|empty| empty.is_empty()));
        assert_eq!(Fields::default().json(), "{}");
        let same = Fields::parse(r#"{"a":1,"b":2,"none":null}"#).unwrap();
        assert!(fields.equal_except(&same, "b") && same.equal_except(&fields, "b"));
        assert!(!fields.equal_except(&same, "a") && !same.equal_except(&fields, "a"));
        for text in ["", "[]", "{", "{\"a\":}"] {
            assert!(Fields::parse(text).is_none(), "{text}");
        }
    }
}

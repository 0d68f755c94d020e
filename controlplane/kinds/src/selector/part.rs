//! Parts of encoded objects, read in one pass.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// The fields of an encoded object at these paths; null if the text is not an object. The parser skips all other
/// fields.
pub fn part(text: &str, paths: &[&[&str]]) -> Value {
    let mut reader = serde_json::Deserializer::from_str(text);
    let found = Part { paths }.deserialize(&mut reader);
    match found.and_then(|found| reader.end().map(|()| found)) {
        Ok(found) => found,
        Err(_invalid) => Value::Null,
    }
}

/// Reads the fields of a value at these paths; null if the value is not an object.
struct Part<'a> {
    paths: &'a [&'a [&'a str]],
}

impl<'de> DeserializeSeed<'de> for Part<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Part<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, _value: bool) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_i64<E: Error>(self, _value: i64) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_u64<E: Error>(self, _value: u64) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_f64<E: Error>(self, _value: f64) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_str<E: Error>(self, _value: &str) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Value::Null)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut found = Map::new();
        while let Some(field) = entries.next_key_seed(FieldName { paths: self.paths })? {
            let Some(Field { name, below }) = field else {
                entries.next_value::<IgnoredAny>()?;
                continue;
            };
            let is_whole = below.iter().any(|path| path.is_empty());
            let value: Value = match is_whole {
                true => entries.next_value()?,
                false => entries.next_value_seed(Part { paths: &below })?,
            };
            found.insert(name, value);
        }
        Ok(Value::Object(found))
    }
}

/// Reads the name of a field. Names that no path begins with are not copied.
struct FieldName<'a> {
    paths: &'a [&'a [&'a str]],
}

/// A field that a path begins with.
struct Field<'a> {
    name: String,
    /// The rests of the paths that begin with the field.
    below: Vec<&'a [&'a str]>,
}

impl<'de, 'a> DeserializeSeed<'de> for FieldName<'a> {
    type Value = Option<Field<'a>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'a> Visitor<'_> for FieldName<'a> {
    type Value = Option<Field<'a>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a field")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
        let paths = self.paths.iter().filter_map(|path| path.split_first());
        let below: Vec<&[&str]> = paths.filter(|(first, _)| **first == name).map(|(_, rest)| rest).collect();
        Ok((!below.is_empty()).then(|| Field { name: name.to_owned(), below }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_fields_at_the_paths_are_read() {
        let text = r#"{"a": {"b": [1, {"x": 2}], "c": {"d": 1}, "e": "f"}, "g\u0068": {"i": null}, "j": -1.5, "a.b": 7}"#;
        let cases: [(&[&[&str]], Value); 6] = [
            (&[&["a", "b"]], json!({"a": {"b": [1, {"x": 2}]}})),
            (&[&["a", "c", "d"], &["gh", "i"]], json!({"a": {"c": {"d": 1}}, "gh": {"i": null}})),
            (&[&["a", "c", "d"], &["a"]], json!({"a": {"b": [1, {"x": 2}], "c": {"d": 1}, "e": "f"}})),
            (&[&["j"], &["none", "at", "all"]], json!({"j": -1.5})),
            (
                &[&["j", "k"], &["a", "b", "x"], &["a", "e", "f"]],
                json!({"j": null, "a": {"b": null, "e": null}}),
            ),
            (&[], json!({})),
        ];
        for (paths, expect) in cases {
            assert_eq!(part(text, paths), expect, "{paths:?}");
        }
    }

    #[test]
    fn another_text_than_an_object_has_no_fields() {
        for text in
            ["", "null", "true", "7", "-7", "1.5", "\"a\"", "[{\"a\": 1}]", "{\"a\": 1} 2", "{\"a\": 1"]
        {
            assert_eq!(part(text, &[&["a"]]), Value::Null, "{text}");
        }
    }
}

//! Decodes YAML or JSON to a tree, with limits on time (nesting) and memory (aliases).

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Maximum product of bytes and flow collections. For each token the parser inspects all open flow collections.
const MAX_STEPS: usize = 1 << 28;
/// Maximum size of the tree of a document in bytes, in addition to twice the size of the document. Aliases expand the
/// tree.
const EXPANSION: usize = 64 << 10;

/// Parses the first document. The parsers limit the depth to 128 levels.
pub(super) fn parse(bytes: &[u8]) -> Result<Value, String> {
    if bytes.trim_ascii_start().first() == Some(&b'{')
        && let Ok(value) = serde_json::from_slice(bytes)
    {
        return Ok(value);
    }
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let collections = bytes.iter().filter(|byte| matches!(byte, b'[' | b'{')).count();
    if collections.saturating_mul(bytes.len()) > MAX_STEPS {
        return Err("it has too many flow collections ([ and {)".to_owned());
    }
    let Some(document) = serde_yaml_ng::Deserializer::from_str(text).next() else {
        return Err("it is empty".to_owned());
    };
    let left = Cell::new(bytes.len().saturating_mul(2) + EXPANSION);
    Tree { left: &left }.deserialize(document).map_err(|error| error.to_string())
}

/// Reads a tree. The total size of its nodes and texts is limited, because aliases can repeat any of them.
#[derive(Clone, Copy)]
struct Tree<'a> {
    /// Maximum size in bytes of the rest of the tree.
    left: &'a Cell<usize>,
}

// === impl Tree ===

impl Tree<'_> {
    fn charge<E: Error>(self, bytes: usize) -> Result<(), E> {
        let left = self.left.get().checked_sub(bytes + 1);
        self.left.set(left.ok_or_else(|| E::custom("it has excessive aliases"))?);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value that JSON has")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        self.charge(0)?;
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        self.charge(0)?;
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        self.charge(0)?;
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        self.charge(0)?;
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        self.charge(0)?;
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.charge(value.len())?;
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        self.charge(0)?;
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        self.charge(0)?;
        let mut map = Map::new();
        while let Some(name) = entries.next_key::<String>()? {
            self.charge(name.len())?;
            let value = entries.next_value_seed(self)?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn yaml_and_json_are_read() {
        let expect = json!({"a": [1, "b", true, null], "c": {"d": 1.5}});
        for text in
            ["a: [1, b, true, null]\nc:\n  d: 1.5\n", "{\"a\": [1, \"b\", true, null], \"c\": {\"d\": 1.5}}"]
        {
            assert_eq!(parse(text.as_bytes()).unwrap(), expect);
        }
        assert_eq!(
            parse(b"---\na: 1\n---\nb: 2\n").unwrap(),
            json!({"a": 1}),
            "only the first document counts"
        );
        assert!(parse(b"a: [").is_err() && parse(b"\xff").is_err());
    }

    #[test]
    fn depth_and_expansion_are_limited() {
        assert!(parse("[".repeat(120_000).as_bytes()).unwrap_err().contains("flow collections"));
        assert!(
            parse(format!("{}a", "- ".repeat(1_000)).as_bytes()).unwrap_err().contains("recursion limit")
        );
        let aliases = format!("a: &a {}\nb: [{}]", "x".repeat(100_000), "*a,".repeat(1_000));
        assert!(parse(aliases.as_bytes()).unwrap_err().contains("excessive aliases"));
    }
}

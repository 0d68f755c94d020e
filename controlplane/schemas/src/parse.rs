//! Parses JSON text into a tree and records duplicate keys.

use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::Parsed;
use super::order::PathHash;
use super::tree_path::TreePath;

/// Maximum number of recorded duplicates: the path of each can be as long as the text.
const MAX_NOTES: usize = 100;

/// Parses one JSON value that takes the whole text.
pub(super) fn parse(bytes: &[u8]) -> Result<Parsed, serde_json::Error> {
    let duplicates = RefCell::new(Vec::new());
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let keys = RefCell::new(Vec::new());
    let seed =
        Seed { path: &TreePath::Root, hash: PathHash::default(), duplicates: &duplicates, keys: &keys };
    let value = seed.deserialize(&mut reader)?;
    reader.end()?;
    Ok(Parsed { value, duplicates: duplicates.into_inner(), keys: keys.into_inner() })
}

struct Seed<'a> {
    path: &'a TreePath<'a>,
    hash: PathHash,
    duplicates: &'a RefCell<Vec<String>>,
    keys: &'a RefCell<Vec<u64>>,
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        loop {
            let path = TreePath::Item(self.path, list.len());
            let hash = self.hash.item(list.len());
            let Some(item) = items.next_element_seed(Seed { path: &path, hash, ..self })? else {
                return Ok(Value::Array(list));
            };
            list.push(item);
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = entries.next_key::<String>()? {
            let path = TreePath::Field(self.path, &name);
            let hash = self.hash.field(&name);
            self.keys.borrow_mut().push(hash.value());
            let value = entries.next_value_seed(Seed { path: &path, hash, ..self })?;
            if map.contains_key(&name) && self.duplicates.borrow().len() < MAX_NOTES {
                self.duplicates.borrow_mut().push(format!("duplicate field \"{path}\""));
            }
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_is_limited() {
        let nested = |depth: usize| parse(format!("{}{}", "[".repeat(depth), "]".repeat(depth)).as_bytes());
        assert!(nested(127).is_ok());
        for depth in [128, 1_000_000] {
            let error = nested(depth).err().unwrap().to_string();
            assert!(error.contains("recursion limit"), "{error}");
        }
    }
}

//! Deserializers that keep only the used parts of a document.
//!
//! In memory, an empty value takes up to a hundred times the size of its text. Parsed documents are kept until the
//! layers are fetched. Configurations are kept as long as the image.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Annotation of containerd with the name of an image.
pub(crate) const CONTAINERD_NAME: &str = "io.containerd.image.name";
/// Annotation with the name or the tag of an image.
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Maximum number of URLs of a descriptor that are kept.
const URLS_MAX: usize = 16;
/// Maximum number of entries of an image's history that are kept. Only tools read the history.
const HISTORY_MAX: usize = 1000;
/// The history of an image in its configuration.
const HISTORY: &str = "history";
/// The other used fields of a configuration.
const CONFIG_FIELDS: [&str; 9] =
    ["architecture", "author", "config", "created", "os", "os.features", "os.version", "rootfs", "variant"];

/// The used fields of a configuration.
pub(super) struct ConfigFields(pub(super) Map<String, Value>);

/// The first elements of a list. Null is an empty list.
struct First<T> {
    most: usize,
    of: PhantomData<T>,
}

/// The annotations with names. Null means no annotations.
struct Names;

/// The fields of a configuration.
struct Fields;

/// Deserializes the annotations that have names of an image.
pub(super) fn names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HashMap<String, String>, D::Error> {
    deserializer.deserialize_any(Names)
}

/// Deserializes the first URLs of a descriptor.
pub(super) fn first_urls<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    First::new(URLS_MAX).deserialize(deserializer)
}

/// The number of elements and fields in a value.
pub(super) fn count(value: &Value) -> usize {
    match value {
        Value::Array(list) => list.len() + list.iter().map(count).sum::<usize>(),
        Value::Object(map) => map.len() + map.values().map(count).sum::<usize>(),
        _ => 0,
    }
}

// === impl First ===

impl<T> First<T> {
    fn new(most: usize) -> Self {
        Self { most, of: PhantomData }
    }
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for First<T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for First<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_unit<E>(self) -> Result<Vec<T>, E> {
        Ok(Vec::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut first = Vec::new();
        while first.len() < self.most {
            match list.next_element()? {
                Some(element) => first.push(element),
                None => return Ok(first),
            }
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(first)
    }
}

// === impl Names ===

impl<'de> Visitor<'de> for Names {
    type Value = HashMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("annotations")
    }

    fn visit_unit<E>(self) -> Result<HashMap<String, String>, E> {
        Ok(HashMap::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HashMap<String, String>, A::Error> {
        let mut names = HashMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if [CONTAINERD_NAME, REF_NAME].contains(&key.as_str()) {
                names.insert(key, map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(names)
    }
}

// === impl ConfigFields ===

impl<'de> Deserialize<'de> for ConfigFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Fields)
    }
}

impl<'de> Visitor<'de> for Fields {
    type Value = ConfigFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a configuration")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ConfigFields, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == HISTORY {
                let entries: Vec<Value> = map.next_value_seed(First::new(HISTORY_MAX))?;
                fields.insert(name, Value::Array(entries));
            } else if CONFIG_FIELDS.contains(&name.as_str()) {
                fields.insert(name, map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(ConfigFields(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;
    use crate::manifest::Descriptor;

    #[test]
    fn a_descriptor_keeps_names_and_the_first_urls() {
        let urls: Vec<String> = (0..1000).map(|number| format!("https://e.example/{number}")).collect();
        let annotations = serde_json::json!({"a": "b", "c": {"d": [1]}, REF_NAME: "name"});
        let text = serde_json::json!({"digest": Digest::of(b"x"), "size": 1, "urls": urls, "annotations": annotations});
        let descriptor: Descriptor = serde_json::from_str(&text.to_string()).unwrap();
        assert_eq!(descriptor.urls.as_slice(), &urls[..URLS_MAX]);
        assert_eq!(descriptor.annotations, HashMap::from([(REF_NAME.to_owned(), "name".to_owned())]));
        for wrong in [serde_json::json!({"urls": [1]}), serde_json::json!({"annotations": {REF_NAME: 1}})] {
            let mut object = serde_json::json!({"digest": Digest::of(b"x"), "size": 1});
            object.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
            assert!(serde_json::from_str::<Descriptor>(&object.to_string()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_configuration_keeps_the_used_fields() {
        let history = vec![serde_json::json!({}); HISTORY_MAX + 1];
        let config = serde_json::json!({"os": "linux", "config": {"Env": ["A=b"]}, "unknown": [1], "history": history});
        let ConfigFields(mut fields) = serde_json::from_str(&config.to_string()).unwrap();
        let kept = fields.remove(HISTORY).unwrap();
        assert_eq!(kept.as_array().unwrap().len(), HISTORY_MAX);
        let expect = serde_json::json!({"os": "linux", "config": {"Env": ["A=b"]}});
        assert_eq!(Value::Object(fields), expect);
        assert_eq!(count(&expect), 4);
    }
}

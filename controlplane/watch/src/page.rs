//! Pages of lists.

use std::collections::VecDeque;

use bytes::Bytes;
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// Maximum objects of a page. A server may ignore the requested number, and an empty object is only two bytes.
const MAX_ITEMS: usize = 1 << 19;

/// A page of a list. The objects are parts of the response and are decoded one at a time.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) items: VecDeque<Bytes>,
    /// Token of the next page. Empty on the last page.
    pub(crate) next: String,
    /// Resource version of the list. Empty if the server sent no version.
    pub(crate) version: String,
}

#[derive(Deserialize)]
struct List<'a> {
    #[serde(default)]
    metadata: Option<Metadata>,
    #[serde(default, borrow, deserialize_with = "items")]
    items: Vec<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct Metadata {
    #[serde(default, rename = "resourceVersion")]
    version: Option<String>,
    #[serde(default, rename = "continue")]
    next: Option<String>,
}

impl Page {
    pub(crate) fn parse(response: &Bytes) -> Result<Self, serde_json::Error> {
        let list: List<'_> = serde_json::from_slice(response)?;
        let metadata = list.metadata.unwrap_or_default();
        Ok(Self {
            items: list.items.into_iter().map(|item| response.slice_ref(item.get().as_bytes())).collect(),
            next: metadata.next.unwrap_or_default(),
            version: metadata.version.unwrap_or_default(),
        })
    }
}

/// Reads the objects of a list. `null` is an empty list, as in Go.
fn items<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<&'de RawValue>, D::Error> {
    deserializer.deserialize_any(Items)
}

struct Items;

impl<'de> Visitor<'de> for Items {
    type Value = Vec<&'de RawValue>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a list of objects")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = sequence.next_element()? {
            if items.len() == MAX_ITEMS {
                return Err(A::Error::custom(format_args!("more than {MAX_ITEMS} objects")));
            }
            items.push(item);
        }
        Ok(items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &'static str) -> Result<Page, serde_json::Error> {
        Page::parse(&Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn a_page_has_its_objects_and_the_token_of_the_next_one() {
        let page = parse(
            r#"{"kind": "L", "items": [{"a": 1}, {"b": [2]}], "metadata": {"resourceVersion": "7", "continue": "n"}}"#,
        )
        .unwrap();
        assert_eq!(page.items, [r#"{"a": 1}"#, r#"{"b": [2]}"#]);
        assert_eq!((page.next.as_str(), page.version.as_str()), ("n", "7"));
    }

    #[test]
    fn a_page_has_a_maximum_of_objects() {
        let parse = |count: usize| {
            let text = format!(r#"{{"items":[{}0]}}"#, "0,".repeat(count - 1));
            Page::parse(&Bytes::from(text)).map(|page| page.items.len())
        };
        assert_eq!(parse(MAX_ITEMS).unwrap(), MAX_ITEMS);
        let error = parse(MAX_ITEMS + 1).unwrap_err().to_string();
        assert!(error.starts_with("more than 524288 objects"), "{error}");
    }

    #[test]
    fn absent_and_null_fields_are_empty() {
        for text in ["{}", r#"{"items": null, "metadata": null}"#, r#"{"metadata": {"continue": null}}"#] {
            let page = parse(text).unwrap();
            assert!(page.items.is_empty() && page.next.is_empty() && page.version.is_empty(), "{text}");
        }
        for text in ["", "[1]", r#"{"items": {}}"#, r#"{"items": [{}"#] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}

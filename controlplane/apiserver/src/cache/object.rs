//! The encoded form of an object and its key in the store.
//!
//! Stored objects have no resourceVersion, because the resourceVersion is the revision of their commit. The encoding
//! starts with apiVersion, kind and metadata, in this order, so the revision is inserted at a known offset when an
//! object is sent. The object shares its bytes with the store's memory, which matters for events: most objects of a
//! node with many pods are events.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use coracle_kinds::{
    Resource,
    selector::{SelectorAttributes, part},
};
use serde_json::{Map, Value, value::RawValue};

use super::fields::Fields;
use crate::{
    offload::MIN_OFFLOADED_BYTES,
    superseded::{CountedBytes, SupersededObjects},
};

/// An object at one commit.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) key: Arc<str>,
    pub(crate) revision: u64,
    /// The stored encoding, without resourceVersion.
    stored: Bytes,
    /// Offset of the first field of the metadata.
    fields_at: usize,
    /// The attributes for selectors, parsed at first use.
    attributes: OnceLock<SelectorAttributes>,
    /// Set if responses still refer to the object after the cache and its history have dropped it.
    superseded: OnceLock<Box<CountedBytes>>,
}

/// A part of an object's bytes, with a reference to the object. A superseded object therefore counts until the part is
/// sent.
struct Part {
    bytes: Bytes,
    _object: Arc<Object>,
}

/// The same bytes with a reference to the object. `bytes` is a part of the object's bytes.
pub(crate) fn part_of(object: Arc<Object>, bytes: Bytes) -> Bytes {
    Bytes::from_owner(Part { bytes, _object: object })
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Object {
    /// The object of stored bytes in the format of [`encode`].
    pub(crate) fn from_stored(key: Arc<str>, revision: u64, stored: Bytes) -> Self {
        let window = stored.get(..MAX_HEAD).unwrap_or(&stored);
        let at = window.windows(METADATA.len()).position(|bytes| bytes == METADATA.as_bytes());
        let (stored, at) = at.map_or((Bytes::from_static(EMPTY_OBJECT), 1), |at| (stored, at));
        let fields_at = at + METADATA.len();
        Self { key, revision, stored, fields_at, attributes: OnceLock::new(), superseded: OnceLock::new() }
    }

    /// An object in a version that may differ from the stored version.
    pub(crate) fn of(kind: &Resource, key: Arc<str>, revision: u64, object: &Value) -> Self {
        Self::from_stored(key, revision, encode(kind, object))
    }

    /// The object with another revision: the revision of its deletion, or of the commit after which a selector no
    /// longer matches it.
    pub(crate) fn with_revision(&self, revision: u64) -> Self {
        Self { revision, ..self.without_attributes() }
    }

    /// A copy of the object without its parsed attributes.
    pub(crate) fn without_attributes(&self) -> Self {
        Self {
            key: self.key.clone(),
            revision: self.revision,
            stored: self.stored.clone(),
            fields_at: self.fields_at,
            attributes: OnceLock::new(),
            superseded: OnceLock::new(),
        }
    }

    /// Counts the object as superseded until it is dropped, if there are other references to it. The cache calls this
    /// function when it drops its last reference.
    pub(super) fn count_superseded(self: &Arc<Self>, superseded: &SupersededObjects) {
        if Arc::strong_count(self) > 1 {
            let _counted = self.superseded.get_or_init(|| Box::new(superseded.count(self.stored_bytes())));
        }
    }

    /// The object with its missing defaults. `None` if no default is missing, or if it is stored in another version.
    pub(crate) fn completed(&self, kind: &Resource) -> Option<Self> {
        if self.api_version() != kind.api_version() {
            return None;
        }
        let old = self.value();
        let mut new = old.clone();
        kind.strategy().default(&mut new);
        (new != old).then(|| Self::of(kind, self.key.clone(), self.revision, &new))
    }

    /// The apiVersion that the object is encoded in.
    pub(crate) fn api_version(&self) -> &str {
        let rest = self.stored.strip_prefix(API_VERSION.as_bytes()).unwrap_or_default();
        let end = rest.iter().position(|byte| *byte == b'"').unwrap_or_default();
        std::str::from_utf8(&rest[..end]).unwrap_or_default()
    }

    /// The object as a tree.
    pub(crate) fn value(&self) -> Value {
        #[cfg(test)]
        parses::count();
        serde_json::from_slice(&self.json()).unwrap_or_default()
    }

    /// The fields at these paths, without resourceVersion. The parser skips the other fields.
    pub(crate) fn part(&self, paths: &[&[&str]]) -> Value {
        part(std::str::from_utf8(&self.stored).unwrap_or_default(), paths)
    }

    /// The fields of the object, without resourceVersion. `None` if the stored bytes are no JSON object.
    pub(crate) fn fields(&self) -> Option<Fields<'_>> {
        Fields::parse(std::str::from_utf8(&self.stored).ok()?)
    }

    /// Whether work on the object must run outside of the async workers.
    pub(crate) fn is_large(&self) -> bool {
        self.stored_bytes() > MIN_OFFLOADED_BYTES
    }

    /// Bytes of the stored encoding.
    pub(crate) fn stored_bytes(&self) -> usize {
        self.stored.len()
    }

    /// The object's name: the last part of its key.
    pub(crate) fn name(&self) -> &str {
        self.key.rsplit('/').next().unwrap_or_default()
    }

    /// Labels and selectable fields, parsed at most once.
    pub(crate) fn selector_attributes(&self, kind: &Resource) -> &SelectorAttributes {
        self.attributes.get_or_init(|| {
            #[cfg(test)]
            parses::count();
            SelectorAttributes::read(kind, &self.stored)
        })
    }

    /// The stored encoding, which all copies of the object share.
    pub(super) fn stored(&self) -> &Bytes {
        &self.stored
    }

    /// The stored encoding, without resourceVersion.
    pub(super) fn encoded(&self) -> &[u8] {
        &self.stored
    }

    /// The text of the spec; empty if absent.
    pub(crate) fn spec(&self) -> &str {
        #[cfg(test)]
        parses::count_spec();
        #[derive(serde::Deserialize)]
        struct Specified<'a> {
            #[serde(borrow, default)]
            spec: Option<&'a RawValue>,
        }
        let found: Option<Specified<'_>> = serde_json::from_slice(&self.stored).ok();
        found.and_then(|found| found.spec).map_or("", RawValue::get)
    }

    /// The whole object as JSON.
    pub(crate) fn json(&self) -> Bytes {
        let mut json = Vec::with_capacity(self.json_len());
        self.push_json(&mut json);
        json.into()
    }

    /// The length of [`Self::json`] in bytes.
    pub(crate) fn json_len(&self) -> usize {
        let digits = self.revision.checked_ilog10().map_or(1, |log| log as usize + 1);
        self.stored.len()
            + EMPTY_RESOURCE_VERSION.len()
            + digits
            + usize::from(!self.is_only_metadata_field())
    }

    /// Appends the whole object as JSON.
    pub(crate) fn push_json(&self, text: &mut Vec<u8>) {
        text.extend_from_slice(self.stored.get(..self.fields_at).unwrap_or_default());
        text.extend_from_slice(self.resource_version_field().as_bytes());
        text.extend_from_slice(self.stored.get(self.fields_at..).unwrap_or_default());
    }

    /// The whole object as JSON, in two parts: a new start, and the rest, which is not copied.
    pub(crate) fn json_parts(&self) -> (Vec<u8>, Bytes) {
        let head = self.stored.get(..self.fields_at).unwrap_or_default();
        ([head, self.resource_version_field().as_bytes()].concat(), self.stored.slice(self.fields_at..))
    }

    /// The object as an item of a list of its kind, in two parts: a new start, and the rest, which is not copied. As
    /// upstream, only items of custom resources have apiVersion and kind.
    pub(crate) fn item(&self, kind: &Resource) -> (String, Bytes) {
        let head = self.stored.get(..self.fields_at).filter(|_| !kind.is_built_in());
        let head = head.and_then(|head| std::str::from_utf8(head).ok());
        let start = match head {
            Some(head) => format!("{head}{}", self.resource_version_field()),
            None => format!("{{{METADATA}{}", self.resource_version_field()),
        };
        (start, self.stored.slice(self.fields_at..))
    }

    /// The resourceVersion as the first field of the metadata.
    fn resource_version_field(&self) -> String {
        let end = if self.is_only_metadata_field() { "" } else { "," };
        format!("\"resourceVersion\":\"{}\"{end}", self.revision)
    }

    /// Whether the resourceVersion is the only field of the metadata.
    fn is_only_metadata_field(&self) -> bool {
        self.stored.get(self.fields_at) == Some(&b'}')
    }
}

const METADATA: &str = "\"metadata\":{";
/// The resourceVersion without its digits and the comma.
const EMPTY_RESOURCE_VERSION: &str = "\"resourceVersion\":\"\"";
const API_VERSION: &str = "{\"apiVersion\":\"";
/// Maximum offset of the metadata: apiVersion and kind are names of at most 253 and 63 letters.
const MAX_HEAD: usize = 1024;
/// Initial capacity in bytes; most encoded objects are smaller.
const USUAL_OBJECT_BYTES: usize = 4 << 10;
/// Replaces bytes that are not in the format of [`encode`].
const EMPTY_OBJECT: &[u8] = b"{\"metadata\":{}}";

fn head(kind: &Resource) -> String {
    format!("{API_VERSION}{}\",\"kind\":\"{}\",{METADATA}", kind.api_version(), kind.kind)
}

/// Encodes an object for the store, without its resourceVersion.
pub(crate) fn encode(kind: &Resource, object: &Value) -> Bytes {
    let empty = Map::new();
    let object = object.as_object().unwrap_or(&empty);
    let metadata = object.get("metadata").and_then(Value::as_object).unwrap_or(&empty);
    let mut text = Vec::with_capacity(USUAL_OBJECT_BYTES);
    text.extend_from_slice(head(kind).as_bytes());
    let fields = metadata.iter().filter(|(key, _)| *key != "resourceVersion");
    for (at, (key, value)) in fields.enumerate() {
        text.extend((at > 0).then_some(b','));
        push_field(&mut text, key, value);
    }
    text.push(b'}');
    for (key, value) in
        object.iter().filter(|(key, _)| !matches!(key.as_str(), "apiVersion" | "kind" | "metadata"))
    {
        text.push(b',');
        push_field(&mut text, key, value);
    }
    text.push(b'}');
    // A growing vector reserves up to twice its length, and the cache keeps these bytes.
    text.shrink_to_fit();
    text.into()
}

/// Encodes an object from all of its fields, in the format of [`encode`]. The metadata must have no resourceVersion.
pub(crate) fn encode_fields(kind: &Resource, fields: &Fields<'_>) -> Bytes {
    let mut text = Vec::with_capacity(USUAL_OBJECT_BYTES);
    text.extend_from_slice(head(kind).as_bytes());
    // The head contains the opening brace of the metadata.
    let metadata = fields.text("metadata").and_then(|text| text.strip_prefix('{')).unwrap_or("}");
    text.extend_from_slice(metadata.as_bytes());
    let others = fields.iter().filter(|(name, _)| !matches!(*name, "apiVersion" | "kind" | "metadata"));
    for (name, value) in others {
        text.push(b',');
        // Writing to memory does not fail.
        let _ = serde_json::to_writer(&mut text, name);
        text.push(b':');
        text.extend_from_slice(value.as_bytes());
    }
    text.push(b'}');
    text.shrink_to_fit();
    text.into()
}

fn push_field(text: &mut Vec<u8>, key: &str, value: &Value) {
    // Writing to memory does not fail.
    let _ = serde_json::to_writer(&mut *text, key);
    text.push(b':');
    let _ = serde_json::to_writer(text, value);
}

/// The store's key of an object: `group/resource/namespace/name`, without namespace for cluster-scoped kinds.
pub(crate) fn key_of(kind: &Resource, namespace: &str, name: &str) -> String {
    format!("{}{name}", prefix_of(kind, namespace))
}

/// The prefix of the keys of a namespace's objects. An empty namespace selects all namespaces.
pub(crate) fn prefix_of(kind: &Resource, namespace: &str) -> String {
    let stored = kind.stored_as();
    if stored.namespaced && !namespace.is_empty() {
        format!("{}/{}/{namespace}/", stored.group, stored.plural)
    } else {
        format!("{}/{}/", stored.group, stored.plural)
    }
}

/// Counts how often this thread parses objects. Tests check that some work does not grow with the number of objects.
#[cfg(test)]
pub(crate) mod parses {
    use std::cell::Cell;

    thread_local!(static COUNT: Cell<usize> = const { Cell::new(0) });
    thread_local!(static SPECS: Cell<usize> = const { Cell::new(0) });

    pub(super) fn count() {
        COUNT.set(COUNT.get() + 1);
    }

    pub(crate) fn so_far() -> usize {
        COUNT.get()
    }

    pub(super) fn count_spec() {
        SPECS.set(SPECS.get() + 1);
    }

    /// Number of reads of a spec so far.
    pub(crate) fn specs() -> usize {
        SPECS.get()
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_length_equals_the_length_of_the_text() {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        for revision in [0, 1, 9, 10, 99, 100, u64::MAX] {
            for object in [json!({}), json!({"metadata": {"name": "n"}, "data": {"a": "b"}})] {
                let object = Object::of(kind, "k".into(), revision, &object);
                let text = object.json();
                assert_eq!(object.json_len(), text.len(), "{text:?}");
                assert_eq!(object.value()["metadata"]["resourceVersion"], revision.to_string());
            }
        }
    }
}

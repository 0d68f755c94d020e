//! Encodes JSON trees as Kubernetes' protobuf messages. Absent fields are not written; Go reads them as zero.

use base64::Engine as _;
use serde_json::{Map, Value};

use super::table::{Field, Message, MessageId, Type, tables};
use crate::kind;

const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";
const STATUS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.Status";
/// The first bytes of an envelope.
const PREFIX: &[u8] = b"k8s\0";

/// A message in the wire format. A nested message follows its length, which is known only after the message is encoded.
/// So the heads of nested messages are stored separately and inserted at the end: each byte is copied once, not once
/// for each level.
#[derive(Debug, Default)]
struct Writer {
    /// All bytes of the message, except the heads of nested messages.
    bytes: Vec<u8>,
    /// The heads of nested messages, ordered by place.
    heads: Vec<Head>,
    /// Number of bytes of all heads.
    head_bytes: usize,
}

/// The head of a nested message: the tag of its field, and its length.
#[derive(Debug)]
struct Head {
    /// Place in [`Writer::bytes`].
    at: usize,
    field: u32,
    length: usize,
}

/// Whether objects of this kind have a protobuf form. Custom resources have none.
pub fn is_supported(api_version: &str, kind: &str) -> bool {
    message_of(api_version, kind).is_some()
}

/// An object with its envelope. `None` if its kind has no protobuf form.
pub fn encode(object: &Value) -> Option<Vec<u8>> {
    let (api_version, kind) = (object["apiVersion"].as_str()?, object["kind"].as_str()?);
    Some(envelope(api_version, kind, &item(api_version, kind, object)?))
}

/// An object without its envelope, as in a list. `None` if the kind has no protobuf form.
pub fn item(api_version: &str, kind: &str, object: &Value) -> Option<Vec<u8>> {
    let mut writer = Writer::default();
    writer.message(message_of(api_version, kind)?, object.as_object()?);
    Some(writer.finish())
}

/// A `v1` Status with its envelope.
pub fn status(status: &Value) -> Vec<u8> {
    let mut writer = Writer::default();
    if let (Some(message), Some(fields)) = (tables().find(STATUS), status.as_object()) {
        writer.message(message, fields);
    }
    envelope("v1", "Status", &writer.finish())
}

/// PartialObjectMetadata of an object, without an envelope.
pub fn partial_item(object: &Value) -> Vec<u8> {
    let mut writer = Writer::default();
    if let (Some(meta), Some(metadata)) = (tables().find(OBJECT_META), object["metadata"].as_object()) {
        writer.nested(1, |inner| inner.message(meta, metadata));
    }
    writer.finish()
}

/// The envelope of an object's bytes.
pub fn envelope(api_version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
    let mut bytes = envelope_head(api_version, kind, raw.len());
    bytes.extend_from_slice(raw);
    bytes
}

/// The bytes of an envelope before the bytes of its object, which has this length.
pub fn envelope_head(api_version: &str, kind: &str, length: usize) -> Vec<u8> {
    let mut writer = Writer { bytes: PREFIX.to_vec(), ..Writer::default() };
    writer.nested(1, |meta| {
        meta.text(1, api_version);
        meta.text(2, kind);
    });
    writer.start(2, length);
    writer.finish()
}

/// The metadata of a list, as its first field.
pub fn list_head(metadata: &Value) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.nested(1, |meta| {
        meta.text(2, metadata["resourceVersion"].as_str().unwrap_or_default());
        meta.text(3, metadata["continue"].as_str().unwrap_or_default());
        if let Some(count) = metadata["remainingItemCount"].as_i64() {
            meta.int(4, count);
        }
    });
    writer.finish()
}

/// The tag and length of a list's item.
pub fn item_head(length: usize) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.start(2, length);
    writer.finish()
}

/// An event of a watch, in its frame. `object` is an object with its envelope.
pub fn event(name: &str, object: &[u8]) -> Vec<u8> {
    let mut event = Writer::default();
    event.text(1, name);
    event.nested(2, |extension| extension.bytes(1, object));
    let event = event.finish();
    let length = u32::try_from(event.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], &event].concat()
}

fn message_of(api_version: &str, kind: &str) -> Option<&'static Message> {
    kind::schema_of(api_version, kind).and_then(|schema| tables().find(schema))
}

fn push_varint(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
}

/// Number of bytes of a varint.
fn varint_size(number: u64) -> usize {
    let bits = u64::BITS - (number | 1).leading_zeros();
    bits.div_ceil(7) as usize
}

fn tag(field: u32, wire_type: u64) -> u64 {
    u64::from(field) << 3 | wire_type
}

// === impl Head ===

impl Head {
    fn size(&self) -> usize {
        varint_size(tag(self.field, 2)) + varint_size(self.length as u64)
    }

    fn push(&self, bytes: &mut Vec<u8>) {
        push_varint(bytes, tag(self.field, 2));
        push_varint(bytes, self.length as u64);
    }
}

// === impl Writer ===

impl Writer {
    /// All bytes, with the heads at their places.
    fn finish(self) -> Vec<u8> {
        if self.heads.is_empty() {
            return self.bytes;
        }
        let mut all = Vec::with_capacity(self.length());
        let mut from = 0;
        for head in &self.heads {
            all.extend_from_slice(self.bytes.get(from..head.at).unwrap_or_default());
            head.push(&mut all);
            from = head.at;
        }
        all.extend_from_slice(self.bytes.get(from..).unwrap_or_default());
        all
    }

    fn length(&self) -> usize {
        self.bytes.len() + self.head_bytes
    }

    fn varint(&mut self, number: u64) {
        push_varint(&mut self.bytes, number);
    }

    fn tag(&mut self, field: u32, wire_type: u64) {
        self.varint(tag(field, wire_type));
    }

    /// Writes the tag and the length of a length-delimited value.
    fn start(&mut self, field: u32, length: usize) {
        self.tag(field, 2);
        self.varint(length as u64);
    }

    fn bytes(&mut self, field: u32, bytes: &[u8]) {
        self.start(field, bytes.len());
        self.bytes.extend_from_slice(bytes);
    }

    fn text(&mut self, field: u32, text: &str) {
        self.bytes(field, text.as_bytes());
    }

    fn int(&mut self, field: u32, number: i64) {
        self.tag(field, 0);
        self.varint(number.cast_unsigned());
    }

    fn double(&mut self, field: u32, number: f64) {
        self.tag(field, 1);
        self.bytes.extend_from_slice(&number.to_le_bytes());
    }

    /// Writes a nested message.
    fn nested(&mut self, field: u32, write: impl FnOnce(&mut Writer)) {
        let (index, before) = (self.heads.len(), self.length());
        self.heads.push(Head { at: self.bytes.len(), field, length: 0 });
        write(self);
        let length = self.length() - before;
        if let Some(head) = self.heads.get_mut(index) {
            head.length = length;
            self.head_bytes += head.size();
        }
    }

    /// Writes a nested message, unless it is empty.
    fn nested_if_any(&mut self, field: u32, write: impl FnOnce(&mut Writer)) {
        let (index, head_bytes) = (self.heads.len(), self.head_bytes);
        self.nested(field, write);
        if self.heads.get(index).is_some_and(|head| head.length == 0) {
            self.heads.truncate(index);
            self.head_bytes = head_bytes;
        }
    }

    fn message(&mut self, message: &Message, object: &Map<String, Value>) {
        for field in message.fields() {
            if let (Type::Message(id), "") = (&field.r#type, &*field.name) {
                self.nested_if_any(field.number, |inner| inner.message(tables().get(*id), object));
            } else if let Some(value) = object.get(&*field.name) {
                self.field(field, value);
            }
        }
    }

    fn field(&mut self, field: &Field, value: &Value) {
        let number = field.number;
        if field.map {
            for (key, value) in value.as_object().into_iter().flatten() {
                self.nested(number, |entry| {
                    entry.text(1, key);
                    entry.value(2, field.r#type, value);
                });
            }
        } else if field.repeated {
            for element in value.as_array().into_iter().flatten() {
                match (field.r#type, element) {
                    // An element of a list is not absent: `null` can be a value of an enumeration.
                    (Type::Json, Value::Null) => self.nested(number, |inner| inner.text(1, "null")),
                    (shape, element) => self.value(number, shape, element),
                }
            }
        } else {
            self.value(number, field.r#type, value);
        }
    }

    /// One value. A value whose type differs from the type of the field is not written. Stored objects have no such
    /// values, because they were validated.
    fn value(&mut self, field: u32, shape: Type, value: &Value) {
        match (shape, value) {
            (Type::Text, Value::String(text)) => self.text(field, text),
            (Type::Int, Value::Number(number)) => self.int(field, number.as_i64().unwrap_or_default()),
            (Type::Bool, Value::Bool(is_set)) => self.int(field, i64::from(*is_set)),
            (Type::Double, Value::Number(number)) => self.double(field, number.as_f64().unwrap_or_default()),
            (Type::Bytes, Value::String(text)) => {
                let decoded = base64::engine::general_purpose::STANDARD.decode(text);
                self.bytes(field, &decoded.unwrap_or_default());
            }
            (Type::Time | Type::MicroTime, Value::String(text)) => {
                if let Ok(at) = text.parse::<jiff::Timestamp>() {
                    self.nested(field, |time| {
                        time.int(1, at.as_second());
                        time.int(2, at.subsec_nanosecond().into());
                    });
                }
            }
            (Type::Quantity, Value::String(text)) => self.nested(field, |inner| inner.text(1, text)),
            (Type::Quantity, Value::Number(number)) => {
                self.nested(field, |inner| inner.text(1, &number.to_string()));
            }
            (Type::IntOrString, Value::String(text)) => self.nested(field, |inner| {
                inner.int(1, 1);
                inner.text(3, text);
            }),
            (Type::IntOrString, Value::Number(number)) => {
                self.nested(field, |inner| inner.int(2, number.as_i64().unwrap_or_default()));
            }
            (Type::Json, value) if !value.is_null() => {
                self.nested(field, |inner| inner.text(1, &value.to_string()));
            }
            (Type::Choice(id), value) => self.choice(field, id, value),
            (Type::Message(id), Value::Object(object)) => {
                self.nested(field, |inner| inner.message(tables().get(id), object));
            }
            (Type::Message(id), Value::Array(_)) => self.nested(field, |inner| {
                // The message only wraps this list.
                if let [list] = tables().get(id).fields() {
                    inner.field(list, value);
                }
            }),
            _ => {}
        }
    }

    /// Writes a field that can be a schema, a list of schemas or a boolean.
    fn choice(&mut self, field: u32, id: MessageId, value: &Value) {
        let message = tables().get(id);
        let named = |name: &str| message.fields().iter().find(|field| *field.name == *name);
        self.nested(field, |inner| {
            let mut write = |name: &str, value: &Value| {
                if let Some(field) = named(name) {
                    inner.field(field, value);
                }
            };
            match value {
                Value::Bool(_) => write("allows", value),
                Value::Array(_) => {
                    write("jSONSchemas", value);
                    write("property", value);
                }
                value if !value.is_null() => {
                    write("allows", &Value::Bool(true));
                    write("schema", value);
                }
                _ => {}
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::protobuf::decode;

    #[test]
    fn an_encoded_object_is_decoded_again() {
        let objects = [
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "creationTimestamp": "2026-01-02T03:04:05Z",
                "labels": {"a": "b"}, "managedFields": [{"fieldsV1": {"f:data": {}}, "manager": "m"}]},
                "data": {"key": "dmFsdWU="}, "type": "Opaque", "immutable": true}),
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {
                "terminationGracePeriodSeconds": -1,
                "containers": [{"name": "c", "image": "i", "resources": {"limits": {"cpu": "100m"}},
                    "livenessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 3},
                    "readinessProbe": {"tcpSocket": {"port": 80}}}],
                "volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}},
                    {"name": "w", "configMap": {"name": "cm", "items": [{"key": "k", "path": "p"}]}}]}}),
            json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "l"},
                "spec": {"renewTime": "2026-01-02T03:04:05.678901Z"}}),
            json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {"name": "c"},
                "spec": {"extra": {"k": ["x", "y"]}, "signerName": "s"}}),
            json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "d"},
                "spec": {"group": "g", "versions": [{"name": "v1", "schema": {"openAPIV3Schema": {"type": "object",
                    "default": {"x": 1}, "maximum": 1.5, "enum": ["a", null],
                    "properties": {"a": {"items": {"type": "string"}}, "b": {"additionalProperties": true}}}}}]}}),
        ];
        for object in objects {
            let bytes = encode(&object).expect("a built-in kind");
            assert_eq!(decode(&bytes).expect("decoded"), object);
        }
    }

    #[test]
    fn nested_messages_are_written_once_with_lengths_of_all_sizes() {
        let outer = |inner: &[u8]| {
            let mut bytes = vec![0x0a];
            push_varint(&mut bytes, inner.len() as u64);
            assert_eq!(bytes.len(), 1 + varint_size(inner.len() as u64));
            [&bytes[..], inner].concat()
        };
        for size in [0, 1, 121, 122, 123, 124, 125, 126, 127, 128, 16_380, 16_383, 16_384, 1 << 21] {
            let text = "x".repeat(size);
            let mut writer = Writer::default();
            writer.nested(1, |one| {
                one.nested_if_any(9, |_empty| {});
                one.nested_if_any(1, |two| two.nested(1, |three| three.text(1, &text)));
            });
            assert_eq!(writer.bytes.len(), outer(text.as_bytes()).len(), "only the text itself");
            assert_eq!(
                writer.length(),
                writer.bytes.len() + writer.heads.iter().map(Head::size).sum::<usize>()
            );
            assert!(writer.finish() == outer(&outer(&outer(&outer(text.as_bytes())))), "{size}");
        }
    }

    #[test]
    fn an_unknown_kind_has_no_protobuf_form() {
        assert_eq!(encode(&json!({"apiVersion": "example.com/v1", "kind": "Widget"})), None);
        assert!(is_supported("v1", "Pod") && !is_supported("v1", "Widget"));
    }

    #[test]
    fn an_event_is_framed_by_its_length() {
        let frame = event("ADDED", b"k8s\0");
        assert_eq!(&frame[..4], 15_u32.to_be_bytes());
        assert_eq!(&frame[4..], b"\x0a\x05ADDED\x12\x06\x0a\x04k8s\0");
    }

    #[test]
    fn the_head_of_a_list_has_its_metadata() {
        let head = list_head(&json!({"resourceVersion": "7", "continue": "next", "remainingItemCount": 3}));
        assert_eq!(head, b"\x0a\x0b\x12\x017\x1a\x04next\x20\x03");
        assert_eq!(item_head(300), b"\x12\xac\x02");
    }
}

//! A list in protobuf as a stream of chunks.
//!
//! The envelope begins with the length of the whole list. So each object is encoded twice: first for its length, and
//! again when it is sent. The server keeps in memory the shared objects, the length of each object, and one chunk.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    vec::IntoIter,
};

use bytes::Bytes;
use coracle_kinds::{Resource, protobuf::encode};
use http_body::{Body, Frame, SizeHint};
use serde_json::Value;

use crate::{cache::Object, in_flight::BodyMemory, media::Form, offload};

/// Minimum bytes of each chunk except the last.
const MIN_CHUNK_BYTES: usize = 16 << 10;

/// Minimum bytes of the objects' JSON that are encoded between two pauses for other requests.
const PART_BYTES: usize = 1 << 20;

/// The body of a list in protobuf.
pub(crate) struct ProtobufList {
    items: Items,
    /// Bytes before the next object.
    bytes: Vec<u8>,
    objects: IntoIter<(Arc<Object>, usize)>,
    /// Remaining bytes.
    left: u64,
    /// Reserved memory of the converted objects.
    _copies: BodyMemory,
}

/// The form of the items.
enum Items {
    Metadata,
    Whole { api_version: String, kind: String },
}

// === impl Items ===

impl Items {
    fn encode(&self, object: &Object) -> Vec<u8> {
        offload::run(object.is_large(), || match self {
            Self::Metadata => encode::partial_item(&object.value()),
            Self::Whole { api_version, kind } => {
                encode::item(api_version, kind, &object.value()).unwrap_or_default()
            }
        })
    }
}

// === impl ProtobufList ===

impl ProtobufList {
    /// A list of objects; `meta` is its ListMeta.
    pub(crate) async fn new(form: Form, kind: &Resource, objects: Vec<Arc<Object>>, meta: &Value) -> Self {
        let (items, api_version, list_kind) = match form {
            Form::PartialProtobuf(version) | Form::Partial(version) => {
                (Items::Metadata, version.api_version().to_owned(), "PartialObjectMetadataList")
            }
            _ => {
                let api_version = kind.api_version().to_string();
                let items = Items::Whole { api_version: api_version.clone(), kind: kind.kind.to_string() };
                (items, api_version, &*kind.list_kind)
            }
        };
        let head = encode::list_head(meta);
        let mut length = head.len();
        let mut sized = Vec::with_capacity(objects.len());
        let mut objects = objects.into_iter();
        while objects.len() > 0 {
            let mut read = 0;
            offload::run(true, || {
                while read < PART_BYTES
                    && let Some(object) = objects.next()
                {
                    read += object.json_len();
                    let size = items.encode(&object).len();
                    length += encode::item_head(size).len() + size;
                    sized.push((object, size));
                }
            });
            // Lets other requests run, and lets the time limit of this request take effect.
            tokio::task::yield_now().await;
        }
        let mut bytes = encode::envelope_head(&api_version, list_kind, length);
        bytes.extend_from_slice(&head);
        let left = (bytes.len() - head.len() + length) as u64;
        Self { items, bytes, objects: sized.into_iter(), left, _copies: BodyMemory::default() }
    }

    /// Keeps a reservation of memory until the list is sent.
    pub(crate) fn holding(self, copies: BodyMemory) -> Self {
        Self { _copies: copies, ..self }
    }

    fn next_chunk(&mut self) -> Option<Bytes> {
        let mut bytes = std::mem::take(&mut self.bytes);
        while bytes.len() < MIN_CHUNK_BYTES {
            let Some((object, size)) = self.objects.next() else { break };
            bytes.extend_from_slice(&encode::item_head(size));
            bytes.extend_from_slice(&self.items.encode(&object));
        }
        (!bytes.is_empty()).then(|| bytes.into())
    }
}

impl Body for ProtobufList {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let chunk = self.next_chunk();
        if let Some(chunk) = &chunk {
            self.left = self.left.saturating_sub(chunk.len() as u64);
        }
        Poll::Ready(chunk.map(|chunk| Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::{kind::by_kind, table::MetaVersion};
    use http_body_util::BodyExt as _;
    use serde_json::json;

    use super::*;
    use crate::cache::encode;

    #[tokio::test]
    async fn the_promised_length_is_sent() {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        for (form, name) in [
            (Form::Protobuf, "ConfigMapList"),
            (Form::PartialProtobuf(MetaVersion::V1), "PartialObjectMetadataList"),
        ] {
            for count in [0, 1, 300] {
                let object = |at| {
                    let object =
                        json!({"metadata": {"name": format!("c{at}")}, "data": {"a": "x".repeat(200)}});
                    Arc::new(Object::from_stored(format!("c{at}").into(), 7, encode(kind, &object)))
                };
                let objects = (0..count).map(object).collect();
                let body = ProtobufList::new(form, kind, objects, &json!({"resourceVersion": "9"})).await;
                let promised = body.size_hint().exact().unwrap();
                let bytes = body.collect().await.unwrap().to_bytes();
                assert_eq!(promised, bytes.len() as u64);
                assert!(bytes.starts_with(b"k8s\0"));
                let found =
                    |text: &str| bytes.windows(text.len()).filter(|part| *part == text.as_bytes()).count();
                assert_eq!(found(name), 1);
                assert_eq!(found("c0"), usize::from(count > 0));
            }
        }
    }
}

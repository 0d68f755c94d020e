//! A list as a stream of chunks: the encoded objects of the watch cache with separators.
//!
//! For a slow client the server holds references to the shared objects and one chunk, not a copy of the list.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    vec::IntoIter,
};

use bytes::Bytes;
use coracle_kinds::{Resource, table};
use http_body::{Body, Frame, SizeHint};
use serde_json::{Value, json};

use crate::{
    cache::{Object, part_of},
    in_flight::BodyMemory,
    media::Form,
    offload,
};

/// Minimum bytes of a chunk. Objects of this size are sent without a copy.
const MIN_CHUNK_BYTES: usize = 16 << 10;

/// The body of a list.
pub(crate) struct ListBody {
    kind: Arc<Resource>,
    form: Form,
    now: jiff::Timestamp,
    /// Bytes before the next object.
    text: Vec<u8>,
    objects: IntoIter<Arc<Object>>,
    /// A stored object that is sent without a copy.
    whole: Option<Bytes>,
    is_first: bool,
    is_ended: bool,
    /// Remaining bytes, if known.
    left: Option<u64>,
    /// Reserved memory of the converted objects.
    _copies: BodyMemory,
}

impl ListBody {
    /// A list of objects; `meta` is its ListMeta.
    pub(crate) fn new(form: Form, kind: Arc<Resource>, objects: Vec<Arc<Object>>, meta: Value) -> Self {
        let now = jiff::Timestamp::now();
        let text = head(form, &kind, meta, now);
        let left = matches!(form, Form::Plain | Form::Discovery).then(|| {
            // Each item except the first is preceded by a comma; the list ends with its closing brackets.
            let length = |object: &Arc<Object>| {
                let (start, rest) = object.item(&kind);
                start.len() + rest.len()
            };
            let items: usize = objects.iter().map(length).sum();
            (text.len() + items + objects.len().saturating_sub(1) + END.len()) as u64
        });
        let objects = objects.into_iter();
        Self {
            kind,
            form,
            now,
            text,
            objects,
            whole: None,
            is_first: true,
            is_ended: false,
            left,
            _copies: BodyMemory::default(),
        }
    }

    /// Holds a memory reservation until the list is sent.
    pub(crate) fn holding(self, copies: BodyMemory) -> Self {
        Self { _copies: copies, ..self }
    }

    fn next_chunk(&mut self) -> Option<Bytes> {
        if let Some(whole) = self.whole.take() {
            return Some(whole);
        }
        let mut text = std::mem::take(&mut self.text);
        while text.len() < MIN_CHUNK_BYTES && !self.is_ended {
            let Some(object) = self.objects.next() else {
                self.is_ended = true;
                text.extend_from_slice(END);
                break;
            };
            if !std::mem::replace(&mut self.is_first, false) {
                text.push(b',');
            }
            match self.form {
                Form::Plain | Form::Discovery | Form::Protobuf => {
                    let (start, rest) = object.item(&self.kind);
                    text.extend_from_slice(start.as_bytes());
                    if rest.len() >= MIN_CHUNK_BYTES {
                        self.whole = Some(part_of(object, rest));
                        break;
                    }
                    text.extend_from_slice(&rest);
                }
                Form::Partial(version) | Form::PartialProtobuf(version) => {
                    let metadata = || table::partial_metadata(&object.value(), version).to_string();
                    text.extend_from_slice(offload::run(object.is_large(), metadata).as_bytes());
                }
                Form::Table(content) => {
                    let row = offload::run(object.is_large(), || self.row(content, &object));
                    text.extend_from_slice(row.as_bytes());
                }
            }
        }
        (!text.is_empty()).then(|| text.into())
    }

    fn row(&self, content: table::Content, object: &Object) -> String {
        let options = table::Options { content, headers: false, now: self.now };
        table::render(&self.kind, [&object.value()], Value::Null, options)["rows"][0].to_string()
    }
}

const END: &[u8] = b"]}";

/// The start of the list, up to its first item.
fn head(form: Form, kind: &Resource, meta: Value, now: jiff::Timestamp) -> Vec<u8> {
    let (mut list, items) = match form {
        Form::Plain | Form::Discovery | Form::Protobuf => {
            return format!(
                "{{\"kind\":\"{}\",\"apiVersion\":\"{}\",\"metadata\":{meta},\"items\":[",
                kind.list_kind,
                kind.api_version()
            )
            .into();
        }
        Form::Table(content) => {
            (table::render(kind, [], meta, table::Options { content, headers: true, now }), "rows")
        }
        Form::Partial(version) | Form::PartialProtobuf(version) => {
            let kind = "PartialObjectMetadataList";
            (json!({"kind": kind, "apiVersion": version.api_version(), "metadata": meta}), "items")
        }
    };
    if let Some(list) = list.as_object_mut() {
        list.remove(items);
    }
    let mut text = list.to_string();
    text.pop();
    text.push_str(&format!(",\"{items}\":["));
    text.into()
}

impl Body for ListBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let chunk = self.next_chunk();
        if let (Some(left), Some(chunk)) = (&mut self.left, &chunk) {
            *left = left.saturating_sub(chunk.len() as u64);
        }
        Poll::Ready(chunk.map(|chunk| Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_ended && self.text.is_empty() && self.whole.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use http_body_util::BodyExt as _;

    use super::*;
    use crate::cache::encode;

    fn config_map(name: &str, size: usize) -> Arc<Object> {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let object = json!({"metadata": {"name": name}, "data": {"a": "x".repeat(size)}});
        Arc::new(Object::from_stored(name.into(), 7, encode(kind, &object)))
    }

    #[tokio::test]
    async fn chunks_make_the_whole_list_and_share_large_objects() {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let objects = vec![config_map("a", 10), config_map("b", 1 << 20), config_map("c", 10)];
        let large = objects[1].item(kind).1.as_ptr_range();
        let mut body = ListBody::new(Form::Plain, kind.clone(), objects, json!({"resourceVersion": "9"}));
        let promised = body.size_hint().exact().unwrap();
        let (mut whole, mut shared) = (Vec::new(), false);
        while let Some(frame) = body.frame().await {
            let data = frame.unwrap().into_data().unwrap();
            shared |= large.contains(&data.as_ptr());
            whole.extend_from_slice(&data);
        }
        assert!(shared && body.is_end_stream());
        assert_eq!(promised, whole.len() as u64);
        let list: Value = serde_json::from_slice(&whole).unwrap();
        let names: Vec<_> =
            list["items"].as_array().unwrap().iter().map(|o| &o["metadata"]["name"]).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(
            (&list["kind"], &list["metadata"]["resourceVersion"]),
            (&json!("ConfigMapList"), &json!("9"))
        );
    }

    #[tokio::test]
    async fn a_large_object_is_in_memory_as_an_object_until_it_is_sent() {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let object = config_map("a", 1 << 20);
        let known = Arc::downgrade(&object);
        let mut body = ListBody::new(Form::Plain, kind.clone(), vec![object], json!({}));
        body.frame().await.unwrap().unwrap();
        let large = body.frame().await.unwrap().unwrap();
        drop(body);
        assert!(known.upgrade().is_some());
        drop(large);
        assert!(known.upgrade().is_none());
    }

    #[tokio::test]
    async fn lists_of_tables_and_metadata_are_complete() {
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let forms = [
            (Form::Table(table::Content::default()), "rows"),
            (Form::Partial(table::MetaVersion::V1), "items"),
        ];
        for (form, items) in forms {
            for count in [0, 1, 300] {
                let objects = (0..count).map(|at| config_map(&format!("c{at}"), 10)).collect();
                let body = ListBody::new(form, kind.clone(), objects, json!({"resourceVersion": "9"}));
                let text = body.collect().await.unwrap().to_bytes();
                let list: Value = serde_json::from_slice(&text).unwrap();
                assert_eq!(list[items].as_array().unwrap().len(), count);
                assert_eq!(list["metadata"]["resourceVersion"], "9");
            }
        }
    }
}

//! Writes the events of a watch as lines of JSON, or in protobuf.

use std::{cell::Cell, sync::Arc, time::Instant};

use bytes::Bytes;
use coracle_kinds::{
    Resource,
    protobuf::encode,
    table::{self, MetaVersion},
};
use prometheus::Histogram;
use serde_json::{Value, json};

use crate::{
    cache::{Event, Object, RenderedEvents},
    call::Call,
    error::{ApiError, Result},
    media::Form,
    metrics::WatchEvents,
    offload,
    unread_bytes::{MIN_HELD_BYTES, Reader},
    web_socket,
};

/// The end of a line, after its object.
const END_OF_LINE: &[u8] = b"}\n";

/// Writes the events of one watch.
pub(super) struct Writer {
    kind: Arc<Resource>,
    form: Form,
    headers_written: Cell<bool>,
    /// The first objects of the watch have this revision or an earlier one.
    first_revision: u64,
    /// Start of the watch, and the histogram of the durations until the initial events are sent. `None` without initial
    /// events, and after they are sent.
    initial: Option<(Instant, Histogram)>,
    /// The reader of the watch. `None` for requests of this process.
    reader: Option<Arc<Reader>>,
    /// Whether each event must be in one piece.
    is_whole: bool,
    /// The events that watches of the server share.
    shared: Arc<RenderedEvents>,
    counts: WatchEvents,
}

// === impl Writer ===

impl Writer {
    /// The writer of a watch. `first_revision` is the revision of the first objects.
    pub(super) fn new(call: &Call, form: Form, first_revision: u64, reader: Option<Arc<Reader>>) -> Self {
        Self {
            kind: call.kind.clone(),
            form,
            headers_written: Cell::default(),
            first_revision,
            initial: None,
            reader,
            // A message of a WebSocket is a whole event.
            is_whole: web_socket::is_upgrade(&call.headers),
            shared: call.state.cache.rendered.clone(),
            counts: call.state.metrics.serving.watch_events(&call.kind),
        }
    }

    /// Sets the start of the watch, and the histogram of the durations until the initial events are sent. `None`
    /// without initial events.
    pub(super) fn with_initial(self, initial: Option<(Instant, Histogram)>) -> Self {
        Self { initial, ..self }
    }

    pub(super) fn form(&self) -> Form {
        self.form
    }

    /// Counts a sent event with this number of bytes.
    pub(super) fn sent(&self, bytes: usize) {
        self.counts.sent(bytes);
    }

    /// The pieces of an event.
    pub(super) fn event(&mut self, event: &Event) -> Result<Vec<Bytes>> {
        let bookmark = match event {
            Event::Added(object) => return self.change("ADDED", object),
            Event::Modified(object) => return self.change("MODIFIED", object),
            Event::Deleted(object) => return self.change("DELETED", object),
            Event::Bookmark(revision) => self.bookmark(json!({"resourceVersion": revision.to_string()})),
            Event::InitialEnd(revision) => {
                if let Some((began, durations)) = self.initial.take() {
                    durations.observe(began.elapsed().as_secs_f64());
                }
                self.bookmark(json!({
                    "resourceVersion": revision.to_string(),
                    "annotations": {"k8s.io/initial-events-end": "true"},
                }))
            }
        };
        Ok(vec![bookmark])
    }

    /// The pieces of a change. A large object is not copied if it is sent in its stored form.
    fn change(&self, name: &'static str, object: &Arc<Object>) -> Result<Vec<Bytes>> {
        let is_plain = matches!(self.form, Form::Plain | Form::Discovery);
        if is_plain && !self.is_whole && object.json_len() >= MIN_HELD_BYTES {
            let (start, rest) = object.json_parts();
            let start = [start_of_line(name).as_bytes(), start.as_slice()].concat();
            return Ok(vec![start.into(), self.held(rest)?, Bytes::from_static(END_OF_LINE)]);
        }
        let line = match self.form {
            // Watches do not share tables: rows have ages, and only the first table of a watch has column headers.
            Form::Table(_) => self.rendered_change(name, object),
            // Other watches do not send these first objects now. Keeping them would evict events that other watches
            // need.
            _ if object.revision <= self.first_revision => self.rendered_change(name, object),
            form => self.shared.get(object, name, form, || self.rendered_change(name, object)),
        };
        Ok(vec![self.held(line)?])
    }

    /// Counts a large piece until it is sent. Returns an error if the reader is evicted because of the limit on unread
    /// bytes.
    fn held(&self, piece: Bytes) -> Result<Bytes> {
        match &self.reader {
            Some(reader) => reader.hold(piece).ok_or_else(ApiError::too_many_requests),
            None => Ok(piece),
        }
    }

    /// A change of an object that is not sent in its stored form.
    fn rendered_change(&self, name: &str, object: &Arc<Object>) -> Bytes {
        offload::run(object.is_large(), || self.rendered(name, object))
    }

    fn rendered(&self, name: &str, object: &Arc<Object>) -> Bytes {
        let rendered = match self.form {
            Form::Plain | Form::Discovery => {
                return line(name, object.json_len(), |text| object.push_json(text));
            }
            Form::Protobuf => return self.protobuf_event(name, &object.value()),
            Form::PartialProtobuf(version) => return partial_event(name, version, &object.value()),
            Form::Partial(version) => table::partial_metadata(&object.value(), version).to_string(),
            Form::Table(content) => self.table(content, &object.value()).to_string(),
        };
        line(name, rendered.len(), |text| text.extend_from_slice(rendered.as_bytes()))
    }

    fn protobuf_event(&self, name: &str, object: &Value) -> Bytes {
        let (version, kind) = (self.kind.api_version(), &*self.kind.kind);
        let item = encode::item(version, kind, object).unwrap_or_default();
        encode::event(name, &encode::envelope(version, kind, &item)).into()
    }

    /// A table with one row. The first table of the watch has column definitions.
    fn table(&self, content: table::Content, object: &Value) -> Value {
        let headers = !self.headers_written.replace(true);
        let meta = json!({"resourceVersion": object["metadata"]["resourceVersion"]});
        let options = table::Options { content, headers, now: jiff::Timestamp::now() };
        table::render(&self.kind, [object], meta, options)
    }

    fn bookmark(&self, metadata: Value) -> Bytes {
        let object = match self.form {
            // Clients find the annotation of the bookmark after the initial events in the object of a row, as upstream.
            Form::Table(content) => self.table(content, &json!({"metadata": metadata})),
            Form::Protobuf => return self.protobuf_event("BOOKMARK", &json!({"metadata": metadata})),
            Form::PartialProtobuf(version) => {
                return partial_event("BOOKMARK", version, &json!({"metadata": metadata}));
            }
            Form::Partial(version) => table::partial_metadata(&json!({"metadata": metadata}), version),
            Form::Plain | Form::Discovery => {
                json!({"kind": self.kind.kind, "apiVersion": self.kind.api_version(), "metadata": metadata})
            }
        };
        let object = object.to_string();
        line("BOOKMARK", object.len(), |text| text.extend_from_slice(object.as_bytes()))
    }
}

/// An event with PartialObjectMetadata in protobuf.
fn partial_event(name: &str, version: MetaVersion, object: &Value) -> Bytes {
    let item = encode::partial_item(object);
    encode::event(name, &encode::envelope(version.api_version(), "PartialObjectMetadata", &item)).into()
}

/// A line of a watch, with the object that `push` appends.
fn line(name: &str, length: usize, push: impl FnOnce(&mut Vec<u8>)) -> Bytes {
    let mut line = Vec::with_capacity(length + 40);
    line.extend_from_slice(start_of_line(name).as_bytes());
    push(&mut line);
    line.extend_from_slice(END_OF_LINE);
    line.into()
}

/// The start of a line, up to its object.
fn start_of_line(name: &str) -> String {
    format!("{{\"type\":\"{name}\",\"object\":")
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;

    use super::*;
    use crate::{cache::parses, unread_bytes::UnreadBytes};

    fn plain_writer(is_whole: bool, reader: Option<Arc<Reader>>) -> Writer {
        let kind = by_kind("v1", "ConfigMap").unwrap().clone();
        let (form, shared) = (Form::Plain, Arc::default());
        let headers_written = Cell::default();
        let counts = crate::metrics::Metrics::new().serving.watch_events(&kind);
        Writer {
            kind,
            form,
            headers_written,
            first_revision: 0,
            initial: None,
            reader,
            is_whole,
            shared,
            counts,
        }
    }

    #[test]
    fn a_large_object_is_sent_without_a_copy_and_counts_until_then() {
        let unread = Arc::<UnreadBytes>::default();
        let reader = unread.reader("eve");
        let mut writer = plain_writer(false, Some(reader.clone()));
        let value = json!({"metadata": {"name": "n"}, "data": {"a": "x".repeat(1 << 20)}});
        let added = Event::Added(Arc::new(Object::of(&writer.kind, "k".into(), 7, &value)));
        let pieces = writer.event(&added).unwrap();
        let whole = plain_writer(true, None).event(&added).unwrap();
        assert_eq!((pieces.len(), whole.len()), (3, 1));
        assert!(pieces.concat() == whole[0], "the pieces are not the line");
        let mut held = vec![pieces];
        let (kind, large) = (writer.kind.clone(), || Bytes::from(vec![0_u8; 30 << 20]));
        let others = [reader.hold(large()), reader.hold(large())];
        let refused = loop {
            let version = Event::Added(Arc::new(Object::of(&kind, "k".into(), 7, &value)));
            match writer.event(&version) {
                Ok(pieces) => held.push(pieces),
                Err(error) => break error,
            }
        };
        assert_eq!((refused.code, held.len()), (429, 3));
        drop((held, others));
        assert!(writer.event(&added).is_ok());
        assert_eq!(unread.bytes(), 0);
    }

    #[test]
    fn an_event_is_encoded_once_for_all_watches_with_the_same_form() {
        let mut writers: Vec<Writer> = (0..10).map(|_| plain_writer(false, None)).collect();
        let shared = writers[0].shared.clone();
        let value = json!({"metadata": {"name": "n"}});
        let object = Arc::new(Object::of(&writers[0].kind, "k".into(), 7, &value));
        for form in [Form::Protobuf, Form::PartialProtobuf(MetaVersion::V1), Form::Partial(MetaVersion::V1)] {
            let before = parses::so_far();
            let mut lines = Vec::new();
            for writer in &mut writers {
                (writer.form, writer.shared) = (form, shared.clone());
                lines.push(writer.event(&Event::Modified(object.clone())).unwrap().concat());
            }
            lines.dedup();
            assert_eq!((lines.len(), parses::so_far() - before), (1, 1));
        }
    }

    #[test]
    fn watches_share_the_bytes_of_a_small_event() {
        let mut writers = [false, false, true].map(|is_whole| plain_writer(is_whole, None));
        let shared = writers[0].shared.clone();
        let value = json!({"metadata": {"name": "n"}});
        let object = Arc::new(Object::of(&writers[0].kind, "k".into(), 7, &value));
        let lines = writers.each_mut().map(|writer| {
            writer.shared = shared.clone();
            writer.event(&Event::Modified(object.clone())).unwrap()
        });
        let text =
            format!("{{\"type\":\"MODIFIED\",\"object\":{}}}\n", String::from_utf8_lossy(&object.json()));
        for line in &lines {
            assert_eq!((line.len(), &line[0][..]), (1, text.as_bytes()));
            assert_eq!(line[0].as_ptr(), lines[0][0].as_ptr(), "one copy for all");
        }
    }

    #[test]
    fn the_first_objects_of_a_watch_replace_no_events_of_others() {
        let (running, mut starting) = (plain_writer(false, None), plain_writer(false, None));
        (starting.first_revision, starting.shared) = (7, running.shared.clone());
        let object = |revision: u64| {
            Arc::new(Object::of(&running.kind, "k".into(), revision, &json!({"metadata": {"name": "n"}})))
        };
        let event = object(8);
        let line = |writer: &Writer| writer.change("MODIFIED", &event).unwrap().concat();
        let first = running.change("MODIFIED", &event).unwrap();
        for _ in 0..1000 {
            assert_eq!(starting.change("ADDED", &object(7)).unwrap().len(), 1);
        }
        assert_eq!(running.change("MODIFIED", &event).unwrap()[0].as_ptr(), first[0].as_ptr(), "it is kept");
        assert_eq!(line(&running), line(&starting));
    }
}

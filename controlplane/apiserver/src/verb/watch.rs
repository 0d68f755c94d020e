//! GET with `watch=true`: a stream of events. Each line is one JSON object.

mod first_events;

use std::{
    cell::Cell,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use coracle_kinds::{
    Resource,
    protobuf::encode,
    table::{self, MetaVersion},
};
use futures::{
    Stream, StreamExt as _,
    future::{BoxFuture, Either},
    stream,
};
use http::{HeaderValue, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use prometheus::Histogram;
use rand::RngExt as _;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    cache::{Conversions, Event, Events, Object, RenderedEvents, Scope, Watcher},
    call::Call,
    convert,
    error::{ApiError, Result},
    media::{self, Form},
    metrics::WatchEvents,
    offload,
    polled_when_woken::PolledWhenWoken,
    reply::{Reply, full, status_text},
    request::parse_revision,
    request_owner,
    unread_bytes::{MIN_HELD_BYTES, Reader},
    verb::{list, list_options, version_fields, version_fields::Transitions},
    web_socket,
};
pub(crate) use first_events::FirstEvents;

/// The media types of a watch, as upstream names them in an error.
const STREAM_TYPES: &str = "application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch";

/// Maximum time by which one conversion extends the time limit of the first events. The conversion seems to last longer
/// if the client stops reading meanwhile.
const MAX_CONVERSION: Duration = Duration::from_secs(1);
/// The end of a line, after its object.
const END_OF_LINE: &[u8] = b"}\n";

/// Writes the events of one watch.
struct Writer {
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

/// Cancelled when a watch gets no more events. Queued events are still sent to the client.
#[derive(Clone)]
pub(crate) struct WatchEnd(pub(crate) CancellationToken);

/// The objects that a watch sends first, and the revision of the marker after them.
#[derive(Default)]
struct Initial {
    objects: Vec<Arc<Object>>,
    /// All objects have this revision or an earlier one.
    revision: u64,
    end: Option<u64>,
}

/// The start of a watch.
enum Start {
    /// The watch starts with all existing objects, as ADDED.
    Now { end_marker: bool },
    /// The watch starts with the events after a revision.
    After(u64),
}

/// Starts a watch. `reader` is the reader of the watch; `None` for requests of this process.
pub(crate) fn run(call: &Call, reader: Option<Arc<Reader>>) -> Result<Reply> {
    let superseded = &call.state.cache.superseded;
    let begin = superseded.counted();
    let mut scope = list::scope(call)?;
    let fields = version_fields::take(&call.kind, &mut scope);
    let mut transitions = fields.map(Transitions::new);
    let start = start(call)?;
    let (first, events) = match subscribe(call, scope, &start, reader.clone()) {
        Ok(subscribed) => subscribed,
        Err(error) if error.is_expired() || error.is_future_revision() => {
            return Ok(ended_by(form(call)?, &error));
        }
        Err(error) => return Err(error),
    };
    let cut = WatchEnd(events.cut.clone());
    let kind = call.kind.clone();
    let form = form(call)?;
    let has_end = matches!(start, Start::Now { end_marker: true });
    let (metrics, path) = (&call.state.metrics.serving, &call.resource);
    let initial =
        has_end.then(|| (Instant::now(), metrics.initial_events(&kind, &path.namespace, &path.name)));
    let first_events = FirstEvents::default();
    let unsent = Some(first_events.clone()).filter(|_| !first.objects.is_empty() || first.end.is_some());
    let revision = first.revision;
    let size: usize = first.objects.iter().map(|object| object.stored_bytes()).sum();
    let open = reader.as_ref().filter(|_| size > 0).map(|reader| superseded.open(reader, begin, size));
    let reading = first_events.clone();
    let first = initial_events(first, reader.as_ref())?.inspect(move |event| {
        // Keeps the response registered. This closure is dropped after the last of the first events is sent.
        let _registered = &open;
        reading.add_reading(event.weight());
    });
    let conversions = call.state.cache.conversions.clone();
    // As in other requests, the caller owns the calls of webhooks, not the user that it impersonates.
    let owner = request_owner::current();
    let writer = Writer { initial, ..Writer::new(call, form, revision, reader) };
    let lines = stream::iter(first)
        .chain(stream::unfold(FollowingEvents { events, first: Some(first_events.clone()) }, following))
        .then(move |event| match is_in_version(&kind, &event) {
            // Most events need no conversion. Without this branch, each event would clone references that all watches
            // share, which takes time.
            true => Either::Left(std::future::ready(Ok::<_, ApiError>(event))),
            false => {
                let event = converted(conversions.clone(), kind.clone(), event, first_events.clone());
                Either::Right(request_owner::scope(owner.clone(), event))
            }
        })
        .filter_map(move |event| {
            let sent = match (&mut transitions, event) {
                (Some(transitions), Ok(event)) => transitions.event(event).map(Ok),
                (_, event) => Some(event),
            };
            std::future::ready(sent)
        })
        .scan(Some(writer), |writer, event| std::future::ready(written(writer, event)));
    let frames = limited(call, lines).flat_map(stream::iter).map(|piece| Ok(Frame::data(piece)));
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    response.headers_mut().insert(header::CONTENT_TYPE, content_type(form));
    response.extensions_mut().insert(cut);
    if let Some(unsent) = unsent {
        response.extensions_mut().insert(unsent);
    }
    Ok(response)
}

/// The first events. The list of their objects counts as unread until the last object is sent.
fn initial_events(
    first: Initial,
    reader: Option<&Arc<Reader>>,
) -> Result<impl Iterator<Item = Event> + use<>> {
    let held = reader.map(|reader| reader.hold_list(&first.objects).ok_or_else(ApiError::too_many_requests));
    let held = held.transpose()?;
    let added = first.objects.into_iter().map(move |object| {
        let _counted = &held;
        Event::Added(object)
    });
    Ok(added.chain(first.end.map(Event::InitialEnd)))
}

/// The events after the first events.
struct FollowingEvents {
    events: Events,
    /// The first events, until they are recorded as sent.
    first: Option<FirstEvents>,
}

/// The next event after the first events. The first call records that the first events are sent.
async fn following(mut following: FollowingEvents) -> Option<(Event, FollowingEvents)> {
    if let Some(first) = following.first.take() {
        first.sent();
    }
    let event = following.events.recv().await?;
    Some((event, following))
}

/// The form of the events. The messages of a WebSocket are always JSON.
fn form(call: &Call) -> Result<Form> {
    if media::prefers_yaml(&call.headers) {
        // A stream of events is not a YAML document.
        return Err(ApiError::not_acceptable_as(STREAM_TYPES));
    }
    Ok(match call.form()? {
        Form::Protobuf if web_socket::is_upgrade(&call.headers) => Form::Plain,
        Form::PartialProtobuf(version) if web_socket::is_upgrade(&call.headers) => Form::Partial(version),
        form => form,
    })
}

fn content_type(form: Form) -> HeaderValue {
    HeaderValue::from_static(match form {
        Form::Protobuf | Form::PartialProtobuf(_) => "application/vnd.kubernetes.protobuf;stream=watch",
        _ => "application/json",
    })
}

/// Whether an event needs no conversion for a watch of this version.
fn is_in_version(kind: &Resource, event: &Event) -> bool {
    event.object().is_none_or(|object| object.api_version() == kind.api_version())
}

/// The event in the version of the watch.
async fn converted(
    conversions: Arc<Conversions>,
    kind: Arc<Resource>,
    event: Event,
    first: FirstEvents,
) -> Result<Event> {
    let began = Instant::now();
    let converted = match event {
        Event::Added(object) => in_version(&conversions, &kind, object).await.map(Event::Added),
        Event::Modified(object) => in_version(&conversions, &kind, object).await.map(Event::Modified),
        Event::Deleted(object) => in_version(&conversions, &kind, object).await.map(Event::Deleted),
        Event::Bookmark(_) | Event::InitialEnd(_) => Ok(event),
    };
    first.add_conversion(began.elapsed().min(MAX_CONVERSION));
    converted
}

/// The object in the version of the watch. Watches share conversions.
async fn in_version(
    conversions: &Conversions,
    kind: &Arc<Resource>,
    object: Arc<Object>,
) -> Result<Arc<Object>> {
    if object.api_version() == kind.api_version() {
        return Ok(object);
    }
    let begin = || -> BoxFuture<'static, Result<Arc<Object>>> {
        let (to, from) = (kind.clone(), object.clone());
        let converted = async move { convert::object(&to, from).await };
        Box::pin(request_owner::scope(request_owner::current(), converted))
    };
    conversions.get(&object, kind, begin).await
}

/// The pieces of an event. An error is the last event: afterwards the writer is `None`.
fn written(writer: &mut Option<Writer>, event: Result<Event>) -> Option<Vec<Bytes>> {
    let current = writer.as_mut()?;
    let form = current.form;
    let pieces = event.and_then(|event| current.event(&event));
    if let Ok(pieces) = &pieces {
        current.counts.sent(pieces.iter().map(Bytes::len).sum());
    }
    Some(pieces.unwrap_or_else(|error| {
        *writer = None;
        vec![error_event(form, &error)]
    }))
}

/// An ERROR event. The stream ends after this event.
fn error_event(form: Form, error: &ApiError) -> Bytes {
    if let Form::Protobuf | Form::PartialProtobuf(_) = form {
        let status = error.status();
        return encode::event("ERROR", &encode::status(&status)).into();
    }
    let status = status_text(&error.status());
    format!("{{\"type\":\"ERROR\",\"object\":{}}}\n", status.trim_end()).into()
}

/// A stream of one ERROR event. As upstream, two errors are in the stream and not in the HTTP status: a compacted
/// revision, and a future revision of a watch with initial events. Clients rely on this: kube-rs lists again only after
/// an ERROR event.
fn ended_by(form: Form, error: &ApiError) -> Reply {
    let mut response = Response::new(full(error_event(form, error)));
    response.headers_mut().insert(header::CONTENT_TYPE, content_type(form));
    response
}

fn start(call: &Call) -> Result<Start> {
    list_options::check(call, true)?;
    let query = &call.info.query;
    let revision = parse_revision(query.get("resourceVersion"))?;
    if query.flag("sendInitialEvents") {
        return Ok(Start::Now { end_marker: query.flag("allowWatchBookmarks") });
    }
    let skip_initial = query.has("sendInitialEvents");
    Ok(match revision {
        None | Some(0) if !skip_initial => Start::Now { end_marker: false },
        None | Some(0) => Start::After(u64::MAX),
        Some(revision) => Start::After(revision),
    })
}

/// The first events, which are sent at once, and the channel of the later events.
fn subscribe(
    call: &Call,
    scope: Scope,
    start: &Start,
    reader: Option<Arc<Reader>>,
) -> Result<(Initial, Events)> {
    let cache = &call.state.cache;
    let (watcher, events) = Watcher::counted(scope, call.info.query.flag("allowWatchBookmarks"), reader);
    let collection = cache.of(&call.kind)?;
    let mut objects = collection.lock();
    if objects.is_closed() {
        return Err(ApiError::no_resource());
    }
    let newest = cache.revision().max(objects.newest());
    let mut first = Initial::default();
    match start {
        Start::Now { end_marker } => {
            if let Some(asked) = parse_revision(call.info.query.get("resourceVersion"))?
                && asked > newest
            {
                return Err(ApiError::future_revision(asked, newest));
            }
            objects.check_complete(&watcher.scope.prefix)?;
            first.objects = objects.watch_from_now(watcher, newest);
            first.revision = newest;
            first.end = end_marker.then_some(newest);
        }
        Start::After(u64::MAX) => objects.watch_after(watcher, newest)?,
        Start::After(revision) => objects.watch_after(watcher, *revision)?,
    }
    Ok((first, events))
}

/// Ends the stream at its time limit and when the server stops.
fn limited<S: Stream>(call: &Call, lines: S) -> impl Stream<Item = S::Item> + use<S> {
    let asked = call.info.query.number("timeoutSeconds").filter(|seconds| *seconds > 0);
    let limit = asked.map_or_else(|| default_limit(call.state.min_watch), Duration::from_secs);
    let shutdown = call.state.shutdown.clone();
    lines.take_until(PolledWhenWoken::new(Box::pin(async move {
        tokio::select! {
            // Both branches only wait, so cancelling one of them loses nothing.
            () = tokio::time::sleep(limit) => {}
            () = shutdown.cancelled_owned() => {}
        }
    })))
}

/// Duration of a watch without `timeoutSeconds`: the minimum plus a random time of up to the minimum. Clients therefore
/// reconnect at different times.
fn default_limit(min: Duration) -> Duration {
    match min.as_secs() {
        0 => Duration::MAX,
        seconds => min + Duration::from_secs(rand::rng().random_range(0..seconds)),
    }
}

// === impl Writer ===

impl Writer {
    /// The writer of a watch. `first_revision` is the revision of the first objects.
    fn new(call: &Call, form: Form, first_revision: u64, reader: Option<Arc<Reader>>) -> Self {
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

    /// The pieces of an event.
    fn event(&mut self, event: &Event) -> Result<Vec<Bytes>> {
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
            // Clients find the annotation of the last initial event in the object of a row, as upstream.
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
    fn the_list_of_the_first_objects_counts_until_the_last() {
        let unread = Arc::<UnreadBytes>::default();
        let reader = unread.reader("eve");
        let kind = by_kind("v1", "ConfigMap").unwrap();
        let object = Arc::new(Object::of(kind, "k".into(), 7, &json!({"metadata": {"name": "n"}})));
        let first = || Initial { objects: vec![object.clone(); 2000], revision: 7, end: Some(7) };
        let mut events = initial_events(first(), Some(&reader)).unwrap();
        assert_eq!(unread.bytes(), 2000 * size_of::<usize>());
        assert_eq!(events.by_ref().count(), 2001);
        assert_eq!(unread.bytes(), 0);
        let others = [(); 7].map(|()| unread.reader("eve").hold(Bytes::from(vec![0_u8; 9 << 20])).unwrap());
        // Above the limit, the reader of the largest response is evicted first.
        let many = (0..100).map(|_| initial_events(first(), Some(&unread.reader("eve"))));
        let many = many.collect::<Result<Vec<_>>>().unwrap();
        drop((others, many));
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

    #[test]
    fn a_watch_ends_after_once_to_twice_the_minimum() {
        for _ in 0..100 {
            let limit = default_limit(Duration::from_secs(10));
            assert!((10..20).contains(&limit.as_secs()), "{limit:?}");
        }
        assert_eq!(default_limit(Duration::from_secs(1)), Duration::from_secs(1));
        assert_eq!(default_limit(Duration::ZERO), Duration::MAX);
    }
}

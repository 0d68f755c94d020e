//! GET with `watch=true`: a stream of events. Each line is one JSON object.

mod first_events;
mod writer;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use coracle_kinds::{Resource, protobuf::encode};
use futures::{
    Stream, StreamExt as _,
    future::{BoxFuture, Either},
    stream,
};
use http::{HeaderValue, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use rand::RngExt as _;
use tokio_util::sync::CancellationToken;

use crate::{
    cache::{Conversions, Event, Events, Object, Scope, WatchHandle, Watcher},
    call::Call,
    convert,
    error::{ApiError, Result},
    media::{self, Form},
    polled_when_woken::PolledWhenWoken,
    reply::{Reply, full, status_text},
    request::parse_revision,
    request_owner,
    unread_bytes::Reader,
    verb::{list, list_options, version_fields, version_fields::Transitions},
    web_socket,
};
pub(crate) use first_events::FirstEvents;
use writer::Writer;

/// The media types of a watch, as upstream names them in an error.
const STREAM_TYPES: &str = "application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch";

/// Maximum time by which one conversion extends the time limit of the first events. The conversion seems to last longer
/// if the client stops reading meanwhile.
const MAX_CONVERSION: Duration = Duration::from_secs(1);

/// Maximum time in which a client reads the queued events of its watch when the server stops. It is shorter than the
/// time after which the server closes the connections.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(4);

/// Time from the last bookmark of a watch to its time limit. Source: `nextBookmarkTime` of upstream's cacher.
const BEFORE_END: Duration = Duration::from_secs(2);

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
    /// The watch starts with the events after a revision. `u64::MAX` stands for the newest revision.
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
    let (cut, handle) = (WatchEnd(events.cut.clone()), events.handle());
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
    let writer = Writer::new(call, form, revision, reader).with_initial(initial);
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
    let frames = limited(call, lines, handle).flat_map(stream::iter).map(|piece| Ok(Frame::data(piece)));
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
    let form = current.form();
    let pieces = event.and_then(|event| current.event(&event));
    if let Ok(pieces) = &pieces {
        current.sent(pieces.iter().map(Bytes::len).sum());
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

/// A stream of one ERROR event. As upstream, two errors are in the stream and not in the HTTP status: the error of a
/// compacted revision, and, for a watch with initial events, the error of a future revision. Clients rely on this:
/// kube-rs lists again only after an ERROR event.
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
            match list::single_key(call, &watcher.scope) {
                Some(key) => drop(objects.find(&key)?),
                None => objects.check_complete(&watcher.scope.prefix)?,
            }
            first.objects = objects.watch_from_now(watcher, newest);
            first.revision = newest;
            first.end = end_marker.then_some(newest);
        }
        Start::After(u64::MAX) => objects.watch_after(watcher, newest)?,
        Start::After(revision) => objects.watch_after(watcher, *revision)?,
    }
    Ok((first, events))
}

/// Ends the stream at its time limit. When the server stops, the watch gets no more events, and the stream ends after
/// its queued events.
fn limited<S: Stream>(call: &Call, lines: S, watch: WatchHandle) -> impl Stream<Item = S::Item> + use<S> {
    let asked = call.info.query.number("timeoutSeconds").filter(|seconds| *seconds > 0);
    let limit = asked.map_or_else(|| default_limit(call.state.min_watch), Duration::from_secs);
    let has_bookmarks = call.info.query.flag("allowWatchBookmarks");
    let ended = time_limit(limit, has_bookmarks.then(|| watch.clone()));
    let shutdown = call.state.shutdown.clone();
    // The watches end at different times, so that their clients do not all connect to another server at once.
    let delay = call.state.watch_grace.mul_f64(rand::rng().random_range(0.0..1.0));
    let stopped = async move {
        shutdown.cancelled_owned().await;
        tokio::time::sleep(delay).await;
        watch.stop();
        tokio::time::sleep(QUEUE_TIMEOUT).await;
    };
    lines.take_until(PolledWhenWoken::new(Box::pin(async move {
        tokio::select! {
            // Both branches may be dropped, because the stream ends.
            () = ended => {}
            () = stopped => {}
        }
    })))
}

/// Waits until the time limit of a watch. A watch with bookmarks gets a bookmark [`BEFORE_END`] before the time limit,
/// so that its client can resume at a recent revision. As upstream, a watch with a shorter limit gets no such bookmark.
async fn time_limit(limit: Duration, with_bookmarks: Option<WatchHandle>) {
    let until_bookmark = limit.saturating_sub(BEFORE_END);
    match with_bookmarks.filter(|_| !until_bookmark.is_zero()) {
        Some(watch) => {
            tokio::time::sleep(until_bookmark).await;
            watch.send_bookmark();
            tokio::time::sleep(BEFORE_END).await;
        }
        None => tokio::time::sleep(limit).await,
    }
}

/// Duration of a watch without `timeoutSeconds`: the minimum plus a random time of up to the minimum. Clients therefore
/// reconnect at different times. A minimum below one second means no limit.
fn default_limit(min: Duration) -> Duration {
    match min.as_secs() {
        0 => Duration::MAX,
        seconds => min + Duration::from_secs(rand::rng().random_range(0..seconds)),
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use futures::FutureExt as _;
    use serde_json::json;

    use super::*;
    use crate::{cache::Cache, unread_bytes::UnreadBytes};

    #[tokio::test(start_paused = true)]
    async fn a_watch_with_bookmarks_gets_one_two_seconds_before_its_end() {
        let (cache, kind) = (Cache::new(7), by_kind("v1", "ConfigMap").unwrap());
        for (seconds, is_sent) in [(10, true), (3, true), (2, false), (1, false)] {
            let (watcher, mut events) = Watcher::new(Scope::default(), true);
            cache.of(kind).unwrap().lock().watch_from_now(watcher, 7);
            let begin = tokio::time::Instant::now();
            let mut ended = Box::pin(time_limit(Duration::from_secs(seconds), Some(events.handle())));
            let before = Duration::from_secs(seconds).saturating_sub(BEFORE_END * 3 / 2);
            assert!(tokio::time::timeout(before, &mut ended).await.is_err());
            assert!(events.recv().now_or_never().is_none(), "{seconds} s: it is too early");
            ended.await;
            assert_eq!(begin.elapsed().as_secs(), seconds);
            let received = events.recv().now_or_never().flatten();
            assert_eq!(matches!(received, Some(Event::Bookmark(7))), is_sent, "{seconds} s");
        }
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
    fn a_watch_ends_after_once_to_twice_the_minimum() {
        for _ in 0..100 {
            let limit = default_limit(Duration::from_secs(10));
            assert!((10..20).contains(&limit.as_secs()), "{limit:?}");
        }
        assert_eq!(default_limit(Duration::from_secs(1)), Duration::from_secs(1));
        assert_eq!(default_limit(Duration::ZERO), Duration::MAX);
    }
}

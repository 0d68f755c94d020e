//! The state machine of a watch, for objects as JSON.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::future::BoxFuture;
use kube::api::ObjectMeta;
use kube::client::Body;
use kube::core::Status;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::Sleep;

use crate::config::Config;
use crate::error::Error;
use crate::json;
use crate::page::Page;
use crate::request::Target;
use crate::response::{Read, Response};

/// Status code of a resource version that the server no longer has.
const GONE: u16 = 410;
/// Status code of a kind that is not served any more.
const NOT_FOUND: u16 = 404;
/// Status code of a request without the right to list or watch the kind.
const FORBIDDEN: u16 = 403;

/// An event.
#[derive(Debug)]
pub(crate) enum RawEvent {
    /// A line of the response. Its field `object` is the object.
    Apply(Bytes),
    /// A line of the response. Its field `object` is the object.
    Delete(Bytes),
    Init,
    /// An object as JSON.
    InitApply(Bytes),
    InitDone,
}

/// A watch of the objects of a kind.
#[derive(Debug)]
pub(crate) struct RawWatch {
    target: Target,
    config: Config,
    /// Resource version of the list or of the last event.
    version: String,
    state: State,
    /// The delay after a failure.
    delay: Option<Pin<Box<Sleep>>>,
    /// Whether a request was forbidden since the last complete list or event. Only the first such error is a warning.
    is_forbidden: bool,
    /// Whether a list or a watch has expired. An event, or a watch that lasts for a second, resets this flag.
    is_expired: bool,
}

enum State {
    /// No list is requested. The next request is for the first page.
    Empty,
    /// A page is requested. `token` selects the page. The first page has no token.
    Listing { page: BoxFuture<'static, Result<Page, Error>>, token: Option<String> },
    /// A page is received, and some of its objects are not delivered yet.
    Page(Page),
    /// The list is delivered, and no watch runs.
    Listed,
    /// A watch is requested.
    Starting(BoxFuture<'static, Result<Body, Error>>),
    /// A watch runs.
    Watching(Response),
}

/// A line of the response to a watch request.
#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: Kind,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum Kind {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: Metadata,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(rename = "resourceVersion")]
    version: String,
}

/// The object of a line in the usual form of API servers. The caller decodes the result as a single JSON value, which
/// fails if the line has further fields. So the text is read only once.
pub(crate) fn usual_object(line: &[u8]) -> Option<&[u8]> {
    let rest = line.strip_prefix(b"{\"type\":\"")?;
    let kinds = [&b"ADDED"[..], b"MODIFIED", b"DELETED"];
    let rest = kinds.iter().find_map(|kind| rest.strip_prefix(*kind))?;
    rest.strip_prefix(b"\",\"object\":")?.strip_suffix(b"}")
}

// === impl RawEvent ===

impl RawEvent {
    /// The event of a line that begins in the usual form of API servers. The rest is not parsed, so that the text is
    /// read only once: when the object is decoded.
    fn of_usual_line(text: &Bytes) -> Option<Self> {
        let rest = std::str::from_utf8(text).ok()?.strip_prefix("{\"type\":\"")?;
        let is = |kind: &str| rest.strip_prefix(kind).is_some_and(|rest| rest.starts_with("\",\"object\":{"));
        match () {
            () if is("ADDED") || is("MODIFIED") => Some(Self::Apply(text.clone())),
            () if is("DELETED") => Some(Self::Delete(text.clone())),
            () => None,
        }
    }
}

// === impl RawWatch ===

impl RawWatch {
    pub(crate) fn new(target: Target, config: Config) -> Self {
        let (version, state) = (String::new(), State::Empty);
        Self { target, config, version, state, delay: None, is_forbidden: false, is_expired: false }
    }

    /// The next event.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<RawEvent, Error>> {
        if let Some(delay) = &mut self.delay {
            ready!(delay.as_mut().poll(context));
            self.delay = None;
        }
        loop {
            let event = match &mut self.state {
                State::Empty => {
                    self.version.clear();
                    self.request_page(None);
                    Ok(Some(RawEvent::Init))
                }
                State::Listing { page, token } => {
                    let page = ready!(page.as_mut().poll(context));
                    let token = token.take();
                    self.page_received(page, token)
                }
                State::Page(page) => match page.items.pop_front() {
                    Some(object) => Ok(Some(RawEvent::InitApply(object))),
                    None => Ok(self.page_delivered()),
                },
                State::Listed => {
                    let (target, config) = (self.target.clone(), self.config.clone());
                    self.state = State::Starting(Box::pin(target.watch(config, self.version.clone())));
                    Ok(None)
                }
                State::Starting(response) => {
                    let response = ready!(response.as_mut().poll(context));
                    self.started(response)
                }
                State::Watching(response) => {
                    let read = ready!(response.poll_line(context));
                    if !response.is_young() {
                        self.record_success();
                    }
                    self.received(read)
                }
            };
            if let Some(event) = event.transpose() {
                return Poll::Ready(event);
            }
        }
    }

    /// The object of a line of any form.
    pub(crate) fn object<'a>(&mut self, line: &'a [u8]) -> Result<&'a [u8], Error> {
        match serde_json::from_slice::<Line<'a>>(line) {
            Ok(line) => Ok(line.object.get().as_bytes()),
            Err(error) => Err(self.fail_watch(Error::Invalid(error))),
        }
    }

    /// Sets the resource version of the last event. A later watch begins after it.
    pub(crate) fn record_version(&mut self, object: &ObjectMeta) -> Result<(), Error> {
        match object.resource_version.as_deref() {
            Some(version) if !version.is_empty() => {
                self.version.clear();
                self.version.push_str(version);
                Ok(())
            }
            _ => Err(self.fail_list(Error::NoVersion)),
        }
    }

    /// Backs off, then lists the objects again.
    pub(crate) fn fail_list(&mut self, error: Error) -> Error {
        self.state = State::Empty;
        // After a restart of the server, one expired watch is normal. If a watch expires twice in a row, the pages of
        // the list took too long.
        if error.code() == Some(GONE) && std::mem::replace(&mut self.is_expired, true) {
            self.config.use_large_pages();
        }
        self.fail(error)
    }

    /// Backs off, then continues the watch from its last version.
    pub(crate) fn fail_watch(&mut self, error: Error) -> Error {
        self.state = State::Listed;
        self.fail(error)
    }

    /// Backs off, and keeps the state. The first forbidden request is a warning; callers log all errors as debug
    /// messages.
    pub(crate) fn fail(&mut self, error: Error) -> Error {
        if self.is_first_forbidden(&error) {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                url = self.target.url,
                "a watch is forbidden, retrying; grant the verbs list and watch"
            );
        }
        let backoff = &mut self.config.backoff;
        let is_refused = error.is_unserved() || (self.config.is_optional && error.is_forbidden());
        let delay = match is_refused {
            true => backoff.next_delay_up_to(self.config.max_unserved_backoff),
            false => backoff.next_delay(),
        };
        self.delay = Some(Box::pin(tokio::time::sleep(delay)));
        error
    }

    /// Resets the back-off. It is called when a watch has lasted for a second. An event alone is not a success, because
    /// a server could send one event and then an invalid line in each watch.
    fn record_success(&mut self) {
        self.config.backoff.reset();
        self.is_expired = false;
    }

    fn is_first_forbidden(&mut self, error: &Error) -> bool {
        error.code() == Some(FORBIDDEN) && !std::mem::replace(&mut self.is_forbidden, true)
    }

    fn request_page(&mut self, token: Option<String>) {
        let (target, config) = (self.target.clone(), self.config.clone());
        let page = Box::pin(target.list(config, token.clone()));
        self.state = State::Listing { page, token };
    }

    fn page_received(
        &mut self,
        page: Result<Page, Error>,
        token: Option<String>,
    ) -> Result<Option<RawEvent>, Error> {
        match page {
            Ok(mut page) => {
                self.version = std::mem::take(&mut page.version);
                if self.version.is_empty() && page.next.is_empty() {
                    return Err(self.fail_list(Error::NoVersion));
                }
                self.state = State::Page(page);
            }
            Err(Error::TooLarge { .. }) if self.config.shrink_pages() => self.request_page(token),
            Err(error) => return Err(self.fail_list(error)),
        }
        Ok(None)
    }

    /// Requests the next page, or ends the list, after all objects of a page are delivered.
    fn page_delivered(&mut self) -> Option<RawEvent> {
        if let State::Page(page) = &mut self.state
            && !page.next.is_empty()
        {
            let token = std::mem::take(&mut page.next);
            self.request_page(Some(token));
            return None;
        }
        self.config.restore_pages();
        // A list does not reset the back-off: the watch after it may fail each time, and lists are expensive.
        (self.state, self.is_forbidden) = (State::Listed, false);
        Some(RawEvent::InitDone)
    }

    fn started(&mut self, response: Result<Body, Error>) -> Result<Option<RawEvent>, Error> {
        match response {
            Ok(body) => {
                let (timeout, limit) = (self.config.watch_timeout(), self.config.line_limit);
                self.state = State::Watching(Response::new(body, timeout, limit));
            }
            Err(error) if matches!(error.code(), Some(GONE | NOT_FOUND)) => return Err(self.fail_list(error)),
            Err(error) => return Err(self.fail_watch(error)),
        }
        Ok(None)
    }

    fn received(&mut self, read: Result<Read, Error>) -> Result<Option<RawEvent>, Error> {
        match read {
            Ok(Read::Line(line)) => self.line(&line).map_err(|error| match error.code() {
                Some(GONE) => self.fail_list(error),
                _ => self.fail_watch(error),
            }),
            Ok(Read::End { is_short: true }) => Err(self.fail_watch(Error::Short)),
            Ok(Read::End { is_short: false }) => {
                self.state = State::Listed;
                Ok(None)
            }
            // List the objects instead: a page has a higher limit than an event, so it can contain the large object.
            Err(error @ Error::TooLarge { .. }) => Err(self.fail_list(error)),
            Err(error) => Err(self.fail_watch(error)),
        }
    }

    /// The event of a line. A bookmark only sets the version.
    fn line(&mut self, text: &Bytes) -> Result<Option<RawEvent>, Error> {
        if let Some(event) = RawEvent::of_usual_line(text) {
            (self.is_expired, self.is_forbidden) = (false, false);
            return Ok(Some(event));
        }
        let line: Line<'_> = match serde_json::from_slice(text) {
            Ok(line) => line,
            Err(error) => {
                // A proxy may end a response with a status.
                let status = json::decode::<Status>(text).ok().filter(|status| status.code != 0);
                return Err(status.map_or(Error::Invalid(error), |status| Error::Ended(Box::new(status))));
            }
        };
        let object = line.object.get().as_bytes();
        let event = match line.kind {
            Kind::Added | Kind::Modified => Some(RawEvent::Apply(text.clone())),
            Kind::Deleted => Some(RawEvent::Delete(text.clone())),
            Kind::Bookmark => {
                let bookmark: Bookmark = serde_json::from_slice(object).map_err(Error::Invalid)?;
                if !bookmark.metadata.version.is_empty() {
                    self.version = bookmark.metadata.version;
                }
                None
            }
            Kind::Error => {
                let status: Status = json::decode(object).map_err(Error::Invalid)?;
                return Err(Error::Ended(Box::new(status)));
            }
        };
        (self.is_expired, self.is_forbidden) = (false, false);
        Ok(event)
    }
}

// === impl State ===

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Empty => "Empty",
            Self::Listing { .. } => "Listing",
            Self::Page(_) => "Page",
            Self::Listed => "Listed",
            Self::Starting(_) => "Starting",
            Self::Watching(_) => "Watching",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn watch(config: Config) -> RawWatch {
        let service = tower::service_fn(|_: http::Request<Body>| {
            std::future::pending::<Result<http::Response<Body>, Infallible>>()
        });
        let client = kube::Client::new(service, "default");
        RawWatch::new(Target { client, url: "/api/v1/pods".to_owned(), is_metadata: false }, config)
    }

    fn refused(code: u16) -> Error {
        Error::List(kube::Error::Api(Box::new(Status { code, ..Status::default() })))
    }

    #[tokio::test(start_paused = true)]
    async fn an_optional_kind_that_is_forbidden_is_requested_every_few_minutes() {
        for (config, code, seconds) in [
            (Config::default(), FORBIDDEN, 10),
            (Config::default().optional(), FORBIDDEN, 300),
            (Config::default().optional(), NOT_FOUND, 300),
            (Config::default().optional(), 500, 10),
        ] {
            let mut watch = watch(config);
            for _ in 0..20 {
                watch.fail_list(refused(code));
            }
            let delay = watch.delay.unwrap().deadline() - tokio::time::Instant::now();
            assert!(delay.as_secs() >= seconds && delay.as_secs() <= seconds * 3 / 2, "{code}: {delay:?}");
        }
    }

    #[tokio::test]
    async fn a_forbidden_request_is_a_warning_once_until_a_list_or_an_event() {
        let mut watch = watch(Config::default());
        assert!(!watch.is_first_forbidden(&refused(404)));
        assert!(watch.is_first_forbidden(&refused(403)) && !watch.is_first_forbidden(&refused(403)));
        watch.state = State::Page(Page::default());
        assert!(matches!(watch.page_delivered(), Some(RawEvent::InitDone)));
        assert!(watch.is_first_forbidden(&refused(403)) && !watch.is_first_forbidden(&refused(403)));
        let event = watch.line(&Bytes::from_static(br#"{"type":"ADDED","object":{}}"#)).unwrap();
        assert!(matches!(event, Some(RawEvent::Apply(_))));
        assert!(watch.is_first_forbidden(&refused(403)));
    }

    #[tokio::test]
    async fn the_object_of_a_line_does_not_depend_on_its_form() {
        let mut watch = watch(Config::default());
        let object: &[u8] = br#"{"a":{}}"#;
        let usual: &[u8] = br#"{"type":"ADDED","object":{"a":{}}}"#;
        assert_eq!((usual_object(usual), watch.object(usual).unwrap()), (Some(object), object));
        for line in [r#"{"object":{"a":{}},"type":"ADDED"}"#, r#"{"type":"DELETED", "object":{"a":{}}}"#] {
            assert_eq!(
                (usual_object(line.as_bytes()), watch.object(line.as_bytes()).unwrap()),
                (None, object)
            );
        }
        // The caller cannot decode the first object, and reads the line again.
        let extended = br#"{"type":"ADDED","object":{"a":{}},"more":1}"#;
        assert_ne!(usual_object(extended), Some(object));
        assert_eq!(watch.object(extended).unwrap(), object);
    }

    #[tokio::test]
    async fn the_kind_of_a_line_does_not_depend_on_its_form() {
        let mut watch = watch(Config::default());
        let mut read = |text: &'static str| watch.line(&Bytes::from_static(text.as_bytes()));
        for text in [
            r#"{"type":"ADDED","object":{"a":1}}"#,
            r#"{"type":"MODIFIED","object":{"a":1}}"#,
            r#"{"object":{"a":1},"type":"MODIFIED"}"#,
            r#"{ "type": "ADDED", "object": {"a":1} }"#,
        ] {
            assert!(matches!(read(text), Ok(Some(RawEvent::Apply(line))) if line == text), "{text}");
        }
        for text in [r#"{"type":"DELETED","object":{"a":1}}"#, r#"{"object":{"a":1},"type":"DELETED"}"#] {
            assert!(matches!(read(text), Ok(Some(RawEvent::Delete(line))) if line == text), "{text}");
        }
        let bookmark = r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9"}}}"#;
        assert!(matches!(read(bookmark), Ok(None)));
        let error = r#"{"type":"ERROR","object":{"kind":"Status","code":500,"message":"broken"}}"#;
        assert!(matches!(read(error), Err(Error::Ended(_))));
        assert_eq!(watch.version, "9");
    }
}

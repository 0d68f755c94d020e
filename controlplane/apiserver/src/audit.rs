//! Audit of requests: creates events according to the policy, and sends them to the log and the webhook.
//!
//! The event of a response is queued before the client gets the response. The response waits for backends in a blocking
//! mode. A long-running response is recorded at its start and at its end.

mod annotations;
mod backends;
mod batch;
mod blocking;
mod first_event;
mod truncate;
mod webhook;

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use coracle_audit::{
    Attributes, AuthenticationMetadata, Decision, Event, Level, ObjectReference, Policy, ResourceAttributes,
    Stage,
};
use futures::StreamExt as _;
use http::{HeaderMap, HeaderValue, Uri};
use http_body::Frame;
use http_body_util::{BodyExt as _, BodyStream, StreamBody};
use serde_json::{
    Map, Value, json,
    value::{RawValue, to_raw_value},
};

use crate::{
    authn::User,
    authz::{Decision as AuthorizationDecision, Verdict},
    error::ApiError,
    object_meta::metadata_mut,
    reply::{Body, Reply},
    request::RequestInfo,
    short_lived::ShortLived,
};

pub use backends::AuditWebhookConfig;
use backends::Backends;
pub(crate) use backends::LogBackend;
pub use batch::{AuditBatch, AuditThrottle};
use first_event::{event, user_info};
pub use truncate::AuditTruncateConfig;

/// Header with the id of a request.
pub(crate) const AUDIT_ID: &str = "audit-id";
/// Maximum bytes of a recorded response object. A larger object is omitted, and the event is annotated.
const MAX_RESPONSE: usize = 3 << 20;
/// Annotation of an event with an omitted object, as in upstream's truncating backend.
const TRUNCATED: &str = "audit.k8s.io/truncated";

/// The levels with their names in metrics.
const LEVELS: [(Level, &str); 4] = [
    (Level::None, "None"),
    (Level::Metadata, "Metadata"),
    (Level::Request, "Request"),
    (Level::RequestResponse, "RequestResponse"),
];

/// Creates and sends audit events.
pub(crate) struct Auditor {
    policy: Policy,
    backends: Backends,
    /// Number of requests of each level.
    levels: [AtomicU64; LEVELS.len()],
}

/// The record of one request.
pub(crate) struct Record {
    auditor: Arc<Auditor>,
    decision: Decision,
    event: Mutex<Event>,
    /// The owner of the request, for queues that the requests of all users share.
    owner: Arc<str>,
    /// Bytes of the annotations from webhooks and policies. Changes only while `event` is locked.
    annotated: AtomicUsize,
    /// Whether the last event is queued.
    is_complete: AtomicBool,
}

/// A request after its authentication, successful or not.
pub(crate) struct Received<'a> {
    pub(crate) user: Option<&'a User>,
    pub(crate) info: &'a RequestInfo,
    pub(crate) uri: &'a Uri,
    pub(crate) headers: &'a HeaderMap,
    /// Address of the client. `None` for callers in this process.
    pub(crate) peer: Option<IpAddr>,
    /// The owner of the request, for queues that the requests of all users share.
    pub(crate) owner: Arc<str>,
}

/// Records the end of a long-running response when the body is dropped.
struct End(Arc<Record>);

// === impl Auditor ===

impl Auditor {
    /// Creates the auditor, and starts the webhook backend if it is configured.
    ///
    /// # Errors
    /// The kubeconfig file of the webhook cannot be used.
    pub(crate) fn new(
        policy: Policy,
        log: Option<LogBackend>,
        webhook: Option<AuditWebhookConfig>,
    ) -> Result<Arc<Self>, String> {
        let (backends, levels) = (Backends::new(log, webhook)?, Default::default());
        Ok(Arc::new(Self { policy, backends, levels }))
    }

    /// Number of requests of each level, with the name of the level.
    pub(crate) fn levels(&self) -> impl Iterator<Item = (&'static str, u64)> {
        LEVELS.into_iter().zip(&self.levels).map(|((_, name), count)| (name, count.load(Ordering::Relaxed)))
    }

    fn count_level(&self, level: Level) {
        if let Some(at) = LEVELS.iter().position(|(known, _)| *known == level) {
            self.levels[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Numbers of all events, of events that the webhook did not receive, of events that the log did not receive, and
    /// of refused requests.
    pub(crate) fn counts(&self) -> [u64; 4] {
        self.backends.counts()
    }

    /// Number of events that a backend did not get, because they are too large even without their objects and long
    /// texts. An event counts once for each such backend.
    pub(crate) fn lost_by_size(&self) -> u64 {
        self.backends.lost_by_size()
    }

    /// Waits until all earlier events are written, for a limited time.
    pub(crate) async fn flush(&self) {
        // When a connection was just closed, the tasks that record the end of its responses are ready. Let them run
        // first.
        tokio::task::yield_now().await;
        self.backends.flush().await;
    }

    /// Starts the record of a request. `None` if the policy records nothing about it.
    ///
    /// # Errors
    /// A backend in the mode `blocking-strict` does not have the first event, or too many requests wait for a backend.
    /// The request must not run.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        request: &Received<'_>,
    ) -> Result<Option<Arc<Record>>, ApiError> {
        let resource = request.info.resource.as_ref();
        let decision = self.policy.decide(&Attributes {
            user: request.user.map(|user| user.name.as_str()),
            groups: request.user.map_or(&[], |user| &user.groups),
            verb: request.info.verb,
            path: &request.info.path,
            resource: resource.map(|resource| ResourceAttributes {
                group: &resource.group,
                resource: &resource.resource,
                subresource: &resource.subresource,
                namespace: &resource.namespace,
                name: &resource.name,
            }),
        });
        self.count_level(decision.level);
        if decision.level == Level::None {
            return Ok(None);
        }
        // Requests of unknown clients take no slot: the limit on the memory of these requests applies instead.
        let is_known = request.user.is_some_and(|user| !user.is_anonymous());
        let waits = is_known && !decision.omit_stages.contains(&Stage::RequestReceived);
        let _place = if waits { self.backends.enter(&request.owner)? } else { None };
        let (event, owner) = (Mutex::new(event(&decision, request)), request.owner.clone());
        let (annotated, is_complete) = (AtomicUsize::new(0), AtomicBool::new(false));
        let auditor = self.clone();
        let record = Arc::new(Record { auditor, decision, event, owner, annotated, is_complete });
        if !record.emit(Stage::RequestReceived).await {
            self.backends.count_refused();
            // As upstream, the refused request has no further event.
            record.is_complete.store(true, Ordering::Release);
            return Err(ApiError::internal("failed to store audit event"));
        }
        Ok(Some(record))
    }
}

// === impl Record ===

impl Record {
    fn event(&self) -> MutexGuard<'_, Event> {
        self.event.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The id of the event.
    pub(crate) fn id(&self) -> String {
        self.event().audit_id.clone()
    }

    /// Whether the event has the object of the request.
    pub(crate) fn has_request_object(&self) -> bool {
        self.decision.level >= Level::Request
    }

    /// Whether the event has the object of the response.
    pub(crate) fn has_response_object(&self) -> bool {
        self.decision.level == Level::RequestResponse
    }

    /// Records the impersonated user. `constraint` is the verb of constrained impersonation; empty for the verb
    /// `impersonate`.
    pub(crate) fn impersonates(&self, user: &User, constraint: &str) {
        let mut event = self.event();
        event.impersonated_user = Some(user_info(user));
        if !constraint.is_empty() {
            let impersonation_constraint = constraint.to_owned();
            event.authentication_metadata = Some(AuthenticationMetadata { impersonation_constraint });
        }
    }

    /// Records the decision of the authorizers.
    pub(crate) fn decided(&self, decision: &AuthorizationDecision) {
        let outcome = if decision.verdict == Verdict::Allow { "allow" } else { "forbid" };
        self.annotate("authorization.k8s.io/decision", outcome);
        self.annotate("authorization.k8s.io/reason", &*decision.reason);
    }

    /// Records the object or the patch of the request, and completes the object reference. As upstream, handlers call
    /// this when they have parsed the body. The call runs in the slot of the parsing, so a slow body waits for a slot
    /// only once.
    pub(crate) fn receive_object(&self, info: &RequestInfo, object: &Value) {
        let is_recorded = self.has_request_object();
        let has_no_name = info.resource.as_ref().is_some_and(|resource| resource.name.is_empty());
        let is_unnamed = info.verb == "create" && has_no_name;
        if !(is_recorded || is_unnamed) {
            return;
        }
        // The text is made before the event is locked.
        let text = is_recorded.then(|| self.recorded_text(object));
        let mut event = self.event();
        if let Some(reference) = &mut event.object_ref {
            complete(reference, object);
        }
        if let Some(text) = text {
            event.request_object = text;
        }
    }

    /// The text of the object of a request.
    fn recorded_text(&self, object: &Value) -> Option<Box<RawValue>> {
        if !self.decision.omit_managed_fields {
            return to_raw_value(object).ok();
        }
        let mut object = object.clone();
        self.omit_managed_fields(&mut object);
        to_raw_value(&object).ok()
    }

    /// Records the response. The response of a long-running request is recorded a second time at its end.
    pub(crate) async fn respond(self: Arc<Self>, reply: Reply, is_long: bool) -> Reply {
        let (mut parts, mut body) = reply.into_parts();
        let code = parts.status.as_u16();
        if let Ok(id) = HeaderValue::from_str(&self.event().audit_id) {
            parts.headers.insert(AUDIT_ID, id);
        }
        self.event().response_status = Some(json!({"metadata": {}, "code": code}));
        if self.auditor.backends.waits_for_webhook()
            && let Some(limits) = parts.extensions.get_mut::<ShortLived>()
        {
            // The request does not keep its seats while it waits for another server.
            drop(limits.take_seats());
        }
        if is_long && code < 400 {
            self.emit(Stage::ResponseStarted).await;
            return Reply::from_parts(parts, with_end(body, End(self)));
        }
        let of_resource = self.event().object_ref.is_some();
        if !self.is_proxied()
            && (code >= 400 || (of_resource && self.decision.level == Level::RequestResponse))
        {
            let (rest, bytes) = peek(body).await;
            body = rest;
            self.record_response_body(code, bytes.as_deref());
        }
        self.emit(Stage::ResponseComplete).await;
        Reply::from_parts(parts, body)
    }

    /// Whether another server created the response. The body of such a response is not recorded.
    fn is_proxied(&self) -> bool {
        let event = self.event();
        let subresource = event.object_ref.as_ref().map_or("", |reference| &reference.subresource);
        subresource == "proxy" || subresource.starts_with("proxy/")
    }

    /// Records the body of a response. `bytes` is `None` if the body is too large.
    fn record_response_body(&self, code: u16, bytes: Option<&[u8]>) {
        let Some(bytes) = bytes else { return self.annotate(TRUNCATED, "true") };
        let Ok(mut object) = serde_json::from_slice::<Value>(bytes) else { return };
        let mut event = self.event();
        if object["kind"] == "Status" {
            let fields = ["metadata", "status", "message", "reason", "details", "code"];
            let field = |name: &str| Some((name.to_owned(), object.get(name)?.clone()));
            let status = fields.iter().filter_map(|name| field(name));
            let mut status: Map<String, Value> = status.collect();
            // The code in the body may differ from the HTTP status.
            status.insert("code".to_owned(), code.into());
            event.response_status = Some(Value::Object(status));
        }
        if self.decision.level == Level::RequestResponse && event.object_ref.is_some() {
            self.omit_managed_fields(&mut object);
            event.response_object = to_raw_value(&object).ok();
        }
    }

    fn omit_managed_fields(&self, object: &mut Value) {
        if !self.decision.omit_managed_fields {
            return;
        }
        let remove = |object: &mut Value| {
            if let Some(metadata) = metadata_mut(object) {
                metadata.remove("managedFields");
            }
        };
        for item in object.get_mut("items").and_then(Value::as_array_mut).into_iter().flatten() {
            remove(item);
        }
        if object["metadata"].is_object() {
            remove(object);
        }
    }

    /// Writes the event of a stage, unless the policy omits it. Returns false if a backend in the mode
    /// `blocking-strict` does not have the event.
    async fn emit(&self, stage: Stage) -> bool {
        let queued = || {
            if stage == Stage::ResponseComplete {
                self.is_complete.store(true, Ordering::Release);
            }
        };
        if self.decision.omit_stages.contains(&stage) {
            queued();
            return true;
        }
        let lines = {
            let mut event = self.event();
            // The first stage keeps the time at which the request was received.
            if stage != Stage::RequestReceived {
                event.reach(stage);
            }
            self.auditor.backends.lines(&mut event)
        };
        self.auditor.backends.write(lines, &self.owner, queued).await
    }
}

/// Sets the fields of a reference that the path does not contain.
fn complete(reference: &mut ObjectReference, object: &Value) {
    let metadata = &object["metadata"];
    for (field, name) in [
        (&mut reference.name, "name"),
        (&mut reference.namespace, "namespace"),
        (&mut reference.uid, "uid"),
        (&mut reference.resource_version, "resourceVersion"),
    ] {
        if field.is_empty() {
            metadata[name].as_str().unwrap_or_default().clone_into(field);
        }
    }
}

/// The bytes of a body, and the body to send. `None` if the body is too large.
async fn peek(mut body: Body) -> (Body, Option<Bytes>) {
    let (mut frames, mut length) = (Vec::new(), 0);
    while length <= MAX_RESPONSE {
        match body.frame().await {
            Some(Ok(frame)) => {
                length += frame.data_ref().map_or(0, Bytes::len);
                frames.push(Ok(frame));
            }
            Some(Err(error)) => {
                frames.push(Err(error));
                break;
            }
            None => {
                let whole: Vec<u8> = frames
                    .iter()
                    .flatten()
                    .filter_map(Frame::data_ref)
                    .flat_map(|data: &Bytes| data.iter().copied())
                    .collect();
                return (chained(frames, body), Some(Bytes::from(whole)));
            }
        }
    }
    (chained(frames, body), None)
}

fn chained(frames: Vec<Result<Frame<Bytes>, std::io::Error>>, rest: Body) -> Body {
    StreamBody::new(futures::stream::iter(frames).chain(BodyStream::new(rest))).boxed_unsync()
}

/// A body that records its end.
fn with_end(body: Body, end: End) -> Body {
    StreamBody::new(BodyStream::new(body).inspect(move |_frame| {
        let _held = &end;
    }))
    .boxed_unsync()
}

// === impl End ===

impl Drop for End {
    fn drop(&mut self) {
        let record = self.0.clone();
        // Bodies are dropped within the runtime, except when the process exits.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { record.emit(Stage::ResponseComplete).await });
        }
    }
}

/// A client that disconnects ends the request, but its write may already be committed. The event of the response is
/// therefore also written in this case.
impl Drop for Record {
    fn drop(&mut self) {
        let stage = Stage::ResponseComplete;
        if *self.is_complete.get_mut() || self.decision.omit_stages.contains(&stage) {
            return;
        }
        let event = self.event.get_mut().unwrap_or_else(PoisonError::into_inner);
        event.reach(stage);
        // As upstream, the event of a response has a status, although the client got no response.
        event.response_status.get_or_insert_with(
            || json!({"metadata": {}, "status": "Success", "message": "Connection closed early", "code": 200}),
        );
        self.auditor.backends.write_late(event, &self.owner);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use coracle_audit::{Log, LogOptions, Mode};
    use http::Method;

    use super::*;

    #[tokio::test]
    async fn the_event_of_a_client_that_disconnects_before_the_response_has_a_status() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.log");
        let options =
            LogOptions { path: path.clone(), max_bytes: 1 << 20, max_backups: 0, max_age: Duration::ZERO };
        let policy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\n\
            rules: [{level: Metadata}]";
        let policy = Policy::parse(policy).unwrap();
        let log = Log::open(options).unwrap();
        let log = LogBackend::start(log, Mode::Batch, AuditBatch::default(), None);
        let auditor = Auditor::new(policy, Some(log), None).unwrap();
        let (headers, uri) = (HeaderMap::new(), Uri::from_static("/version"));
        let info = RequestInfo::parse(&Method::GET, &uri);
        let request = Received {
            user: None,
            info: &info,
            uri: &uri,
            headers: &headers,
            peer: None,
            owner: "eve".into(),
        };
        drop(auditor.begin(&request).await.ok().flatten().unwrap());
        let event = coracle_testing::until("the log has the event", 10, || {
            serde_json::from_str::<Value>(&std::fs::read_to_string(&path).unwrap()).ok()
        });
        let event = event.await;
        assert_eq!(
            (&event["stage"], &event["responseStatus"]["code"]),
            (&json!("ResponseComplete"), &json!(200))
        );
        assert_eq!(event["responseStatus"]["message"], "Connection closed early");
    }
}

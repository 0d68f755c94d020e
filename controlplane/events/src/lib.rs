//! The event recorder: writes core/v1 events about objects to the API.
//!
//! The controllers, the scheduler and the agent use it. Recording never waits: events go through a bounded queue to one
//! task ([`Sender`]). The task counts repeats in one Event object, limits the number of events per object
//! (`correlator`), and retries an event a few times while the API server is unavailable.

mod cause;
mod correlator;
mod event;
mod printable;
mod rate_limiter;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_token_bucket::Rate;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as ApiEvent, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams, PostParams, Request};
use kube::{Api, Client, Resource};
use serde_json::json;
use tokio::sync::{mpsc, watch};

use correlator::{Admitted, Correlator, Digest};
use event::Record;
use rate_limiter::RateLimiter;

pub use cause::cause;
pub use event::{Event, EventType};
pub use printable::printable;

/// Maximum bytes of an event's message, as in events.k8s.io/v1.
pub const MESSAGE_MAX: usize = 1024;
/// Capacity of the queue. The queue fills up if the API server does not respond. Then new events are dropped, to limit
/// the memory.
const QUEUE_CAPACITY: usize = 1000;
/// Capacity of the queue of a recorder whose events wait for urgent requests.
const YIELDING_QUEUE_CAPACITY: usize = 4096;
/// Maximum time that an event waits for urgent requests.
const YIELD_MAX: Duration = Duration::from_secs(2);
/// Capacity of the table of sent events, which counts repeats.
const SENT_MAX: usize = 4096;
/// Back-off before the first retry while the API server is unavailable. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Maximum attempts to send one event, as upstream (`maxTriesPerEvent` of client-go). Otherwise an event that always
/// fails, for example because its response cannot be decoded, would block all later events.
const ATTEMPTS_MAX: usize = 12;

/// Records events. A clone shares the queue.
#[derive(Clone, Debug)]
pub struct Recorder {
    queue: mpsc::Sender<Record>,
}

/// Sends recorded events to the API server.
pub struct Sender {
    client: Client,
    queue: mpsc::Receiver<Record>,
    /// Name of the reporting node. Empty for the control plane.
    host: Arc<str>,
    /// The newest Event objects, for counting repeats.
    sent: HashMap<Digest, Sent>,
    correlator: Correlator,
    /// Whether the client has more urgent requests. `None` if events do not wait for other requests.
    urgent: Option<watch::Receiver<bool>>,
    /// The limit on the rate of events. `None`: no limit.
    limiter: Option<RateLimiter>,
}

/// The attempts to send one event.
struct Attempts {
    /// Number of failed attempts.
    failed: usize,
    backoff: Backoff,
}

/// An Event object that was sent.
struct Sent {
    /// Time of the first occurrence. The name of the object is derived from it.
    first: Timestamp,
    count: i32,
    last: Timestamp,
}

/// A recorder and its sender. Events are sent only while the sender runs. `host` is the node's name, or empty.
pub fn recorder(client: Client, host: &str) -> (Recorder, Sender) {
    with_capacity(client, host, QUEUE_CAPACITY)
}

/// A recorder whose events wait while `urgent` is true, so that other requests of the client come first. An event waits
/// for at most two seconds.
pub fn yielding_recorder(client: Client, host: &str, urgent: watch::Receiver<bool>) -> (Recorder, Sender) {
    let (recorder, sender) = with_capacity(client, host, YIELDING_QUEUE_CAPACITY);
    (recorder, Sender { urgent: Some(urgent), ..sender })
}

fn with_capacity(client: Client, host: &str, capacity: usize) -> (Recorder, Sender) {
    let (recorder, queue) = queue(capacity);
    let sender = Sender {
        client,
        queue,
        host: host.into(),
        sent: HashMap::new(),
        correlator: Correlator::default(),
        urgent: None,
        limiter: None,
    };
    (recorder, sender)
}

/// A recorder and the receiver of its records, with a queue of this capacity.
fn queue(capacity: usize) -> (Recorder, mpsc::Receiver<Record>) {
    let (queue, records) = mpsc::channel(capacity);
    (Recorder { queue }, records)
}

/// Waits while other requests are urgent. `age` is the time for which the event has waited. The wait ends at
/// [`YIELD_MAX`] in total.
async fn wait_while_urgent(urgent: &mut watch::Receiver<bool>, age: Duration) {
    let left = YIELD_MAX.saturating_sub(age);
    if !left.is_zero() {
        // An error means that the sender was dropped, so no request is urgent any more.
        let _ = tokio::time::timeout(left, urgent.wait_for(|urgent| !*urgent)).await;
    }
}

/// Whether an error is transient: a server that is overloaded or starting, expired credentials of the client, or any
/// error without a Status of the server, such as no connection or a timeout. The same request can succeed later.
pub fn is_unavailable(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code >= 500 || matches!(status.code, 401 | 429),
        _ => true,
    }
}

// === impl Recorder ===

impl Recorder {
    /// Records an event about an object. This call never waits. `component` is the reporting component.
    pub fn record(&self, about: ObjectReference, component: impl Into<Cow<'static, str>>, event: Event) {
        let record = Record {
            about,
            component: component.into(),
            event: Event { message: printable(&event.message, MESSAGE_MAX), ..event },
            at: Timestamp::now(),
        };
        let Event { reason, message, .. } = &record.event;
        tracing::debug!(about = record.about.name, reason, message, "recording an event");
        if self.queue.try_send(record).is_err() {
            tracing::debug!("cannot record an event: the queue is full");
        }
    }
}

// === impl Attempts ===

impl Attempts {
    fn new() -> Self {
        Self { failed: 0, backoff: Backoff::new(FIRST_BACKOFF, MAX_BACKOFF) }
    }

    /// Records a failed attempt. Returns the delay before the next attempt, or `None` after the last attempt.
    fn next_delay(&mut self) -> Option<Duration> {
        self.failed += 1;
        (self.failed < ATTEMPTS_MAX).then(|| self.backoff.next_delay())
    }
}

// === impl Sender ===

impl Sender {
    /// Limits the rate at which events are sent: further events wait in the queue. `None`: no limit.
    #[must_use]
    pub fn with_rate(self, rate: Option<Rate>) -> Self {
        Self { limiter: rate.map(RateLimiter::new), ..self }
    }

    /// Sends events until all recorders are dropped.
    pub async fn run(mut self) {
        while let Some(mut record) = self.queue.recv().await {
            if let Some(urgent) = &mut self.urgent {
                let age = Timestamp::now().duration_since(record.at).unsigned_abs();
                wait_while_urgent(urgent, age).await;
            }
            if let Some(admitted) = self.correlator.admit(&mut record) {
                if let Some(limiter) = &mut self.limiter {
                    limiter.wait().await;
                }
                self.deliver(admitted, &record).await;
            }
        }
    }

    /// Sends an event, and retries transient errors.
    async fn deliver(&mut self, admitted: Admitted, record: &Record) {
        let mut attempts = Attempts::new();
        while let Err(error) = self.send(admitted, record).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "cannot send an event");
            if !is_unavailable(&error) {
                return;
            }
            let Some(delay) = attempts.next_delay() else {
                let about = record.about.name.as_deref().unwrap_or_default();
                let (reason, attempts) = (record.event.reason, ATTEMPTS_MAX);
                tracing::warn!(about, reason, attempts, %error, "dropping an event that cannot be sent");
                return;
            };
            tokio::time::sleep(delay).await;
        }
    }

    /// Counts a repeat in its Event object, or creates a new object.
    async fn send(&mut self, admitted: Admitted, record: &Record) -> Result<(), kube::Error> {
        let namespace = record.about.namespace.as_deref().unwrap_or("default");
        let api: Api<ApiEvent> = Api::namespaced(self.client.clone(), namespace);
        if let Some(sent) = self.sent.get_mut(&admitted.digest) {
            let count = sent.count + 1;
            let mut patch = json!({"count": count, "lastTimestamp": Time(record.at)});
            if admitted.is_combined {
                patch["message"] = printable(&record.event.message, MESSAGE_MAX).into();
            }
            let name = record.object_name(sent.first);
            match api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
                // The object has expired: a new one is created.
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => return Err(error),
                Ok(_) => {
                    (sent.count, sent.last) = (count, record.at);
                    return Ok(());
                }
            }
        }
        let event = record.to_api(&self.host);
        let body = serde_json::to_vec(&event).map_err(kube::Error::SerdeError)?;
        let request = Request::new(ApiEvent::url_path(&(), Some(namespace)));
        let request = request.create(&PostParams::default(), body).map_err(kube::Error::BuildRequest)?;
        // The response is not decoded, because it contains the same object.
        self.client.request_text(request).await?;
        correlator::keep_newest(&mut self.sent, SENT_MAX, |sent| sent.last);
        self.sent.insert(admitted.digest, Sent { first: record.at, count: 1, last: record.at });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_event_waits_for_urgent_requests_for_a_limited_time() {
        let (urgent, mut receiver) = watch::channel(true);
        let start = Instant::now();
        wait_while_urgent(&mut receiver, YIELD_MAX).await;
        assert_eq!(start.elapsed(), Duration::ZERO, "an old event");
        wait_while_urgent(&mut receiver, Duration::ZERO).await;
        assert!(start.elapsed() >= YIELD_MAX);
        let start = Instant::now();
        let end = async {
            tokio::time::sleep(YIELD_MAX / 10).await;
            urgent.send_replace(false);
        };
        tokio::join!(wait_while_urgent(&mut receiver, Duration::ZERO), end);
        assert!(start.elapsed() < YIELD_MAX / 2);
        let start = Instant::now();
        wait_while_urgent(&mut receiver, Duration::ZERO).await;
        urgent.send_replace(true);
        drop(urgent);
        wait_while_urgent(&mut receiver, Duration::ZERO).await;
        assert_eq!(start.elapsed(), Duration::ZERO, "nothing can be urgent");
    }

    #[test]
    fn an_event_that_always_fails_is_dropped_after_some_minutes() {
        let mut attempts = Attempts::new();
        let delays: Vec<Duration> = std::iter::from_fn(|| attempts.next_delay()).collect();
        assert_eq!(delays.len() + 1, ATTEMPTS_MAX);
        assert_eq!(delays.iter().sum::<Duration>(), Duration::from_secs(1 + 2 + 4 + 8 + 16 + 6 * 30));
    }

    #[test]
    fn events_beyond_the_queue_are_dropped_and_messages_are_cut() {
        for capacity in [QUEUE_CAPACITY, YIELDING_QUEUE_CAPACITY] {
            let (recorder, mut records) = queue(capacity);
            for _ in 0..capacity + 10 {
                let message = "x".repeat(2 * MESSAGE_MAX);
                let event = Event { event_type: EventType::Normal, reason: "Pulled", message };
                recorder.record(ObjectReference::default(), "kubelet", event);
            }
            let taken: Vec<Record> = std::iter::from_fn(|| records.try_recv().ok()).collect();
            assert_eq!(taken.len(), capacity);
            assert!(taken.iter().all(|record| record.event.message.len() <= MESSAGE_MAX));
        }
    }
}

//! The backends of audit events: the log and the webhook, each with its mode. At each stage, a request waits at most
//! [`MAX_WAIT`] for the backends.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use coracle_audit::{Event, Log, Mode};
use tokio::{sync::oneshot, time::Instant};

use super::{
    batch::{AuditBatch, BatchQueue, Target},
    blocking::BlockingWebhook,
    truncate::{AuditTruncateConfig, shortened},
    webhook,
};
use crate::{error::ApiError, webhook_connections::WebhookPermit};

/// Maximum time that a request waits at one stage for backends in a blocking mode.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Maximum time to write the last events when the server stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The settings of the webhook backend.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditWebhookConfig {
    /// Kubeconfig file of the server.
    pub file: PathBuf,
    /// Whether requests wait for the server.
    pub mode: Mode,
    /// Settings of the batch mode.
    pub batch: AuditBatch,
    /// Limits on the size of events and batches. `None` for no limits.
    pub truncate: Option<AuditTruncateConfig>,
    /// The back-off before the first retry, in all modes. `None` for the default back-offs.
    pub backoff: Option<Duration>,
}

/// The configured backends, and the counts of their events.
pub(super) struct Backends {
    log: Option<LogBackend>,
    webhook: Option<Webhook>,
    webhook_mode: Mode,
    webhook_truncate: Option<AuditTruncateConfig>,
    /// Number of events that were sent to the backends.
    events: AtomicU64,
    /// Number of requests that were refused because their first event was not stored.
    refused: AtomicU64,
    /// Number of events that the webhook did not receive.
    lost_by_webhook: Arc<AtomicU64>,
    /// Number of events that a backend does not get because they are too large without their objects and long texts.
    lost_by_size: AtomicU64,
}

/// The log, with its mode and its limits.
pub(crate) struct LogBackend {
    log: Log,
    mode: Mode,
    /// The queue of the batch mode. `None` in the other modes.
    queue: Option<BatchQueue>,
    /// Limits on the size of events and batches. `None` for no limits.
    truncate: Option<AuditTruncateConfig>,
    /// Number of events that the log did not receive.
    lost: Arc<AtomicU64>,
}

/// An event as the backends get it: one line of JSON for each backend. `None` if the backend gets no event.
pub(super) struct EventLines {
    log: Option<String>,
    webhook: Option<String>,
}

enum Webhook {
    Batch(BatchQueue),
    Blocking(BlockingWebhook),
}

/// The result of a backend in a blocking mode. `None` in the batch mode.
type Outcome = Option<oneshot::Receiver<bool>>;

/// Replaces the line of an event by its line without objects, unless the limit of the backend has already made the line
/// shorter.
fn shorten(line: &mut String, event: &mut Event) {
    let without_objects = shortened(event);
    if without_objects.len() < line.len() {
        *line = without_objects;
    }
}

/// Whether a backend stores an event before the deadline. In the batch mode the event counts as stored.
async fn is_stored(outcome: Outcome, deadline: Instant) -> bool {
    match outcome {
        None => true,
        Some(stored) => matches!(tokio::time::timeout_at(deadline, stored).await, Ok(Ok(true))),
    }
}

// === impl LogBackend ===

impl LogBackend {
    /// Starts the queue of the batch mode. Must be called within a tokio runtime.
    pub(crate) fn start(
        log: Log,
        mode: Mode,
        batch: AuditBatch,
        truncate: Option<AuditTruncateConfig>,
    ) -> Self {
        let lost = Arc::<AtomicU64>::default();
        let queue = match mode {
            Mode::Batch => Some(BatchQueue::start(Target::Log(log.clone()), batch, lost.clone())),
            Mode::Blocking | Mode::BlockingStrict => None,
        };
        Self { log, mode, queue, truncate, lost }
    }

    /// Number of events that are not in the log.
    fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed) + self.log.lost()
    }

    /// Waits until all earlier events are written.
    async fn flush(&self) {
        if let Some(queue) = &self.queue {
            queue.flush().await;
        }
        self.log.flush().await;
    }
}

// === impl Webhook ===

impl Webhook {
    fn start(config: AuditWebhookConfig, lost: Arc<AtomicU64>) -> Result<Self, String> {
        match config.mode {
            Mode::Batch => {
                let remote = Box::new(webhook::remote(&config.file, config.backoff)?);
                let max_bytes = config.truncate.map_or(usize::MAX, |truncate| truncate.max_batch_bytes);
                let target = Target::Webhook { remote, max_bytes };
                Ok(Self::Batch(BatchQueue::start(target, config.batch, lost)))
            }
            Mode::Blocking | Mode::BlockingStrict => {
                BlockingWebhook::new(&config.file, config.backoff, lost).map(Self::Blocking)
            }
        }
    }
}

// === impl Backends ===

impl Backends {
    /// Starts the webhook backend if it is configured.
    ///
    /// # Errors
    /// The kubeconfig file of the webhook cannot be used.
    pub(super) fn new(log: Option<LogBackend>, webhook: Option<AuditWebhookConfig>) -> Result<Self, String> {
        let lost_by_webhook = Arc::<AtomicU64>::default();
        let webhook_mode = webhook.as_ref().map_or(Mode::Batch, |config| config.mode);
        let webhook_truncate = webhook.as_ref().and_then(|config| config.truncate);
        let webhook = webhook.map(|config| Webhook::start(config, lost_by_webhook.clone())).transpose()?;
        let [events, refused, lost_by_size] = [0, 0, 0].map(AtomicU64::new);
        Ok(Self {
            log,
            webhook,
            webhook_mode,
            webhook_truncate,
            events,
            refused,
            lost_by_webhook,
            lost_by_size,
        })
    }

    /// Numbers of all events, of events that the webhook did not receive, of events that the log did not receive, and
    /// of refused requests.
    pub(super) fn counts(&self) -> [u64; 4] {
        let counts = [&self.events, &*self.lost_by_webhook, &self.refused];
        let [events, lost_by_webhook, refused] = counts.map(|count| count.load(Ordering::Relaxed));
        let lost_by_log = self.log.as_ref().map_or(0, LogBackend::lost);
        [events, lost_by_webhook, lost_by_log, refused]
    }

    /// Number of events that a backend does not get because they are too large without their objects and long texts.
    pub(super) fn lost_by_size(&self) -> u64 {
        self.lost_by_size.load(Ordering::Relaxed)
    }

    /// The event as the backends get it. An event above the maximum size of a backend is shortened for this backend, or
    /// lost and counted.
    pub(super) fn lines(&self, event: &mut Event) -> EventLines {
        let mut line = event.line();
        let webhook = self.webhook.as_ref().and_then(|_| {
            // A large line is copied only for a second backend.
            let line = if self.log.is_some() { line.clone() } else { std::mem::take(&mut line) };
            self.limited(line, event, self.webhook_truncate)
        });
        let log = self.log.as_ref().and_then(|backend| self.limited(line, event, backend.truncate));
        EventLines { log, webhook }
    }

    fn limited(&self, line: String, event: &mut Event, limit: Option<AuditTruncateConfig>) -> Option<String> {
        let Some(limit) = limit else { return Some(line) };
        let limited = limit.limit(line, event);
        if limited.is_none() && self.lost_by_size.fetch_add(1, Ordering::Relaxed).is_power_of_two() {
            tracing::error!(
                "an audit event is too large even without its objects and long texts; the event is lost"
            );
        }
        limited
    }

    /// Counts a request that is refused because its first event was not stored.
    pub(super) fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request of an owner that waits for another server before it runs. The empty owner has no limit: it
    /// stands for members of `system:masters`.
    ///
    /// # Errors
    /// Too many requests wait. The client may retry.
    pub(super) fn enter(&self, owner: &Arc<str>) -> Result<Option<WebhookPermit>, ApiError> {
        let Some(Webhook::Blocking(webhook)) = &self.webhook else { return Ok(None) };
        if owner.is_empty() {
            return Ok(None);
        }
        let slot = webhook.enter(owner);
        if slot.is_none() {
            self.count_refused();
            return Err(ApiError::too_many_requests());
        }
        Ok(slot)
    }

    /// Whether requests wait for another server.
    pub(super) fn waits_for_webhook(&self) -> bool {
        self.webhook_mode != Mode::Batch
    }

    /// Sends an event of an owner's request to the backends, and waits for the backends in a blocking mode. Returns
    /// false if a backend in the mode [`Mode::BlockingStrict`] does not have the event.
    ///
    /// Calls `queued` when a drop of this future no longer prevents the sending of the event. If the future is dropped
    /// before this call, no backend gets the event.
    ///
    /// As upstream, a backend that does not get the event because of its limits counts as if it had the event.
    pub(super) async fn write(&self, lines: EventLines, owner: &Arc<str>, queued: impl FnOnce()) -> bool {
        let deadline = Instant::now() + MAX_WAIT;
        let EventLines { log: log_line, webhook: webhook_line } = lines;
        let blocking = match (&self.webhook, &webhook_line) {
            (Some(Webhook::Blocking(webhook)), Some(line)) => {
                let memory = webhook.reserve(line, owner, deadline).await;
                Some((webhook, memory, line))
            }
            _ => None,
        };
        let logged = self.write_to_log(log_line, deadline).await;
        self.events.fetch_add(1, Ordering::Relaxed);
        if let (Some(Webhook::Batch(webhook)), Some(line)) = (&self.webhook, &webhook_line) {
            webhook.send(line);
        }
        let sent = blocking.map(|(webhook, memory, line)| webhook.send(line, memory, owner));
        queued();
        let log_mode = self.log.as_ref().map_or(Mode::Batch, |backend| backend.mode);
        let is_logged = is_stored(logged, deadline).await;
        let is_sent = is_stored(sent, deadline).await;
        (is_logged || log_mode != Mode::BlockingStrict)
            && (is_sent || self.webhook_mode != Mode::BlockingStrict)
    }

    /// Queues an event for the log. In a blocking mode, waits until the deadline while the queue is full (slow disk).
    async fn write_to_log(&self, line: Option<String>, deadline: Instant) -> Outcome {
        let (LogBackend { log, queue, lost, .. }, line) = (self.log.as_ref()?, line?);
        if let Some(queue) = queue {
            queue.send(&line);
            return None;
        }
        match tokio::time::timeout_at(deadline, log.submit(line)).await {
            Ok(written) => Some(written),
            Err(_elapsed) => {
                if lost.fetch_add(1, Ordering::Relaxed).is_power_of_two() {
                    tracing::error!("the queue of the audit log is full; events are lost");
                }
                // The sender is dropped: the event counts as not written.
                Some(oneshot::channel().1)
            }
        }
    }

    /// Sends the event of a request whose client has disconnected. The number of these events is not limited by
    /// requests in flight. While the memory of a backend is used up, this backend gets the event without its objects.
    /// Above a second limit the event is lost and counted, as upstream does in the mode `batch`.
    pub(super) fn write_late(&self, event: &mut Event, owner: &Arc<str>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let EventLines { log: log_line, webhook: webhook_line } = self.lines(event);
        self.events.fetch_add(1, Ordering::Relaxed);
        match (&self.webhook, webhook_line) {
            (Some(Webhook::Batch(webhook)), Some(line)) => webhook.send(&line),
            (Some(Webhook::Blocking(webhook)), Some(mut line)) => {
                let memory = webhook.reserve_now(&line, owner).or_else(|| {
                    shorten(&mut line, event);
                    webhook.reserve_shortened(&line, owner)
                });
                // Nothing waits for the result.
                drop(webhook.send(&line, memory, owner));
            }
            (_, None) | (None, _) => {}
        }
        let (Some(LogBackend { log, queue, lost, .. }), Some(mut line)) = (&self.log, log_line) else {
            return;
        };
        if let Some(queue) = queue {
            queue.send(&line);
            return;
        }
        let memory = log.memory(&line).or_else(|| {
            shorten(&mut line, event);
            log.memory_of_shortened(&line)
        });
        if memory.is_some() {
            let log = log.clone();
            runtime.spawn(async move { log.write_reserved(line, memory).await });
        } else if lost.fetch_add(1, Ordering::Relaxed).is_power_of_two() {
            tracing::error!("the queue of the audit log is full; events of disconnected clients are lost");
        }
    }

    /// Waits until all earlier events are written, at most [`FLUSH_TIMEOUT`].
    pub(super) async fn flush(&self) {
        let all = async {
            if let Some(backend) = &self.log {
                backend.flush().await;
            }
            match &self.webhook {
                Some(Webhook::Batch(webhook)) => webhook.flush().await,
                Some(Webhook::Blocking(webhook)) => webhook.flush().await,
                None => {}
            }
        };
        if tokio::time::timeout(FLUSH_TIMEOUT, all).await.is_err() {
            tracing::error!("cannot write the last audit events: the disk or the webhook is too slow");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use coracle_audit::{Level, LogOptions};
    use serde_json::{Value, json, value::to_raw_value};

    use super::{super::TRUNCATED, *};
    use crate::remote::tests::Hook;

    fn log(path: &str) -> Log {
        let (max_bytes, max_age) = (1 << 20, Duration::ZERO);
        Log::open(LogOptions { path: PathBuf::from(path), max_bytes, max_backups: 0, max_age }).unwrap()
    }

    fn to(hook: &Hook, mode: Mode) -> Backends {
        let config = AuditWebhookConfig {
            file: hook.file(),
            mode,
            batch: AuditBatch { buffer: 10, size: 10, wait: Duration::from_secs(3600), throttle: None },
            truncate: None,
            backoff: None,
        };
        Backends::new(None, Some(config)).unwrap()
    }

    async fn is_accepted(backends: &Backends) -> bool {
        let is_queued = AtomicBool::new(false);
        let queued = || is_queued.store(true, Ordering::Relaxed);
        let lines = backends.lines(&mut Event::received(Level::Metadata, "a".to_owned()));
        let is_accepted = backends.write(lines, &"eve".into(), queued).await;
        assert!(is_queued.into_inner());
        is_accepted
    }

    #[tokio::test]
    async fn only_the_strict_mode_fails_when_the_log_cannot_be_written() {
        for (mode, expected) in [(Mode::Batch, true), (Mode::Blocking, true), (Mode::BlockingStrict, false)] {
            let log = LogBackend::start(log("/dev/full"), mode, AuditBatch::default(), None);
            let backends = Backends::new(Some(log), None).unwrap();
            assert_eq!(is_accepted(&backends).await, expected, "{mode:?}");
            backends.flush().await;
            assert_eq!(backends.counts(), [1, 0, 1, 0], "{mode:?}");
        }
    }

    #[tokio::test]
    async fn each_backend_has_its_own_limit_and_a_lost_event_refuses_no_request() {
        let limit = |max_event_bytes| Some(AuditTruncateConfig { max_event_bytes, max_batch_bytes: 1 << 20 });
        let hook = Hook::start(|_| (200, String::new())).await;
        let mut event = Event::received(Level::Request, "a".to_owned());
        event.request_object = serde_json::value::to_raw_value(&"x".repeat(1000)).ok();
        for (log_limit, webhook_limit, lost) in
            [(None, limit(900), 0), (limit(900), limit(900), 0), (limit(1), limit(900), 1)]
        {
            let mut backends = to(&hook, Mode::BlockingStrict);
            let mode = Mode::BlockingStrict;
            let log = LogBackend::start(log("/dev/null"), mode, AuditBatch::default(), log_limit);
            backends.log = Some(log);
            backends.webhook_truncate = webhook_limit;
            let lines = backends.lines(&mut event);
            let has_object = |line: &Option<String>| line.as_ref().map(|line| line.contains("xxx"));
            let expect = if lost == 1 { None } else { Some(log_limit.is_none()) };
            assert_eq!((has_object(&lines.log), has_object(&lines.webhook)), (expect, Some(false)));
            assert!(backends.write(lines, &"eve".into(), || ()).await);
            assert_eq!((backends.lost_by_size(), backends.counts()), (lost, [1, 0, 0, 0]));
        }
        assert_eq!(
            hook.bodies.lock().unwrap()[0]["items"][0]["annotations"]["audit.k8s.io/truncated"],
            "true"
        );
    }

    #[tokio::test]
    async fn a_blocking_webhook_has_the_event_when_the_write_ends() {
        let hook = Hook::start(|_| (200, String::new())).await;
        assert!(is_accepted(&to(&hook, Mode::Blocking)).await);
        assert_eq!(hook.bodies.lock().unwrap()[0]["items"][0]["auditID"], "a");
        assert!(is_accepted(&to(&hook, Mode::Batch)).await);
        assert_eq!(hook.count(), 1, "the batch is not full");
        let refusing = Hook::start(|_| (403, String::new())).await;
        for (mode, expected) in [(Mode::Blocking, true), (Mode::BlockingStrict, false)] {
            let backends = to(&refusing, mode);
            assert_eq!(is_accepted(&backends).await, expected, "{mode:?}");
            assert_eq!(backends.counts(), [1, 1, 0, 0], "{mode:?}");
        }
    }

    #[tokio::test]
    async fn a_late_event_lacks_its_objects_only_in_the_backend_without_memory() {
        let hook = Hook::start(|_| (200, String::new())).await;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.log");
        let log = log(path.to_str().unwrap());
        let log = LogBackend::start(log, Mode::Blocking, AuditBatch::default(), None);
        let backends = Backends { log: Some(log), ..to(&hook, Mode::Blocking) };
        let Some(Webhook::Blocking(webhook)) = &backends.webhook else { panic!("no webhook") };
        // Each has the smallest size, so nothing is left.
        let held: Vec<_> = std::iter::from_fn(|| webhook.reserve_now("x", "eve")).collect();
        let mut event = Event::received(Level::Request, "a".to_owned());
        // The event is shorter without the object, although it gets an annotation.
        let value = "v".repeat(1000);
        event.request_object = to_raw_value(&json!({"k": value})).ok();
        backends.write_late(&mut event, &"eve".into());
        drop(held);
        backends.flush().await;
        let sent = hook.bodies.lock().unwrap()[0]["items"][0].clone();
        assert_eq!((&sent["requestObject"], &sent["annotations"][TRUNCATED]), (&Value::Null, &json!("true")));
        let logged = coracle_testing::until("the log has the event", 10, || {
            serde_json::from_str::<Value>(&std::fs::read_to_string(&path).unwrap()).ok()
        });
        let logged = logged.await;
        assert_eq!((&logged["requestObject"]["k"], logged.get("annotations")), (&json!(value), None));
        assert_eq!(backends.counts(), [1, 0, 0, 0]);
    }

    #[tokio::test]
    async fn an_event_whose_request_is_cancelled_reaches_a_blocking_webhook() {
        let hook = Hook::start(|_| (200, String::new())).await;
        let backends = to(&hook, Mode::Blocking);
        let cancelled = tokio::select! {
            biased;
            _ = is_accepted(&backends) => false,
            () = std::future::ready(()) => true,
        };
        assert!(cancelled);
        backends.flush().await;
        assert_eq!((hook.count(), backends.counts()), (1, [1, 0, 0, 0]));
    }
}

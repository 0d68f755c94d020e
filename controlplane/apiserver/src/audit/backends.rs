//! The backends of audit events: the log and the webhook, each with its mode. A request waits at most [`MAX_WAIT`] for them.

use std::{
    cell::LazyCell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use coracle_audit::{Event, Log, Mode};
use tokio::{sync::oneshot, time::Instant};

use super::{
    TRUNCATED,
    blocking::BlockingWebhook,
    webhook::{AuditWebhook, AuditWebhookConfig},
};
use crate::{error::ApiError, webhook_connections::WebhookPermit};

/// Maximum time that a request waits at one stage for backends in a blocking mode.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Maximum time to write the last events when the server stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The configured backends, and the counts of their events.
pub(super) struct Backends {
    log: Option<Log>,
    log_mode: Mode,
    webhook: Option<Webhook>,
    webhook_mode: Mode,
    /// Number of events that were sent to the backends.
    events: AtomicU64,
    /// Number of requests that were refused because their first event was not stored.
    refused: AtomicU64,
    /// Number of events that the webhook did not receive.
    lost_by_webhook: Arc<AtomicU64>,
    /// Number of events that the log did not receive.
    lost_by_log: AtomicU64,
}

enum Webhook {
    Batch(AuditWebhook),
    Blocking(BlockingWebhook),
}

/// The result of a backend in a blocking mode. `None` in the batch mode.
type Outcome = Option<oneshot::Receiver<bool>>;

/// Whether a backend stores an event before the deadline. In the batch mode the event counts as stored.
async fn is_stored(outcome: Outcome, deadline: Instant) -> bool {
    match outcome {
        None => true,
        Some(stored) => matches!(tokio::time::timeout_at(deadline, stored).await, Ok(Ok(true))),
    }
}

/// The line of an event without its objects.
fn shortened(event: &mut Event) -> String {
    (event.request_object, event.response_object) = (None, None);
    event.annotations.insert(TRUNCATED.to_owned(), "true".to_owned());
    event.line()
}

// === impl Backends ===

impl Backends {
    /// Starts the webhook backend if it is configured.
    ///
    /// # Errors
    /// The kubeconfig file of the webhook cannot be used.
    pub(super) fn new(
        log: Option<Log>,
        log_mode: Mode,
        webhook: Option<AuditWebhookConfig>,
    ) -> Result<Self, String> {
        let lost_by_webhook = Arc::<AtomicU64>::default();
        let webhook_mode = webhook.as_ref().map_or(Mode::Batch, |config| config.mode);
        let start = |config: AuditWebhookConfig| {
            let lost = lost_by_webhook.clone();
            match config.mode {
                Mode::Batch => AuditWebhook::start(config, lost).map(Webhook::Batch),
                Mode::Blocking | Mode::BlockingStrict => {
                    BlockingWebhook::new(&config.file, config.backoff, lost).map(Webhook::Blocking)
                }
            }
        };
        let webhook = webhook.map(start).transpose()?;
        let [events, refused, lost_by_log] = [0, 0, 0].map(AtomicU64::new);
        Ok(Self { log, log_mode, webhook, webhook_mode, events, refused, lost_by_webhook, lost_by_log })
    }

    /// Numbers of all events, of events that the webhook did not receive, of events that the log did not receive, and of
    /// refused requests.
    pub(super) fn counts(&self) -> [u64; 4] {
        let counts = [&self.events, &*self.lost_by_webhook, &self.lost_by_log, &self.refused];
        let [events, lost_by_webhook, lost_by_log, refused] =
            counts.map(|count| count.load(Ordering::Relaxed));
        let lost_by_log = lost_by_log + self.log.as_ref().map_or(0, Log::lost);
        [events, lost_by_webhook, lost_by_log, refused]
    }

    /// Counts a request that is refused because its first event was not stored.
    pub(super) fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request of an owner that waits for another server before it runs. The empty owner has no limit: it stands for
    /// members of `system:masters`.
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

    /// Sends an event of an owner's request to the backends, and waits for those in a blocking mode. Returns false if a
    /// backend in the mode [`Mode::BlockingStrict`] does not have the event.
    ///
    /// Calls `queued` as soon as the event is sent even if this future is dropped. If the future is dropped earlier, no
    /// backend gets the event.
    pub(super) async fn write(&self, line: String, owner: &Arc<str>, queued: impl FnOnce()) -> bool {
        let deadline = Instant::now() + MAX_WAIT;
        let blocking = match &self.webhook {
            Some(Webhook::Blocking(webhook)) => {
                let memory = webhook.reserve(&line, owner, deadline).await;
                Some((webhook, memory, line.clone()))
            }
            Some(Webhook::Batch(_)) | None => None,
        };
        let batch = match &self.webhook {
            Some(Webhook::Batch(webhook)) => Some((webhook, line.clone())),
            Some(Webhook::Blocking(_)) | None => None,
        };
        let logged = self.write_to_log(line, deadline).await;
        self.events.fetch_add(1, Ordering::Relaxed);
        if let Some((webhook, line)) = batch {
            webhook.send(&line);
        }
        let sent = blocking.map(|(webhook, memory, line)| webhook.send(&line, memory, owner));
        queued();
        let is_logged = is_stored(logged, deadline).await;
        let is_sent = is_stored(sent, deadline).await;
        (is_logged || self.log_mode != Mode::BlockingStrict)
            && (is_sent || self.webhook_mode != Mode::BlockingStrict)
    }

    /// Queues an event for the log. Waits while the queue is full (slow disk); in a blocking mode until the deadline.
    async fn write_to_log(&self, line: String, deadline: Instant) -> Outcome {
        let log = self.log.as_ref()?;
        if self.log_mode == Mode::Batch {
            log.write(line).await;
            return None;
        }
        match tokio::time::timeout_at(deadline, log.submit(line)).await {
            Ok(written) => Some(written),
            Err(_elapsed) => {
                if self.lost_by_log.fetch_add(1, Ordering::Relaxed).is_power_of_two() {
                    tracing::error!("the queue of the audit log is full; events are lost");
                }
                // The sender is dropped: the event counts as not written.
                Some(oneshot::channel().1)
            }
        }
    }

    /// Sends the event of a request whose client has disconnected. The number of these events is not limited by
    /// requests in flight. While the memory of a backend is used up, this backend gets the event without its objects; above
    /// a second limit the event is lost and counted, as upstream does in the mode `batch`.
    pub(super) fn write_late(&self, event: &mut Event, owner: &Arc<str>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let line = event.line();
        let short = LazyCell::new(|| shortened(event));
        self.events.fetch_add(1, Ordering::Relaxed);
        match &self.webhook {
            Some(Webhook::Batch(webhook)) => webhook.send(&line),
            Some(Webhook::Blocking(webhook)) => {
                let whole = webhook.reserve_now(&line, owner);
                let sent = if whole.is_some() { &line } else { &*short };
                let memory = whole.or_else(|| webhook.reserve_shortened(sent, owner));
                // Nothing waits for the result.
                drop(webhook.send(sent, memory, owner));
            }
            None => {}
        }
        let Some(log) = self.log.clone() else { return };
        let whole = log.memory(&line);
        let line = if whole.is_some() { line } else { short.clone() };
        let memory = whole.or_else(|| log.memory_of_shortened(&line));
        if memory.is_some() {
            runtime.spawn(async move { log.write_reserved(line, memory).await });
        } else if self.lost_by_log.fetch_add(1, Ordering::Relaxed).is_power_of_two() {
            tracing::error!("the queue of the audit log is full; events of disconnected clients are lost");
        }
    }

    /// Waits until all earlier events are written, at most [`FLUSH_TIMEOUT`].
    pub(super) async fn flush(&self) {
        let all = async {
            if let Some(log) = &self.log {
                log.flush().await;
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
    use std::{path::PathBuf, sync::atomic::AtomicBool};

    use coracle_audit::{Level, LogOptions};
    use serde_json::{Value, json, value::to_raw_value};

    use super::*;
    use crate::remote::tests::Hook;

    fn log(path: &str) -> Log {
        let (max_bytes, max_age) = (1 << 20, Duration::ZERO);
        Log::open(LogOptions { path: PathBuf::from(path), max_bytes, max_backups: 0, max_age }).unwrap()
    }

    fn to(hook: &Hook, mode: Mode) -> Backends {
        let config = AuditWebhookConfig {
            file: hook.file(),
            mode,
            buffer: 10,
            batch: 10,
            wait: Duration::from_secs(3600),
            backoff: None,
        };
        Backends::new(None, Mode::Batch, Some(config)).unwrap()
    }

    async fn is_accepted(backends: &Backends) -> bool {
        let is_queued = AtomicBool::new(false);
        let queued = || is_queued.store(true, Ordering::Relaxed);
        let is_accepted = backends.write("{\"auditID\":\"a\"}\n".to_owned(), &"eve".into(), queued).await;
        assert!(is_queued.into_inner());
        is_accepted
    }

    #[tokio::test]
    async fn only_the_strict_mode_fails_when_the_log_cannot_be_written() {
        for (mode, expected) in [(Mode::Batch, true), (Mode::Blocking, true), (Mode::BlockingStrict, false)] {
            let backends = Backends::new(Some(log("/dev/full")), mode, None).unwrap();
            assert_eq!(is_accepted(&backends).await, expected, "{mode:?}");
            backends.flush().await;
            assert_eq!(backends.counts(), [1, 0, 1, 0], "{mode:?}");
        }
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
        let backends = Backends { log: Some(log(path.to_str().unwrap())), ..to(&hook, Mode::Blocking) };
        let Some(Webhook::Blocking(webhook)) = &backends.webhook else { panic!("no webhook") };
        let large = "x".repeat(1 << 20);
        let held: Vec<_> = std::iter::from_fn(|| webhook.reserve_now(&large, "eve")).collect();
        let mut event = Event::received(Level::Request, "a".to_owned());
        event.request_object = to_raw_value(&json!({"k": "v"})).ok();
        backends.write_late(&mut event, &"eve".into());
        drop(held);
        backends.flush().await;
        let sent = hook.bodies.lock().unwrap()[0]["items"][0].clone();
        assert_eq!((&sent["requestObject"], &sent["annotations"][TRUNCATED]), (&Value::Null, &json!("true")));
        let logged = coracle_testing::until("the log has the event", 10, || {
            serde_json::from_str::<Value>(&std::fs::read_to_string(&path).unwrap()).ok()
        });
        let logged = logged.await;
        assert_eq!((&logged["requestObject"]["k"], logged.get("annotations")), (&json!("v"), None));
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

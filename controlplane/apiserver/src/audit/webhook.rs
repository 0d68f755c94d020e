//! The webhook backend in the batch mode: events go to a server in batches.
//!
//! The number and the bytes of queued events are limited. Requests do not wait for the server. If the queue is full, or
//! the server does not accept a batch, the events are lost and counted. Source:
//! `k8s.io/apiserver/plugin/pkg/audit/buffered`.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use coracle_audit::Mode;
use coracle_token_bucket::{Rate, TokenBucket};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use super::truncate::AuditTruncateConfig;
use crate::remote::Remote;

/// Maximum bytes of the queued events.
const MAX_BYTES: usize = 32 << 20;
/// Maximum bytes of a batch. A larger event is a batch of its own.
const MAX_BATCH_BYTES: usize = 4 << 20;
/// Timeout of sending a batch, including all attempts.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The settings of the backend.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditWebhookConfig {
    /// Kubeconfig file of the server.
    pub file: PathBuf,
    /// Whether requests wait for the server. The other settings are for the batch mode.
    pub mode: Mode,
    /// Maximum number of queued events.
    pub buffer: usize,
    /// Maximum number of events in a batch.
    pub batch: usize,
    /// Maximum time that an event waits for its batch to fill.
    pub wait: Duration,
    /// Maximum rate of batches. `None` for no maximum.
    pub throttle: Option<AuditThrottle>,
    /// Limits on the size of events and batches. `None` for no limits.
    pub truncate: Option<AuditTruncateConfig>,
    /// The back-off before the first retry, in all modes. `None` for the default back-offs.
    pub backoff: Option<Duration>,
}

/// A maximum rate of batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AuditThrottle {
    /// Batches per second; more than 0.
    pub per_second: f64,
    /// Maximum number of batches at once after a time without batches.
    pub burst: u32,
}

/// The sending half of the queue.
pub(super) struct AuditWebhook {
    queue: mpsc::Sender<Message>,
    waiting: Arc<AtomicUsize>,
    lost: Arc<AtomicU64>,
}

enum Message {
    Event(String),
    /// The task drops the sender after all earlier events were sent or lost.
    Flush(oneshot::Sender<()>),
}

/// The rate of the batches.
struct Throttle {
    rate: Rate,
    bucket: TokenBucket,
    /// Time of the last look at the bucket.
    last: Instant,
}

/// The task that sends batches.
struct Sender {
    remote: Remote,
    config: AuditWebhookConfig,
    throttle: Option<Throttle>,
    queue: mpsc::Receiver<Message>,
    waiting: Arc<AtomicUsize>,
    lost: Arc<AtomicU64>,
}

/// The client of the server that a kubeconfig file names.
///
/// # Errors
/// The file cannot be used.
pub(super) fn remote(file: &Path, backoff: Option<Duration>) -> Result<Remote, String> {
    let remote = Remote::read(file, TIMEOUT).map_err(|reason| format!("{}: {reason}", file.display()))?;
    let remote = remote.with_connection_retries();
    Ok(match backoff {
        Some(first) => remote.with_retry_backoff(first),
        None => remote,
    })
}

/// The EventList of encoded events that are separated by commas.
pub(super) fn list(events: &str) -> String {
    format!(r#"{{"kind":"EventList","apiVersion":"audit.k8s.io/v1","metadata":{{}},"items":[{events}]}}"#)
}

// === impl AuditWebhook ===

impl AuditWebhook {
    /// Starts the task. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The kubeconfig file cannot be used.
    pub(super) fn start(config: AuditWebhookConfig, lost: Arc<AtomicU64>) -> Result<Self, String> {
        let remote = remote(&config.file, config.backoff)?;
        let (queue, receiver) = mpsc::channel(config.buffer.max(1));
        let waiting = Arc::<AtomicUsize>::default();
        let sender = Sender {
            remote,
            throttle: config.throttle.map(Throttle::new),
            config,
            queue: receiver,
            waiting: waiting.clone(),
            lost: lost.clone(),
        };
        tokio::spawn(sender.run());
        Ok(Self { queue, waiting, lost })
    }

    /// Queues an event, which is one line of JSON.
    pub(super) fn send(&self, line: &str) {
        let size = line.len();
        let fits = self.waiting.fetch_add(size, Ordering::AcqRel) + size <= MAX_BYTES;
        if !fits || self.queue.try_send(Message::Event(line.trim_end().to_owned())).is_err() {
            self.waiting.fetch_sub(size, Ordering::AcqRel);
            if self.lost.fetch_add(1, Ordering::Relaxed).is_power_of_two() {
                tracing::error!("the queue of the audit webhook is full; events are lost");
            }
        }
    }

    /// Waits until all earlier events are sent or lost.
    pub(super) async fn flush(&self) {
        let (done, sent) = oneshot::channel();
        if self.queue.send(Message::Flush(done)).await.is_ok() {
            // The task drops the sender.
            let _ = sent.await;
        }
    }
}

// === impl Throttle ===

impl Throttle {
    fn new(AuditThrottle { per_second, burst }: AuditThrottle) -> Self {
        let rate = Rate { per_second, burst: burst.into() };
        Self { rate, bucket: TokenBucket::full(rate), last: Instant::now() }
    }

    /// Waits until a batch may be sent.
    async fn accept(&mut self) {
        loop {
            let now = Instant::now();
            let since_last = now.duration_since(std::mem::replace(&mut self.last, now));
            if self.bucket.take(self.rate, since_last) {
                return;
            }
            tokio::time::sleep(self.bucket.wait(self.rate)).await;
        }
    }
}

// === impl Sender ===

impl Sender {
    async fn run(mut self) {
        while let Some(first) = self.queue.recv().await {
            let (mut events, mut flushes) = (Vec::new(), Vec::new());
            let mut bytes = 0;
            let mut next = Some(first);
            let deadline = Instant::now() + self.config.wait;
            let max_bytes = self.config.truncate.map_or(usize::MAX, |truncate| truncate.max_batch_bytes);
            while let Some(message) = next {
                match message {
                    Message::Event(event) => {
                        // The separator of two events counts.
                        if !events.is_empty() && bytes + events.len() + event.len() > max_bytes {
                            self.send(std::mem::take(&mut events)).await;
                            bytes = 0;
                        }
                        bytes += event.len();
                        events.push(event);
                    }
                    Message::Flush(done) => flushes.push(done),
                }
                let is_full = events.len() >= self.config.batch || bytes >= MAX_BATCH_BYTES;
                if is_full || !flushes.is_empty() {
                    break;
                }
                next = tokio::time::timeout_at(deadline, self.queue.recv()).await.unwrap_or(None);
            }
            self.send(events).await;
            drop(flushes);
        }
    }

    async fn send(&mut self, events: Vec<String>) {
        if events.is_empty() {
            return;
        }
        if let Some(throttle) = &mut self.throttle {
            throttle.accept().await;
        }
        // The line end of each event was counted as well.
        let bytes: usize = events.iter().map(|event| event.len() + 1).sum();
        if let Err(reason) = self.remote.post_text(list(&events.join(",")).into()).await {
            let number = u64::try_from(events.len()).unwrap_or(u64::MAX);
            self.lost.fetch_add(number, Ordering::Relaxed);
            tracing::error!(
                events = number,
                reason,
                "cannot send a batch of audit events to the webhook; the events are lost"
            );
        }
        self.waiting.fetch_sub(bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::tests::Hook;

    fn start(hook: &Hook, buffer: usize, batch: usize) -> (AuditWebhook, Arc<AtomicU64>) {
        start_with(hook, [buffer, batch], None)
    }

    fn start_with(
        hook: &Hook,
        [buffer, batch]: [usize; 2],
        truncate: Option<AuditTruncateConfig>,
    ) -> (AuditWebhook, Arc<AtomicU64>) {
        let (mode, wait) = (Mode::Batch, Duration::from_secs(3600));
        let config = AuditWebhookConfig {
            file: hook.file(),
            mode,
            buffer,
            batch,
            wait,
            throttle: None,
            truncate,
            backoff: None,
        };
        let lost = Arc::<AtomicU64>::default();
        (AuditWebhook::start(config, lost.clone()).unwrap(), lost)
    }

    #[tokio::test]
    async fn events_are_sent_in_batches_and_a_flush_sends_the_rest() {
        let hook = Hook::start(|_| (200, String::new())).await;
        let (webhook, lost) = start(&hook, 100, 4);
        for number in 0..10 {
            webhook.send(&format!("{{\"auditID\":\"{number}\"}}\n"));
        }
        webhook.flush().await;
        let bodies = hook.bodies.lock().unwrap();
        let sizes: Vec<usize> = bodies.iter().map(|body| body["items"].as_array().unwrap().len()).collect();
        assert_eq!(sizes, [4, 4, 2]);
        assert_eq!(
            (&bodies[0]["kind"], &bodies[2]["items"][1]["auditID"]),
            (&"EventList".into(), &"9".into())
        );
        assert_eq!((lost.load(Ordering::Relaxed), webhook.waiting.load(Ordering::Relaxed)), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn batches_wait_for_the_rate_after_the_burst() {
        let mut throttle = Throttle::new(AuditThrottle { per_second: 10.0, burst: 3 });
        let (start, mut times) = (Instant::now(), Vec::new());
        for _ in 0..5 {
            throttle.accept().await;
            times.push(start.elapsed().as_millis());
        }
        assert_eq!(times[..3], [0, 0, 0]);
        // The clock has milliseconds.
        assert!((99..=101).contains(&times[3]) && (199..=202).contains(&times[4]), "{times:?}");
    }

    #[tokio::test]
    async fn a_batch_above_the_maximum_size_is_split() {
        let hook = Hook::start(|_| (200, String::new())).await;
        let event = "{\"auditID\":\"1\"}";
        // Two events and the comma between them fit.
        let max_batch_bytes = 2 * event.len() + 1;
        let truncate = AuditTruncateConfig { max_event_bytes: event.len(), max_batch_bytes };
        let (webhook, lost) = start_with(&hook, [100, 100], Some(truncate));
        for _ in 0..5 {
            webhook.send(&format!("{event}\n"));
        }
        webhook.flush().await;
        let bodies = hook.bodies.lock().unwrap();
        let sizes: Vec<usize> = bodies.iter().map(|body| body["items"].as_array().unwrap().len()).collect();
        assert_eq!(sizes, [2, 2, 1]);
        assert_eq!((lost.load(Ordering::Relaxed), webhook.waiting.load(Ordering::Relaxed)), (0, 0));
    }

    #[tokio::test]
    async fn a_failed_request_is_repeated_four_times_after_a_configured_back_off() {
        let hook = Hook::start(|_| (500, String::new())).await;
        let remote = remote(&hook.file(), Some(Duration::from_millis(1))).unwrap();
        remote.post_text("{}".into()).await.unwrap_err();
        assert_eq!(hook.count(), 5);
    }

    #[tokio::test]
    async fn events_beyond_the_queue_and_refused_batches_are_counted() {
        let hook = Hook::start(|_| (400, String::new())).await;
        let (webhook, lost) = start(&hook, 5, 100);
        for _ in 0..8 {
            webhook.send("{}\n");
        }
        // The task has not run yet, so the queue has five events.
        assert_eq!(lost.load(Ordering::Relaxed), 3);
        webhook.send(&"x".repeat(MAX_BYTES + 1));
        assert_eq!(lost.load(Ordering::Relaxed), 4);
        webhook.flush().await;
        assert_eq!((lost.load(Ordering::Relaxed), hook.count()), (9, 1));
    }
}

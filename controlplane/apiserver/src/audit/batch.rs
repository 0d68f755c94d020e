//! The batch mode of backends: events wait in a queue, and go to the backend in batches.
//!
//! The number and the bytes of queued events are limited. Requests do not wait for the backend. If the queue is full,
//! or a webhook does not accept a batch, the events are lost and counted. Source:
//! `k8s.io/apiserver/plugin/pkg/audit/buffered`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use coracle_audit::Log;
use coracle_token_bucket::{Rate, TokenBucket};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use super::webhook;
use crate::remote::Remote;

/// Maximum bytes of the queued events.
const MAX_BYTES: usize = 32 << 20;
/// A batch with this number of bytes or more is full, and is sent at once.
const MAX_BATCH_BYTES: usize = 4 << 20;

/// The settings of the batch mode. The defaults are those of the log in kube-apiserver.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AuditBatch {
    /// Maximum number of queued events.
    pub buffer: usize,
    /// Maximum number of events in a batch.
    pub size: usize,
    /// Maximum time that an event waits for its batch to fill.
    pub wait: Duration,
    /// Maximum rate of batches. `None` for no maximum.
    pub throttle: Option<AuditThrottle>,
}

impl Default for AuditBatch {
    fn default() -> Self {
        Self { buffer: 10_000, size: 1, wait: Duration::ZERO, throttle: None }
    }
}

/// A maximum rate of batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AuditThrottle {
    /// Batches per second; more than 0.
    pub per_second: f64,
    /// Maximum number of batches at once after a time without batches.
    pub burst: u32,
}

/// The receiver of batches.
pub(super) enum Target {
    /// A server. The size of a batch in bytes is limited.
    Webhook {
        /// The client of the server.
        remote: Box<Remote>,
        /// Maximum bytes of a batch.
        max_bytes: usize,
    },
    /// The log. It writes each event alone, so the size of a batch has no limit.
    Log(Log),
}

/// The sending half of the queue.
pub(super) struct BatchQueue {
    /// Name of the backend in messages.
    backend: &'static str,
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
    /// Time at which the bucket was last updated.
    last: Instant,
}

/// The task that sends batches.
struct Sender {
    target: Target,
    batch: AuditBatch,
    throttle: Option<Throttle>,
    queue: mpsc::Receiver<Message>,
    waiting: Arc<AtomicUsize>,
    lost: Arc<AtomicU64>,
}

// === impl Target ===

impl Target {
    /// Maximum bytes of a batch with more than one event.
    fn max_bytes(&self) -> usize {
        match self {
            Self::Webhook { max_bytes, .. } => *max_bytes,
            Self::Log(_) => usize::MAX,
        }
    }

    /// The name of the backend, as in the metrics.
    fn name(&self) -> &'static str {
        match self {
            Self::Webhook { .. } => "webhook",
            Self::Log(_) => "log",
        }
    }

    /// Sends a batch. Returns the number of events that the webhook did not accept. The log counts its lost events
    /// itself, so for the log the number is 0.
    async fn send(&self, events: Vec<String>) -> usize {
        match self {
            Self::Webhook { remote, .. } => {
                let Err(reason) = remote.post_text(webhook::list(&events.join(",")).into()).await else {
                    return 0;
                };
                tracing::error!(
                    events = events.len(),
                    reason,
                    "cannot send a batch of audit events to the webhook; the events are lost"
                );
                events.len()
            }
            Self::Log(log) => {
                for mut event in events {
                    event.push('\n');
                    log.write(event).await;
                }
                0
            }
        }
    }
}

// === impl BatchQueue ===

impl BatchQueue {
    /// Starts the task. Must be called within a tokio runtime.
    pub(super) fn start(target: Target, batch: AuditBatch, lost: Arc<AtomicU64>) -> Self {
        let backend = target.name();
        let (queue, receiver) = mpsc::channel(batch.buffer.max(1));
        let waiting = Arc::<AtomicUsize>::default();
        let sender = Sender {
            target,
            batch,
            throttle: batch.throttle.map(Throttle::new),
            queue: receiver,
            waiting: waiting.clone(),
            lost: lost.clone(),
        };
        tokio::spawn(sender.run());
        Self { backend, queue, waiting, lost }
    }

    /// Queues an event, which is one line of JSON.
    pub(super) fn send(&self, line: &str) {
        let size = line.len();
        let fits = self.waiting.fetch_add(size, Ordering::AcqRel) + size <= MAX_BYTES;
        if !fits || self.queue.try_send(Message::Event(line.trim_end().to_owned())).is_err() {
            self.waiting.fetch_sub(size, Ordering::AcqRel);
            if self.lost.fetch_add(1, Ordering::Relaxed).is_power_of_two() {
                let backend = self.backend;
                tracing::error!(backend, "a queue of audit events is full; events are lost");
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
            let deadline = Instant::now() + self.batch.wait;
            let max_bytes = self.target.max_bytes();
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
                let is_full = events.len() >= self.batch.size || bytes >= MAX_BATCH_BYTES;
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
        let lost = u64::try_from(self.target.send(events).await).unwrap_or(u64::MAX);
        self.lost.fetch_add(lost, Ordering::Relaxed);
        self.waiting.fetch_sub(bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use coracle_audit::LogOptions;
    use coracle_testing::eventually_async;

    use super::*;
    use crate::remote::tests::Hook;

    fn start(hook: &Hook, buffer: usize, size: usize) -> (BatchQueue, Arc<AtomicU64>) {
        start_with(hook, [buffer, size], usize::MAX)
    }

    fn start_with(hook: &Hook, [buffer, size]: [usize; 2], max_bytes: usize) -> (BatchQueue, Arc<AtomicU64>) {
        let batch = AuditBatch { buffer, size, wait: Duration::from_secs(3600), throttle: None };
        let remote = Box::new(webhook::remote(&hook.file(), None).unwrap());
        let lost = Arc::<AtomicU64>::default();
        (BatchQueue::start(Target::Webhook { remote, max_bytes }, batch, lost.clone()), lost)
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
        let (webhook, lost) = start_with(&hook, [100, 100], 2 * event.len() + 1);
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

    #[tokio::test]
    async fn a_log_gets_full_batches_and_events_beyond_the_queue_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.log");
        let options =
            LogOptions { path: path.clone(), max_bytes: 1 << 20, max_backups: 0, max_age: Duration::ZERO };
        let log = Log::open(options).unwrap();
        let batch = AuditBatch { buffer: 5, size: 4, wait: Duration::from_secs(3600), throttle: None };
        let lost = Arc::<AtomicU64>::default();
        let queue = BatchQueue::start(Target::Log(log.clone()), batch, lost.clone());
        for number in 0..8 {
            queue.send(&format!("{number}\n"));
        }
        // The task has not run yet, so the queue has five events.
        assert_eq!(lost.load(Ordering::Relaxed), 3);
        let text = || std::fs::read_to_string(&path).unwrap();
        eventually_async("the log has a batch", 10, async || text() == "0\n1\n2\n3\n").await;
        queue.flush().await;
        log.flush().await;
        assert_eq!(text(), "0\n1\n2\n3\n4\n");
        assert_eq!((lost.load(Ordering::Relaxed), queue.waiting.load(Ordering::Relaxed)), (3, 0));
    }
}

//! The webhook backend in a blocking mode: each event is a request of its own. The number of calls and the bytes of
//! their events are limited. The number of requests that wait before they run is also limited, because the limit on
//! requests in flight does not apply to them yet. The owners of requests share each of these limits fairly.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::FutureExt as _;
use tokio::{sync::oneshot, time::Instant};

use super::webhook;
use crate::{
    large_requests::{LargeRequestPermit, LargeRequests},
    remote::Remote,
    request_owner,
    webhook_connections::{WebhookConnections, WebhookPermit},
};

/// Maximum KiB of the events that are being sent. One owner gets at most half of this memory.
const MAX_KIB: u32 = 32 << 10;
/// Maximum KiB of shortened events, which have no objects. They are for requests whose clients have disconnected. One
/// owner gets at most half of this memory.
const MAX_SHORTENED_KIB: u32 = 16 << 10;
/// Minimum KiB for which an event counts. It keeps the number of events, of one owner and of all owners, below the
/// number of calls that may wait for the server ([`Remote`]). Otherwise very many small events of an owner would use up
/// the slots of these calls, and further events of this owner would be lost.
const MIN_KIB: u32 = 32;
/// Maximum number of requests that wait before they run. One owner gets at most as many slots as are still free.
const MAX_WAITING: usize = 1024;

/// Sends each event at once.
pub(super) struct BlockingWebhook {
    remote: Arc<Remote>,
    memory: LargeRequests,
    shortened: LargeRequests,
    /// The requests that wait before they run. They hold their slots; no request waits for a slot.
    waiting: WebhookConnections,
    lost: Arc<AtomicU64>,
}

/// KiB of memory for which a line counts, at most `most`.
fn kib(line: &str, most: u32) -> u32 {
    u32::try_from(line.len().div_ceil(1024)).map_or(most, |kib| kib.clamp(MIN_KIB, most))
}

/// Counts a lost event.
fn lose(lost: &AtomicU64, reason: &str) {
    if lost.fetch_add(1, Ordering::Relaxed).is_power_of_two() {
        tracing::error!(reason, "cannot send an audit event to the webhook; the event is lost");
    }
}

// === impl BlockingWebhook ===

impl BlockingWebhook {
    /// Reads the kubeconfig file of the server.
    ///
    /// # Errors
    /// The file cannot be used.
    pub(super) fn new(file: &Path, backoff: Option<Duration>, lost: Arc<AtomicU64>) -> Result<Self, String> {
        let remote = Arc::new(webhook::remote(file, backoff)?);
        let [memory, shortened] =
            [MAX_KIB, MAX_SHORTENED_KIB].map(|kib| LargeRequests::with_budget(kib, kib / 2));
        let waiting = WebhookConnections::of_one_host(MAX_WAITING, 0);
        Ok(Self { remote, memory, shortened, waiting, lost })
    }

    /// The slot of a request of an owner that waits before it runs. `None` if too many requests wait.
    pub(super) fn enter(&self, owner: &Arc<str>) -> Option<WebhookPermit> {
        self.waiting.acquire("", owner.clone()).now_or_never().flatten()
    }

    /// Waits for memory for an event of an owner's request. `None` if the deadline passes.
    pub(super) async fn reserve(
        &self,
        line: &str,
        owner: &str,
        deadline: Instant,
    ) -> Option<LargeRequestPermit> {
        tokio::time::timeout_at(deadline, self.memory.enter_units(owner, kib(line, MAX_KIB))).await.ok()
    }

    /// Memory for an event. `None` if too little is free.
    pub(super) fn reserve_now(&self, line: &str, owner: &str) -> Option<LargeRequestPermit> {
        tokio::task::unconstrained(self.memory.enter_units(owner, kib(line, MAX_KIB))).now_or_never()
    }

    /// Memory for an event without its objects, from a budget of its own. `None` if too little is free.
    pub(super) fn reserve_shortened(&self, line: &str, owner: &str) -> Option<LargeRequestPermit> {
        let units = kib(line, MAX_SHORTENED_KIB);
        tokio::task::unconstrained(self.shortened.enter_units(owner, units)).now_or_never()
    }

    /// Sends an event, which is one line of JSON. If `memory` is `None`, the event is lost. The receiver gets true if
    /// the server has accepted the event. False or an error means that the server has not accepted it.
    pub(super) fn send(
        &self,
        line: &str,
        memory: Option<LargeRequestPermit>,
        owner: &Arc<str>,
    ) -> oneshot::Receiver<bool> {
        let (done, sent) = oneshot::channel();
        let Some(memory) = memory else {
            lose(&self.lost, "the memory for events in flight is used up");
            return sent;
        };
        let (remote, lost, body) = (self.remote.clone(), self.lost.clone(), webhook::list(line.trim_end()));
        // A task of its own: the event is sent even if the client of the request disconnects.
        tokio::spawn(request_owner::scope(owner.clone(), async move {
            let answer = remote.post_text(body.into()).await;
            drop(memory);
            if let Err(reason) = &answer {
                lose(&lost, reason);
            }
            // The receiver is gone if nothing waits for the result any more.
            let _ = done.send(answer.is_ok());
        }));
        sent
    }

    /// Waits until all earlier events are sent or lost.
    pub(super) async fn flush(&self) {
        for (events, kib) in [(&self.memory, MAX_KIB), (&self.shortened, MAX_SHORTENED_KIB)] {
            // The whole budget is free when no event is being sent.
            drop(events.enter_units("", kib).await);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::tests::Hook;

    #[tokio::test]
    async fn the_events_of_one_owner_leave_memory_for_others() {
        let hook = Hook::start(|_| (200, String::new())).await;
        let lost = Arc::<AtomicU64>::default();
        let webhook = BlockingWebhook::new(&hook.file(), None, lost.clone()).unwrap();
        let large = "x".repeat(6 << 20);
        let held: Vec<_> = std::iter::from_fn(|| webhook.reserve_now(&large, "eve")).collect();
        assert_eq!(held.len(), 2);
        assert!(webhook.reserve_now(&large, "bob").is_some());
        let passed = Instant::now();
        assert!(webhook.reserve(&large, "eve", passed).await.is_none());
        assert!(webhook.send("{}\n", None, &"eve".into()).await.is_err());
        assert_eq!((lost.load(Ordering::Relaxed), hook.count()), (1, 0));
        // An event above the whole budget is sent alone.
        drop(held);
        assert!(webhook.reserve_now(&"x".repeat(40 << 20), "eve").is_some());
        let memory = webhook.reserve_shortened("{}", "eve");
        assert_eq!(webhook.send("{}\n", memory, &"eve".into()).await, Ok(true));
        assert_eq!((lost.load(Ordering::Relaxed), hook.count()), (1, 1));
    }

    #[tokio::test]
    async fn an_owner_with_very_many_small_events_loses_none() {
        let hook = Hook::start(|_| (200, String::new())).await;
        let lost = Arc::<AtomicU64>::default();
        let webhook = BlockingWebhook::new(&hook.file(), None, lost.clone()).unwrap();
        let eve: Arc<str> = "eve".into();
        let memory = std::iter::from_fn(|| webhook.reserve_now("{}", &eve));
        let events: Vec<_> = memory.map(|memory| webhook.send("{}\n", Some(memory), &eve)).collect();
        assert_eq!(events.len(), 512);
        for event in events {
            assert_eq!(event.await, Ok(true));
        }
        assert_eq!((lost.load(Ordering::Relaxed), hook.count()), (0, 512));
    }

    #[tokio::test]
    async fn requests_that_wait_before_they_run_are_limited() {
        let hook = Hook::start(|_| (200, String::new())).await;
        let webhook = BlockingWebhook::new(&hook.file(), None, Arc::default()).unwrap();
        let enter = |owner: &str| webhook.enter(&owner.into());
        let held: Vec<_> = std::iter::from_fn(|| enter("eve")).collect();
        assert_eq!(held.len(), MAX_WAITING / 2);
        assert!(enter("bob").is_some());
        drop(held);
        assert!(enter("eve").is_some());
    }
}

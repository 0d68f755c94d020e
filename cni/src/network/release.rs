//! Sandboxes that were released and whose network still has to be removed.
//!
//! The removal of a veth pair waits for RCU grace periods of the kernel, 10 ms and more for each pair. At the end of a
//! namespace, the kernel itself removes the pair. It does so in one step for all namespaces that have ended. So one
//! later sweep covers all released sandboxes. By then most pairs are gone. The sweep removes the other pairs, and frees
//! records and addresses. A failed removal is retried with back-off. After a crash, `reconcile` does the same from the
//! records.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_backoff::Backoff;
use tracing::warn;

use super::Network;

/// Delay of the sweep after the first release: the kernel needs some tens of milliseconds.
const SWEEP_DELAY: Duration = Duration::from_millis(200);
/// Back-off of retries: first and maximum value.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(300);

/// The queue of released sandboxes.
#[derive(Default)]
pub(super) struct ReleaseQueue {
    state: Mutex<State>,
    /// Held during a sweep. A caller that waits for this lock also waits for the removal of all sandboxes that were
    /// released before.
    sweeping: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    released: BTreeSet<String>,
    /// Sandboxes whose removal failed.
    failed: BTreeSet<String>,
    /// Whether a task retries the failed removals.
    retrying: bool,
}

// === impl ReleaseQueue ===

impl ReleaseQueue {
    /// Adds a sandbox. Returns true if the queue was empty: then the caller has to start a sweep.
    fn add(&self, id: &str) -> bool {
        let mut state = self.lock();
        let first = state.released.is_empty();
        state.released.insert(id.to_owned());
        first
    }

    /// Adds a sandbox whose removal failed. Returns true if no retry task runs: the caller then has to start one.
    fn add_failed(&self, id: &str) -> bool {
        let mut state = self.lock();
        state.failed.insert(id.to_owned());
        !std::mem::replace(&mut state.retrying, true)
    }

    /// Cancels the release of a sandbox that is attached again, because its new network must not be removed.
    pub(super) fn cancel(&self, id: &str) {
        let mut state = self.lock();
        state.released.remove(id);
        state.failed.remove(id);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Network {
    /// Removes the sandbox's network after [`SWEEP_DELAY`].
    pub(super) fn schedule_removal(&self, id: &str) {
        if self.inner.releases.add(id) {
            let network = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(SWEEP_DELAY).await;
                network.remove_released().await;
            });
        }
    }

    /// Removes the sandbox's network later, and retries until that succeeds or the network is dropped.
    pub(super) fn retry_later(&self, id: &str) {
        if self.inner.releases.add_failed(id) {
            let network = self.weak();
            tokio::spawn(async move {
                let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
                loop {
                    tokio::time::sleep(backoff.next_delay()).await;
                    let Some(network) = network() else { return };
                    if network.retry_removals().await {
                        return;
                    }
                }
            });
        }
    }

    /// Removes the networks of released sandboxes. Returns whether this or a concurrent sweep removed a network.
    pub(super) async fn remove_released(&self) -> bool {
        let queue = &self.inner.releases;
        let busy = queue.sweeping.try_lock().is_err();
        let _sweeping = queue.sweeping.lock().await;
        let ids = std::mem::take(&mut queue.lock().released);
        for id in &ids {
            if let Err(error) = self.del(id).await {
                warn!(sandbox = id, error = error.chain(), "cannot remove a released network, retrying");
                self.retry_later(id);
            }
        }
        busy || !ids.is_empty()
    }

    /// Retries failed removals. Returns whether all removals have succeeded.
    async fn retry_removals(&self) -> bool {
        let queue = &self.inner.releases;
        let _sweeping = queue.sweeping.lock().await;
        let ids = std::mem::take(&mut queue.lock().failed);
        for id in ids {
            if let Err(error) = self.del(&id).await {
                warn!(sandbox = id, error = error.chain(), "cannot remove a released network, retrying");
                queue.lock().failed.insert(id);
            }
        }
        let mut state = queue.lock();
        state.retrying = !state.failed.is_empty();
        !state.retrying
    }
}

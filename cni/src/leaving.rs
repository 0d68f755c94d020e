//! Sandboxes whose network was released and is still to be taken down.
//!
//! Removing a veth pair keeps the kernel waiting for RCU grace periods, 10 ms and more, each pair anew. It
//! removes a pair with its namespace all the same, for all namespaces that ended meanwhile at once.
//! So a little later one sweep looks after all of them: it finds most pairs gone, removes the others, and
//! frees records and addresses. What cannot be taken down then is tried again, ever more rarely. A crash before that
//! leaves the records, from which `reconcile` does the same.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing::warn;

use crate::network::Network;

/// How long after the first release the sweep comes: the kernel needs some tens of milliseconds.
const PAUSE: Duration = Duration::from_millis(200);
/// How long after a failure it is tried again first, and at most.
const RETRY: Duration = Duration::from_secs(1);
const RARELY: Duration = Duration::from_secs(300);

#[derive(Default)]
pub(crate) struct Leaving {
    state: Mutex<State>,
    /// Held by a sweep, so that who waits for one waits for all that was released before.
    sweeping: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    released: BTreeSet<String>,
    /// Those that were not to be taken down, and whether somebody will try again.
    refused: BTreeSet<String>,
    retrying: bool,
}

// === impl Leaving ===

impl Leaving {
    /// Adds one, and sees to it that a sweep comes.
    pub(crate) fn add(&self, id: &str, network: &Network) {
        let mut state = self.lock();
        let first = state.released.is_empty();
        state.released.insert(id.to_owned());
        if first {
            let network = network.clone();
            tokio::spawn(async move {
                tokio::time::sleep(PAUSE).await;
                network.sweep().await;
            });
        }
    }

    /// Adds one that could not be taken down, and sees to it that it is tried again for as long as the network is.
    pub(crate) fn refused(&self, id: &str, network: &Network) {
        let mut state = self.lock();
        state.refused.insert(id.to_owned());
        if !std::mem::replace(&mut state.retrying, true) {
            let network = network.weak();
            tokio::spawn(async move {
                let mut pause = RETRY;
                loop {
                    tokio::time::sleep(pause).await;
                    pause = RARELY.min(2 * pause);
                    let Some(network) = network() else { return };
                    if network.retry().await {
                        return;
                    }
                }
            });
        }
    }

    /// One that is made anew is not taken down for what it was.
    pub(crate) fn forget(&self, id: &str) {
        let mut state = self.lock();
        state.released.remove(id);
        state.refused.remove(id);
    }

    /// Takes down what was released. True when there was anything, or another sweep had it.
    pub(crate) async fn sweep(&self, network: &Network) -> bool {
        let busy = self.sweeping.try_lock().is_err();
        let _alone = self.sweeping.lock().await;
        let ids = std::mem::take(&mut self.lock().released);
        for id in &ids {
            if let Err(error) = network.del(id).await {
                warn!(
                    sandbox = id,
                    error = error.chain(),
                    "a released network is still there; it is tried again"
                );
                self.refused(id, network);
            }
        }
        busy || !ids.is_empty()
    }

    /// Tries again what was refused. True when nothing is left of it.
    pub(crate) async fn retry(&self, network: &Network) -> bool {
        let _alone = self.sweeping.lock().await;
        let ids = std::mem::take(&mut self.lock().refused);
        for id in ids {
            if let Err(error) = network.del(&id).await {
                warn!(sandbox = id, error = error.chain(), "a released network is still there");
                self.lock().refused.insert(id);
            }
        }
        let mut state = self.lock();
        state.retrying = !state.refused.is_empty();
        !state.retrying
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

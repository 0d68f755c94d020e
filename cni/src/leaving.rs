//! Sandboxes whose network was released and is still to be taken down.
//!
//! Removing a veth pair keeps the kernel waiting for RCU grace periods, 10 ms and more, each pair anew. It
//! removes a pair with its namespace all the same, for all namespaces that ended meanwhile at once.
//! So a little later one sweep looks after all of them: it finds most pairs gone, removes the others, and
//! frees records and addresses. A crash before it leaves the records, from which `reconcile` does the same.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing::warn;

use crate::network::Network;

/// How long after the first release the sweep comes: the kernel needs some tens of milliseconds.
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Default)]
pub(crate) struct Leaving {
    ids: Mutex<BTreeSet<String>>,
    /// Held by a sweep, so that who waits for one waits for all that was released before.
    sweeping: tokio::sync::Mutex<()>,
}

// === impl Leaving ===

impl Leaving {
    /// Adds one, and sees to it that a sweep comes.
    pub(crate) fn add(&self, id: &str, network: &Network) {
        let mut ids = self.lock();
        let first = ids.is_empty();
        ids.insert(id.to_owned());
        if first {
            let network = network.clone();
            tokio::spawn(async move {
                tokio::time::sleep(PAUSE).await;
                network.sweep().await;
            });
        }
    }

    /// Takes down what was released. True when there was anything, or another sweep had it.
    pub(crate) async fn sweep(&self, network: &Network) -> bool {
        let busy = self.sweeping.try_lock().is_err();
        let _alone = self.sweeping.lock().await;
        let ids = std::mem::take(&mut *self.lock());
        for id in &ids {
            if let Err(error) = network.del(id).await {
                warn!(sandbox = id, %error, "a released network stays until the next start");
            }
        }
        busy || !ids.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

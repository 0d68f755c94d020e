//! The last samples of the usage of each node.

mod sample;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use sample::fuzz;
pub(crate) use sample::{Rate, Sample};

/// Samples older than this are not used as the first sample of a pair: the rate would hide recent changes.
pub(crate) const MAX_WINDOW: Duration = Duration::from_secs(60);
/// Time without requests to a node after a failed request, so that a hostile node does not delay every request.
pub(crate) const FAILURE_BACKOFF: Duration = Duration::from_secs(30);

/// Two samples of one node.
pub(crate) type Pair = (Arc<Sample>, Arc<Sample>);

/// The result of the last request to a node.
pub(crate) enum LastResult {
    Pair(Pair),
    /// Time of the failure.
    Failure(Instant),
}

/// The samples of one node.
pub(crate) type NodeSamples = Arc<tokio::sync::Mutex<Option<LastResult>>>;

/// The last samples of each node. A request holds the lock of a node while it takes samples, so that concurrent
/// requests share the samples. The lock is held for `usage::TIMEOUT` at most.
#[derive(Default)]
pub(crate) struct Samples(Mutex<HashMap<String, NodeSamples>>);

// === impl Samples ===

impl Samples {
    /// The entry of a node, created if absent.
    pub(crate) fn of(&self, node: &str) -> NodeSamples {
        self.lock().entry(node.to_owned()).or_default().clone()
    }

    /// Removes samples that are too old to be used. An entry that a request holds or waits for stays.
    pub(crate) fn prune(&self) {
        let is_usable = |last_result: &Option<LastResult>| match last_result {
            Some(LastResult::Pair((_, later))) => later.taken.elapsed() <= MAX_WINDOW,
            Some(LastResult::Failure(time)) => time.elapsed() < FAILURE_BACKOFF,
            None => false,
        };
        self.lock().retain(|_, entry| {
            Arc::strong_count(entry) > 1 || entry.try_lock().is_ok_and(|last_result| is_usable(&last_result))
        });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, NodeSamples>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

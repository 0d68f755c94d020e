//! The last samples of the usage of each node.

mod sample;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

pub(crate) use sample::{Rate, Sample};

/// Samples older than this are not used as the first one of a pair: the rate would hide recent changes.
pub(crate) const MAX_WINDOW: Duration = Duration::from_secs(60);
/// Time during which a node gets no request after a failed one, so that a hostile node does not delay every request.
pub(crate) const FAILURE_BACKOFF: Duration = Duration::from_secs(30);

/// Two samples of one node.
pub(crate) type Pair = (Arc<Sample>, Arc<Sample>);

/// The result of the last request to a node.
pub(crate) enum LastResult {
    Pair(Pair),
    /// When the node failed.
    Failure(Instant),
}

/// The samples of one node.
pub(crate) type NodeSamples = Arc<tokio::sync::Mutex<Option<LastResult>>>;

/// The last samples of each node. The lock of a node is held while it is asked, so that concurrent requests share a
/// sample. It is held for `usage::TIMEOUT` at most.
#[derive(Default)]
pub(crate) struct Samples(Mutex<HashMap<String, NodeSamples>>);

// === impl Samples ===

impl Samples {
    /// The place of a node's samples.
    pub(crate) fn of(&self, node: &str) -> NodeSamples {
        self.lock().entry(node.to_owned()).or_default().clone()
    }

    /// Removes samples that are too old to be used. A place that a request holds or waits for stays.
    pub(crate) fn prune(&self) {
        let is_usable = |last_result: &Option<LastResult>| match last_result {
            Some(LastResult::Pair((_, later))) => later.taken.elapsed() <= MAX_WINDOW,
            Some(LastResult::Failure(time)) => time.elapsed() < FAILURE_BACKOFF,
            None => false,
        };
        self.lock().retain(|_, place| {
            Arc::strong_count(place) > 1 || place.try_lock().is_ok_and(|last_result| is_usable(&last_result))
        });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, NodeSamples>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Evictions of the worker's pod. They are stored, so that a restarted agent does not run the pod again before the API
//! server has its final status.

use super::Worker;
use crate::event_recorder::Level;
use crate::pod::NodeContext;
use crate::pod::state::{DesiredPod, EVICTED, Verdict, WorkerState};
use crate::source::checkpoint::StoredEviction;

impl Worker {
    /// Takes the eviction of the pod as its verdict, if one was requested.
    pub(super) fn take_eviction(&mut self, desired: &DesiredPod) {
        let Some(evicted) = self.node.evictions.take(&self.uid) else { return };
        if self.state.verdict.is_some() {
            return;
        }
        let stored = StoredEviction { message: evicted.message, by_pressure: evicted.by_pressure };
        self.node.checkpoint.keep_evicted(desired.pod(), self.state.start_time, stored.clone());
        // Counted here: the eviction may be requested again until the pod has ended.
        self.node.metrics.evicted(evicted.signal);
        self.node.recorder.pod(desired.pod(), Level::Warning, EVICTED, stored.message.clone());
        self.state.eviction_grace = evicted.grace;
        apply(&mut self.state, stored);
    }
}

/// Restores the verdict of a pod that an earlier agent has evicted. It then ends within one second.
pub(super) fn restore(state: &mut WorkerState, node: &NodeContext, uid: &str) {
    if let Some(stored) = node.checkpoint.eviction(uid) {
        apply(state, stored);
    }
}

fn apply(state: &mut WorkerState, stored: StoredEviction) {
    state.disrupted = stored.by_pressure;
    state.verdict = Some(Verdict { reason: EVICTED.to_owned(), message: stored.message });
}

//! Evictions of the worker's pod. Evictions are stored, so that a restarted agent does not run the pod again before the
//! API server has its final status.

use super::Worker;
use crate::event_recorder::Level;
use crate::pod::NodeContext;
use crate::pod::state::{DesiredPod, Verdict, WorkerState};
use crate::source::checkpoint::StoredEviction;

impl Worker {
    /// Takes the eviction of the pod as its verdict, if one was requested. A pod that ends for another reason keeps its
    /// verdict, but its grace period becomes shorter: users choose grace periods, and must not prevent evictions. A pod
    /// that has ended is not evicted.
    pub(super) async fn take_eviction(&mut self, desired: &DesiredPod) {
        let Some(evicted) = self.node.evictions.take(&self.uid) else { return };
        shorten(&mut self.state, evicted.grace);
        if self.state.released {
            self.node.evictions.preempted().release(&self.uid);
        }
        if self.state.verdict.is_some() || self.state.released {
            return;
        }
        let cause = evicted.cause;
        let (reason, disrupted) = (cause.reason(), cause.is_disruption());
        let stored = StoredEviction { reason, message: evicted.message, disrupted };
        // Record the eviction before the pod is stopped.
        self.node.checkpoint.keep_evicted(desired.pod(), self.state.start_time, stored.clone()).await;
        // Count the eviction here, and not at its request: an eviction may be requested several times until the pod has
        // ended.
        if let Some(signal) = cause.signal() {
            self.node.metrics.endings.evicted(signal);
            self.node.recorder.pod(desired.pod(), Level::Warning, reason, stored.message.clone());
        }
        apply(&mut self.state, stored);
        // The back-off of an earlier failure must not delay the end of the pod. Otherwise the node would evict another
        // pod too.
        self.not_before = None;
    }
}

/// The grace period in seconds if the pod must end: the shorter one of its deletion and its eviction. A job with a
/// longer grace period, or without one, is interrupted.
pub(super) fn ending(desired: &DesiredPod, state: &WorkerState) -> Option<i64> {
    desired.ending().into_iter().chain(state.evicted_grace()).min()
}

/// Restores the verdict of a pod that an earlier agent has evicted. The pod then ends within one second.
pub(super) fn restore(state: &mut WorkerState, node: &NodeContext, uid: &str) {
    if let Some(stored) = node.checkpoint.eviction(uid) {
        shorten(state, 1);
        apply(state, stored);
    }
}

/// Notes the grace period of an eviction. The shortest one applies.
fn shorten(state: &mut WorkerState, grace: u32) {
    state.eviction_grace = Some(state.eviction_grace.map_or(grace, |earlier| earlier.min(grace)));
}

fn apply(state: &mut WorkerState, stored: StoredEviction) {
    state.disrupted = stored.disrupted;
    state.verdict = Some(Verdict { reason: stored.reason.to_owned(), message: stored.message });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::pod::state::{EVICTED, PREEMPTING, TERMINATED};

    #[test]
    fn a_job_has_the_shorter_grace_period_of_a_deletion_and_an_eviction() {
        let pod = |metadata: serde_json::Value| {
            DesiredPod::Run(Arc::new(serde_json::from_value(json!({"metadata": metadata})).unwrap()))
        };
        let running = pod(json!({}));
        let deleted =
            pod(json!({"deletionTimestamp": "2026-01-02T03:04:05Z", "deletionGracePeriodSeconds": 20}));
        let mut state = WorkerState::default();
        assert_eq!([ending(&running, &state), ending(&deleted, &state)], [None, Some(20)]);
        shorten(&mut state, 5);
        for reason in [EVICTED, TERMINATED, PREEMPTING] {
            apply(&mut state, StoredEviction { reason, message: "low".to_owned(), disrupted: true });
            assert_eq!([ending(&running, &state), ending(&deleted, &state)], [Some(5), Some(5)]);
        }
        state.eviction_grace = Some(30);
        assert_eq!(ending(&deleted, &state), Some(20));
    }

    #[test]
    fn a_later_eviction_shortens_the_grace_period_of_an_ending_pod() {
        let running = DesiredPod::Run(Arc::new(serde_json::from_value(json!({"metadata": {}})).unwrap()));
        for reason in [PREEMPTING, "DeadlineExceeded"] {
            let verdict = Verdict { reason: reason.to_owned(), message: "m".to_owned() };
            let mut state = WorkerState { verdict: Some(verdict), ..WorkerState::default() };
            shorten(&mut state, 600);
            assert_eq!(ending(&running, &state), Some(600));
            shorten(&mut state, 1);
            shorten(&mut state, 30);
            assert_eq!(ending(&running, &state), Some(1), "{reason}");
        }
    }
}

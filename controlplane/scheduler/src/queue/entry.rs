//! A pod in the scheduling queue.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::hint::Changes;
use crate::metrics::RefusedPod;
use crate::object::Pod;
use crate::turn_queue::QueueOrder;

/// The state of a pod in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueState {
    Ready(QueueOrder),
    /// The pod waits until this time. If it has an order, it is tried earlier while no pod is ready.
    HeldBack(Instant, Option<QueueOrder>),
    Unschedulable,
    /// The pod waits for its group, or for its device claims to exist.
    Gated,
    /// The pod was popped and is neither refused nor bound yet.
    InFlight,
}

pub(super) struct Entry {
    /// The pod. The attempt and the binding share it.
    pub(super) pod: Arc<Pod>,
    pub(super) state: QueueState,
    pub(super) serial_number: u64,
    /// Sequence number of the pod's addition or last refusal. Serial numbers come from the same sequence.
    pub(super) position: u64,
    pub(super) refusals: u32,
    /// Whether the pod always waits for the end of its back-off: the last attempt ended with an error, or an attempt
    /// calls extenders. Calls of extenders are made for one pod at a time, so early calls would delay other pods.
    pub(super) waits_for_backoff: bool,
    /// Number of requests in flight that evict pods for this pod. Until they end, the pod is not tried again.
    pub(super) evictions: u32,
    /// End of the back-off.
    pub(super) backoff_until: Option<Instant>,
    /// Start of the current attempt. `None` after its result was counted.
    pub(super) started: Option<Instant>,
    /// Start of the first attempt.
    pub(super) first_started: Option<Instant>,
    /// Number of attempts so far.
    pub(super) attempts: u32,
    /// Number of changes when the pod was popped, or when it last caused one.
    pub(super) popped_at: u64,
    /// Changes to add to the changes since `popped_at`: changes of the pod, its volumes and its devices while the pod
    /// was in flight, all changes before a change that the pod caused, and all changes during evictions.
    pub(super) changes_in_flight: Changes,
    /// The changes that may help a refused pod.
    pub(super) helped_by: Changes,
    /// The time at which a refused pod is tried again without a change.
    pub(super) retry_at: Option<Instant>,
    /// The pod in the metric of unschedulable pods, until the next attempt.
    pub(super) refused_by: Option<RefusedPod>,
}

// === impl Entry ===

impl Entry {
    pub(super) fn new(pod: Arc<Pod>, serial_number: u64) -> Self {
        Self {
            pod,
            state: QueueState::InFlight,
            serial_number,
            position: serial_number,
            refusals: 0,
            waits_for_backoff: false,
            evictions: 0,
            backoff_until: None,
            started: None,
            first_started: None,
            attempts: 0,
            popped_at: 0,
            changes_in_flight: Changes::default(),
            helped_by: Changes::ALL,
            retry_at: None,
            refused_by: None,
        }
    }

    /// The order of the pods of a gang.
    pub(super) fn order(&self) -> QueueOrder {
        QueueOrder(self.priority(), self.serial_number)
    }

    /// The order of ready pods.
    pub(super) fn ready_order(&self) -> QueueOrder {
        QueueOrder(self.priority(), self.position)
    }

    /// The order in which the pod is tried before the end of its back-off. `None` if it is not tried early.
    pub(super) fn early_order(&self) -> Option<QueueOrder> {
        (!self.waits_for_backoff).then(|| self.ready_order())
    }

    /// The changes that may help a pod in flight. `last_change` has the number of the last change of each type.
    pub(super) fn changes_since_pop(&self, last_change: &[u64]) -> Changes {
        let newer = Changes::TYPES.into_iter().zip(last_change).filter(|(_, at)| **at > self.popped_at);
        newer.fold(self.changes_in_flight, |all, (one, _)| all | one)
    }

    /// Ignores the change with this number, which follows those of `last_change`: a change that a pod in flight causes
    /// does not help the pod. The earlier changes may still help it.
    pub(super) fn ignore_change(&mut self, number: u64, last_change: &[u64]) {
        if self.state == QueueState::InFlight {
            self.changes_in_flight = self.changes_since_pop(last_change);
            self.popped_at = number;
        }
    }

    fn priority(&self) -> Reverse<i32> {
        Reverse(self.pod.spec.priority.unwrap_or_default())
    }

    /// Cancels an attempt in which the pod was not tried. Such an attempt is not counted.
    pub(super) fn cancel_attempt(&mut self) {
        self.started = None;
        self.attempts = self.attempts.saturating_sub(1);
        if self.attempts == 0 {
            self.first_started = None;
        }
    }
}

/// The back-off after this number of refusals.
pub(super) fn backoff(first: Duration, longest: Duration, refusals: u32) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(refusals.saturating_sub(1))).min(longest)
}

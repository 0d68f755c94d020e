//! Metrics of resizes of pods. The numbers of pending and running resizes are read for each response.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec};

use super::Registered;

/// Bounds in milliseconds of the application of a resize.
const DURATIONS: [f64; 14] = [
    10.0, 50.0, 100.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 30_000.0, 60_000.0, 120_000.0,
    300_000.0, 600_000.0,
];

/// The reason why a deferred resize is evaluated again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryTrigger {
    /// A pod requests a resize.
    PodResized,
    /// A pod has ended.
    PodsRemoved,
    /// The API server has listed all pods.
    PodsAdded,
}

/// The reason why a resize is infeasible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InfeasibleReason {
    /// The resize is larger than the node.
    NodeAllocatable,
    /// The pod may have exclusive CPUs.
    CpuManager,
    /// The pod may have memory of certain NUMA nodes.
    MemoryManager,
}

/// Metrics of resizes.
pub(crate) struct ResizeMetrics {
    requested: IntCounterVec,
    infeasible: IntCounterVec,
    accepted: IntCounterVec,
    durations: HistogramVec,
}

/// A change of a resource of a container. An amount of 0 means that the resource is not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestedChange {
    /// `cpu` or `memory`.
    pub(crate) resource: &'static str,
    /// `requests` or `limits`.
    pub(crate) requirement: &'static str,
    pub(crate) old: i64,
    pub(crate) new: i64,
}

// === impl ResizeMetrics ===

impl ResizeMetrics {
    pub(super) fn new(all: &Registered<'_>) -> Self {
        Self {
            requested: all.counters(
                "container_requested_resizes_total",
                "Number of requested resizes, counted at the container level. Different resources on the same container \
                 are counted separately.",
                &["resource", "requirement", "operation"],
            ),
            infeasible: all.counters(
                "pod_infeasible_resizes_total",
                "Number of infeasible resizes for pods.",
                &["reason_detail"],
            ),
            accepted: all.counters(
                "pod_deferred_accepted_resizes_total",
                "Cumulative number of resizes that were accepted after being deferred.",
                &["retry_trigger"],
            ),
            durations: all.with_buckets(&DURATIONS).histograms(
                "pod_resize_duration_milliseconds",
                "Duration in milliseconds to actuate a pod resize",
                &["success"],
            ),
        }
    }

    /// Counts a requested change.
    pub(crate) fn requested(&self, change: RequestedChange) {
        let operation = match (change.old, change.new) {
            (old, new) if old == new => return,
            (0, _) => "add",
            (_, 0) => "remove",
            (old, new) if new > old => "increase",
            _ => "decrease",
        };
        self.requested.with_label_values(&[change.resource, change.requirement, operation]).inc();
    }

    /// Counts a resize that this node never accepts.
    pub(crate) fn infeasible(&self, reason: InfeasibleReason) {
        let reason = match reason {
            InfeasibleReason::NodeAllocatable => "insufficient_node_allocatable",
            InfeasibleReason::CpuManager => "guaranteed_pod_cpu_manager_static_policy",
            InfeasibleReason::MemoryManager => "guaranteed_pod_memory_manager_static_policy",
        };
        self.infeasible.with_label_values(&[reason]).inc();
    }

    /// Counts a resize that was accepted after it was deferred.
    pub(crate) fn accepted_later(&self, trigger: RetryTrigger) {
        let trigger = match trigger {
            RetryTrigger::PodResized => "pod_resized",
            RetryTrigger::PodsRemoved => "pods_removed",
            RetryTrigger::PodsAdded => "pods_added",
        };
        self.accepted.with_label_values(&[trigger]).inc();
    }

    /// Counts an attempt to give a running pod its new resources.
    pub(crate) fn applied(&self, succeeded: bool, took: Duration) {
        let label = if succeeded { "true" } else { "false" };
        self.durations.with_label_values(&[label]).observe(took.as_secs_f64() * 1000.0);
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    #[test]
    fn changes_are_counted_by_their_operation() {
        let registry = Registry::new();
        let metrics = ResizeMetrics::new(&Registered(&registry));
        for (old, new) in [(0, 5), (5, 0), (5, 6), (6, 5), (5, 5), (0, 0)] {
            metrics.requested(RequestedChange { resource: "cpu", requirement: "limits", old, new });
        }
        let count =
            |operation: &str| metrics.requested.with_label_values(&["cpu", "limits", operation]).get();
        assert_eq!(["add", "remove", "increase", "decrease"].map(count), [1, 1, 1, 1]);
    }
}

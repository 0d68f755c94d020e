//! Periods in which pods end when the machine shuts down, by the priority of the pods. Pure.
//!
//! Source: `groupByPriority` and `migrateConfig` of upstream's `pkg/kubelet/nodeshutdown`.

use std::time::Duration;

/// Priority of the class `system-cluster-critical`.
const CRITICAL_PRIORITY: i32 = 2_000_000_000;
/// Additional time for each group: a container that is killed at the end of its grace period needs some time to end.
const GROUP_MARGIN: Duration = Duration::from_secs(2);
/// Maximum time for the final statuses of the pods and of the node.
pub(crate) const REPORT_LIMIT: Duration = Duration::from_secs(5);

/// The period of a group of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownPeriod {
    /// Lowest priority of the group.
    pub priority: i32,
    /// Maximum grace period of the pods, in seconds.
    pub seconds: u32,
}

/// The periods of all groups, the lowest priority first. If it is empty, pods are not ended when the machine shuts
/// down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShutdownPeriods(Vec<ShutdownPeriod>);

// === impl ShutdownPeriod ===

impl ShutdownPeriod {
    /// Maximum time to wait for the end of the group's pods.
    pub(crate) fn limit(self) -> Duration {
        Duration::from_secs(self.seconds.into()) + GROUP_MARGIN
    }
}

// === impl ShutdownPeriods ===

impl ShutdownPeriods {
    /// The periods of these groups.
    #[must_use]
    pub fn by_priority(mut periods: Vec<ShutdownPeriod>) -> Self {
        periods.sort_by_key(|period| period.priority);
        Self(periods)
    }

    /// The periods of critical pods, and of other pods. Both together take `total` seconds. No periods if it is 0.
    #[must_use]
    pub fn of_total(total: u32, critical: u32) -> Self {
        if total == 0 {
            return Self::default();
        }
        let others = ShutdownPeriod { priority: 0, seconds: total.saturating_sub(critical) };
        Self(vec![others, ShutdownPeriod { priority: CRITICAL_PRIORITY, seconds: critical }])
    }

    /// Whether pods are not ended when the machine shuts down.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Maximum duration of the node's shutdown.
    #[must_use]
    pub fn limit(&self) -> Duration {
        self.0.iter().map(|period| period.limit()).sum::<Duration>() + REPORT_LIMIT
    }

    /// All groups in the order in which their pods end.
    pub(crate) fn all(&self) -> &[ShutdownPeriod] {
        &self.0
    }

    /// Index of the group of a pod with this priority. Pods below the lowest priority are in the first group.
    pub(crate) fn group_of(&self, priority: i32) -> usize {
        self.0.partition_point(|period| period.priority <= priority).saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn critical_pods_end_last_and_take_their_part_of_the_total() {
        let periods = ShutdownPeriods::of_total(30, 10);
        let seconds: Vec<_> = periods.all().iter().map(|period| period.seconds).collect();
        assert_eq!(seconds, [20, 10]);
        let groups =
            [-5, 0, 1_999_999_999, 2_000_000_000, 2_000_001_000].map(|priority| periods.group_of(priority));
        assert_eq!(groups, [0, 0, 0, 1, 1]);
        assert!(ShutdownPeriods::of_total(0, 0).is_empty() && !periods.is_empty());
    }

    #[test]
    fn a_pod_belongs_to_the_group_with_the_next_lower_priority() {
        let period = |priority, seconds| ShutdownPeriod { priority, seconds };
        let periods = ShutdownPeriods::by_priority(vec![period(1000, 5), period(10, 60), period(100, 20)]);
        assert_eq!(periods.all(), [period(10, 60), period(100, 20), period(1000, 5)]);
        let groups = [0, 10, 99, 100, 999, 1000, i32::MAX].map(|priority| periods.group_of(priority));
        assert_eq!(groups, [0, 0, 0, 1, 1, 2, 2]);
    }

    #[test]
    fn the_limit_contains_all_groups_and_the_reports() {
        let periods = ShutdownPeriods::of_total(30, 10);
        assert_eq!(periods.limit(), Duration::from_secs(30 + 2 * 2 + 5));
    }
}

//! Hard and soft thresholds: below a soft one, pods are evicted only after its grace period. Pure.

use std::time::{Duration, Instant};

/// The thresholds that were crossed in the last round, for one kind of resources: the machine's resources, or its disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crossed<R> {
    /// The resource below its hard threshold.
    hard: Option<R>,
    /// The resource below its soft threshold for the grace period.
    soft: Option<R>,
    /// The resource below its soft threshold, and since when.
    since: Option<(R, Instant)>,
}

/// The kind of the threshold that leads to an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThresholdKind {
    Hard,
    Soft,
}

/// A shortage for which a pod is to be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due<S> {
    pub(super) shortage: S,
    /// Maximum grace period of the pod, in seconds.
    pub(super) max_grace: u32,
}

// === impl Crossed ===

impl<R: Copy + PartialEq> Crossed<R> {
    /// No threshold is crossed.
    pub(super) fn none() -> Self {
        Self { hard: None, soft: None, since: None }
    }

    /// The resource below its hard threshold.
    pub(super) fn hard(&self) -> Option<R> {
        self.hard
    }

    /// The resource below its soft threshold for the grace period.
    pub(super) fn soft(&self) -> Option<R> {
        self.soft
    }

    /// Stores the resources that are short now, the second one with its grace period. Returns the threshold that leads to
    /// an eviction.
    pub(super) fn update(
        &mut self,
        hard: Option<R>,
        soft: Option<(R, Duration)>,
        now: Instant,
    ) -> Option<ThresholdKind> {
        self.since = soft.map(|(resource, _)| {
            let same = self.since.filter(|(known, _)| *known == resource);
            same.unwrap_or((resource, now))
        });
        let lasted = self.since.map(|(_, since)| now.saturating_duration_since(since));
        let is_over = |grace: Duration| lasted.is_some_and(|lasted| lasted >= grace);
        self.soft = soft.filter(|(_, grace)| is_over(*grace)).map(|(resource, _)| resource);
        self.hard = hard;
        match (self.hard.is_some(), self.soft.is_some()) {
            (true, _) => Some(ThresholdKind::Hard),
            (false, true) => Some(ThresholdKind::Soft),
            (false, false) => None,
        }
    }
}

// === impl Due ===

impl<S> Due<S> {
    /// The shortage of the threshold of this kind. Pods have no grace period below a hard threshold, and at most
    /// `max_grace` seconds below a soft one.
    pub(super) fn of(
        kind: Option<ThresholdKind>,
        [hard, soft]: [Option<S>; 2],
        max_grace: u32,
    ) -> Option<Self> {
        match kind? {
            ThresholdKind::Hard => hard.map(|shortage| Self { shortage, max_grace: 0 }),
            ThresholdKind::Soft => soft.map(|shortage| Self { shortage, max_grace }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_soft_threshold_leads_to_an_eviction_after_its_grace_period() {
        let (mut crossed, begin) = (Crossed::none(), Instant::now());
        assert_eq!(crossed.update(None, Some(("memory", MINUTE)), begin), None);
        assert_eq!(crossed.update(None, Some(("memory", MINUTE)), begin + MINUTE / 2), None);
        let later = begin + MINUTE;
        assert_eq!(crossed.update(None, Some(("memory", MINUTE)), later), Some(ThresholdKind::Soft));
        assert_eq!((crossed.hard(), crossed.soft()), (None, Some("memory")));
        assert_eq!(crossed.update(None, None, later), None);
        assert_eq!(crossed.update(None, Some(("memory", MINUTE)), later), None, "it begins again");
    }

    #[test]
    fn another_resource_begins_its_own_grace_period() {
        let (mut crossed, begin) = (Crossed::none(), Instant::now());
        crossed.update(None, Some(("memory", MINUTE)), begin);
        assert_eq!(crossed.update(None, Some(("pids", MINUTE)), begin + MINUTE), None);
    }

    #[test]
    fn a_hard_threshold_leads_to_an_eviction_at_once() {
        let (mut crossed, now) = (Crossed::none(), Instant::now());
        let kind = crossed.update(Some("memory"), Some(("memory", Duration::ZERO)), now);
        assert_eq!(kind, Some(ThresholdKind::Hard));
        assert_eq!(Due::of(kind, [Some(1), Some(2)], 30), Some(Due { shortage: 1, max_grace: 0 }));
        let soft = Some(ThresholdKind::Soft);
        assert_eq!(Due::of(soft, [None, Some(2)], 30), Some(Due { shortage: 2, max_grace: 30 }));
        assert_eq!(Due::of(None, [Some(1), Some(2)], 30), None);
    }
}

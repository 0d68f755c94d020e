//! Hard and soft thresholds: below a soft threshold, pods are evicted only after its grace period. Pure.

use std::time::{Duration, Instant};

/// The thresholds that were crossed in the last round, for one kind of resources: the machine's resources, or its disk.
#[derive(Debug)]
pub(super) struct Crossed<R> {
    /// The resources below their hard thresholds, the most important first.
    hard: Vec<R>,
    /// The resources below their soft thresholds, and since when.
    since: Vec<(R, Instant)>,
    /// The resources that have been below their soft thresholds for the grace period.
    lasting: Vec<R>,
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
        Self { hard: Vec::new(), since: Vec::new(), lasting: Vec::new() }
    }

    /// The most important resource below its hard threshold.
    pub(super) fn hard(&self) -> Option<R> {
        self.hard.first().copied()
    }

    /// Whether the resource was below its hard threshold.
    pub(super) fn is_hard(&self, resource: R) -> bool {
        self.hard.contains(&resource)
    }

    /// Whether the resource was below its soft threshold for the grace period.
    pub(super) fn is_lasting(&self, resource: R) -> bool {
        self.lasting.contains(&resource)
    }

    /// Stores the resources that are short now. `hard` has the resources below hard thresholds, the most important
    /// first. `soft` has the resources below soft thresholds with their grace periods. Returns the kind of the
    /// threshold that leads to an eviction.
    pub(super) fn update(
        &mut self,
        hard: impl IntoIterator<Item = R>,
        soft: impl IntoIterator<Item = (R, Duration)>,
        now: Instant,
    ) -> Option<ThresholdKind> {
        let before = std::mem::take(&mut self.since);
        self.lasting.clear();
        for (resource, grace) in soft {
            let known = before.iter().find(|(known, _)| *known == resource);
            let since = known.map_or(now, |(_, since)| *since);
            self.since.push((resource, since));
            if now.saturating_duration_since(since) >= grace {
                self.lasting.push(resource);
            }
        }
        self.hard = hard.into_iter().collect();
        match (self.hard.is_empty(), self.lasting.is_empty()) {
            (false, _) => Some(ThresholdKind::Hard),
            (true, false) => Some(ThresholdKind::Soft),
            (true, true) => None,
        }
    }
}

// === impl Due ===

impl<S> Due<S> {
    /// Selects the shortage by the kind of the threshold. Below a hard threshold pods get the minimum grace period, and
    /// below a soft threshold at most `max_grace` seconds.
    pub(super) fn of(
        kind: Option<ThresholdKind>,
        hard: Option<S>,
        soft: Option<S>,
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
        assert_eq!((crossed.hard(), crossed.is_lasting("memory")), (None, true));
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
    fn a_resource_that_is_short_beside_another_has_its_own_grace_period() {
        let (mut crossed, begin) = (Crossed::none(), Instant::now());
        let both = [("memory", MINUTE * 10), ("pids", MINUTE)];
        assert_eq!(crossed.update(None, both, begin), None);
        assert_eq!(crossed.update(None, both, begin + MINUTE), Some(ThresholdKind::Soft));
        assert_eq!(["memory", "pids"].map(|resource| crossed.is_lasting(resource)), [false, true]);
        crossed.update(None, both, begin + MINUTE * 10);
        assert!(crossed.is_lasting("memory"));
    }

    #[test]
    fn a_hard_threshold_leads_to_an_eviction_at_once() {
        let (mut crossed, now) = (Crossed::none(), Instant::now());
        let kind = crossed.update(Some("memory"), Some(("memory", Duration::ZERO)), now);
        assert_eq!(kind, Some(ThresholdKind::Hard));
        assert_eq!(Due::of(kind, Some(1), Some(2), 30), Some(Due { shortage: 1, max_grace: 0 }));
        let soft = Some(ThresholdKind::Soft);
        assert_eq!(Due::of(soft, None, Some(2), 30), Some(Due { shortage: 2, max_grace: 30 }));
        assert_eq!(Due::of(None, Some(1), Some(2), 30), None);
    }
}

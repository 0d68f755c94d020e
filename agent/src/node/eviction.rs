//! Thresholds of available resources, below which the node is under pressure.

use std::time::Duration;

/// The thresholds of one node, by the kubelet's eviction signals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvictionThresholds {
    /// `memory.available`.
    pub memory_available: Threshold,
    /// `nodefs.available`: the file system of the state directory.
    pub nodefs_available: Threshold,
    /// `nodefs.inodesFree`.
    pub nodefs_inodes_free: Threshold,
    /// `pid.available`.
    pub pid_available: Threshold,
    /// Thresholds below which pods are evicted only after some time.
    pub soft: SoftThresholds,
    /// Amounts that have to be available beyond the thresholds before a shortage ends.
    pub minimum_reclaim: MinimumReclaim,
    /// Time for which a condition of pressure stays after its resource was last short. Without this time, the pods that
    /// replace evicted pods would start at once, and the node would evict them as well.
    pub pressure_transition: Duration,
}

/// Soft thresholds, by the kubelet's eviction signals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftThresholds {
    /// `memory.available`.
    pub memory_available: SoftThreshold,
    /// `nodefs.available`.
    pub nodefs_available: SoftThreshold,
    /// `nodefs.inodesFree`.
    pub nodefs_inodes_free: SoftThreshold,
    /// `pid.available`.
    pub pid_available: SoftThreshold,
    /// Maximum grace period of the evicted pods, in seconds. Pods have at least one second.
    pub max_pod_grace: u32,
}

/// A threshold below which pods are evicted only after some time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftThreshold {
    /// The threshold. Zero means no threshold.
    pub threshold: Threshold,
    /// Time for which less than the threshold must be available before pods are evicted.
    pub grace: Duration,
}

/// Amounts by the kubelet's eviction signals. Zero: a shortage ends at its threshold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MinimumReclaim {
    /// `memory.available`.
    pub memory_available: Threshold,
    /// `nodefs.available`.
    pub nodefs_available: Threshold,
    /// `nodefs.inodesFree`.
    pub nodefs_inodes_free: Threshold,
    /// `pid.available`.
    pub pid_available: Threshold,
}

/// An amount that has to be available.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Threshold {
    /// Bytes, inodes or processes.
    Amount(u64),
    /// Hundredths of a percent of the capacity.
    BasisPoints(u16),
}

/// Default of [`EvictionThresholds::pressure_transition`], as in the kubelet.
const TRANSITION: Duration = Duration::from_secs(5 * 60);

/// The amount of a resource that must be available.
#[derive(Clone, Copy, Debug)]
pub(super) struct Required {
    pub(super) threshold: Threshold,
    /// The amount that must be available in addition while a shortage lasts.
    pub(super) reclaim: Threshold,
}

/// A shortage of a resource of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortage<R> {
    pub(crate) resource: R,
    /// The minimum that must be available.
    pub(crate) threshold: u64,
    pub(crate) available: u64,
}

// === impl EvictionThresholds ===

impl EvictionThresholds {
    /// The node is never under pressure.
    pub const NONE: Self = Self {
        memory_available: Threshold::Amount(0),
        nodefs_available: Threshold::Amount(0),
        nodefs_inodes_free: Threshold::Amount(0),
        pid_available: Threshold::Amount(0),
        soft: SoftThresholds::NONE,
        minimum_reclaim: MinimumReclaim::NONE,
        pressure_transition: TRANSITION,
    };

    /// The same settings with the soft thresholds instead of the hard thresholds.
    pub(crate) fn as_soft(&self) -> Self {
        Self {
            memory_available: self.soft.memory_available.threshold,
            nodefs_available: self.soft.nodefs_available.threshold,
            nodefs_inodes_free: self.soft.nodefs_inodes_free.threshold,
            pid_available: self.soft.pid_available.threshold,
            ..*self
        }
    }
}

// === impl SoftThresholds ===

impl SoftThresholds {
    /// No signal has a soft threshold.
    pub const NONE: Self = Self {
        memory_available: SoftThreshold::NONE,
        nodefs_available: SoftThreshold::NONE,
        nodefs_inodes_free: SoftThreshold::NONE,
        pid_available: SoftThreshold::NONE,
        max_pod_grace: 0,
    };
}

// === impl SoftThreshold ===

impl SoftThreshold {
    /// No threshold.
    pub const NONE: Self = Self { threshold: Threshold::Amount(0), grace: Duration::ZERO };
}

// === impl MinimumReclaim ===

impl MinimumReclaim {
    /// All shortages end at their thresholds.
    pub const NONE: Self = Self {
        memory_available: Threshold::Amount(0),
        nodefs_available: Threshold::Amount(0),
        nodefs_inodes_free: Threshold::Amount(0),
        pid_available: Threshold::Amount(0),
    };
}

impl Default for EvictionThresholds {
    /// The kubelet's defaults of these signals, and 5 % of the process IDs, for which the kubelet has no default.
    fn default() -> Self {
        Self {
            memory_available: Threshold::Amount(100 << 20),
            nodefs_available: Threshold::percent(10),
            nodefs_inodes_free: Threshold::percent(5),
            pid_available: Threshold::percent(5),
            ..Self::NONE
        }
    }
}

// === impl Threshold ===

impl Threshold {
    /// A whole percentage of the capacity.
    #[must_use]
    pub const fn percent(percent: u8) -> Self {
        Self::BasisPoints(percent as u16 * 100)
    }

    /// Parses a quantity (`100Mi`), or a percentage from 0 to 100 with at most two decimals (`12.5%`).
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text.strip_suffix('%') {
            None => u64::try_from(coracle_values::Quantity::parse(text).ok()?.value()).ok().map(Self::Amount),
            Some(percent) => {
                let (whole, decimals) = percent.split_once('.').unwrap_or((percent, "0"));
                let is_number =
                    |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
                if decimals.len() > 2 || !is_number(whole) || !is_number(decimals) {
                    return None;
                }
                let points = whole.parse::<u16>().ok()?.checked_mul(100)?;
                let points = points.checked_add(format!("{decimals:0<2}").parse().ok()?)?;
                (points <= 10_000).then_some(Self::BasisPoints(points))
            }
        }
    }

    /// Whether the resource is never short.
    pub(crate) fn is_zero(self) -> bool {
        matches!(self, Self::Amount(0) | Self::BasisPoints(0))
    }

    /// The threshold as an amount of this capacity, rounded up.
    pub(crate) fn of(self, capacity: u64) -> u64 {
        match self {
            Self::Amount(amount) => amount,
            Self::BasisPoints(points) => {
                let amount = (u128::from(capacity) * u128::from(points)).div_ceil(10_000);
                u64::try_from(amount).unwrap_or(u64::MAX)
            }
        }
    }

    /// Whether less than the threshold is available. A file system without inodes (capacity 0) has no threshold.
    pub(crate) fn exceeds(self, available: u64, capacity: u64) -> bool {
        self.exceeds_with(Self::Amount(0), available, capacity)
    }

    /// Like [`exceeds`](Self::exceeds), while a shortage lasts: `reclaim` has to be available in addition.
    pub(crate) fn exceeds_with(self, reclaim: Self, available: u64, capacity: u64) -> bool {
        let threshold = self.of(capacity);
        capacity > 0 && threshold > 0 && available < threshold.saturating_add(reclaim.of(capacity))
    }
}

// === impl Shortage ===

impl<R> Shortage<R> {
    /// The shortage of a resource with this capacity. None if the required amount is available.
    pub(super) fn find(resource: R, required: Required, available: u64, capacity: u64) -> Option<Self> {
        let Required { threshold, reclaim } = required;
        let is_short = threshold.exceeds_with(reclaim, available, capacity);
        is_short.then(|| Self { resource, threshold: threshold.of(capacity), available })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_quantities_or_percentages() {
        assert_eq!(Threshold::parse("100Mi"), Some(Threshold::Amount(100 << 20)));
        assert_eq!(Threshold::parse("10%"), Some(Threshold::percent(10)));
        assert_eq!(Threshold::parse("12.5%"), Some(Threshold::BasisPoints(1250)));
        assert_eq!(Threshold::parse("0.05%"), Some(Threshold::BasisPoints(5)));
        for wrong in ["", "%", "-1%", "100.01%", "101%", "1.234%", "700%", "much", "-1Mi", "1.%"] {
            assert_eq!(Threshold::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_node_below_a_threshold_is_under_pressure() {
        assert!(Threshold::percent(10).exceeds(99, 1000) && !Threshold::percent(10).exceeds(100, 1000));
        assert!(Threshold::Amount(100).exceeds(99, 1000) && !Threshold::Amount(100).exceeds(100, 1000));
        assert!(!Threshold::Amount(0).exceeds(0, 1000) && !Threshold::percent(5).exceeds(0, 0));
    }

    #[test]
    fn a_shortage_lasts_until_the_minimum_is_reclaimed() {
        let (threshold, reclaim) = (Threshold::Amount(100), Threshold::percent(5));
        assert!(threshold.exceeds_with(reclaim, 149, 1000) && !threshold.exceeds_with(reclaim, 150, 1000));
        assert!(!Threshold::Amount(0).exceeds_with(reclaim, 0, 1000), "a signal without a threshold");
    }
}

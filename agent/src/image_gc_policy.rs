//! Settings of image garbage collection: the kubelet's settings of the same names.

use std::time::Duration;

/// Thresholds and ages of image garbage collection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageGcPolicy {
    /// Disk usage in percent at which unused images are removed; 100 disables the removal.
    pub high_threshold: u8,
    /// Disk usage in percent down to which unused images are removed.
    pub low_threshold: u8,
    /// Minimum age of an image since its pull before it is removed.
    pub minimum_age: Duration,
    /// Unused time after which an image is removed even with free space; zero disables the removal.
    pub maximum_age: Duration,
}

// === impl ImageGcPolicy ===

impl Default for ImageGcPolicy {
    fn default() -> Self {
        Self {
            high_threshold: 85,
            low_threshold: 80,
            minimum_age: Duration::from_secs(120),
            maximum_age: Duration::ZERO,
        }
    }
}

impl ImageGcPolicy {
    /// Whether no image is ever removed.
    pub(crate) fn is_off(&self) -> bool {
        self.high_threshold >= 100 && self.maximum_age.is_zero()
    }
}

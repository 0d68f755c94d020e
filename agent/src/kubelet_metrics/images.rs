//! Metrics of images: pulls, removals and image volumes.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounter, IntCounterVec};

use super::{KubeletMetrics, Registered};

/// Bounds in seconds of an image pull.
const PULLS: [f64; 18] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0,
    2700.0, 3600.0,
];

const MIB: u64 = 1 << 20;

const GIB: u64 = 1 << 30;

/// Classes of image sizes, the largest first: the size in bytes that an image exceeds, and the value of the label.
const IMAGE_SIZES: [(u64, &str); 12] = [
    (100 * GIB, "GT100GB"),
    (60 * GIB, "60GB-100GB"),
    (40 * GIB, "40GB-60GB"),
    (30 * GIB, "30GB-40GB"),
    (20 * GIB, "20GB-30GB"),
    (10 * GIB, "10GB-20GB"),
    (5 * GIB, "5GB-10GB"),
    (GIB, "1GB-5GB"),
    (500 * MIB, "500MB-1GB"),
    (100 * MIB, "100MB-500MB"),
    (10 * MIB, "10MB-100MB"),
    (0, "0-10MB"),
];

/// Metrics of images.
pub(super) struct ImageMetrics {
    pulls: HistogramVec,
    collected: IntCounterVec,
    /// Counts of image volumes: requested, mounted and failed. A volume counts as mounted if its container was created.
    volumes: [IntCounter; 3],
}

// === impl ImageMetrics ===

impl ImageMetrics {
    pub(super) fn new(all: &Registered<'_>) -> Self {
        Self {
            pulls: all.with_buckets(&PULLS).histograms(
                "image_pull_duration_seconds",
                "Duration in seconds to pull an image.",
                &["image_size_in_bytes"],
            ),
            collected: all.counters(
                "image_garbage_collected_total",
                "Total number of images garbage collected by the kubelet, whether through disk usage or image age.",
                &["reason"],
            ),
            volumes: [
                all.counter("image_volume_requested_total", "Number of requested image volumes."),
                all.counter(
                    "image_volume_mounted_succeed_total",
                    "Number of successful image volume mounts.",
                ),
                all.counter("image_volume_mounted_errors_total", "Number of failed image volume mounts."),
            ],
        }
    }
}

// === impl KubeletMetrics ===

impl KubeletMetrics {
    /// Counts a successful image pull. `size` is the size of the image in bytes, 0 if unknown.
    pub(crate) fn pulled(&self, size: u64, took: Duration) {
        self.images.pulls.with_label_values(&[image_size(size)]).observe(took.as_secs_f64());
    }

    /// Counts the removal of an unused image, because of its age or for space.
    pub(crate) fn image_collected(&self, for_age: bool) {
        self.images.collected.with_label_values(&[if for_age { "age" } else { "space" }]).inc();
    }

    /// Counts image volumes of a container, and whether the container could be created.
    pub(crate) fn image_volumes_mounted(&self, number: usize, succeeded: bool) {
        let number = u64::try_from(number).unwrap_or(u64::MAX);
        let [requested, mounted, failed] = &self.images.volumes;
        requested.inc_by(number);
        let result = if succeeded { mounted } else { failed };
        result.inc_by(number);
    }
}

/// The size class of an image. `N/A` for the unknown size 0.
fn image_size(bytes: u64) -> &'static str {
    IMAGE_SIZES.iter().find(|(above, _)| bytes > *above).map_or("N/A", |&(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_images_are_those_of_the_kubelet() {
        let names = [0, 1, 10 << 20, (10 << 20) + 1, 3 << 30, 200 << 30].map(image_size);
        assert_eq!(names, ["N/A", "0-10MB", "0-10MB", "10MB-100MB", "1GB-5GB", "GT100GB"]);
    }
}

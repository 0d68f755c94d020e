//! Samples of metrics in the text format of Prometheus.

use std::fmt::Write as _;

/// A histogram. Its owner knows the upper bounds of the buckets.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    /// Number of values up to each bound. Empty before the first value.
    buckets: Vec<u64>,
    pub(crate) count: u64,
    sum: f64,
}

/// Writes the lines HELP and TYPE of a metric, if the metric has samples.
pub(crate) fn head(text: &mut String, name: &str, kind: &str, help: &str, samples: usize) {
    if samples > 0 {
        // Writing to memory cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }
}

/// Writes a sample.
pub(crate) fn line(text: &mut String, name: &str, labels: &str, value: u64) {
    let _ = writeln!(text, "{name}{{{labels}}} {value}");
}

// === impl Histogram ===

impl Histogram {
    /// Counts a value. `bounds` are the same in all calls.
    pub(crate) fn observe(&mut self, bounds: &[f64], value: f64) {
        self.buckets.resize(bounds.len(), 0);
        for (count, bound) in self.buckets.iter_mut().zip(bounds) {
            *count += u64::from(value <= *bound);
        }
        self.count += 1;
        self.sum += value;
    }

    /// Writes the samples.
    pub(crate) fn write(&self, text: &mut String, name: &str, labels: &str, bounds: &[f64]) {
        let comma = if labels.is_empty() { "" } else { "," };
        for (count, bound) in self.buckets.iter().zip(bounds) {
            line(text, &format!("{name}_bucket"), &format!("{labels}{comma}le=\"{bound}\""), *count);
        }
        line(text, &format!("{name}_bucket"), &format!("{labels}{comma}le=\"+Inf\""), self.count);
        let _ = writeln!(text, "{name}_sum{{{labels}}} {}", self.sum);
        line(text, &format!("{name}_count"), labels, self.count);
    }
}

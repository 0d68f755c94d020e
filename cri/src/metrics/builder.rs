//! Builder for the metrics of one pod or container.

use coracle_proto::cri;

use super::descriptor::{BASE_LABELS, Descriptor};

/// A list of metrics with common labels.
#[derive(Debug)]
pub(super) struct MetricBuilder {
    labels: [String; BASE_LABELS.len()],
    timestamp: i64,
    pub(super) metrics: Vec<cri::Metric>,
}

impl MetricBuilder {
    /// `labels` are the values of [`BASE_LABELS`], in its order.
    pub(super) fn new(labels: [String; BASE_LABELS.len()], timestamp: i64) -> Self {
        Self { labels, timestamp, metrics: Vec::new() }
    }

    /// Time of the values, in Unix nanoseconds.
    pub(super) fn timestamp(&self) -> i64 {
        self.timestamp
    }

    /// Adds a value, with the values of the descriptor's own labels.
    pub(super) fn put(&mut self, descriptor: &Descriptor, own: &[&str], value: u64) {
        debug_assert_eq!(own.len(), descriptor.own_labels.len(), "{}", descriptor.name);
        let labels = self.labels.iter().cloned().chain(own.iter().map(|label| (*label).to_owned()));
        self.metrics.push(cri::Metric {
            name: descriptor.name.to_owned(),
            timestamp: self.timestamp,
            metric_type: descriptor.kind.into(),
            label_values: labels.collect(),
            value: Some(cri::UInt64Value { value }),
        });
    }

    /// Adds a value of a metric without own labels, if there is one.
    pub(super) fn put_some(&mut self, descriptor: &Descriptor, value: Option<u64>) {
        if let Some(value) = value {
            self.put(descriptor, &[], value);
        }
    }
}

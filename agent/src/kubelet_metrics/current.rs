//! Metrics that are read for one response.

use prometheus::{IntCounter, IntGaugeVec, Opts, core::Collector, proto::MetricFamily};

use super::{encoded, valid};

/// Values that are read for one response.
#[derive(Debug, Default)]
pub(crate) struct Current(pub(super) Vec<MetricFamily>);

// === impl Current ===

impl Current {
    /// Adds a gauge with its samples: values of the labels, and the sample's value. A gauge without samples is left
    /// out.
    pub(crate) fn gauge<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        labels: [&str; N],
        samples: impl IntoIterator<Item = ([String; N], u64)>,
    ) {
        let gauge = valid(IntGaugeVec::new(Opts::new(name, help), &labels));
        for (values, value) in samples {
            gauge.with_label_values(&values).set(i64::try_from(value).unwrap_or(i64::MAX));
        }
        self.add(&gauge);
    }

    /// Adds a counter without labels.
    pub(crate) fn counter(&mut self, name: &str, help: &str, value: u64) {
        let counter = valid(IntCounter::new(name, help));
        counter.inc_by(value);
        self.add(&counter);
    }

    /// The metrics in Prometheus' text format.
    pub(crate) fn text(&self) -> String {
        encoded(&self.0)
    }

    fn add(&mut self, collector: &impl Collector) {
        // The encoder refuses a family without samples.
        self.0.extend(collector.collect().into_iter().filter(|family| !family.get_metric().is_empty()));
    }
}

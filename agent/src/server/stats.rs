//! `/metrics/resource`: usage of the node, its pods and their containers, for a metrics server.

use std::fmt::Write;
use std::time::Duration;

use coracle_proto::cri::{CpuUsage, MemoryUsage, UInt64Value};
use coracle_values::metric_label::escaped;
use http::{Response, StatusCode};
use jiff::Timestamp;

use super::backend::Backend;
use super::node_usage::NodeUsage;
use super::pod_usage::{self, ContainerUsage, PodUsage};
use super::respond::{on_blocking_thread, typed};
use crate::runtime::Body;

/// Nanoseconds of a millisecond, the unit of timestamps in the format.
const NANOS_PER_MILLI: i64 = 1_000_000;

/// A sample of a metric.
#[derive(Clone, Copy)]
struct Sample {
    value: f64,
    /// Unix time in nanoseconds at which the value was read; 0 means unknown.
    at: i64,
}

/// A metric.
#[derive(Clone, Copy)]
struct Metric {
    name: &'static str,
    /// The metric's type in Prometheus' text format.
    kind: &'static str,
    help: &'static str,
}

/// A metric of pods or containers.
struct UsageMetric<T> {
    metric: Metric,
    /// The sample from the usage of one pod or container. None if the value is unknown.
    sample: fn(&T) -> Option<Sample>,
}

const NODE_CPU: Metric = Metric::counter(
    "node_cpu_usage_seconds_total",
    "[STABLE] Cumulative cpu time consumed by the node in core-seconds",
);
const NODE_MEMORY: Metric =
    Metric::gauge("node_memory_working_set_bytes", "[STABLE] Current working set of the node in bytes");
const NODE_SWAP: Metric = Metric::gauge(
    "node_swap_usage_bytes",
    "[ALPHA] Current swap usage of the node in bytes. Reported only on non-windows systems",
);
const SCRAPE_ERROR: Metric = Metric::gauge(
    "resource_scrape_error",
    "[STABLE] 1 if there was an error while getting container metrics, 0 otherwise",
);

/// The metrics of containers.
const OF_CONTAINERS: [UsageMetric<ContainerUsage>; 5] = [
    UsageMetric {
        metric: Metric::counter(
            "container_cpu_usage_seconds_total",
            "[STABLE] Cumulative cpu time consumed by the container in core-seconds",
        ),
        sample: |one| cpu(one.stats.cpu),
    },
    UsageMetric {
        metric: Metric::gauge(
            "container_memory_working_set_bytes",
            "[STABLE] Current working set of the container in bytes",
        ),
        sample: |one| memory(one.stats.memory),
    },
    UsageMetric {
        metric: Metric::gauge(
            "container_start_time_seconds",
            "[STABLE] Start time of the container since unix epoch in seconds",
        ),
        sample: |one| (one.created > 0).then(|| Sample { value: seconds(one.created), at: 0 }),
    },
    UsageMetric {
        metric: Metric::gauge(
            "container_swap_limit_bytes",
            "[ALPHA] Current amount of the container swap limit in bytes. Reported only on non-windows systems",
        ),
        sample: |one| {
            let swap = one.stats.swap?;
            let used = swap.swap_usage_bytes.map_or(0, |used| used.value);
            let value = bytes(swap.swap_available_bytes?.value.saturating_add(used));
            Some(Sample { value, at: swap.timestamp })
        },
    },
    UsageMetric {
        metric: Metric::gauge(
            "container_swap_usage_bytes",
            "[ALPHA] Current amount of the container swap usage in bytes. Reported only on non-windows systems",
        ),
        sample: |one| {
            let swap = one.stats.swap?;
            sample(swap.swap_usage_bytes, swap.timestamp)
        },
    },
];

/// The metrics of pods.
const OF_PODS: [UsageMetric<PodUsage>; 2] = [
    UsageMetric {
        metric: Metric::counter(
            "pod_cpu_usage_seconds_total",
            "[STABLE] Cumulative cpu time consumed by the pod in core-seconds",
        ),
        sample: |pod| cpu(pod.stats.cpu),
    },
    UsageMetric {
        metric: Metric::gauge(
            "pod_memory_working_set_bytes",
            "[STABLE] Current working set of the pod in bytes",
        ),
        sample: |pod| memory(pod.stats.memory),
    },
];

// === impl Metric ===

impl Metric {
    const fn counter(name: &'static str, help: &'static str) -> Self {
        Self { name, kind: "counter", help }
    }

    const fn gauge(name: &'static str, help: &'static str) -> Self {
        Self { name, kind: "gauge", help }
    }
}

/// Answers a scrape. As upstream, an error of the runtime is a metric.
pub(super) async fn resource_metrics(backend: &Backend) -> Response<Body> {
    let now = i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or_default();
    match pod_usage::read(&*backend.runtime).await {
        Ok(pods) => {
            on_blocking_thread(move || {
                let mut text = of_node(&NodeUsage::now(), now);
                text.push_str(&of_pods(&pods));
                text.push_str(&plain(SCRAPE_ERROR, Sample { value: 0.0, at: 0 }));
                exposition(text)
            })
            .await
        }
        Err(error) => {
            tracing::warn!(error = error.message(), "cannot get the usage of pods for a scrape");
            exposition(plain(SCRAPE_ERROR, Sample { value: 1.0, at: 0 }))
        }
    }
}

fn of_node(node: &NodeUsage, now: i64) -> String {
    let sample = |value| Sample { value, at: now };
    let cpu = Duration::from_nanos(node.cpu_nanos).as_secs_f64();
    [
        plain(NODE_CPU, sample(cpu)),
        plain(NODE_MEMORY, sample(bytes(node.memory_working_set))),
        plain(NODE_SWAP, sample(bytes(node.swap_used))),
    ]
    .concat()
}

fn of_pods(pods: &[PodUsage]) -> String {
    let mut out = String::new();
    for UsageMetric { metric, sample } in OF_CONTAINERS {
        let containers = pods.iter().flat_map(|pod| pod.containers.iter().map(move |one| (pod, one)));
        let samples = containers.filter_map(|(pod, one)| {
            let labels = format!("container=\"{}\",{}", escaped(&one.name), labels(pod));
            Some((labels, sample(one)?))
        });
        family(&mut out, metric, samples);
    }
    for UsageMetric { metric, sample } in OF_PODS {
        family(&mut out, metric, pods.iter().filter_map(|pod| Some((labels(pod), sample(pod)?))));
    }
    out
}

/// The labels of a pod. They are escaped, because another client of the runtime may use any name.
fn labels(pod: &PodUsage) -> String {
    format!("namespace=\"{}\",pod=\"{}\"", escaped(&pod.namespace), escaped(&pod.name))
}

/// A metric with its samples. A metric without samples is left out.
fn family(out: &mut String, metric: Metric, samples: impl Iterator<Item = (String, Sample)>) {
    let Metric { name, kind, help } = metric;
    let mut samples = samples.peekable();
    if samples.peek().is_some() {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }
    for (labels, Sample { value, at }) in samples {
        let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
        let _ = match at / NANOS_PER_MILLI {
            0 => writeln!(out, "{name}{labels} {value}"),
            at => writeln!(out, "{name}{labels} {value} {at}"),
        };
    }
}

/// A metric without labels.
fn plain(metric: Metric, sample: Sample) -> String {
    let mut out = String::new();
    family(&mut out, metric, std::iter::once((String::new(), sample)));
    out
}

fn cpu(cpu: Option<CpuUsage>) -> Option<Sample> {
    let cpu = cpu?;
    let used = Duration::from_nanos(cpu.usage_core_nano_seconds?.value);
    Some(Sample { value: used.as_secs_f64(), at: cpu.timestamp })
}

fn memory(memory: Option<MemoryUsage>) -> Option<Sample> {
    let memory = memory?;
    sample(memory.working_set_bytes, memory.timestamp)
}

fn sample(value: Option<UInt64Value>, at: i64) -> Option<Sample> {
    Some(Sample { value: bytes(value?.value), at })
}

fn bytes(value: u64) -> f64 {
    value as f64
}

fn seconds(nanos: i64) -> f64 {
    Duration::from_nanos(nanos.unsigned_abs()).as_secs_f64()
}

/// A response in Prometheus' text format.
pub(super) fn exposition(text: String) -> Response<Body> {
    typed(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", text.into())
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::{ContainerStats, LinuxPodSandboxStats};

    use super::*;

    #[test]
    fn pods_and_containers_have_the_kubelets_metrics_with_their_times() {
        let cpu = Some(CpuUsage {
            timestamp: 5_000_000,
            usage_core_nano_seconds: Some(UInt64Value { value: 1_500_000_000 }),
            ..CpuUsage::default()
        });
        let container = ContainerUsage {
            name: "c\"".to_owned(),
            created: 2_000_000_000,
            stats: ContainerStats { cpu, ..ContainerStats::default() },
        };
        let pod = PodUsage {
            namespace: "n".to_owned(),
            name: "p".to_owned(),
            stats: LinuxPodSandboxStats { cpu, ..LinuxPodSandboxStats::default() },
            containers: vec![container],
            ..PodUsage::default()
        };
        let text = of_pods(&[pod]);
        for line in [
            "# TYPE container_cpu_usage_seconds_total counter",
            "container_cpu_usage_seconds_total{container=\"c\\\"\",namespace=\"n\",pod=\"p\"} 1.5 5",
            "container_start_time_seconds{container=\"c\\\"\",namespace=\"n\",pod=\"p\"} 2",
            "pod_cpu_usage_seconds_total{namespace=\"n\",pod=\"p\"} 1.5 5",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        assert!(!text.contains("memory"), "{text}");
    }

    #[test]
    fn the_node_has_its_metrics() {
        let node = NodeUsage { cpu_nanos: 2_000_000_000, memory_working_set: 7, ..NodeUsage::default() };
        let text = of_node(&node, 9_000_000);
        assert!(text.contains("\nnode_cpu_usage_seconds_total 2 9\n"), "{text}");
        assert!(text.contains("\nnode_memory_working_set_bytes 7 9\n"), "{text}");
    }
}

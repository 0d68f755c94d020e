//! `/metrics/resource`: usage of the node, its pods and their containers, for a metrics server.

use std::fmt::Write;
use std::time::Duration;

use coracle_proto::cri::{CpuUsage, MemoryUsage, UInt64Value};
use http::{Response, StatusCode};
use jiff::Timestamp;

use super::backend::Backend;
use super::node_usage::NodeUsage;
use super::pod_usage::{self, ContainerUsage, PodUsage};
use super::respond::{apart, typed};
use crate::runtime::Body;

/// Nanoseconds of a millisecond, the unit of timestamps in the format.
const NANOS_PER_MILLI: i64 = 1_000_000;

/// A value, and the time in nanoseconds at which it was read. Time 0 means unknown.
type Sample = (f64, i64);

/// A metric: name, type and help text.
type Metric = (&'static str, &'static str, &'static str);

const NODE_CPU: Metric = (
    "node_cpu_usage_seconds_total",
    "counter",
    "[STABLE] Cumulative cpu time consumed by the node in core-seconds",
);
const NODE_MEMORY: Metric =
    ("node_memory_working_set_bytes", "gauge", "[STABLE] Current working set of the node in bytes");
const NODE_SWAP: Metric = (
    "node_swap_usage_bytes",
    "gauge",
    "[ALPHA] Current swap usage of the node in bytes. Reported only on non-windows systems",
);
const SCRAPE_ERROR: Metric = (
    "resource_scrape_error",
    "gauge",
    "[STABLE] 1 if there was an error while getting container metrics, 0 otherwise",
);

/// A metric, and its sample from the usage of one pod or container. None if it is unknown.
type Sampled<T> = (Metric, fn(&T) -> Option<Sample>);

/// The metrics of containers.
const OF_CONTAINERS: [Sampled<ContainerUsage>; 5] = [
    (
        (
            "container_cpu_usage_seconds_total",
            "counter",
            "[STABLE] Cumulative cpu time consumed by the container in core-seconds",
        ),
        |one| cpu(one.stats.cpu),
    ),
    (
        (
            "container_memory_working_set_bytes",
            "gauge",
            "[STABLE] Current working set of the container in bytes",
        ),
        |one| memory(one.stats.memory),
    ),
    (
        (
            "container_start_time_seconds",
            "gauge",
            "[STABLE] Start time of the container since unix epoch in seconds",
        ),
        |one| (one.created > 0).then(|| (seconds(one.created), 0)),
    ),
    (
        (
            "container_swap_limit_bytes",
            "gauge",
            "[ALPHA] Current amount of the container swap limit in bytes. Reported only on non-windows systems",
        ),
        |one| {
            let swap = one.stats.swap?;
            let used = swap.swap_usage_bytes.map_or(0, |used| used.value);
            Some((bytes(swap.swap_available_bytes?.value.saturating_add(used)), swap.timestamp))
        },
    ),
    (
        (
            "container_swap_usage_bytes",
            "gauge",
            "[ALPHA] Current amount of the container swap usage in bytes. Reported only on non-windows systems",
        ),
        |one| {
            let swap = one.stats.swap?;
            sample(swap.swap_usage_bytes, swap.timestamp)
        },
    ),
];

/// The metrics of pods.
const OF_PODS: [Sampled<PodUsage>; 2] = [
    (
        (
            "pod_cpu_usage_seconds_total",
            "counter",
            "[STABLE] Cumulative cpu time consumed by the pod in core-seconds",
        ),
        |pod| cpu(pod.stats.cpu),
    ),
    (("pod_memory_working_set_bytes", "gauge", "[STABLE] Current working set of the pod in bytes"), |pod| {
        memory(pod.stats.memory)
    }),
];

/// Answers a scrape. As upstream, an error of the runtime is a metric.
pub(super) async fn resource_metrics(backend: &Backend) -> Response<Body> {
    let now = i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or_default();
    match pod_usage::read(&*backend.runtime).await {
        Ok(pods) => {
            apart(move || {
                let mut text = of_node(&NodeUsage::now(), now);
                text.push_str(&of_pods(&pods));
                text.push_str(&plain(SCRAPE_ERROR, (0.0, 0)));
                exposition(text)
            })
            .await
        }
        Err(error) => {
            tracing::warn!(error = error.message(), "cannot get the usage of pods for a scrape");
            exposition(plain(SCRAPE_ERROR, (1.0, 0)))
        }
    }
}

fn of_node(node: &NodeUsage, now: i64) -> String {
    let cpu = Duration::from_nanos(node.cpu_nanos).as_secs_f64();
    [
        plain(NODE_CPU, (cpu, now)),
        plain(NODE_MEMORY, (bytes(node.memory_working_set), now)),
        plain(NODE_SWAP, (bytes(node.swap_used), now)),
    ]
    .concat()
}

fn of_pods(pods: &[PodUsage]) -> String {
    let mut out = String::new();
    for (metric, value) in OF_CONTAINERS {
        let containers = pods.iter().flat_map(|pod| pod.containers.iter().map(move |one| (pod, one)));
        let samples = containers.filter_map(|(pod, one)| {
            let labels = format!("container=\"{}\",{}", escaped(&one.name), labels(pod));
            Some((labels, value(one)?))
        });
        family(&mut out, metric, samples);
    }
    for (metric, value) in OF_PODS {
        family(&mut out, metric, pods.iter().filter_map(|pod| Some((labels(pod), value(pod)?))));
    }
    out
}

fn labels(pod: &PodUsage) -> String {
    format!("namespace=\"{}\",pod=\"{}\"", escaped(&pod.namespace), escaped(&pod.name))
}

/// Escapes the value of a label: another client of the runtime may use any name.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A metric with its samples. One without samples is left out.
fn family(out: &mut String, (name, kind, help): Metric, samples: impl Iterator<Item = (String, Sample)>) {
    let mut samples = samples.peekable();
    if samples.peek().is_some() {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }
    for (labels, (value, at)) in samples {
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
    Some((used.as_secs_f64(), cpu.timestamp))
}

fn memory(memory: Option<MemoryUsage>) -> Option<Sample> {
    let memory = memory?;
    sample(memory.working_set_bytes, memory.timestamp)
}

fn sample(value: Option<UInt64Value>, at: i64) -> Option<Sample> {
    Some((bytes(value?.value), at))
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

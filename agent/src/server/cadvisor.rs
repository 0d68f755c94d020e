//! `/metrics/cadvisor`: the runtime's metrics of pods and containers in Prometheus' text format.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::time::Duration;

use coracle_proto::cri::{
    ContainerStats, ListContainerStatsRequest, ListMetricDescriptorsRequest, ListPodSandboxMetricsRequest,
    Metric, MetricDescriptor, MetricType, PodSandboxMetrics,
};
use http::Response;

use super::backend::Backend;
use super::respond::{Refused, on_blocking_thread};
use super::stats::exposition;
use crate::kubelet_metrics::Current;
use crate::node::MachineProperties;
use crate::runtime::Body;

/// Nanoseconds of a millisecond, the unit of timestamps in the format.
const NANOS_PER_MILLI: i64 = 1_000_000;
/// The metric whose values the CRI rounds to seconds. Seconds are too coarse for rates of mostly idle containers.
const CPU_USAGE: &str = "container_cpu_usage_seconds_total";

/// A sample of a metric.
struct Sample<'a> {
    metric: &'a Metric,
    /// The value with fractions, if it is known.
    exact: Option<f64>,
}

/// Answers a scrape.
pub(super) async fn metrics(backend: &Backend) -> Response<Body> {
    let descriptors = backend.runtime.list_metric_descriptors(ListMetricDescriptorsRequest {}).await;
    let pods = backend.runtime.list_pod_sandbox_metrics(ListPodSandboxMetricsRequest {}).await;
    let stats = backend.runtime.list_container_stats(ListContainerStatsRequest::default()).await;
    match descriptors.and_then(|descriptors| Ok((descriptors.descriptors, pods?.pod_metrics, stats?.stats))) {
        Ok((descriptors, pods, stats)) => {
            let mut text = machine(&backend.properties);
            on_blocking_thread(move || {
                text.push_str(&render(&descriptors, &pods, &cpu_seconds(&stats)));
                exposition(text)
            })
            .await
        }
        Err(status) => Refused::by_runtime(&status).answer(),
    }
}

/// cAdvisor's metrics of the machine.
fn machine(properties: &MachineProperties) -> String {
    let info = &properties.info;
    let values = [&info.boot_id, &info.machine_id, &info.system_uuid].map(String::clone);
    let swap = info.swap.as_ref().and_then(|swap| swap.capacity).unwrap_or_default();
    let mut current = Current::default();
    for (name, help, value) in [
        ("machine_cpu_cores", "Number of logical CPU cores.", properties.cpu_millis() / 1000),
        ("machine_memory_bytes", "Amount of memory installed on the machine.", properties.memory()),
        ("machine_swap_bytes", "Amount of swap memory available on the machine.", swap),
    ] {
        let sample = (values.clone(), u64::try_from(value).unwrap_or_default());
        current.gauge(name, help, ["boot_id", "machine_id", "system_uuid"], [sample]);
    }
    current.text()
}

/// Processor time of containers by their ids, with fractions of seconds.
fn cpu_seconds(stats: &[ContainerStats]) -> HashMap<&str, f64> {
    let seconds = |stats: &ContainerStats| {
        let nanos = stats.cpu.as_ref()?.usage_core_nano_seconds.as_ref()?.value;
        Some(Duration::from_nanos(nanos).as_secs_f64())
    };
    stats.iter().filter_map(|stats| Some((stats.attributes.as_ref()?.id.as_str(), seconds(stats)?))).collect()
}

/// The samples, grouped by metric as the format requires. As in the kubelet, a sample is left out if it has no
/// descriptor, or another number of labels than its descriptor.
fn render(descriptors: &[MetricDescriptor], pods: &[PodSandboxMetrics], cpu: &HashMap<&str, f64>) -> String {
    let valid = descriptors.iter().filter(|descriptor| is_valid(descriptor));
    let known: HashMap<&str, &MetricDescriptor> =
        valid.map(|descriptor| (descriptor.name.as_str(), descriptor)).collect();
    let mut families: BTreeMap<&str, Vec<Sample<'_>>> = BTreeMap::new();
    for sample in pods.iter().flat_map(|pod| samples(pod, cpu)) {
        let name = sample.metric.name.as_str();
        let number = sample.metric.label_values.len();
        if known.get(name).is_some_and(|descriptor| descriptor.label_keys.len() == number) {
            families.entry(name).or_default().push(sample);
        }
    }
    let mut out = String::new();
    for (name, samples) in families {
        if let (Some(descriptor), Some(first)) = (known.get(name), samples.first()) {
            family(&mut out, descriptor, first.metric.metric_type());
            samples.into_iter().for_each(|one| sample(&mut out, descriptor, one));
        }
    }
    out
}

/// The samples of a pod and its containers.
fn samples<'a>(pod: &'a PodSandboxMetrics, cpu: &'a HashMap<&str, f64>) -> impl Iterator<Item = Sample<'a>> {
    let of_containers = pod.container_metrics.iter().flat_map(|container| {
        let seconds = cpu.get(container.container_id.as_str()).copied();
        container
            .metrics
            .iter()
            .map(move |metric| Sample { metric, exact: seconds.filter(|_| is_total_of_processors(metric)) })
    });
    pod.metrics.iter().map(|metric| Sample { metric, exact: None }).chain(of_containers)
}

/// Whether a sample is the processor time on all processors together. Another runtime may have one sample for each
/// processor.
fn is_total_of_processors(metric: &Metric) -> bool {
    metric.name == CPU_USAGE && metric.label_values.last().is_some_and(|cpu| cpu == "total")
}

/// Whether a descriptor's names are valid in the format. Another runtime may send any text.
fn is_valid(descriptor: &MetricDescriptor) -> bool {
    let is_name = |name: &String| {
        name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
            && name.chars().all(|other| other.is_ascii_alphanumeric() || other == '_')
    };
    is_name(&descriptor.name) && descriptor.label_keys.iter().all(is_name)
}

fn family(out: &mut String, descriptor: &MetricDescriptor, kind: MetricType) {
    let kind = match kind {
        MetricType::Counter => "counter",
        MetricType::Gauge => "gauge",
    };
    let (name, help) = (&descriptor.name, descriptor.help.replace('\\', "\\\\").replace('\n', "\\n"));
    // Writing to a string cannot fail.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn sample(out: &mut String, descriptor: &MetricDescriptor, sample: Sample<'_>) {
    let Sample { metric, exact } = sample;
    out.push_str(&metric.name);
    for (at, (key, value)) in descriptor.label_keys.iter().zip(&metric.label_values).enumerate() {
        let _ = write!(out, "{}{key}=\"", if at == 0 { '{' } else { ',' });
        value.chars().for_each(|other| match other {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            _ => out.push(other),
        });
        out.push('"');
    }
    if !descriptor.label_keys.is_empty() {
        out.push('}');
    }
    let whole = || metric.value.map_or(0, |value| value.value).to_string();
    let value = exact.map_or_else(whole, |exact| exact.to_string());
    let _ = match metric.timestamp {
        0 => writeln!(out, " {value}"),
        nanos => writeln!(out, " {value} {}", nanos / NANOS_PER_MILLI),
    };
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::{ContainerAttributes, ContainerMetrics, CpuUsage, UInt64Value};

    use super::*;

    fn descriptor(name: &str, label_keys: &[&str]) -> MetricDescriptor {
        let label_keys = label_keys.iter().map(|key| (*key).to_owned()).collect();
        MetricDescriptor { name: name.to_owned(), help: format!("Help of {name}."), label_keys }
    }

    fn metric(name: &str, values: &[&str], kind: MetricType, value: u64) -> Metric {
        Metric {
            name: name.to_owned(),
            timestamp: 1_700_000_000_123_456_789,
            metric_type: kind.into(),
            label_values: values.iter().map(|value| (*value).to_owned()).collect(),
            value: Some(UInt64Value { value }),
        }
    }

    #[test]
    fn the_machine_has_cadvisors_metrics() {
        let text = machine(&crate::server::tests::properties());
        let labels = "boot_id=\"b\",machine_id=\"m\",system_uuid=\"s\"";
        for (name, value) in [("cpu_cores", 2), ("memory_bytes", 1 << 20), ("swap_bytes", 0)] {
            let line = format!("machine_{name}{{{labels}}} {value}");
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn samples_are_grouped_by_metric_with_their_labels() {
        let descriptors =
            [descriptor("container_b_total", &["container", "pod"]), descriptor("container_a", &["pod"])];
        let of = |pod: &str, value| PodSandboxMetrics {
            metrics: vec![metric("container_a", &[pod], MetricType::Gauge, value)],
            container_metrics: vec![ContainerMetrics {
                metrics: vec![metric("container_b_total", &["c", pod], MetricType::Counter, value)],
                ..Default::default()
            }],
            ..Default::default()
        };
        let wanted = "# HELP container_a Help of container_a.\n# TYPE container_a gauge\n\
                      container_a{pod=\"p\"} 1 1700000000123\ncontainer_a{pod=\"q\"} 2 1700000000123\n\
                      # HELP container_b_total Help of container_b_total.\n# TYPE container_b_total counter\n\
                      container_b_total{container=\"c\",pod=\"p\"} 1 1700000000123\n\
                      container_b_total{container=\"c\",pod=\"q\"} 2 1700000000123\n";
        assert_eq!(render(&descriptors, &[of("p", 1), of("q", 2)], &HashMap::new()), wanted);
    }

    #[test]
    fn processor_time_of_containers_has_fractions() {
        let descriptors = [descriptor(CPU_USAGE, &["cpu"]), descriptor("other", &["cpu"])];
        let cpu = CpuUsage {
            usage_core_nano_seconds: Some(UInt64Value { value: 1_250_000_000 }),
            ..Default::default()
        };
        let attributes = Some(ContainerAttributes { id: "i".to_owned(), ..Default::default() });
        let stats =
            [ContainerStats { attributes, cpu: Some(cpu), ..Default::default() }, ContainerStats::default()];
        let pod = PodSandboxMetrics {
            metrics: vec![metric(CPU_USAGE, &[""], MetricType::Counter, 2)],
            container_metrics: vec![ContainerMetrics {
                container_id: "i".to_owned(),
                metrics: [("other", "total"), (CPU_USAGE, "total"), (CPU_USAGE, "cpu00")]
                    .map(|(name, cpu)| metric(name, &[cpu], MetricType::Counter, 1))
                    .to_vec(),
            }],
            ..Default::default()
        };
        let rendered = render(&descriptors, &[pod], &cpu_seconds(&stats));
        let values: Vec<&str> = rendered
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split(' ').nth(1))
            .collect();
        assert_eq!(values, ["2", "1.25", "1", "1"], "{rendered}");
    }

    #[test]
    fn text_of_a_runtime_cannot_forge_samples() {
        let descriptors =
            [descriptor("a", &["image"]), descriptor("x 1\ny", &[]), descriptor("b", &["k=\"\"} 1\nz{l"])];
        let metrics = vec![
            metric("a", &["i\"} 1\nforged 2 \\"], MetricType::Gauge, 3),
            metric("a", &[], MetricType::Gauge, 4),
            metric("x 1\ny", &[], MetricType::Gauge, 5),
            metric("b", &["v"], MetricType::Gauge, 6),
            metric("unknown", &[], MetricType::Gauge, 7),
        ];
        let rendered =
            render(&descriptors, &[PodSandboxMetrics { metrics, ..Default::default() }], &HashMap::new());
        let lines: Vec<&str> = rendered.lines().collect();
        assert_eq!(lines[2..], ["a{image=\"i\\\"} 1\\nforged 2 \\\\\"} 3 1700000000123"], "{rendered}");
    }
}
